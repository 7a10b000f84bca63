"""The names that mechanisms go by: in `make_private`, in `train.py`."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from tfdp_fl import _validate

if TYPE_CHECKING:
    from tfdp_fl.mechanisms import mechanism

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
        cls.registered_name = name
        return cls

    return known


def load(module: str) -> None:
    """Imports what registers mechanisms of somebody's own.

    Args:
      module: A Python file's path, ending in .py, or an importable module.

    Raises:
      ImportError: There is no such file or module.
    """
    if not module.endswith(".py"):
        importlib.import_module(module)
        return
    path = pathlib.Path(module)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"There is no Python file {module}.")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded  # Dataclasses look themselves up there.
    spec.loader.exec_module(loaded)


def load_named_in(arguments: Sequence[str], flag: str) -> None:
    """Loads what a command line names by a flag, before its flags are made."""
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
