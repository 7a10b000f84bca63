"""Epsilon between two Gaussians: a score with and without a client."""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy import optimize, special

from tfdp_fl import _validate

# Beyond, e^epsilon times a mass is no number any more; it is told as infinite.
_LARGEST_EPSILON = 512.0


def delta_of(
    epsilon: float, mean: float, std: float, other_mean: float, other_std: float
) -> float:
    """Returns P(A) - e^epsilon Q(A) for the A where that is most.

    P is N(mean, std^2), Q is N(other_mean, other_std^2): the hockey-stick
    divergence of P from Q at e^epsilon.
    """
    # log p - log q - epsilon = a x^2 + b x + c, x from P's mean in P's std.
    ratio, shift = std / other_std, (mean - other_mean) / other_std
    a = (ratio**2 - 1) / 2
    b = shift * ratio
    c = shift**2 / 2 - math.log(ratio) - epsilon
    edges = [-math.inf, *_real_roots(a, b, c), math.inf]
    total = 0.0
    for low, high in itertools.pairwise(edges):
        inside = _between(low, high)
        if a * inside**2 + b * inside + c > 0:
            total += _mass(low, high) - math.exp(epsilon) * _mass(
                low * ratio + shift, high * ratio + shift
            )
    return max(0.0, total)


def epsilon_of(
    mean: float, std: float, other_mean: float, other_std: float, delta: float
) -> float:
    """Returns the least epsilon at which both directions are below delta.

    Args:
      mean: Of the one Gaussian.
      std: Its standard deviation, above 0.
      other_mean: Of the other.
      other_std: Likewise.
      delta: Between 0 and 1.
    """
    _validate.inside_unit_interval(delta=delta)
    _validate.positive(std=std)
    _validate.positive(other_std=other_std)

    def excess(epsilon: float) -> float:
        one, other = (mean, std), (other_mean, other_std)
        return (
            max(delta_of(epsilon, *one, *other), delta_of(epsilon, *other, *one))
            - delta
        )

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if high > _LARGEST_EPSILON:
            return math.inf
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-10))


def _real_roots(a: float, b: float, c: float) -> list[float]:
    if abs(a) < 1e-12:
        return [-c / b] if b else []
    return sorted(
        float(root.real)
        for root in np.roots([a, b, c])
        if abs(root.imag) <= 1e-12 * max(1.0, abs(root))
    )


def _between(low: float, high: float) -> float:
    if math.isinf(low) and math.isinf(high):
        return 0.0
    if math.isinf(low):
        return high - 1.0
    return low + 1.0 if math.isinf(high) else (low + high) / 2


def _mass(low: float, high: float) -> float:
    """Returns the standard normal's mass, from the tail that is exact."""
    if low > 0:
        return float(special.ndtr(-low) - special.ndtr(-high))
    return float(special.ndtr(high) - special.ndtr(low))
