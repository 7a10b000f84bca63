"""Sources of clients' examples: arrays in memory, or reading on demand.

`IndexedSource` stores every example once, in flat tensors, with a list of rows for each
client. `StreamedSource` reads a client on demand, for example from a
`tf.data.Dataset`. `MixedSource` holds clients whose arrays have different specs. All
have the same interface, address clients by position, 0 to N - 1, and do not know ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import tensorflow as tf

from tfdp_fl import _signals
from tfdp_fl.datasets import nests

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

# Clients whose rows are hashed together; it does not change a digest.
_DIGESTED_AT_ONCE = 2**14


@dataclasses.dataclass(frozen=True)
class ClientExamples:
    """The examples of one client.

    Attributes:
      position: The client's position in the dataset, from 0.
      x: Features, a nest of arrays with leading dimension n.
      y: Labels, a nest of arrays with leading dimension n; with the examples'
        weights, if there are any (`nests.Weighted`).
    """

    position: int
    x: nests.Nest
    y: nests.Nest


@dataclasses.dataclass(frozen=True)
class ClientFailure:
    """A client whose examples could not be read or trained on.

    Attributes:
      position: The client's position in the dataset, from 0.
      error: The error. Its message may quote examples.
      operation: The model's operation that raised it, if known.
    """

    position: int
    error: Exception
    operation: str = ""

    @property
    def reason(self) -> str:
        """A description of the failure without anything that may be an example."""
        kind = type(self.error).__name__
        if isinstance(self.error, nests.SAFE_ERRORS):
            return f"{kind}: {self.error}"
        where = f" in {self.operation}" if self.operation else ""
        return f"{kind}{where} (its message may quote examples and is not shown)"


@dataclasses.dataclass(frozen=True)
class IndexedSource:
    """Clients as rows of flat tensors.

    Client k owns the slots `starts[k]` to `starts[k] + lengths[k] - 1` of a table of
    rows. So a client's rows need not be adjacent, a row may belong to many clients,
    and taking some of the clients copies no table.

    Attributes:
      x: Features, a nest of CPU tensors with leading dimension n.
      y: Labels, a nest of CPU tensors with leading dimension n.
      starts: int32[N], or int64.
      lengths: int32[N], or int64.
      table: int32[slots].
      is_declared: Whether the spec of the arrays is public: the schema of a table, or
        a declared spec. Otherwise, it comes from the clients' own data.
      failed: The clients whose examples do not fit the spec, by position; they own no
        slots.
      had_repeated_rows: Whether a function was mapped to clients that shared rows or
        held one several times, so that each now has its own copy.
    """

    x: nests.Nest
    y: nests.Nest
    starts: np.ndarray
    lengths: np.ndarray
    table: np.ndarray
    is_declared: bool = True
    failed: Mapping[int, Exception] = dataclasses.field(default_factory=dict)
    had_repeated_rows: bool = False

    @property
    def has_repeated_rows(self) -> bool:
        """Whether clients share a row, or hold one twice (or did before `map`)."""
        rows, _ = self.rows(np.arange(len(self.starts)))
        return self.had_repeated_rows or len(np.unique(rows)) < len(rows)

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
        lengths = self.sizes(positions)
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        first_slots = self.starts[positions] - (ends - lengths)
        slots = np.repeat(first_slots, lengths) + np.arange(total)
        return self.table[slots], lengths

    def read(self, position: int) -> tuple[nests.Nest, nests.Nest]:
        """Returns the examples of one client as NumPy nests (x, y)."""
        if position in self.failed:
            raise self.failed[position]
        rows, _ = self.rows(np.array([position]))
        return nests.take(nests.views((self.x, self.y)), rows)

    def sizes(self, positions: np.ndarray) -> np.ndarray:
        """Returns the number of examples of some clients, int64[k]."""
        return self.lengths[positions].astype(np.int64)

    def content_digest(self) -> str:
        """Returns a SHA-256 of all examples and of their assignment to clients."""
        everyone = np.arange(len(self.starts))
        digest = hashlib.sha256(repr(self.element_spec).encode())
        digest.update(self.sizes(everyone))
        # Not all rows at once, which would take several times the memory of `table`.
        for first in range(0, len(everyone), _DIGESTED_AT_ONCE):
            digest.update(self.rows(everyone[first : first + _DIGESTED_AT_ONCE])[0])
        for array in tf.nest.flatten(nests.views((self.x, self.y))):
            if array.dtype.hasobject:  # Text.
                digest.update(repr(array.tolist()).encode())
            else:
                digest.update(np.ravel(array).view(np.uint8))
        return digest.hexdigest()

    def take(self, positions: np.ndarray) -> IndexedSource:
        """Returns the source of some of the clients, sharing everything."""
        return dataclasses.replace(
            self,
            starts=self.starts[positions],
            lengths=self.lengths[positions],
            failed=_failed_among(self.failed, positions),
        )

    def map(self, fn: nests.MapFn) -> IndexedSource | MixedSource:
        """Returns the source with `fn(x, y)` applied to each client."""
        return self._as_mixed().map(fn)

    def conform(self, spec: nests.Nest, names: nests.Names | None) -> IndexedSource:
        """Returns the source with all examples cast to a public spec."""
        return self._as_mixed().conform(spec, names)

    def _as_mixed(self) -> MixedSource:
        positions = np.arange(len(self.starts))
        repeated = self.had_repeated_rows
        return MixedSource((self,), 0 * positions, positions, self.failed, repeated)


@dataclasses.dataclass(frozen=True)
class MixedSource:
    """Clients in memory whose arrays have different specs.

    No client's spec may decide for all. So the spec comes from elsewhere, and `conform`
    makes an `IndexedSource` of the clients whose examples can be cast to it.

    Attributes:
      parts: The clients of each spec.
      part: int64[N], the part that contains a client.
      index_in_part: int64[N], the client's position in that part.
      failed: The clients that could not be mapped, by position.
      had_repeated_rows: As in `IndexedSource`.
    """

    parts: tuple[IndexedSource, ...]
    part: np.ndarray
    index_in_part: np.ndarray
    failed: Mapping[int, Exception] = dataclasses.field(default_factory=dict)
    had_repeated_rows: bool = False
    is_declared: ClassVar[bool] = False

    @property
    def element_spec(self) -> nests.Nest:
        """The spec of the first client, for information only."""
        return self.parts[self.part[0]].element_spec

    def read(self, position: int) -> tuple[nests.Nest, nests.Nest]:
        """Returns the examples of one client as NumPy nests (x, y)."""
        if position in self.failed:
            raise self.failed[position]
        return self.parts[self.part[position]].read(self.index_in_part[position])

    def sizes(self, positions: np.ndarray) -> np.ndarray:
        """Returns the number of examples of some clients, int64[k]."""
        pairs = zip(self.part[positions], self.index_in_part[positions], strict=True)
        return np.array([self.parts[n].lengths[index] for n, index in pairs], np.int64)

    def content_digest(self) -> str:
        """Returns a SHA-256 of all examples and of their assignment to clients."""
        assignment = repr((self.part.tolist(), self.index_in_part.tolist()))
        digests = (part.content_digest() for part in self.parts)
        return hashlib.sha256(" ".join((assignment, *digests)).encode()).hexdigest()

    def take(self, positions: np.ndarray) -> MixedSource:
        """Returns the source of some of the clients, sharing everything."""
        return dataclasses.replace(
            self,
            part=self.part[positions],
            index_in_part=self.index_in_part[positions],
            failed=_failed_among(self.failed, positions),
        )

    def map(self, fn: nests.MapFn) -> IndexedSource | MixedSource:
        """Returns the source with `fn(x, y)` applied to each client.

        So no client's examples decide what becomes of the others'.
        """
        mapped, failed, num_mapped = [], dict(self.failed), 0
        sizes = self.sizes(np.arange(len(self.part)))
        for position, size in enumerate(sizes.tolist()):
            examples: tuple[nests.Nest, ...] = ([], [])
            if position not in failed and size:
                x, y = self.read(position)
                try:
                    examples = _apply(fn, x, y)
                    number = _client_arrays(examples)[2]
                    if number != size:
                        raise nests.ExamplesValueError(
                            "fn must return as many examples as it gets, got "
                            f"{number} for {size}."
                        )
                    num_mapped += 1
                except Exception as error:
                    examples, failed[position] = ([], []), error
            mapped.append((position, examples))
        if failed and not num_mapped:
            raise next(iter(failed.values()))
        repeated = any(part.has_repeated_rows for part in self.parts)
        return dataclasses.replace(
            pack(mapped),
            failed=failed,
            had_repeated_rows=self.had_repeated_rows or repeated,
        )

    def conform(self, spec: nests.Nest, names: nests.Names | None) -> IndexedSource:
        """Returns the source with all examples cast to a public spec.

        Clients that cannot be cast become failures, which does not affect the others.
        """
        pieces, slots, first_row, first_slot = [], [], 0, 0
        failed = dict(self.failed)
        starts, lengths = np.zeros((2, len(self.part)), np.int64)
        for part_index, part in enumerate(self.parts):
            positions = np.flatnonzero(self.part == part_index)
            indices = self.index_in_part[positions]
            has_examples = part.lengths[indices] > 0
            positions, indices = positions[has_examples], indices[has_examples]
            if not len(positions):
                continue
            try:
                x, y, fits = nests.conform(part.x, part.y, spec, names)
            except nests.SAFE_ERRORS as error:
                failed |= dict.fromkeys(positions.tolist(), error)
                continue
            if not fits.all():
                rows = (part.rows(indices[[i]])[0] for i in range(len(indices)))
                is_unchanged = np.array(
                    [fits[client_rows].all() for client_rows in rows]
                )
                no_cast = nests.ExamplesValueError(nests.NO_CAST)
                failed |= dict.fromkeys(positions[~is_unchanged].tolist(), no_cast)
                positions, indices = positions[is_unchanged], indices[is_unchanged]
            starts[positions] = first_slot
            starts[positions] += part.starts[indices]
            lengths[positions] = part.lengths[indices]
            slots.append(part.table.astype(np.int64) + first_row)
            pieces.append((x, y))
            first_slot += len(part.table)
            first_row += len(fits)
        if len(pieces) > 1:
            pieces = [
                nests.concatenate([nests.as_arrays(piece, "x") for piece in pieces])
            ]
        x, y, num_rows = as_tensors(*(pieces or [nests.no_examples(spec)])[0])
        table = np.concatenate([np.zeros(0, np.int64), *slots])
        table, _ = make_row_table([table], max(num_rows, 1))
        repeated = self.had_repeated_rows
        return IndexedSource(x, y, starts, lengths, table, True, failed, repeated)


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedSource:
    """Clients that are read on demand.

    Attributes:
      keys: The clients' keys for `read_fn`, in their order.
      read_fn: Takes a key and returns that client's nests (x, y); may raise.
      known_spec: The public `tf.TensorSpec`s (x, y) of one example; None: not known
        yet, so clients are read without a cast.
      names: Names of inputs and outputs, if the spec is taken from a model.
      checks: Raise ValueError for examples `(x, y)` that a model cannot accept.
    """

    keys: Sequence[Hashable]
    read_fn: Callable[[Hashable], tuple[nests.Nest, ...]]
    known_spec: nests.Nest | None
    names: nests.Names | None = None
    checks: tuple[Callable[[nests.Nest, nests.Nest], None], ...] = ()
    failed: ClassVar[Mapping[int, Exception]] = {}

    @property
    def is_declared(self) -> bool:
        """Whether the spec of examples is known."""
        return self.known_spec is not None

    @functools.cached_property
    def element_spec(self) -> nests.Nest:
        """The `tf.TensorSpec`s (x, y) of one example.

        If unknown, it is taken from the first readable client, for information only.

        Raises:
          ValueError: If no client can be read.
        """
        if self.known_spec is not None:
            return self.known_spec
        error: Exception | None = None
        for key in self.keys:
            try:
                x, y, length = self._arrays(key)
            except Exception as raised:  # Any client's code may run here.
                error = error or raised
                continue
            if length:
                return nests.spec_of((x, y))
        why = "none has any"
        if error is not None:
            why = f"the first error was {ClientFailure(0, error).reason}"
        raise nests.ExamplesValueError(
            "element_spec must be given, because no client with examples could be "
            f"read; {why}."
        ) from (error if isinstance(error, nests.SAFE_ERRORS) else None)

    def _arrays(self, key: Hashable) -> tuple[nests.Nest, nests.Nest, int]:
        """Reads a client; turns every error into an `Exception`."""
        with _signals.handled():  # Makes a KeyboardInterrupt of it if it was Ctrl-C.
            try:
                return _client_arrays(self.read_fn(key))
            except Exception:
                raise
            except BaseException as error:  # Even `sys.exit` is this client's failure.
                kind = type(error).__name__
                raise RuntimeError(f"reading ended in a {kind}") from None

    def read(self, position: int) -> tuple[nests.Nest, nests.Nest]:
        """Returns the examples of one client as NumPy nests (x, y).

        Raises:
          Exception: Whatever reading the client raises.
          ValueError: If its examples do not fit the spec, or no tensor can hold them.
        """
        x, y, length = self._arrays(self.keys[position])
        if not length:
            return nests.no_examples(self.element_spec)
        # Copy, so that exactly the checked data is used, even if a file changes or a
        # buffer is reused for the next client.
        x, y = tf.nest.map_structure(nests.copy_array, (x, y))
        if self.known_spec is None:
            return x, y
        x, y, fits = nests.conform(x, y, self.known_spec, self.names)
        if not fits.all():
            raise nests.ExamplesValueError(nests.NO_CAST)
        for check in self.checks:
            check(x, y)
        return x, y

    def sizes(self, positions: np.ndarray) -> np.ndarray:
        """Returns the number of examples of some clients, by reading them."""
        return np.array(
            [nests.common_length(*self.read(p)) for p in positions], np.int64
        )

    def take(self, positions: np.ndarray) -> StreamedSource:
        """Returns the source of some of the clients."""
        keys = [self.keys[position] for position in positions]
        return dataclasses.replace(self, keys=keys)

    def map(self, fn: nests.MapFn) -> StreamedSource:
        """Returns the source with `fn(x, y)` applied to each client that is read.

        The function may change the arrays in place, as they are the client's own.
        """

        def read(key: Hashable) -> tuple[nests.Nest, nests.Nest]:
            x, y, _ = self._arrays(key)
            return _apply(fn, *tf.nest.map_structure(np.array, (x, y)))

        return StreamedSource(self.keys, read, None)

    def conform(self, spec: nests.Nest, names: nests.Names | None) -> StreamedSource:
        """Returns the source with all examples cast to a public spec."""
        return dataclasses.replace(self, known_spec=spec, names=names)


Source = IndexedSource | MixedSource | StreamedSource


def _failed_among(
    failed: Mapping[int, Exception], positions: np.ndarray
) -> dict[int, Exception]:
    """Returns the failures among some clients, by their index in `positions`."""
    indexed = enumerate(positions.tolist())
    return {index: failed[old] for index, old in indexed if old in failed}


def _client_arrays(
    examples: tuple[nests.Nest, ...],
) -> tuple[nests.Nest, nests.Nest, int]:
    """Returns a client's `(x, y)` as arrays, and its number of examples."""
    x, y = nests.pair(examples, "A client's examples must be")
    x, y = nests.as_arrays(x, "x"), _as_labels(y, nests.as_arrays)
    # `[]` has no array, so it can only mean that there are no examples.
    if not (nests.leaves_of(x) or nests.leaves_of(y)):
        return x, y, 0
    return x, y, nests.common_length(x, y)


