"""Imports that wait: TensorFlow until it is used, packages that few need.

A mechanism is a declaration, and much is done with it that needs no
TensorFlow: it is priced, described, sent to clients. A server that only adds up
what clients clipped (`tfdp_fl.flower`) never imports it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any


class _Module:
    """Stands for a module until something of it is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # What inspection asks of any object.
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)

    def __repr__(self) -> str:
        return f"<{self._name}, imported on use>"


if TYPE_CHECKING:  # So that `tf.Tensor` is a name in annotations.
    import tensorflow as tf
else:
    tf = _Module("tensorflow")


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
