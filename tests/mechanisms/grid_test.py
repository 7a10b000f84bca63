import fractions
import functools
import itertools
import math
import os
import pickle
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from scipy import special, stats

import tfdp_fl
from tests.mechanisms import rounds, statistics
from tfdp_fl.mechanisms import Deployment, grid

_S, _M = 0.3, 4
_STEP = float(np.float32(_S)) / grid.STEPS
_LARGE = ((300, 200), (20_000,))


def _query(shapes=rounds.SHAPES, z=1.0):
    mechanism = tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=z)
    return mechanism.bind(
        Deployment(
            clients_per_round=_M,
            num_variables=len(shapes),
            shapes=tuple(tuple(each) for each in shapes),
            noise_generator="exact",
        )
    )


def _round(updates, z=0.0, query=None, **options):
    query = query or _query([u.shape for u in updates[0]])
    return rounds.run_round(
        query,
        query.initial_global_state(),
        updates,
        noise_multiplier=z,
        clients_per_round=_M,
        **options,
    )


def _squares(record) -> int:
    """Returns the squared norm of a record, in whole numbers."""
    return sum(int(each) ** 2 for part in record.update for each in np.ravel(part))


class SumTest(parameterized.TestCase):
    def test_is_that_of_clipped_updates(self):
        norms = [0.1, 0.2, 5.0, 0.0]
        updates = rounds.updates_with_norms(norms)
        shares = [min(1, _S / max(norm, _S)) for norm in norms]
        for v, mean in enumerate(_round(updates).mean):
            parts = zip(updates, shares, strict=True)
            wanted = sum(u[v].astype(float) * share for u, share in parts) / _M
            np.testing.assert_allclose(mean, wanted, atol=3e-5 * _S)

    def test_is_of_whole_numbers_in_any_order(self):
        updates = rounds.updates_with_norms([0.1, 7.0, 0.3, 0.2])
        totals = {
            rounds.flat(_round(list(order)).total.update).tobytes()
            for order in itertools.permutations(updates)
        }
        self.assertLen(totals, 1)
        (total,) = (np.frombuffer(each) for each in totals)
        np.testing.assert_array_equal(total, np.round(total))
        self.assertGreater(np.abs(total).max(), 1e4)

    @parameterized.parameters(1.0, 1e6, 1e19, 1e38, np.nan, np.inf, 1e-42)
    def test_no_client_moves_it_by_more_than_the_clip(self, size):
        rng = np.random.default_rng(1)
        for signs in (lambda size: np.ones(size), rng.normal):
            update = [signs(size=s) for s in _LARGE]
            with np.errstate(all="ignore"):
                update = [np.asarray(u * size, np.float32) for u in update]
            (record,) = _round([update]).records
            self.assertLessEqual(_squares(record), grid.STEPS**2)
            if 1 <= size < 1e10:  # And it is not left out for that.
                self.assertGreater(_squares(record), 0.998 * grid.STEPS**2)

    def test_what_rounding_would_lead_out_of_the_clip_is_zero(self):
        # Planted: clipped to S itself. Every coordinate is half a step above
        # a whole number, so that rounding enlarges all of them.
        count = 79_975  # sqrt(count) 3707.85 is 2^20.
        steps = math.floor(grid.STEPS / math.sqrt(count)) + 0.501
        update = [np.full([count], steps * _STEP, np.float32)]
        (record,) = _round([update]).records
        self.assertGreater(_squares(record), 0.99 * grid.STEPS**2)
        with mock.patch.object(grid.GridQuery, "clip_share", 1.0):
            (record,) = _round([update]).records
        self.assertEqual(_squares(record), 0)

    def test_too_many_parameters(self):
        with self.assertRaisesRegex(ValueError, "up to 10.11 parameters"):
            _ = _query([(10**6, 10**7)]).clip_share


class NoiseTest(parameterized.TestCase):
    def test_has_the_stddev_that_is_charged(self):
        done = _round(rounds.zero_updates(_M, _LARGE), z=1.7)
        noise = rounds.flat(done.mean)
        statistics.assert_gaussian(noise, 1.7 * _S / _M)
        first, second = (np.ravel(each)[:20_000] for each in done.mean)
        statistics.assert_uncorrelated(first, second)
        again = rounds.flat(_round(rounds.zero_updates(_M, _LARGE), z=1.7).mean)
        statistics.assert_uncorrelated(noise, again)

    def test_is_of_whole_numbers_and_at_least_as_charged(self):
        seen = []
        rounded = grid.rounded

        def noted(stddev, size):
            seen.append(stddev)
            return rounded(stddev, size)

        for z in (1 / 3, 1.1, 0.7):
            with mock.patch.object(grid, "rounded", noted):
                done = _round(rounds.zero_updates(_M), z=z)
            self.assertBetween(seen[-1] / grid.STEPS, z, z * (1 + 5e-7))
            steps = rounds.flat(done.mean) * _M / _STEP
            np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)

    def test_is_new_in_each_call_of_a_traced_function(self):
        query = _query(_LARGE)
        state = query.begin_round(query.initial_global_state(), 1.0, _M)
        zeros = query.initial_sample_state([tf.zeros(s) for s in _LARGE])
        traced = tf.function(lambda: query.get_noised_result(zeros, state)[0][0])
        statistics.assert_uncorrelated(traced(), traced())


