"""What holds of every mechanism, in one round that is run as a runtime runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.mechanisms import Deployment

_NORMS = (0.05, 0.3, 0.5, 0.500001, 7.0, 1e4)
_M, _S, _Z = 8, 0.5, 1.4
_WIDE = [[100, 100], [100, 100], [5000]]
_DEPLOYMENT = Deployment(
    clients_per_round=_M,
    num_clients=20,
    sampling="fixed_size",
    rounds=10,
    num_variables=4,
)
# sigma over sensitivity of ten releases within epsilon = 8.
_ZETA = references.analytic_sigma(1.0, 8.0, 1e-5) * 10**0.5


def _mean(updates, bound, divisor):
    return references.fixed_clipping_mean(updates, bound, divisor)


def _of_layers(updates, bound, divisor):
    return [
        sum(v / max(1.0, np.linalg.norm(v) / bound) for v in layers) / divisor
        for layers in zip(*updates, strict=True)
    ]


@dataclasses.dataclass
class _Case:
    """A mechanism without noise, one with, and what the papers say of both.

    Attributes:
      quiet: Without noise.
      noisy: With noise.
      stddev: Of the mean of m zero updates, of three variables.
      mean: What `quiet` releases of updates.
      bound: S of the round.
      divisor: Of the mean of six; None: six, those who answered.
    """

    quiet: Any
    noisy: Any
    stddev: float
    mean: Callable = _mean
    bound: float = _S
    divisor: float | None = _M


_FIXED = {"clip_norm": _S, "noise_multiplier": _Z}
_Z_DELTA = references.update_noise_multiplier(_Z, 0.8)
_ADAPTIVE = {"initial_clip_norm": _S, "count_noise_stddev": 0.8}
_NBAFL = {"constant": 1.3, "weight_clip": _S}
_CASES = {
    "none": _Case(tfdp_fl.NoPrivacy(), None, 0.0, bound=np.inf, divisor=None),
    **{
        f"fixed_{site}": _Case(
            tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=0.0, noise_site=site),
            tfdp_fl.FixedClipping(**_FIXED, noise_site=site),
            _Z * _S / _M,
        )
        for site in ("server", "client")
    },
    **{
        f"adaptive_{site}": _Case(
            tfdp_fl.AdaptiveClipping(
                noise_multiplier=0.0, initial_clip_norm=_S, noise_site=site
            ),
            tfdp_fl.AdaptiveClipping(noise_multiplier=_Z, **_ADAPTIVE, noise_site=site),
            _Z_DELTA * _S / _M,
        )
        for site in ("server", "client")
    },
    "median": _Case(
        tfdp_fl.MedianClipping(noise_multiplier=0.0),
        None,
        0.0,
        bound=(0.5 + 0.500001) / 2,
    ),
    "local": _Case(
        tfdp_fl.LocalDP(clip_norm=_S, noise_multiplier=0.0),
        tfdp_fl.LocalDP(**_FIXED),
        _Z * _S / _M**0.5,
        divisor=None,
    ),
    "adaptive_local": _Case(
        tfdp_fl.AdaptiveLocalDP(epsilon=1e14, delta=0.5, clipping_radius=_S),
        tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5, clipping_radius=_S),
        2 * _S * _ZETA * 3**0.5 / _M**0.5,
        mean=_of_layers,
        divisor=None,
    ),
    "nbafl": _Case(
        tfdp_fl.NbAFL(epsilon=1e14, **_NBAFL),
        tfdp_fl.NbAFL(epsilon=100.0, **_NBAFL),
        references.nbafl_uplink_sigma(_S, 1.3, 10, 5, 100.0) / _M**0.5,
        divisor=None,
    ),
}
_NOISY = [name for name, case in _CASES.items() if case.noisy is not None]


def _round(mechanism, updates, shapes=4, **options):
    deployment = dataclasses.replace(_DEPLOYMENT, num_variables=shapes)
    query = mechanism.bind(deployment)
    return rounds.run_round(
        query,
        query.initial_global_state(),
        updates,
        clients_per_round=_M,
        num_examples=[5] * len(updates),
        **options,
    )


@pytest.mark.parametrize("name", _CASES)
def test_without_noise_it_is_the_papers_mean(name):
    case = _CASES[name]
    updates = rounds.updates_with_norms(_NORMS)
    done = _round(case.quiet, updates)
    wanted = case.mean(updates, case.bound, case.divisor or len(updates))
    for actual, expected in zip(done.mean, wanted, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(done.total.norm, sum(_NORMS), rtol=1e-6)
    if case.mean is _mean:
        assert float(done.total.clipped) == sum(n > case.bound for n in _NORMS)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", _CASES)
def test_a_bad_client_becomes_zero_before_clipping(name, bad):
    case = _CASES[name]
    updates = rounds.updates_with_norms([0.1, 0.2, 0.3])
    updates[1][2][1, 1] = bad
    done = _round(case.quiet, updates)
    good = [updates[0], updates[2]]
    # Of weights, n answers are left of 3.
    divisor = case.divisor or (2 if name == "nbafl" else 3)
    bound = 0.1 if name == "median" else case.bound
    expected = rounds.flat(case.mean(good, bound, divisor))
    np.testing.assert_allclose(rounds.flat(done.mean), expected, atol=1e-6)
    assert float(done.total.discarded) == 1
    np.testing.assert_allclose(done.total.norm, 0.4, rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in _CASES if n not in ("none", "median")])
def test_one_client_moves_the_sum_by_at_most_its_clip(name):
    case = _CASES[name]
    updates = rounds.updates_with_norms([0.3] * 5)
    before = _round(case.quiet, updates).total
    updates[2] = [v * np.float32(1e6) for v in updates[2]]
    after = _round(case.quiet, updates).total
    without = _round(case.quiet, updates[:2] + updates[3:]).total
    most = _S * {"adaptive_local": 2, "nbafl": 5}.get(name, 1)  # Layers; examples.
    for other, factor in ((before, 2), (without, 1)):
        moved = np.linalg.norm(rounds.flat(after.update) - rounds.flat(other.update))
        assert moved <= factor * most * (1 + 1e-5)
    assert moved >= 0.999 * most


@pytest.mark.parametrize("name", _NOISY)
def test_noise_has_its_scale_and_is_nobody_elses(name):
    mechanism, stddev = _CASES[name].noisy, _CASES[name].stddev
    zeros = rounds.zero_updates(_M, _WIDE)
    zeros[1][0][0, 0] = np.nan  # Who has nothing to say has noise all the same.
    if name == "nbafl":
        zeros[1][0][0, 0] = 0.0  # But for who has no weight.
    z = mechanism.noise_multiplier_at(0)
    first, second = (_round(mechanism, zeros, 3, noise_multiplier=z) for _ in range(2))
    statistics.assert_gaussian(rounds.flat(first.mean), stddev)
    statistics.assert_uncorrelated(first.mean[0], first.mean[1])
    statistics.assert_uncorrelated(rounds.flat(first.mean), rounds.flat(second.mean))
    shares = [rounds.flat(record.update) for record in first.records[:3]]
    if mechanism.noise_site == "server":
        assert not np.any(shares)
        return
    each = stddev * _M**0.5 * (5 if name == "nbafl" else 1)
    for k, share in enumerate(shares):
        statistics.assert_gaussian(share, each)
        statistics.assert_uncorrelated(share, shares[k - 1])


@pytest.mark.parametrize("name", _NOISY)
def test_a_seed_repeats_it(name):
    mechanism = _CASES[name].noisy
    updates = rounds.updates_with_norms([1.0, 2.0])
    first, second, other = (
        rounds.flat(_round(mechanism, updates, noise_multiplier=1.0, seed=seed).mean)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("name", _CASES)
def test_an_empty_cohort(name):
    mechanism = _CASES[name].noisy or _CASES[name].quiet
    query = mechanism.bind(dataclasses.replace(_DEPLOYMENT, num_variables=3))
    done = rounds.run_round(
        query,
        query.initial_global_state(),
        [],
        noise_multiplier=_Z,
        clients_per_round=_M,
        template=rounds.zero_updates(1, _WIDE)[0],
    )
    if _CASES[name].noisy is not None and mechanism.noise_site == "server":
        statistics.assert_gaussian(rounds.flat(done.mean), _CASES[name].stddev)
    else:
        assert not np.any(rounds.flat(done.mean))
