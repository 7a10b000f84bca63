"""Trains cohorts on Ray actors, a shard on each, on one machine or several.

The engine lays out the cohort as for its own threads. Each worker runs the engine's
own `Program` on its shard and returns the sum of its clients' clipped updates. The
engine adds up these sums like those of its threads. Then its `release` adds the noise,
divides, and updates the model, all just once.

Some mechanisms need more than a sum (a clip set from the whole cohort's norms, windows
of norms, secure aggregation). The workers then return one row per client, from which
the engine continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdp_fl import _lazy_tf, _validate, engine
from tfdp_fl.datasets import FederatedDataset, nests
from tfdp_fl.engine import cohort, devices, layout, program
from tfdp_fl.terms import Json

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

Arrays = list[np.ndarray]
# The result of `_pack`.
_Packed = Any

# Up to this size, Ray sends data with a call instead of through its object store.
_INLINE_BYTES = 64 * 2**10

# How long Ray may take to schedule and start the workers.
_SECONDS_TO_START = 300.0


class WorkerError(RuntimeError):
    """A worker could not run what it was asked to run."""


class WorkerUnavailable(WorkerError):  # noqa: N818
    """A worker could not be started or reached; no round was started."""


class WorkerLost(WorkerError):  # noqa: N818
    """A worker was lost during a round; the whole round was abandoned."""


class ShardedCohorts:
    """Trains cohorts on workers; takes the engine's place in `fit`."""

    def __init__(
        self,
        cohort_engine: engine.CohortEngine,
        clients: FederatedDataset,
        workers: RayWorkers,
        float32_products: bool,
    ):
        """Makes a runtime, which traces functions when a round needs them.

        Args:
          cohort_engine: The engine.
          clients: The data.
          workers: The workers, already open.
          float32_products: Whether workers multiply float32 numbers in float32, not in
            bfloat16 (an option of oneDNN) or TensorFloat-32 (a GPU's default). Only
            then do dense models train side by side, as the bound on their norms
            relies on it.
        """
        self._engine = cohort_engine
        self._workers = workers
        self._float32_products = float32_products
        self._trials = engine.Trials(self._run_on_every_worker)  # On these workers.
        self._examples: Arrays | None = None
        if clients.is_indexed:
            self._examples = _arrays(layout.stored_examples(clients))

    @property
    def executor(self) -> str:
        """Describes to users how clients train."""
        return f"clients on {self._workers.num_workers} workers"

    @property
    def _layout(self) -> layout.Layout:
        """The engine's present layout, but with one program for all, without XLA."""
        local = self._engine.layout
        return dataclasses.replace(
            local,
            kernels=local.kernels if self._float32_products else None,
            xla=False,
            batched_clients=None,
            fits=functools.partial(self._engine.fits, trials=self._trials),
        )

    def collect(
        self, dataset: FederatedDataset, inputs: engine.RoundInputs
    ) -> engine.PendingRound:
        """Trains a cohort on the workers; see `CohortEngine.collect`.

        Raises:
          WorkerError: A worker is missing, is lost, or fails. The model and the state
            are unchanged, as if the round had not been started.
        """
        return self._engine.collect(dataset, inputs, self._train_chunk)

    def _train_chunk(self, pending: engine.PendingRound, chunk: layout.Chunk) -> None:
        """Trains a chunk's clients, one part of each group at a time."""
        if not chunk.table.num_clients:  # There is nothing to send.
            self._engine.train_chunk(pending, chunk)
            return
        groups = self._layout.lay_out(
            chunk.table,
            self._workers.num_workers,
            engine.needs_fine_grid(pending),
        )
        programs = self._engine.programs
        by_strategy: dict[layout.Strategy, list[layout.Part]] = {}
        for part in itertools.chain.from_iterable(groups):
            by_strategy.setdefault(part.strategy, []).append(part)
        self._engine.used_strategies |= by_strategy.keys()
        num_workers = self._workers.num_workers
        for parts in [
            alike[start : start + num_workers]
            for alike in by_strategy.values()
            for start in range(0, len(alike), num_workers)
        ]:
            traced = programs.traced[parts[0].strategy]
            if any(constant.dtype == tf.resource for constant in traced.constants):
                raise ValueError(
                    "runtime must be None for a model with a lookup table, which is "
                    "in this process: look words up before training, in the dataset."
                )
            own = pending, chunk, traced
            for part, trained in zip(
                parts, self._train_parts(*own, parts), strict=True
            ):
                if trained is not None:
                    pending.add(part.members, trained)
                    continue
                train_one = functools.partial(self._train_one, *own)
                self._engine.train_part_one_by_one(
                    pending, part, self._layout, train_one
                )

    def _train_one(
        self,
        pending: engine.PendingRound,
        chunk: layout.Chunk,
        traced: program.Program,
        part: layout.Part,
    ) -> cohort.Trained:
        """Trains a part; raises one of `program.CLIENT_ERRORS` if its data does."""
        (trained,) = self._train_parts(pending, chunk, traced, [part])
        if trained is None:
            raise tf.errors.InvalidArgumentError(
                None, None, "A worker's training raised an error on its data."
            )
        return trained

    def _train_parts(
        self,
        pending: engine.PendingRound,
        chunk: layout.Chunk,
        traced: program.Program,
        parts: list[layout.Part],
    ) -> list[cohort.Trained | None]:
        """Trains parts, one per worker; None for one whose data raised an error."""
        shards: dict[int, Arrays] = {}
        for place, part in enumerate(parts):
            with contextlib.suppress(*program.CLIENT_ERRORS):
                shards[place] = self._shard(chunk, part)
        results = self._workers.run(
            traced, _arrays(pending.broadcast), self._examples, [*shards.values()]
        )
        trained: list[cohort.Trained | None] = [None] * len(parts)
        for place, arrays in zip(shards, results, strict=True):
            if arrays is not None:
                leaves = map(tf.constant, arrays)
                trained[place] = nests.pack(traced.structure, leaves)
        return trained

    def _run_on_every_worker(
        self, traced: program.Program, broadcast: cohort.Broadcast, chunk: layout.Chunk
    ) -> list[Arrays]:
        """Returns each worker's flattened results of a program; [] if one fails."""
        results = self._workers.run(
            traced,
            _arrays(broadcast),
            None,
            [_arrays(chunk)] * self._workers.num_workers,
        )
        arrays = [result for result in results if result is not None]
        return arrays if len(arrays) == len(results) else []

    @program.numpy_memory_errors_as_tensorflows()
    def _shard(self, chunk: layout.Chunk, part: layout.Part) -> Arrays:
        """Returns what a worker is sent: the tables and perhaps the examples."""
        table = part.table
        if self._examples is not None:
            return _arrays(table)
        rows, new_rows = np.unique(table.rows, return_inverse=True)
        return [
            *[_take(leaf, rows) for leaf in tf.nest.flatten((chunk.x, chunk.y))],
            *_arrays(table._replace(rows=new_rows.astype(np.int32))),
        ]


