"""Where clients' examples come from: arrays in memory, or reading on demand.

`IndexedSource` holds every example once, in flat tensors, and says for each
client which rows are its own. `StreamedSource` reads a client when it is asked
to. Both know clients by position, 0 to N - 1, and nothing about their ids. The
file is long because its subject is one: two answers to the same questions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import nests


@dataclasses.dataclass(frozen=True)
class ClientExamples:
    """The examples of one client.

    Attributes:
      position: The client's place in the dataset, from 0.
      x: Features, a nest of arrays with leading dimension n.
      y: Labels, a nest of arrays with leading dimension n; with the examples'
        weights beside them, if there are any (`nests.Weighted`).
    """

    position: int
    x: nests.Nest
    y: nests.Nest


@dataclasses.dataclass(frozen=True)
class ClientFailure:
    """A client whose examples could not be read.

    Attributes:
      position: The client's place in the dataset, from 0.
      error: What was raised. Its message may quote examples.
    """

    position: int
    error: Exception

    @property
    def reason(self) -> str:
        """What failed, without anything that may be an example."""
        kind = type(self.error).__name__
        if isinstance(self.error, nests.SAFE_ERRORS):
            return f"{kind}: {self.error}"
        return f"{kind} (its message may quote examples and is not shown)"


@dataclasses.dataclass(frozen=True)
class IndexedSource:
    """Clients as rows of flat tensors.

    Client k owns the slots `starts[k]` to `starts[k] + lengths[k] - 1`. A slot
    is a row of the tensors, or, if there is a `table`, a place of the table
    that holds the row. So a client's rows need not be neighbours, a row may be
    many clients', and taking some of the clients copies no table.

    Attributes:
      x: Features, a nest of CPU tensors with leading dimension n.
      y: Labels, a nest of CPU tensors with leading dimension n.
      starts: int64[N].
      lengths: int64[N].
      table: int32[slots] or None.
    """

    x: nests.Nest
    y: nests.Nest
    starts: np.ndarray
    lengths: np.ndarray
    table: np.ndarray | None = None

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return len(self.starts)

    @property
    def element_spec(self) -> nests.Nest:
        """The `tf.TensorSpec`s (x, y) of one example."""
        return nests.spec_of((self.x, self.y))

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row numbers of some clients, one client after another.

        Args:
          positions: int64[k].

        Returns:
          int32[sum of lengths] rows and int64[k] lengths.
        """
        lengths = self.lengths[positions]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        first_slots = self.starts[positions] - (ends - lengths)
        slots = np.repeat(first_slots, lengths) + np.arange(total)
        if self.table is not None:
            return self.table[slots], lengths
        return slots.astype(np.int32), lengths

    def read(self, position: int) -> tuple[nests.Nest, nests.Nest]:
        """Returns the examples of one client as NumPy nests (x, y)."""
        start, length = int(self.starts[position]), int(self.lengths[position])
        rows: Any = slice(start, start + length)
        if self.table is not None:
            rows = self.table[rows]
        return nests.take(nests.views((self.x, self.y)), rows)

    def sizes(self, positions: np.ndarray) -> np.ndarray:
        """Returns the number of examples of some clients, int64[k]."""
        return self.lengths[positions]

    def content_digest(self) -> str:
        """Returns a SHA-256 of all examples, and of which are whose."""
        rows, lengths = self.rows(np.arange(self.num_clients))
        digest = hashlib.sha256(repr(self.element_spec).encode())
        digest.update(lengths.tobytes() + rows.tobytes())
        for array in tf.nest.flatten(nests.views((self.x, self.y))):
            digest.update(
                repr(array.tolist()).encode()
                if array.dtype.hasobject
                else np.ascontiguousarray(array).tobytes()
            )
        return digest.hexdigest()

    def take(self, positions: np.ndarray) -> IndexedSource:
        """Returns the source of some of the clients, sharing everything."""
        return dataclasses.replace(
            self, starts=self.starts[positions], lengths=self.lengths[positions]
        )

    def map(self, fn: Callable[..., Any]) -> IndexedSource:
        """Returns the source with `fn(x, y)` applied once to all examples."""
        x, y = _mapped(fn, *nests.views((self.x, self.y)))
        x, y = nests.as_tensors(x, "x"), as_labels(y, nests.as_tensors)
        length = nests.common_length(x, y)
        stored = nests.common_length(self.x, self.y)
        if length != stored:
            raise nests.ExamplesValueError(
                "fn must return as many examples as it is given, got "
                f"{length} for {stored}."
            )
        return dataclasses.replace(self, x=x, y=y)


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedSource:
    """Clients that are read when they are asked for.

    Attributes:
      keys: What `read_fn` knows the clients by, in their order.
      read_fn: Takes a key, returns that client's nests (x, y); may raise.
      known_spec: The `tf.TensorSpec`s (x, y) of one example; None: those of the
        first client that can be read.
    """

    keys: Sequence[Any]
    read_fn: Callable[[Any], Any]
    known_spec: nests.Nest | None

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return len(self.keys)

    @functools.cached_property
    def element_spec(self) -> nests.Nest:
        """The `tf.TensorSpec`s (x, y) of one example.

        Raises:
          ValueError: If it was not given and no client can be read.
        """
        if self.known_spec is not None:
            return self.known_spec
        error: Exception | None = None
        for key in self.keys:
            try:
                x, y, length, ragged = _client_arrays(self.read_fn(key))
            except Exception as raised:  # Any client's code may run here.
                error = error or raised
                continue
            if length:
                return _open_spec((x, y), ragged)
        why = "none has any"
        if error is not None:
            why = f"the first error was {ClientFailure(0, error).reason}"
        raise nests.ExamplesValueError(
            "element_spec must be given, because no client with examples could be "
            f"read; {why}."
        ) from (error if isinstance(error, nests.SAFE_ERRORS) else None)

    def read(self, position: int) -> tuple[nests.Nest, nests.Nest]:
        """Returns the examples of one client as NumPy nests (x, y).

        Raises:
          Exception: Whatever the client's reading raises.
          ValueError: If its examples are not of the spec.
        """
        x, y, length, _ = _client_arrays(self.read_fn(self.keys[position]))
        if not length:
            return nests.no_examples(self.element_spec)
        nests.check_same_spec(nests.spec_of((x, y)), self.element_spec)
        return x, y

    def sizes(self, positions: np.ndarray) -> np.ndarray:
        """Returns the number of examples of some clients, by reading them."""
        return np.array(
            [nests.common_length(*self.read(p)) for p in positions], np.int64
        )

    def take(self, positions: np.ndarray) -> StreamedSource:
        """Returns the source of some of the clients."""
        keys = [self.keys[position] for position in positions]
        spec = self.known_spec or vars(self).get("element_spec")
        return StreamedSource(keys, self.read_fn, spec)

    def map(self, fn: Callable[..., Any]) -> StreamedSource:
        """Returns the source with `fn(x, y)` applied to what a client reads.

        It may change the arrays: they are the client's own.
        """

        def read(key: Any) -> Any:
            x, y, _, _ = _client_arrays(self.read_fn(key))
            return _mapped(fn, *tf.nest.map_structure(np.array, (x, y)))

        return StreamedSource(self.keys, read, None)


