"""A round of the engine, of which workers train the clients.

The engine lays the cohort out as for its own threads. Each worker runs the
engine's own `Program` on its shard, and returns the sum of its clients' clipped
updates. The engine adds up the sums, as those of its own threads. The noise, the
division and the model's move are the engine's `release`, once.

Where a sum is not what the mechanism needs (a clip set from the whole cohort's
norms, windows of norms, secure aggregation) the workers return a row for each
client, and the engine goes on with those.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfdp_fl import engine
from tfdp_fl.datasets import FederatedDataset, nests
from tfdp_fl.engine import layout, program

Arrays = list[np.ndarray]


class WorkerError(RuntimeError):
    """A worker could not run what it was asked to run."""


class WorkerUnavailable(WorkerError):  # noqa: N818
    """A worker could not be started or reached; no round was begun."""


class WorkerLost(WorkerError):  # noqa: N818
    """A worker went away during a round; the round was abandoned whole."""


class Workers(Protocol):
    """Workers that are given shards of a cohort.

    Attributes:
      num_workers: How many there are.
      float32_products: Whether the workers compute products of float32 numbers
        as such, on which training side by side rests.
    """

    num_workers: int

    @property
    def float32_products(self) -> bool:
        """See above."""

    def run(
        self,
        traced: program.Program,
        sent: Arrays,
        examples: Arrays | None,
        shards: list[Arrays],
    ) -> list[Arrays]:
        """Runs a program on shards, all at the same time.

        Args:
          traced: The program.
          sent: Its first arguments, flattened: what all clients receive.
          examples: The next ones, where all shards have the same: all examples of
            a dataset that is in memory. None: they are in the shards.
          shards: The rest, for each shard; at most one for each worker.

        Returns:
          The flattened results of each shard.
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
        here = cohort_engine.layout
        # One program, without XLA, serves all workers.
        self._layout = dataclasses.replace(
            here,
            kernels=here.kernels if workers.float32_products else None,
            xla=False,
            at_once=None,
        )
        self._examples: Arrays | None = None
        if clients.is_indexed:
            self._examples = _arrays(layout.stored_examples(clients))

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
        return self._engine.collect(dataset, inputs, self._train_chunk)

    def _train_chunk(self, pending: engine.PendingRound, chunk: layout.Chunk) -> None:
        """Trains a chunk's clients, those of one part of each group at a time."""
        if not chunk.table.num_clients:  # Nothing to send to anybody.
            self._engine.train_chunk(pending, chunk)
            return
        groups = self._layout.lay_out(chunk.table, self._workers.num_workers)
        for place in range(max(map(len, groups))):
            parts = [group[place] for group in groups if place < len(group)]
            self._train_parts(parts, pending, chunk)

    def _train_parts(
        self,
        parts: list[layout.Part],
        pending: engine.PendingRound,
        chunk: layout.Chunk,
    ) -> None:
        """Trains parts of one `layout.Strategy`, a shard each, at the same time."""
        fixed = pending.fixed_arguments
        traced = self._engine.programs.program(fixed, parts[0])
        if any(constant.dtype == tf.resource for constant in traced.constants):
            raise ValueError(
                "runtime must be None for a model with a lookup table, which is in "
                "this process: look words up before training, in the dataset."
            )
        shards = [self._shard(chunk, part) for part in parts]
        found = self._workers.run(traced, _arrays(fixed), self._examples, shards)
        for part, arrays in zip(parts, found, strict=True):
            leaves = list(map(tf.constant, arrays))
            trained = tf.nest.pack_sequence_as(traced.structure, leaves)
            pending.add(part.members, trained)

    def _shard(self, chunk: layout.Chunk, part: layout.Part) -> Arrays:
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
    return list(map(np.asarray, tf.nest.flatten(nest)))


def _taken(leaf: tf.Tensor, rows: np.ndarray) -> np.ndarray:
    """Returns some rows of an array."""
    array = nests.view(leaf)
    if not len(rows):  # A gather needs a tensor to read nothing from.
        return np.zeros([1, *array.shape[1:]], array.dtype)
    return array[rows]
