"""Clients' ids, and tables with a column of client ids."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import re
import tempfile
import unicodedata
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.datasets import nests
from tfdp_fl.terms import Json

if TYPE_CHECKING:
    import pandas

# A client's id, a string or a number. (Not Hashable, because the key types of mappings
# are invariant.)
ClientId: TypeAlias = Any
# One id for each row, [n]: a list, an array or a pandas column.
Ids: TypeAlias = Any
Columns: TypeAlias = str | Sequence[str] | Mapping[str, str | Sequence[str]]
# Unicode's categories of format and control characters.
_INVISIBLE = ("Cf", "Cc")
# The allowed values of each non-numeric column, declared in advance.
Vocabulary: TypeAlias = Mapping[str, Sequence[Hashable]]
# Returns the examples of a client: `(x, y)` or `(x, y, sample_weight)`.
ReadClient: TypeAlias = Callable[[Hashable], tuple[nests.Nest, ...]]


def hash_to_unit_interval(client_id: Hashable) -> float:
    """Returns a hash of an id in [0, 1)."""
    digest = hashlib.sha256(_typed_repr(client_id).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _typed_repr(client_id: Hashable) -> str:
    if isinstance(client_id, np.generic):
        client_id = client_id.item()
    return f"{type(client_id).__qualname__} {client_id!r}"


def require_distinct(client_ids: Sequence[Hashable]) -> Sequence[Hashable]:
    """Returns ids as a dataset stores them: a list, or a range of positions.

    A client with two ids may take part twice, and moves the sum by two clips, as each
    update is clipped by itself. Hence the warning for ids that look the same to people.

    Raises:
      ValueError: An id is repeated, or does not equal itself.
    """
    if isinstance(client_ids, range):
        return client_ids
    ids: list[Any] = list(client_ids)
    kinds = set(map(type, ids))
    # Integers and plain words cannot be misread, so skip the search for lookalikes.
    if len(set(ids)) == len(ids) and (
        kinds == {int} or (kinds == {str} and _are_plain(ids))
    ):
        return ids
    if not all(map(_equals_itself, ids)):
        raise ValueError("client_ids must name each client, got a missing value (NaN).")
    if any(isinstance(each, float) and abs(each) >= 2**53 for each in ids):
        raise ValueError(
            "client_ids must distinguish clients, got floating-point numbers of 2**53 "
            "or more, which may merge several ids: read them as integers or as text."
        )
    if len(set(ids)) < len(ids):
        raise ValueError("client_ids must be distinct, got some repeatedly.")
    by_reading: Json = {}
    for client_id in ids:
        other = by_reading.setdefault(_normalise_id(client_id), client_id)
        if other is not client_id:
            warnings.warn(
                f"client_ids has {other!r} and {client_id!r}, which differ only in "
                "type, Unicode form, case, spaces, invisible characters, leading zeros "
                "or a '.0'. If both are one client, the guarantee does not cover that "
                "client: make their ids equal.",
                RuntimeWarning,
                stacklevel=4,
            )
            break
    return ids


def _equals_itself(client_id: Hashable) -> bool:
    """Returns False for a NaN, or for a tuple that contains one."""
    if isinstance(client_id, tuple | frozenset):
        return all(map(_equals_itself, client_id))
    return bool(client_id == client_id)


def _are_plain(words: list[str]) -> bool:
    """Returns whether `_normalise_id` certainly changes none of these words."""
    text = "\n".join(words)
    return (
        text.isascii()
        and text == text.lower()
        and text.split() == words
        and "".join(words).isprintable()
        and not re.search(r"^[+-]?0|\.0+$", text, re.MULTILINE)
    )


def _normalise_id(client_id: Hashable) -> str:
    """Returns a text that is the same for ids that look the same to people."""
    text = (
        client_id.decode("latin-1") if isinstance(client_id, bytes) else str(client_id)
    )
    text = "".join(unicodedata.normalize("NFKC", text).casefold().split())
    # Remove characters such as a byte order mark or a zero-width space.
    text = "".join(
        letter for letter in text if unicodedata.category(letter) not in _INVISIBLE
    )
    # A column of integers with gaps becomes floats; one of text may have leading zeros.
    return re.sub(r"^([+-]?)0*(\d+?)(\.0+)?$", r"\1\2", text)


def hash_ids(client_ids: Sequence[Any]) -> str:
    """Returns the SHA-256 of ids in their order, hexadecimal.

    Raises:
      ValueError: Two ids look alike.
    """
    digest, number = hashlib.sha256(), len(client_ids)
    if isinstance(client_ids, range):
        return hashlib.sha256(repr(client_ids).encode()).hexdigest()
    kinds = set(map(type, client_ids))
    if any(issubclass(kind, np.generic) for kind in kinds):
        client_ids = [v.item() if isinstance(v, np.generic) else v for v in client_ids]
        kinds = set(map(type, client_ids))
    if kinds == {int} and -(2**63) <= min(client_ids) <= max(client_ids) < 2**63:
        numbers = np.fromiter(client_ids, np.int64, number)
        return hashlib.sha256(b"int" + numbers.astype("<i8").tobytes()).hexdigest()
    if kinds == {str}:
        sizes = np.fromiter(map(len, client_ids), np.int64, number)
        digest.update(b"str" + sizes.astype("<i8").tobytes())
        digest.update("".join(client_ids).encode(errors="surrogatepass"))
        return digest.hexdigest()
    texts = list(map(_typed_repr, client_ids))
    if len({*texts}) < number:
        raise ValueError(
            "client_ids must differ in their repr, by which later fits know them, got "
            f"a {type(client_ids[0]).__name__} whose repr others have: use strings or "
            "numbers."
        )
    for text in texts:
        # The length prefix makes the encoding unambiguous.
        digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return digest.hexdigest()


class ClientRows(NamedTuple):
    """The rows of a table that belong to each client.

    Attributes:
      client_ids: The clients' ids, in order of first appearance.
      rows: Int64 [n], one client after another, each in the order of the table.
      lengths: Int64 [N], each client's number of rows.
    """

    client_ids: list[Hashable]
    rows: np.ndarray
    lengths: np.ndarray

    def by_client(self) -> dict[Hashable, np.ndarray]:
        """Returns each client's rows, by id."""
        parts = np.split(self.rows, np.cumsum(self.lengths)[:-1])
        return dict(zip(self.client_ids, parts, strict=True))


