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

_CHECK, _HELP, _START, _NONE_WORD = "check", "help", "start", "none_word"


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
    return dataclasses.field(
        default=default,
        metadata={
            _CHECK: check,
            _HELP: help,
            _START: start,
            _NONE_WORD: none_word,
        },
    )


def check_all(declared: Any) -> None:
    """Checks every parameter of a frozen dataclass, and keeps what it is."""
    for field in dataclasses.fields(declared):
        if _CHECK in field.metadata:
            value = field.metadata[_CHECK](
                **{field.name: getattr(declared, field.name)}
            )
            object.__setattr__(declared, field.name, value)


def help_of(field: dataclasses.Field[Any]) -> str:
    """Returns a parameter's sentence of help."""
    return str(field.metadata.get(_HELP, ""))


def start_of(field: dataclasses.Field[Any]) -> Any:
    """Returns what `train.py` starts from; None where the default does."""
    return field.metadata.get(_START)


def none_word_of(field: dataclasses.Field[Any]) -> str | None:
    """Returns what stands for None on a command line, if anything does."""
    return field.metadata.get(_NONE_WORD)


class OneOf:
    """Allows one of some words.

    Attributes:
      words: Those.
    """

    def __init__(self, *words: str):
        self.words = words

    def __call__(self, **checked: Any) -> str:
        """Checks one named value."""
        return str(_validate.one_of(self.words, **checked))


class Optional:
    """Allows None beside what another check allows."""

    def __init__(self, check: Check):
        self.check = check

    def __call__(self, **checked: Any) -> Any:
        """Checks one named value."""
        ((_, value),) = checked.items()
        return None if value is None else self.check(**checked)


class Scheduled:
    """Allows a number, one value a round, or a callable of the round."""

    def __init__(self, check: Check):
        self.check = check

    def __call__(self, **checked: Any) -> schedules.Schedule:
        """Checks one named value."""
        ((name, value),) = checked.items()
        return schedules.checked(value, self.check, name)


def words_of(field: dataclasses.Field[Any]) -> Sequence[str] | None:
    """Returns the words that a parameter may be, None if it is no word."""
    check = field.metadata.get(_CHECK)
    return check.words if isinstance(check, OneOf) else None
