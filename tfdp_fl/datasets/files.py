"""A directory with one file for each client."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdp_fl import _optional
from tfdp_fl.datasets import frames, nests

_TABLES = {".csv": "read_csv", ".parquet": "read_parquet"}
_ARRAYS, _PARQUET = ".npz", ".parquet"
_KNOWN = (*_TABLES, _ARRAYS)
_FEATURE = "x_"


def readers(
    directory: str | os.PathLike[str],
    pattern: str | None,
    features: frames.Columns | None,
    label: frames.Columns,
    sample_weight: str | None,
) -> tuple[list[str], Callable[[str], tuple[Any, ...]]]:
    """Returns the clients' ids, and what reads the examples of one.

    Args:
      directory: See `FederatedDataset.from_directory`.
      pattern: See there.
      features: See there.
      label: See there.
      sample_weight: See there.

    Raises:
      ValueError: See there.
    """
    root = pathlib.Path(directory)
    if not root.is_dir():
        raise ValueError(
            f"directory must be one that is there, got {os.fspath(directory)!r}."
        )
    found = _names(root, pattern)
    if not found:
        raise ValueError(
            f"directory must hold files of clients ({', '.join(_KNOWN)}), got "
            f"{os.fspath(directory)!r} with none that pattern={pattern!r} "
            "names."
        )
    suffixes: dict[str, str] = {}
    for name in found:
        client_id, suffix = os.path.splitext(name)
        if suffix not in _KNOWN:
            raise ValueError(
                f"pattern must name files of {', '.join(_KNOWN)}, got "
                f"{os.path.basename(name)!r}."
            )
        before = suffixes.setdefault(client_id, suffix)
        if before != suffix:
            client = os.path.basename(client_id)
            raise ValueError(
                "directory must hold one file for each client, got "
                f"{client + before!r} and {client + suffix!r}."
            )
    _check_readable(set(suffixes.values()))

    root_path = os.fspath(root)

    def read(client_id: str) -> tuple[Any, ...]:
        suffix = suffixes[client_id]
        path = os.path.join(root_path, client_id + suffix)
        if suffix == _ARRAYS:
            return _arrays(path)
        pandas = importlib.import_module("pandas")
        frame = getattr(pandas, _TABLES[suffix])(path)
        return frames.of_one_client(frame, features, label, sample_weight)

    return list(suffixes), read


def _names(root: pathlib.Path, pattern: str | None) -> list[str]:
    """Returns the files, in order, by their paths in the directory.

    A directory with a million of them is listed in a second: the system says
    what is a file where it lists names, and no `pathlib.Path` is made of each.
    """
    if pattern and ("/" in pattern or os.sep in pattern or "**" in pattern):
        paths = sorted(path for path in root.glob(pattern) if path.is_file())
        return [path.relative_to(root).as_posix() for path in paths]
    if pattern == "":
        raise ValueError("pattern must name files, got ''.")
    matches = re.compile(fnmatch.translate(pattern or "*")).match
    with os.scandir(root) as entries:
        return sorted(
            each.name
            for each in entries
            if (
                os.path.splitext(each.name)[1] in _KNOWN
                if pattern is None
                else matches(each.name)
            )
            and each.is_file()
        )


def _check_readable(suffixes: set[str]) -> None:
    """Raises ImportError, before any client is read, if no package can."""
    if suffixes & _TABLES.keys():
        with _optional.needed("pandas", "Reading tables"):
            importlib.import_module("pandas")
    if _PARQUET in suffixes and importlib.util.find_spec("fastparquet") is None:
        with _optional.needed("pyarrow", f"Reading {_PARQUET} files"):
            importlib.import_module("pyarrow")


def _arrays(path: str) -> tuple[Any, ...]:
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    x: Any = arrays.pop("x", None)
    if x is None:
        x = {
            name.removeprefix(_FEATURE): arrays.pop(name)
            for name in list(arrays)
            if name.startswith(_FEATURE)
        }
    unknown = sorted(arrays.keys() - {"y", "sample_weight"})
    if unknown or "y" not in arrays or (isinstance(x, dict) and not x):
        raise nests.ExamplesValueError(
            "A client's .npz must hold the arrays x (or x_<name> of each "
            "feature) and y, and perhaps sample_weight, got "
            f"{', '.join(map(repr, unknown)) or 'fewer'}."
        )
    return x, arrays["y"], arrays.get("sample_weight")