def normalise_spec(spec: nests.Nest) -> nests.Nest:
    """Returns a declared spec in the form (x, y); raises an error if it is invalid."""
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
    """Returns examples (x, y) as tensors, and their number."""
    x, y = nests.as_tensors(x, "x"), _as_labels(y, nests.as_tensors)
    return x, y, nests.common_length(x, y)


def _as_labels(
    y: nests.Nest, convert: Callable[[nests.Nest, str], nests.Nest]
) -> nests.Nest:
    """Converts labels, and any weights stored with them, the latter to float32.

    Args:
      y: A nest of labels, or `nests.Weighted`.
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
    # An infinite weight makes the update count as 0.
    weight = tf.nest.map_structure(lambda leaf: nests.cast(leaf, np.float32), weight)
    return nests.Weighted(convert(y.y, "y"), convert(weight, "sample_weight"))


def _apply(
    fn: nests.MapFn, x: nests.Nest, y: nests.Nest
) -> tuple[nests.Nest, nests.Nest]:
    """Returns `fn(x, y)`, with the weights unless `fn` changes them."""
    mapped = nests.pair(fn(x, nests.labels_of(y)), "fn must return")
    return nests.pair((*mapped, nests.weights_of(y)))


def pack(
    clients: Iterable[tuple[Hashable, tuple[nests.Nest, ...]]],
) -> IndexedSource | MixedSource:
    """Returns the source of clients in memory, without any cast.

    Args:
      clients: Pairs of a client's id and its examples.

    Raises:
      ValueError, TypeError: If a client's own arrays are inconsistent, naming it.
    """
    by_spec: dict[str, list[tuple[nests.Nest, nests.Nest]]] = {}
    sizes: dict[str, list[int]] = {}
    locations: list[tuple[str, int]] = []
    without_examples, empty_arrays = [], []
    for client_id, examples in clients:
        with name_client(client_id):
            x, y, length = _client_arrays(examples)
        if length:
            spec = repr(nests.spec_of((x, y)))
            locations.append((spec, len(by_spec.setdefault(spec, []))))
            by_spec[spec].append((x, y))
            sizes.setdefault(spec, []).append(length)
            continue
        without_examples.append(len(locations))
        locations.append(("", 0))  # Replaced below.
        if tf.nest.flatten(x) and tf.nest.flatten(y):
            empty_arrays.append((x, y))
    if not (by_spec or empty_arrays):
        raise ValueError(
            "clients must have at least one array in all, got only empty lists."
        )
    if not by_spec:  # If no client has examples, use the first client's empty arrays.
        by_spec, sizes = {"": empty_arrays[:1]}, {"": []}
    first = next(iter(by_spec))
    for index in without_examples:
        locations[index] = first, len(sizes[first])
        sizes[first].append(0)
    parts = []
    for spec, group in by_spec.items():
        x, y, num_rows = as_tensors(*nests.concatenate(group))
        table, _ = make_row_table([np.arange(num_rows)], num_rows)
        lengths = np.array(sizes[spec], np.int64)
        starts = np.cumsum(lengths) - lengths
        parts.append(IndexedSource(x, y, starts, lengths, table, False))
    numbers = {spec: number for number, spec in enumerate(by_spec)}
    part = np.array([numbers[spec] for spec, _ in locations])
    mixed = MixedSource(tuple(parts), part, np.array([index for _, index in locations]))
    return mixed if len(parts) > 1 else parts[0].take(mixed.index_in_part)


@contextlib.contextmanager
def name_client(client_id: Hashable) -> Iterator[None]:
    """Adds the client's name to errors about its examples."""
    try:
        yield
    except nests.SAFE_ERRORS as error:
        raise type(error)(f"Client {client_id!r}: {error}") from error


