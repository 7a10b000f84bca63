"""Flower 1.42 as its users run it, on loopback: SuperLink, SuperNodes, `flwr run`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest

from tests.flower import flower_messages as fm

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_APP = pathlib.Path(__file__).resolve().parent / "keras_app"
_BIN = pathlib.Path(sys.executable).parent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@fm.NEEDS_FLOWER
class RunsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enter_context(
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        )
        self.folder = pathlib.Path(folder)
        self.log = self.enter_context((self.folder / "log").open("w"))

    def _start(self, program, *arguments):
        """Starts one of Flower's programs, which ends with the test."""
        process = subprocess.Popen(
            [str(_BIN / program), *arguments],
            env={
                **os.environ,
                "PATH": f"{_BIN}:{os.environ['PATH']}",
                "PYTHONPATH": str(_ROOT),
                "FLWR_HOME": str(self.folder),
                "FLWR_TELEMETRY_ENABLED": "0",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            },
            cwd=self.folder,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.addCleanup(self._end, process)
        return process

    def _end(self, process):
        """Ends a program and what it started."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)

    def _until(self, condition, seconds):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                self.fail((self.folder / "log").read_text()[-6000:])
            time.sleep(0.2)

    def _listens(self, port):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def test_a_superlink_with_two_supernodes(self):
        port = _free_port()
        (self.folder / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        self._start(
            "flower-superlink",
            "--insecure",
            "--disable-runtime-dependency-installation",
            "--port",
            str(port),
        )
        self._until(lambda: self._listens(port), 60)
        for number in range(2):
            self._start(
                "flower-supernode",
                "--insecure",
                "--superlink",
                f"127.0.0.1:{port}",
                "--port",
                str(_free_port()),
                "--node-config",
                f"partition-id={number} num-partitions=2",
            )
        # One sends a NaN, past the mod; then it drops out, and the other claims,
        # past the mod, a thousand million examples.
        hostile = "nan@1=0 bare@1=0 gone@2=0 heavy@2=1 bare@2=1"
        path = self.folder / "report.json"
        config = f'hostile="{hostile}" report="{path}"'
        self._start("flwr", "run", str(_APP), "here", "--run-config", config)
        self._until(lambda: path.exists() and path.read_text().endswith("}"), 240)
        report = json.loads(path.read_text())
        self.assertEqual(report["replies"], {"1": 2, "2": 1})
        self.assertEqual((report["discarded"], report["rejected"]), (1, 0))
        # S / m twice, whatever the other client sends, and noise of 0.025.
        self.assertBetween(report["norm"], 0.5, 1.05)
        self.assertFalse(report["tensorflow"])
