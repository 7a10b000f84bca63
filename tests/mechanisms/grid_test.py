import functools
import itertools
import math
import os
import pickle
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from scipy import special, stats

import tfdp_fl
from tests.mechanisms import rounds, statistics
from tfdp_fl import algorithm
from tfdp_fl.mechanisms import grid

_S, _M = 0.3, 4
_STEP = float(np.float32(_S)) / grid.STEPS
_LARGE = ((300, 200), (20_000,))


def _query(shapes):
    mechanism = tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=1.0)
    where = {"num_variables": len(shapes), "shapes": tuple(map(tuple, shapes))}
    return rounds.bound(mechanism, _M, noise_generator="exact", **where)


def _round(updates, z=0.0):
    how = {"noise_multiplier": z, "clients_per_round": _M}
    return rounds.run_round(*_query([u.shape for u in updates[0]]), updates, **how)


def _squares(update) -> int:
    """Returns the squared norm of an update's record, in whole numbers."""
    (record,) = _round([update]).records
    return sum(int(each) ** 2 for part in record.update for each in np.ravel(part))


def test_a_sum_is_of_whole_numbers_in_any_order():
    norms = [0.1, 7.0, 0.3, 0.2]
    updates = rounds.updates_with_norms(norms)
    done = [_round(list(order)) for order in itertools.permutations(updates)]
    totals = {rounds.flat(each.total.update).tobytes() for each in done}
    assert len(totals) == 1
    total = np.frombuffer(totals.pop())
    np.testing.assert_array_equal(total, np.round(total))
    assert np.abs(total).max() > 1e4
    shares = [min(1, _S / norm) for norm in norms]
    wanted = sum(s * rounds.flat(u) for s, u in zip(shares, updates, strict=True)) / _M
    np.testing.assert_allclose(rounds.flat(done[0].mean), wanted, atol=3e-5 * _S)


@pytest.mark.parametrize("size", [1.0, 1e6, 1e19, 1e38, np.nan, np.inf, 1e-42])
def test_no_client_moves_it_by_more_than_the_clip(size):
    rng = np.random.default_rng(1)
    for signs in (lambda size: np.ones(size), rng.normal):
        update = [signs(size=s) for s in _LARGE]
        with np.errstate(all="ignore"):
            update = [np.asarray(u * size, np.float32) for u in update]
        squares = _squares(update)
        assert squares <= grid.STEPS**2
        if 1 <= size < 1e10:  # And it is not left out for that.
            assert squares > 0.998 * grid.STEPS**2


def test_what_rounding_would_lead_out_of_the_clip_is_zero():
    # Planted: clipped to S itself. Rounding enlarges every coordinate.
    count = 79_975  # sqrt(count) 3707.85 is 2^20.
    steps = math.floor(grid.STEPS / math.sqrt(count)) + 0.501
    update = [np.full([count], steps * _STEP, np.float32)]
    assert _squares(update) > 0.99 * grid.STEPS**2
    with mock.patch.object(grid.RoundedGaussianQuery, "clip_share", 1.0):
        assert _squares(update) == 0


def test_noise_has_the_stddev_that_is_charged():
    draws = [_round(rounds.zero_updates(_M, _LARGE), z=1.7).mean for _ in range(2)]
    noise, again = map(rounds.flat, draws)
    statistics.assert_gaussian(noise, 1.7 * _S / _M)
    first, second = (np.ravel(each)[:20_000] for each in draws[0])
    statistics.assert_uncorrelated(first, second)
    statistics.assert_uncorrelated(noise, again)
    # In each call of a traced function too.
    query, state = _query(_LARGE)
    state = query.begin_round(state, 1.0, _M)
    zeros = query.initial_sample_state([tf.zeros(s) for s in _LARGE])
    traced = tf.function(lambda: algorithm.release(query, zeros, state, 1.0)[0][0])
    statistics.assert_uncorrelated(traced(), traced())


@pytest.mark.parametrize("z", [1 / 3, 1.1, 0.7])
def test_noise_is_of_whole_numbers_and_at_least_as_charged(z):
    with mock.patch.object(grid, "draw_rounded", wraps=grid.draw_rounded) as drawn:
        done = _round(rounds.zero_updates(_M), z=z)
    stddev = drawn.call_args.args[0]
    assert z <= stddev / grid.STEPS <= z * (1 + 5e-7)
    steps = rounds.flat(done.mean) * _M / _STEP
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)