def make_row_table(
    indices: Sequence[ArrayLike] | np.ndarray, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32[slots], the rows of all clients, and int32[N] lengths.

    (With 2^31 slots or more, the lengths are int64, so that their sums are exact.)

    Args:
      indices: One 1-D array of rows per client.
      num_rows: The number of rows.

    Raises:
      TypeError, ValueError: If they are not integers, or out of range.
    """
    if num_rows > np.iinfo(np.int32).max:
        raise ValueError(f"x must have at most 2**31 - 1 examples, got {num_rows}.")
    if isinstance(indices, np.ndarray) and indices.ndim == 2:
        table, _ = make_row_table([indices.reshape(-1)], num_rows)
        length = _index_dtype(len(table))(indices.shape[1])
        return table, np.broadcast_to(length, len(indices))
    rows = [np.asarray(client) for client in indices]
    if any(client.ndim != 1 for client in rows):
        raise ValueError("indices must be one 1-D array per client, got another shape.")
    sizes = [len(client) for client in rows]
    lengths = np.array(sizes, _index_dtype(sum(sizes)))
    filled = [client for client in rows if len(client)] or [np.zeros(0, np.int32)]
    for client in filled:  # (Concatenation would turn a mask into rows 0 and 1.)
        if client.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, got dtype {client.dtype}.")
    flat = filled[0] if len(filled) == 1 else np.concatenate(filled)
    if flat.size and (flat.min() < 0 or flat.max() >= num_rows):
        raise ValueError(
            f"indices must be from 0 to {num_rows - 1}, the examples of x, "
            f"got {flat.min()} to {flat.max()}."
        )
    # (Always a copy, so later changes by the caller have no effect.)
    return flat.astype(np.int32, copy=len(filled) == 1), lengths


def _index_dtype(largest: int) -> type[np.signedinteger]:
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


# Clients that each have a `tf.data.Dataset`.


def _is_batched(dataset: tf.data.Dataset) -> bool:
    """Returns whether the elements are batches: every first dimension is unknown."""
    return all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.rank and leaf.shape[0] is None
        for leaf in tf.nest.flatten(dataset.element_spec)
    )


def check_dataset(dataset: tf.data.Dataset) -> None:
    """Raises TypeError or ValueError unless a client's dataset has examples."""
    if not isinstance(dataset, tf.data.Dataset):
        raise nests.ExamplesTypeError(
            f"dataset must be a tf.data.Dataset, got a {type(dataset).__name__}."
        )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise nests.ExamplesValueError(
            "A client's dataset must be finite, got one that repeats endlessly."
        )
    spec = _element_pair(dataset.element_spec)
    if _is_batched(dataset):
        spec = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), spec
        )
    normalise_spec(spec)


