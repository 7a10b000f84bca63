"""Reading a cohort: its clients' examples, in pieces of bounded size.

While a chunk trains, a background thread reads the next one.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator
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
    """

    x: Any
    y: Any
    rows: np.ndarray
    lengths: np.ndarray
    members: np.ndarray


# A client that was read: its place in the cohort, and its tensors, flattened.
_Client = tuple[int, list[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads cohorts.

    A client that cannot be read, or with labels that are not allowed, failed.

    Attributes:
      element_spec: `(features, labels)` specs of one example.
      label_ranges: What class labels may be.
      padded: Whether the rows of a streamed chunk are a power of two, those
        after its examples being zeros.
    """

    element_spec: tuple[Any, Any]
    label_ranges: list[labels.LabelRange]
    padded: bool = False

    def __call__(
        self, dataset: FederatedDataset, pending: cohort.PendingRound
    ) -> Iterator[CohortChunk]:
        """Yields the data of a round's cohort, at least one chunk.

        Args:
          dataset: Where the examples come from.
          pending: The round; clients that failed are added to its failures.
        """
        if dataset.is_indexed:
            yield indexed(dataset, pending.inputs.positions)
            return
        read = self._streamed(dataset, pending)
        with concurrent.futures.ThreadPoolExecutor(1) as reading:
            coming = reading.submit(next, read, None)
            while (chunk := coming.result()) is not None:
                coming = reading.submit(next, read, None)
                yield chunk
        # Labels are looked at when the clients after them were read.
        pending.failures.sort(key=lambda failure: failure.position)

    def _clients(
        self, dataset: FederatedDataset, pending: cohort.PendingRound
    ) -> Iterator[_Client]:
        """Reads clients one after the other, but for those that failed."""
        positions = pending.inputs.positions
        num_features = len(tf.nest.flatten(self.element_spec[0]))
        for member, client in enumerate(dataset.read_clients(positions)):
            if isinstance(client, ClientFailure):
                pending.failures.append(client)
                continue
            arrays = tf.nest.flatten((client.x, client.y))
            problem = labels.problem_of_client(arrays[num_features:], self.label_ranges)
            if problem is None:
                yield member, arrays
            else:
                position = int(positions[member])
                pending.failures.append(ClientFailure(position, problem))

    def _streamed(
        self, dataset: FederatedDataset, pending: cohort.PendingRound
    ) -> Iterator[CohortChunk]:
        """Yields clients whose examples fit into one chunk; at least one chunk."""
        held: list[_Client] = []
        num_bytes, sent = 0, False
        for member, arrays in self._clients(dataset, pending):
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
        num_rows = max(1, power_of_two(total) if self.padded else total)
        tensors = []
        for place, spec in enumerate(tf.nest.flatten(self.element_spec)):
            if not total:
                tensors.append(tf.zeros([num_rows, *spec.shape], spec.dtype))
                continue
            leaves = [arrays[place] for _, arrays in clients]
            rest = np.zeros([num_rows - total, *leaves[0].shape[1:]], leaves[0].dtype)
            tensors.append(tf.constant(np.concatenate([*leaves, rest]), spec.dtype))
        x, y = tf.nest.pack_sequence_as(self.element_spec, tensors)
        members = np.array([member for member, _ in clients], np.int64)
        return CohortChunk(x, y, np.arange(total), lengths, members)


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


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not less, and at least 1."""
    return 1 << max(0, number - 1).bit_length()
