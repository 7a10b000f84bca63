"""TFF's own distributed runtime: a shard of the cohort on each worker."""

from __future__ import annotations

import collections
import collections.abc
import functools
import operator
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.runtimes import memory, sharded_cohorts
from tfdp_fl.runtimes.errors import WorkerUnavailable
from tfdp_fl.runtimes.shard_workers import REQUEST, ShardWorkers
from tfdp_fl.runtimes.worker import Call, Worker, WorkerRound, wait_for

if TYPE_CHECKING:
    pass

_REMEMBERED_COMPUTATIONS = 16
_MOST_WORKERS = 2**16 - 1

SUM, NONE = sharded_cohorts.SUM, sharded_cohorts.NONE


def _close_all(workers: Sequence[Worker], owner: int) -> None:
    if os.getpid() == owner:
        for worker in workers:
            worker.close()


def _addresses(hosts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise TypeError(
            f"hosts must be a sequence of 'host:port' strings, got {hosts!r}."
        )
    for host in hosts:
        _validate.instance_of(str, hosts=host)
        name, _, port = host.rpartition(":")
        if not name or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"hosts must be 'host:port' strings, got {host!r}.")
    if not hosts or len(set(hosts)) != len(hosts):
        raise ValueError(
            f"hosts must be one or more different addresses, got {hosts!r}."
        )
    return tuple(hosts)


def _ports(ports: Sequence[int], num_workers: int) -> tuple[int, ...]:
    ports = tuple(_validate.positive_integer(ports=port) for port in ports)
    if (
        len(ports) != num_workers
        or len(set(ports)) != num_workers
        or max(ports) > 65535
    ):
        raise ValueError(
            f"ports must be {num_workers} different numbers up to 65535, one "
            f"for each worker, got {ports!r}."
        )
    return ports


def _in_order(value: Any, type_spec: Any) -> Any:
    """Returns `value` with its mappings in the order of the TFF type.

    TFF would pair the items of a dictionary with those of the type by their
    position, whatever their names.
    """
    import tensorflow_federated as tff

    if not isinstance(type_spec, tff.StructType):
        return value
    names = tff.structure.name_list_with_nones(type_spec)
    if isinstance(value, collections.abc.Mapping):
        if set(value) != set(names):
            raise ValueError(
                f"A value for {type_spec} must have the names "
                f"{sorted(map(str, names))}, got {sorted(map(str, value))}."
            )
        return collections.OrderedDict(
            (name, _in_order(value[name], type_spec[name])) for name in names
        )
    if isinstance(value, (list, tuple)) and len(value) == len(names):
        items = [_in_order(item, type_spec[index]) for index, item in enumerate(value)]
        is_plain = type(value) in (list, tuple)
        return type(value)(items) if is_plain else type(value)(*items)
    return value


def _native(computation: Any) -> Any:
    """Returns a computation as TFF prepares it for its workers."""
    import tensorflow_federated as tff

    return tff.backends.native.desugar_and_transform_to_native(computation)


class _Compiled:
    """What workers run for a computation: it, or a `federated_map` of it."""

    def __init__(self, computation: Any, reduction: str):
        """Prepares both; the workers are sent those that they need.

        Args:
            computation: See `TFFWorkers.run_sharded`.
            reduction: Likewise.
        """
        import tensorflow_federated as tff

        parameter = computation.type_signature.parameter
        if not isinstance(parameter, tff.StructType) or len(parameter) != 2:
            raise ValueError(
                "computation must take (broadcast, shard), got the type "
                f"{computation.type_signature}."
            )

        @tff.federated_computation(
            tff.FederatedType(parameter[0], tff.SERVER),
            tff.FederatedType(parameter[1], tff.CLIENTS),
        )
        def over_shards(broadcast, shards):
            results = tff.federated_map(
                computation, (tff.federated_broadcast(broadcast), shards)
            )
            return tff.federated_sum(results) if reduction == SUM else results

        self._computation = computation
        self._reduction = reduction
        self._over_shards = over_shards

    @functools.cached_property
    def _for_one(self) -> Any:
        return _native(self._computation)

    @functools.cached_property
    def _for_several(self) -> Any:
        return _native(self._over_shards)

    def call(
        self,
        worker: Worker,
        broadcast: Any,
        shards: Sequence[Any],
        indices: Sequence[int],
    ) -> Call:
        """Returns a worker's part of a round.

        Args:
            worker: The worker.
            broadcast: What every shard is given.
            shards: All shards.
            indices: Which of them are the worker's, at least one.
        """
        import tensorflow_federated as tff

        def argument(second: Any) -> Any:
            return tff.structure.Struct.unnamed(broadcast, second)

        own = [shards[index] for index in indices]
        if len(own) > 1:
            return Call(worker, self._for_several, argument(own), indices)
        # For one shard alone, mapping and adding up took TFF's executors more
        # than a small shard's training does.
        return Call(worker, self._for_one, argument(own[0]), indices)

    def results(self, call: Call) -> list[Any]:
        """Returns what a call that has finished returned: a sum, or rows."""
        import tensorflow_federated as tff

        several = self._reduction == NONE and len(call.shards) > 1
        return [
            tff.types.type_to_py_container(
                result, self._computation.type_signature.result
            )
            for result in (call.result if several else [call.result])
        ]


