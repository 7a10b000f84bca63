"""Reading a cohort: its clients' examples, in pieces of bounded size."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import ClientFailure, FederatedDataset
from tfdp_fl.engine import fixed_sizes, labels, rounds

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
      all_lengths: Returns the examples of all clients of the dataset, int [N];
        None where nobody knows before they are read.
    """

    x: Any
    y: Any
    rows: np.ndarray
    lengths: np.ndarray
    members: np.ndarray
    all_lengths: Callable[[], np.ndarray] | None = None

    @property
    def num_rows(self) -> int:
        """Returns how many examples are stored, those of nobody included."""
        return int(tf.nest.flatten(self.y)[0].shape[0])


class Reader:
    """Reads cohorts, in pieces of bounded size.

    A streamed chunk is read while the one before it trains; the first of a
    round, where `expect` was told of it, while the round before trains. A
    client that cannot be read, or with labels that are not allowed, failed.
    """

    def __init__(
        self,
        *,
        element_spec: tuple[Any, Any],
        label_ranges: list[labels.LabelRange],
        sizes: fixed_sizes.FixedSizes | None = None,
    ):
        """Starts nothing.

        Args:
          element_spec: `(features, labels)` specs of one example.
          label_ranges: What class labels may be.
          sizes: Say how many rows a streamed chunk has, those after its
            examples being zeros; None: just its examples'.
        """
        self._label_ranges = label_ranges
        self._pack = functools.partial(
            _packed, element_spec=element_spec, sizes=sizes
        )
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._expected: np.ndarray | None = None
        # What is being asked for, and what comes after it.
        self._current: _Reading | None = None
        self._begun: _Reading | None = None

    def __call__(
        self, dataset: FederatedDataset, pending: rounds.PendingRound
    ) -> Iterator[CohortChunk]:
        """Yields the data of a round's cohort, at least one chunk.

        Args:
          dataset: Where the examples come from.
          pending: The round; clients that failed are added to its failures.
        """
        positions = pending.inputs.positions
        if dataset.is_indexed:
            x, y = tf.nest.map_structure(_with_a_row, dataset.flat())
            rows, lengths = dataset.client_rows(positions)
            members = np.arange(len(positions))
            yield CohortChunk(
                x, y, rows, lengths, members, dataset.client_sizes
            )
            return
        reading, self._begun = self._begun, None
        if reading is not None and not reading.is_of(dataset, positions):
            reading.stopped.set()
            reading = None
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1)
        if reading is None:
            reading = self._begin(dataset, positions, self._pool)
        self._current = reading
        expected, self._expected = self._expected, None
        if expected is not None:
            reading.then = functools.partial(
                self._begin_next, dataset, expected, self._pool
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

    def expect(self, positions: np.ndarray) -> None:
        """Is told of the cohort of the round after the coming one.

        Args:
          positions: Int64 [K].
        """
        self._expected = positions

    def close(self) -> None:
        """Forgets what was expected; nothing is read any more."""
        self._expected = None
        for reading in (self._current, self._begun):
            if reading is not None:
                reading.stopped.set()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        self._current = self._begun = None

    def _begin(
        self,
        dataset: FederatedDataset,
        positions: np.ndarray,
        pool: concurrent.futures.Executor,
    ) -> _Reading:
        """Begins to read a cohort, once what is being read is there."""
        reading = _Reading(dataset, positions, pool)
        clients = _clients(reading, self._label_ranges)
        # Not a generator expression, which would hold clients for too long.
        reading.chunks = map(self._pack, _grouped(clients))
        reading.go_on()
        return reading

    def _begin_next(
        self,
        dataset: FederatedDataset,
        positions: np.ndarray,
        pool: concurrent.futures.Executor,
    ) -> None:
        with contextlib.suppress(RuntimeError):  # It was closed just now.
            self._begun = self._begin(dataset, positions, pool)


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
        pool: concurrent.futures.Executor,
    ):
        self.dataset = dataset
        self.positions = positions
        self._pool = pool
        self.chunks: Iterator[CohortChunk] = iter(())
        self.failures: list[ClientFailure] = []
        self.stopped = threading.Event()
        self.then: Callable[[], None] | None = None
        self.ahead: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def is_of(self, dataset: FederatedDataset, positions: np.ndarray) -> bool:
        """Returns whether it is these clients', in this order."""
        return self.dataset is dataset and np.array_equal(
            self.positions, positions
        )

    def go_on(self) -> None:
        """Has the next chunk read, in the background."""
        self.ahead = self._pool.submit(self._next)

    def _next(self) -> tuple[CohortChunk | None, list[ClientFailure]]:
        chunk = next(self.chunks, None)
        failures, self.failures = self.failures, []
        if (
            chunk is None
            and self.then is not None
            and not self.stopped.is_set()
        ):
            self.then()
        return chunk, failures


