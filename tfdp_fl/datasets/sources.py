"""Where clients' examples come from: arrays in memory, or reading on demand.

`IndexedSource` holds every example once, in flat tensors, and says for each
client which rows are its own. `StreamedSource` reads a client when it is asked
to, perhaps from a `tf.data.Dataset`. Both know clients by position, 0 to N - 1, and
nothing about their ids. The file is long because its subject is one: two answers to
the same questions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

    Client k owns the slots `starts[k]` to `starts[k] + lengths[k] - 1` of a table
    of rows. So a client's rows need not be neighbours, a row may be many clients',
    and taking some of the clients copies no table.

    Attributes:
      x: Features, a nest of CPU tensors with leading dimension n.
      y: Labels, a nest of CPU tensors with leading dimension n.
      starts: int64[N].
      lengths: int64[N].
      table: int32[slots].
    """

    x: nests.Nest
    y: nests.Nest
    starts: np.ndarray
    lengths: np.ndarray
    table: np.ndarray

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
        return self.table[slots], lengths

    def read(self, position: int) -> tuple[nests.Nest, nests.Nest]:
        """Returns the examples of one client as NumPy nests (x, y)."""
        rows, _ = self.rows(np.array([position]))
        return nests.take(nests.views((self.x, self.y)), rows)

    def sizes(self, positions: np.ndarray) -> np.ndarray:
        """Returns the number of examples of some clients, int64[k]."""
        return self.lengths[positions]

    def content_digest(self) -> str:
        """Returns a SHA-256 of all examples, and of which are whose."""
        rows, lengths = self.rows(np.arange(len(self.starts)))
        digest = hashlib.sha256(repr(self.element_spec).encode())
        for array in (lengths, rows, *tf.nest.flatten(nests.views((self.x, self.y)))):
            is_text = array.dtype.hasobject
            digest.update(repr(array.tolist()).encode() if is_text else array.tobytes())
        return digest.hexdigest()

    def take(self, positions: np.ndarray) -> IndexedSource:
        """Returns the source of some of the clients, sharing everything."""
        return dataclasses.replace(
            self, starts=self.starts[positions], lengths=self.lengths[positions]
        )

    def map(self, fn: Callable[..., Any]) -> IndexedSource:
        """Returns the source with `fn(x, y)` applied once to all examples."""
        x, y, length = as_tensors(*_mapped(fn, *nests.views((self.x, self.y))))
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
      known_spec: The `tf.TensorSpec`s (x, y) of one example; None: those that
        two clients have first.
    """

    keys: Sequence[Any]
    read_fn: Callable[[Any], Any]
    known_spec: nests.Nest | None

    @functools.cached_property
    def element_spec(self) -> nests.Nest:
        """The `tf.TensorSpec`s (x, y) of one example.

        Raises:
          ValueError: If it was not given and no client can be read.
        """
        if self.known_spec is not None:
            return self.known_spec
        error: Exception | None = None

        def specs() -> Iterator[nests.Nest]:
            nonlocal error
            for key in self.keys:
                try:
                    x, y, length = self._arrays(key)
                except Exception as raised:  # Any client's code may run here.
                    error = error or raised
                    continue
                if length:
                    yield nests.spec_of((x, y))

        if (found := nests.agreed_spec(specs())) is not None:
            return found
        why = "none has any"
        if error is not None:
            why = f"the first error was {ClientFailure(0, error).reason}"
        raise nests.ExamplesValueError(
            "element_spec must be given, because no client with examples could be "
            f"read; {why}."
        ) from (error if isinstance(error, nests.SAFE_ERRORS) else None)

    def _arrays(self, key: Any) -> tuple[nests.Nest, nests.Nest, int]:
        """Reads a client; what it raises is an `Exception`."""
        try:
            return _client_arrays(self.read_fn(key))
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # `sys.exit` is for the client alone, too.
            raise RuntimeError(f"reading ended in a {type(error).__name__}") from None

    def read(self, position: int) -> tuple[nests.Nest, nests.Nest]:
        """Returns the examples of one client as NumPy nests (x, y).

        Raises:
          Exception: Whatever the client's reading raises.
          ValueError: If its examples are not of the spec, or fit into no tensor.
        """
        x, y, length = self._arrays(self.keys[position])
        if not length:
            return nests.no_examples(self.element_spec)
        # Copies: what is checked is what is used, whatever becomes of a file or of a
        # buffer that serves the next client too.
        x, y = tf.nest.map_structure(nests.copied, (x, y))
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
            x, y, _ = self._arrays(key)
            return _mapped(fn, *tf.nest.map_structure(np.array, (x, y)))

        return StreamedSource(self.keys, read, None)


Source = IndexedSource | StreamedSource


def _client_arrays(examples: Any) -> tuple[nests.Nest, nests.Nest, int]:
    """Returns a client's `(x, y)` as arrays, and how many examples it has."""
    x, y = nests.pair(examples, "A client's examples must be")
    x, y = nests.as_arrays(x, "x"), _as_labels(y, nests.as_arrays)
    # `[]` is nobody's nest of arrays; it can only mean that there is nothing.
    if not tf.nest.flatten((x, y)):
        return x, y, 0
    return x, y, nests.common_length(x, y)


