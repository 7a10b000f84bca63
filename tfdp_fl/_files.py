"""Values converted to JSON, and files that are written atomically."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

# What the name of a file begins with that is not whole yet.
TEMPORARY = ".writing-"


@contextlib.contextmanager
def replace_file(
    path: str | os.PathLike[str], *, mode: int = 0o666, sync: bool = False
) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of another once it is written.

    A reader meanwhile gets the old one. If the block raises, the old one
    stays and nothing is left behind.

    Args:
      path: The file; its folder must exist.
      mode: Its permissions, less the umask.
      sync: Whether to have it on the disk afterwards, so that it is the old or
        the new one after a crash of the machine, too.

    Yields:
      A file to write bytes to.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(
        f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, mode), "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file's content by a text, in UTF-8."""
    with replace_file(path) as file:
        file.write(text.encode())


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Makes the names of new files in a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_plain(value: Any, default: Callable[[Any], Any] = repr) -> Any:
    """Returns what a value is after a round trip through JSON.

    Args:
      value: Python and NumPy values and tensors, in mappings and sequences of
        any depth. Keys become text, and tuples lists.
      default: Called on anything else; returns what stands for it.
    """
    if value is None or isinstance(value, bool | int | float | str):
        # NumPy's float64 and str are Python's as well.
        item = getattr(value, "item", None)
        return value if item is None else item()
    if isinstance(value, Mapping):
        return {
            str(k): to_plain(item_value, default) for k, item_value in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_plain(item_value, default) for item_value in value]
    if hasattr(value, "tolist"):
        return to_plain(value.tolist(), default)
    if hasattr(value, "numpy"):
        return to_plain(value.numpy(), default)
    return default(value)


def to_finite(value: Any) -> Any:
    """Returns a plain value with None for infinity and NaN, as JSON wants."""
    if isinstance(value, dict):
        return {key: to_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_canonical_json(value: Any) -> str:
    """Returns the one JSON text of a value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
