"""A mechanism's parameters, declared once: type, check, default and help.

A parameter is a dataclass field. What is said of it here is all that there is:
construction checks it, and the flags of `train.py`, its help, the tables of the
documentation and `make_private` are made from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tfdp_fl import _validate, schedules

Check = Callable[..., Any]

# Between these float32 clips and noises as it should. Below the squares of what is
# to be clipped begin to vanish, above the noise is no number any more.
SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 1e-10, 1e30


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


def check_all(declared: Any) -> None:
    """Checks every parameter of a frozen dataclass, and keeps what it is."""
    for field in dataclasses.fields(declared):
        if "check" in field.metadata:
            given = {field.name: getattr(declared, field.name)}
            object.__setattr__(declared, field.name, field.metadata["check"](**given))


class OneOf:
    """Allows one of some words.

    Attributes:
      words: Those.
    """

    def __init__(self, *words: str):
        self.words: Sequence[str] = words

    def __call__(self, **checked: Any) -> str:
        """Checks one named value."""
        return str(_validate.one_of(self.words, **checked))


def optional(check: Check) -> Check:
    """Returns a check that allows None beside what another one allows."""

    def checked(**value: Any) -> Any:
        ((_, given),) = value.items()
        return None if given is None else check(**value)

    return checked


def scheduled(check: Check) -> Check:
    """Returns a check of a number, one value a round, or a callable of the round."""

    def checked(**value: Any) -> schedules.Schedule:
        ((name, schedule),) = value.items()
        return schedules.checked(schedule, check, name)

    return checked


def clip(**checked: Any) -> float:
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