def _arrays(nest: object) -> Arrays:
    """Returns a nest's leaves as arrays."""
    return list(map(np.asarray, tf.nest.flatten(nest)))


def _take(leaf: tf.Tensor, rows: np.ndarray) -> np.ndarray:
    """Returns some rows of an array."""
    array = nests.view(leaf)
    if not len(rows):  # Even a gather of nothing needs a tensor with a row.
        return np.zeros([1, *array.shape[1:]], array.dtype)
    return array[rows]


def runnable(traced: program.Program, threads: int = 1) -> Callable[[Arrays], Arrays]:
    """Returns a function of a program's flat arguments, for any process.

    It uses a TensorFlow 1 graph and session, which take arrays without copying them
    and need no functions registered in this process.

    Args:
      traced: The program that a client runs.
      threads: The number of threads that compute.
    """
    graph = tf.Graph()
    with graph.as_default():
        inputs = [tf.compat.v1.placeholder(s.dtype, s.shape) for s in traced.specs]
        results = traced.import_into_graph(*inputs)
    session = tf.compat.v1.Session(
        graph=graph,
        config=tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=threads,
            inter_op_parallelism_threads=threads,
        ),
    )
    run = session.make_callable(results, feed_list=inputs)
    constants = list(map(np.asarray, traced.constants))
    return lambda arrays: run(*arrays, *constants)


class _Actor:
    """Runs programs in one of Ray's processes."""

    def __init__(self, threads: int):
        self._threads = threads
        self._runnables: Json = {}
        self._facts = devices.collect_facts(threads)

    def facts(self) -> Json:
        """Returns the facts that its results depend on, once the worker has started."""
        return self._facts

    def run(
        self,
        expected_facts: Json | None,
        name: str,
        stored: list[program.Program],
        sent: _Packed,
        examples: Arrays | None,
        shard: _Packed,
    ) -> _Packed:
        """Returns a program's flat results, or None if a client's data raised an error.

        Args:
          expected_facts: The facts that all workers must share; None: no requirement.
          name: The program's name.
          stored: Ray's references to the stored program, not yet read.
          sent: See `RayWorkers.run`; packed.
          examples: See `RayWorkers.run`; not packed.
          shard: The remaining arguments; packed.
        """
        if expected_facts is not None and expected_facts != self._facts:
            raise ValueError(
                "This worker replaced another one and computes differently: they "
                f"differ in {_differing(expected_facts, self._facts)}."
            )
        if name not in self._runnables:
            traced = _ray().get(stored[0])
            self._runnables[name] = runnable(traced, self._threads)
        arguments = [*_unpack(sent), *(examples or ()), *_unpack(shard)]
        try:
            return _pack(self._runnables[name](arguments))
        except program.CLIENT_ERRORS:  # Ray would send a message that may quote data.
            return None


