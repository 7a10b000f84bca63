"""What is made of the noised sums, and so where their noise does harm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import signal

from tfdp_fl import _validate


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
