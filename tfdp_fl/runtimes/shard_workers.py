"""What all kinds of workers have in common: `fit` has its cohorts from them."""

from __future__ import annotations

import abc
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tfdp_fl import _products, _validate, engine
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.runtimes import sharded_cohorts
from tfdp_fl.runtimes.program import Program
from tfdp_fl.runtimes.worker_data import WorkerData

# The word for examples that come with every round.
REQUEST = "request"

_Self = TypeVar("_Self", bound="ShardWorkers")


class WorkerError(RuntimeError):
    """A worker could not run what it was asked to run.

    Attributes:
        address: The worker..
    """

    def __init__(self, address: str, message: str):
        super().__init__(f"Worker {address} {message}")
        self.address = address


class WorkerUnavailable(WorkerError):  # noqa: N818
    """A worker could not be started or reached; no round was begun."""


class WorkerLost(WorkerError):  # noqa: N818
    """A worker went away during a round; the round was abandoned whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerRecord:
    """What one worker did in the last round.

    Attributes:
        address: The worker.
        shards: The indices of the shards that it was given.
        seconds: From sending them to having its sum.
        clients: The positions of the clients that it trained, where the round
            is one of `fit`.
    """

    address: str
    shards: tuple[int, ...]
    seconds: float
    clients: tuple[int, ...] = ()

    def joined(self: Any, later: Any) -> Any:
        """Returns what the worker did in two calls of one round."""
        return dataclasses.replace(
            later,
            shards=self.shards + later.shards,
            seconds=self.seconds + later.seconds,
            clients=self.clients + later.clients,
        )


class ShardWorkers(abc.ABC):
    """Workers that are given shards of a cohort.

    Attributes:
        last_round: What each worker did in the last round that was completed.
    """

    last_round: tuple[Any, ...] = ()
    # Makes of a function what `_run_sharded` takes.
    _lift: Callable[..., Any] = staticmethod(Program.of)

    def __init__(
        self,
        shards_per_worker: int,
        data: str,
        float32_products: bool | None = None,
    ):
        """Keeps what is the same for every round.

        Args:
            shards_per_worker: How many shards each worker is given.
            data: REQUEST, or the directory where workers read the examples.
            float32_products: What the user says of the workers' products.
        """
        if float32_products is not None:
            _validate.instance_of(bool, float32_products=float32_products)
        self._float32_products = float32_products
        self._shards_per_worker = shards_per_worker
        self._data = data
        # What was made of an engine, and found of a dataset, before.
        self._computations: Any = weakref.WeakKeyDictionary()
        self._worker_data: Any = weakref.WeakKeyDictionary()

    @property
    def data(self) -> str:
        """Returns REQUEST, or the directory where workers read examples."""
        return self._data

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """How many workers there are."""

    @property
    @abc.abstractmethod
    def _are_started_here(self) -> bool:
        """Whether the workers are this machine's, with its environment."""

    @abc.abstractmethod
    def open(self: _Self) -> _Self:
        """Starts or connects every worker that is not there. Returns self."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what was started here and lets go of the rest, for good."""

    @abc.abstractmethod
    def _run_sharded(
        self,
        computation: Any,
        shards: Sequence[Any],
        broadcast: Any,
        reduction: str,
        sent: Callable[[], None],
    ) -> tuple[Any, tuple[Any, ...]]:
        """Runs a computation on every shard; also returns who did what.

        The shards and the broadcast are nests of NumPy arrays. `sent` is called
        when nothing is left to do here until somebody has finished.
        """

    def __enter__(self: _Self) -> _Self:
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def collector(
        self, cohort_engine: engine.CohortEngine, clients: FederatedDataset
    ) -> sharded_cohorts.ShardedCohorts:
        """Returns what `fit` has its cohorts trained by.

        Args:
            cohort_engine: The engine of the model that is trained.
            clients: The data.

        Raises:
            WorkerUnavailable: As `open`, which is called.
            ValueError: If `data` is not a directory of these clients.
        """
        data = None
        if self._data != REQUEST:
            data = self._worker_data.get(clients)
            if data is None:
                data = WorkerData.of(clients, self._data)
                self._worker_data[clients] = data
        self.open()
        float32_products = self._float32_products
        if float32_products is None:
            float32_products = (
                self._are_started_here
                and _products.are_float32_in_processes_started_here()
            )
        return sharded_cohorts.ShardedCohorts(
            cohort_engine,
            run_sharded=self._run_sharded,
            report=self._report,
            num_workers=self.num_workers,
            shards_per_worker=self._shards_per_worker,
            data=data,
            computations=self._computations.setdefault(cohort_engine, {}),
            float32_products=float32_products,
            lift=self._lift,
        )

    def _report(self, records: Sequence[Any]) -> None:
        """Sets `last_round`, from what the workers did in several calls."""
        done: dict[str, Any] = {}
        for record in records:
            before = done.get(record.address)
            done[record.address] = record if before is None else before.joined(record)
        self.last_round = tuple(done.values())