def _differing(first: Json, second: Json) -> str:
    """Returns the names of the facts in which two workers differ."""
    return ", ".join(name for name in first if first[name] != second[name])


def _pack(arrays: nests.Nest) -> _Packed:
    """Returns a nest of arrays as one string, if it is short.

    Ray handles every array separately, which takes longer than a small client's
    training. It does not copy large arrays, so these are passed to it as they are.
    """
    if sum(array.nbytes for array in tf.nest.flatten(arrays)) > _INLINE_BYTES:
        return arrays
    return pickle.dumps(arrays, protocol=pickle.HIGHEST_PROTOCOL)


def _unpack(packed: _Packed) -> nests.Nest:
    """Returns the nest that was packed."""
    return pickle.loads(packed) if isinstance(packed, bytes) else packed


def _ray() -> types.ModuleType:
    with _lazy_tf.explain_missing("ray", "RayWorkers"):
        import ray
    return ray


class _Cluster:
    """The actors, and Ray itself if it was started here."""

    def __init__(self, address: str | None, options: Mapping[str, float]):
        self._address, self._options = address, dict(options)
        self._started = False
        self.actors: dict[int, ActorHandle] = {}

    def connect(self) -> None:
        ray = _ray()
        if ray.is_initialized():
            return
        try:
            # By default, Ray joins any cluster that runs on this machine.
            ray.init(
                address=self._address or os.environ.get("RAY_ADDRESS") or "local",
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=False,
            )
        except Exception as error:
            where = self._address or "Ray"
            raise WorkerUnavailable(f"{where} cannot be reached: {error}") from error
        self._started = True

    def actor(self, index: int) -> ActorHandle:
        """Returns the actor with this index; starts it if there is none."""
        if index not in self.actors:
            remote = _ray().remote(_Actor).options(**self._options)
            threads = max(1, math.ceil(self._options["num_cpus"] or 1))
            self.actors[index] = remote.remote(threads)
        return self.actors[index]

    def drop(self, index: int) -> None:
        actor = self.actors.pop(index, None)
        if actor is not None:
            _ray().kill(actor)

    def close(self) -> None:
        if _ray().is_initialized():
            for index in list(self.actors):
                self.drop(index)
            if self._started:
                _ray().shutdown()
        self._started = False


