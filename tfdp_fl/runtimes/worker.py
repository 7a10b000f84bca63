"""One worker: its process, its connection, and its part of a round."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from absl import logging

from tfdp_fl.runtimes.errors import WorkerLost, WorkerUnavailable
from tfdp_fl.runtimes.local_worker import LocalWorker
from tfdp_fl.runtimes.shard_workers import WorkerRecord

if TYPE_CHECKING:
    from tfdp_fl.runtimes import connection

# A worker is lost when this many pings in a row stay without an answer. A lost
# process is noticed at once, by its broken connection; this is for machines
# that disappear or hang: after (2 + 5) * 2 seconds.
_PING_EVERY_SECONDS = 2.0
_PING_TIMEOUT_SECONDS = 5.0
_UNANSWERED_PINGS = 2

_TICK_SECONDS = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerRound(WorkerRecord):
    """What one worker did in the last round.

    Attributes:
        address: `host:port` of the worker.
        shards: See `WorkerRecord`.
        seconds: See `WorkerRecord`.
        clients: See `WorkerRecord`.
        pid: Its process id where it was started here, else None.
        cpu_seconds: Processor time that it used meanwhile, where it was started
            here, else None.
    """

    pid: int | None
    cpu_seconds: float | None

    def joined(self, later: WorkerRound) -> WorkerRound:
        """Returns what the worker did in two calls of one round."""
        cpu = None
        if self.cpu_seconds is not None and later.cpu_seconds is not None:
            cpu = self.cpu_seconds + later.cpu_seconds
        return dataclasses.replace(super().joined(later), cpu_seconds=cpu)


class Worker:
    """One of the workers: its process, if it is ours, and its connection."""

    def __init__(self, address: str | None, **start: Any):
        self._address = address
        self._start = start
        self.process: LocalWorker | None = None
        self.connection: connection.Connection | None = None

    @property
    def address(self) -> str | None:
        """`host:port`; None for one that is ours and not started."""
        if self.process is not None:
            return self.process.address
        return self._address

    @property
    def usable(self) -> bool:
        """Whether it is connected, and its process runs if it is ours."""
        return (
            self.connection is not None
            and not self.connection.closed
            and (self.process is None or self.process.alive)
        )

    def start(self) -> None:
        """Starts the process where it is ours; `connect` waits for it."""
        from tfdp_fl.runtimes import connection  # gRPC comes with TFF only.

        self.close()
        if self._address is None:
            self.process = LocalWorker(**self._start)
        # Where the process is not ours, there is an address.
        self.connection = connection.Connection(cast(str, self.address))

    def connect(self, timeout_seconds: float) -> None:
        """Waits until it answers; raises WorkerUnavailable if it does not."""
        process = self.process
        started = cast("connection.Connection", self.connection)
        try:
            started.connect(
                timeout_seconds,
                (lambda: True) if process is None else lambda: process.alive,
            )
        except WorkerUnavailable as error:
            if process is not None:
                raise WorkerUnavailable(
                    process.address, f"was not started. {process.log_tail()}"
                ) from error
            raise
        if process is not None:
            process.listening()

    def lose(self) -> None:
        """Breaks off what is under way, because the worker is lost."""
        if self.connection is not None:
            self.connection.close(dispose=False)

    def close(self) -> None:
        """Lets go of it, and ends the process if it is ours."""
        if self.connection is not None:
            self.connection.close(dispose=self.process is None)
            self.connection = None
        if self.process is not None:
            self.process.stop()
            self.process = None


class Call:
    """One worker's part of a round, in the thread of its connection.

    Attributes:
        worker: Who is called.
        shards: Which shards these are.
        result: What it returned, in TFF's own containers.
        error: What it raised instead.
    """

    def __init__(
        self,
        worker: Worker,
        compiled: Any,
        argument: Any,
        indices: Sequence[int],
    ):
        """Prepares it.

        Args:
            worker: See `Call`.
            compiled: A compiled computation.
            argument: Its argument; see `Connection.call`.
            indices: Which shards these are.
        """
        self.worker = worker
        self._arguments = (compiled, argument, len(indices))
        self.shards = tuple(indices)
        # It is connected, so it has both.
        self._connection = cast("connection.Connection", worker.connection)
        self._address = cast(str, worker.address)
        self._process = worker.process
        self._cpu_before = self._cpu()
        self._cpu_used: float | None = None
        self._seconds = 0.0
        self._ping: Any = None
        self._ping_at = time.monotonic() + _PING_EVERY_SECONDS
        self._unanswered = 0
        self.result: Any = None
        self.error: Exception | None = None

    def _cpu(self) -> float | None:
        return None if self._process is None else self._process.cpu_seconds()

    def start(self, news: queue.SimpleQueue[tuple[Call, bool]]) -> None:
        """Starts the call.

        Args:
            news: Where the call puts itself when it was sent, with False, and
                in the end, with True.
        """

        def run() -> None:
            begin = time.monotonic()
            try:
                self.result = self._connection.call(
                    *self._arguments, sent=lambda: news.put((self, False))
                )
            except Exception as error:
                self.error = error
            self._seconds = time.monotonic() - begin
            after = self._cpu()
            if after is not None and self._cpu_before is not None:
                self._cpu_used = after - self._cpu_before
            news.put((self, True))

        self._connection.submit(run)

    def why_lost(self) -> str | None:
        """Returns why the unfinished call will not finish, or None."""
        if self._process is not None and not self._process.alive:
            return "is lost."
        if self._connection.closed:
            return "is lost: it was closed."
        if self._ping is None:
            if time.monotonic() >= self._ping_at:
                self._ping = self._connection.ping(_PING_TIMEOUT_SECONDS)
        elif self._ping.done():
            answered = self._connection.answered(self._ping)
            self._unanswered = 0 if answered else self._unanswered + 1
            self._ping = None
            self._ping_at = time.monotonic() + _PING_EVERY_SECONDS
            if self._unanswered >= _UNANSWERED_PINGS:
                return "is lost: it no longer answers."
        return None

    def lost(self, reason: str) -> WorkerLost:
        """Returns the error that says that this worker is lost."""
        if self._process is not None:
            reason = f"{reason} {self._process.log_tail()}"
        logging.warning("Worker %s %s", self._address, reason)
        return WorkerLost(self._address, reason)

    def failure(self) -> Exception:
        """Returns the error to raise for `error`, after cleaning up."""
        if isinstance(self.error, WorkerLost):
            self.worker.lose()
            if self._process is not None:
                return self.lost("is lost.")
        return cast(Exception, self.error)  # There is one.

    def record(self) -> WorkerRound:
        """Returns what the worker did."""
        return WorkerRound(
            address=self._address,
            pid=None if self._process is None else self._process.pid,
            shards=self.shards,
            seconds=self._seconds,
            cpu_seconds=self._cpu_used,
        )


def wait_for(
    calls: Sequence[Call],
    round_timeout: float | None,
    sent: Callable[[], None],
) -> None:
    """Starts calls, and waits for their results.

    Args:
        calls: One for each worker.
        round_timeout: Seconds after which those who have not finished are
            lost; None for no limit.
        sent: Called when all are sent, and this process has nothing to do.

    Raises:
        WorkerLost: As soon as a worker is.
        WorkerError: As soon as a computation has failed.
    """
    news: queue.SimpleQueue[tuple[Call, bool]] = queue.SimpleQueue()
    started = time.monotonic()
    for call in calls:
        call.start(news)
    unsent, pending = set(calls), set(calls)
    while pending:
        with contextlib.suppress(queue.Empty):
            call, has_ended = news.get(timeout=_TICK_SECONDS)
            if not has_ended:
                unsent.discard(call)
                if not unsent:
                    sent()
                continue
            pending.discard(call)
            if call.error is not None:
                raise call.failure()
            continue
        elapsed = time.monotonic() - started
        for call in pending:
            reason = call.why_lost()
            if reason is None and (
                round_timeout is not None and elapsed > round_timeout
            ):
                reason = f"is lost: it did not finish within {round_timeout:g} seconds."
            if reason is not None:
                call.worker.lose()
                raise call.lost(reason)
