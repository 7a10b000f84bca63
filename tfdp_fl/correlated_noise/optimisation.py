"""The coefficients that are best for a run: L-BFGS with exact gradients.

What is minimised is error^2 times sensitivity^2: the variance of the models'
noise at a given privacy. The error is that of the last model, the largest one. No
constraint is left to the optimiser: both parametrisations below make
coefficients that are at least 0 and do not rise, whatever they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from scipy import optimize, signal, special

from tfdp_fl.correlated_noise import toeplitz
from tfdp_fl.correlated_noise.participation import Participation

# A loss (a logarithm, so relative) and its gradient.
_Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]

# Where sigmoids stop being distinguishable from 1, or from 0.
_FARTHEST = 30.0


def banded(bands: int, participation: Participation, momentum: float) -> np.ndarray:
    """Returns the best c_0, ..., c_(bands-1), float64 [bands].

    Choquette-Choo et al. (2023), section 3, for Toeplitz matrices.

    Args:
      bands: At most T.
      participation: (k, b) and T.
      momentum: The server's.
    """
    if bands == 1:
        return np.ones(1)
    # 1 / sqrt(1 - x), whose square is the prefix sum.
    steps = np.arange(1, bands)
    start = special.logit((2 * steps - 1) / (2 * steps))
    found = _best(banded_loss(bands, participation, momentum), [start])
    return _products_of_sigmoids(found)


def _products_of_sigmoids(free: np.ndarray) -> np.ndarray:
    """Returns c_0 = 1, c_j = c_(j-1) sigmoid(free_j), float64."""
    return np.concatenate([[1.0], np.cumprod(special.expit(free))])


def banded_loss(bands: int, participation: Participation, momentum: float) -> _Loss:
    """Returns log(error^2 sensitivity^2) of c = `_products_of_sigmoids`."""
    model = toeplitz.workload(participation.rounds, momentum)

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        c = _products_of_sigmoids(free)
        columns = toeplitz.charges(c, participation)
        square = float(columns @ columns)
        by_c = 2 * _backwards(columns, participation, bands) / square
        output = signal.lfilter([1.0], c, model)
        error = float(output @ output)
        # C b = A's column, so db = -C^-1 (dC) b: solve with C' first.
        solved = signal.lfilter([1.0], c, 2 * output[::-1])[::-1]
        by_c -= signal.correlate(solved, output)[len(output) - 1 :][:bands] / error
        by_log = (c * by_c)[1:]
        by_free = special.expit(-free) * np.cumsum(by_log[::-1])[::-1]
        return np.log(error) + np.log(square), by_free

    return loss


def _backwards(
    columns: np.ndarray, participation: Participation, count: int
) -> np.ndarray:
    """Returns the transpose of `toeplitz.charges` at col: [count]."""
    gradient = np.zeros(count)
    for i in range(participation.most):
        start = i * participation.min_separation
        part = columns[start : start + count]
        gradient[: len(part)] += part
    return gradient


def blt(
    num_buffers: int, participation: Participation, momentum: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best theta and theta_hat, float64 [num_buffers] each.

    McMahan et al. (2024), "A Hassle-free Algorithm for Private Learning in
    Practice" (https://arxiv.org/abs/2408.08868), for the (T, k, b) at hand.

    Args:
      num_buffers: d, at least 1.
      participation: (k, b) and T.
      momentum: The server's.
    """
    loss = blt_loss(num_buffers, participation, momentum)
    found = _best(loss, _blt_starts(num_buffers, participation))
    values = np.cumprod(special.expit(found))
    return values[::2], values[1::2]


def _blt_starts(num_buffers: int, participation: Participation) -> Iterable[np.ndarray]:
    """Yields poles and zeros whose distances from 1 grow geometrically."""
    for reach in sorted({participation.rounds, participation.min_separation, 8}):
        for lowest in (0.3, 0.8):
            distances = np.geomspace(0.5 / (reach + 1), lowest, 2 * num_buffers)
            values = 1 - distances
            ratios = values / np.concatenate([[1.0], values[:-1]])
            yield special.logit(ratios)


def blt_loss(num_buffers: int, participation: Participation, momentum: float) -> _Loss:
    """Returns log(error^2 sensitivity^2) of 1 > t_1 > t^_1 > t_2 ... > 0.

    The values, theta and theta_hat by turns, are cumulative products of
    sigmoids. C = product of (1 - t^_i x) / (1 - t_i x).
    """
    rounds = participation.rounds
    model = toeplitz.workload(rounds, momentum)
    visits = np.zeros(rounds)
    last = participation.most * participation.min_separation
    visits[: last : participation.min_separation] = 1.0

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        values = np.cumprod(special.expit(free))
        columns, output = visits, model
        for theta, theta_hat in zip(values[::2], values[1::2], strict=True):
            columns = _ratio(theta_hat, theta, columns)
            output = _ratio(theta, theta_hat, output)
        square, error = float(columns @ columns), float(output @ output)
        by_values = np.empty_like(values)
        for i, value in enumerate(values):
            # d/dv of log(1 - vx) is -x / (1 - vx): a delayed filter.
            of_columns = signal.lfilter([0.0, 1.0], [1.0, -value], columns)
            of_output = signal.lfilter([0.0, 1.0], [1.0, -value], output)
            sign = 1 if i % 2 == 0 else -1
            by_values[i] = (
                2 * sign * (columns @ of_columns / square - output @ of_output / error)
            )
        by_log = values * by_values
        by_free = special.expit(-free) * np.cumsum(by_log[::-1])[::-1]
        return np.log(error) + np.log(square), by_free

    return loss


def _ratio(zero: float, pole: float, values: np.ndarray) -> np.ndarray:
    """Returns values filtered by (1 - zero x) / (1 - pole x)."""
    return signal.lfilter([1.0, -zero], [1.0, -pole], values)


def _best(loss: _Loss, starts: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the lowest of the minima found from some starts."""
    minima = (
        optimize.minimize(
            loss,
            np.clip(start, -_FARTHEST, _FARTHEST),
            jac=True,
            method="L-BFGS-B",
            bounds=[(-_FARTHEST, _FARTHEST)] * len(start),
            options={"maxiter": 500, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-9},
        )
        for start in starts
    )
    return min(minima, key=lambda found: found.fun).x
