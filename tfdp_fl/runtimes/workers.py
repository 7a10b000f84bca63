"""A round of the engine, of which workers train the clients.

The engine lays the cohort out as for its own threads. Each worker runs the
engine's own `Program` on its shard, and returns the sum of its clients' clipped
updates. The sums are added up here. The noise, the division and the model's move
are the engine's `release`, once.

Where a sum is not what the mechanism needs (a clip set from the whole cohort's
norms, windows of norms, secure aggregation) the workers return a row for each
client, and the engine goes on with those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfdp_fl import engine
from tfdp_fl.datasets import FederatedDataset, nests
from tfdp_fl.engine import chunks, cohort, layout, program

# How many bytes of examples one message to a worker may hold.
MESSAGE_BYTES = 256 * 2**20

Arrays = list[np.ndarray]


class WorkerError(RuntimeError):
    """A worker could not run what it was asked to run.

    Attributes:
      address: The worker.
    """

    def __init__(self, address: str, message: str):
        super().__init__(f"Worker {address} {message}")
        self.address = address


class WorkerUnavailable(WorkerError):  # noqa: N818
    """A worker could not be started or reached; no round was begun."""


class WorkerLost(WorkerError):  # noqa: N818
    """A worker went away during a round; the round was abandoned whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What workers are to do at the same time: a program, on shards.

    Attributes:
      program: The program.
      sent: Its first arguments, flattened: what all clients receive.
      examples: The next ones, where all shards have the same: all examples of a
        dataset that is in memory. None: they are in the shards.
      shards: The rest, for each shard.
      by_sum: Whether the results of the shards are added up.
    """

    program: program.Program
    sent: Arrays
    examples: Arrays | None
    shards: list[Arrays]
    by_sum: bool


class Workers(Protocol):
    """Workers that are given shards of a cohort.

    Attributes:
      num_workers: How many there are.
      shards_per_worker: How many shards each is given, one after the other.
      float32_products: Whether the workers compute products of float32 numbers
        as such, on which training side by side rests.
    """

    num_workers: int
    shards_per_worker: int

    @property
    def float32_products(self) -> bool:
        """See above."""

    def run(self, work: Work) -> list[Arrays]:
        """Runs a program on every shard.

        Returns:
          The flattened results of each shard, or of their sum alone.
        """


class ShardedCohorts:
    """Trains cohorts on workers; takes the engine's place in `fit`."""

    def __init__(
        self,
        cohort_engine: engine.CohortEngine,
        clients: FederatedDataset,
        workers: Workers,
    ):
        """Makes a runtime, which traces functions when a round needs them.

        Args:
          cohort_engine: The engine.
          clients: The data.
          workers: They are open.
        """
        self._engine = cohort_engine
        self._workers = workers
        self._by_sum = (
            cohort_engine.output == cohort.SUM and not cohort_engine.query.keeps_window
        )
        self._examples: Arrays | None = None
        if clients.is_indexed:
            everybody = chunks.indexed(clients, np.zeros(0, np.int64))
            self._examples = _arrays((everybody.x, everybody.y))

    @property
    def executor(self) -> str:
        """Returns how clients train, for people to read."""
        return f"clients on {self._workers.num_workers} workers"

    def collect(
        self, dataset: FederatedDataset, inputs: engine.RoundInputs
    ) -> engine.PendingRound:
        """Trains a cohort on the workers; see `CohortEngine.collect`.

        Raises:
          WorkerError: A worker is not there, goes away, or fails. The model and
            the state are as before, as if nothing had been done.
        """
        pending = self._engine.empty_round(inputs)
        for chunk in self._engine.read_chunks(dataset, pending):
            if not len(chunk.lengths):  # Nothing to send to anybody.
                self._engine.train_chunk(pending, chunk)
                continue
            for piece in self._sendable(chunk):
                self._run_chunk(pending, piece)
        self._engine.complete(pending)
        return pending

    def _sendable(self, chunk: chunks.CohortChunk) -> Iterator[chunks.CohortChunk]:
        """Yields pieces of a chunk whose examples fit into messages."""
        if self._examples is not None:
            yield chunk
            return
        one_row = sum(
            leaf.dtype.size * leaf.shape[1:].num_elements()
            for leaf in tf.nest.flatten((chunk.x, chunk.y))
        )
        limit = max(1, self._workers.num_workers * MESSAGE_BYTES // max(1, one_row))
        ends = np.cumsum(chunk.lengths)
        piece = (ends - 1) // limit
        for number in np.unique(piece):
            (clients,) = np.nonzero(piece == number)
            first, last = clients[0], clients[-1]
            start = ends[first] - chunk.lengths[first]
            yield dataclasses.replace(
                chunk,
                rows=chunk.rows[start : ends[last]],
                lengths=chunk.lengths[clients],
                members=chunk.members[clients],
            )

    def _run_chunk(
        self, pending: engine.PendingRound, chunk: chunks.CohortChunk
    ) -> None:
        """Trains a chunk's clients, those of one part of each group at a time."""
        groups = self._engine.layout.lay_out(
            chunk,
            pending.inputs,
            self._workers.num_workers * self._workers.shards_per_worker,
            for_workers=True,
            float32_products=self._workers.float32_products,
        )
        for place in range(max(map(len, groups))):
            parts = [group[place] for group in groups if place < len(group)]
            self._run_parts(parts, pending, chunk)

    def _run_parts(
        self,
        parts: list[layout.Part],
        pending: engine.PendingRound,
        chunk: chunks.CohortChunk,
    ) -> None:
        """Trains parts of one `layout.Strategy`, a shard each, at the same time."""
        fixed = pending.fixed_arguments
        traced = self._engine.programs.program(fixed, parts[0])
        if any(constant.dtype == tf.resource for constant in traced.constants):
            raise ValueError(
                "runtime must be None for a model with a lookup table, which is in "
                "this process: look words up before training, in the dataset."
            )
        work = Work(
            program=traced,
            sent=_arrays(fixed),
            examples=self._examples,
            shards=[self._shard(chunk, part) for part in parts],
            by_sum=self._by_sum,
        )
        flat = self._workers.run(work)
        results = [
            tf.nest.pack_sequence_as(traced.structure, list(map(tf.constant, arrays)))
            for arrays in flat
        ]
        if self._by_sum:
            (trained,) = results
            pending.add(np.zeros(0, int), trained)
            return
        for part, trained in zip(parts, results, strict=True):
            pending.add(part.members, trained)

    def _shard(self, chunk: chunks.CohortChunk, part: layout.Part) -> Arrays:
        """Returns what goes to a worker: the tables, and perhaps the examples."""
        table = part.table
        if self._examples is not None:
            return _arrays(table)
        rows, places = np.unique(table.rows, return_inverse=True)
        return [
            *[_taken(leaf, rows) for leaf in tf.nest.flatten((chunk.x, chunk.y))],
            *_arrays(table._replace(rows=places.astype(np.int32))),
        ]


def _arrays(nest: object) -> Arrays:
    """Returns the leaves of a nest as arrays."""
    return [
        leaf.numpy() if tf.is_tensor(leaf) else np.asarray(leaf)
        for leaf in tf.nest.flatten(nest)
    ]


def _taken(leaf: tf.Tensor, rows: np.ndarray) -> np.ndarray:
    """Returns some rows of an array."""
    array = nests.view(leaf)
    if not len(rows):  # A gather needs a tensor to read nothing from.
        return np.zeros([1, *array.shape[1:]], array.dtype)
    return array[rows]
