"""One `worker_binary` process on this machine, which never outlives us."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import select
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO, cast

from tfdp_fl.runtimes import memory, supervisor
from tfdp_fl.runtimes.errors import WorkerUnavailable

_STOP_SECONDS = 5.0
_LOG_WAIT_SECONDS = 1.0
_LOG_TAIL_BYTES = 2000


def worker_binary() -> str:
    """Returns the path of TFF's worker program, without importing TFF.

    Raises:
        ImportError: If TensorFlow Federated, or the program, is not there.
    """
    spec = importlib.util.find_spec("tensorflow_federated")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "TFFWorkers needs TensorFlow Federated, which is not installed."
        )
    (package, *_) = spec.submodule_search_locations
    path = pathlib.Path(package, "data", "worker_binary")
    if not os.access(path, os.X_OK):
        raise ImportError(
            "The installed TensorFlow Federated has no executable "
            "data/worker_binary; its Linux wheel is needed."
        )
    return str(path)


def reserve_port(port: int = 0) -> socket.socket:
    """Returns a bound socket that never listens; keeps `port` from others.

    The worker listens with `SO_REUSEPORT`, so it can bind a port that is
    reserved like this, and would also silently share a port on which somebody
    else's worker listens. Hence the check.

    Args:
        port: The port, or 0 for a free one.

    Raises:
        OSError: If somebody listens on the port.
    """
    if port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    reservation = socket.socket()
    try:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(("", port))
    except OSError:
        reservation.close()
        raise
    return reservation


class LocalWorker:
    """A `worker_binary` that ends when this process ends, however it ends.

    The process tree is this process, `supervisor.py`, `worker_binary`. The
    worker has a session of its own, so that Ctrl-C interrupts the training
    and not the workers. Its output goes to an unlinked temporary file: it
    holds none of the caller's pipes, and nothing is left to clean up.

    Attributes:
        address: `host:port` to connect to.
        pid: The process id of the `worker_binary`.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        threads: int | None = None,
        max_concurrent_computation_calls: int | None = None,
    ):
        """Starts the process; it may not answer yet.

        Args:
            port: The port to listen on; None for a free one.
            threads: Threads for one TensorFlow operation; None leaves it to
                the worker, which takes one a core.
            max_concurrent_computation_calls: Calls of one computation that
                run at the same time; None for no limit.

        Raises:
            WorkerUnavailable: If the port is taken or nothing can be started.
        """
        self._owner = os.getpid()
        self._stopped = False
        binary = worker_binary()
        try:
            self._reservation = reserve_port(port or 0)
        except OSError as error:
            raise WorkerUnavailable(
                f"localhost:{port}", f"was not started: {error.strerror}."
            ) from error
        port = self._reservation.getsockname()[1]
        self.address = f"localhost:{port}"
        command = [binary, f"--port={port}"]
        if max_concurrent_computation_calls is not None:
            command.append(
                f"--max_concurrent_computation_calls={max_concurrent_computation_calls}"
            )
        environment = dict(os.environ)
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
        for name, value in memory.ENVIRONMENT.items():
            environment.setdefault(name, value)
        if threads is not None:
            environment.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                supervisor.__file__,
                str(os.getpid()),
                *command,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        with cast(IO[bytes], self._process.stdout) as pipe:
            ready, _, _ = select.select([pipe], [], [], _STOP_SECONDS)
            line = pipe.readline() if ready else b""
        if not line.strip():
            unavailable = WorkerUnavailable(
                self.address, f"was not started. {self.log_tail()}"
            )
            self.stop()
            raise unavailable
        self.pid = int(line)

    def listening(self) -> None:
        """Says that the worker holds its port itself by now."""
        self._reservation.close()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def cpu_seconds(self) -> float | None:
        """Returns the processor time the worker has used, in seconds."""
        # Of the clock that clock_getcpuclockid(3) makes of a process id, in
        # less time than reading /proc takes, twice for each worker and round.
        with contextlib.suppress(OSError):
            return time.clock_gettime(~self.pid << 3 | 2)
        return None

    def log_tail(self) -> str:
        """Returns how the process ended, and the end of its output."""
        # A broken connection may be noticed before the end of the process.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LOG_WAIT_SECONDS)
        code = self._process.poll()
        if code is None:
            ending = "It is running."
        elif code > 128:
            ending = f"It was ended by signal {code - 128}."
        else:
            ending = f"It ended with status {code}."
        try:
            size = os.fstat(self._log.fileno()).st_size
            start = max(0, size - _LOG_TAIL_BYTES)
            output = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, start)
        except (OSError, ValueError):
            return ending
        text = output.decode(errors="replace").strip()
        return f"{ending} Its last output:\n{text}" if text else ending

    def stop(self) -> None:
        """Ends the process and waits for it. May be called again."""
        if os.getpid() != self._owner:
            return  # A forked child does not end its parent's worker.
        if self._stopped:
            return
        self._stopped = True
        self._reservation.close()
        stdin = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(OSError):
            stdin.write(b"\n")
        with contextlib.suppress(OSError):
            stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # The supervisor is stopped or swapped out: its death is its
            # worker's.
            self._process.kill()
            self._process.wait(_STOP_SECONDS)
        self._log.close()
