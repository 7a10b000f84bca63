"""Sizes of arrays that are the same in all rounds, for XLA.

XLA compiles a function anew for every set of shapes that it meets, which takes
seconds. So whatever hangs on who is in the cohort is padded, to a bound that a
cohort goes beyond with chance below 1e-15 (1e-9 in a million rounds). Where
nobody knows clients before they are read, those of the first cohort stand for
all, and what goes beyond it costs one more compilation. What is padded is read
by nobody: the loops of `one_by_one` end before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdp_fl.accounting import charge

# Natural logarithm of how rarely a cohort is larger than its bound.
_LOG_CHANCE = -15 * math.log(10)
# Cohorts are bounded as if so many times the clients took part, where only the
# first cohort's are known: others may hold more.
_UNSEEN = 2.0


def largest_sum(values: np.ndarray, expected: float, population: float) -> int:
    """Returns what the sum of clients' values over a cohort is at most.

    For clients that take part independently, each with chance p, the sum T is
    at least b with chance, by Chernoff's bound for every t > 0,

        P(T >= b) <= prod_i (1 + p (exp(t v_i) - 1)) exp(-t b).

    The same holds for a cohort of a fixed size, drawn without replacement: who
    takes part is then negatively associated (Joag-Dev and Proschan 1983,
    Section 3.2). The bound that is returned is that of the best of some t, for
    a chance of 1e-15.

    Args:
      values: Int [n], 0 or more, of all clients or of a sample of them.
      expected: m, how many clients a cohort has in expectation; p = m / N.
      population: N; infinite for a bound that holds of any.
    """
    sizes, counts = np.unique(np.asarray(values), return_counts=True)
    largest = int(sizes.max(initial=0))
    if not largest:
        return 0
    t = np.geomspace(1e-5, 50, 300)  # In units of 1 / largest.
    terms = np.expm1(t[:, None] * (sizes / largest))
    chance = min(1.0, expected / population)
    if chance:
        terms = np.log1p(chance * terms) / chance
    logarithms = expected * terms @ (counts / counts.sum())
    return math.ceil(largest * ((logarithms - _LOG_CHANCE) / t).min())


class FixedSizes:
    """Remembers sizes; they grow if they have to.

    Attributes:
      clients_per_round: The largest m of the rounds to come; 0: not known.
    """

    def __init__(self, sampling: str | None = None, num_clients: int | None = None):
        """Knows no size yet.

        Args:
          sampling: One of `accounting.charge.SAMPLINGS`, or None if unknown.
          num_clients: The population N, or None if unknown.
        """
        self.clients_per_round = 0.0
        self._random_size = sampling is None or sampling in charge.RANDOM_SIZE
        self._num_clients = math.inf if num_clients is None else num_clients
        self._known: dict[Any, int] = {}

    def forget(self) -> None:
        """Forgets the sizes so far, for cohorts of another kind."""
        self._known.clear()

    def cohort(self, expected: float) -> int:
        """Returns how many clients a cohort has at most.

        Args:
          expected: A round's m.
        """
        expected = max(expected, self.clients_per_round)
        most = math.ceil(expected)
        if self._random_size:
            most = largest_sum(np.ones(1), expected, self._num_clients)
        return int(min(most, self._num_clients))

    def sum_over_cohort(self, values: np.ndarray, expected: float, whole: bool) -> int:
        """Returns what clients' values add up to at most, over a cohort.

        Args:
          values: Int [n].
          expected: A round's m.
          whole: Whether these are all clients, and not only some of them.
        """
        largest = int(values.max(initial=0))
        at_most = self.cohort(expected) * largest
        if not whole and (values == largest).all():
            return at_most  # It seems that all have the same.
        expected = max(expected, self.clients_per_round)
        if whole:
            return min(at_most, largest_sum(values, expected, len(values)))
        return largest_sum(values, _UNSEEN * expected, math.inf)

    def rows(
        self,
        lengths: np.ndarray,
        shapes: Any,
        row_bytes: float,
        chunk_bytes: int,
    ) -> int:
        """Returns how many rows hold the examples of a chunk.

        Args:
          lengths: Int [K], the examples of its clients.
          shapes: Of one example: of others, others are the rows.
          row_bytes: What one takes.
          chunk_bytes: A chunk is complete when it holds so much.
        """

        def bound() -> float:
            cohort = self.sum_over_cohort(lengths, len(lengths), whole=False)
            # And the client that completes it, perhaps a larger one.
            largest = _UNSEEN * int(lengths.max(initial=0))
            return min(cohort, chunk_bytes / max(1.0, row_bytes) + largest)

        return self.of(("rows", shapes), int(lengths.sum()), bound)

    def of(self, name: Any, needed: int, bound: Callable[[], float]) -> int:
        """Returns an array's size, the same as long as it can be.

        Args:
          name: Which array's.
          needed: The least that will do now.
          bound: Returns what will always do, as far as one knows.
        """
        known = self._known.get(name)
        if known is None or needed > known:
            # Who was wrong once is so by more the next time.
            known = max(needed, math.ceil(bound()), 3 * (known or 0) // 2)
            self._known[name] = known
        return known
