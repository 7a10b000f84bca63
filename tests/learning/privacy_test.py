import math

import dp_accounting
import tensorflow_privacy as tfp
from absl.testing import absltest, parameterized

from tfdp_fl import accounting, learning, mechanisms
from tfdp_fl.aggregators import AggregatorState
from tfdp_fl.mechanisms import mechanism as mechanism_lib

DELTA = 1e-5


def state_after(mechanism, rounds, clients_per_round=100):
    """Returns what an aggregator's state says after a number of rounds."""
    deployment = mechanism_lib.Deployment(
        clients_per_round=clients_per_round, rounds=10
    )
    event = dp_accounting.NonPrivateDpEvent()
    if mechanism.guarantee == "central" and rounds:
        event = mechanism.round_event(rounds - 1, deployment)
    return AggregatorState(
        query_state=mechanism_lib.QueryState(
            1.0, 1.0, deployment.cohort_size(max(rounds - 1, 0))
        ),
        rounds=rounds,
        sum_state=(),
        dp_event=event.to_named_tuple(),
        is_init_state=not rounds,
    )


def fixed(noise_multiplier):
    return mechanisms.FixedClipping(
        clip_norm=1.0, noise_multiplier=noise_multiplier
    )


class EpsilonTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("poisson", "poisson", 7.8993, 7.0466),
        ("fixed_size", "fixed_size", 83.9369, 36.7715),
    )
    def test_table_of_the_design(self, sampling, rdp, pld):
        # N = 1000, m = 100, z = 1, T = 100, delta = 1e-5.
        state = state_after(fixed(1.0), 100)
        arguments = {
            "sampling": sampling,
            "num_clients": 1000,
            "clients_per_round": 100,
            "delta": DELTA,
        }
        value = learning.epsilon(state, fixed(1.0), **arguments)
        self.assertAlmostEqual(value / rdp, 1, delta=0.01)
        value = learning.epsilon(
            state, fixed(1.0), accountant="pld", **arguments
        )
        self.assertAlmostEqual(value / pld, 1, delta=0.01)

    def test_shuffled_counts_passes(self):
        # Ten cohorts of 100 are one pass: every client once, no more.
        value = learning.epsilon(
            state_after(fixed(2.0), 10),
            fixed(2.0),
            sampling="shuffled",
            num_clients=1000,
            clients_per_round=100,
            delta=DELTA,
        )
        self.assertAlmostEqual(
            value,
            accounting.epsilon(2.0, "shuffled", 1000, 100, 10, DELTA),
        )

    def test_schedules(self):
        noise, clients = (1.0, 2.0, 4.0), (100, 50, 10)
        value = learning.epsilon(
            state_after(fixed(noise), 2, clients),
            fixed(noise),
            sampling="poisson",
            num_clients=1000,
            clients_per_round=clients,
            delta=DELTA,
        )
        self.assertAlmostEqual(
            value,
            accounting.epsilon(
                noise[:2], "poisson", 1000, clients[:2], 2, DELTA
            ),
        )

    def test_local_guarantee_is_that_of_one_client(self):
        mechanism = mechanisms.LocalDP(clip_norm=1.0, epsilon=8.0, delta=DELTA)

        def spent(rounds, **options):
            return learning.epsilon(
                state_after(mechanism, rounds),
                mechanism,
                sampling="poisson",
                num_clients=1000,
                clients_per_round=100,
                delta=DELTA,
                rounds=10,
                **options,
            )

        self.assertEqual(spent(0), 0.0)
        self.assertLess(spent(5), 8.0)
        # Nobody was in more than 10 rounds, which is what it was made for.
        self.assertAlmostEqual(spent(10), 8.0, places=4)
        self.assertAlmostEqual(spent(10, max_participations=3), 8.0, places=4)

    def test_no_privacy_is_infinite(self):
        mechanism = mechanisms.NoPrivacy()
        value = learning.epsilon(
            state_after(mechanism, 1),
            mechanism,
            sampling="poisson",
            num_clients=1000,
            clients_per_round=100,
            delta=DELTA,
        )
        self.assertEqual(value, math.inf)

    def test_other_events_are_charged_as_declared(self):
        event = dp_accounting.LaplaceDpEvent(2.0)
        mechanism = mechanisms.QueryMechanism(
            query=tfp.GaussianSumQuery(1.0, 1.0), dp_event=event
        )
        (charge,) = learning.privacy_charges(
            state_after(mechanism, 1),
            mechanism,
            sampling="poisson",
            num_clients=1000,
            clients_per_round=100,
        )
        self.assertEqual(charge.event, event)

    @parameterized.named_parameters(
        ("noise", fixed(2.0), 100, "noise multiplier of 1.0"),
        ("no_noise", mechanisms.NoPrivacy(), 99, "clients_per_round"),
        ("clients", fixed(1.0), 50, "clients_per_round"),
    )
    def test_declarations_that_the_state_contradicts(
        self, mechanism, clients_per_round, message
    ):
        with self.assertRaisesRegex(ValueError, message):
            learning.epsilon(
                state_after(fixed(1.0), 3),
                mechanism,
                sampling="poisson",
                num_clients=1000,
                clients_per_round=clients_per_round,
                delta=DELTA,
            )


if __name__ == "__main__":
    absltest.main()