def _counts_agree(values, stddev):
    """Compares whole numbers with their probabilities; wrong once in 1e9."""
    inner = stddev * stats.norm.ppf(np.linspace(0.002, 0.998, 150))
    ends = [-np.inf, *(np.unique(np.round(inner)) + 0.5), np.inf]
    expected = np.diff(stats.norm.cdf(np.array(ends) / stddev)) * len(values)
    seen = np.histogram(values, ends)[0]
    return stats.chisquare(seen, expected).pvalue > 1e-9


class _Bytes:
    """Given words, then random bytes that repeat; counts what is asked."""

    def __init__(self, *words):
        self._rng = np.random.default_rng(5)
        self._words = list(words)
        self.asked = 0

    def __call__(self, count):
        self.asked += count
        if self._words:
            return int(self._words.pop(0)).to_bytes(count, "little")
        return self._rng.bytes(count)


@pytest.mark.parametrize("stddev", [0.2, 0.5, 1.0, 7.5, 1e4, 1.3 * 2**20])
def test_has_the_probabilities_of_a_rounded_gaussian(stddev):
    values = grid.draw_rounded(stddev, 300_000)
    assert values.dtype == np.int64
    assert _counts_agree(values, stddev)
    if stddev >= 1e4:
        statistics.assert_gaussian(values, stddev)
        statistics.assert_uncorrelated(values[1:], values[:-1])


@pytest.mark.parametrize("stddev", [0.7, 30.0, 2.0**20, 2.0**35])
def test_float64_and_as_many_digits_as_it_takes_agree(stddev):
    quick = grid.draw_rounded(stddev, 120, _Bytes())
    with mock.patch.object(grid, "_QUANTILE_ERROR", 1e9):
        slow = grid.draw_rounded(stddev, 120, _Bytes())
    np.testing.assert_array_equal(quick, slow)


def test_a_wrong_quantile_is_mended_by_the_digits():
    # A thousand times more than float64's is wrong, within what is allowed.
    ndtri = special.ndtri
    expected = grid.draw_rounded(2.0**30, 30_000, _Bytes())
    with mock.patch.object(special, "ndtri", lambda p: ndtri(p) * (1 + 2.0**-42)):
        found = grid.draw_rounded(2.0**30, 30_000, _Bytes())
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("more, place", [(0, 1), (2**64 - 1, 0)])
def test_what_64_bits_leave_open_more_bits_decide(more, place):
    # The step in which lies the tail probability of 3 - 1/2.
    step = grid._tail(3, 2.0, 64)
    bits = _Bytes(2 * step, more)
    assert grid.draw_rounded(2.0, 1, bits) == [2 + place]
    assert bits.asked == 16
    assert grid.draw_rounded(2.0, 1, _Bytes(2 * step + 1, more)) == [-2 - place]
    # The rarest has a probability below 2^-64 times 2^-64: 64 bits of zeros, twice.
    assert grid.draw_rounded(1.0, 1, _Bytes(0, 0, 2**62)) == [13]
    assert stats.norm.sf(13.5) < 2.0**-130 < stats.norm.sf(12.5)


@pytest.mark.parametrize("stddev", [0.0, float("nan"), 2.0**41])
def test_stddevs_that_are_not_allowed(stddev):
    with pytest.raises(ValueError, match="stddev must be in"):
        grid.draw_rounded(stddev, 1)


def test_forks_and_pickled_copies_draw_anew():
    assert grid.draw_rounded.__defaults__[0] is os.urandom
    draw = functools.partial(grid.draw_rounded, 1e5, 5000)
    draw()
    draws = [draw(), pickle.loads(pickle.dumps(draw))()]
    for _ in range(2):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writer, draw().tobytes())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            draws.append(np.frombuffer(pipe.read(), np.int64))
        os.waitpid(child, 0)
    for place, one in enumerate(draws):
        assert len(one) == 5000
        for other in draws[:place]:
            statistics.assert_uncorrelated(one, other)
