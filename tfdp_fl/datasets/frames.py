"""A table with a column that names the client."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.datasets import client_ids

Columns = str | Sequence[str] | Mapping[str, str | Sequence[str]]
# Of columns that are no numbers: the values that each may have, known beforehand.
Vocabulary = Mapping[str, Sequence[Any]]


def split(
    frame: Any,
    client: str,
    features: Columns | None = None,
    label: Columns = "label",
    sample_weight: str | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[Any, Any, dict[Any, np.ndarray], Any]:
    """Returns (x, y, rows of each client, weights) of a pandas frame.

    The arguments and errors are those of `FederatedDataset.from_dataframe`; the
    weights are None where `sample_weight` is.
    """
    if not hasattr(frame, "iloc"):
        raise TypeError(
            f"frame must be a pandas.DataFrame, got {type(frame).__name__}."
        )
    names = list(frame.columns)
    if len(set(names)) < len(names):
        raise ValueError("frame must have distinct column names.")
    weight = [] if sample_weight is None else [sample_weight]
    if features is None:
        taken = {client, *weight, *_named(label)}
        features = [name for name in names if name not in taken]
    vocabulary = {} if vocabulary is None else vocabulary
    _validate.instance_of(Mapping, vocabulary=vocabulary)
    chosen = {"client": client, "features": features, "label": label}
    others = {"sample_weight": weight, "vocabulary": list(vocabulary)}
    for argument, columns in (chosen | others).items():
        if argument in chosen and not _named(columns):
            raise ValueError(f"{argument} must name a column, got none.")
        for name in _named(columns):
            if name not in names:
                raise ValueError(
                    f"{argument} must name columns of the frame "
                    f"({', '.join(map(repr, names))}), got {name!r}."
                )
    if client in [*_named(features), *_named(label), sample_weight]:
        raise ValueError(
            "features, label and sample_weight must not hold the client "
            f"column, got {client!r}: who somebody is would be learned as a "
            "feature."
        )
    if not len(frame):
        raise ValueError("frame must have rows, got none.")
    _check_none_missing(frame[client], "client", "be named in every row")
    weights = None
    if sample_weight is not None:
        weights = array(frame, sample_weight, "sample_weight", {}).astype(np.float32)
    return (
        arrays(frame, features, "features", vocabulary),
        arrays(frame, label, "label", vocabulary),
        client_ids.rows_by_client(frame[client].tolist()),
        weights,
    )


def _named(columns: Any) -> list[str]:
    """Returns the names in what says which columns to take."""
    if isinstance(columns, Mapping):
        return [name for part in columns.values() for name in _named(part)]
    return [columns] if isinstance(columns, str) else list(columns)


def arrays(frame: Any, columns: Any, argument: str, vocabulary: Vocabulary) -> Any:
    """Returns [n] of one column, [n, F] of a list of them, a dict of a dict."""
    if isinstance(columns, Mapping):
        return {
            key: arrays(frame, part, argument, vocabulary)
            for key, part in columns.items()
        }
    if isinstance(columns, str):
        return array(frame, columns, argument, vocabulary)
    found = []
    for name in columns:
        one = array(frame, name, argument, vocabulary)
        if argument == "features":
            one = np.eye(len(vocabulary[name]))[one] if name in vocabulary else one
            one = one.astype(np.float32)
        found.append(one.reshape(len(one), -1))
    return np.concatenate(found, axis=1)


def array(frame: Any, name: str, argument: str, vocabulary: Vocabulary) -> np.ndarray:
    """Returns one column, [n]: numbers, or places in its vocabulary.

    Raises:
      ValueError: It holds something else, or has missing values.
    """
    column = frame[name]
    kind = getattr(column.dtype, "kind", "O")
    declared = vocabulary.get(name)
    if kind not in "biuf" and declared is None:
        raise ValueError(
            f"{argument} must be numbers, got column {name!r} of {column.dtype}. "
            "Declare beforehand which values text or categories may have: "
            f"from_dataframe(..., vocabulary={{{name!r}: [...]}})."
        )
    _check_none_missing(column, argument, "have a value in every row")
    if declared is not None:
        return _codes(column, name, declared)
    if kind == "u" and column.max() > np.iinfo(np.int64).max:
        raise ValueError(
            f"{argument} must fit into int64, got column {name!r} of "
            f"{column.dtype} with larger numbers."
        )
    with np.errstate(over="ignore"):  # What becomes infinite is found below.
        array = column.to_numpy(dtype=np.float32 if kind == "f" else np.int64)
    check_finite(argument, array, name)
    return array


def check_finite(argument: str, array: np.ndarray, name: str | None = None) -> None:
    """Raises ValueError where a number of an array [n, ...] is not finite.

    Args:
      argument: What the array is, for the message.
      array: Of any dtype.
      name: The column that it is; None: its columns have numbers.
    """
    if array.dtype.kind != "f":
        return
    wrong = ~np.isfinite(array.reshape(len(array), -1))
    if wrong.any():
        row, column = (int(place) for place in np.argwhere(wrong)[0])
        raise ValueError(
            f"{argument} must have finite numbers (in float32) everywhere, got none "
            f"in column {column if name is None else repr(name)} of row {row}, and "
            f"{int(wrong.sum())} in all: fill them in, or leave those rows out."
        )


def _check_none_missing(column: Any, argument: str, what: str) -> None:
    missing = column.isna().to_numpy()
    if missing.any():
        raise ValueError(
            f"{argument} must {what}, got column {column.name!r} with "
            f"{int(missing.sum())} missing, the first in row "
            f"{int(np.argmax(missing))}. Leave those rows out, or fill them in with "
            "values that are not computed from clients."
        )


def _codes(column: Any, name: str, values: Sequence[Any]) -> np.ndarray:
    """Returns the places of a column's values in its vocabulary, int64 [n]."""
    _validate.instance_of((list, tuple, np.ndarray), vocabulary=values)
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
            f"vocabulary must list all values of column {name!r}, got {len(unknown)} "
            f"rows with others, the first in row {unknown[0]}."
        )
    return codes


