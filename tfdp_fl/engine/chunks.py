"""Reading a cohort: its clients' examples, in pieces of bounded size."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import ClientFailure, FederatedDataset
from tfdp_fl.engine import background, labels, rounds, tables

# How much of a streamed cohort's data, or of updates that wait for a joint
# clip, is held by one call of a compiled function.
CHUNK_BYTES = 64 * 2**20


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


@dataclasses.dataclass
class _Client:
    """A client that was read: its place in the cohort, and its tensors, flattened."""

    member: int
    arrays: list[np.ndarray]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of one example, tensor by tensor."""
        return [array.shape[1:] for array in self.arrays]


def _clients(
    reading: _Reading, num_features: int, label_ranges: list[labels.LabelRange]
) -> Iterator[_Client]:
    """Reads clients one after the other, but for those that failed."""

    def fail(member: int, problem: Exception) -> None:
        position = int(reading.positions[member])
        reading.failures.append(ClientFailure(position, problem))

    read = reading.dataset.read_clients(reading.positions)
    for member, client in enumerate(read):
        if reading.stopped.is_set():
            return
        if isinstance(client, ClientFailure):
            reading.failures.append(client)
            continue
        # Copies: what is checked is what is trained on, whatever becomes of a file.
        arrays = [np.array(leaf) for leaf in tf.nest.flatten((client.x, client.y))]
        problem = labels.problem_of_client(arrays[num_features:], label_ranges)
        if problem is None:
            yield _Client(member, arrays)
        else:
            fail(member, problem)


def _chunks(
    reading: _Reading,
    element_spec: tuple[Any, Any],
    label_ranges: list[labels.LabelRange],
    padded: bool,
) -> Iterator[CohortChunk]:
    """Yields clients whose examples fit into one chunk; at least one chunk.

    Args:
      reading: Whom to read.
      element_spec: `(features, labels)` specs of one example.
      label_ranges: What class labels may be.
      padded: See `Reader`.
    """
    held: list[_Client] = []
    num_bytes, sent = 0, False
    num_features = len(tf.nest.flatten(element_spec[0]))
    for client in _clients(reading, num_features, label_ranges):
        # Examples of another length, where the spec leaves it open, do not fit.
        if held and (num_bytes >= CHUNK_BYTES or held[0].shapes != client.shapes):
            yield _chunk(held, element_spec, padded)
            held, num_bytes, sent = [], 0, True
        held.append(client)
        num_bytes += sum(array.nbytes for array in client.arrays)
    if held or not sent:
        yield _chunk(held, element_spec, padded)


def _chunk(
    clients: list[_Client], element_spec: tuple[Any, Any], padded: bool
) -> CohortChunk:
    """Returns a chunk of clients, perhaps of none."""
    lengths = np.array([len(client.arrays[-1]) for client in clients], np.int64)
    total = int(lengths.sum())
    # A gather needs a row to read nothing from.
    num_rows = max(1, tables.power_of_two(total) if padded else total)
    tensors = []
    for place, spec in enumerate(tf.nest.flatten(element_spec)):
        if not total:
            shape = [size or 1 for size in spec.shape]
            tensors.append(tf.zeros([num_rows, *shape], spec.dtype))
            continue
        arrays = [client.arrays[place] for client in clients]
        if num_rows > total:
            shape = [num_rows - total, *arrays[0].shape[1:]]
            arrays.append(np.zeros(shape, arrays[0].dtype))
        tensors.append(tf.constant(np.concatenate(arrays), spec.dtype))
    x, y = tf.nest.pack_sequence_as(element_spec, tensors)
    members = np.array([client.member for client in clients], np.int64)
    return CohortChunk(x, y, np.arange(total), lengths, members)
