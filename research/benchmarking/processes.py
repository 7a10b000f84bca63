"""A process for each side of a comparison, asked one question after another.

Sides take turns, so that a drift of the machine's speed meets them alike; the
one that is not asked is idle.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

_STOP_SECONDS = 5.0
_TAIL_CHARACTERS = 1500


class SideError(RuntimeError):
    """A side could not answer."""


class SideTimeoutError(SideError):
    """A side did not answer in time; it was ended."""


class Side:
    """A child process that holds one object and calls its methods.

    The child and whatever it starts are a process group of their own, which
    is ended with the side.
    """

    def __init__(
        self,
        kind: str,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ):
        """Starts the process.

        Args:
          kind: Which object, see `child.make`.
          options: JSON values that it is made with.
          environment: Variables set in the child.
          python: The interpreter that runs it.
        """
        self.kind = kind
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # A child that was started in another folder finds this package too.
        root = str(pathlib.Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [
                python,
                "-m",
                "research.benchmarking.child",
                kind,
                json.dumps(dict(options or {})),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                **(environment or {}),
            },
            start_new_session=True,
            bufsize=0,
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *unused: Any) -> None:
        self.close()

    def call(self, method: str, timeout: float = 300.0, **arguments: Any):
        """Calls a method of the side's object.

        Args:
          method: Its name.
          timeout: Seconds after which the side is given up.
          **arguments: JSON values.

        Raises:
          SideTimeoutError: There was no answer in time.
          SideError: The method raised, or the process ended.
        """
        question = json.dumps({"method": method, "arguments": arguments})
        try:
            self._process.stdin.write(question.encode() + b"\n")
            line = self._read_line(time.monotonic() + timeout)
        except (BrokenPipeError, ValueError):
            line = b""
        if line is None:
            self.close()
            raise SideTimeoutError(
                f"{self.kind}.{method} took more than {timeout:.0f} s."
            )
        if not line:
            tail = self._log_tail()
            self.close()
            raise SideError(f"The process of {self.kind} ended.\n{tail}")
        answer = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.kind}.{method}: {answer['error']}")
        return answer["result"]

    def _read_line(self, deadline: float) -> bytes | None:
        line = b""
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._process.stdout], [], [], left)
            if not ready:
                return None
            piece = self._process.stdout.read(65536)
            if not piece:
                return b""
            line += piece
        return line

    def _log_tail(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        return text[-_TAIL_CHARACTERS:]

    def close(self) -> None:
        """Ends the process and all that it started. May be called again."""
        if self._process.stdin.closed:
            return
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It ends by itself, unless it is busy.
            self._process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._log.close()
