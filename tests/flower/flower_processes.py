"""Flower's own processes on loopback: SuperLink, SuperNodes, `flwr run`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_APP = pathlib.Path(__file__).resolve().parent / "keras_app"
_BIN = pathlib.Path(sys.executable).parent
_PR_SET_CHILD_SUBREAPER = 36


class Federation:
    """A SuperLink and what belongs to it; all of it ends with the block."""

    def __init__(self, folder: str | os.PathLike[str], simulation: bool):
        self._folder = pathlib.Path(folder)
        self._simulation = simulation
        self._port = _free_port()
        self._logs: list[Any] = []
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> Federation:
        # Whom Flower leaves behind becomes a child of this process.
        _subreaper(1)
        (self._folder / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self._port}"\ninsecure = true\n'
        )
        self._start(
            "flower-superlink",
            "--insecure",
            "--disable-runtime-dependency-installation",
            "--port",
            str(self._port),
            *(["--simulation"] if self._simulation else []),
        )
        self._wait_for_port()
        return self

    def __exit__(self, *exception: Any) -> None:
        for how in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 10
            while (left := _descendants()) and time.monotonic() < deadline:
                for pid in left:
                    _kill(pid, how)
                for process in self._processes:
                    process.poll()
                _reap(left)
                time.sleep(0.3)
        _subreaper(0)
        for log in self._logs:
            log.close()

    def add_node(self, number: int, of: int) -> subprocess.Popen:
        """Starts a SuperNode, which holds one part of the data."""
        return self._start(
            "flower-supernode",
            "--insecure",
            "--superlink",
            f"127.0.0.1:{self._port}",
            "--port",
            str(_free_port()),
            "--node-config",
            f"partition-id={number} num-partitions={of}",
        )

    def run(
        self, timeout: float = 240, federation: str = "", **config: Any
    ) -> dict[str, Any]:
        """Runs the Keras app to its end; returns what it wrote down."""
        report = self._folder / "report.json"
        values = {**config, "report": str(report)}
        words = " ".join(
            f"{name.replace('_', '-')}={json.dumps(value)}"
            for name, value in values.items()
        )
        command = [str(_BIN / "flwr"), "run", str(_APP)]
        command += ["here", "--run-config", words]
        if federation:
            command += ["--federation-config", federation]
        subprocess.run(
            command,
            check=True,
            env=self._environment(),
            cwd=self._folder,
            stdout=self._log(),
            stderr=subprocess.STDOUT,
            timeout=120,
        )
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if report.exists() and report.read_text().endswith("}"):
                return json.loads(report.read_text())
            time.sleep(0.5)
        raise TimeoutError(f"No report within {timeout} s: {self.log()}")

    def log(self) -> str:
        """What the processes said last."""
        texts = [p.read_text()[-6000:] for p in self._folder.glob("*.log")]
        return "\n".join(texts)

    def _start(self, program: str, *arguments: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [str(_BIN / program), *arguments],
            env=self._environment(),
            cwd=self._folder,
            stdout=self._log(),
            stderr=subprocess.STDOUT,
        )
        self._processes.append(process)
        return process

    def _log(self) -> Any:
        path = self._folder / f"{len(self._logs)}.log"
        self._logs.append(path.open("w"))
        return self._logs[-1]

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{_BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(_ROOT),
            "FLWR_HOME": str(self._folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "RAY_ENABLE_METRICS_COLLECTION": "0",
        }

    def _wait_for_port(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"The SuperLink does not listen: {self.log()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _subreaper(value: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0)


def descendants_of(pid: int) -> list[int]:
    """Returns the process's children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, rest = [], [pid]
    while rest:
        rest = [child for parent in rest for child in children.get(parent, [])]
        found.extend(rest)
    return found


def _descendants() -> list[int]:
    return descendants_of(os.getpid())


def _kill(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


def _reap(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError, PermissionError):
            os.waitpid(pid, os.WNOHANG)
