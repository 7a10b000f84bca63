"""Values that may change from round to round, and passes over the clients."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

from tfdp_fl import _validate

# A constant, one value per round, or a function of the 0-based round.
Schedule = float | Sequence[float] | Callable[[int], float]


def value_at(round_index: int, **named: Any) -> Any:
    """Returns a schedule's value at a 0-based round.

    Args:
      round_index: The round.
      **named: The schedule, under the name of the argument it came from.

    Raises:
      ValueError: If the schedule is a sequence that has ended.
    """
    ((name, schedule),) = named.items()
    if isinstance(schedule, numbers.Number):
        return schedule
    if callable(schedule):
        return schedule(round_index)
    if isinstance(schedule, str) or not hasattr(schedule, "__getitem__"):
        raise TypeError(
            f"{name} must be a number, a sequence or a callable of the round, "
            f"got {schedule!r}."
        )
    if round_index >= len(schedule):
        raise ValueError(
            f"{name} must give a value for every round, got a sequence of "
            f"{len(schedule)} and round {round_index} (counted from 0)."
        )
    return schedule[round_index]


def is_constant(schedule: Any) -> bool:
    """Whether a schedule is one number for all rounds."""
    return isinstance(schedule, numbers.Number)


def checked_size(
    value: Any, num_clients: int, fractional: bool = False
) -> float:
    """Returns a cohort size, checked against the number of clients.

    Args:
      value: The size.
      num_clients: N.
      fractional: Whether an expected size need not be whole (Poisson).
    """
    size = _validate.positive(clients_per_round=value)
    if size > num_clients:
        raise ValueError(
            f"clients_per_round must be at most num_clients={num_clients}, "
            f"got {value!r}."
        )
    if size.is_integer():
        return int(size)
    if not fractional:
        raise ValueError(
            f"clients_per_round must be a whole number, got {value!r}."
        )
    return size


class PassPlan:
    """Cuts passes over N clients into cohorts of scheduled sizes.

    A cohort never straddles two passes: the last of a pass takes what is left.
    So every client is in exactly one cohort of each full pass.
    """

    def __init__(self, num_clients: int, clients_per_round: Schedule):
        self._num_clients = _validate.positive_integer(num_clients=num_clients)
        self._schedule = clients_per_round
        self._constant = None
        if is_constant(clients_per_round):
            self._constant = checked_size(clients_per_round, num_clients)
        self._cohorts: list[tuple[int, int, int]] = []

    def cohort(self, round_index: int) -> tuple[int, int, int]:
        """Returns (pass, first position, one past the last) of a round."""
        n = self._num_clients
        if self._constant is not None:
            m = self._constant
            index, place = divmod(round_index, -(-n // m))
            return index, place * m, min(n, (place + 1) * m)
        while len(self._cohorts) <= round_index:
            index, _, start = self._cohorts[-1] if self._cohorts else (0, 0, 0)
            if start == n:
                index, start = index + 1, 0
            size = checked_size(
                value_at(len(self._cohorts), clients_per_round=self._schedule),
                n,
            )
            self._cohorts.append((index, start, min(n, start + size)))
        return self._cohorts[round_index]


def last_true(
    predicate: Callable[[int], bool], limit: int, guess: int = 1
) -> int:
    """Returns the largest n <= limit with a falling predicate still true.

    Args:
      predicate: True up to some n >= 0, False from there on; true at 0.
      limit: Where to stop looking.
      guess: Where to begin; near the answer, few calls are made.
    """
    low, high = 0, limit + 1  # True at low, false (or unknown) at high.
    n, stride = min(max(guess, 1), limit), max(1, guess // 8)
    while high - low > 1:
        if predicate(n):
            low = n
        else:
            high = n
        if low and high <= limit:
            n = (low + high) // 2
        else:  # One side is still open: ever longer strides.
            n = min(max(1, n + stride if low else n - stride), limit)
            stride *= 2 if guess > 1 else 1 + n
    return low
