"""Privacy loss distributions, composed with a proven bound on rounding errors.

Composition is a product of Fourier transforms. Its rounding errors are spread over all
cells, and grow with the number of rounds: after 10^6 rounds, they reach a delta of
1e-10. So what a composition's probabilities may be off by is added to each delta.

The bound. Let F be the transform of probabilities p at n points, n a power of two. A
fast transform computes it in log2(n) stages. A stage adds at most two terms for each
factor of two and multiplies by a root of unity, with relative errors of less than
c = 6 u, u = 2^-53 the unit roundoff. So the computed F is off by at most
e = c log2(n), times sum_j |p_j| for each output (which is a sum of the p_j times unit
numbers), or times sqrt(n) |p|_2 for all, as a vector (Higham 2002, "Accuracy and
Stability of Numerical Algorithms", theorem 24.2). We transform all but the largest
probability, which is put first and then added to each output. The power F^T is computed
in polar form. Modulus, angle and logarithm are off by at most four units in the last
place, 8 u relatively, before the latter two are multiplied by T and rounded. So with d
the error of F, and up to a few roundings,

    |computed F^T - F^T| <= T d (|F| + d)^(T - 1)
                            + (8 + 10 |angle| + 10 |log |F||) T u |F|^T.

The inverse transform is off by at most e |F^T|_2 / sqrt(n) as a vector, and all n cells
together by at most sqrt(n) times the error as a vector (Cauchy-Schwarz). So that sum is
at most the length of the error of F^T, plus e |F^T|_2. It bounds the error of delta,
which is a sum over cells with factors from 0 to 1.

The probabilities of one release are taken as they are: they have relative errors of at
most about 1e-7, from differences of dp-accounting's deltas.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution
from scipy import fft, optimize

# The unit roundoff of float64.
_UNIT = 2.0**-53
# The probability at each end that a composition may leave out.
_TAIL = 1e-15
# More than the relative rounding error of a sum over all cells.
_SUMMATION = 1e-9


class _Losses(NamedTuple):
    """Privacy losses in one direction: a client removed, or one added.

    Attributes:
      first: The first loss, in multiples of the interval.
      probabilities: Float64 [n], of this loss and the n - 1 next ones.
      infinite: The probability of an infinite loss.
      error: By how much all probabilities together may be off.
    """

    first: int
    probabilities: np.ndarray
    infinite: float
    error: float = 0.0


class LossDistribution:
    """A privacy loss distribution; every delta includes the bound on its error.

    Attributes:
      interval: The difference between neighbouring losses.
    """

    def __init__(self, interval: float, directions: tuple[_Losses, ...]):
        """Takes the losses of each direction, or one that holds for both."""
        self.interval = interval
        self._directions = directions

    @classmethod
    def of(
        cls,
        distribution: privacy_loss_distribution.PrivacyLossDistribution,
        interval: float,
        is_transformed: bool = False,
    ) -> LossDistribution:
        """Takes over dp-accounting's distribution of one release.

        Args:
          distribution: The distribution.
          interval: Its interval.
          is_transformed: Whether its accountant made it, which transforms it once.
        """
        pmfs = [distribution._pmf_remove]  # There are no public names for them.
        if not distribution._symmetric:
            pmfs.append(distribution._pmf_add)
        found = []
        for pmf in (pmf.to_dense_pmf() for pmf in pmfs):
            probabilities = np.append(np.asarray(pmf._probs, np.float64), 0.0)
            error = 0.0
            if is_transformed:
                # Its lengths have factors up to 11, and errors below 20 u per bit.
                points = 2 * len(probabilities)
                error = 40 * _UNIT * math.log2(points) * math.sqrt(points)
                error *= float(np.linalg.norm(probabilities))
            infinite = float(pmf._infinity_mass)
            found.append(_Losses(pmf._lower_loss, probabilities, infinite, error))
        return cls(interval, tuple(found))

    @property
    def error(self) -> float:
        """The bound on the rounding error of a delta."""
        return max(losses.error for losses in self._directions)

    def self_compose(self, count: int) -> LossDistribution:
        """Returns the distribution of `count` independent releases."""
        if count == 1:
            return self
        parts = tuple(_self_composed(losses, count) for losses in self._directions)
        return LossDistribution(self.interval, parts)

    def compose(self, other: LossDistribution) -> LossDistribution:
        """Returns the distribution of both; the other has the same interval."""
        size = max(len(self._directions), len(other._directions))
        both = zip(self._of_each(size), other._of_each(size), strict=True)
        parts = tuple(_composed(one, another) for one, another in both)
        return LossDistribution(self.interval, parts)

    def _of_each(self, size: int) -> tuple[_Losses, ...]:
        return self._directions * (size // len(self._directions))

    def deltas(self, epsilon: float) -> list[float]:
        """Returns the delta at epsilon of each direction (of both, if they agree)."""
        found = []
        for first, probabilities, infinite, error in self._directions:
            losses = (first + np.arange(len(probabilities))) * self.interval
            above = losses > epsilon
            finite = np.dot(-np.expm1(epsilon - losses[above]), probabilities[above])
            delta = infinite + max(float(finite), 0.0) * (1 + _SUMMATION) + error
            found.append(min(1.0, delta))
        return found

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on delta at epsilon, at least 0."""
        return max(self.deltas(epsilon))

    def delta_at(self, epsilons: np.ndarray) -> np.ndarray:
        """Returns `delta` at each of some epsilons, float64 [k], in one pass."""
        found = []
        for first, probabilities, infinite, error in self._directions:
            losses = (first + np.arange(len(probabilities))) * self.interval
            positive = losses > 0
            losses, kept = losses[positive], probabilities[positive]
            above = _sums_from_the_end(kept)
            weighted = _sums_from_the_end(kept * np.exp(-losses))
            places = np.searchsorted(losses, epsilons, "right")
            finite = above[places] - np.exp(epsilons) * weighted[places]
            rounding = error + _SUMMATION * (np.abs(above[places]) + infinite)
            found.append(infinite + np.maximum(finite, 0.0) + rounding)
        return np.minimum(np.max(found, axis=0), 1.0)

    def epsilon(self, delta: float) -> float:
        """Returns an epsilon with `self.delta(epsilon) <= delta`, close to the least.

        It is infinite if delta is less than the rounding error and the probability of
        infinite losses together.
        """
        if self.delta(0.0) <= delta:
            return 0.0
        largest = max(
            (losses.first + len(losses.probabilities)) * self.interval
            for losses in self._directions
        )
        if self.delta(largest) > delta:
            return math.inf

        def excess(epsilon: float) -> float:
            return math.log(max(self.delta(epsilon), 5e-324)) - math.log(delta)

        found = float(optimize.brentq(excess, 0.0, largest))
        step = 1e-12
        while self.delta(found) > delta:
            found, step = found + step, 2 * step
        return found


