from __future__ import annotations

import fractions
import functools
import os
import pickle
from unittest import mock

import numpy as np
from absl.testing import parameterized
from scipy import special, stats

from tests.mechanisms import statistics
from tfdp_fl.mechanisms import grid

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
