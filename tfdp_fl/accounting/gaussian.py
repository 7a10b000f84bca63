"""Exact conversions of one Gaussian release, rounded up.

Throughout, `noise_multiplier` is sigma / sensitivity, so 1 / noise_multiplier is the mu
of Gaussian differential privacy (Dong, Roth & Su 2019).
"""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
from scipy import stats

from tfdp_fl import _validate

# Beyond these limits, any useful epsilon is above 1e7 or below 1e-5, and floating point
# fails. There, the noise is rounded down.
MIN_NOISE, MAX_NOISE = 1e-4, 1e6
# Above this, a tail bound on the privacy loss gives sufficient noise.
_MAX_EPSILON = 1e5
# More than the rounding errors of a few operations and of SciPy's functions.
_ROUNDING_OF_DELTA = 2.0**-46


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """Returns the delta of one Gaussian release at epsilon, rounded up.

    delta = Phi(mu/2 - eps/mu) - exp(eps) Phi(-mu/2 - eps/mu), mu = 1/z (Balle
    & Wang 2018, theorem 8, https://arxiv.org/abs/1805.06530).

    Args:
      noise_multiplier: z = sigma / sensitivity, at least 0; above 1e6, it counts as
        1e6, and below 1e-4 as 0.
      epsilon: At least 0.

    Returns:
      delta, from 0 to 1; 1.0 without noise.
    """
    z = _noise(noise_multiplier)
    epsilon = _validate.non_negative(epsilon=epsilon)
    if z == math.inf:
        return 0.0
    if z < MIN_NOISE:
        return 1.0
    first = float(stats.norm.logcdf(0.5 / z - epsilon * z))
    if first == -math.inf:
        return 0.0
    second = epsilon + float(stats.norm.logcdf(-0.5 / z - epsilon * z))
    rounding = _ROUNDING_OF_DELTA * (1 + epsilon - first)
    return min(1.0, -math.exp(first + rounding) * math.expm1(second - first - rounding))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Returns the smallest epsilon of one Gaussian release at delta, rounded up.

    Args:
      noise_multiplier: z = sigma / sensitivity, at least 0; above 1e6, it counts as
        1e6, and below 1e-4 as 0.
      delta: Between 0 and 1.

    Returns:
      epsilon; infinity without noise.
    """
    z = _noise(noise_multiplier)
    delta = _validate.inside_unit_interval(delta=delta)
    if z < MIN_NOISE:
        return math.inf
    if z == math.inf:
        return 0.0
    z = min(z, MAX_NOISE)
    with np.errstate(divide="ignore"):
        epsilon, step = float(dp_accounting.get_epsilon_gaussian(z, delta)), 1e-12
    while gaussian_delta(z, epsilon) > delta:
        epsilon, step = epsilon + step, 2 * step
    return epsilon


def epsilon_of_mu_squared(mu_squared: float, delta: float) -> float:
    """Returns the exact epsilon of composed Gaussian releases.

    Args:
      mu_squared: Sum of (sensitivity / sigma)^2; 0 if nothing was released, infinity
        for a release without noise.
      delta: Between 0 and 1.

    Raises:
      ValueError: mu_squared is negative or NaN.
    """
    if mu_squared != math.inf:
        _validate.non_negative(mu_squared=mu_squared)
    return gaussian_epsilon(noise_of_mu_squared(mu_squared), delta)


def noise_of_mu_squared(mu_squared: float) -> float:
    """Returns the noise multiplier of the single Gaussian with this mu^2."""
    return mu_squared**-0.5 if mu_squared else math.inf


def analytic_noise_multiplier(epsilon: float, delta: float) -> float:
    """Returns the smallest noise multiplier that is (epsilon, delta)-private.

    This is the analytic Gaussian mechanism (Balle & Wang 2018, algorithm 1). It is
    valid for every epsilon, and never needs more noise than the classic formula.

    Args:
      epsilon: The epsilon, above 0.
      delta: Between 0 and 1.

    Returns:
      z = sigma / sensitivity, rounded up.

    Raises:
      ValueError: If an argument is not allowed, or a noise multiplier of 1e6 is
        not enough.
    """
    epsilon = _validate.positive(epsilon=epsilon)
    delta = _validate.inside_unit_interval(delta=delta)
    if epsilon > _MAX_EPSILON:  # A tail bound on the privacy loss.
        tail = math.sqrt(-2 * math.log(delta))
        mu = math.hypot(tail, math.sqrt(2) * math.sqrt(epsilon)) - tail
        return (1 + 1e-12) / mu
    if gaussian_delta(MAX_NOISE, epsilon) > delta:
        raise ValueError(
            f"epsilon and delta must need a noise multiplier of at most "
            f"{MAX_NOISE:g}, got {epsilon!r} and {delta!r}."
        )
    with np.errstate(divide="ignore"):
        z, step = float(dp_accounting.get_sigma_gaussian(epsilon, delta)), 1e-12
    while gaussian_delta(z, epsilon) > delta:
        z, step = z * (1 + step), 2 * step
    return z


def _noise(noise_multiplier: float) -> float:
    if noise_multiplier == math.inf:
        return math.inf
    return _validate.non_negative(noise_multiplier=noise_multiplier)


def normal_cells(ends: np.ndarray) -> np.ndarray:
    """Returns a normal variable's probabilities below, between and above points.

    Each is a difference of the smaller probabilities, so that neither tail is lost.
    """
    below, above = stats.norm.cdf(ends), stats.norm.sf(ends)
    between = np.where(ends[1:] < 0, np.diff(below), -np.diff(above))
    return np.concatenate([below[:1], between, above[-1:]])
