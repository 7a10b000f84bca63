"""One line a check, every message alike.

Each function takes exactly one keyword argument, whose name is the name of
the argument that is checked: `positive(clip_norm=clip_norm)`. It returns the
value, converted to the plain Python type it stands for.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

from tfdp_fl.terms import Json


def _unpack(checked: Json) -> tuple[str, Any]:
    ((name, value),) = checked.items()
    return name, value


def _number(
    checked: Json,
    allowed: str,
    is_allowed: Callable[[float], bool],
    kind: Any = numbers.Real,
) -> Any:
    """Returns a number of a kind of which something holds, or raises."""
    name, value = _unpack(checked)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {allowed}, got {_show(value)}.")
    try:
        number = int(value) if kind is numbers.Integral else float(value)
        if is_allowed(number):
            return number
    except OverflowError:  # An integer that no float is as large as.
        pass
    raise ValueError(f"{name} must be {allowed}, got {value!r}.")


def positive(**checked: object) -> float:
    """Returns a finite number greater than zero, or raises."""
    return _number(checked, "a positive number", lambda n: 0 < n < math.inf)


def non_negative(**checked: object) -> float:
    """Returns a finite number of at least zero, or raises."""
    return _number(checked, "a number of at least 0", lambda n: 0 <= n < math.inf)


def finite(**checked: object) -> float:
    """Returns a finite number, or raises."""
    return _number(checked, "a finite number", math.isfinite)


def inside_unit_interval(**checked: object) -> float:
    """Returns a number strictly between 0 and 1, or raises."""
    return _number(checked, "a number strictly between 0 and 1", lambda n: 0 < n < 1)


def probability(**checked: object) -> float:
    """Returns a number from 0 to 1, both included, or raises."""
    return _number(checked, "a number from 0 to 1", lambda n: 0 <= n <= 1)


def positive_integer(**checked: object) -> int:
    """Returns an integer of at least 1 that TensorFlow can hold, or raises."""
    return _number(
        checked,
        "an integer of at least 1 and below 2**63",
        lambda n: 1 <= n < 2**63,
        numbers.Integral,
    )


def number_of_rows(**checked: object) -> int:
    """Returns an integer of at least 1 that an int32 can hold, or raises."""
    return _number(
        checked,
        "an integer of at least 1 and below 2**31",
        lambda n: 1 <= n < 2**31,
        numbers.Integral,
    )


def non_negative_integer(**checked: object) -> int:
    """Returns an integer of at least 0, or raises."""
    return _number(
        checked, "an integer of at least 0", lambda n: n >= 0, numbers.Integral
    )


def one_of(allowed: Iterable[object], **checked: Any) -> Any:
    """Returns a value that is among `allowed`, or raises."""
    name, value = _unpack(checked)
    allowed = tuple(allowed)
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name} must be one of {choices}, got {_show(value)}.")
    return value


def instance_of(types: type | tuple[type, ...], **checked: Any) -> Any:
    """Returns a value of one of the given types, or raises."""
    name, value = _unpack(checked)
    if not isinstance(value, types):
        types = types if isinstance(types, tuple) else (types,)
        names = " or ".join(type_.__name__ for type_ in types)
        raise TypeError(f"{name} must be a {names}, got {_show(value)}.")
    return value


def exactly(type_: type, way_out: str = "", /, **checked: Any) -> Any:
    """Returns a value of a type and of no subclass, or raises.

    It is for objects from which a cost is read: a subclass may do something else.
    """
    name, value = _unpack(checked)
    if type(value) is not type_:
        raise TypeError(
            f"{name} must be a {type_.__name__} itself, got {_show(value)}{way_out}."
        )
    return value


def _show(value: object) -> str:
    """Returns a value in bounded length; of what may hold examples, the type."""
    if not isinstance(value, bool | int | float | str | type | None):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
