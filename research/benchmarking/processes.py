"""A process for each side of a comparison, asked one question after another.

Sides take turns, so that a drift of the machine's speed meets them alike; the
one that is not asked is idle.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pathlib
import pkgutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing import connection
from typing import Any

from research.benchmarking import machine

# The class of each kind of side, imported by its own process alone.
_CLASSES = {
    "engine": "research.benchmarking.engine_side:EngineSide",
    "tff": "research.benchmarking.tff_side:TFFSide",
    "growth": "research.benchmarking.growth:GrowthSide",
}
_STOP_SECONDS = 5.0
_TAIL_CHARACTERS = 1500


class SideError(RuntimeError):
    """A side could not answer, or not in time."""


class Side:
    """A child process that holds one object and calls its methods.

    The child and whatever it starts are a process group of their own, which
    is ended with the side.
    """

    def __init__(
        self,
        kind: str,
        options: Mapping[str, Any] | None = None,
        python: str = sys.executable,
    ):
        """Starts the process.

        Args:
          kind: Which object, a key of `_CLASSES`.
          options: JSON values that it is made with.
          python: The interpreter that runs it.
        """
        self.kind = kind
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # A child that was started in another folder finds this package too.
        root = str(pathlib.Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._pipe, theirs = multiprocessing.Pipe()
        asked = [str(theirs.fileno()), kind, json.dumps(dict(options or {}))]
        self._process = subprocess.Popen(
            [python, "-m", "research.benchmarking.processes", *asked],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
            start_new_session=True,
        )
        theirs.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *unused: Any) -> None:
        self.close()

    def call(self, method: str, timeout: float = 300.0, **arguments: Any) -> Any:
        """Calls a method of the side's object.

        Args:
          method: Its name.
          timeout: Seconds after which the side is given up.
          **arguments: Its arguments, plain values.

        Raises:
          SideError: The method raised, there was no answer in time, or the process
            ended.
        """
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(timeout):
                self.close()
                raise SideError(f"{self.kind}.{method} took more than {timeout:.0f} s.")
            result, error = self._pipe.recv()
        except (EOFError, OSError):
            tail = self._log_tail()
            self.close()
            raise SideError(f"The process of {self.kind} ended.\n{tail}") from None
        if error:
            raise SideError(f"{self.kind}.{method}: {error}")
        return result

    def _log_tail(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        return text[-_TAIL_CHARACTERS:]

    def close(self) -> None:
        """Ends the process and all that it started. May be called again."""
        if self._pipe.closed:
            return
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It ends by itself, unless it is busy.
            self._process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def _serve(pipe: connection.Connection, kind: str, options: dict[str, Any]) -> None:
    """Answers a side's questions with (result, error) until it ends."""
    target: Any = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if target is None:
                target = pkgutil.resolve_name(_CLASSES[kind])(**options)
            answer = getattr(target, method)(**arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        pipe.send(answer)


def main() -> None:
    """Serves, and leaves nothing running."""
    number, kind, options = sys.argv[1:]
    # What is started from here must not hold the pipe.
    os.set_inheritable(int(number), False)
    try:
        _serve(connection.Connection(int(number)), kind, json.loads(options))
    finally:
        machine.end(machine.children())
    # TFF's threads wait for a worker that is gone.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
