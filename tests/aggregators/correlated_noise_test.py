"""Correlated noise as a TFF aggregation factory."""

import json
import math

import numpy as np
import tensorflow_federated as tff
from absl.testing import parameterized

import tfdp_fl
from tfdp_fl import aggregators, learning

_SHAPES = ([10, 12], [10])
_ZEROS = [np.zeros(shape, np.float32) for shape in _SHAPES]
_TYPE = tff.to_type([tff.TensorType(np.float32, s) for s in _SHAPES])
_ROUNDS = 5


def _mechanism(strategy="banded", noise_multiplier=2.0, **options):
    return tfdp_fl.CorrelatedNoise(
        clip_norm=0.5,
        noise_multiplier=noise_multiplier,
        strategy=strategy,
        **{"rounds": _ROUNDS, "min_separation": 2, **options},
    )


def _process(mechanism, **options):
    return aggregators.from_mechanism(mechanism, 2, **options).create(_TYPE)


def _run(process, rounds):
    state = process.initialize()
    for _ in range(rounds):
        state = process.next(state, [_ZEROS] * 2).state
    return state


class CorrelatedNoiseTest(parameterized.TestCase):
    def test_past_the_last_round_nothing_comes_out(self):
        process = _process(_mechanism())
        state = _run(process, _ROUNDS)
        with self.assertRaisesRegex(Exception, "lies past its end"):
            process.next(state, [_ZEROS] * 2)

    def test_every_round_is_written_down_with_its_own_charge(self):
        for strategy in ("blt:2", "banded"):
            mechanism = _mechanism(strategy, max_participations=2)
            state = _run(_process(mechanism), _ROUNDS)
            events = [json.loads(line)["event"] for line in state.history.lines]
            costs = [event.get("noise_multiplier", math.inf) for event in events]
            charges = mechanism.generator.charges
            with np.errstate(divide="ignore"):
                np.testing.assert_allclose(costs, 2.0 / charges, rtol=1e-12)
            spent = self._epsilon(state, mechanism, "cyclic", accountant="pld")
            whole = tfdp_fl.accounting.gaussian_epsilon(
                2.0 / mechanism.generator.sensitivity, 1e-5
            )
            self.assertAlmostEqual(float(spent), whole, places=6)
            self.assertIn("correlated_noise_secret", spent.facts.caveats)

    @parameterized.parameters("poisson", "fixed_size", "shuffled")
    def test_other_samplings_are_refused(self, sampling):
        with self.assertRaisesRegex(ValueError, "sampling must be 'cyclic'"):
            _process(_mechanism(), sampling=sampling)
        state = _run(_process(_mechanism()), 1)
        with self.assertRaisesRegex(ValueError, "sampling must be 'cyclic'"):
            self._epsilon(state, _mechanism(), sampling)

    def test_a_state_of_other_noise_is_refused(self):
        first = _run(_process(_mechanism()), 1)
        for changed in (
            {"noise_multiplier": 3.0},
            {"strategy": "blt:2"},
            {"rounds": _ROUNDS + 1},
            {"min_separation": 3},
            {"max_participations": 1},
        ):
            with self.assertRaises(ValueError):
                self._epsilon(first, _mechanism(**changed), "cyclic")

    def test_clients_that_take_part_too_often_are_refused(self):
        mechanism = _mechanism(max_participations=1)
        state = _run(_process(mechanism), 1)
        self._epsilon(state, mechanism, "cyclic", max_participations=1)
        with self.assertRaisesRegex(ValueError, "max_participations"):
            self._epsilon(state, mechanism, "cyclic", max_participations=2)

    def _epsilon(self, state, mechanism, sampling, **options):
        return learning.epsilon(
            state,
            mechanism,
            sampling=sampling,
            num_clients=4,
            clients_per_round=2,
            delta=1e-5,
            **options,
        )

    def test_clients_that_come_as_they_like(self):
        mechanism = _mechanism()
        state = _run(_process(mechanism, sampling="separated"), 2)
        declared = self._epsilon(state, mechanism, "separated")
        plain = _run(_process(mechanism), 2)
        self.assertEqual(
            float(declared), float(self._epsilon(plain, mechanism, "cyclic"))
        )
        self.assertIn("nobody checked it", declared.statement)
        self.assertNotIn("fixed groups", declared.statement)
        self.assertIn("Clients came as they liked", declared.statement)
        with self.assertRaisesRegex(ValueError, "min_separation"):
            _process(mechanism, sampling="separated", num_clients=3)

    def test_values_of_unknown_shape_are_refused(self):
        factory = aggregators.from_mechanism(_mechanism(), 2)
        with self.assertRaisesRegex(ValueError, "shapes"):
            factory.create(tff.TensorType(np.float32, [None]))
