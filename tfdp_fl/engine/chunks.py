"""Reading a cohort: its clients' examples, in pieces of bounded size."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.engine import background, labels, rounds, tables

# How much of a streamed cohort's data, or of updates that wait for a joint
# clip, is held by one call of a compiled function.
CHUNK_BYTES = 64 * 2**20
# Where an array has to begin for TensorFlow to take it as it lies.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class CohortChunk:
    """Some clients of a cohort with the tensors that hold their examples.

    Attributes:
      x: Nest of feature tensors, leading dimension over stored examples.
      y: Nest of label tensors, likewise.
      rows: Int [sum of lengths], the clients' rows of them.
      lengths: Int64 [K].
      members: Int64 [K], the clients' places in the cohort.
      groups: Who of them trains where (see `layout.Layout.lay_out`); None
        where that is not known yet.
    """

    x: Any
    y: Any
    rows: np.ndarray
    lengths: np.ndarray
    members: np.ndarray
    groups: Any = None

    @property
    def num_rows(self) -> int:
        """Returns how many examples are stored, those of nobody included."""
        return int(tf.nest.flatten(self.y)[0].shape[0])


# Returns a chunk with its `groups`; called by the thread that has read it.
LayOut = Callable[[CohortChunk, rounds.RoundInputs], CohortChunk]


class Reader:
    """Reads cohorts, in pieces of bounded size.

    A streamed chunk is read while the one before it trains; the first of a
    round, where `expect` was told of it, while the round before trains. A
    client that cannot be read, or with labels that are not allowed, failed.

    Attributes:
      thread: Reads.
    """

    def __init__(
        self,
        *,
        element_spec: tuple[Any, Any],
        label_ranges: list[labels.LabelRange],
        padded: bool = False,
    ):
        """Starts nothing.

        Args:
          element_spec: `(features, labels)` specs of one example.
          label_ranges: What class labels may be.
          padded: Whether the rows of a streamed chunk are a power of two, those
            after its examples being zeros.
        """
        self._label_ranges = label_ranges
        self._element_spec = element_spec
        self._padded = padded
        self.thread = background.BackgroundThread()
        self._expected: Callable[[], rounds.RoundInputs] | None = None
        # What is being asked for, and what comes after it.
        self._current: _Reading | None = None
        self._begun: _Reading | None = None

    def __call__(
        self,
        dataset: FederatedDataset,
        pending: rounds.PendingRound,
        lay_out: LayOut | None = None,
    ) -> Iterator[CohortChunk]:
        """Yields the data of a round's cohort, at least one chunk.

        Args:
          dataset: Where the examples come from.
          pending: The round; clients that failed are added to its failures.
          lay_out: Lays out what is streamed, of this round and of the expected
            one; None: nobody does.
        """
        inputs = pending.inputs
        if dataset.is_indexed:
            yield inputs.chunk or indexed(dataset, inputs.positions)
            return
        reading, self._begun = self._begun, None
        if reading is not None and not reading.is_of(dataset, inputs.positions):
            reading.stopped.set()
            reading = None
        self.thread.start()
        if reading is None:
            reading = self._begin(dataset, inputs, lay_out)
        self._current = reading
        expected, self._expected = self._expected, None
        if expected is not None:
            reading.then = functools.partial(
                self._begin_next, dataset, expected, lay_out
            )
        try:
            while True:
                chunk, failures = reading.ahead.result()
                pending.failures += failures
                if chunk is None:
                    return
                reading.go_on()
                yield chunk
        finally:
            reading.stopped.set()
            self._current = None

    def expect(self, draw: Callable[[], rounds.RoundInputs]) -> None:
        """Is told of the round after the coming one.

        Args:
          draw: Returns its inputs. It is called by the thread that reads, once
            the coming cohort was read, and has returned before `__call__` ends.
        """
        self._expected = draw

    def close(self) -> None:
        """Forgets what was expected; nothing is read any more."""
        self._expected = None
        for reading in (self._current, self._begun):
            if reading is not None:
                reading.stopped.set()
        self.thread.close()
        self._current = self._begun = None

    def _begin(
        self,
        dataset: FederatedDataset,
        inputs: rounds.RoundInputs,
        lay_out: LayOut | None,
    ) -> _Reading:
        """Begins to read a cohort, once what is being read is there."""
        reading = _Reading(dataset, inputs.positions, self.thread)
        reading.chunks = _chunks(
            reading, self._element_spec, self._label_ranges, self._padded
        )
        if lay_out is not None:
            reading.chunks = (lay_out(chunk, inputs) for chunk in reading.chunks)
        reading.go_on()
        return reading

    def _begin_next(
        self,
        dataset: FederatedDataset,
        draw: Callable[[], rounds.RoundInputs],
        lay_out: LayOut | None,
    ) -> None:
        # It was closed just now; or what is wrong with the coming round is
        # raised again where it begins, and does this one no harm.
        with contextlib.suppress(Exception):
            self._begun = self._begin(dataset, draw(), lay_out)


def indexed(dataset: FederatedDataset, positions: np.ndarray) -> CohortChunk:
    """Returns a cohort's data, of a dataset that is in memory.

    Args:
      dataset: The clients.
      positions: Int64 [K], the cohort.
    """
    x, y = dataset.flat()
    if not len(tf.nest.flatten(y)[0]):
        x, y = tf.nest.map_structure(_with_a_row, (x, y))
    rows, lengths = dataset.client_rows(positions)
    members = np.arange(len(positions))
    return CohortChunk(x, y, rows, lengths, members)


class _Reading:
    """A cohort that is being read, one chunk ahead of who asks for them.

    Attributes:
      chunks: Yields them; used by one thread only.
      failures: The clients that failed since the last chunk; likewise.
      stopped: Whether nobody wants the rest.
      then: Called by that thread when all was read, unless stopped.
      ahead: The next chunk (None at the end), and who failed before it.
    """

    def __init__(
        self,
        dataset: FederatedDataset,
        positions: np.ndarray,
        thread: background.BackgroundThread,
    ):
        self.dataset = dataset
        self.positions = positions
        self._thread = thread
        self.chunks: Iterator[CohortChunk] = iter(())
        self.failures: list[ClientFailure] = []
        self.stopped = threading.Event()
        self.then: Callable[[], None] | None = None
        self.ahead: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def is_of(self, dataset: FederatedDataset, positions: np.ndarray) -> bool:
        """Returns whether it is these clients', in this order."""
        return self.dataset is dataset and np.array_equal(self.positions, positions)

    def go_on(self) -> None:
        """Has the next chunk read, in the background."""
        self.ahead = self._thread.submit(self._next)

    def _next(self) -> tuple[CohortChunk | None, list[ClientFailure]]:
        chunk = next(self.chunks, None)
        failures, self.failures = self.failures, []
        # Labels are looked at when the clients after them were read.
        failures.sort(key=lambda failure: failure.position)
        if chunk is None and self.then is not None and not self.stopped.is_set():
            self.then()
        return chunk, failures