class RayWorkers:
    """Several workers that Ray places, here or on the machines of a cluster.

        with RayWorkers(num_workers=2) as workers:
            federated_model.fit(clients, rounds=100, runtime=workers)

    Every worker trains shards of the cohort and returns their sum. This package
    must be installed wherever Ray's workers run.

    A round happens completely or not at all. If a worker is lost, a new one trains
    its shards again, up to `max_repeats` times per round. This is safe: the shards
    carry their seeds, and nothing is released until the whole round has arrived.
    After that, `fit` raises `WorkerLost`, and nothing is released or charged.

    Ray starts a worker once the resources that it asks for are free. An autoscaling
    cluster therefore grows as needed.

    Attributes:
        num_workers: The number of workers.
    """

    def __init__(
        self,
        address: str | None = None,
        num_workers: int | None = None,
        *,
        resources: Mapping[str, float] | None = None,
        max_repeats: int = 2,
    ):
        """Describes the workers; `open`, or the first round, starts them.

        Args:
            address: The cluster's address, as in `ray.init` ("auto", or
                "ray://host:port"). None: the address in the environment variable
                RAY_ADDRESS; if that is unset, Ray is started here and stopped by
                `close`. If this process is already connected to Ray, that
                connection is used and left open.
            num_workers: The number of workers; 2 by default.
            resources: The resources of each worker, as Ray's actor options:
                `{"num_cpus": 2}`, `{"num_gpus": 1}`. One CPU by default. A worker
                computes with one thread per CPU.
            max_repeats: How often lost workers are replaced in one round.

        Raises:
            TypeError, ValueError: If an argument is invalid.
            ImportError: If Ray is not installed.
        """
        _ray()
        if address is not None:
            address = _validate.instance_of(str, address=address)
        self.num_workers = _validate.positive_integer(
            num_workers=2 if num_workers is None else num_workers
        )
        # Programs and the examples of a dataset, with Ray's references to them.
        self._stored: dict[str, tuple[object, ObjectRef]] = {}
        self._expected_facts: Json | None = None
        # Fits in several threads may share the workers, which hold one dataset.
        self._lock = threading.RLock()
        self._max_repeats = _validate.non_negative_integer(max_repeats=max_repeats)
        options = {"num_cpus": 1, **(resources or {})}
        self._cluster = _Cluster(address, options)
        self._close = weakref.finalize(self, self._cluster.close)

    def open(self) -> RayWorkers:
        """Connects, and starts every worker that is not running. Returns self.

        Raises:
            WorkerUnavailable: If Ray cannot be reached or does not start the workers
                in time.
            RuntimeError: If the workers are closed.
        """
        if not self._close.alive:
            raise RuntimeError("These RayWorkers are closed.")
        self._cluster.connect()
        indices = set(range(self.num_workers)).difference(self._cluster.actors)
        self._facts_of(indices)
        return self

    def _facts_of(self, indices: Iterable[int]) -> list[Json]:
        """Returns the facts that workers' results depend on; waits for their start."""
        ray = _ray()
        pending = [self._cluster.actor(n).facts.remote() for n in indices]
        try:
            return ray.get(pending, timeout=_SECONDS_TO_START)
        except ray.exceptions.RayError as error:
            for index in indices:
                self._cluster.drop(index)
            raise WorkerUnavailable(f"Ray started no worker: {error}") from error

    def close(self) -> None:
        """Stops the workers for good, and also Ray if it was started here."""
        self._close()

    def __enter__(self) -> RayWorkers:
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def collector(
        self, cohort_engine: engine.CohortEngine, clients: FederatedDataset
    ) -> ShardedCohorts:
        """Opens the workers; returns the executor that trains a `fit`'s cohorts.

        Raises:
          WorkerError: The workers do not compute alike. A client's worker depends on
            the other clients of the cohort; its contribution must not.
        """
        with self._lock:
            was_running = bool(self._cluster.actors)
            try:
                first, *others = self.open()._facts_of(range(self.num_workers))
            except WorkerUnavailable:
                if not was_running:
                    raise
                # One died while it was idle, and all have been dropped.
                first, *others = self.open()._facts_of(range(self.num_workers))
        for facts in others:
            if facts != first:
                raise WorkerError(
                    "Ray's workers must run on identical machines, in one environment, "
                    "so that a client's update is the same on each: they differ in "
                    f"{_differing(first, facts)}. Use resources={{...}} to select such "
                    "machines."
                )
        self._expected_facts = first
        return ShardedCohorts(cohort_engine, clients, self, first["float32_products"])

    def _reference(self, name: str, value: object) -> ObjectRef:
        """Returns Ray's reference to a value; only a name's latest value is stored."""
        if name not in self._stored or self._stored[name][0] is not value:
            self._stored[name] = value, _ray().put(value)
        return self._stored[name][1]

    def run(
        self,
        traced: program.Program,
        sent: Arrays,
        examples: Arrays | None,
        shards: list[Arrays],
    ) -> list[Arrays]:
        """Runs a program on all shards at the same time.

        Args:
          traced: The program that a client runs.
          sent: Its first arguments, flattened: what all clients receive.
          examples: The next arguments, if all shards share them: all examples of a
            dataset in memory. None: they are in the shards.
          shards: Each shard's remaining arguments; at most one shard per worker.

        Returns:
          Each shard's flattened results, or None if a client's data raised an error.
        """
        with self._lock:
            self.open()
            ray = _ray()
            packed = _pack(sent)
            if not isinstance(packed, bytes):
                packed = ray.put(packed)
            # One dataset at a time, so that the store does not fill up.
            examples_reference = (
                None if examples is None else self._reference("examples", examples)
            )
            stored = [self._reference(traced.name, traced)]

            def ask(index: int) -> ObjectRef:
                return self._cluster.actor(index).run.remote(
                    *(self._expected_facts, traced.name, stored),
                    *(packed, examples_reference, _pack(shards[index])),
                )

            pending = list(map(ask, range(len(shards))))
            results: list[Arrays] = []
            lost = 0
            for index, reference in enumerate(pending):
                while len(results) == index:
                    try:
                        results.append(_unpack(ray.get(reference)))
                    except ray.exceptions.RayTaskError as error:
                        message = f"Worker {index} of Ray failed: {error}"
                        raise WorkerError(message) from error
                    except ray.exceptions.RayError as error:
                        self._cluster.drop(index)
                        lost += 1
                        message = f"Worker {index} of Ray is lost: {error}"
                        if lost > self._max_repeats:
                            raise WorkerLost(message) from error
                        logging.warning("Training its shard again: %s", message)
                        reference = ask(index)
            return results