def parquet_clients(
    path: str | os.PathLike[str], *columns: Any, **named: Any
) -> tuple[list[Any], Callable[[Any], tuple[Any, ...]]] | None:
    """Returns the clients of a sorted Parquet file, and what reads one of them.

    All values are checked now, one row group at a time. None: the rows of a client are
    not together.

    Args:
      path: The file.
      *columns: What follows `frame` in `split`.
      **named: Likewise.
    """
    from pyarrow import parquet

    @functools.lru_cache(maxsize=2)  # A client may begin in one and end in the next.
    def group(number: int) -> Any:
        table = parquet.ParquetFile(path).read_row_group(number)
        return table.to_pandas().reset_index(drop=True)

    metadata = parquet.read_metadata(path)
    pieces: dict[Any, list[tuple[int, slice]]] = collections.defaultdict(list)
    first_row = 0
    for number in range(metadata.num_row_groups):
        size = metadata.row_group(number).num_rows
        try:
            _, _, rows, _ = split(group(number), *columns, **named)
        except ValueError as error:
            if not first_row:
                raise
            raise ValueError(f"{error} Row 0 is row {first_row} of {path}.") from error
        first_row += size
        for client_id, own in rows.items():
            if len(own) <= own[-1] - own[0]:
                return None
            pieces[client_id].append((number, slice(own[0], own[-1] + 1)))
    # Where a group ends, a client may go on in the next.
    more = sum(map(len, pieces.values())) - len(pieces)
    if not pieces or more >= metadata.num_row_groups:
        return None

    def read(client_id: Any) -> tuple[Any, ...]:
        import pandas

        own = [group(number).iloc[rows] for number, rows in pieces[client_id]]
        x, y, found, weights = split(pandas.concat(own), *columns, **named)
        if list(found) != [client_id]:  # They would count as this one's.
            raise ValueError(f"{path} has changed: rows of other clients are there.")
        return (x, y) if weights is None else (x, y, weights)

    return list(pieces), read
