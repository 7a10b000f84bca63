"""Quantities that may change from round to round.

A schedule is a constant, a sequence with one value a round, or a callable of
the round (counted from 0). Geyer et al. (2017), Algorithm 1, schedule both the
cohort size m_t and the noise sigma_t.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence

Schedule = float | Sequence[float] | Callable[[int], float]


def is_constant(schedule: Schedule) -> bool:
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
        if round_index >= len(schedule):
            raise ValueError(
                f"{name} is a sequence of {len(schedule)} values, and round "
                f"{round_index} (counted from 0) lies past its end."
            )
        value = schedule[round_index]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} must give a number for every round, got {value!r} for "
            f"round {round_index}."
        )
    return value


def checked(
    schedule: Schedule, check: Callable[..., float], name: str
) -> Schedule:
    """Returns a schedule whose values passed a check, sequences as tuples.

    A callable is checked for round 0 here and for every other round when its
    value is used.

    Args:
      schedule: A number, a sequence, or a callable of the round.
      check: A function of `_validate`, called as `check(name=value)`.
      name: The argument that the schedule came from.
    """
    if callable(schedule):
        check(**{name: value_at(schedule, 0, name)})
        return schedule
    if isinstance(schedule, Sequence) and not isinstance(schedule, str):
        if not schedule:
            raise ValueError(f"{name} must hold one value a round, got none.")
        return tuple(check(**{name: value}) for value in schedule)
    if hasattr(schedule, "tolist") and getattr(schedule, "ndim", 0) == 1:
        return checked(schedule.tolist(), check, name)
    return check(**{name: schedule})
