"""How a mechanism is declared: its name, and its parameters with all that is said.

A parameter is a dataclass field. What is said of it here is all that there is:
construction checks it, and the flags of `train.py`, its help, the tables of the
documentation and `make_private` are made from it.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tfdp_fl import _validate, schedules

if TYPE_CHECKING:
    from tfdp_fl.mechanisms import mechanism

Check = Callable[..., Any]

# Within this range float32 clips and noises correctly. Below the squares of what is
# to be clipped begin to vanish, above the noise is no number any more.
SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 1e-10, 1e30

_T = TypeVar("_T", bound="type[mechanism.Mechanism]")

_by_name: dict[str, type[mechanism.Mechanism]] = {}


def register(name: str) -> Callable[[_T], _T]:
    """Returns a class decorator that makes a mechanism known by a name.

    Args:
      name: Lower case, as it is typed: `make_private(mechanism=name)`,
        `train.py --mechanism=name`.

    Raises:
      ValueError: Another mechanism has that name.
    """

    def known(cls: _T) -> _T:
        other = _by_name.get(name)
        if other is not None and other.__qualname__ != cls.__qualname__:
            raise ValueError(
                f"name must be new, got {name!r}, which {other.__qualname__} "
                "has already."
            )
        _by_name[name] = cls
        return cls

    return known


def load(module: str) -> None:
    """Imports what registers mechanisms of somebody's own.

    Args:
      module: A Python file's path, ending in .py, or an importable module.

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
    for place, argument in enumerate(arguments):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == flag:
            following = arguments[place + 1 : place + 2]
            load(value if equals else (following or [""])[0])


def names() -> tuple[str, ...]:
    """Returns all names, in the order in which they became known."""
    return tuple(_by_name)


def by_name(name: str) -> type[mechanism.Mechanism]:
    """Returns the mechanism of a name.

    Raises:
      ValueError: There is none; the message lists the names.
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
      check: Called as `check(name=value)`; returns the value as it is kept, or
        raises a `ValueError` or `TypeError` that names the parameter
        (`_validate`, and the functions here).
      help: One sentence, for `train.py --help` and the documentation.
      default: The default; without one the parameter has to be given.
      start: What `train.py` starts from where nothing is given and there is
        no default, or another one suits it better.
      none_word: What stands for None on a command line.
    """
    metadata = {"check": check, "help": help, "start": start, "none_word": none_word}
    return dataclasses.field(default=default, metadata=metadata)


# Checks of a number, for `parameter`.
positive = _validate.positive
non_negative = _validate.non_negative


class OneOf:
    """Allows one of some words.

    Attributes:
      words: Those.
    """

    def __init__(self, *words: str):
        self.words: Sequence[str] = words

    def __call__(self, **checked: object) -> str:
        """Checks one named value."""
        return str(_validate.one_of(self.words, **checked))


def optional(check: Check) -> Check:
    """Returns a check that allows None beside what another one allows."""

    def checked(**value: object) -> object:
        ((_, given),) = value.items()
        return None if given is None else check(**value)

    return checked


def schedule_of(check: Check) -> Check:
    """Returns a check of a number, one value a round, or a callable of the round."""

    def checked(**value: schedules.Schedule) -> schedules.Schedule:
        ((name, schedule),) = value.items()
        return schedules.check_schedule(schedule, check, name)

    return checked


def clip(**checked: object) -> float:
    """Returns a clip norm for which float32 keeps the guarantee, or raises."""
    ((name, value),) = checked.items()
    value = _validate.positive(**checked)
    if not SMALLEST_CLIP_NORM <= value <= LARGEST_CLIP_NORM:
        raise ValueError(
            f"{name} must be from {SMALLEST_CLIP_NORM:g} to "
            f"{LARGEST_CLIP_NORM:g}, got {value!r}: beyond, float32 "
            "can neither clip nor noise."
        )
    return value
