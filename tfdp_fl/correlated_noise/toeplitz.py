"""Sensitivity and error of a lower-triangular Toeplitz strategy.

A strategy C (c_0 = 1) adds n = C^-1 z to the sums of all rounds, with z fresh
Gaussian noise. That is as private as C x + z, and the models A x get the noise
B z, B = A C^-1. Everything here is float64; T is the number of rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import linalg, signal

from tfdp_fl import _validate
from tfdp_fl.correlated_noise.participation import Participation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The matrix A that turns the sums of all rounds into all models.

    Row t says what the model after round t holds of each round's sum. Without
    momentum and with one rate that is the prefix sum, a triangle of ones;
    with a server momentum beta it is the Toeplitz matrix of
    (1 - beta^(j+1)) / (1 - beta); rates scale its columns. It decides which
    noise is best, and has no part in what the noise guarantees.

    Attributes:
      momentum: The server optimizer's beta, from 0 to below 1.
      rates: The server's learning rates, one a round, or None for a constant
        one; only how they relate to each other matters.
    """

    momentum: float = 0.0
    rates: Sequence[float] | None = None

    def __post_init__(self):
        momentum = _validate.non_negative(momentum=self.momentum)
        if momentum >= 1:
            raise ValueError(f"momentum must be below 1, got {momentum!r}.")
        object.__setattr__(self, "momentum", momentum)
        if self.rates is not None:
            rates = tuple(_validate.non_negative(rates=r) for r in self.rates)
            if not any(rates):
                raise ValueError("rates must hold a number above 0, got only zeros.")
            object.__setattr__(self, "rates", rates)

    def coefficients(self, rounds: int) -> np.ndarray:
        """Returns the first column without rates, float64 [rounds]."""
        ones = np.ones(rounds)
        if not self.momentum:
            return ones
        return signal.lfilter([1.0], [1.0, -self.momentum], ones)

    def rates_of(self, rounds: int) -> np.ndarray:
        """Returns the rates of all rounds, float64 [rounds].

        Raises:
          ValueError: There is another number of them.
        """
        if self.rates is None:
            return np.ones(rounds)
        if len(self.rates) != rounds:
            raise ValueError(
                f"rates must hold one number for each of {rounds} rounds, got "
                f"{len(self.rates)}."
            )
        return np.array(self.rates)

    def applied(self, columns: np.ndarray) -> np.ndarray:
        """Returns A times a matrix, float64 [rounds, any]."""
        scaled = self.rates_of(len(columns))[:, None] * columns
        sums = np.cumsum(scaled, axis=0)
        if not self.momentum:
            return sums
        return signal.lfilter([1.0], [1.0, -self.momentum], sums, axis=0)


def checked(coefficients: Sequence[float] | np.ndarray) -> np.ndarray:
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
    wrong = np.flatnonzero((values < 0) | (np.diff(values, prepend=1.0) > 0))
    if wrong.size:
        place = int(wrong[0])
        raise ValueError(
            "coefficients must be at least 0 and never rise, because the "
            "sensitivity is known only then, got "
            f"coefficients[{place}]={float(values[place])!r}."
        )
    return values


def charges(coefficients: np.ndarray, participation: Participation) -> np.ndarray:
    """Returns col, by which the noise multiplier of a round is divided.

    Kalinin & Lampert (2024), theorem 2 (https://arxiv.org/abs/2405.13763): if
    c is at least 0 and does not rise, the worst client takes part in rounds 0,
    b, 2b, ..., k times, whatever is in its updates. So the sensitivity of the
    first t rounds is the norm of the first t entries of
    col_t = sum over i < k of c_(t - ib).

    Args:
      coefficients: c, checked; what is missing is zero.
      participation: (k, b) and T.

    Returns:
      Float64 [T].
    """
    total = np.zeros(participation.rounds)
    for i in range(participation.most):
        start = i * participation.min_separation
        part = coefficients[: participation.rounds - start]
        total[start : start + len(part)] += part
    return total


def backwards(
    columns: np.ndarray, participation: Participation, count: int
) -> np.ndarray:
    """Returns the transpose of `charges` at col: [count], for gradients."""
    gradient = np.zeros(count)
    for i in range(participation.most):
        start = i * participation.min_separation
        part = columns[start : start + count]
        gradient[: len(part)] += part
    return gradient


def squared_errors(
    coefficients: np.ndarray, rounds: int, workload: Workload
) -> np.ndarray:
    """Returns the variance of each model's noise for z of variance 1.

    Args:
      coefficients: c; what is missing is zero.
      rounds: T.
      workload: A.

    Returns:
      Float64 [T]: sum over s of B_ts^2.
    """
    if workload.rates is None:
        a = workload.coefficients(rounds)
        return np.cumsum(signal.lfilter([1.0], coefficients, a) ** 2)
    impulse = np.zeros(rounds)
    impulse[0] = 1.0
    inverse = signal.lfilter([1.0], coefficients, impulse)
    dense = linalg.toeplitz(inverse, np.zeros(rounds))
    return np.sum(workload.applied(dense) ** 2, axis=1)
