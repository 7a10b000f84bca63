"""Ray's actors: a shard of the cohort on each, on one machine or several."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import pickle
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdp_fl import _on_use, _validate, engine
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import devices, program
from tfdp_fl.runtimes.workers import (
    Arrays,
    ShardedCohorts,
    Work,
    WorkerError,
    WorkerLost,
    WorkerUnavailable,
)

# What Ray sends with a call, rather than by its store of objects.
_INLINE_BYTES = 64 * 2**10

# Arrays as `_sealed` leaves them.
_Sealed = Any


@dataclasses.dataclass(frozen=True)
class _Message:
    """A `Program` as a worker is sent it.

    Attributes:
      graph: Its serialized definition.
      inputs: As `Program.inputs`, those of the constants last.
      constants: The values of the constants.
      outputs: As `Program.outputs`.
      assertions: As `Program.assertions`.
    """

    graph: bytes = dataclasses.field(repr=False)
    inputs: list[str]
    constants: Arrays
    outputs: list[str]
    assertions: list[str]

    @classmethod
    def of(cls, traced: program.Program) -> _Message:
        """Returns what a worker needs to run a program."""
        return cls(
            traced.definition.SerializeToString(),
            traced.inputs,
            [constant.numpy() for constant in traced.constants],
            traced.outputs,
            traced.assertions,
        )

    def runnable(self, threads: int = 1) -> Callable[[Arrays], Arrays]:
        """Returns a function of the program's flat arguments.

        A graph and a session of TensorFlow 1: it takes arrays as they lie in
        memory, and looks for no function in the process.

        Args:
          threads: How many compute.
        """
        definition = tf.compat.v1.GraphDef.FromString(self.graph)
        graph = tf.Graph()
        with graph.as_default():
            found = tf.graph_util.import_graph_def(
                definition, return_elements=[*self.outputs, *self.assertions], name=""
            )
        fetches = found[: len(self.outputs)], found[len(self.outputs) :]
        session = tf.compat.v1.Session(
            graph=graph,
            config=tf.compat.v1.ConfigProto(
                intra_op_parallelism_threads=threads,
                inter_op_parallelism_threads=threads,
            ),
        )
        made = session.make_callable(
            fetches, feed_list=list(map(graph.get_tensor_by_name, self.inputs))
        )
        return lambda arrays: made(*arrays, *self.constants)[0]


class _Actor:
    """Runs programs; lives in a process of Ray's."""

    def __init__(self, threads: int):
        self._threads = threads
        self._made: dict[str, Any] = {}

    def ready(self) -> int:
        """Returns the process id, once TensorFlow is there."""
        return os.getpid()

    def make(self, name: str, message: _Message) -> None:
        """Takes over a program, once."""
        if name not in self._made:
            self._made[name] = message.runnable(self._threads)

    def run(
        self,
        name: str,
        sent: _Sealed,
        examples: Arrays | None,
        shards: _Sealed,
        by_sum: bool,
    ) -> _Sealed | None:
        """Runs a program on shards; None if it has to be made first.

        Returns:
          The results' leaves: of each shard, or of their sum.
        """
        if name not in self._made:
            return None
        first = [*_opened(sent), *(examples or ())]
        results = [self._made[name]([*first, *shard]) for shard in _opened(shards)]
        if by_sum:
            results = [functools.reduce(_added, results)]
        return _sealed(results)


def _sealed(arrays: Any) -> _Sealed:
    """Returns a nest of arrays as one string, if it is short.

    Ray looks at every array of its own, which takes it longer than a small
    client's training. Large ones it does not copy, so they are left to it.
    """
    if sum(array.nbytes for array in tf.nest.flatten(arrays)) > _INLINE_BYTES:
        return arrays
    return pickle.dumps(arrays, protocol=pickle.HIGHEST_PROTOCOL)


def _opened(sealed: _Sealed) -> Any:
    """Returns the nest that was sealed."""
    return pickle.loads(sealed) if isinstance(sealed, bytes) else sealed


def _added(one: Arrays, other: Arrays) -> Arrays:
    return [operator.add(a, b) for a, b in zip(one, other, strict=True)]


def _ray() -> Any:
    with _on_use.needed("ray", "RayWorkers"):
        import ray
    return ray


