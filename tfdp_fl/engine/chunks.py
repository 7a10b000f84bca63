"""Reading a cohort: its clients' examples, in pieces of bounded size.

A background thread reads one chunk ahead of training: while a chunk trains, the
next one of the round is read. After the last one, the thread draws the round
that follows and reads its first chunk.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import ClientFailure, FederatedDataset
from tfdp_fl.engine import cohort, labels

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
      groups: Which of them train where (see `layout.Layout.lay_out`); None
        where that is not known yet.
    """

    x: Any
    y: Any
    rows: np.ndarray
    lengths: np.ndarray
    members: np.ndarray
    groups: Any = None


# Returns a chunk with its `groups`; called by the thread that has read it.
LayOut = Callable[[CohortChunk, cohort.RoundInputs], CohortChunk]
Draw = Callable[[], cohort.RoundInputs]
# A client that was read: its place in the cohort, and its tensors, flattened.
_Client = tuple[int, list[np.ndarray]]


class Reader:
    """Reads cohorts ahead of their training.

    A client that cannot be read, or with labels that are not allowed, failed.
    """

    def __init__(
        self,
        *,
        element_spec: tuple[Any, Any],
        label_ranges: list[labels.LabelRange],
        padded: bool = False,
    ):
        """Starts no thread yet.

        Args:
          element_spec: `(features, labels)` specs of one example.
          label_ranges: What class labels may be.
          padded: Whether the rows of a streamed chunk are a power of two, those
            after its examples being zeros.
        """
        self.label_ranges = label_ranges
        self.element_spec = element_spec
        self.padded = padded
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._draw: Draw | None = None
        self._current: _Reading | None = None
        self._following: _Reading | None = None

    def __call__(
        self,
        dataset: FederatedDataset,
        pending: cohort.PendingRound,
        lay_out: LayOut | None = None,
    ) -> Iterator[CohortChunk]:
        """Yields the data of a round's cohort, at least one chunk.

        Args:
          dataset: Where the examples come from.
          pending: The round; clients that failed are added to its failures.
          lay_out: Lays chunks out, of this round and of the following one;
            None: they are yielded without `groups`.
        """
        inputs = pending.inputs
        pool = self._pool = self._pool or concurrent.futures.ThreadPoolExecutor(1)
        reading, self._following = self._following, None
        if reading is None or not reading.is_of(dataset, inputs):
            if reading is not None:
                reading.stopped = True
            reading = _Reading(self, pool, dataset, inputs, lay_out)
        self._current = reading
        reading.draw, self._draw = self._draw, None
        try:
            while True:
                chunk, failures = reading.result()
                pending.failures += failures
                if chunk is None:
                    return
                yield chunk
        finally:
            reading.stopped = True
            if self._current is reading:
                self._current = None

    def expect(self, draw: Draw) -> None:
        """Has the round after the coming one drawn ahead.

        Args:
          draw: Returns its inputs. It is called by the thread that reads, once
            the coming cohort was read, and has returned before `__call__` ends.
        """
        self._draw = draw

    def read_ahead(self) -> None:
        """Begins to read what comes after the last chunk that was yielded.

        It is called once all training threads have begun: reading is work in
        Python, which only one thread can do at a time. Without this call, reading
        begins when the next chunk is asked for.
        """
        if self._current is not None:
            self._current.read_next()

    def close(self) -> None:
        """Forgets what was expected, and ends the thread."""
        self._draw = None
        for reading in (self._current, self._following):
            if reading is not None:
                reading.stopped = True
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        self._current = self._following = None

    def follow(self, reading: _Reading, draw: Draw) -> None:
        """Draws the round after one that was read, and begins to read it."""
        # The pool was closed just now; or what is wrong with the coming round is
        # raised again where it begins, and does this one no harm.
        with contextlib.suppress(Exception):
            following = dataclasses.replace(reading, inputs=draw())
            following.read_next()
            self._following = following


def indexed(dataset: FederatedDataset, positions: np.ndarray) -> CohortChunk:
    """Returns a cohort's data, of a dataset that is in memory.

    Args:
      dataset: The clients.
      positions: Int64 [K], the cohort.
    """
    x, y = dataset.flat()
    if not len(tf.nest.flatten(y)[0]):
        # XLA cannot gather from a tensor without rows, not even nothing.
        x, y = tf.nest.map_structure(
            lambda array: tf.zeros([1, *array.shape[1:]], array.dtype), (x, y)
        )
    rows, lengths = dataset.client_rows(positions)
    return CohortChunk(x, y, rows, lengths, np.arange(len(positions)))


