"""Packages that few need: imported where they are used, missed by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needed(distribution: str, what: str) -> Iterator[None]:
    """Says what to install if an import of the block finds no package.

    Args:
      distribution: What pip calls it.
      what: What needs it, as the beginning of a sentence.

    Raises:
      ImportError: It is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{what} needs {distribution}, which is not installed: "
            f"pip install {distribution}",
            name=error.name,
        ) from error