def _sums_from_the_end(numbers: np.ndarray) -> np.ndarray:
    """Returns the sum of all numbers from each place on, [n + 1]."""
    return np.append(numbers[::-1].cumsum()[::-1], 0.0)


def _length(size: int) -> int:
    """Returns the power of two from `size` on."""
    return 1 << max(0, size - 1).bit_length()


class _Transform(NamedTuple):
    """The transform of probabilities, and by how much it may be off.

    Attributes:
      length: The number of points, n, a power of two.
      values: Complex128 [n / 2 + 1]; the others are their conjugates.
      shift: The cell that was put first.
      of_each: A bound on the error of each value.
      of_all: A bound on the length of the vector of all n errors.
    """

    length: int
    values: np.ndarray
    shift: int
    of_each: float
    of_all: float

    @classmethod
    def of(cls, probabilities: np.ndarray, length: int) -> _Transform:
        """Transforms probabilities [m], with m <= length."""
        rest = np.zeros(length)
        rest[: len(probabilities)] = probabilities
        shift = int(np.argmax(probabilities))
        largest, rest[shift] = float(rest[shift]), 0.0
        values = fft.rfft(np.roll(rest, -shift)) + largest
        error = _transform_error(length)
        return cls(
            length,
            values,
            shift,
            error * float(np.abs(rest).sum()),
            error * math.sqrt(length) * float(np.linalg.norm(rest)),
        )

    def error_times(self, factors: np.ndarray) -> float:
        """Returns a bound on the length of all errors, each times a factor.

        Args:
          factors: Float64 [n / 2 + 1], at least 0.
        """
        by_each = self.of_each * _length_of_all(factors, self.length)
        return min(by_each, self.of_all * float(factors.max()))