_WRONG = 1e-9  # How often a test of the draws' distribution is.


def _counts_agree(values, stddev):
    """Compares whole numbers with their probabilities by chi-square."""
    inner = stddev * stats.norm.ppf(np.linspace(0.002, 0.998, 150))
    ends = np.concatenate([[-np.inf], np.unique(np.round(inner)) + 0.5])
    ends = np.append(ends, np.inf)
    expected = np.diff(stats.norm.cdf(ends / stddev)) * len(values)
    seen = np.histogram(values, ends)[0]
    return stats.chisquare(seen, expected).pvalue > _WRONG


class _Bytes:
    """Random bytes that repeat, and then given words; counts what is asked."""

    def __init__(self, *words):
        self._rng = np.random.default_rng(5)
        self._words = list(words)
        self.asked = 0

    def __call__(self, count):
        self.asked += count
        if self._words:
            return int(self._words.pop(0)).to_bytes(count, "little")
        return self._rng.bytes(count)


class RoundedTest(parameterized.TestCase):
    @parameterized.parameters(0.2, 0.5, 1.0, 7.5, 1e4, 1.3 * 2**20)
    def test_has_the_probabilities_of_a_rounded_gaussian(self, stddev):
        values = grid.rounded(stddev, 300_000)
        self.assertEqual(values.dtype, np.int64)
        self.assertTrue(_counts_agree(values, stddev))
        if stddev >= 1e4:
            statistics.assert_gaussian(values, stddev)
            statistics.assert_uncorrelated(values[1:], values[:-1])

    @parameterized.parameters(0.7, 30.0, 2.0**20, 2.0**35)
    def test_float64_and_as_many_digits_as_it_takes_agree(self, stddev):
        quick = grid.rounded(stddev, 250, _Bytes())
        with mock.patch.object(grid, "_QUANTILE_ERROR", 1e9):
            slow = grid.rounded(stddev, 250, _Bytes())
        np.testing.assert_array_equal(quick, slow)

    def test_a_wrong_quantile_is_mended_by_the_digits(self):
        # A thousand times more than float64's is wrong, within what is allowed.
        ndtri = special.ndtri
        expected = grid.rounded(2.0**30, 30_000, _Bytes())
        with mock.patch.object(special, "ndtri", lambda p: ndtri(p) * (1 + 2.0**-42)):
            found = grid.rounded(2.0**30, 30_000, _Bytes())
        np.testing.assert_array_equal(found, expected)

    def test_float64s_quantile_is_far_better_than_is_asked_of_it(self):
        p = np.random.default_rng(0).uniform(size=300)
        p = np.concatenate([p / 2, p * 2.0**-30, p * 2.0**-51])
        quantiles = -special.ndtri(p)
        for probability, quantile in zip(p, quantiles, strict=True):
            # _tail(k, s) is that of (k - 1/2) / s.
            tail = fractions.Fraction(grid._tail(1, 0.5 / quantile, 200), 2**200)
            off = float(tail - fractions.Fraction(probability))
            off /= stats.norm.pdf(quantile)
            self.assertLess(abs(off), 2.0**-10 * 2.0**-40 * (1 + quantile))

    @parameterized.parameters((0, 1), (2**64 - 1, 0))
    def test_what_64_bits_leave_open_more_bits_decide(self, more, place):
        # The step in which lies the tail probability of 3 - 1/2.
        step = grid._tail(3, 2.0, 64)
        bits = _Bytes(2 * step, more)
        (value,) = grid.rounded(2.0, 1, bits)
        self.assertEqual(bits.asked, 16)
        self.assertEqual(value, 2 + place)
        (value,) = grid.rounded(2.0, 1, _Bytes(2 * step + 1, more))
        self.assertEqual(value, -2 - place)

    def test_the_rarest_of_all(self):
        # A probability below 2^-64 times 2^-64: 64 bits of zeros, twice.
        (value,) = grid.rounded(1.0, 1, _Bytes(0, 0, 2**62))
        self.assertEqual(value, 13)
        self.assertGreater(stats.norm.sf(12.5), 2.0**-130)
        self.assertLess(stats.norm.sf(13.5), 2.0**-130)

    @parameterized.parameters(0.0, float("nan"), 2.0**41)
    def test_stddevs_that_are_not_allowed(self, stddev):
        with self.assertRaisesRegex(ValueError, "stddev must be in"):
            grid.rounded(stddev, 1)

    def test_forks_and_pickled_copies_draw_anew(self):
        self.assertIs(grid.rounded.__defaults__[0], os.urandom)
        draw = functools.partial(grid.rounded, 1e5, 5000)
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
            self.assertLen(one, 5000)
            for other in draws[:place]:
                statistics.assert_uncorrelated(one, other)
