"""A table with a column that names the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Columns = str | Sequence[str] | Mapping[str, str | Sequence[str]]


def split(
    frame: Any, client: str, features: Columns | None, label: Columns
) -> tuple[Any, Any, dict[Any, np.ndarray]]:
    """Returns (x, y, rows of each client) of a pandas frame.

    Args:
      frame: A `pandas.DataFrame`.
      client: See `FederatedDataset.from_dataframe`.
      features: See there.
      label: See there.

    Raises:
      TypeError, ValueError: See there.
    """
    for attribute in ("columns", "__getitem__", "iloc"):
        if not hasattr(frame, attribute):
            raise TypeError(
                f"frame must be a pandas.DataFrame, got {type(frame).__name__}."
            )
    names = list(frame.columns)
    if len(set(names)) < len(names):
        raise ValueError("frame must have distinct column names.")
    _known(names, client=client)
    if features is None:
        taken = {client, *_named(label)}
        features = [name for name in names if name not in taken]
    _known(names, features=features)
    _known(names, label=label)
    used = [*_named(features), *_named(label)]
    for name in used:
        if name == client:
            raise ValueError(
                f"features and label must not hold the client column, got "
                f"{name!r}: who somebody is would be learned as a feature."
            )
    if not len(frame):
        raise ValueError("frame must have rows, got none.")
    return (
        _arrays(frame, features, "features"),
        _arrays(frame, label, "label"),
        _rows_by_client(frame, client),
    )


def _named(columns: Any) -> list[str]:
    if isinstance(columns, Mapping):
        return [name for each in columns.values() for name in _named(each)]
    return [columns] if isinstance(columns, str) else list(columns)


def _known(names: list[str], **checked: Any) -> None:
    ((argument, columns),) = checked.items()
    if not _named(columns):
        raise ValueError(f"{argument} must name a column, got none.")
    for name in _named(columns):
        if name not in names:
            raise ValueError(
                f"{argument} must name columns of the frame "
                f"({', '.join(map(repr, names))}), got {name!r}."
            )


def _arrays(frame: Any, columns: Any, argument: str) -> Any:
    """Returns [n] of one column, [n, F] of a list of them, a dict of a dict."""
    if isinstance(columns, Mapping):
        return {
            key: _arrays(frame, each, argument) for key, each in columns.items()
        }
    if isinstance(columns, str):
        return _array(frame, columns, argument)
    return np.stack(
        [
            _array(frame, name, argument).astype(np.float32)
            if argument == "features"
            else _array(frame, name, argument)
            for name in columns
        ],
        axis=1,
    )


def _array(frame: Any, name: str, argument: str) -> np.ndarray:
    column = frame[name]
    kind = getattr(column.dtype, "kind", "O")
    if kind not in "biuf":
        raise ValueError(
            f"{argument} must be numbers, got column {name!r} of "
            f"{column.dtype}: make it numbers first (for classes: "
            f"pandas.factorize)."
        )
    if column.isna().any():
        raise ValueError(
            f"{argument} must have a value in every row, got column {name!r} "
            f"with {int(column.isna().sum())} missing."
        )
    if kind == "u" and column.max() > np.iinfo(np.int64).max:
        raise ValueError(
            f"{argument} must fit into int64, got column {name!r} of "
            f"{column.dtype} with larger numbers."
        )
    with np.errstate(over="ignore"):  # What becomes infinite is found below.
        array = column.to_numpy(dtype=np.float32 if kind == "f" else np.int64)
    if kind == "f" and not np.isfinite(array).all():
        raise ValueError(
            f"{argument} must be finite, got column {name!r} with "
            f"{int((~np.isfinite(array)).sum())} values that are not, in "
            "float32."
        )
    return array


def _rows_by_client(frame: Any, client: str) -> dict[Any, np.ndarray]:
    column = frame[client]
    if column.isna().any():
        raise ValueError(
            f"client must be named in every row, got column {client!r} with "
            f"{int(column.isna().sum())} missing."
        )
    ids = column.tolist()
    place: dict[Any, int] = {}
    codes = np.fromiter(
        (place.setdefault(each, len(place)) for each in ids), np.int64, len(ids)
    )
    # Stable: a client's rows stay in the frame's order.
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(place)))
    return dict(zip(place, np.split(order, ends[:-1]), strict=True))