def _transform_error(length: int) -> float:
    """Returns e of the module's docstring."""
    return 6 * _UNIT * max(1, length.bit_length() - 1)


def _length_of_all(values: np.ndarray, length: int) -> float:
    """Returns the length of a vector of n values, of which half are given."""
    squares = np.abs(values) ** 2
    total = 2 * float(squares.sum()) - float(squares[0])
    return math.sqrt(max(0.0, total - float(squares[-1]) * (length > 1)))


def _inverse(values: np.ndarray, shift: int, length: int) -> tuple[np.ndarray, float]:
    """Returns the probabilities, [length], and by how much they may all be off."""
    found = np.roll(fft.irfft(values, length), shift % length)
    return found, _transform_error(length) * _length_of_all(values, length)


def _self_composed(losses: _Losses, count: int) -> _Losses:
    first, probabilities, infinite, error = losses
    # (Losses outside these bounds wrap around. They are counted as infinite, too.)
    lower, upper = pld_common.compute_self_convolve_bounds(
        np.abs(probabilities), count, _TAIL
    )
    size = upper - lower + 1
    transform = _Transform.of(probabilities, _length(max(size, len(probabilities))))
    absolute, angles = np.abs(transform.values), np.angle(transform.values)
    logs = np.log(np.maximum(absolute, 1e-300))
    powers = np.exp(count * logs)
    one_less = np.exp((count - 1) * np.log(absolute + transform.of_each))
    of_power = (8 + 10 * np.abs(angles) + 10 * np.abs(logs)) * count * _UNIT
    of_power += 8 * _UNIT
    composed, of_inverse = _inverse(
        powers * np.exp(1j * count * angles),
        count * transform.shift - lower,
        transform.length,
    )
    of_values = count * transform.error_times(one_less)
    of_powers = _length_of_all(of_power * powers, transform.length)
    total = max(1.0, float(np.abs(probabilities).sum()) + error)
    of_parts = count * error * math.exp(min((count - 1) * math.log(total), 700.0))
    return _Losses(
        first * count + lower,
        composed[:size],
        _TAIL - math.expm1(count * math.log1p(-infinite)) if infinite < 1 else 1.0,
        1.01 * (of_values + of_powers + of_inverse + of_parts),
    )


def _composed(one: _Losses, other: _Losses) -> _Losses:
    size = len(one.probabilities) + len(other.probabilities) - 1
    length = _length(size)
    of_one = _Transform.of(one.probabilities, length)
    of_other = _Transform.of(other.probabilities, length)
    product = of_one.values * of_other.values
    composed, of_inverse = _inverse(product, of_one.shift + of_other.shift, length)
    of_values = of_one.error_times(np.abs(of_other.values) + of_other.of_each)
    of_values += of_other.error_times(np.abs(of_one.values))
    of_product = 6 * _UNIT * _length_of_all(product, length)
    offset, probabilities, above = _without_tails(composed[:size])
    totals = [float(np.abs(part.probabilities).sum()) for part in (one, other)]
    of_parts = one.error * (totals[1] + other.error) + other.error * totals[0]
    errors = of_values + of_product + of_inverse + of_parts
    return _Losses(
        one.first + other.first + offset,
        probabilities,
        one.infinite + other.infinite + above,
        1.01 * errors,
    )


def _without_tails(probabilities: np.ndarray) -> tuple[int, np.ndarray, float]:
    """Cuts off at most `_TAIL` at each end.

    Returns:
      How many cells were cut off at the lower end, whose probability moves up; the
      rest; and the probability at the upper end.
    """

    def cut(ordered: np.ndarray) -> int:
        sums = np.maximum.accumulate(np.abs(ordered).cumsum())
        return int(np.searchsorted(sums, _TAIL, "right"))

    upper = min(cut(probabilities[::-1]), len(probabilities) - 1)
    kept = probabilities[: len(probabilities) - upper]
    lower = min(cut(kept), len(kept) - 1)
    rest = kept[lower:].copy()
    rest[0] += np.abs(kept[:lower]).sum()
    above = float(np.abs(probabilities[len(probabilities) - upper :]).sum())
    return lower, rest, above