def _client_arrays(
    examples: Any,
) -> tuple[nests.Nest, nests.Nest, int, list[bool]]:
    """Returns a client's `(x, y)` as arrays, and how many examples it has.

    And which of the arrays were of sequences of unequal length.
    """
    if not (isinstance(examples, tuple) and len(examples) in (2, 3)):
        raise nests.ExamplesTypeError(
            "A client's examples must be (x, y) or (x, y, sample_weight), got "
            f"{outline(examples)}."
        )
    x, y = (nests.with_array_leaves(nest) for nest in nests.pair(examples))
    ragged = [nests.is_ragged(leaf) for leaf in tf.nest.flatten((x, y))]
    x, y = nests.as_arrays(x, "x"), as_labels(y, nests.as_arrays)
    # `[]` is nobody's nest of arrays; it can only mean that there is nothing.
    if not tf.nest.flatten((x, y)):
        return x, y, 0, ragged
    return x, y, nests.common_length(x, y), ragged


def as_labels(y: nests.Nest, convert: Callable[[Any, str], Any]) -> nests.Nest:
    """Converts labels, and the weights beside them to float32.

    Args:
      y: A nest of labels, perhaps `nests.Weighted`.
      convert: `nests.as_arrays` or `nests.as_tensors`.
    """
    if not isinstance(y, nests.Weighted):
        return convert(y, "y")
    weight = nests.as_arrays(y.sample_weight, "sample_weight")
    for leaf in tf.nest.flatten(weight):
        if leaf.dtype.kind not in "biuf":
            raise nests.ExamplesTypeError(
                f"sample_weight must be made of numbers, got dtype {leaf.dtype}."
            )
    with np.errstate(over="ignore"):  # What is infinite counts for nobody.
        weight = tf.nest.map_structure(lambda leaf: leaf.astype(np.float32), weight)
    return nests.Weighted(convert(y.y, "y"), convert(weight, "sample_weight"))


def _open_spec(examples: nests.Nest, ragged: list[bool]) -> nests.Nest:
    """Returns the spec of one example; a sequence may be of any length."""
    leaves = [
        tf.TensorSpec([None] * spec.shape.rank, spec.dtype) if uneven else spec
        for spec, uneven in zip(
            tf.nest.flatten(nests.spec_of(examples)), ragged, strict=True
        )
    ]
    return tf.nest.pack_sequence_as(examples, leaves)