def _with_a_row(array: Any) -> Any:
    """Returns an array of examples; a row of zeros if there are none.

    A gather of nothing needs a row to read it from, too, for XLA.
    """
    if array.shape[0] != 0:
        return array
    return tf.zeros([1, *array.shape[1:]], array.dtype)


# A client's place in the cohort, its features and its labels.
_Client = tuple[int, Any, Any]


def _clients(
    reading: _Reading, label_ranges: list[labels.LabelRange]
) -> Iterator[_Client]:
    """Reads clients one after the other, but for those that failed."""
    positions = reading.positions
    for member, client in enumerate(reading.dataset.read_clients(positions)):
        if reading.stopped.is_set():
            return
        if isinstance(client, ClientFailure):
            reading.failures.append(client)
            continue
        problem = labels.problem_of_client(client.y, label_ranges)
        if problem is not None:
            reading.failures.append(
                ClientFailure(int(positions[member]), problem)
            )
            continue
        yield member, client.x, client.y


def _grouped(clients: Iterator[_Client]) -> Iterator[list[_Client]]:
    """Yields clients whose examples fit into one chunk; at least one list."""
    held: list[_Client] = []
    size = 0
    sent = False
    for client in clients:
        if held and _shapes(held[-1]) != _shapes(client):
            # Of another length, where the spec leaves it open.
            yield held
            held, size, sent = [], 0, True
        held.append(client)
        size += sum(array.nbytes for array in tf.nest.flatten(client[1:]))
        if size >= CHUNK_BYTES:
            yield held
            held, size, sent = [], 0, True
    if held or not sent:
        yield held


def _shapes(client: _Client) -> list[tuple[int, ...]]:
    """Returns the shapes of one example of a client, tensor by tensor."""
    _, x, y = client
    return [np.shape(each)[1:] for each in tf.nest.flatten((x, y))]


def _packed(
    clients: list[_Client],
    element_spec: tuple[Any, Any],
    sizes: fixed_sizes.FixedSizes | None,
) -> CohortChunk:
    """Puts some clients' examples into one tensor for each feature."""
    lengths = np.asarray(
        [len(tf.nest.flatten(y)[0]) for _, _, y in clients], np.int64
    )
    total = int(lengths.sum())
    num_rows = total
    if sizes is not None:
        specs = tf.nest.flatten(element_spec)
        shapes = [tuple(dim or 1 for dim in spec.shape) for spec in specs]
        if clients:
            shapes = _shapes(clients[0])
        row_bytes = sum(
            math.prod(shape) * spec.dtype.size
            for shape, spec in zip(shapes, specs, strict=True)
        )
        num_rows = sizes.rows(lengths, tuple(shapes), row_bytes, CHUNK_BYTES)

    def pack(spec: tf.TensorSpec, *arrays: np.ndarray) -> tf.Tensor:
        if not total:  # A gather needs a tensor to read nothing from.
            shape = [max(1, num_rows), *[dim or 1 for dim in spec.shape]]
            return tf.zeros(shape, spec.dtype)
        return _joined(arrays, num_rows, spec.dtype)

    x = tf.nest.map_structure(
        pack, element_spec[0], *[x for _, x, _ in clients]
    )
    y = tf.nest.map_structure(
        pack, element_spec[1], *[y for _, _, y in clients]
    )
    return CohortChunk(
        x,
        y,
        np.arange(total),
        lengths,
        np.asarray([member for member, _, _ in clients], np.int64),
    )


def _joined(
    arrays: Sequence[np.ndarray], num_rows: int, dtype: tf.DType
) -> tf.Tensor:
    """Returns arrays one after another in one tensor, and zeros after them.

    They are copied once, and the zeros cost next to nothing: the system makes
    their memory when somebody reads them.
    """
    used = sum(map(len, arrays))
    shape = [num_rows, *arrays[0].shape[1:]]
    kind = np.dtype(dtype.as_numpy_dtype)
    if kind.kind not in "iuf":  # Of those, DLPack knows all.
        rest = np.zeros([num_rows - used, *shape[1:]], kind)
        return tf.constant(np.concatenate([*arrays, rest]), dtype)
    size = math.prod(shape) * kind.itemsize
    held = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -held.ctypes.data % _ALIGNMENT
    joined = held[start : start + size].view(kind).reshape(shape)
    np.concatenate(arrays, out=joined[:used])
    # It keeps the array, and is the only one who does.
    return tf.experimental.dlpack.from_dlpack(joined.__dlpack__())