def group_rows(client_ids: Ids, num_rows: int) -> ClientRows:
    """Returns each client's rows.

    Args:
      client_ids: The client of each row, [n] numbers or strings.
      num_rows: The number of rows, n.

    Raises:
      ValueError: An id is missing or cannot be hashed; the message names its row.
    """
    if not num_rows:
        raise ValueError("x must have rows, got none.")
    if isinstance(client_ids, np.ma.MaskedArray):
        nobody: Any = None
        client_ids = np.where(np.ma.getmaskarray(client_ids), nobody, client_ids.data)
    if isinstance(client_ids, list | tuple):
        values = [v.item() if isinstance(v, np.generic) else v for v in client_ids]
        shape, kinds = [len(values)], {isinstance(v, str | bytes) for v in values}
        if len(kinds) > 1 and any(isinstance(v, int | float) for v in values):
            # NumPy would turn numbers into text, making 1 and 1.0 different clients.
            raise ValueError(
                "client_ids must be numbers alone or strings alone, got a list of both."
            )
    else:
        is_series = hasattr(client_ids, "iloc") and hasattr(client_ids, "dtype")
        ids = client_ids if is_series else np.asarray(client_ids)
        kind = getattr(ids.dtype, "kind", "O")
        if kind == "M" and isinstance(ids, np.ndarray):
            ids = ids.astype("datetime64[us]")  # The resolution of Python's dates.
        shape = list(ids.shape)
        # (Pandas's own integer types may have missing values.)
        if kind in "iu" and isinstance(ids.dtype, np.dtype) and shape == [num_rows]:
            return _group_by_number(np.asarray(ids))
        values = ids.tolist()
    if shape != [num_rows]:
        raise ValueError(
            f"client_ids must be a vector with one id for each of the {num_rows} "
            f"rows, got {shape}."
        )
    for row, value in enumerate(() if set(map(type, values)) == {str} else values):
        if not _is_id(value):
            raise ValueError(
                "client_ids must be numbers, strings or other hashable values, got a "
                f"{type(value).__name__} that cannot be an id in row {row}."
            )
    code_of: dict[Hashable, int] = {}
    codes = np.array([code_of.setdefault(each, len(code_of)) for each in values])
    return _group(list(code_of), codes)