def _mapped(fn: Callable[..., Any], x: nests.Nest, y: nests.Nest) -> Any:
    """Returns `fn(x, y)`; weights that it does not change stay."""
    mapped = fn(x, nests.labels_of(y))
    if not (isinstance(mapped, tuple) and len(mapped) in (2, 3)):
        raise nests.ExamplesTypeError(
            f"fn must return (x, y) or (x, y, sample_weight), got {outline(mapped)}."
        )
    return nests.pair((*mapped, nests.weights_of(y))[:3])


def outline(value: Any) -> str:
    """Returns what kind of thing something is, and nothing of its contents."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def pack(
    clients: Sequence[tuple[Any, tuple[nests.Nest, nests.Nest]]],
    sequences: bool = False,
) -> IndexedSource:
    """Packs clients' arrays one after another into flat tensors.

    Args:
      clients: Pairs of a client's id (for errors) and its `(x, y)`.
      sequences: Whether some of them are known to be sequences, filled up to
        each client's own longest.

    Raises:
      ValueError, TypeError: If they do not fit together, naming the client.
    """
    filled, empty, lengths, spec = [], [], [], None
    owners, uneven = [], sequences
    for client_id, examples in clients:
        with _naming(client_id):
            x, y, length, ragged = _client_arrays(examples)
        lengths.append(length)
        if length:
            uneven |= any(ragged)
            filled.append((x, y))
            owners.append(client_id)
        elif tf.nest.flatten(x) and tf.nest.flatten(y):
            empty.append((x, y))
    if not (filled or empty):
        raise ValueError(
            "clients must have at least one array among them, got only empty lists."
        )
    if uneven:
        filled = _equally_wide(filled)
    for client_id, (x, y) in zip(owners, filled, strict=True):
        with _naming(client_id):
            own = nests.spec_of((x, y))
            spec = spec or own
            nests.check_same_spec(own, spec)
    # If every client is empty, the first one's arrays say what of.
    x, y = nests.concatenate(filled or empty[:1])
    counts = np.array(lengths, np.int64)
    return IndexedSource(
        nests.as_tensors(x, "x"),
        as_labels(y, nests.as_tensors),
        starts=np.cumsum(counts) - counts,
        lengths=counts,
    )


@contextlib.contextmanager
def _naming(client_id: Any) -> Iterator[None]:
    """Has errors about a client's examples name the client."""
    try:
        yield
    except nests.SAFE_ERRORS as error:
        raise type(error)(f"Client {client_id!r}: {error}") from error


def _equally_wide(clients: list[Any]) -> list[Any]:
    """Returns clients' examples; sequences are as wide as the widest."""
    try:
        for client in clients:
            tf.nest.assert_same_structure(client, clients[0])
    except (TypeError, ValueError):
        return clients  # To be refused, by name.
    columns = zip(*map(tf.nest.flatten, clients), strict=True)
    padded = [nests.same_widths(column) for column in columns]
    return [
        tf.nest.pack_sequence_as(clients[0], leaves)
        for leaves in zip(*padded, strict=True)
    ]


def at_least_one_client(**checked: Any) -> None:
    """Raises ValueError, naming the argument, where clients are none."""
    ((name, value),) = checked.items()
    if not len(value):
        raise ValueError(f"{name} must hold at least one client, got none.")


def row_table(
    indices: Sequence[Any] | np.ndarray, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32[slots], the rows of all clients, and int64[N] lengths.

    Args:
      indices: A 2-D array of rows, one line per client; or a sequence of 1-D
        arrays.
      num_rows: How many rows there are.

    Raises:
      TypeError, ValueError: If they are neither, or out of range.
    """
    if num_rows > np.iinfo(np.int32).max:
        raise ValueError(f"x must have at most 2**31 - 1 examples, got {num_rows}.")
    if isinstance(indices, np.ndarray) and indices.dtype != object:
        if indices.ndim != 2:
            raise ValueError(
                "indices must be 2-D where it is an array, one line per "
                f"client, got {indices.ndim} dimensions."
            )
        flat = indices.reshape(-1)
        lengths = np.full(len(indices), indices.shape[1], np.int64)
    else:
        rows = [np.asarray(client) for client in indices]
        for place, client in enumerate(rows):
            if client.ndim != 1:
                raise ValueError(
                    "indices must be one 1-D array per client, got "
                    f"{client.ndim} dimensions for client number {place}."
                )
        lengths = np.array([len(client) for client in rows], np.int64)
        rows = [client for client in rows if len(client)]
        flat = np.concatenate(rows) if rows else np.zeros(0, np.int32)
    if flat.size:
        if flat.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, got dtype {flat.dtype}.")
        if flat.min() < 0 or flat.max() >= num_rows:
            raise ValueError(
                f"indices must be from 0 to {num_rows - 1}, the examples of x, "
                f"got {flat.min()} to {flat.max()}."
            )
    return flat.astype(np.int32, copy=False), lengths
