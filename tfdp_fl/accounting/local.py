"""What each client spends when it adds its own noise (local guarantees)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.accounting import gaussian


class LocalAccount:
    """Per-client spending on Gaussian releases that clients noise themselves.

    A release of sensitivity s with noise sigma has mu = s/sigma. Gaussian
    releases of one client compose exactly: mu^2 adds up (Dong, Roth & Su 2019,
    corollary 3.3), so a client's whole history is one Gaussian, of noise
    multiplier 1/sqrt(sum mu^2), and epsilon needs no accountant. A client that
    takes no part spends nothing. The guarantee reported is that of the client
    that spent most.
    """

    def __init__(self, num_clients: int):
        n = _validate.positive_integer(num_clients=num_clients)
        self._mu_squared: np.ndarray = np.zeros(n, dtype=np.float64)
        self._participations: np.ndarray = np.zeros(n, dtype=np.int64)

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self._mu_squared)

    @property
    def participations(self) -> np.ndarray:
        """How often each client took part, int64 [N] (a copy)."""
        return self._participations.copy()

    @property
    def mu_squared(self) -> np.ndarray:
        """Each client's sum of mu^2, float64 [N] (a copy)."""
        return self._mu_squared.copy()

    @property
    def max_participations(self) -> int:
        """How often the most-seen client took part."""
        return int(self._participations.max())

    @property
    def max_mu_squared(self) -> float:
        """The largest sum of mu^2 over the clients."""
        return float(self._mu_squared.max())

    def add(self, positions: np.ndarray, mu_squared: float | np.ndarray) -> None:
        """Charges one release to each of a cohort's clients.

        Args:
          positions: int [m], the clients' positions; a client listed twice is
            charged twice.
          mu_squared: (sensitivity / sigma)^2 of the release, one number or
            float [m]; infinity for a release without noise.

        Raises:
          ValueError: If anything is out of range; nothing is charged then.
        """
        positions, added = self._checked(positions, mu_squared)
        if added.any():
            np.add.at(self._mu_squared, positions, added)
        np.add.at(self._participations, positions, 1)

    def max_mu_squared_after(
        self, positions: np.ndarray, mu_squared: float | np.ndarray
    ) -> float:
        """Returns what `max_mu_squared` would be after `add`."""
        positions, mu_squared = self._checked(positions, mu_squared)
        touched, inverse = np.unique(positions, return_inverse=True)
        sums = self._mu_squared[touched]
        np.add.at(sums, inverse, mu_squared)
        return float(max(self.max_mu_squared, sums.max(initial=0.0)))

    def max_mu_squared_after_draws(
        self,
        draws: int,
        mu_squared: float,
        max_participations: int | None = None,
    ) -> float:
        """Returns the most `max_mu_squared` can be after more rounds.

        Which clients they will draw is not known: any client may be in all of
        them.

        Args:
          draws: How many rounds.
          mu_squared: (sensitivity / sigma)^2 of one client's release in each.
          max_participations: After so many rounds a client sits out.
        """
        spent, seen = self._mu_squared, self._participations
        if max_participations is None:
            return self.max_mu_squared + (draws * mu_squared if draws else 0.0)
        more = np.minimum(draws, np.maximum(max_participations - seen, 0))
        after = spent + np.where(more > 0, more * mu_squared, 0.0)
        return float(after.max())

    def epsilon(self, delta: float) -> float:
        """Returns the exact epsilon of the client that spent most."""
        return gaussian.epsilon_of_mu_squared(self.max_mu_squared, delta)

    def get_state(self) -> dict[str, np.ndarray]:
        """Returns the account as NumPy arrays, for a checkpoint."""
        return {
            "mu_squared": self._mu_squared.copy(),
            "participations": self._participations.copy(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Puts back what `get_state` returned."""
        mu_squared = np.array(state["mu_squared"], dtype=np.float64)
        participations = np.array(state["participations"], dtype=np.int64)
        shape = self._mu_squared.shape
        if mu_squared.shape != shape or participations.shape != shape:
            raise ValueError(
                f"state must be of {self.num_clients} clients, got shapes "
                f"{mu_squared.shape} and {participations.shape}."
            )
        self._mu_squared, self._participations = mu_squared, participations

    def _checked(
        self, positions: Any, mu_squared: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        positions = np.asarray(positions)
        if positions.size == 0:
            positions = positions.astype(np.int64)
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            raise TypeError(
                "positions must be a one-dimensional integer array, got shape "
                f"{positions.shape} and dtype {positions.dtype}."
            )
        if positions.size and (
            positions.min() < 0 or positions.max() >= self.num_clients
        ):
            raise ValueError(
                f"positions must be from 0 to {self.num_clients - 1}, got "
                f"{positions.min()} to {positions.max()}."
            )
        mu_squared = np.asarray(mu_squared, dtype=np.float64)
        if mu_squared.ndim and mu_squared.shape != positions.shape:
            raise ValueError(
                "mu_squared must be one number or one per position, got shape "
                f"{mu_squared.shape} for {len(positions)} positions."
            )
        if not np.all(mu_squared >= 0):
            raise ValueError(f"mu_squared must be at least 0, got {mu_squared!r}.")
        return positions, mu_squared
