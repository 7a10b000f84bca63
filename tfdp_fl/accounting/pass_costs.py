"""Parallel composition within a pass over shuffled clients."""

from __future__ import annotations

from collections.abc import Hashable


class PassCosts:
    """What the most exposed client of each pass has spent.

    Within a pass every client is in one cohort, so the pass costs the maximum
    over its cohorts, not the sum (parallel composition); passes add up. A
    cohort that is run again, after a crash for instance, meets the same
    clients: cohorts are intervals of positions in the pass's order, and the
    cost is the largest sum of weights over any position.
    """

    def __init__(self) -> None:
        # key -> (cost, end of the last interval, intervals)
        self._passes: dict[Hashable, tuple[float, int, tuple]] = {}

    def copy(self) -> PassCosts:
        """Returns an independent copy."""
        other = PassCosts()
        other._passes = dict(self._passes)
        return other

    def next_start(self, key: Hashable, num_positions: int) -> int:
        """Returns where the pass's next cohort begins; 0 once it is full."""
        _, end, intervals = self._passes.get(key, (0.0, 0, ()))
        last = intervals[-1][1] if intervals else end
        return last if last < num_positions else 0

    def add(self, key: Hashable, start: int, stop: int, weight: float) -> float:
        """Adds one cohort and returns by how much its pass's cost rose.

        Args:
          key: The pass.
          start: First position in the pass's order.
          stop: One past the last.
          weight: What the round costs a client in it.
        """
        cost, end, intervals = self._passes.get(key, (0.0, 0, ()))
        if intervals and intervals[-1][1:] == (start, weight):
            # Goes on where the last cohort ended, at the same cost.
            intervals = (*intervals[:-1], (intervals[-1][0], stop, weight))
        else:
            intervals = (*intervals, (start, stop, weight))
        if start >= end:  # The usual case: cohorts come in order.
            new = max(cost, weight)
        else:
            new = _largest_sum(intervals)
        self._passes[key] = (new, max(end, stop), intervals)
        return new - cost


def _largest_sum(intervals: tuple) -> float:
    edges = sorted(
        edge
        for start, stop, weight in intervals
        # At one position, ends come before beginnings.
        for edge in ((start, 1, weight), (stop, 0, -weight))
    )
    largest = current = 0.0
    open_intervals = 0
    for _, begins, weight in edges:
        open_intervals += 1 if begins else -1
        current = current + weight if open_intervals else 0.0
        largest = max(largest, current)
    return largest
