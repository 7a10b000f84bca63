"""Ray's actors: a shard of the cohort on each, on one machine or several."""

from __future__ import annotations

import math
import os
import pickle
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
    WorkerError,
    WorkerLost,
    WorkerUnavailable,
)

# What Ray sends with a call, rather than by its store of objects.
_INLINE_BYTES = 64 * 2**10

# How long Ray may take to place and start the workers.
_SECONDS_TO_START = 300.0

# Arrays as `_sealed` leaves them.
_Sealed = Any


def runnable(traced: program.Program, threads: int = 1) -> Callable[[Arrays], Arrays]:
    """Returns a function of a program's flat arguments, wherever it came from.

    A graph and a session of TensorFlow 1: it takes arrays as they lie in
    memory, and looks for no function in the process.

    Args:
      traced: The program.
      threads: How many compute.
    """
    graph = tf.Graph()
    with graph.as_default():
        found = tf.graph_util.import_graph_def(
            traced.definition,
            return_elements=[*traced.outputs, *traced.assertions],
            name="",
        )
    count = len(traced.outputs)
    session = tf.compat.v1.Session(
        graph=graph,
        config=tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=threads,
            inter_op_parallelism_threads=threads,
        ),
    )
    made = session.make_callable(
        (found[:count], found[count:]),
        feed_list=list(map(graph.get_tensor_by_name, traced.inputs)),
    )
    constants = list(map(np.asarray, traced.constants))
    return lambda arrays: made(*arrays, *constants)[0]


class _Actor:
    """Runs programs; lives in a process of Ray's."""

    def __init__(self, threads: int):
        self._threads = threads
        self._made: dict[str, Any] = {}

    def ready(self) -> int:
        """Returns the process id, once TensorFlow is there."""
        return os.getpid()

    def make(self, traced: program.Program) -> None:
        """Takes over a program, once."""
        if traced.name not in self._made:
            self._made[traced.name] = runnable(traced, self._threads)

    def run(
        self, name: str, sent: _Sealed, examples: Arrays | None, shard: _Sealed
    ) -> _Sealed | None:
        """Returns a program's results' leaves; None if it has to be made first."""
        if name not in self._made:
            return None
        arguments = [*_opened(sent), *(examples or ()), *_opened(shard)]
        return _sealed(self._made[name](arguments))


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
            where = self._address or "Ray"
            raise WorkerUnavailable(f"{where} cannot be reached: {error}") from error
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
    """

    def __init__(
        self,
        address: str | None = None,
        num_workers: int | None = None,
        *,
        resources: Mapping[str, Any] | None = None,
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
            resources: What each worker asks of Ray, as the options of an actor:
                `{"num_cpus": 2}`, `{"num_gpus": 1}`. One CPU by default; a
                worker computes with as many threads.
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
        if float32_products is not None:
            _validate.instance_of(bool, float32_products=float32_products)
        self._float32_products = float32_products
        # The examples of a dataset, and what Ray has stored of them.
        self._stored: tuple[Arrays, Any] | None = None
        self._max_repeats = _validate.non_negative_integer(max_repeats=max_repeats)
        options = {"num_cpus": 1, **(resources or {})}
        self._cluster = _Cluster(address, options)
        self._close = weakref.finalize(self, self._cluster.close)

    @property
    def float32_products(self) -> bool:
        """Whether the workers' products of float32 numbers are such."""
        if self._float32_products is not None:
            return self._float32_products
        # Workers have this process's environment, and not what it told TensorFlow:
        # on GPUs TensorFloat-32 is on unless a process turns it off.
        return (
            self._cluster.is_here
            and devices.products_are_float32()
            and not tf.config.list_physical_devices("GPU")
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
        cluster, ray = self._cluster, _ray()
        cluster.connect()
        missing = [n for n in range(self.num_workers) if n not in cluster.actors]
        waiting = [cluster.actor(place).ready.remote() for place in missing]
        try:
            ray.get(waiting, timeout=_SECONDS_TO_START)
        except ray.exceptions.RayError as error:
            for place in missing:
                cluster.drop(place)
            raise WorkerUnavailable(f"Ray started no worker: {error}") from error
        return self

    def close(self) -> None:
        """Ends the workers, and Ray where it was started here, for good."""
        self._close()

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
        if self._stored is None or self._stored[0] is not examples:
            # One dataset at a time, so that the store does not fill up.
            self._stored = examples, _ray().put(examples)
        return self._stored[1]

    def run(
        self,
        traced: program.Program,
        sent: Arrays,
        examples: Arrays | None,
        shards: list[Arrays],
    ) -> list[Arrays]:
        """Runs a program on shards, one a worker; see `workers.Workers.run`."""
        self.open()
        ray = _ray()
        received = _sealed(sent)
        if not isinstance(received, bytes):
            received = ray.put(received)
        stored, sealed = self._reference(examples), list(map(_sealed, shards))

        def ask(place: int) -> Any:
            return self._cluster.actor(place).run.remote(
                traced.name, received, stored, sealed[place]
            )

        asked = [ask(place) for place in range(len(shards))]
        results: list[Arrays] = []
        lost = 0
        for place, answer in enumerate(asked):
            wanted, result = [answer], None
            while result is None:
                try:
                    *_, result = ray.get(wanted)
                except ray.exceptions.RayTaskError as error:
                    message = f"Worker {place} of Ray failed: {error}"
                    raise WorkerError(message) from error
                except ray.exceptions.RayError as error:
                    self._cluster.drop(place)
                    lost += 1
                    message = f"Worker {place} of Ray is lost: {error}"
                    if lost > self._max_repeats:
                        raise WorkerLost(message) from error
                    logging.warning("Its shard is done again: %s", message)
                    wanted = [ask(place)]
                else:
                    if result is None:  # It has not met this program yet.
                        # What becomes of that is told first.
                        made = self._cluster.actor(place).make.remote(traced)
                        wanted = [made, ask(place)]
            results.append(_opened(result))
        return results