def _with_a_row(array: Any) -> tf.Tensor:
    """Returns a row of zeros for an array of no examples.

    A gather of nothing needs a row to read it from, too, for XLA.
    """
    return tf.zeros([1, *array.shape[1:]], array.dtype)


# A client's place in the cohort, and its features and labels, flattened.
_Client = tuple[int, list[np.ndarray]]


def _clients(reading: _Reading) -> Iterator[_Client]:
    """Reads clients one after the other, but for those that failed."""
    read = reading.dataset.read_clients(reading.positions)
    for member, client in enumerate(read):
        if reading.stopped.is_set():
            return
        if isinstance(client, ClientFailure):
            reading.failures.append(client)
        else:
            yield member, [*_leaves(client.x), *_leaves(client.y)]


def _leaves(nest: Any) -> list[np.ndarray]:
    """Returns a nest's arrays."""
    return [nest] if type(nest) is np.ndarray else tf.nest.flatten(nest)


def _chunks(
    reading: _Reading,
    element_spec: tuple[Any, Any],
    label_ranges: list[labels.LabelRange],
    padded: bool,
) -> Iterator[CohortChunk]:
    """Yields clients whose examples fit into one chunk; at least one chunk.

    A client is copied to where the engine reads it before the next one is
    read, so that their memory is used again. Labels are looked at once for all
    of a chunk.

    Args:
      reading: Whom to read.
      element_spec: `(features, labels)` specs of one example.
      label_ranges: What class labels may be.
      padded: See `Reader`.
    """
    held: _Held | None = None
    sent = False

    def checked(held: _Held) -> CohortChunk:
        for member, problem in held.leave_out_wrong_labels(label_ranges):
            position = int(reading.positions[member])
            reading.failures.append(ClientFailure(position, problem))
        return held.chunk(padded)

    for member, arrays in _clients(reading):
        if held is not None and held.shapes != _shapes(arrays):
            # Of another length, where the spec leaves it open.
            yield checked(held)
            held, sent = None, True
        if held is None:
            held = _Held(arrays, len(reading.positions), element_spec)
        held.add(member, arrays)
        if held.num_bytes >= CHUNK_BYTES:
            yield checked(held)
            held, sent = None, True
    if held is None and not sent:
        nobody = tf.nest.flatten(nests.no_examples(element_spec))
        held = _Held(nobody, 0, element_spec)
    if held is not None:
        yield checked(held)