def dataset_reader(
    client_ids: Sequence[Hashable], dataset_of: Callable[[Hashable], tf.data.Dataset]
) -> Callable[[Hashable], tuple[nests.Nest, nests.Nest]]:
    """Returns a function that reads a client's dataset into arrays (x, y).

    Raises:
      TypeError, ValueError: No client's dataset has examples.
    """
    first_error: Exception | None = None
    for client_id in client_ids:
        try:
            check_dataset(dataset_of(client_id))
            first_error = None
            break
        except Exception as error:  # Any client's code may run here.
            first_error = first_error or error
    if isinstance(first_error, nests.SAFE_ERRORS):
        raise first_error
    return lambda client_id: read_pair(dataset_of(client_id))


def read_pair(dataset: tf.data.Dataset) -> tuple[nests.Nest, nests.Nest]:
    """Reads a dataset of examples, or of batches of them, into arrays (x, y)."""
    check_dataset(dataset)
    return _element_pair(read_elements(dataset))


def read_elements(dataset: tf.data.Dataset) -> nests.Nest:
    """Reads a dataset of examples, or of batches of them, into a nest of arrays."""
    if not _is_batched(dataset):
        if int(dataset.cardinality()) > 0:  # Avoids an iterator, which is slower.
            batch = dataset.batch(2**63 - 1).get_single_element()
            return nests.views(batch)
        dataset = dataset.batch(1024)
    batches = list(dataset.as_numpy_iterator())
    if batches:
        return nests.concatenate(batches)
    return tf.nest.map_structure(
        lambda leaf: tf.zeros([0, *leaf.shape[1:]], leaf.dtype), dataset.element_spec
    )


def _element_pair(element: nests.Nest) -> tuple[nests.Nest, nests.Nest]:
    """Returns (x, y) from an element that is a tuple or has the keys x and y.

    The third part of a tuple, or `sample_weight` in a dict, is stored with the labels.
    """
    allowed = {"x", "y", "sample_weight"}
    if isinstance(element, dict) and {"x", "y"} <= set(element) <= allowed:
        element = element["x"], element["y"], element.get("sample_weight")
    return nests.pair(element, "The elements of a client's dataset must be")