class _Cluster:
    """The actors, and Ray itself where it was started here."""

    def __init__(self, address: str | None, options: Mapping[str, Any]):
        self._address, self._options = address, dict(options)
        self._started = False
        self.actors: dict[int, Any] = {}

    @property
    def is_here(self) -> bool:
        """Whether all of Ray was started here."""
        elsewhere = self._address or os.environ.get("RAY_ADDRESS")
        return self._started and not elsewhere

    def connect(self) -> None:
        ray = _ray()
        if ray.is_initialized():
            return
        try:
            ray.init(
                address=self._address,
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=False,
            )
        except Exception as error:
            raise WorkerUnavailable(
                self._address or "of Ray", f"cannot be reached: {error}"
            ) from error
        self._started = True

    def actor(self, place: int) -> Any:
        """Returns the actor of a place, a new one where there is none."""
        if place not in self.actors:
            remote = _ray().remote(_Actor).options(**self._options)
            threads = max(1, math.ceil(self._options["num_cpus"] or 1))
            self.actors[place] = remote.remote(threads)
        return self.actors[place]

    def drop(self, place: int) -> None:
        actor = self.actors.pop(place, None)
        if actor is not None:
            _ray().kill(actor)

    def close(self) -> None:
        ray = _ray()
        for place in list(self.actors):
            if ray.is_initialized():
                self.drop(place)
        if self._started and ray.is_initialized():
            ray.shutdown()
        self._started = False


