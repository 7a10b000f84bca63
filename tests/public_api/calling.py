"""A call of something public, and calls of it that are wrong."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tfdp_fl

Calls = Iterator[tuple[str, Callable[[], "Call"]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call that is right.

    Attributes:
      function: What is called.
      arguments: With these, by name.
      paths: Those that name a file or a directory: an OSError is documented.
      counts: Those that say how often something is done, which takes as long
        as they say.
      errors: Documented besides ValueError and TypeError.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    paths: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    errors: tuple[type[Exception], ...] = ()

    def __call__(self, **strange: Any) -> None:
        """Calls it, with some arguments strange; documented errors are none."""
        documented = (ValueError, TypeError, *self.errors)
        if any(name in self.paths for name in strange):
            documented = (*documented, OSError)
        try:
            self.function(**{**self.arguments, **strange})
        except documented as error:
            if not strange:
                raise
            if not str(error):
                raise AssertionError("an error says nothing") from error


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the arguments of a function that have defaults."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
        and not name.startswith("_")
    }


def usual(function: Callable[..., Any], **given: Any) -> Call:
    """Returns a call with what is given, and every default."""
    options = {
        name: given.pop(name) for name in ("paths", "counts", "errors") if name in given
    }
    return Call(
        function=function,
        arguments={**defaults(function), **given},
        **options,
    )


def fixed() -> tfdp_fl.FixedClipping:
    """Returns a mechanism."""
    return tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
