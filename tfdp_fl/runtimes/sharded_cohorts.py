"""The compiled cohort over shards: a round of the engine, on workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfdp_fl import engine
from tfdp_fl.datasets import FederatedDataset, nests
from tfdp_fl.engine import (
    calls,
    chunks,
    cohort,
    layout,
    tracing,
)
from tfdp_fl.runtimes.worker_data import WorkerData

SUM, NONE = "sum", "none"

# How many bytes of examples one message to a worker may hold.
MESSAGE_BYTES = 256 * 2**20

_NO_NORMS = np.zeros([0, 0], np.float32)


class ShardedCohorts:
    """Trains cohorts on workers; takes the engine's place in `fit`.

    The engine lays the cohort out, as for its own replicas; each worker runs
    the engine's compiled functions on its shard, and returns the sum of its
    clients' clipped updates; the sums are added up here. The noise, the
    division and the model's move are the engine's `release`, once.

    Where a sum is not what the mechanism needs (a clip set from the whole
    cohort's norms, windows of norms, secure aggregation) the workers return a
    row for each client, and the engine goes on with those.
    """

    def __init__(
        self,
        cohort_engine: engine.CohortEngine,
        *,
        run_sharded: Callable[..., tuple[Any, Sequence[Any]]],
        report: Callable[[Sequence[Any]], None],
        num_workers: int,
        shards_per_worker: int,
        data: WorkerData | None,
        computations: dict[Any, Any],
        float32_products: bool = True,
        lift: Callable[..., Any],
    ):
        """Prepares nothing; computations are made when a round needs them.

        Args:
            cohort_engine: The engine.
            run_sharded: See `ShardWorkers._run_sharded`.
            report: Is told what the workers did in a round.
            num_workers: Among how many workers a cohort is shared out.
            shards_per_worker: How many shards each works on at the same time.
            data: Where workers read the examples; None: they are sent.
            computations: The computations made of this engine before.
            float32_products: Whether the workers compute products of float32
                numbers as such, on which training side by side rests.
            lift: Makes of a function what `run_sharded` takes.
        """
        self._engine = cohort_engine
        self._run_sharded = run_sharded
        self._report = report
        self._num_workers = num_workers
        self._num_shards = num_workers * shards_per_worker
        self._data = data
        self._computations = computations
        self._float32_products = float32_products
        self._lift = lift
        only_sum = cohort_engine.output == cohort.SUM
        by_sum = only_sum and not cohort_engine.query.keeps_window
        self._reduction = SUM if by_sum else NONE

    def collect(
        self, dataset: FederatedDataset, inputs: engine.RoundInputs
    ) -> engine.PendingRound:
        """Trains a cohort on the workers; see `CohortEngine.collect`.

        Raises:
            WorkerError: If a worker is not there, goes away, or fails. The
                model and the state are as before, as if nothing had been done.
        """
        pending = self._engine.empty_round(inputs)
        received = self._engine.broadcast(inputs)
        records: list[Any] = []
        for chunk in self._engine.read_chunks(dataset, pending):
            if not len(chunk.lengths):  # Nothing to send to anybody.
                self._engine.train_chunk(pending, chunk)
                continue
            for each in self._sendable(chunk):
                records += self._run_chunk(pending, each, received)
        self._engine.complete(pending)
        self._report(records)
        return pending

    def lay_out(
        self, chunk: chunks.CohortChunk, inputs: engine.RoundInputs
    ) -> chunks.CohortChunk:
        """Returns a chunk with who trains where; see `CohortEngine.lay_out`.

        As it is where examples are sent, as it is cut into messages first; and
        where there is nobody, who is not sent.
        """
        if self._data is None or not len(chunk.lengths):
            return chunk
        return self._laid_out(chunk, inputs)

    def _laid_out(
        self, chunk: chunks.CohortChunk, inputs: engine.RoundInputs
    ) -> chunks.CohortChunk:
        groups = self._engine.layout.lay_out(
            chunk,
            inputs,
            self._num_shards,
            for_workers=True,
            float32_products=self._float32_products,
        )
        return dataclasses.replace(chunk, groups=groups)

    def _sendable(self, chunk: chunks.CohortChunk) -> Iterator[chunks.CohortChunk]:
        """Yields pieces of a chunk whose examples fit into messages."""
        if self._data is not None:
            yield chunk
            return
        one_row = sum(
            each.dtype.size * each.shape[1:].num_elements()
            for each in tf.nest.flatten((chunk.x, chunk.y))
        )
        limit = max(1, self._num_workers * MESSAGE_BYTES // max(1, one_row))
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
        self,
        pending: engine.PendingRound,
        chunk: chunks.CohortChunk,
        received: cohort.Received,
    ) -> list[Any]:
        """Trains a chunk's clients; returns what each worker did."""
        records: list[Any] = []
        if chunk.groups is None:
            chunk = self._laid_out(chunk, pending.inputs)
        groups = chunk.groups
        for place in range(max(map(len, groups))):
            parts = [group[place] for group in groups if place < len(group)]
            trained, done = self._run_parts(parts, pending, chunk, received)
            records += done
            if self._reduction == SUM:
                (total,) = trained
                pending.add(total.total, total.metrics)
                continue
            replicas = self._engine.num_replicas
            for number, (part, each) in enumerate(zip(parts, trained, strict=True)):
                pending.take(part.clients.members, each, number % replicas)
        return records

    def _run_parts(
        self,
        parts: list[layout.Part],
        pending: engine.PendingRound,
        chunk: chunks.CohortChunk,
        received: cohort.Received,
    ) -> tuple[list[cohort.Trained], list[Any]]:
        """Trains some parts of a chunk, a shard each, at the same time.

        Args:
            parts: Of one `layout.Way`.
            pending: The round.
            chunk: The clients.
            received: What the server sends to each of them.

        Returns:
            What came of each part, or of all if it is summed; and what each
            worker did.
        """
        computation, packing, summed = self._computation(parts[0], received)
        shards = [self._shard(chunk, part) for part in parts]
        packed = [each.numpy() for each in packing.packed(received)]
        with self._engine.background.computing(at_once=False) as begin:
            results, done = self._run_sharded(
                computation, shards, packed, self._reduction, begin
            )
        records = []
        for record in done:
            members = np.concatenate(
                [parts[shard].clients.members for shard in record.shards]
            )
            clients = tuple(pending.inputs.positions[members].tolist())
            records.append(dataclasses.replace(record, clients=clients))
        if self._reduction == SUM:
            total, metrics = cast(_Packing, summed).unpacked(results)
            return [cohort.Trained(total, metrics, _NO_NORMS)], records
        return tf.nest.map_structure(tf.convert_to_tensor, results), records

    def _shard(self, chunk: chunks.CohortChunk, part: layout.Part) -> tuple[Any, ...]:
        """Returns what goes to a worker: the tables, and perhaps the data."""
        if self._data is not None:
            return part.tables
        table, *rest = part.tables
        rows, places = np.unique(table.rows, return_inverse=True)
        places = places.reshape(table.rows.shape).astype(np.int32)
        table = table._replace(rows=places)
        x, y = (
            [_taken(leaf, rows) for leaf in tf.nest.flatten(nest)]
            for nest in (chunk.x, chunk.y)
        )
        return (x, y, table, *rest)

    def _computation(
        self, part: layout.Part, received: cohort.Received
    ) -> tuple[Any, _Packing, _Packing | None]:
        """Returns the computation for a part, made once for all sizes.

        And how what it is sent is packed, and the sum that it returns, if it is
        one.
        """
        key = (part.way, self._data, received.seed.dtype)
        if key not in self._computations:
            self._computations[key] = self._lifted(part, received)
        return self._computations[key]

    def _lifted(
        self, part: layout.Part, received: cohort.Received
    ) -> tuple[Any, _Packing, _Packing | None]:
        functions = self._engine.functions
        train = functions.train(part.way)
        data, by_sum = self._data, self._reduction == SUM
        packing = _Packing(received)
        summed: list[_Packing] = []

        @tf.function(autograph=False)
        def run(broadcast, shard):
            if data is None:
                x, y, *tables = shard
            else:
                (x, y), tables = data.read(), shard
            x, y = (
                tf.nest.pack_sequence_as(spec, leaves)
                for spec, leaves in zip(functions.example_specs, (x, y), strict=True)
            )
            trained = train(packing.unpack(broadcast), x, y, *tables)
            if not by_sum:
                return trained
            result = trained.total, trained.metrics
            summed[:] = [_Packing(result)]
            return summed[0].pack(result)

        shard_spec = tracing.table_specs(part.tables)
        if data is None:
            leaves = [tf.nest.flatten(spec) for spec in functions.example_specs]
            shard_spec = (*leaves, *shard_spec)
        computation = self._lift(
            run,
            packing.specs,
            shard_spec,
            assigned=functions.assigned_variables(),
        )
        return computation, packing, summed[0] if by_sum else None


class _Packing:
    """How a nest of tensors travels: as one vector for each dtype.

    A message is copied once for every level of a nest that it holds, and each
    tensor costs it a tenth of a millisecond.

    Attributes:
        specs: Of the vectors.
        packed: Does what `pack` does, compiled.
        unpacked: Does what `unpack` does, compiled.
    """

    def __init__(self, nest: Any):
        """Takes the structure, shapes and dtypes of a nest of tensors."""
        self._structure = tf.nest.map_structure(lambda _: None, nest)
        leaves = tf.nest.flatten(nest)
        self._shapes = [leaf.shape for leaf in leaves]
        self._sizes = [shape.num_elements() for shape in self._shapes]
        self._dtypes = [leaf.dtype for leaf in leaves]
        # In the order in which they come up first.
        self._vectors = {
            dtype: [k for k, each in enumerate(self._dtypes) if each == dtype]
            for dtype in dict.fromkeys(self._dtypes)
        }
        self.specs = [
            tf.TensorSpec([sum(self._sizes[place] for place in places)], dtype)
            for dtype, places in self._vectors.items()
        ]
        self.packed = calls.Compiled(self.pack)
        self.unpacked = calls.Compiled(self.unpack)

    def pack(self, nest: Any) -> list[tf.Tensor]:
        """Returns the vectors of a nest of tensors."""
        leaves = tf.nest.flatten(nest)
        return [
            tf.concat([tf.reshape(leaves[k], [-1]) for k in places], 0)
            for places in self._vectors.values()
        ]

    def unpack(self, vectors: Sequence[Any]) -> Any:
        """Returns the nest of tensors in these vectors."""
        leaves: list[Any] = [None] * len(self._shapes)
        for vector, places in zip(vectors, self._vectors.values(), strict=True):
            parts = tf.split(vector, [self._sizes[place] for place in places])
            for place, part in zip(places, parts, strict=True):
                leaves[place] = tf.reshape(part, self._shapes[place])
        return tf.nest.pack_sequence_as(self._structure, leaves)


def _taken(leaf: tf.Tensor, rows: np.ndarray) -> np.ndarray:
    """Returns some rows of an array."""
    array = nests.view(leaf)
    if not len(rows):  # A gather needs a tensor to read nothing from.
        return np.zeros([1, *array.shape[1:]], array.dtype)
    return array[rows]