class TFFWorkers(ShardWorkers):
    """Several TFF workers, started here or already running.

        with TFFWorkers(num_workers=2) as workers:
            federated_model.fit(clients, rounds=100, runtime=workers)
            sums = workers.run_sharded(computation, [shard_0, shard_1], weights)

    Workers that are started here end when this process does, however it ends;
    see `tfdp_fl/runtimes/supervisor.py`. Workers at `hosts` are left running.

    A round happens whole or not at all. If a worker is lost, `run_sharded` and
    `fit` raise `WorkerLost`, nothing is returned, released or charged, and the
    next call starts the lost worker anew (or connects to its address again)
    before it begins.

    Attributes:
        num_workers: How many workers there are.
        last_round: What each worker did in the last round that was completed.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        ports: Sequence[int] | None = None,
        *,
        hosts: Sequence[str] | None = None,
        connect_timeout_seconds: float = 30.0,
        round_timeout_seconds: float | None = None,
        threads_per_worker: int | None = None,
        max_concurrent_computation_calls: int | None = None,
        shards_per_worker: int | None = None,
        data: str | os.PathLike[str] = REQUEST,
        float32_products: bool | None = None,
    ):
        """Describes the workers; `open`, or the first round, starts them.

        Args:
            num_workers: How many workers to start here. 2 by default.
            ports: A port for each of them; None for free ones.
            hosts: `host:port` of each worker that runs already. Nothing is
                started then.
            connect_timeout_seconds: How long a worker may take to answer.
            round_timeout_seconds: How long a round may take before its
                unfinished workers count as lost; None for no limit.
            threads_per_worker: Threads for one TensorFlow operation in a
                worker started here; 1 by default, with shards side by side.
            max_concurrent_computation_calls: How many shards a worker started
                here works on at the same time; None for no limit.
            shards_per_worker: How many shards `fit` gives each worker, to be
                worked on at the same time. By default as many as keep this
                machine's cores busy, and one where hosts are given.
            data: How the examples of `fit` come to the workers. "request":
                with every round, those of its cohort; or the directory that
                `export_for_workers` wrote, which every worker sees under this
                path.
            float32_products: Whether the workers compute products of float32
                numbers as such: not in bfloat16 (oneDNN can be told to), nor in
                TensorFloat-32 (a GPU's default). Dense models train side by
                side only then, as the bound of their norms rests on it. None:
                known of workers that are started here; not of others, whose
                clients train one after the other.

        Raises:
            ValueError: If an argument is out of range, or does not go with
                `hosts`.
        """
        if hosts is not None:
            for name, value in (
                ("num_workers", num_workers),
                ("ports", ports),
                ("threads_per_worker", threads_per_worker),
                (
                    "max_concurrent_computation_calls",
                    max_concurrent_computation_calls,
                ),
            ):
                if value is not None:
                    raise ValueError(
                        f"{name} must be None where hosts are given, got "
                        f"{value!r}: it is for workers that are started here."
                    )
            self._workers = [Worker(host) for host in _addresses(hosts)]
            default_shards = 1
        else:
            count = _validate.positive_integer(
                num_workers=2 if num_workers is None else num_workers
            )
            threads = _validate.positive_integer(
                threads_per_worker=1
                if threads_per_worker is None
                else threads_per_worker
            )
            if count > _MOST_WORKERS:
                raise ValueError(
                    f"num_workers must be at most {_MOST_WORKERS}, as each "
                    f"listens on a port of its own, got {count}."
                )
            cores = len(os.sched_getaffinity(0))
            default_shards = max(1, cores // (count * threads))
            start = {
                "threads": threads,
                "max_concurrent_computation_calls": (
                    None
                    if max_concurrent_computation_calls is None
                    else _validate.positive_integer(
                        max_concurrent_computation_calls=(
                            max_concurrent_computation_calls
                        )
                    )
                ),
            }
            self._workers = [
                Worker(None, port=port, **start)
                for port in ([None] * count if ports is None else _ports(ports, count))
            ]
        self._connect_timeout = _validate.positive(
            connect_timeout_seconds=connect_timeout_seconds
        )
        self._round_timeout = (
            None
            if round_timeout_seconds is None
            else _validate.positive(round_timeout_seconds=round_timeout_seconds)
        )
        super().__init__(
            _validate.positive_integer(
                shards_per_worker=default_shards
                if shards_per_worker is None
                else shards_per_worker
            ),
            os.fspath(data),
            float32_products,
        )
        self._are_started = hosts is None
        # Also run at exit, and when this object is no longer used.
        self._close = weakref.finalize(self, _close_all, self._workers, os.getpid())
        self._compiled: collections.OrderedDict[Any, _Compiled] = (
            collections.OrderedDict()
        )

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return len(self._workers)

    @property
    def _are_started_here(self) -> bool:
        return self._are_started

    @property
    def addresses(self) -> tuple[str | None, ...]:
        """`host:port` of each worker; None for one that is not started."""
        return tuple(worker.address for worker in self._workers)

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Process id of each worker; None for one not started here."""
        return tuple(
            worker.process.pid if worker.process else None for worker in self._workers
        )

    def open(self) -> TFFWorkers:
        """Starts and connects every worker that is not usable. Returns self.

        Raises:
            WorkerUnavailable: If a worker cannot be started or reached. The
                others stay as they are.
            RuntimeError: If the workers are closed.
        """
        if not self._close.alive:
            raise RuntimeError("These TFFWorkers are closed.")
        memory.keep_freed_memory()
        missing = [worker for worker in self._workers if not worker.usable]
        try:
            for worker in missing:
                worker.start()
            deadline = time.monotonic() + self._connect_timeout
            for worker in missing:
                worker.connect(max(0.1, deadline - time.monotonic()))
        except WorkerUnavailable:
            for worker in missing:
                worker.close()
            raise
        return self

    def restart(self) -> TFFWorkers:
        """Ends and starts every worker anew, or connects anew. Returns self.

        Needless after `WorkerLost`: the next round does it for the lost one.

        Raises:
            WorkerUnavailable: As `open`.
        """
        for worker in self._workers:
            worker.close()
        return self.open()

    def close(self) -> None:
        """Ends what was started here and lets go of the rest, for good."""
        self._close()

    def _compile(self, computation: Any, reduction: str) -> _Compiled:
        """Returns what the workers run for `computation`, made once."""
        key = (id(computation), reduction)
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        # The computation is kept with it, so that no other has its id.
        compiled = self._compiled[key] = _Compiled(computation, reduction)
        if len(self._compiled) > _REMEMBERED_COMPUTATIONS:
            self._compiled.popitem(last=False)
        return compiled

    def run_sharded(
        self,
        computation: Any,
        shards: Sequence[Any],
        broadcast: Any,
        *,
        reduction: str = SUM,
    ) -> Any:
        """Runs `computation` on every shard and sums its results.

        A worker's shards are TFF clients under `federated_map`, summed there by
        `federated_sum`; a worker with one shard runs the computation as it is.
        The workers' sums are added up here, in the order of the workers, so
        that the same shards give the same sum to the last bit.

        The computation is compiled and sent to each worker once. Keep it, and
        pass the same object in each round.

        Args:
            computation: A `tff.tensorflow.computation` of `(broadcast, shard)`
                that returns a nest of numbers to be summed over shards.
            shards: The shards, nests of NumPy arrays. The first worker gets
                the first ones; none gets more than one more than another. Their
                number is usually `num_workers`; more than one for each worker
                are worked on at the same time there.
            broadcast: What every shard is given, a nest of NumPy arrays.
            reduction: "sum", or "none" where a sum is not what is wanted (one
                row for each client, say).

        Returns:
            The sum, in the containers that `computation` returns; or with
            "none" a list of the results, in the order of `shards`.

        Raises:
            WorkerUnavailable: If a worker is not there at the start.
            WorkerLost: If a worker goes away during the round.
            WorkerError: If the computation fails on a worker.
        """
        import tensorflow_federated as tff

        result, self.last_round = self._run_sharded(
            computation,
            [tff.tensorflow.transform_args(each) for each in shards],
            tff.tensorflow.transform_args(broadcast),
            reduction,
            sent=lambda: None,
        )
        return result

    def _run_sharded(
        self,
        computation: Any,
        shards: Sequence[Any],
        broadcast: Any,
        reduction: str,
        sent: Callable[[], None],
    ) -> tuple[Any, tuple[WorkerRound, ...]]:
        """Does what `run_sharded` does; also returns who did what."""
        if not shards:
            raise ValueError(f"shards must have at least one element, got {shards!r}.")
        _validate.one_of((SUM, NONE), reduction=reduction)
        compiled = self._compile(computation, reduction)
        parameter = computation.type_signature.parameter
        broadcast = _in_order(broadcast, parameter[0])
        shards = [_in_order(shard, parameter[1]) for shard in shards]
        self.open()
        assigned = [
            [int(index) for index in part]
            for part in np.array_split(np.arange(len(shards)), self.num_workers)
        ]
        calls = [
            compiled.call(worker, broadcast, shards, part)
            for worker, part in zip(self._workers, assigned, strict=True)
            if part
        ]
        wait_for(calls, self._round_timeout, sent)
        results = [each for call in calls for each in compiled.results(call)]
        records = tuple(call.record() for call in calls)
        if reduction == NONE:
            return results, records
        total = functools.reduce(
            lambda a, b: tf.nest.map_structure(operator.add, a, b), results
        )
        return total, records
