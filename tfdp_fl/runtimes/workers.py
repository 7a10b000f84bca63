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

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence

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
class WorkerRound:
    """What one worker did in the last round.

    Attributes:
      address: The worker's name.
      shards: The indices of the shards that it was given.
      seconds: From sending them to having its sum.
      clients: The positions of the clients that it trained.
      repeated: How often the worker was lost meanwhile, and its shards done
        again by another.
    """

    address: str
    shards: tuple[int, ...]
    seconds: float
    clients: tuple[int, ...] = ()
    repeated: int = 0

    def joined(self, later: WorkerRound) -> WorkerRound:
        """Returns what the worker did in two calls of one round."""
        return dataclasses.replace(
            later,
            shards=self.shards + later.shards,
            seconds=self.seconds + later.seconds,
            clients=self.clients + later.clients,
            repeated=self.repeated + later.repeated,
        )


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


class Workers(abc.ABC):
    """Workers that are given shards of a cohort.

    Attributes:
      last_round: What each worker did in the last round that was completed.
      shards_per_worker: How many shards each is given, one after the other.
      float32_products: Whether the workers compute products of float32 numbers
        as such, on which training side by side rests.
    """

    last_round: tuple[WorkerRound, ...] = ()
    shards_per_worker: int = 1

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """How many workers there are."""

    @property
    @abc.abstractmethod
    def float32_products(self) -> bool:
        """Whether their products of float32 numbers are such."""

    @abc.abstractmethod
    def open(self) -> Workers:
        """Starts or connects every worker that is not there. Returns self."""

    @abc.abstractmethod
    def run(
        self, work: Work, begun: Callable[[], None]
    ) -> tuple[list[Arrays], Sequence[WorkerRound]]:
        """Runs a program on every shard.

        Args:
          work: The program and the shards.
          begun: Called when nothing is left to do here until a worker has
            finished.

        Returns:
          The flattened results of each shard, or of their sum alone; and what
          each worker did.
        """

    def collector(
        self, cohort_engine: engine.CohortEngine, clients: FederatedDataset
    ) -> ShardedCohorts:
        """Returns what trains the cohorts of a `fit`.

        Args:
          cohort_engine: The engine of the model that is trained.
          clients: The data.

        Raises:
          WorkerUnavailable: As `open`, which is called.
        """
        self.open()
        return ShardedCohorts(cohort_engine, clients, self)


class ShardedCohorts:
    """Trains cohorts on workers; takes the engine's place in `fit`."""

    def __init__(
        self,
        cohort_engine: engine.CohortEngine,
        clients: FederatedDataset,
        workers: Workers,
    ):
        """Prepares nothing; functions are traced when a round needs them.

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

    def collect(
        self, dataset: FederatedDataset, inputs: engine.RoundInputs
    ) -> engine.PendingRound:
        """Trains a cohort on the workers; see `CohortEngine.collect`.

        Raises:
          WorkerError: A worker is not there, goes away, or fails. The model and
            the state are as before, as if nothing had been done.
        """
        pending = self._engine.empty_round(inputs)
        records: dict[str, WorkerRound] = {}
        for chunk in self._engine.read_chunks(dataset, pending):
            if not len(chunk.lengths):  # Nothing to send to anybody.
                self._engine.train_chunk(pending, chunk)
                continue
            for piece in self._sendable(chunk):
                for record in self._run_chunk(pending, piece):
                    before = records.get(record.address)
                    records[record.address] = (
                        record if before is None else before.joined(record)
                    )
        self._engine.complete(pending)
        self._workers.last_round = tuple(records.values())
        return pending

    def lay_out(
        self, chunk: chunks.CohortChunk, inputs: engine.RoundInputs
    ) -> chunks.CohortChunk:
        """Returns a chunk with who trains where; see `CohortEngine.lay_out`.

        As it is where examples are sent, as it is cut into messages first; and
        where there is nobody, who is not sent.
        """
        if self._examples is None or not len(chunk.lengths):
            return chunk
        return self._laid_out(chunk, inputs)

    def _laid_out(
        self, chunk: chunks.CohortChunk, inputs: engine.RoundInputs
    ) -> chunks.CohortChunk:
        groups = self._engine.layout.lay_out(
            chunk,
            inputs,
            self._workers.num_workers * self._workers.shards_per_worker,
            for_workers=True,
            float32_products=self._workers.float32_products,
        )
        return dataclasses.replace(chunk, groups=groups)

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
    ) -> list[WorkerRound]:
        """Trains a chunk's clients; returns what each worker did."""
        if chunk.groups is None:
            chunk = self._laid_out(chunk, pending.inputs)
        records: list[WorkerRound] = []
        for place in range(max(map(len, chunk.groups))):
            parts = [group[place] for group in chunk.groups if place < len(group)]
            records += self._run_parts(parts, pending, chunk)
        return records

    def _run_parts(
        self,
        parts: list[layout.Part],
        pending: engine.PendingRound,
        chunk: chunks.CohortChunk,
    ) -> list[WorkerRound]:
        """Trains some parts of a chunk, a shard each, at the same time.

        Args:
          parts: Of one `layout.Way`.
          pending: The round, to which the results are added.
          chunk: The clients.
        """
        traced = self._engine.functions.program(pending, parts[0])
        if any(constant.dtype == tf.resource for constant in traced.constants):
            raise ValueError(
                "runtime must be None for a model with a lookup table, which is in "
                "this process: look words up before training, in the dataset."
            )
        work = Work(
            program=traced,
            sent=_arrays(pending.fixed_arguments),
            examples=self._examples,
            shards=[self._shard(chunk, part) for part in parts],
            by_sum=self._by_sum,
        )
        with self._engine.background.computing(at_once=False) as begin:
            flat, done = self._workers.run(work, begin)
        results = [
            tf.nest.pack_sequence_as(traced.structure, list(map(tf.constant, arrays)))
            for arrays in flat
        ]
        if self._by_sum:
            (total,) = results
            pending.add(total.total, total.metrics)
        else:
            threads = self._engine.num_replicas
            for number, (part, trained) in enumerate(zip(parts, results, strict=True)):
                pending.take(part.clients.members, trained, number % threads)
        return [
            dataclasses.replace(record, clients=self._positions(pending, parts, record))
            for record in done
        ]

    def _positions(
        self,
        pending: engine.PendingRound,
        parts: list[layout.Part],
        record: WorkerRound,
    ) -> tuple[int, ...]:
        """Returns the positions of the clients in a worker's shards."""
        members = [parts[shard].clients.members for shard in record.shards]
        return tuple(pending.inputs.positions[np.concatenate(members)].tolist())

    def _shard(self, chunk: chunks.CohortChunk, part: layout.Part) -> Arrays:
        """Returns what goes to a worker: the tables, and perhaps the examples."""
        if self._examples is not None:
            return _arrays(part.tables)
        table, *rest = part.tables
        rows, places = np.unique(table.rows, return_inverse=True)
        places = places.reshape(table.rows.shape).astype(np.int32)
        return [
            *[_taken(leaf, rows) for leaf in tf.nest.flatten((chunk.x, chunk.y))],
            *_arrays((table._replace(rows=places), *rest)),
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
