"""Clients' ids, and tables with a column of them."""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import re
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.datasets import nests

Columns = str | Sequence[str] | Mapping[str, str | Sequence[str]]
# Unicode's format and control characters.
_UNSEEN = ("Cf", "Cc")
# Of columns that are no numbers: the values that each may have, known beforehand.
Vocabulary = Mapping[str, Sequence[Any]]


def place_of(client_id: Any) -> float:
    """Returns a number in [0, 1) that is an id's own."""
    digest = hashlib.sha256(_text(client_id).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _text(client_id: Any) -> str:
    if isinstance(client_id, np.generic):
        client_id = client_id.item()
    return f"{type(client_id).__qualname__} {client_id!r}"


def distinct(client_ids: Sequence[Any]) -> Sequence[Any]:
    """Returns ids as a dataset keeps them: a list, or a range of places.

    A client under two ids takes part twice, and its sum is bounded once. Ids that
    a person would read as one are therefore warned of.

    Raises:
      ValueError: One is repeated, or does not equal itself.
    """
    if isinstance(client_ids, range):
        return client_ids
    kept = list(client_ids)
    if any(client_id != client_id for client_id in kept):
        raise ValueError("client_ids must name each client, got a missing value (NaN).")
    if any(isinstance(one, float) and abs(one) >= 2**53 for one in kept):
        raise ValueError(
            "client_ids must tell clients apart, got floating-point numbers of 2**53 "
            "or more, which may stand for several: read them as integers or as text."
        )
    if len(set(kept)) < len(kept):
        raise ValueError("client_ids must be distinct, got some repeatedly.")
    read: dict[str, Any] = {}
    for client_id in kept:
        other = read.setdefault(_as_read(client_id), client_id)
        if other is not client_id:
            warnings.warn(
                f"client_ids has {other!r} and {client_id!r}, which differ only in "
                "type, Unicode form, case, spaces, characters that are not seen, "
                "leading zeros or a '.0'. If both are one client, the "
                "guarantee does not cover that client: make their ids equal.",
                RuntimeWarning,
                stacklevel=4,
            )
            break
    return kept


def _as_read(client_id: Any) -> str:
    text = (
        client_id.decode("latin-1") if isinstance(client_id, bytes) else str(client_id)
    )
    text = "".join(unicodedata.normalize("NFKC", text).casefold().split())
    # Such as a byte order mark, or a space without width.
    text = "".join(one for one in text if unicodedata.category(one) not in _UNSEEN)
    # A column of whole numbers with a gap is one of floats; one of text has zeros.
    return re.sub(r"^([+-]?)0*(\d+?)(\.0+)?$", r"\1\2", text)


def digest(client_ids: Sequence[Any]) -> str:
    """Returns the SHA-256 of ids in their order, hexadecimal."""
    made = hashlib.sha256()
    for client_id in client_ids:
        text = _text(client_id)
        # With its length before it, no id can pass for two.
        made.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return made.hexdigest()


def rows_of_persons(client_ids: Any, num_rows: int) -> dict[Any, np.ndarray]:
    """Returns each person's rows (int64), by id, in the order of the rows.

    Args:
      client_ids: The client of each row, [n] numbers or strings.
      num_rows: n.

    Raises:
      ValueError: They are not; the message names the row.
    """
    if not num_rows:
        raise ValueError("x must have rows, got none.")
    if np.ma.is_masked(client_ids):
        client_ids = np.where(np.ma.getmaskarray(client_ids), None, client_ids.data)
    if isinstance(client_ids, list | tuple):
        values = [v.item() if isinstance(v, np.generic) else v for v in client_ids]
        shape, kinds = [len(values)], {isinstance(v, str | bytes) for v in values}
        if len(kinds) > 1 and any(isinstance(v, int | float) for v in values):
            # NumPy would write numbers out: 1 and 1.0 would be two persons.
            raise ValueError(
                "client_ids must be numbers alone or strings alone, got a list of both."
            )
    else:
        ids = client_ids if hasattr(client_ids, "iloc") else np.asarray(client_ids)
        if getattr(ids.dtype, "kind", "O") == "M" and isinstance(ids, np.ndarray):
            ids = ids.astype("datetime64[us]")  # Python has no finer ones.
        shape, values = list(ids.shape), ids.tolist()
    if shape != [num_rows]:
        raise ValueError(
            f"client_ids must be a vector with one id for each of the {num_rows} "
            f"rows, got {shape}."
        )
    for row, value in enumerate(values):
        if not _is_id(value):
            raise ValueError(
                "client_ids must be a number, a string, or another value that Python "
                f"can hash in every row, got a {type(value).__name__} that is none in "
                f"row {row}."
            )
    return rows_by_client(values)


def _is_id(value: Any) -> bool:
    try:
        hash(value)
        return value is not None and bool(value == value)
    except (TypeError, ValueError):
        return False


def rows_by_client(row_ids: list[Any]) -> dict[Any, np.ndarray]:
    """Returns each client's rows (int64), by id, in the order of the rows.

    Args:
      row_ids: The client of each row, of which there is one at least.
    """
    place: dict[Any, int] = {}
    codes = np.array([place.setdefault(each, len(place)) for each in row_ids])
    # Stable: a client's rows stay in the frame's order.
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(place)))
    return dict(zip(place, np.split(order, ends[:-1]), strict=True))


