"""The coefficients that are best for a run: L-BFGS with exact gradients.

What is minimised is error^2 times sensitivity^2: the variance of the models'
noise at a given privacy. The error is that of the last model, the largest one
(`Workload` without rates), or the mean over all models (with rates). No
constraint is left to the optimiser: both parametrisations below make
coefficients that are at least 0 and do not rise, whatever they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from scipy import optimize, signal, special

from tfdp_fl.correlated_noise import toeplitz
from tfdp_fl.correlated_noise.participation import Participation
from tfdp_fl.correlated_noise.toeplitz import Workload

# A loss (a logarithm, so relative) and its gradient.
_Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]

# Where sigmoids stop being distinguishable from 1, or from 0.
_FARTHEST = 30.0


class _Error:
    """The models' squared error as a function of one filter's output.

    Attributes:
      input: Float64 [T], what C^-1 filters: A's coefficients, or an impulse.
    """

    def __init__(self, rounds: int, workload: Workload):
        if workload.rates is None:
            self.input = workload.coefficients(rounds)
            self._products = None
        else:
            self.input = np.zeros(rounds)
            self.input[0] = 1.0
            self._products = _products(rounds, workload)

    def __call__(self, output: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the squared error and its gradient, [T]."""
        if self._products is None:
            return float(output @ output), 2 * output
        half = self._products @ output
        return float(output @ half), 2 * half


def _products(rounds: int, workload: Workload) -> np.ndarray:
    """Returns M with mean over t, sum over s of B_ts^2 = d' M d, d = 1 / C.

    B_ts = sum over j of G_tj d_(j-s), G = A with its rates; so M_ij is the sum
    of (G'G)_(i+s)(j+s) over s.
    """
    triangle = workload.applied(np.eye(rounds))
    sums = triangle.T @ triangle / rounds
    for i in range(rounds - 2, -1, -1):
        sums[i, :-1] += sums[i + 1, 1:]
    return sums


def banded(bands: int, participation: Participation, workload: Workload) -> np.ndarray:
    """Returns the best c_0, ..., c_(bands-1), float64 [bands].

    Choquette-Choo et al. (2023), section 3, for Toeplitz matrices.

    Args:
      bands: At most T.
      participation: (k, b) and T.
      workload: A.
    """
    if bands == 1:
        return np.ones(1)
    # 1 / sqrt(1 - x), whose square is the prefix sum.
    steps = np.arange(1, bands)
    start = special.logit((2 * steps - 1) / (2 * steps))
    found = _best(banded_loss(bands, participation, workload), [start])
    return _products_of_sigmoids(found)


def _products_of_sigmoids(free: np.ndarray) -> np.ndarray:
    """Returns c_0 = 1, c_j = c_(j-1) sigmoid(free_j), float64."""
    return np.concatenate([[1.0], np.cumprod(special.expit(free))])


def banded_loss(bands: int, participation: Participation, workload: Workload) -> _Loss:
    """Returns log(error^2 sensitivity^2) of c = `_products_of_sigmoids`."""
    error_of = _Error(participation.rounds, workload)

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        c = _products_of_sigmoids(free)
        columns = toeplitz.charges(c, participation)
        square = float(columns @ columns)
        by_c = 2 * toeplitz.backwards(columns, participation, bands) / square
        output = signal.lfilter([1.0], c, error_of.input)
        error, by_output = error_of(output)
        # C b = input, so db = -C^-1 (dC) b: solve with C' first.
        solved = signal.lfilter([1.0], c, by_output[::-1])[::-1]
        by_c -= signal.correlate(solved, output)[len(output) - 1 :][:bands] / error
        by_log = (c * by_c)[1:]
        by_free = special.expit(-free) * np.cumsum(by_log[::-1])[::-1]
        return np.log(error) + np.log(square), by_free

    return loss


def blt(
    num_buffers: int, participation: Participation, workload: Workload
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best theta and theta_hat, float64 [num_buffers] each.

    McMahan et al. (2024), "A Hassle-free Algorithm for Private Learning in
    Practice" (https://arxiv.org/abs/2408.08868), for the (T, k, b) at hand.

    Args:
      num_buffers: d, at least 1.
      participation: (k, b) and T.
      workload: A.
    """
    loss = blt_loss(num_buffers, participation, workload)
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


def blt_loss(
    num_buffers: int, participation: Participation, workload: Workload
) -> _Loss:
    """Returns log(error^2 sensitivity^2) of 1 > t_1 > t^_1 > t_2 ... > 0.

    The values, theta and theta_hat by turns, are cumulative products of
    sigmoids. C = product of (1 - t^_i x) / (1 - t_i x).
    """
    rounds = participation.rounds
    error_of = _Error(rounds, workload)
    visits = np.zeros(rounds)
    last = participation.most * participation.min_separation
    visits[: last : participation.min_separation] = 1.0

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        values = np.cumprod(special.expit(free))
        columns, output = visits, error_of.input
        for theta, theta_hat in zip(values[::2], values[1::2], strict=True):
            columns = _ratio(theta_hat, theta, columns)
            output = _ratio(theta, theta_hat, output)
        square = float(columns @ columns)
        error, by_output = error_of(output)
        by_values = np.empty_like(values)
        for i, value in enumerate(values):
            # d/dv of log(1 - vx) is -x / (1 - vx): a delayed filter.
            of_columns = signal.lfilter([0.0, 1.0], [1.0, -value], columns)
            of_output = signal.lfilter([0.0, 1.0], [1.0, -value], output)
            sign = 1 if i % 2 == 0 else -1
            by_values[i] = sign * (
                2 * (columns @ of_columns) / square - (by_output @ of_output) / error
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
