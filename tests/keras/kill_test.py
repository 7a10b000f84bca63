"""`kill -9` at random moments: the ledger holds, and the run is finished."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time

import h5py
import numpy as np
from absl.testing import absltest, parameterized

from tests.keras import files, killed_run
from tfdp_fl import accounting

# TFDP_FL_KILLS=50 for the full number.
_KILLS = int(os.environ.get("TFDP_FL_KILLS", "5"))
_LONGEST_SECONDS = 600


def _weights(path) -> list[np.ndarray]:
    found = []
    with h5py.File(path) as file:
        file.visititems(
            lambda _, item: (
                found.append(item[()])
                if isinstance(item, h5py.Dataset)
                else None
            )
        )
    return found


class KillTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # Forked from one process that has imported everything, once.
        cls.context = multiprocessing.get_context("forkserver")
        cls.context.set_forkserver_preload(["tests.keras.killed_run"])

    def setUp(self):
        super().setUp()
        self.root = files.directory(self)
        self.witness = self.root / "witness.txt"
        self.random = random.Random(2024)

    def _start(self, name: str, mechanism: str):
        started = self.context.Event()
        process = self.context.Process(
            target=killed_run.run,
            args=(str(self.root / name), str(self.witness), mechanism, started),
        )
        process.start()
        return process, started

    def _seen(self) -> list[tuple[int, float]]:
        lines = self.witness.read_text().splitlines()
        return [(int(r), float(e)) for r, e in map(str.split, lines)]

    def _check_ledger(self) -> int:
        """Checks the ledger against what was seen; returns its rounds."""
        path = self.root / "run" / "ledger.jsonl"
        if not path.exists():  # Killed before there was anything to see.
            self.assertFalse(self.witness.exists() and self._seen())
            return 0
        contents = accounting.PrivacyLedger.read(path)
        seen = self._seen() if self.witness.exists() else []
        self.assertGreaterEqual(len(contents.entries), len(seen))
        if seen:
            epsilon = contents.epsilon(killed_run.DELTA)
            self.assertGreaterEqual(
                epsilon * (1 + 1e-9), max(each for _, each in seen)
            )
        return len(contents.entries)

    @parameterized.parameters("adaptive", "local")
    def test_ledger_holds_and_the_run_is_finished(self, mechanism):
        kills = (_KILLS + 1) // 2
        process, started = self._start("whole", mechanism)
        self.assertTrue(started.wait(_LONGEST_SECONDS))
        begun = time.monotonic()
        process.join(_LONGEST_SECONDS)
        self.assertEqual(process.exitcode, 0)
        length = time.monotonic() - begun
        self.witness.unlink()
        killed = in_training = attempts = 0
        while killed < kills and attempts < 4 * kills:
            attempts += 1
            process, started = self._start("run", mechanism)
            if self.random.random() < 0.8:
                # Somewhere in the rounds; else before them, or in tracing.
                started.wait(_LONGEST_SECONDS)
            time.sleep(self.random.random() * 2 * length / kills)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(_LONGEST_SECONDS)
            if process.exitcode == -signal.SIGKILL:
                killed += 1
                in_training += started.is_set()
                self._check_ledger()
            elif process.exitcode == 0:
                break
            else:
                self.fail(f"exit code {process.exitcode}")
        self.assertGreaterEqual(killed, 1)
        process, _ = self._start("run", mechanism)
        process.join(_LONGEST_SECONDS)
        self.assertEqual(process.exitcode, 0)
        charged = self._check_ledger()
        self.assertGreaterEqual(charged, killed_run.ROUNDS)
        self.assertEqual(
            {each for each, _ in self._seen()}, set(range(killed_run.ROUNDS))
        )
        print(
            f"{mechanism}: {killed} kills, {in_training} of them after the "
            f"first round; {charged} rounds charged for {killed_run.ROUNDS}"
        )
        for one, other in zip(
            _weights(self.root / "whole" / "final.weights.h5"),
            _weights(self.root / "run" / "final.weights.h5"),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)


if __name__ == "__main__":
    absltest.main()