def _is_id(value: object) -> bool:
    try:
        hash(value)
        return value is not None and _equals_itself(value)
    except (TypeError, ValueError):
        return False


def _group_by_number(ids: np.ndarray) -> ClientRows:
    """Groups rows by integer id, without a loop over the ids."""
    if (ids[1:] >= ids[:-1]).all():  # The table is sorted by id.
        first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
        lengths = np.diff(np.append(first, len(ids)))
        return ClientRows(ids[first].tolist(), np.arange(len(ids)), lengths)
    rows = _stable_argsort(ids)
    first = np.flatnonzero(np.append(True, np.diff(ids[rows]) != 0))
    lengths = np.diff(np.append(first, len(ids)))
    order = np.argsort(rows[first])  # Of first appearance.
    places = np.cumsum(lengths[order]) - lengths[order]
    # Moves each client's rows from where they begin by id to where they now begin.
    moved = np.repeat(first[order] - places, lengths[order]) + np.arange(len(ids))
    return ClientRows(ids[rows[first[order]]].tolist(), rows[moved], lengths[order])


def _stable_argsort(numbers: np.ndarray) -> np.ndarray:
    """Returns `np.argsort(numbers, kind="stable")` of integers [n], in a tenth of it.

    Keys that differ can be sorted by any algorithm: here the number, then its row.
    """
    low, high, n = int(numbers.min()), int(numbers.max()), len(numbers)
    if (high - low + 1) * n > np.iinfo(np.int64).max:
        return np.argsort(numbers, kind="stable")
    unsigned = numbers.dtype.kind == "u"
    keys = numbers - numbers.min() if unsigned else numbers.astype(np.int64) - low
    keys = keys.astype(np.int64) * n + np.arange(n)
    keys.sort()
    return keys % n


def _group(client_ids: list[Hashable], codes: np.ndarray) -> ClientRows:
    """Groups rows by client; `codes`, [n], are the clients' indices."""
    # A stable sort keeps a client's rows in the table's order.
    rows = _stable_argsort(codes)
    return ClientRows(client_ids, rows, np.bincount(codes, minlength=len(client_ids)))


# Pandas frames.


