"""One hostile client moves a mean by S/m, ends nothing, and is counted.

What is too long for here, every way with every mechanism, is in
`tests/stress/hostile_stress.py`.
"""

from __future__ import annotations

import numpy as np
from absl.testing import parameterized

from tests.keras import hostile

# What has no finite update: it is replaced by zero, and counted.
DISCARDED = ("nan", "inf", "minus_inf", "1e38", "minus_1e38", "one_nan")
_MECHANISMS = ("fixed", "median", "correlated", "adaptive_local", "nbafl")
_FEW = ("nan", "1e38", "denormal", "a_million_times", "cancelling")


def check_attack(test, trainer, without, name):
    """Asserts what holds of one client's attack; returns the outcome."""
    outcome = trainer.round(hostile.ATTACKS[name])
    test.assertTrue(np.isfinite(outcome.weights).all())
    test.assertLessEqual(hostile.moved(outcome, without), trainer.bound(without), name)
    test.assertEqual(outcome.history["cohort_size"], hostile.CLIENTS)
    test.assertEqual(outcome.history["failed_clients"], 0)
    if name in DISCARDED:
        test.assertEqual(outcome.history["discarded_clients"], 1, name)
    for each in ("loss", "accuracy", "mean_update_norm", "clipped_fraction"):
        test.assertTrue(np.isfinite(outcome.history[each]), (name, each))
    return outcome


def check_failure(test, trainer, without, name):
    """Asserts what holds where a client's data is no data."""
    outcome = trainer.round(hostile.FAILURES[name])
    test.assertEqual(outcome.history["failed_clients"], 1, name)
    if trainer.case.make().needs_exact_cohort:
        # Without its share the noise would fall short.
        test.assertEqual(outcome.history["abandoned_rounds"], 1, name)
        np.testing.assert_array_equal(outcome.weights, trainer.start())
        return
    test.assertLessEqual(
        hostile.moved(outcome, without),
        trainer.bound(without, dropped_out=True),
        name,
    )


class HostileClientTest(parameterized.TestCase):
    @parameterized.parameters(*_MECHANISMS)
    def test_every_attack(self, name):
        trainer = hostile.Trainer(hostile.CASES[name], "streamed")
        without = trainer.without()
        for attack in hostile.ATTACKS:
            check_attack(self, trainer, without, attack)
        for failure in hostile.FAILURES:
            check_failure(self, trainer, without, failure)

    @parameterized.parameters(
        *("side_by_side", "few_side_by_side", "xla"),
        *("sharded_side_by_side", "sharded_few_side_by_side"),
        "secure_aggregation",
    )
    def test_other_ways(self, way):
        trainer = hostile.Trainer(hostile.CASES["fixed"], way)
        without = trainer.without()
        for attack in _FEW:
            check_attack(self, trainer, without, attack)

    def test_the_bound_is_reached(self):
        trainer = hostile.Trainer(hostile.CASES["fixed"], "one_by_one")
        attack = hostile.ATTACKS["a_million_times"]
        share = hostile.moved(trainer.round(attack), trainer.without())
        self.assertGreater(share, 0.9999 * hostile.CLIP / hostile.CLIENTS)


class ArraysTest(parameterized.TestCase):
    """Data that lies in arrays is refused before anything starts."""

    @parameterized.parameters(
        # Others are numbers that can be made real, or the caller's own error.
        *sorted(hostile.FAILURES.keys() - {"raises", "complex", "objects"})
    )
    def test_what_is_no_data(self, name):
        trainer = hostile.Trainer(hostile.CASES["fixed"], "one_by_one")
        with self.assertRaises((ValueError, TypeError)):
            trainer.round(hostile.FAILURES[name])
        self.assertIsNone(trainer.fed.run)
