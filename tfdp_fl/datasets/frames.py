"""A table with a column that names the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdp_fl import _validate

Columns = str | Sequence[str] | Mapping[str, str | Sequence[str]]
# Of columns that are no numbers: the values that each may have, known beforehand.
Vocabulary = Mapping[str, Sequence[Any]] | None


def split(
    frame: Any,
    client: str,
    features: Columns | None,
    label: Columns,
    sample_weight: str | None = None,
    vocabulary: Vocabulary = None,
) -> tuple[Any, Any, dict[Any, np.ndarray], Any]:
    """Returns (x, y, rows of each client, weights) of a pandas frame.

    Args:
      frame: A `pandas.DataFrame`.
      client: See `FederatedDataset.from_dataframe`.
      features: See there.
      label: See there.
      sample_weight: See there; the weights are None where it is.
      vocabulary: See there.

    Raises:
      TypeError, ValueError: See there.
    """
    names = _names(frame)
    features = chosen(names, client, features, label, sample_weight)
    check_vocabulary(names, vocabulary)
    if not len(frame):
        raise ValueError("frame must have rows, got none.")
    return (
        arrays(frame, features, "features", vocabulary),
        arrays(frame, label, "label", vocabulary),
        rows_by_client(ids(frame, client)),
        _weights(frame, sample_weight),
    )


def of_one_client(
    frame: Any,
    features: Columns | None,
    label: Columns,
    sample_weight: str | None,
    vocabulary: Vocabulary = None,
) -> tuple[Any, ...]:
    """Returns `(x, y)` or `(x, y, sample_weight)` of one client's own frame.

    Raises:
      TypeError, ValueError: See `FederatedDataset.from_dataframe`.
    """
    features = chosen(_names(frame), None, features, label, sample_weight)
    x = arrays(frame, features, "features", vocabulary)
    y = arrays(frame, label, "label", vocabulary)
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


def check_vocabulary(names: list[str], vocabulary: Vocabulary) -> None:
    """Raises unless a vocabulary maps columns that there are to lists of values."""
    if vocabulary is None:
        return
    _validate.instance_of(Mapping, vocabulary=vocabulary)
    for name, values in vocabulary.items():
        _known(names, vocabulary=name)
        _validate.instance_of((list, tuple, np.ndarray), vocabulary=values)


def _weights(frame: Any, sample_weight: str | None) -> np.ndarray | None:
    if sample_weight is None:
        return None
    return array(frame, sample_weight, "sample_weight").astype(np.float32)


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


def arrays(
    frame: Any, columns: Any, argument: str, vocabulary: Vocabulary = None
) -> Any:
    """Returns [n] of one column, [n, F] of a list of them, a dict of a dict."""
    if isinstance(columns, Mapping):
        return {
            key: arrays(frame, each, argument, vocabulary)
            for key, each in columns.items()
        }
    if isinstance(columns, str):
        return array(frame, columns, argument, vocabulary)
    found = []
    for name in columns:
        one = array(frame, name, argument, vocabulary)
        if argument == "features" and name in (vocabulary or {}):
            one = np.eye(len((vocabulary or {})[name]), dtype=np.float32)[one]
        found.append(one.reshape(len(one), -1))
    if argument == "features":
        found = [one.astype(np.float32) for one in found]
    return np.concatenate(found, axis=1)


def _codes(column: Any, name: str, values: Sequence[Any], first_row: int) -> np.ndarray:
    """Returns the places of a column's values in its vocabulary, int64 [n]."""
    places = {value: place for place, value in enumerate(values)}
    if len(places) < len(values) or not places:
        raise ValueError(
            f"vocabulary must have different values of column {name!r}, got some "
            "repeatedly, or none."
        )
    codes = np.array([places.get(value, -1) for value in column.tolist()], np.int64)
    unknown = np.flatnonzero(codes < 0)
    if len(unknown):
        raise ValueError(
            f"vocabulary must have all values of column {name!r}, got {len(unknown)} "
            f"rows with others, the first in row {first_row + unknown[0]}."
        )
    return codes


def array(
    frame: Any, name: str, argument: str, vocabulary: Vocabulary = None
) -> np.ndarray:
    """Returns one column, [n]: numbers, or places in its vocabulary.

    Raises:
      ValueError: It holds something else, or has missing values.
    """
    column = frame[name]
    if not len(column):  # A file without rows does not tell of which kind.
        return np.zeros(0, np.float32)
    first_row = frame.attrs.get("first_row", 0)
    kind = getattr(column.dtype, "kind", "O")
    declared = (vocabulary or {}).get(name)
    if kind not in "biuf" and declared is None:
        raise ValueError(
            f"{argument} must be numbers, got column {name!r} of {column.dtype}. "
            "Declare the values that text or categories may have, known beforehand: "
            f"from_dataframe(..., vocabulary={{{name!r}: [...]}})."
        )
    if column.isna().any():
        raise ValueError(
            f"{argument} must have a value in every row, got column {name!r} "
            f"with {int(column.isna().sum())} missing, the first in row "
            f"{first_row + int(np.argmax(column.isna().to_numpy()))}. Fill them in, "
            "with a number that is not computed from clients: "
            f"frame.fillna({{{name!r}: 0}})."
        )
    if declared is not None:
        return _codes(column, name, declared, first_row)
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


def ids(frame: Any, client: str) -> list[Any]:
    """Returns whose each row is.

    Raises:
      ValueError: A row has no id.
    """
    column = frame[client]
    if column.isna().any():
        raise ValueError(
            f"client must be named in every row, got column {client!r} with "
            f"{int(column.isna().sum())} missing, the first in row "
            f"{frame.attrs.get('first_row', 0) + int(np.argmax(column.isna()))}."
        )
    return column.tolist()


def rows_by_client(row_ids: list[Any]) -> dict[Any, np.ndarray]:
    """Returns each client's rows (int64), by id, in the order of the rows.

    Args:
      row_ids: The client of each row.
    """
    place: dict[Any, int] = {}
    codes = np.fromiter(
        (place.setdefault(each, len(place)) for each in row_ids),
        np.int64,
        len(row_ids),
    )
    # Stable: a client's rows stay in the frame's order.
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(place)))
    return dict(zip(place, np.split(order, ends[:-1]), strict=True))
