"""A table with a column that names the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Columns = str | Sequence[str] | Mapping[str, str | Sequence[str]]


def split(
    frame: Any,
    client: str,
    features: Columns | None,
    label: Columns,
    sample_weight: str | None = None,
) -> tuple[Any, Any, dict[Any, np.ndarray], Any]:
    """Returns (x, y, rows of each client, weights) of a pandas frame.

    Args:
      frame: A `pandas.DataFrame`.
      client: See `FederatedDataset.from_dataframe`.
      features: See there.
      label: See there.
      sample_weight: See there; the weights are None where it is.

    Raises:
      TypeError, ValueError: See there.
    """
    names = _names(frame)
    features = chosen(names, client, features, label, sample_weight)
    if not len(frame):
        raise ValueError("frame must have rows, got none.")
    return (
        _arrays(frame, features, "features"),
        _arrays(frame, label, "label"),
        rows_by_client(_ids(frame, client)),
        _weights(frame, sample_weight),
    )


def of_one_client(
    frame: Any,
    features: Columns | None,
    label: Columns,
    sample_weight: str | None,
) -> tuple[Any, ...]:
    """Returns `(x, y)` or `(x, y, sample_weight)` of one client's own frame.

    Raises:
      TypeError, ValueError: See `FederatedDataset.from_dataframe`.
    """
    features = chosen(_names(frame), None, features, label, sample_weight)
    x = _arrays(frame, features, "features")
    y = _arrays(frame, label, "label")
    if sample_weight is None:
        return x, y
    return x, y, _weights(frame, sample_weight)


def _names(frame: Any) -> list[str]:
    for attribute in ("columns", "__getitem__", "iloc"):
        if not hasattr(frame, attribute):
            raise TypeError(
                f"frame must be a pandas.DataFrame, got {type(frame).__name__}."
            )
    return list(frame.columns)


def chosen(
    names: list[str],
    client: str | None,
    features: Columns | None,
    label: Columns,
    sample_weight: str | None,
) -> Columns:
    """Returns the columns of the features, once all columns are known.

    Args:
      names: The columns that there are.
      client: The column of clients; None: there is none.
      features: None: all that are not named otherwise.
      label: The column or columns of the labels.
      sample_weight: The column of weights, or None.

    Raises:
      ValueError: A column is not there, or a feature is something else.
    """
    if len(set(names)) < len(names):
        raise ValueError("frame must have distinct column names.")
    others = {}
    if client is not None:
        others["client"] = client
    if sample_weight is not None:
        others["sample_weight"] = sample_weight
    for argument, name in others.items():
        _known(names, **{argument: name})
    if features is None:
        taken = {*others.values(), *named(label)}
        features = [name for name in names if name not in taken]
    _known(names, features=features)
    _known(names, label=label)
    used = [*named(features), *named(label)]
    if client in used or (client is not None and client == sample_weight):
        raise ValueError(
            "features, label and sample_weight must not hold the client "
            f"column, got {client!r}: who somebody is would be learned as a "
            "feature."
        )
    return features


def _weights(frame: Any, sample_weight: str | None) -> np.ndarray | None:
    if sample_weight is None:
        return None
    return _array(frame, sample_weight, "sample_weight").astype(np.float32)


def named(columns: Any) -> list[str]:
    """Returns the names in what says which columns to take."""
    if isinstance(columns, Mapping):
        return [name for each in columns.values() for name in named(each)]
    return [columns] if isinstance(columns, str) else list(columns)


def _known(names: list[str], **checked: Any) -> None:
    ((argument, columns),) = checked.items()
    if not named(columns):
        raise ValueError(f"{argument} must name a column, got none.")
    for name in named(columns):
        if name not in names:
            raise ValueError(
                f"{argument} must name columns of the frame "
                f"({', '.join(map(repr, names))}), got {name!r}."
            )


def _arrays(frame: Any, columns: Any, argument: str) -> Any:
    """Returns [n] of one column, [n, F] of a list of them, a dict of a dict."""
    if isinstance(columns, Mapping):
        return {key: _arrays(frame, each, argument) for key, each in columns.items()}
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
    if not len(column):  # A file without rows does not tell of which kind.
        return np.zeros(0, np.float32)
    kind = getattr(column.dtype, "kind", "O")
    if kind not in "biuf":
        raise ValueError(
            f"{argument} must be numbers, got column {name!r} of {column.dtype}. "
            + (
                f"Of text or categories, make columns of zeros and ones: frame = "
                f"pandas.get_dummies(frame, columns=[{name!r}], dtype=float)."
                if argument == "features"
                else f"Number its classes: frame[{name!r}], classes = "
                f"pandas.factorize(frame[{name!r}], sort=True)."
            )
        )
    if column.isna().any():
        raise ValueError(
            f"{argument} must have a value in every row, got column {name!r} "
            f"with {int(column.isna().sum())} missing. Fill them in, with a number "
            f"that is not computed from clients: frame.fillna({{{name!r}: 0}})."
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


def _ids(frame: Any, client: str) -> list[Any]:
    column = frame[client]
    if column.isna().any():
        raise ValueError(
            f"client must be named in every row, got column {client!r} with "
            f"{int(column.isna().sum())} missing."
        )
    return column.tolist()


def rows_by_client(ids: list[Any]) -> dict[Any, np.ndarray]:
    """Returns each client's rows (int64), by id, in the order of the rows.

    Args:
      ids: The client of each row.
    """
    place: dict[Any, int] = {}
    codes = np.fromiter(
        (place.setdefault(each, len(place)) for each in ids), np.int64, len(ids)
    )
    # Stable: a client's rows stay in the frame's order.
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(place)))
    return dict(zip(place, np.split(order, ends[:-1]), strict=True))
