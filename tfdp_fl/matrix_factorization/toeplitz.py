"""A lower-triangular Toeplitz strategy: its sensitivity, and which one is best.

A strategy C (c_0 = 1) adds n = C^-1 z to the sums of all rounds, with z fresh
Gaussian noise. That is as private as C x + z, and the models A x get the noise
B z, B = A C^-1, where A adds up the rounds. Everything here is float64; T is the
number of rounds.

The best coefficients of a run are found by L-BFGS with exact gradients. What is
minimised is error^2 times sensitivity^2: the variance of the models' noise at a
given privacy. The error is that of the last model, the largest one. No constraint
is left to the optimiser: both parametrisations below make coefficients that are at
least 0 and do not rise, whatever they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from scipy import optimize, signal, special

from tfdp_fl.matrix_factorization.participation_pattern import ParticipationPattern

# A loss (a logarithm, so relative) and its gradient.
_Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]

# Where sigmoids stop being distinguishable from 0, and where they are 1 - 1e-6: the
# best poles often merge with a nearby zero. Kept far enough apart for float32 to
# distinguish them, they have a positive weight, at the cost of 4e-6 more error.
_MIN_LOGIT, _MAX_LOGIT = -30.0, 13.8


def check_coefficients(coefficients: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns coefficients for which `charges` holds, or raises.

    Args:
      coefficients: The first column of C, c_0 onwards; the rest is zero.

    Returns:
      The same, float64.

    Raises:
      ValueError: They do not begin with 1, one is negative, or one is larger
        than the one before. (For (1, 0, .9) and two participations at any
        distance in 8 rounds the formula says 3.62, and the truth is 5.42.)
    """
    values = np.asarray(coefficients, np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ValueError(
            f"coefficients must be a list of numbers, got {coefficients!r}."
        )
    if values[0] != 1:
        raise ValueError(
            f"coefficients must begin with 1, got {float(values[0])!r}: the "
            "noise multiplier is that of the fresh noise."
        )
    violations = np.flatnonzero((values < 0) | (np.diff(values, prepend=1.0) > 0))
    if violations.size:
        index = int(violations[0])
        raise ValueError(
            "coefficients must be at least 0 and never rise, because the "
            "sensitivity is known only then, got "
            f"coefficients[{index}]={float(values[index])!r}."
        )
    return values


def round_sensitivities(
    coefficients: np.ndarray, pattern: ParticipationPattern
) -> np.ndarray:
    """Returns col, by which the noise multiplier of a round is divided.

    Kalinin & Lampert (2024), theorem 2 (https://arxiv.org/abs/2405.13763): if
    c is at least 0 and does not rise, the worst client takes part in rounds 0,
    b, 2b, ..., k times, whatever is in its updates. So the sensitivity of the
    first t rounds is the norm of the first t entries of
    col_t = sum over i < k of c_(t - ib).

    Args:
      coefficients: c, checked; what is missing is zero.
      pattern: (k, b) and T.

    Returns:
      Float64 [T].
    """
    total = np.zeros(pattern.rounds)
    for i in range(pattern.k):
        start = i * pattern.min_separation
        part = coefficients[: pattern.rounds - start]
        total[start : start + len(part)] += part
    return total


def optimize_banded(bands: int, pattern: ParticipationPattern) -> np.ndarray:
    """Returns the best c_0, ..., c_(bands-1), float64 [bands].

    Choquette-Choo et al. (2023), section 3, for Toeplitz matrices.

    Args:
      bands: At most T.
      pattern: (k, b) and T.
    """
    if bands == 1:
        return np.ones(1)
    # 1 / sqrt(1 - x), whose square is the prefix sum.
    steps = np.arange(1, bands)
    start = special.logit((2 * steps - 1) / (2 * steps))
    free = _minimize(banded_loss(bands, pattern), [start])
    return _products_of_sigmoids(free)


def _products_of_sigmoids(free: np.ndarray) -> np.ndarray:
    """Returns c_0 = 1, c_j = c_(j-1) sigmoid(free_j), float64."""
    return np.concatenate([[1.0], np.cumprod(special.expit(free))])


def banded_loss(bands: int, pattern: ParticipationPattern) -> _Loss:
    """Returns log(error^2 sensitivity^2) of c = `_products_of_sigmoids`."""
    prefix_sum = np.ones(pattern.rounds)

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        c = _products_of_sigmoids(free)
        columns = round_sensitivities(c, pattern)
        square = float(columns @ columns)
        grad_c = 2 * _charges_transpose(columns, pattern, bands) / square
        output = signal.lfilter([1.0], c, prefix_sum)
        error = float(output @ output)
        # C b = A's column, so db = -C^-1 (dC) b: solve with C' first.
        solved = signal.lfilter([1.0], c, 2 * output[::-1])[::-1]
        grad_c -= signal.correlate(solved, output)[len(output) - 1 :][:bands] / error
        grad_log = (c * grad_c)[1:]
        grad_free = special.expit(-free) * np.cumsum(grad_log[::-1])[::-1]
        return np.log(error) + np.log(square), grad_free

    return loss


def _charges_transpose(
    columns: np.ndarray, pattern: ParticipationPattern, count: int
) -> np.ndarray:
    """Returns the transpose of `charges` at col: [count]."""
    gradient = np.zeros(count)
    for i in range(pattern.k):
        start = i * pattern.min_separation
        part = columns[start : start + count]
        gradient[: len(part)] += part
    return gradient


def blt(
    num_buffers: int, pattern: ParticipationPattern
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best theta and theta_hat, float64 [num_buffers] each.

    McMahan et al. (2024), "A Hassle-free Algorithm for Private Learning in
    Practice" (https://arxiv.org/abs/2408.08868), for the (T, k, b) at hand.

    Args:
      num_buffers: d, at least 1.
      pattern: (k, b) and T.
    """
    free = _minimize(blt_loss(pattern), _blt_starts(num_buffers, pattern))
    values = np.cumprod(special.expit(free))
    return values[::2], values[1::2]


def _blt_starts(
    num_buffers: int, pattern: ParticipationPattern
) -> Iterable[np.ndarray]:
    """Yields poles and zeros whose distances from 1 grow geometrically."""
    for reach in sorted({pattern.rounds, pattern.min_separation, 8}):
        for lowest in (0.3, 0.8):
            distances = np.geomspace(0.5 / (reach + 1), lowest, 2 * num_buffers)
            values = 1 - distances
            ratios = values / np.concatenate([[1.0], values[:-1]])
            yield special.logit(ratios)


def blt_loss(pattern: ParticipationPattern) -> _Loss:
    """Returns log(error^2 sensitivity^2) of 1 > t_1 > t^_1 > t_2 ... > 0.

    The values, theta and theta_hat by turns, are cumulative products of
    sigmoids. C = product of (1 - t^_i x) / (1 - t_i x).
    """
    rounds = pattern.rounds
    visits, prefix_sum = np.zeros(rounds), np.ones(rounds)
    last = pattern.k * pattern.min_separation
    visits[: last : pattern.min_separation] = 1.0

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        values = np.cumprod(special.expit(free))
        columns, output = visits, prefix_sum
        for theta, theta_hat in zip(values[::2], values[1::2], strict=True):
            columns = _ratio(theta_hat, theta, columns)
            output = _ratio(theta, theta_hat, output)
        square, error = float(columns @ columns), float(output @ output)
        grad_values = np.empty_like(values)
        for i, value in enumerate(values):
            # d/dv of log(1 - vx) is -x / (1 - vx): a delayed filter.
            d_columns = signal.lfilter([0.0, 1.0], [1.0, -value], columns)
            d_output = signal.lfilter([0.0, 1.0], [1.0, -value], output)
            sign = 1 if i % 2 == 0 else -1
            grad_values[i] = (
                2 * sign * (columns @ d_columns / square - output @ d_output / error)
            )
        grad_log = values * grad_values
        grad_free = special.expit(-free) * np.cumsum(grad_log[::-1])[::-1]
        return np.log(error) + np.log(square), grad_free

    return loss


def _ratio(zero: float, pole: float, values: np.ndarray) -> np.ndarray:
    """Returns values filtered by (1 - zero x) / (1 - pole x)."""
    return signal.lfilter([1.0, -zero], [1.0, -pole], values)


def _minimize(loss: _Loss, starts: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the lowest of the minima found from some starts."""
    minima = (
        optimize.minimize(
            loss,
            np.clip(start, _MIN_LOGIT, _MAX_LOGIT),
            jac=True,
            method="L-BFGS-B",
            bounds=[(_MIN_LOGIT, _MAX_LOGIT)] * len(start),
            options={"maxiter": 500, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-9},
        )
        for start in starts
    )
    return min(minima, key=lambda result: result.fun).x
