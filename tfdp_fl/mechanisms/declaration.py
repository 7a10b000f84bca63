"""How a mechanism declares its name and its parameters.

A parameter is a dataclass field, and its declaration is the only source of facts about
it: the constructor's check, the flags and help of `train.py`, the tables in the
documentation, and `make_private` all use it.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tfdp_fl import _validate, schedules
from tfdp_fl.mechanisms import clipping

if TYPE_CHECKING:
    from tfdp_fl.mechanisms import mechanism

Check = Callable[..., Any]

_T = TypeVar("_T", bound="type[mechanism.Mechanism]")

_by_name: dict[str, type[mechanism.Mechanism]] = {}


def register(name: str) -> Callable[[_T], _T]:
    """Returns a class decorator that registers a mechanism under a name.

    Args:
      name: In lower case, as users type it: `make_private(mechanism=name)`,
        `train.py --mechanism=name`.

    Raises:
      ValueError: Another mechanism has that name.
    """

    def decorate(cls: _T) -> _T:
        registered = _by_name.get(name)
        if registered is not None and registered.__qualname__ != cls.__qualname__:
            raise ValueError(
                f"name must be new, got {name!r}, which {registered.__qualname__} "
                "has already."
            )
        _by_name[name] = cls
        return cls

    return decorate


def load(module: str) -> None:
    """Imports a module that registers user-defined mechanisms.

    Args:
      module: The path of a Python file, ending in .py, or an importable module.

    Raises:
      ImportError: There is no such file or module.
    """
    path = pathlib.Path(module)
    if path.suffix == ".py":
        sys.path.insert(0, str(path.parent))
        module = path.stem
    file = getattr(importlib.import_module(module), "__file__", None)
    if path.suffix == ".py" and not (file and path.exists() and path.samefile(file)):
        raise ImportError(f"There is no Python file {path}, or {file} has its name.")


def load_named_in(arguments: Sequence[str], flag: str) -> None:
    """Loads the modules that a command line names, before its flags are made."""
    for index, argument in enumerate(arguments):
        name, separator, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == flag:
            next_arguments = arguments[index + 1 : index + 2]
            load(value if separator else (next_arguments or [""])[0])


def names() -> tuple[str, ...]:
    """Returns all names, in the order of registration."""
    return tuple(_by_name)


def by_name(name: str) -> type[mechanism.Mechanism]:
    """Returns the mechanism with a name.

    Raises:
      ValueError: There is none; the message lists all names.
    """
    _validate.one_of(_by_name, mechanism=name)
    return _by_name[name]


def parameter(
    check: Check,
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    start: Any = None,
    none_word: str | None = None,
) -> Any:
    """Returns a field of a mechanism.

    Args:
      check: Called as `check(name=value)`; returns the value to store, or raises a
        `ValueError` or `TypeError` that names the parameter (`_validate`, and the
        functions here).
      help: One sentence, for `train.py --help` and the documentation.
      default: The default; without one, the parameter is required.
      start: The default of `train.py`, if there is no default or another one suits
        `train.py` better.
      none_word: The word for None on a command line.
    """
    metadata = {"check": check, "help": help, "start": start, "none_word": none_word}
    return dataclasses.field(default=default, metadata=metadata)


# Checks of a number, for `parameter`.
positive = _validate.positive
non_negative = _validate.non_negative


class OneOf:
    """Checks that a value is one of some words.

    Attributes:
      words: The allowed words.
    """

    def __init__(self, *words: str):
        self.words: Sequence[str] = words

    def __call__(self, **checked: object) -> str:
        """Checks one named value."""
        return str(_validate.one_of(self.words, **checked))


def optional(check: Check) -> Check:
    """Returns a check that allows None besides the values of another check."""

    def check_optional(**value: object) -> object:
        ((_, argument),) = value.items()
        return None if argument is None else check(**value)

    return check_optional


def schedule_of(check: Check) -> Check:
    """Returns a check of a number, one value per round, or a callable of the round."""

    def check_schedule(**value: schedules.Schedule) -> schedules.Schedule:
        ((name, schedule),) = value.items()
        return schedules.check_schedule(schedule, check, name)

    return check_schedule


def clip(**checked: object) -> float:
    """Returns a clip norm at which float32 keeps the guarantee, or raises an error."""
    ((name, value),) = checked.items()
    value = _validate.positive(**checked)
    low, high = clipping.SMALLEST_CLIP_NORM, clipping.LARGEST_CLIP_NORM
    if not low <= value <= high:
        raise ValueError(
            f"{name} must be from {low:g} to {high:g}, got {value!r}: outside this "
            "range, float32 can neither clip nor add noise."
        )
    return value