# Pandas frames.


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
    if not hasattr(frame, "itertuples"):
        raise TypeError(
            f"frame must be a pandas.DataFrame, got {type(frame).__name__}; "
            "to_pandas() makes one of most other tables."
        )
    names = column_names(frame, "frame")
    weight = [] if sample_weight is None else [sample_weight]
    if features is None:
        taken = [client, *weight, *_named(label)]
        features = [name for name in names if name not in taken]
    vocabulary = {} if vocabulary is None else vocabulary
    _validate.instance_of(Mapping, vocabulary=vocabulary)
    chosen = {"client": [client], "features": features, "label": label}
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
        rows_of_persons(frame[client], len(frame)),
        weights,
    )


def column_names(frame: Any, argument: str) -> list[Any]:
    """Returns the names of a frame's columns; raises ValueError if one is repeated."""
    names = list(frame.columns)
    if len(set(names)) < len(names):
        raise ValueError(f"{argument} must have distinct column names.")
    return names


def _is_one(columns: Any) -> bool:
    return isinstance(columns, str) or not np.iterable(columns)


def _named(columns: Any) -> list[str]:
    """Returns the names in what says which columns to take."""
    if isinstance(columns, Mapping):
        return [name for part in columns.values() for name in _named(part)]
    return [columns] if _is_one(columns) else list(columns)


def arrays(frame: Any, columns: Any, argument: str, vocabulary: Vocabulary) -> Any:
    """Returns [n] of one column, [n, F] of a list of them, a dict of a dict."""
    if isinstance(columns, Mapping):
        return {
            key: arrays(frame, part, argument, vocabulary)
            for key, part in columns.items()
        }
    if _is_one(columns):
        return array(frame, columns, argument, vocabulary)
    found = []
    for name in columns:
        one = array(frame, name, argument, vocabulary)
        if argument not in ("label", "y"):
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
            "Make numbers of it, or declare beforehand which values text or categories "
            f"may have: from_dataframe(..., vocabulary={{{name!r}: [...]}})."
        )
    # (Labels of `fit(x, y, client_ids=)` are as those of any clients.)
    may_miss = argument == "y" and kind == "f" and declared is None
    if not may_miss:
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
    if not may_miss:
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
    _validate.instance_of((list, tuple, range, np.ndarray), vocabulary=values)
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
) -> tuple[list[Any], Callable[[Any], tuple[Any, ...]], Any] | None:
    """Returns the clients of a sorted Parquet file, what reads one, and their spec.

    All values are checked now, one row group at a time; the spec is that of the file's
    schema. None: the rows of a client are not together.

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
            x, y, rows, weights = split(group(number), *columns, **named)
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

    examples = (x, y) if weights is None else (x, y, weights)
    return list(pieces), read, nests.spec_of(examples)
