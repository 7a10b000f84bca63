"""Canary clients: random directions, their sums and their shadows."""

from __future__ import annotations

import concurrent.futures
import os
import secrets
from collections.abc import Callable, Sequence

import numpy as np

# Coordinates of all directions that are held at once: 64 MiB of float32.
_HELD = 2**24


class Canaries:
    """Directions drawn uniformly from the unit sphere in R^d.

    A direction is made anew from a secret seed whenever it is needed, so that
    memory does not depend on their number.

    Attributes:
      count: How many there are.
      size: d.
    """

    def __init__(self, count: int, size: int, seed: int | None = None):
        """Draws the seed; no direction is made yet.

        Args:
          count: How many.
          size: d, the elements of an update.
          seed: For tests; None: from the operating system.
        """
        self.count = count
        self.size = size
        self._seed = secrets.randbits(128) if seed is None else seed

    def _directions(self, places: Sequence[int]) -> np.ndarray:
        """Returns some of them, float32 [len(places), d]."""
        found = np.empty([len(places), self.size], np.float32)
        for row, place in enumerate(places):
            rng = np.random.Generator(
                np.random.SFC64(np.random.SeedSequence([self._seed, place]))
            )
            rng.standard_normal(out=found[row], dtype=np.float32)
            found[row] /= np.linalg.norm(found[row].astype(np.float64))
        return found

    def _of_each(
        self, function: Callable[[np.ndarray], np.ndarray], places: np.ndarray
    ) -> list[np.ndarray]:
        """Returns a function of some of the directions after the others."""
        step = max(1, _HELD // max(1, self.size))
        parts = [places[start : start + step] for start in range(0, len(places), step)]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda some: function(self._directions(some)), parts))

    def sum_of(self, places: np.ndarray) -> np.ndarray:
        """Returns the sum of some directions, float32 [d].

        Args:
          places: Int [K], each from 0 to count - 1.
        """
        sums = self._of_each(lambda each: each.sum(axis=0), np.asarray(places))
        return sum(sums, np.zeros(self.size, np.float32))

    def projections(self, update: np.ndarray) -> np.ndarray:
        """Returns each direction's inner product with an update.

        Args:
          update: Float [d].

        Returns:
          Float64 [count].
        """
        update = np.asarray(update, np.float32)
        parts = self._of_each(lambda each: each @ update, np.arange(self.count))
        return np.concatenate(parts).astype(np.float64)


def scores(
    canaries: Canaries,
    update: np.ndarray,
    added: np.ndarray,
    participations: np.ndarray,
) -> np.ndarray:
    """Returns how much of each canary is in an update, beside what is not it.

    Who attacks one client knows the others. So what all canaries added is
    taken out, by least squares (a share of `added` that explains the update
    best), and the canary's own share is put back.

    Args:
      canaries: All of them.
      update: Float [d], how the model moved.
      added: Float [d], the sum of the canaries' directions that went into it.
      participations: Int [count], how often each did.

    Returns:
      Float64 [count]. A canary that is not in the update has N(0, 1/d), to a
      good approximation for d in the thousands, whatever else the update is.
      Zeros for an update of zero.
    """
    update = np.asarray(update, np.float64)
    added = np.asarray(added, np.float64)
    power = float(added @ added)
    share = float(update @ added) / power if power > 0 else 0.0
    rest = update - share * added
    norm = float(np.linalg.norm(rest))
    if not norm > 0:
        return np.zeros(canaries.count)
    return canaries.projections(rest / norm) + share * participations / norm