@dataclasses.dataclass(eq=False)
class _Reading:
    """A cohort that a background thread reads, chunk by chunk.

    Attributes:
      stopped: Whether nobody wants the rest.
      draw: Draws the following round, when all of this one was read.
    """

    reader: Reader
    pool: concurrent.futures.Executor
    dataset: FederatedDataset
    inputs: cohort.RoundInputs
    lay_out: LayOut | None
    stopped: bool = dataclasses.field(default=False, init=False)
    draw: Draw | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        # Used by the thread only: the chunks, and what failed since the last one.
        self._chunks: Iterator[CohortChunk] = self._streamed()
        if self.dataset.is_indexed:
            self._chunks = map(indexed, [self.dataset], [self.inputs.positions])
        self._failures: list[ClientFailure] = []
        self._next: concurrent.futures.Future[Any] | None = None

    def is_of(self, dataset: FederatedDataset, inputs: cohort.RoundInputs) -> bool:
        """Returns whether it is the same attempt at a round, of the same clients."""
        return (
            self.dataset is dataset
            and np.array_equal(self.inputs.positions, inputs.positions)
            and np.array_equal(self.inputs.seed, inputs.seed)
        )

    def read_next(self) -> None:
        """Has the next chunk read, unless that was asked for already."""
        if self._next is None:
            self._next = self.pool.submit(self._read)

    def result(self) -> tuple[CohortChunk | None, list[ClientFailure]]:
        """Returns the next chunk (None at the end), and the failures before it."""
        self.read_next()
        found = self._next.result()  # type: ignore[union-attr]
        self._next = None
        return found

    def _read(self) -> tuple[CohortChunk | None, list[ClientFailure]]:
        chunk = next(self._chunks, None)
        if chunk is not None and self.lay_out is not None:
            chunk = self.lay_out(chunk, self.inputs)
        failures, self._failures = self._failures, []
        # Labels are looked at when the clients after them were read.
        failures.sort(key=lambda failure: failure.position)
        if chunk is None and self.draw is not None and not self.stopped:
            self.reader.follow(self, self.draw)
        return chunk, failures

    def _clients(self) -> Iterator[_Client]:
        """Reads clients one after the other, but for those that failed."""
        positions = self.inputs.positions
        num_features = len(tf.nest.flatten(self.reader.element_spec[0]))
        for member, client in enumerate(self.dataset.read_clients(positions)):
            if self.stopped:
                return
            if isinstance(client, ClientFailure):
                self._failures.append(client)
                continue
            # Copies: what is checked is what is trained on, whatever becomes of a
            # file.
            arrays = [np.array(leaf) for leaf in tf.nest.flatten((client.x, client.y))]
            problem = labels.problem_of_client(
                arrays[num_features:], self.reader.label_ranges
            )
            if problem is None:
                yield member, arrays
            else:
                self._failures.append(ClientFailure(int(positions[member]), problem))

    def _streamed(self) -> Iterator[CohortChunk]:
        """Yields clients whose examples fit into one chunk; at least one chunk."""
        held: list[_Client] = []
        num_bytes, sent = 0, False
        for member, arrays in self._clients():
            if held and num_bytes >= CHUNK_BYTES:
                yield self._chunk(held)
                held, num_bytes, sent = [], 0, True
            held.append((member, arrays))
            num_bytes += sum(array.nbytes for array in arrays)
        if held or not sent:
            yield self._chunk(held)

    def _chunk(self, clients: list[_Client]) -> CohortChunk:
        """Returns a chunk of clients, perhaps of none."""
        lengths = np.array([len(arrays[-1]) for _, arrays in clients], np.int64)
        total = int(lengths.sum())
        # At least one row: see `indexed`.
        num_rows = max(1, power_of_two(total) if self.reader.padded else total)
        tensors = []
        for place, spec in enumerate(tf.nest.flatten(self.reader.element_spec)):
            if not total:
                tensors.append(tf.zeros([num_rows, *spec.shape], spec.dtype))
                continue
            leaves = [arrays[place] for _, arrays in clients]
            rest = np.zeros([num_rows - total, *leaves[0].shape[1:]], leaves[0].dtype)
            tensors.append(tf.constant(np.concatenate([*leaves, rest]), spec.dtype))
        x, y = tf.nest.pack_sequence_as(self.reader.element_spec, tensors)
        members = np.array([member for member, _ in clients], np.int64)
        return CohortChunk(x, y, np.arange(total), lengths, members)


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not less, and at least 1."""
    return 1 << max(0, number - 1).bit_length()
