"""One worker at the other end of a gRPC channel, by TFF's public symbols."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import grpc

from tfdp_fl.runtimes.errors import WorkerError, WorkerLost, WorkerUnavailable

# A gRPC server answers this with "unimplemented" when it is alive. HTTP/2
# keepalive pings would not do: the worker's server tolerates one in five
# minutes, and closes the connection of whoever sends more.
_PING = "/grpc.health.v1.Health/Check"
_POLL_SECONDS = 0.2
_REMEMBERED_COMPUTATIONS = 16
_DISPOSE_SECONDS = 2.0

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Not one connection for everything: a ping must not queue behind 200 MB.
    ("grpc.use_local_subchannel_pool", 1),
)

_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # "No such executor": another process answers at this address by now.
    grpc.StatusCode.FAILED_PRECONDITION,
)


def _translated(address: str, error: Exception) -> WorkerError:
    if not isinstance(error, grpc.RpcError):
        return WorkerLost(address, f"is lost: {error}")
    code = error.code()
    if code in _GONE:
        return WorkerLost(address, f"is lost ({code.name}): {error.details()}")
    return WorkerError(
        address, f"refused the computation ({code.name}): {error.details()}"
    )


class _QuietChannel:
    """A channel that nobody watches.

    TFF's stub subscribes to its channel and never unsubscribes; the thread
    that gRPC starts for this fails, with a traceback, when the channel is
    closed.
    """

    def __init__(self, channel: grpc.Channel):
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        """Does nothing."""


def _named_stub(channel: grpc.Channel, address: str) -> Any:
    """Returns TFF's stub with errors that name the worker.

    TFF's own contexts repeat a call for ever when the worker does not answer.
    An error that TFF does not know as retryable ends that.
    """
    import tensorflow_federated as tff

    retryable = tff.framework.RetryableError

    def named(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(request: Any) -> Any:
            try:
                return method(request)
            # A closed channel is a ValueError.
            except (grpc.RpcError, retryable, ValueError) as error:
                raise _translated(address, error) from error

        return call

    def silent(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        # Called by finalizers, where nobody could handle an error: what is
        # gone is disposed of.
        def call(request: Any) -> Any:
            with contextlib.suppress(grpc.RpcError, retryable, ValueError):
                return method(request)

        return call

    stub = tff.framework.RemoteExecutorGrpcStub(_QuietChannel(channel))
    for name in (
        "get_executor",
        "create_value",
        "create_struct",
        "create_call",
        "create_selection",
        "compute",
    ):
        setattr(stub, name, named(getattr(stub, name)))
    for name in ("dispose", "dispose_executor"):
        setattr(stub, name, silent(getattr(stub, name)))
    return stub


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


class Connection:
    """A connected worker.

    Calls are made one after the other, by a thread that lives as long as the
    connection. It is a daemon: an abandoned call does not keep the process from
    ending.

    Attributes:
        address: `host:port` of the worker.
    """

    def __init__(self, address: str):
        """Prepares the connection to `address`; see `connect`."""
        self.address = address
        self._channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        self._ping_channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        self._ping = self._ping_channel.unary_unary(_PING)
        self._stub: Any = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(
            target=_work,
            args=(self._jobs,),
            name=f"worker {address}",
            daemon=True,
        ).start()
        self._loop: asyncio.AbstractEventLoop | None = None
        # One executor for each number of TFF clients; what it was sent before
        # stays there under the computation's identity.
        self._executors: dict[int, Any] = {}
        self._computations: collections.OrderedDict[Any, Any] = (
            collections.OrderedDict()
        )
        self.closed = False

    def connect(
        self, timeout_seconds: float, alive: Callable[[], bool] = lambda: True
    ) -> None:
        """Waits until the worker answers as a TFF executor service.

        Args:
            timeout_seconds: How long to wait.
            alive: False as soon as waiting is pointless.

        Raises:
            WorkerUnavailable: If nobody answers, or somebody else.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._answers(min(_POLL_SECONDS, deadline - time.monotonic())):
            if not alive():
                raise WorkerUnavailable(self.address, "ended before it answered.")
            if time.monotonic() >= deadline:
                raise WorkerUnavailable(
                    self.address,
                    f"did not answer within {timeout_seconds:.3g} seconds.",
                )
        self._loop = asyncio.new_event_loop()
        self._stub = _named_stub(self._channel, self.address)
        try:
            self._executor(1)
        except WorkerError as error:
            raise WorkerUnavailable(
                self.address,
                f"answered, but not as a TFF worker would: {error}",
            ) from error

    def _answers(self, timeout_seconds: float) -> bool:
        ping = self._channel.unary_unary(_PING).future(
            b"", timeout=max(0.0, timeout_seconds), wait_for_ready=True
        )
        ping.exception()
        return self.answered(ping)

    def _executor(self, num_clients: int) -> Any:
        import tensorflow_federated as tff

        executor = self._executors.get(num_clients)
        if executor is None:
            executor = tff.framework.RemoteExecutor(self._stub)
            executor.set_cardinalities({tff.CLIENTS: num_clients})
            self._executors[num_clients] = executor
        return executor

    def _remote(self, executor: Any, num_clients: int, compiled: Any) -> Any:
        key = (num_clients, id(compiled))
        if key in self._computations:
            self._computations.move_to_end(key)
            return self._computations[key][1]
        remote = self._run(executor.create_value(compiled, compiled.type_signature))
        # The computation is kept with it, so that no other has its id.
        self._computations[key] = (compiled, remote)
        if len(self._computations) > _REMEMBERED_COMPUTATIONS:
            self._computations.popitem(last=False)
        return remote

    def _run(self, coroutine: Any) -> Any:
        loop = cast(asyncio.AbstractEventLoop, self._loop)
        return loop.run_until_complete(coroutine)

    def submit(self, job: Callable[[], None] | None) -> None:
        """Has the connection's thread run `job`, which must not raise.

        None ends the thread.
        """
        self._jobs.put(job)

    def call(
        self,
        compiled: Any,
        argument: Any,
        num_clients: int,
        sent: Callable[[], None],
    ) -> Any:
        """Runs a compiled computation with `num_clients` TFF clients.

        The computation is sent once and stays on the worker; what is sent with
        each call is its argument. To be called by the connection's thread, see
        `submit`.

        Args:
            compiled: A compiled computation.
            argument: Its argument, a nest of NumPy arrays; a value at CLIENTS
                is a list, with a value for each of them.
            num_clients: Of this worker.
            sent: Called before the request that takes as long as the worker
                computes.

        Returns:
            The result, in TFF's own containers.

        Raises:
            WorkerLost: If the worker goes away.
            WorkerError: If the computation fails on the worker.
        """
        executor = self._executor(num_clients)
        remote = self._remote(executor, num_clients, compiled)
        parameter = compiled.type_signature.parameter

        async def called() -> Any:
            value = await executor.create_value(argument, parameter)
            # TFF maps over clients when it is called, and runs a computation of
            # tensors when it is asked for the result.
            if num_clients > 1:
                sent()
            result = await executor.create_call(remote, value)
            if num_clients == 1:
                sent()
            return await result.compute()

        return self._run(called())

    def ping(self, timeout_seconds: float) -> grpc.Future:
        """Asks the worker for a sign of life; see `answered`."""
        return self._ping.future(b"", timeout=timeout_seconds)

    @staticmethod
    def answered(ping: grpc.Future) -> bool:
        """Whether a finished `ping` found a live gRPC server."""
        return ping.code() in (
            grpc.StatusCode.OK,
            grpc.StatusCode.UNIMPLEMENTED,
        )

    def close(self, *, dispose: bool = True) -> None:
        """Lets go of the worker; a call that is under way fails.

        Args:
            dispose: Whether to free what this connection holds on the worker
                (needless where the worker ends anyway).
        """
        if self.closed:
            return
        self.closed = True
        if dispose and self._executors:
            disposed = threading.Event()
            self.submit(self._dispose)
            self.submit(disposed.set)
            disposed.wait(_DISPOSE_SECONDS)
        self.submit(None)
        self._channel.close()
        self._ping_channel.close()

    def _dispose(self) -> None:
        for executor in self._executors.values():
            executor.close()
