"""One hostile client moves a mean by S/m, ends nothing, and is counted.

What is too long for here, every way with every mechanism, is in
`tests/stress/hostile_stress.py`.
"""

import numpy as np
import pytest

from tests.keras import hostile

# What has no finite update: it is replaced by zero, and counted.
DISCARDED = ("nan", "inf", "minus_inf", "1e38", "minus_1e38", "one_nan")


def check_attack(trainer, without, name):
    """Asserts what holds of one client's attack."""
    outcome = trainer.round(hostile.ATTACKS[name])
    assert np.isfinite(outcome.weights).all()
    assert hostile.moved(outcome, without) <= trainer.bound(without), name
    assert outcome.history["cohort_size"] == hostile.CLIENTS
    assert outcome.history["failed_clients"] == 0
    if name in DISCARDED:
        assert outcome.history["discarded_clients"] == 1, name
    for each in ("loss", "accuracy", "mean_update_norm", "clipped_fraction"):
        assert np.isfinite(outcome.history[each]), (name, each)


def check_failure(trainer, without, name):
    """Asserts what holds where a client's data is no data."""
    outcome = trainer.round(hostile.FAILURES[name])
    assert outcome.history["failed_clients"] == 1, name
    if trainer.case.make().needs_exact_cohort:
        # Without its share the noise would fall short.
        assert outcome.history["abandoned_rounds"] == 1, name
        np.testing.assert_array_equal(outcome.weights, trainer.start)
        return
    most = trainer.bound(without, dropped_out=True)
    assert hostile.moved(outcome, without) <= most, name


@pytest.mark.parametrize(
    "name", ["fixed", "median", "correlated", "adaptive_local", "nbafl"]
)
def test_every_attack(name):
    trainer = hostile.Trainer(hostile.CASES[name], "streamed")
    without = trainer.without()
    for attack in hostile.ATTACKS:
        check_attack(trainer, without, attack)
    for failure in hostile.FAILURES:
        check_failure(trainer, without, failure)


@pytest.mark.parametrize(
    "way",
    [
        *("side_by_side", "few_side_by_side", "xla", "secure_aggregation"),
        *("sharded_side_by_side", "sharded_few_side_by_side"),
    ],
)
def test_other_ways(way):
    trainer = hostile.Trainer(hostile.CASES["fixed"], way)
    without = trainer.without()
    for attack in ("nan", "1e38", "denormal", "a_million_times", "cancelling"):
        check_attack(trainer, without, attack)


def test_the_bound_is_reached_and_arrays_are_refused_before_anything_starts():
    trainer = hostile.Trainer(hostile.CASES["fixed"], "one_by_one")
    # Others are numbers that can be made real, or the caller's own error.
    for name in hostile.FAILURES.keys() - {"raises", "complex", "objects"}:
        with pytest.raises((ValueError, TypeError)):
            trainer.round(hostile.FAILURES[name])
        assert trainer.fed.run is None
    attack = hostile.ATTACKS["a_million_times"]
    share = hostile.moved(trainer.round(attack), trainer.without())
    assert share > 0.9999 * hostile.CLIP / hostile.CLIENTS
