"""Quantities that may change from round to round.

A schedule is a constant, a sequence with one value a round, or a callable of
the round (counted from 0). Geyer et al. (2017), Algorithm 1, schedule both the
cohort size m_t and the noise sigma_t.

What is released and what is charged must be the same number, also where a
callable is random or reads a variable. So mechanisms and samplers keep
`fix(schedule)`, which asks the callable once for each round.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import TypeGuard, cast

Schedule = float | Sequence[float] | Callable[[int], float]


class OncePerRound:
    """A callable of the round that keeps the first answer for each round."""

    def __init__(self, schedule: Callable[[int], float]):
        self._schedule = schedule
        self._values: dict[int, float] = {}

    def __call__(self, round_index: int) -> float:
        """Returns the value of a round, asked for when it is first needed."""
        if round_index not in self._values:
            value = self._schedule(round_index)
            # Of two threads that ask at once, both get what one of them kept.
            self._values.setdefault(round_index, value)
        return self._values[round_index]


def fix(schedule: Schedule) -> Schedule:
    """Returns a schedule that gives every round one value for good.

    A callable becomes a `OncePerRound`, a list a tuple; what is fixed already
    is returned as it is.
    """
    if callable(schedule) and not isinstance(schedule, OncePerRound):
        return OncePerRound(schedule)
    return tuple(schedule) if isinstance(schedule, list) else schedule


def is_constant(schedule: Schedule) -> TypeGuard[float]:
    """Returns True for a plain number."""
    return isinstance(schedule, numbers.Real)


def value_at(schedule: Schedule, round_index: int, name: str) -> float:
    """Returns the value of a schedule in one round.

    Args:
      schedule: A number, a sequence, or a callable of the round.
      round_index: The round, counted from 0.
      name: The argument that the schedule came from, for the error.

    Raises:
      ValueError: A sequence ends before this round.
      TypeError: A callable returned something that is not a number.
    """
    if is_constant(schedule):
        return schedule
    if callable(schedule):
        value = schedule(round_index)
    else:
        values = cast(Sequence[float], schedule)
        if round_index >= len(values):
            raise ValueError(
                f"{name} is a sequence of {len(values)} values, and round "
                f"{round_index} (counted from 0) lies past its end."
            )
        value = values[round_index]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} must give a number for every round, got {value!r} for "
            f"round {round_index}."
        )
    return value


def check_schedule(
    schedule: Schedule, check: Callable[..., float], name: str
) -> Schedule:
    """Returns a `fix` schedule whose values passed a check.

    A callable is checked for round 0 here and for every other round when its
    value is used.

    Args:
      schedule: A number, a sequence, or a callable of the round.
      check: A function of `_validate`, called as `check(name=value)`.
      name: The argument that the schedule came from.
    """
    if callable(schedule):
        schedule = fix(schedule)
        check(**{name: value_at(schedule, 0, name)})
        return schedule
    if isinstance(schedule, Sequence) and not isinstance(schedule, str):
        if not schedule:
            raise ValueError(f"{name} must hold one value a round, got none.")
        return tuple(check(**{name: value}) for value in schedule)
    if hasattr(schedule, "tolist") and getattr(schedule, "ndim", 0) == 1:
        return check_schedule(schedule.tolist(), check, name)
    return check(**{name: schedule})
