import collections

import numpy as np
import tensorflow_federated as tff
from absl.testing import absltest, parameterized

from tfdp_fl import aggregators
from tfdp_fl.aggregators import state as state_lib

STATE = state_lib.AggregatorState((), 1, (), ())
SCALAR = tff.TensorType(np.float32)


def ours(**sums):
    return aggregators.FixedClippingFactory(
        clip_norm=1.0, noise_multiplier=1.0, clients_per_round=2, **sums
    )


def learning_state(aggregator=STATE, client_work=(), **parts):
    return tff.learning.templates.LearningAlgorithmState(
        **{
            "global_model_weights": (np.zeros(3),),
            "distributor": (),
            "client_work": client_work,
            "aggregator": aggregator,
            "finalizer": collections.OrderedDict(learning_rate=1.0),
            **parts,
        }
    )


class AccountableStateTest(parameterized.TestCase):
    @parameterized.parameters(
        ((),),
        (collections.OrderedDict(learning_rate=np.float32(0.1)),),
        (np.int32(3),),
    )
    def test_federated_averaging(self, client_work):
        state = learning_state(client_work=client_work)
        self.assertIs(state_lib.accountable_state(state), STATE)

    def test_constant_zeroing_and_clipping(self):
        state = (
            tff.aggregators.zeroing_factory(
                5.0, tff.aggregators.clipping_factory(1.0, ours())
            )
            .create(SCALAR)
            .initialize()
        )
        for each in (state, learning_state(state)):
            found = state_lib.accountable_state(each)
            self.assertIsInstance(found, state_lib.AggregatorState)

    @parameterized.named_parameters(
        (
            "zeroing",
            lambda norm: tff.aggregators.zeroing_factory(norm, ours()),
        ),
        (
            "clipping",
            lambda norm: tff.aggregators.clipping_factory(norm, ours()),
        ),
        (
            "inside",
            lambda norm: tff.aggregators.zeroing_factory(
                5.0, tff.aggregators.clipping_factory(norm, ours())
            ),
        ),
    )
    def test_a_norm_that_follows_the_clients_is_refused(self, wrapped):
        norm = tff.aggregators.PrivateQuantileEstimationProcess.no_noise(1.0, 0.5, 0.2)
        state = wrapped(norm).create(SCALAR).initialize()
        with self.assertRaisesRegex(ValueError, "constant.*build_dp_fed_avg"):
            state_lib.accountable_state(learning_state(state))

    def test_means_around_the_mechanism_are_refused(self):
        weighted = tff.aggregators.MeanFactory(ours()).create(SCALAR, SCALAR)
        unweighted = tff.aggregators.UnweightedMeanFactory(ours()).create(SCALAR)
        for process in (weighted, unweighted):
            state = process.initialize()
            with self.assertRaisesRegex(ValueError, "build_dp_fed_avg"):
                state_lib.accountable_state(state)
            with self.assertRaisesRegex(ValueError, "divides once more"):
                state_lib.accountable_state(learning_state(state))

    def test_sums_whose_bounds_follow_the_clients_are_refused(self):
        norm = tff.aggregators.PrivateQuantileEstimationProcess.no_noise(1.0, 0.5, 0.2)
        for sums in (
            {"inner_factory": tff.aggregators.SecureSumFactory(norm)},
            {"scalars_factory": tff.aggregators.SecureSumFactory(norm)},
        ):
            state = ours(**sums).create(SCALAR).initialize()
            with self.assertRaisesRegex(ValueError, "inner_factory"):
                state_lib.accountable_state(state)
        constant = {
            "inner_factory": tff.aggregators.SecureSumFactory(4.0, -4.0),
            "scalars_factory": tff.aggregators.SecureSumFactory(99.0),
        }
        state = ours(**constant).create(SCALAR).initialize()
        self.assertIs(state_lib.accountable_state(state), state)

    def test_what_is_no_sum_is_refused(self):
        for each in (
            ours(),
            tff.aggregators.UnweightedMeanFactory(),
            tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(1.0, 10, 1.0),
        ):
            with self.assertRaisesRegex(ValueError, "inner_factory.*a sum"):
                ours(inner_factory=each)

    @parameterized.named_parameters(
        ("gradients", {"client_work": ((np.zeros(3),), ())}),
        ("a_vector", {"client_work": np.zeros(3)}),
        ("vectors", {"client_work": {"momentum": np.zeros(3)}}),
        ("another_mechanism", {"distributor": (STATE,)}),
        ("nothing_of_ours", {"aggregator": ()}),
    )
    def test_what_else_may_be_released_is_refused(self, parts):
        with self.assertRaisesRegex(ValueError, "build_dp_fed_avg"):
            state_lib.accountable_state(learning_state(**parts))

    def test_kinds_of_rounds(self):
        fixed = ours().mechanism
        kind = state_lib.history_kind(fixed, None, "poisson")
        self.assertEqual(kind, np.int64(kind))
        # It is in checkpoints: the same on every machine.
        self.assertEqual(
            kind, state_lib.history_kind(ours().mechanism, None, "poisson")
        )
        self.assertNotEqual(kind, state_lib.history_kind(fixed, None, None))


if __name__ == "__main__":
    absltest.main()