def held_spec(spec: Any) -> nests.Nest:
    """Returns the spec (x, y) that examples have in a dataset, of what is given."""
    if not isinstance(spec, tuple) or not all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined()
        for leaf in tf.nest.flatten(spec)
    ):
        raise nests.ExamplesTypeError(
            "element_spec must be (x, y) or (x, y, sample_weight) of nests of "
            f"tf.TensorSpec with all sizes known, got {spec!r}; {nests.PADDING}, and "
            "tf.ensure_shape declares other sizes."
        )
    x, y, _ = _client_arrays(nests.no_examples(spec))
    return nests.spec_of((x, y))


def as_tensors(x: nests.Nest, y: nests.Nest) -> tuple[nests.Nest, nests.Nest, int]:
    """Returns examples (x, y) as tensors, and how many there are."""
    x, y = nests.as_tensors(x, "x"), _as_labels(y, nests.as_tensors)
    return x, y, nests.common_length(x, y)


def _as_labels(y: nests.Nest, convert: Callable[[Any, str], Any]) -> nests.Nest:
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


def _mapped(fn: Callable[..., Any], x: nests.Nest, y: nests.Nest) -> Any:
    """Returns `fn(x, y)`; weights that it does not change stay."""
    mapped = nests.pair(fn(x, nests.labels_of(y)), "fn must return")
    return nests.pair((*mapped, nests.weights_of(y)))


def pack(
    clients: Iterable[tuple[Any, tuple[nests.Nest, ...]]],
) -> tuple[nests.Nest, nests.Nest, dict[Any, np.ndarray]]:
    """Returns flat arrays `(x, y)` of all clients' examples, and whose rows are where.

    Args:
      clients: Pairs of a client's id and its examples.

    Raises:
      ValueError, TypeError: If they do not fit together, naming the client.
    """
    filled, empty, rows, start = [], [], {}, 0
    for client_id, examples in clients:
        with naming(client_id):
            x, y, length = _client_arrays(examples)
            rows[client_id] = np.arange(start, start + length)
            start += length
            if length:
                filled.append((x, y))
                nests.check_same_spec(*map(nests.spec_of, (filled[-1], filled[0])))
            elif tf.nest.flatten(x) and tf.nest.flatten(y):
                empty.append((x, y))
    if not (filled or empty):
        raise ValueError(
            "clients must have at least one array among them, got only empty lists."
        )
    # If every client is empty, the first one's arrays say what of.
    return *nests.concatenate(filled or empty[:1]), rows


