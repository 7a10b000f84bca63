"""Gaussian noise rounded to whole numbers, without a rounding error.

`rounded` draws round(g), g ~ N(0, sigma^2) real: not what floating point makes
of it, but the whole number that is nearest to the ideal g. So for a sum n of
whole numbers n + round(g) = round(n + g) is a function of n + g, the ideal
Gaussian mechanism, and whatever is proven of that holds of it (post-processing:
Dwork & Roth 2014, proposition 2.1), with any accountant and any sampling. The
attack of Mironov (2012) finds nothing: every whole number can be reached from
every n.

(Canonne, Kamath & Steinke 2020, https://arxiv.org/abs/2004.00010, draw the
discrete Gaussian instead, for which zCDP is proven, and no amplification.)

By inversion: g = sigma Phi^-1(u) for u uniform in (0, 1), of which as many bits
are drawn as it takes. Nearly always 64 are enough for float64 to tell what is
nearest, with much room for what it may be wrong by; where they are not, more
bits are drawn, and compared with Phi in as many digits as they need.
"""

from __future__ import annotations

import decimal
import functools
import math
import os
from collections.abc import Callable

import numpy as np
from scipy import special

# Float64's quantile is taken to be right to so much of 1 + itself: thousands of
# times what it is wrong by.
_QUANTILE_ERROR = 2.0**-40
# Below so many steps of 2^-64 the quantile changes too much within a step.
_FEWEST_STEPS = 2**12
_WORD = 64
_AT_ONCE = 2**18


def rounded(
    stddev: float,
    size: int,
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> np.ndarray:
    """Draws `size` independent values of round(N(0, stddev^2)).

    Args:
      stddev: Sigma > 0, at most 2^40.
      size: How many.
      random_bytes: Returns so many independent uniform bytes.

    Returns:
      Int64 [size].
    """
    if not 0 < stddev <= 2.0**40:
        raise ValueError(f"stddev must be in (0, 2^40], got {stddev!r}.")
    drawn = np.empty(size, np.int64)
    for start in range(0, size, _AT_ONCE):
        part = drawn[start : start + _AT_ONCE]
        part[:] = _drawn(float(stddev), len(part), random_bytes)
    return drawn


def _drawn(
    stddev: float, size: int, random_bytes: Callable[[int], bytes]
) -> np.ndarray:
    words = np.frombuffer(random_bytes(8 * size), np.uint64)
    # One bit is the sign. The others say where in (0, 1/2] the probability is
    # that the noise is larger still: from step to (step + 1) of 2^-64.
    steps = words >> np.uint64(1)
    middle = (steps.astype(np.float64) + 0.5) * 2.0**-_WORD
    quantile = -special.ndtri(middle)
    density = np.exp(-0.5 * quantile**2) / math.sqrt(2 * math.pi)
    error = 2.0 ** (1 - _WORD) / density + _QUANTILE_ERROR * (1 + quantile)
    magnitude = stddev * quantile
    nearest = np.floor(magnitude + 0.5)
    # Between the halves, and by more than it can be wrong.
    room = 0.5 - np.abs(magnitude - nearest)
    unclear = (room <= stddev * error) | (steps < _FEWEST_STEPS)
    result = nearest.astype(np.int64)
    for place in np.flatnonzero(unclear).tolist():
        result[place] = _magnitude(
            stddev, int(steps[place]), int(nearest[place]), random_bytes
        )
    return np.where(words & np.uint64(1), -result, result)


def _magnitude(
    stddev: float, step: int, guess: int, random_bytes: Callable[[int], bytes]
) -> int:
    """Returns round(|g|), given the first 64 bits of its tail probability."""
    probability = _LazyProbability(step, random_bytes)
    nearest = guess
    # |g| >= b exactly if its tail probability is at most that of b.
    while probability.is_at_most_tail(nearest + 1, stddev):
        nearest += 1
    while nearest > 0 and not probability.is_at_most_tail(nearest, stddev):
        nearest -= 1
    return nearest


class _LazyProbability:
    """A uniform number in (0, 1/2] of which more bits are drawn when needed."""

    def __init__(self, step: int, random_bytes: Callable[[int], bytes]):
        self._step, self._bits = step, _WORD
        self._random_bytes = random_bytes

    def is_at_most_tail(self, nearest: int, stddev: float) -> bool:
        """Whether it is at most P(g >= nearest - 1/2), g ~ N(0, stddev^2)."""
        while True:
            digits = math.ceil(self._bits * math.log10(2)) + 20
            tail = _tail(nearest, stddev, digits)
            with decimal.localcontext(decimal.Context(prec=digits + 20)):
                # In steps; wrong by less than 2^bits 10^(10 - digits) < 1e-9.
                scaled = tail * 2**self._bits
                if self._step + 1 <= scaled - 1:
                    return True
                if self._step >= scaled + 1:
                    return False
            more = int.from_bytes(self._random_bytes(_WORD // 8), "little")
            self._step = (self._step << _WORD) + more
            self._bits += _WORD


def _tail(nearest: int, stddev: float, digits: int) -> decimal.Decimal:
    """Returns P(g >= nearest - 1/2), wrong by less than 10^(10 - digits).

    Phi(x) = 1/2 + phi(x) (x + x^3 / 3 + x^5 / (3 5) + ...), in which no term is
    negative (Marsaglia 2004, "Evaluating the Normal Distribution"); every
    operation is rounded by 10^-digits of its result, of which the largest is
    1/2, and there are fewer than 10^5 of them.
    """
    with decimal.localcontext(decimal.Context(prec=digits + 10)):
        x = (decimal.Decimal(nearest) - decimal.Decimal("0.5")) / (
            decimal.Decimal(stddev)
        )
        square = x * x
        term, total, odd = x, x, 1
        smallest = decimal.Decimal(10) ** -(digits + 5)
        while term > smallest or odd < 2 * square:
            odd += 2
            term = term * square / odd
            total += term
        density = (-square / 2).exp() / (2 * _pi(digits + 10)).sqrt()
        return decimal.Decimal("0.5") - density * total


@functools.lru_cache
def _pi(digits: int) -> decimal.Decimal:
    """Returns pi, by Machin's formula (1706)."""
    with decimal.localcontext(decimal.Context(prec=digits + 10)):

        def arctan_of_inverse(n: int) -> decimal.Decimal:
            power = total = decimal.Decimal(1) / n
            k = 1
            while abs(power) > decimal.Decimal(10) ** -(digits + 8):
                power /= -(n * n)
                k += 2
                total += power / k
            return total

        return 16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)