class RayWorkers:
    """Several workers that Ray places, here or on the machines of a cluster.

        with RayWorkers(num_workers=2) as workers:
            federated_model.fit(clients, rounds=100, runtime=workers)

    Every worker trains shards of the cohort and returns their sum. This package
    has to be installed where Ray's workers run.

    A round happens whole or not at all. The shards of a worker that is lost are
    done again by a new one, `max_repeats` times in a round: they hold their
    seeds, and nothing of a round is released before all of it is here. After
    that `fit` raises `WorkerLost`, and nothing is released or charged.

    Ray places a worker where there is room for what it asks, and waits until
    there is: a cluster that scales by itself grows by that.

    Attributes:
        num_workers: How many workers there are.
        shards_per_worker: How many shards each is given, one after the other.
    """

    def __init__(
        self,
        address: str | None = None,
        num_workers: int | None = None,
        *,
        shards_per_worker: int = 1,
        resources: Mapping[str, Any] | None = None,
        connect_timeout_seconds: float = 300.0,
        round_timeout_seconds: float | None = None,
        max_repeats: int = 2,
        float32_products: bool | None = None,
    ):
        """Describes the workers; `open`, or the first round, starts them.

        Args:
            address: Of the cluster, as `ray.init` takes it ("auto", or
                "ray://host:port"). None: that of the environment variable
                RAY_ADDRESS, else a Ray that is started here, and ended by
                `close`. A Ray that this process is connected to already is
                used, and left.
            num_workers: How many workers; 2 by default.
            shards_per_worker: How many shards each is given in a round, one
                after the other.
            resources: What each worker asks of Ray, as the options of an actor:
                `{"num_cpus": 2}`, `{"num_gpus": 1}`. One CPU by default; a
                worker computes with as many threads.
            connect_timeout_seconds: How long Ray may take to place and start
                the workers.
            round_timeout_seconds: How long a round may take before its
                unfinished workers count as lost; None for no limit.
            max_repeats: How often in one round lost workers are replaced.
            float32_products: Whether the workers compute products of float32
                numbers as such: not in bfloat16 (oneDNN can be told to), nor in
                TensorFloat-32 (a GPU's default). Dense models train side by
                side only then, as the bound of their norms rests on it. None:
                known of a Ray that is started here; not of others, whose
                clients train one after the other.

        Raises:
            TypeError, ValueError: If an argument is not what it should be.
            ImportError: If Ray is not installed.
        """
        _ray()
        if address is not None:
            address = _validate.instance_of(str, address=address)
        self.num_workers = _validate.positive_integer(
            num_workers=2 if num_workers is None else num_workers
        )
        self.shards_per_worker = _validate.positive_integer(
            shards_per_worker=shards_per_worker
        )
        if float32_products is not None:
            _validate.instance_of(bool, float32_products=float32_products)
        self._float32_products = float32_products
        # What Ray stores of a dataset, by the first of its arrays.
        self._stored: dict[int, tuple[Arrays, Any]] = {}
        self._connect_timeout = _validate.positive(
            connect_timeout_seconds=connect_timeout_seconds
        )
        if round_timeout_seconds is not None:
            round_timeout_seconds = _validate.positive(
                round_timeout_seconds=round_timeout_seconds
            )
        self._round_timeout = round_timeout_seconds
        self._max_repeats = _validate.non_negative_integer(max_repeats=max_repeats)
        options = {"num_cpus": 1, **(resources or {})}
        self._cluster = _Cluster(address, options)
        self._close = weakref.finalize(self, self._cluster.close)

    @property
    def float32_products(self) -> bool:
        """Whether the workers' products of float32 numbers are such."""
        if self._float32_products is not None:
            return self._float32_products
        return (
            self._cluster.is_here
            and devices.products_are_float32_in_processes_started_here()
        )

    def open(self) -> RayWorkers:
        """Connects, and starts every worker that is not there. Returns self.

        Raises:
            WorkerUnavailable: If Ray cannot be reached, or has not started the
                workers in time.
            RuntimeError: If the workers are closed.
        """
        if not self._close.alive:
            raise RuntimeError("These RayWorkers are closed.")
        self._cluster.connect()
        places = [
            place
            for place in range(self.num_workers)
            if place not in self._cluster.actors
        ]
        waiting = {place: self._cluster.actor(place).ready.remote() for place in places}
        for place, ready in waiting.items():
            try:
                _ray().get(ready, timeout=self._connect_timeout)
            except _ray().exceptions.RayError as error:
                for each in places:
                    self._cluster.drop(each)
                raise WorkerUnavailable(
                    self._address(place), f"was not started: {error}"
                ) from error
        return self

    def close(self) -> None:
        """Ends the workers, and Ray where it was started here, for good."""
        self._close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of each worker, on whatever machine it is."""
        self.open()
        return tuple(
            _ray().get(
                [
                    self._cluster.actor(place).ready.remote()
                    for place in range(self.num_workers)
                ]
            )
        )

    def _address(self, place: int) -> str:
        return f"{place} of Ray"

    def __enter__(self) -> RayWorkers:
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def collector(
        self, cohort_engine: engine.CohortEngine, clients: FederatedDataset
    ) -> ShardedCohorts:
        """Returns what trains the cohorts of a `fit`; opens the workers."""
        return ShardedCohorts(cohort_engine, clients, self.open())

    def _reference(self, examples: Arrays | None) -> Any:
        """Returns what Ray has of a dataset: it is stored once."""
        if examples is None:
            return None
        key = id(examples)
        if key not in self._stored:
            # One dataset at a time, so that the store does not fill up.
            self._stored = {key: (examples, _ray().put(examples))}
        return self._stored[key][1]

    def run(self, work: Work) -> list[Arrays]:
        """Runs a program on every shard; see `workers.Workers.run`.

        The workers' sums are added in the order of the workers, so that the
        same shards give the same sum to the last bit.
        """
        self.open()
        sent = _sealed(work.sent)
        if not isinstance(sent, bytes):
            sent = _ray().put(sent)
        indices = np.array_split(np.arange(len(work.shards)), self.num_workers)
        shards = {
            place: _sealed([work.shards[index] for index in part])
            for place, part in enumerate(indices)
            if len(part)
        }
        examples = self._reference(work.examples)

        def ask(place: int) -> Any:
            return self._cluster.actor(place).run.remote(
                work.program.name, sent, examples, shards[place], work.by_sum
            )

        results = self._answers(work.program, list(shards), ask)
        ordered = [each for place in sorted(results) for each in results[place]]
        return [functools.reduce(_added, ordered)] if work.by_sum else ordered

    def _answers(
        self,
        traced: program.Program,
        places: list[int],
        ask: Callable[[int], Any],
    ) -> dict[int, Any]:
        """Has every place do its work, some of it again if need be."""
        ray, start = _ray(), time.monotonic()
        results: dict[int, Any] = {}
        made: dict[int, Any] = {}
        lost: list[int] = []
        asked = {place: ask(place) for place in places}
        while asked:
            limit = None
            if self._round_timeout is not None:
                limit = max(0, self._round_timeout - (time.monotonic() - start))
            place, reference = next(iter(asked.items()))
            wanted = [reference]
            if place in made:  # What became of that is told first.
                wanted.insert(0, made.pop(place))
            try:
                *_, result = ray.get(wanted, timeout=limit)
            except ray.exceptions.RayTaskError as error:
                raise WorkerError(self._address(place), f"failed: {error}") from error
            except ray.exceptions.RayError as error:
                lost.append(place)
                self._lose(place, len(lost), error)
                asked[place] = ask(place)
                continue
            if result is None:  # It has not met this program yet.
                actor = self._cluster.actor(place)
                made[place] = actor.make.remote(traced.name, _Message.of(traced))
                asked[place] = ask(place)
                continue
            del asked[place]
            results[place] = _opened(result)
        return results

    def _lose(self, place: int, times: int, error: Exception) -> None:
        """Notes that a worker is lost; raises if that was once too often."""
        self._cluster.drop(place)
        timed_out = isinstance(error, _ray().exceptions.GetTimeoutError)
        if timed_out or times > self._max_repeats:
            raise WorkerLost(self._address(place), f"is lost: {error}") from error
        logging.warning(
            "Worker %s is lost, its shards are done again: %s",
            self._address(place),
            error,
        )
