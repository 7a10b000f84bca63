"""Data held by many clients, the input of federated training.

This file has the class that users see: its constructors, contents and transformations,
and how the engine reads it. The examples are in `sources`, the ids in `tables`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdp_fl import _lazy_tf, _validate
from tfdp_fl.datasets import nests, sources, tables
from tfdp_fl.datasets.nests import Nest
from tfdp_fl.datasets.sources import ClientExamples, ClientFailure

if TYPE_CHECKING:
    import pandas
    import tensorflow_federated as tff


# The rows of each client: by its id, or for clients 0 to N - 1.
Indices: TypeAlias = (
    Mapping[tables.ClientId, npt.ArrayLike]
    | Sequence[npt.ArrayLike]
    | np.ndarray
    | tables.ClientRows
)


class FederatedDataset:
    """The examples of N clients, each a pair (features, labels).

    A client has an id, which is the caller's name for it, and a position from 0 to
    N - 1, by which training samples it. Clients may have different numbers of
    examples, including none. Features and labels may be any nest that Keras accepts:
    an array, or a dict, tuple or list of nests. Examples may also have weights, as in
    Keras's `sample_weight`: a client is then `(x, y, sample_weight)`.

    The spec of an example is public. It is the schema of a table (`from_indices`,
    `from_dataframe`), or declared as `element_spec`, or else taken from the model and
    its loss when the clients train. It is never computed from clients. Each client's
    numbers are cast to it. If a client does not fit or cannot be read, only that client
    fails.

    Made from arrays (`from_client_arrays`, `from_indices`), a dataset is *indexed*:
    every example is stored once, in flat CPU tensors that the dataset owns, and a
    client is a list of rows. 64-bit floats become 32-bit; every other dtype is kept.
    Made from sources that must be read first (`from_tf_datasets`, `from_client_data`,
    `from_client_fn`), it is *streamed*: nothing is stored, and a client is read when it
    takes part in a round. `in_memory()` turns a streamed dataset into an indexed one.

    A dataset never changes.

    Attributes:
      has_names: Whether clients have ids of their own; otherwise, their ids are their
        positions (0 is the first client).
    """

    def __init__(self, source: sources.Source, client_ids: Sequence[Hashable]):
        """Use one of the `from_...` class methods instead.

        Args:
          source: The source of the examples.
          client_ids: N distinct ids, or the range from 0 to N - 1.
        """
        self.has_names = not isinstance(client_ids, range)
        self._source = source
        self._client_ids = tables.require_distinct(client_ids)

    def _with_source(
        self, source: sources.Source, ids: Sequence[Hashable]
    ) -> FederatedDataset:
        """Returns a dataset of clients whose ids are known to be distinct."""
        dataset = FederatedDataset(source, range(len(ids)))
        dataset._client_ids, dataset.has_names = ids, self.has_names
        return dataset

    # Construction.

    @classmethod
    def from_client_arrays(
        cls,
        clients: Mapping[tables.ClientId, tuple[Nest, ...]],
        element_spec: Nest | None = None,
    ) -> FederatedDataset:
        """Makes a dataset from every client's own arrays.

        The arrays of all clients are packed into one, so there is one copy of the data
        besides the caller's.

        Args:
          clients: Maps a client's id to `(x, y)` or `(x, y, sample_weight)`,
            nests of arrays whose leading dimension is the client's number of
            examples, which may be 0.
          element_spec: As in `from_client_fn`.

        Raises:
          TypeError, ValueError: If a client's arrays are inconsistent (the message
            names the client), or if there is no client.
        """
        _validate.instance_of(Mapping, clients=clients)
        _require_clients(clients=clients)
        dataset = cls(sources.pack(clients.items()), list(clients))
        return dataset._conform_to_declared(element_spec)

    def _conform_to_declared(self, element_spec: Nest | None) -> FederatedDataset:
        if element_spec is None:
            return self
        return self.conform(sources.normalise_spec(element_spec))

    @classmethod
    def from_indices(
        cls, x: Nest, y: Nest, indices: Indices, sample_weight: Nest | None = None
    ) -> FederatedDataset:
        """Makes a dataset of many clients over the same arrays.

        A client is a list of rows in the arrays. No example is copied for a client, and
        an example may belong to several clients.

        Args:
          x: Features, a nest of arrays of shape [n, ...]. TensorFlow tensors on the CPU
            are used as they are; anything else is copied once into one.
          y: Labels, with the same first dimension.
          indices: The rows of each client, from 0 to n - 1: a mapping from its id to a
            1-D array of integers; or a sequence of such arrays, for clients 0 to N - 1.
          sample_weight: Each example's weight in the loss, likewise; None: 1 each.

        Raises:
          TypeError, ValueError: If x and y are inconsistent, if an index is
            not an integer or out of range, or if there is no client.
        """
        x, y, num_rows = sources.as_tensors(*nests.pair((x, y, sample_weight)))
        client_ids: Sequence[Hashable]
        if isinstance(indices, tables.ClientRows):
            client_ids, rows, lengths = indices
            table, _ = sources.make_row_table([rows], num_rows)
        else:
            client_ids = range(len(indices))
            if isinstance(indices, Mapping):
                client_ids, indices = list(indices), list(indices.values())
            _require_clients(indices=indices)
            table, lengths = sources.make_row_table(indices, num_rows)
        starts = np.cumsum(lengths, dtype=lengths.dtype)
        starts -= lengths
        return cls(sources.IndexedSource(x, y, starts, lengths, table), client_ids)

    @classmethod
    def from_dataframe(
        cls,
        frame: pandas.DataFrame,
        client: str,
        features: tables.Columns | None = None,
        label: tables.Columns = "label",
        sample_weight: str | None = None,
        vocabulary: tables.Vocabulary | None = None,
    ) -> FederatedDataset:
        """Makes a dataset from a pandas frame with a client column.

        The columns are copied once. Clients are in the order of their first appearance,
        and a client's examples are in the order of the frame.

        Args:
          frame: A `pandas.DataFrame` with one example per row.
          client: The column that names the example's client.
          features: One column: x is [n], integers or floats. A list: x is float32
            [n, len(features)]. A mapping from the names of a model's inputs to either:
            x is a dict. None: all columns except `client`, `label` and
            `sample_weight`, as a list.
          label: One column: y is [n]. A list or a mapping: as for features.
            Integers become int64, other numbers float32.
          sample_weight: The column with the weight of each example in the loss;
            None: 1 each.
          vocabulary: Maps a column of text or categories to its allowed values,
            declared without looking at the clients. As the only feature, the column is
            encoded as int64, each value's index in that list. In a list of features, it
            is one-hot encoded.

        Raises:
          TypeError: `frame` is not a frame.
          ValueError: A column is missing, contains something other than finite numbers
            or declared values, or has missing values (the message names the column and
            the row); or a feature is the client column.
        """
        x, y, rows, weight = tables.split_frame(
            frame, client, features, label, sample_weight, vocabulary
        )
        return cls.from_indices(x, y, rows, sample_weight=weight)

    @classmethod
    def from_parquet(
        cls, path: str | os.PathLike[str], *columns: Any, **named: Any
    ) -> FederatedDataset:
        """Makes a dataset from a Parquet file with a client column.

        The file is read once, one row group at a time, to find the clients and check
        all values. If it is sorted by client, the columns are written to an unnamed
        temporary file (in `TMPDIR`), from which a client's rows are read when it takes
        part. Any other file is held in memory.

        Args:
          path: The Parquet file.
          *columns: The positional arguments of `from_dataframe` after `frame`.
          **named: The keyword arguments of `from_dataframe`.

        Raises:
          ImportError: pandas or pyarrow is not installed.
          ValueError: As in `from_dataframe`.
        """
        with _lazy_tf.explain_missing("pandas pyarrow", "Reading .parquet files"):
            import pandas
            import pyarrow  # noqa: F401
        streamed = tables.open_sorted_parquet(path, *columns, **named)
        if streamed is not None:
            return cls.from_client_fn(*streamed)
        frame = pandas.read_parquet(os.fspath(path)).reset_index(drop=True)
        return cls.from_dataframe(frame, *columns, **named)

    @classmethod
    def from_tf_datasets(
        cls,
        clients: Mapping[tables.ClientId, tf.data.Dataset],
        element_spec: Nest | None = None,
    ) -> FederatedDataset:
        """Makes a dataset from every client's own `tf.data.Dataset`.

        Args:
          clients: Maps a client's id to a finite dataset of examples: `(x, y)`,
            `(x, y, sample_weight)` or a dict of `x`, `y` and optionally
            `sample_weight`. It may also contain batches of them, if each array's first
            dimension is unknown (as `dataset.batch` makes it). TensorFlow does not know
            whether a generator ends: if it might not, use `dataset.take(n)`, as a
            client is read to its end.
          element_spec: As in `from_client_fn`.

        Raises:
          TypeError, ValueError: If the elements are not such examples, if another
            dimension is unknown, if a dataset never ends, or if there is no client.
        """
        _validate.instance_of(Mapping, clients=clients)
        _require_clients(clients=clients)
        for client_id, dataset in clients.items():
            with sources.name_client(client_id):
                sources.check_dataset(dataset)
        # So `source_identity` compares the `tf.data.Dataset` objects themselves.
        source = sources.StreamedSource(
            tuple(clients.values()), sources.read_pair, None
        )
        return cls(source, list(clients))._conform_to_declared(element_spec)

    @classmethod
    def from_client_data(
        cls,
        client_data: tff.simulation.datasets.ClientData,
        element_spec: Nest | None = None,
    ) -> FederatedDataset:
        """Makes a dataset from a `tff.simulation.datasets.ClientData`.

        Clients stay where the client data stores them (on disk, for TFF's own) and are
        read when they take part.

        Args:
          client_data: Any object with `client_ids` and
            `create_tf_dataset_for_client(client_id)`, whose elements are as in
            `from_tf_datasets`; `client_data.preprocess(fn)` can convert them.
          element_spec: As in `from_client_fn`.

        Raises:
          TypeError, ValueError: If this is no client data, or if no client has such
            elements.
        """
        if not hasattr(client_data, "create_tf_dataset_for_client"):
            raise TypeError(
                "client_data must be a tff.simulation.datasets.ClientData, got a "
                f"{type(client_data).__name__}."
            )
        dataset_of = client_data.create_tf_dataset_for_client
        client_ids = list(client_data.client_ids)
        _require_clients(client_data=client_ids)
        read = sources.dataset_reader(client_ids, dataset_of)
        return cls.from_client_fn(client_ids, read, element_spec)

    @classmethod
    def from_client_fn(
        cls,
        client_ids: Sequence[Hashable],
        fn: tables.ReadClient,
        element_spec: Nest | None = None,
    ) -> FederatedDataset:
        """Makes a dataset of clients that a function reads, for example from disk.

        Args:
          client_ids: The clients' ids.
          fn: Takes a client's id and returns its `(x, y)` or `(x, y, sample_weight)`,
            nests of arrays. If it raises an error, only that client fails. In `fit`, it
            is called in a separate thread.
          element_spec: The public spec of one example: a tuple of nests of
            `tf.TensorSpec` without a leading dimension. None: it is taken from the
            model and the loss, if possible (see `tfdp_fl.DPFederatedModel.fit`).

        Raises:
          TypeError, ValueError: If `fn` cannot be called, if ids repeat, or if
            there is no client.
        """
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {fn!r}.")
        _require_clients(client_ids=client_ids)
        source = sources.StreamedSource(tuple(client_ids), fn, None)
        return cls(source, client_ids)._conform_to_declared(element_spec)

    # The clients and their examples.

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return len(self._client_ids)

    @property
    def client_ids(self) -> Sequence[Hashable]:
        """The clients' ids, in the order of their positions (a copy)."""
        ids = self._client_ids
        return ids if isinstance(ids, range) else list(ids)

    @property
    def element_spec(self) -> tuple[Nest, Nest]:
        """The `tf.TensorSpec`s (x, y) of one example.

        If examples have weights, y is a pair `(y, sample_weight)` of specs. Unless
        `is_declared`, these are only the specs of the first client that can be read.
        """
        return self._source.element_spec

    @property
    def is_streamed(self) -> bool:
        """Whether clients are read on demand."""
        return isinstance(self._source, sources.StreamedSource)

    @property
    def is_declared(self) -> bool:
        """Whether the spec of an example is known and public."""
        return self._source.is_declared

    @property
    def is_indexed(self) -> bool:
        """Whether every example is in memory, in the tensors of `flat()`."""
        return isinstance(self._source, sources.IndexedSource)

    @property
    def has_repeated_rows(self) -> bool:
        """Whether clients in memory share a row, or hold one several times."""
        source = self._source
        return isinstance(source, sources.IndexedSource) and source.has_repeated_rows

    @functools.cached_property
    def clients_digest(self) -> str:
        """A hexadecimal digest that identifies these clients in this order.

        Two datasets have the same digest if their ids have the same types and the same
        text, in the same order; NumPy numbers count as Python's. If clients have only
        positions (0 is the first client), their examples are included as well, if they
        are in memory.
        """
        digest = tables.hash_ids(self._client_ids)
        if self.has_names or isinstance(self._source, sources.StreamedSource):
            return digest
        both = digest + self._source.content_digest()
        return hashlib.sha256(both.encode()).hexdigest()

    @property
    def source_identity(self) -> tuple[object, ...] | None:
        """Distinguishes these clients from others if `clients_digest` cannot.

        It is None if the digest can. For streamed clients without names, it has their
        keys and the function that reads them.
        """
        if self.has_names or not isinstance(self._source, sources.StreamedSource):
            return None
        return tuple(self._source.keys), self._source.read_fn

    def client_sizes(self, positions: npt.ArrayLike | None = None) -> np.ndarray:
        """Returns the number of examples of clients, int64[k].

        Args:
          positions: int[k]; None: all clients.

        Raises:
          Exception: Whatever reading a client raises; a streamed dataset reads all
            these clients in order to count.
        """
        return self._source.sizes(self._check_positions(positions))

    @functools.cached_property
    def _position_of(self) -> dict[Hashable, int]:
        return {client: position for position, client in enumerate(self._client_ids)}

    def client(self, client_id: Hashable) -> tuple[Nest, ...]:
        """Returns a client's `(x, y)`, as NumPy nests.

        If examples have weights, it is `(x, y, sample_weight)`.

        Raises:
          KeyError: If there is no such client.
        """
        return nests.unpair(*self._source.read(self._position_of[client_id]))

    def create_tf_dataset_for_client(self, client_id: Hashable) -> tf.data.Dataset:
        """Returns a client's examples, one by one; the name of the method is TFF's.

        Raises:
          KeyError: If there is no such client.
        """
        return tf.data.Dataset.from_tensor_slices(self.client(client_id))

    # Transformations.

    def take(self, positions: npt.ArrayLike) -> FederatedDataset:
        """Returns a dataset of the clients at some positions, int[k].

        It shares the examples with this one; the clients keep their ids.

        Raises:
          ValueError: If a position is out of range or repeated, or if there
            is none.
        """
        positions = self._check_positions(positions)
        if len(np.unique(positions)) < len(positions):
            raise ValueError("positions must be distinct, got some repeatedly.")
        _require_clients(positions=positions)
        taken = [self._client_ids[position] for position in positions.tolist()]
        return self._with_source(self._source.take(positions), taken)

    @functools.cached_property
    def _id_hashes(self) -> np.ndarray:
        """Each id's hash in [0, 1), float64 [N]."""
        hashes = map(tables.hash_to_unit_interval, self._client_ids)
        return np.fromiter(hashes, np.float64, self.num_clients)

    def split_by_id(self, fraction: float) -> tuple[FederatedDataset, FederatedDataset]:
        """Splits the clients by the hash of each client's own id.

        A client's side does not change when other clients are added or removed. So
        neighbouring datasets (with one client more) have neighbouring sides, and a
        guarantee for the training side is a guarantee for all clients. The fraction is
        approximate, as hashes are like random numbers.

        Args:
          fraction: The fraction of the clients in the second dataset, between 0 and 1.

        Returns:
          Two datasets: the other clients, and the held-out ones.

        Raises:
          ValueError: If all clients are on one side. (If we moved one, its side would
            depend on the other clients.)
        """
        fraction = _validate.inside_unit_interval(fraction=fraction)
        held_out = self._id_hashes < fraction
        if held_out.all() or not held_out.any():
            raise ValueError(
                f"clients must be more than {self.num_clients}, as the hashes of their "
                f"ids put all on one side of a split with fraction {fraction:g}. "
                "(Moving a client would make its side depend on the other clients.)"
            )
        return self.take(np.flatnonzero(~held_out)), self.take(np.flatnonzero(held_out))

    def map(self, fn: nests.MapFn) -> FederatedDataset:
        """Returns the dataset with every example changed by a function.

        Args:
          fn: Takes any number of examples as nests of arrays (x, y) and returns the
            same number: `lambda x, y: (x / 255, y)`. It is called for each client (a
            third of a millisecond each), as TensorFlow may round a row differently in
            another table. A client for which it raises an error fails alone. Weights of
            examples are kept, unless it returns new ones as a third result.
        """
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {fn!r}.")
        return self._with_source(self._source.map(fn), self._client_ids)

    def conform(
        self, spec: tuple[Nest, Nest], names: nests.Names | None = None
    ) -> FederatedDataset:
        """Returns a dataset with each client cast to a spec; others fail.

        Args:
          spec: As `element_spec`; it must not depend on clients' data.
          names: The names of the inputs and outputs, if the spec comes from a model.
        """
        return self._with_source(self._source.conform(spec, names), self._client_ids)

    def with_check(self, check: Callable[[Nest, Nest], None]) -> FederatedDataset:
        """Returns a streamed dataset, whose clients fail if `check(x, y)` raises."""
        assert isinstance(self._source, sources.StreamedSource)
        checks = *self._source.checks, check
        source = dataclasses.replace(self._source, checks=checks)
        return self._with_source(source, self._client_ids)

    def with_ids(self, client_ids: Sequence[Hashable]) -> FederatedDataset:
        """Returns the same clients under other ids, one for each."""
        if len(client_ids) != self.num_clients:
            raise ValueError(
                f"client_ids must have one id for each of the {self.num_clients} "
                f"clients, got {len(client_ids)}."
            )
        return FederatedDataset(self._source, client_ids)

    def in_memory(self) -> FederatedDataset:
        """Returns this dataset as an indexed one; reads every client if necessary.

        Raises:
          Exception: Whatever reading a client raises.
        """
        if not self.is_streamed:
            return self
        read = self._source.read
        named = ((k, nests.unpair(*read(n))) for n, k in enumerate(self._client_ids))
        dataset = self._with_source(sources.pack(named), self._client_ids)
        return dataset.conform(self.element_spec) if self.is_declared else dataset

    # Methods for the engine.

    def flat(self) -> tuple[Nest, Nest]:
        """Returns the tensors (x, y) that hold all clients' examples.

        Every call returns the same CPU tensors. Weights of examples are paired with the
        labels, as in `element_spec`. Only indexed datasets have these tensors.
        """
        source = self._require_indexed("flat")
        return source.x, source.y

    def client_rows(self, positions: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of `flat()` that are the examples of some clients.

        Only indexed datasets have rows. The time depends on the requested rows, not on
        the number of clients.

        Args:
          positions: int64[k].

        Returns:
          int32[sum of lengths], the rows of one client after another, each in
          its own order; and int64[k], the clients' lengths.
        """
        return self._require_indexed("client_rows").rows(
            self._check_positions(positions)
        )

    def failures(self, positions: np.ndarray) -> list[ClientFailure]:
        """Returns the known failures among some clients, in their order.

        Args:
          positions: int64[k].
        """
        failed = self._source.failed
        if not failed:
            return []
        known = [position for position in positions.tolist() if position in failed]
        return [ClientFailure(position, failed[position]) for position in known]

    def read_clients(
        self, positions: npt.ArrayLike | None
    ) -> Iterator[ClientExamples | ClientFailure]:
        """Yields the examples of some clients, in the given order.

        Args:
          positions: int64[k].

        Yields:
          For each position, `ClientExamples` with NumPy nests, or `ClientFailure` with
          the error. A failure does not stop the others.
        """
        return map(self._read, self._check_positions(positions).tolist())

    def _read(self, position: int) -> ClientExamples | ClientFailure:
        try:
            return ClientExamples(position, *self._source.read(position))
        except Exception as error:  # Any client's code may run here.
            return ClientFailure(position, error)

    def _require_indexed(self, method: str) -> sources.IndexedSource:
        if not isinstance(self._source, sources.IndexedSource):
            raise ValueError(
                f"{method} must be called on an indexed dataset, got a streamed one, "
                "or one whose clients' specs differ; in_memory() makes it indexed, and "
                "conform(spec) casts all clients."
            )
        return self._source

    def _check_positions(self, positions: npt.ArrayLike | None) -> np.ndarray:
        """Returns client positions as int64[k], within range."""
        if positions is None:
            return np.arange(self.num_clients)
        positions = np.asarray(positions)
        if positions.ndim != 1 or (
            positions.size
            and not (
                positions.dtype.kind in "iu"
                and 0 <= positions.min() <= positions.max() < self.num_clients
            )
        ):
            raise ValueError(
                "positions must be a 1-D array of integers from 0 to "
                f"{self.num_clients - 1}, got {positions!r:.80}."
            )
        return positions.astype(np.int64)

    # Representation.

    def __repr__(self) -> str:
        kind = "streamed" if self.is_streamed else "indexed"
        return f"<FederatedDataset: {self.num_clients} clients, {kind}>"


def _require_clients(**given: Sized) -> None:
    """Raises ValueError, naming the argument, if there are no clients."""
    ((name, value),) = given.items()
    if not len(value):
        raise ValueError(f"{name} must have at least one client, got none.")
