"""Reading a cohort: its clients' examples, in pieces of bounded size."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import ClientFailure, FederatedDataset
from tfdp_fl.engine import labels, rounds

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


def read(
    dataset: FederatedDataset,
    pending: rounds.PendingRound,
    *,
    element_spec: tuple[Any, Any],
    label_ranges: list[labels.LabelRange],
    rows_for: Callable[[int], int],
) -> Iterator[CohortChunk]:
    """Yields the cohort's data, at least one chunk, in bounded pieces.

    A streamed chunk is read while the one before it trains. A client that
    cannot be read, or with labels that are not allowed, failed.

    Args:
      dataset: Where the examples come from.
      pending: The round; clients that failed are added to its failures.
      element_spec: `(features, labels)` specs of one example.
      label_ranges: What class labels may be.
      rows_for: A streamed chunk of n examples has so many rows, the rest of
        them zeros.
    """
    positions = pending.inputs.positions
    if dataset.is_indexed:
        x, y = tf.nest.map_structure(_with_a_row, dataset.flat())
        rows, lengths = dataset.client_rows(positions)
        yield CohortChunk(x, y, rows, lengths, np.arange(len(positions)))
        return
    clients = _clients(dataset, positions, pending.failures, label_ranges)
    pack = functools.partial(
        _packed, element_spec=element_spec, rows_for=rows_for
    )
    # Not a generator expression, which would hold clients for too long.
    chunks = map(pack, _grouped(clients))
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(next, chunks, None)
        while (chunk := ahead.result()) is not None:
            ahead = reader.submit(next, chunks, None)
            yield chunk


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
    dataset: FederatedDataset,
    positions: np.ndarray,
    failures: list[ClientFailure],
    label_ranges: list[labels.LabelRange],
) -> Iterator[_Client]:
    """Reads clients one after the other, but for those that failed."""
    for member, client in enumerate(dataset.read_clients(positions)):
        if isinstance(client, ClientFailure):
            failures.append(client)
            continue
        problem = labels.problem_of_client(client.y, label_ranges)
        if problem is not None:
            failures.append(ClientFailure(int(positions[member]), problem))
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
    rows_for: Callable[[int], int],
) -> CohortChunk:
    """Puts some clients' examples into one tensor for each feature."""
    lengths = np.asarray(
        [len(tf.nest.flatten(y)[0]) for _, _, y in clients], np.int64
    )
    total = int(lengths.sum())
    padding = rows_for(total) - total

    def pack(spec: tf.TensorSpec, *arrays: np.ndarray) -> tf.Tensor:
        if not total:  # A gather needs a tensor to read nothing from.
            shape = [max(1, padding), *[dim or 1 for dim in spec.shape]]
            return tf.zeros(shape, spec.dtype)
        if padding:
            none = np.zeros([padding, *arrays[0].shape[1:]], arrays[0].dtype)
            arrays = (*arrays, none)
        return tf.constant(np.concatenate(arrays), spec.dtype)

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