def split_frame(
    frame: pandas.DataFrame,
    client: str,
    features: Columns | None = None,
    label: Columns = "label",
    sample_weight: str | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[nests.Nest, nests.Nest, ClientRows, nests.Nest]:
    """Returns (x, y, rows of each client, weights) of a pandas frame.

    The arguments and errors are those of `FederatedDataset.from_dataframe`. The weights
    are None if `sample_weight` is.
    """
    if not hasattr(frame, "itertuples"):
        raise TypeError(
            f"frame must be a pandas.DataFrame, got {type(frame).__name__}; "
            "most other tables have a method to_pandas()."
        )
    names = column_names(frame, "frame")
    weight = [] if sample_weight is None else [sample_weight]
    if features is None:
        taken = [client, *weight, *_names_in(label)]
        features = [name for name in names if name not in taken]
    vocabulary = {} if vocabulary is None else vocabulary
    _validate.instance_of(Mapping, vocabulary=vocabulary)
    chosen = {"client": [client], "features": features, "label": label}
    others = {"sample_weight": weight, "vocabulary": list(vocabulary)}
    for argument, columns in (chosen | others).items():
        if argument in chosen and not _names_in(columns):
            raise ValueError(f"{argument} must name a column, got none.")
        for name in _names_in(columns):
            if name not in names:
                raise ValueError(
                    f"{argument} must name columns of the frame "
                    f"({', '.join(map(repr, names))}), got {name!r}."
                )
    if client in [*_names_in(features), *_names_in(label), sample_weight]:
        raise ValueError(
            "features, label and sample_weight must not hold the client column, got "
            f"{client!r}: a person's identity would be a feature."
        )
    if not len(frame):
        raise ValueError("frame must have rows, got none.")
    _check_none_missing(frame[client], "client", "be named in every row")
    weights = None
    if sample_weight is not None:
        weights = to_array(frame, sample_weight, "sample_weight", {})
        weights = nests.cast(weights, np.float32)
    return (
        to_arrays(frame, features, "features", vocabulary),
        to_arrays(frame, label, "label", vocabulary),
        group_rows(frame[client], len(frame)),
        weights,
    )


def column_names(frame: pandas.DataFrame, argument: str) -> list[str]:
    """Returns the names of a frame's columns; raises ValueError if one is repeated."""
    names = list(frame.columns)
    if len(set(names)) < len(names):
        raise ValueError(f"{argument} must have distinct column names.")
    return names


def _is_single(columns: Columns) -> TypeGuard[str]:
    return isinstance(columns, str) or not np.iterable(columns)


def _names_in(columns: Columns) -> list[str]:
    """Returns the column names in a column, a list or a mapping."""
    if isinstance(columns, Mapping):
        return [name for part in columns.values() for name in _names_in(part)]
    return [columns] if _is_single(columns) else list(columns)


def to_arrays(
    frame: pandas.DataFrame, columns: Columns, argument: str, vocabulary: Vocabulary
) -> nests.Nest:
    """Returns [n] for one column, [n, F] for a list, and a dict for a mapping."""
    if isinstance(columns, Mapping):
        return {
            key: to_arrays(frame, part, argument, vocabulary)
            for key, part in columns.items()
        }
    if _is_single(columns):
        return to_array(frame, columns, argument, vocabulary)
    parts = []
    for name in columns:
        part = to_array(frame, name, argument, vocabulary)
        if argument not in ("label", "y"):
            part = np.eye(len(vocabulary[name]))[part] if name in vocabulary else part
            part = nests.cast(part, np.float32)
        parts.append(part.reshape(len(part), -1))
    return np.concatenate(parts, axis=1)


def to_array(
    frame: pandas.DataFrame, name: str, argument: str, vocabulary: Vocabulary
) -> np.ndarray:
    """Returns one column, [n]: numbers, or indices into its vocabulary.

    Raises:
      ValueError: It contains something else, or has missing values.
    """
    column = frame[name]
    kind = getattr(column.dtype, "kind", "O")
    declared = vocabulary.get(name)
    if kind not in "biuf" and declared is None:
        raise ValueError(
            f"{argument} must be numbers, got column {name!r} of {column.dtype}. "
            "Convert it, or declare the allowed values of text or categories: "
            f"from_dataframe(..., vocabulary={{{name!r}: [...]}})."
        )
    # (As with other forms of data, the labels of `fit(x, y, client_ids=)` may be NaN.)
    may_be_missing = argument == "y" and kind == "f" and declared is None
    if not may_be_missing:
        _check_none_missing(column, argument, "have a value in every row")
    if declared is not None:
        return _encode(column, name, declared)
    if kind == "u" and column.max() > np.iinfo(np.int64).max:
        raise ValueError(
            f"{argument} must fit into int64, got column {name!r} of "
            f"{column.dtype} with larger numbers."
        )
    with np.errstate(all="ignore"):  # Infinite results are found below.
        array = column.to_numpy(dtype=np.float32 if kind == "f" else np.int64)
    if not may_be_missing:
        check_finite(argument, array, name)
    return array


def check_finite(argument: str, array: np.ndarray, name: str | None = None) -> None:
    """Raises ValueError if a number in an array [n, ...] is not finite.

    Args:
      argument: The argument's name, for the message.
      array: An array of any dtype.
      name: The column's name; None: the message gives the column's number.
    """
    if array.dtype.kind != "f":
        return
    wrong = ~np.isfinite(array.reshape(len(array), -1))
    if wrong.any():
        row, column = (int(index) for index in np.argwhere(wrong)[0])
        raise ValueError(
            f"{argument} must have only finite numbers (in float32), got another in "
            f"column {column if name is None else repr(name)} of row {row}, and "
            f"{int(wrong.sum())} in all: fill them in, or leave those rows out."
        )


def _check_none_missing(column: pandas.Series, argument: str, what: str) -> None:
    missing = column.isna().to_numpy()
    if missing.any():
        raise ValueError(
            f"{argument} must {what}, got column {column.name!r} with "
            f"{int(missing.sum())} missing, the first in row "
            f"{int(np.argmax(missing))}. Leave those rows out, or fill them in with "
            "values that are not computed from clients."
        )


def _encode(column: pandas.Series, name: str, values: Sequence[Hashable]) -> np.ndarray:
    """Returns the indices of a column's values in its vocabulary, int64 [n]."""
    _validate.instance_of((list, tuple, range, np.ndarray), vocabulary=values)
    code_of = {value: code for code, value in enumerate(values)}
    if len(code_of) < len(values) or not code_of:
        raise ValueError(
            f"vocabulary must have distinct values for column {name!r}, got duplicates "
            "or none."
        )
    codes = np.array([code_of.get(value, -1) for value in column.tolist()], np.int64)
    unknown = np.flatnonzero(codes < 0)
    if len(unknown):
        raise ValueError(
            f"vocabulary must list all values of column {name!r}, got {len(unknown)} "
            f"rows with others, the first in row {unknown[0]}."
        )
    return codes


def open_sorted_parquet(
    path: str | os.PathLike[str], *columns: Any, **named: Any
) -> (
    tuple[list[Hashable], Callable[[Hashable], tuple[nests.Nest, ...]], nests.Nest]
    | None
):
    """Returns the clients of a sorted Parquet file, a function to read one, and a spec.

    All values are checked now, one row group at a time, and written to unnamed
    temporary files that end with the process. Reading a client then reads only its own
    rows, and training uses exactly the checked values. The spec comes from the file's
    schema. The result is None if a client's rows are not contiguous.

    Args:
      path: The file.
      *columns: The positional arguments of `split_frame` after `frame`.
      **named: The keyword arguments of `split_frame`.
    """
    from pyarrow import parquet

    pieces: dict[Hashable, list[slice]] = collections.defaultdict(list)
    first_row, examples = 0, None
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(parquet.ParquetFile(path))
        streams: list[BinaryIO] = []
        for number in range(file.num_row_groups):
            frame = file.read_row_group(number).to_pandas().reset_index(drop=True)
            try:
                x, y, rows, weights = split_frame(frame, *columns, **named)
            except ValueError as error:
                if not first_row:
                    raise
                raise ValueError(
                    f"{error} Row 0 is row {first_row} of {path}."
                ) from error
            ends = np.cumsum(rows.lengths)
            for client_id, end, length in zip(
                rows.client_ids, ends.tolist(), rows.lengths.tolist(), strict=True
            ):
                start, last = rows.rows[end - length], rows.rows[end - 1]
                if length <= last - start:
                    return None
                own = slice(first_row + int(start), first_row + int(last) + 1)
                pieces[client_id].append(own)
            first_row += len(frame)
            found = (x, y) if weights is None else (x, y, weights)
            examples = found if examples is None else examples
            specs = tf.nest.flatten(nests.spec_of(examples))
            if tf.nest.flatten(nests.spec_of(found)) != specs:
                return None  # Pandas gives the groups' columns different types.
            for index, leaf in enumerate(tf.nest.flatten(found)):
                if not number:
                    streams.append(stack.enter_context(tempfile.TemporaryFile()))
                leaf.tofile(streams[index])
        # A client at the end of a group may continue in the next one.
        num_continued = sum(map(len, pieces.values())) - len(pieces)
        if examples is None or num_continued >= file.num_row_groups:
            return None
        for stream in streams:
            stream.flush()
        mapped = [
            np.memmap(stream, leaf.dtype, "r", shape=(first_row, *leaf.shape[1:]))
            for stream, leaf in zip(streams, tf.nest.flatten(examples), strict=True)
        ]
    whole = tf.nest.pack_sequence_as(examples, mapped)

    def read(client_id: Hashable) -> tuple[nests.Nest, ...]:
        own = [nests.take(whole, rows) for rows in pieces[client_id]]
        return own[0] if len(own) == 1 else nests.concatenate(own)

    return list(pieces), read, nests.spec_of(examples)