def _shapes(arrays: Sequence[np.ndarray]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of one example of a client, tensor by tensor."""
    return tuple([array.shape[1:] for array in arrays])


def _known(shape: tf.TensorShape) -> list[int]:
    """Returns a shape, with 1 for what it leaves open."""
    return [dim or 1 for dim in shape]


class _Held:
    """Clients of a chunk, as far as they were read.

    Attributes:
      shapes: Of one example, tensor by tensor.
      num_bytes: Of the examples.
    """

    def __init__(self, first: list[np.ndarray], expected: int, element_spec: Any):
        """Holds nobody.

        Args:
          first: The arrays of the client who comes first.
          expected: How many clients will come at most.
          element_spec: See `_chunks`.
        """
        self.shapes = _shapes(first)
        self.num_bytes = 0
        self._element_spec = element_spec
        self._members: list[int] = []
        self._lengths: list[int] = []
        bytes_of_one = max(1, sum(array.nbytes for array in first))
        most = min(expected, 1 + CHUNK_BYTES // bytes_of_one)
        self._columns = [
            _Column(spec.dtype, shape, most * len(array))
            for spec, shape, array in zip(
                tf.nest.flatten(element_spec), self.shapes, first, strict=True
            )
        ]

    def add(self, member: int, arrays: list[np.ndarray]) -> None:
        """Copies the examples of a client."""
        for column, array in zip(self._columns, arrays, strict=True):
            column.append(array)
            self.num_bytes += array.nbytes
        self._members.append(member)
        self._lengths.append(len(arrays[-1]))

    def leave_out_wrong_labels(
        self, allowed: list[labels.LabelRange]
    ) -> list[tuple[int, ValueError]]:
        """Lets go of clients whose labels are not allowed.

        Args:
          allowed: What class labels may be.

        Returns:
          Their places in the cohort, and what is wrong.
        """
        first = len(tf.nest.flatten(self._element_spec[0]))
        leaves = [column.rows for column in self._columns[first:]]
        if labels.problem_of_client(leaves, allowed) is None:
            return []
        wrong = []
        ends = np.cumsum(self._lengths).tolist()
        for member, length, end in zip(self._members, self._lengths, ends, strict=True):
            own = [leaf[end - length : end] for leaf in leaves]
            problem = labels.problem_of_client(own, allowed)
            if problem is not None:
                wrong.append((member, problem))
        kept = ~np.isin(self._members, [member for member, _ in wrong])
        for column in self._columns:
            column.keep(np.repeat(kept, self._lengths))
        self._members = list(itertools.compress(self._members, kept))
        self._lengths = list(itertools.compress(self._lengths, kept))
        return wrong

    def chunk(self, padded: bool) -> CohortChunk:
        """Returns the clients, who are not held any more."""
        lengths = np.asarray(self._lengths, np.int64)
        total = int(lengths.sum())
        num_rows = tables.power_of_two(total) if padded else total
        if total:
            tensors = [column.tensor(num_rows) for column in self._columns]
        else:  # A gather needs a tensor to read nothing from.
            tensors = [
                tf.zeros([max(1, num_rows), *_known(spec.shape)], spec.dtype)
                for spec in tf.nest.flatten(self._element_spec)
            ]
        x, y = tf.nest.pack_sequence_as(self._element_spec, tensors)
        members = np.asarray(self._members, np.int64)
        return CohortChunk(x, y, np.arange(total), lengths, members)


class _Column:
    """Clients' arrays of one kind, one after another.

    Attributes:
      row_bytes: Of one example.
    """

    def __init__(self, dtype: tf.DType, shape: tuple[int, ...], num_rows: int):
        """Has room for so many rows, of one shape, and takes more as well."""
        self._dtype = dtype
        self._shape = shape
        self._kind = np.dtype(dtype.as_numpy_dtype)
        self.row_bytes = math.prod(shape) * self._kind.itemsize
        self._used = 0
        self._rows = self._room(num_rows)

    def append(self, array: np.ndarray) -> None:
        """Copies a client's rows."""
        end = self._used + len(array)
        if end > len(self._rows):
            self._grow(max(end, 2 * len(self._rows)))
        self._rows[self._used : end] = array
        self._used = end

    @property
    def rows(self) -> np.ndarray:
        """The rows so far."""
        return self._rows[: self._used]

    def keep(self, wanted: np.ndarray) -> None:
        """Lets go of all rows but those that are wanted, bool [n]."""
        kept = self.rows[wanted]
        self._used = len(kept)
        self._rows[: self._used] = kept

    def tensor(self, num_rows: int) -> tf.Tensor:
        """Returns the rows, and zeros after them; appends no more.

        Args:
          num_rows: How many there are with the zeros.
        """
        if num_rows > len(self._rows):
            self._grow(num_rows)
        rows = self._rows[:num_rows]
        rows[self._used :] = b"" if self._dtype == tf.string else 0
        if not _is_shared(self._kind):
            return tf.constant(rows, self._dtype)
        # It keeps the array, and is the only one who does.
        return tf.experimental.dlpack.from_dlpack(rows.__dlpack__())

    def _grow(self, num_rows: int) -> None:
        rows = self._room(num_rows)
        rows[: self._used] = self._rows[: self._used]
        self._rows = rows

    def _room(self, num_rows: int) -> np.ndarray:
        """Returns memory that is the system's until somebody writes to it."""
        shape = [num_rows, *self._shape]
        if not _is_shared(self._kind):
            return np.empty(shape, self._kind)
        size = num_rows * self.row_bytes
        held = np.empty(size + _ALIGNMENT, np.uint8)
        start = -held.ctypes.data % _ALIGNMENT
        return held[start : start + size].view(self._kind).reshape(shape)


def _is_shared(kind: np.dtype) -> bool:
    """Returns whether TensorFlow takes such arrays as they lie, by DLPack."""
    return kind.kind in "iuf"