@contextlib.contextmanager
def naming(client_id: Any) -> Iterator[None]:
    """Has errors about a client's examples name the client."""
    try:
        yield
    except nests.SAFE_ERRORS as error:
        raise type(error)(f"Client {client_id!r}: {error}") from error


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
      indices: One 1-D array of rows per client.
      num_rows: How many rows there are.

    Raises:
      TypeError, ValueError: If they are none, or out of range.
    """
    if num_rows > np.iinfo(np.int32).max:
        raise ValueError(f"x must have at most 2**31 - 1 examples, got {num_rows}.")
    rows = [np.asarray(client) for client in indices]
    if any(client.ndim != 1 for client in rows):
        raise ValueError("indices must be one 1-D array per client, got another shape.")
    lengths = np.array([len(client) for client in rows], np.int64)
    filled = [client for client in rows if len(client)]
    flat = np.concatenate(filled or [np.zeros(0, np.int32)])
    if flat.size:
        if flat.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, got dtype {flat.dtype}.")
        if flat.min() < 0 or flat.max() >= num_rows:
            raise ValueError(
                f"indices must be from 0 to {num_rows - 1}, the examples of x, "
                f"got {flat.min()} to {flat.max()}."
            )
    return flat.astype(np.int32, copy=False), lengths


# Clients with a `tf.data.Dataset` each.


def common_spec(clients: Mapping[Any, tf.data.Dataset]) -> nests.Nest:
    """Returns the spec (x, y) of one example of every client.

    Raises:
      TypeError, ValueError: A client has no such examples, or others; it is named.
    """
    spec: Any = None
    for client_id, dataset in clients.items():
        with naming(client_id):
            client_spec = _example_spec(dataset)
            spec = spec or client_spec
            nests.check_same_spec(client_spec, spec)
    return spec


def _is_batched(dataset: tf.data.Dataset) -> bool:
    """Returns whether every array of an element is of any number of examples."""
    return all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.rank and leaf.shape[0] is None
        for leaf in tf.nest.flatten(dataset.element_spec)
    )


def _example_spec(dataset: tf.data.Dataset) -> tuple[nests.Nest, nests.Nest]:
    """Returns the spec (x, y) of one example, as it is in a `FederatedDataset`."""
    if not isinstance(dataset, tf.data.Dataset):
        raise nests.ExamplesTypeError(
            f"dataset must be a tf.data.Dataset, got a {type(dataset).__name__}."
        )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise nests.ExamplesValueError(
            "A client's dataset must end, got one that repeats for ever."
        )
    spec = _element_pair(dataset.element_spec)
    if _is_batched(dataset):
        spec = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), spec
        )
    return held_spec(spec)


def read_pair(dataset: tf.data.Dataset) -> tuple[nests.Nest, nests.Nest]:
    """Reads a dataset of examples, or of batches of them, into arrays (x, y)."""
    return _element_pair(read_elements(dataset))


def read_elements(dataset: tf.data.Dataset) -> nests.Nest:
    """Reads a dataset of examples, or of batches of them, into a nest of arrays."""
    if not _is_batched(dataset):
        if int(dataset.cardinality()) > 0:  # Without an iterator, which is slower.
            batch = dataset.batch(2**63 - 1).get_single_element()
            return nests.views(batch)
        dataset = dataset.batch(1024)
    batches = list(dataset.as_numpy_iterator())
    if batches:
        return nests.concatenate(batches)
    return tf.nest.map_structure(
        lambda leaf: tf.zeros([0, *leaf.shape[1:]], leaf.dtype), dataset.element_spec
    )


def _element_pair(element: Any) -> tuple[Any, Any]:
    """Returns (x, y) of an element that is a tuple or has the keys x and y.

    A third of the tuple, or `sample_weight` of a dict, is beside the labels.
    """
    if isinstance(element, dict) and {"x", "y"} <= set(element) <= {
        *("x", "y", "sample_weight")
    }:
        element = element["x"], element["y"], element.get("sample_weight")
    return nests.pair(element, "The elements of a client's dataset must be")
