"""What can go wrong with a worker, each naming the worker."""

from __future__ import annotations


class WorkerError(RuntimeError):
    """A worker could not run what it was asked to run.

    Attributes:
        address: `host:port` of the worker.
    """

    def __init__(self, address: str, message: str):
        super().__init__(f"Worker {address} {message}")
        self.address = address


class WorkerUnavailable(WorkerError):  # noqa: N818
    """A worker could not be started or reached; no round was begun."""


class WorkerLost(WorkerError):  # noqa: N818
    """A worker went away during a round; the round was abandoned whole."""
