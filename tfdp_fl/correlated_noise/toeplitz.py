"""Sensitivity and error of a lower-triangular Toeplitz strategy.

A strategy C (c_0 = 1) adds n = C^-1 z to the sums of all rounds, with z fresh
Gaussian noise. That is as private as C x + z, and the models A x get the noise
B z, B = A C^-1. Everything here is float64; T is the number of rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import signal

from tfdp_fl.correlated_noise.participation import Participation


def workload(rounds: int, momentum: float = 0.0) -> np.ndarray:
    """Returns the first column of A, float64 [rounds].

    Row t of A says what the model after round t holds of each round's sum. That is
    the prefix sum, ones; with a server momentum beta (1 - beta^(j+1)) / (1 - beta).
    It decides which noise is best, and has no part in what the noise guarantees.
    """
    return signal.lfilter([1.0], [1.0, -momentum], np.ones(rounds))


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
