"""One line a check, every message alike.

Each function takes exactly one keyword argument, whose name is the name of
the argument that is checked: `positive(clip_norm=clip_norm)`. It returns the
value, converted to the plain Python type it stands for.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any


def _one(checked: dict[str, Any]) -> tuple[str, Any]:
    ((name, value),) = checked.items()
    return name, value


def _number(name: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {allowed}, got {_shown(value)}.")
    return float(value)


def positive(**checked: Any) -> float:
    """Returns a finite number greater than zero, or raises."""
    name, value = _one(checked)
    number = _number(name, value, "a positive number")
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be a positive number, got {value!r}.")
    return number


def non_negative(**checked: Any) -> float:
    """Returns a finite number of at least zero, or raises."""
    name, value = _one(checked)
    number = _number(name, value, "a number of at least 0")
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(
            f"{name} must be a number of at least 0, got {value!r}."
        )
    return number


def finite(**checked: Any) -> float:
    """Returns a finite number, or raises."""
    name, value = _one(checked)
    number = _number(name, value, "a finite number")
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    return number


def inside_unit_interval(**checked: Any) -> float:
    """Returns a number strictly between 0 and 1, or raises."""
    name, value = _one(checked)
    number = _number(name, value, "a number strictly between 0 and 1")
    if not 0 < number < 1:
        raise ValueError(
            f"{name} must be a number strictly between 0 and 1, got {value!r}."
        )
    return number


def probability(**checked: Any) -> float:
    """Returns a number from 0 to 1, both included, or raises."""
    name, value = _one(checked)
    number = _number(name, value, "a number from 0 to 1")
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}.")
    return number


def _integer(name: str, value: Any, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be {allowed}, got {_shown(value)}.")
    return int(value)


def positive_integer(**checked: Any) -> int:
    """Returns an integer of at least 1, or raises."""
    name, value = _one(checked)
    number = _integer(name, value, "an integer of at least 1")
    if number < 1:
        raise ValueError(
            f"{name} must be an integer of at least 1, got {value!r}."
        )
    return number


def non_negative_integer(**checked: Any) -> int:
    """Returns an integer of at least 0, or raises."""
    name, value = _one(checked)
    number = _integer(name, value, "an integer of at least 0")
    if number < 0:
        raise ValueError(
            f"{name} must be an integer of at least 0, got {value!r}."
        )
    return number


def one_of(allowed: Iterable[Any], **checked: Any) -> Any:
    """Returns a value that is among `allowed`, or raises."""
    name, value = _one(checked)
    allowed = tuple(allowed)
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(
            f"{name} must be one of {choices}, got {_shown(value)}."
        )
    return value


def instance_of(types: type | tuple[type, ...], **checked: Any) -> Any:
    """Returns a value of one of the given types, or raises."""
    name, value = _one(checked)
    if not isinstance(value, types):
        types = types if isinstance(types, tuple) else (types,)
        names = " or ".join(type_.__name__ for type_ in types)
        raise TypeError(
            f"{name} must be a {names}, got {_in_short(value)}"
            f"{type(value).__name__}."
        )
    return value


def _shown(value: Any) -> str:
    """Returns a value as it is written, if it cannot hold examples."""
    if isinstance(value, bool | int | float | str | type | None):
        return repr(value)
    return f"a {type(value).__name__}"


def _in_short(value: Any) -> str:
    """Returns a value on one line of bounded length, and "of type" after it.

    Of what may hold somebody's examples only the type is told.
    """
    if not isinstance(value, bool | int | float | str | type | None):
        return "one of type "
    text = " ".join(repr(value).split())
    return (text if len(text) <= 100 else f"{text[:97]}...") + " of type "
