"""`kill -9` at random moments: the ledger holds, and the run is finished."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
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
                found.append(item[()]) if isinstance(item, h5py.Dataset) else None
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
        self.random = random.Random(2024)

    def _start(self, directory: pathlib.Path, mechanism: str):
        directory.mkdir(exist_ok=True)
        process = self.context.Process(
            target=killed_run.run, args=(str(directory), mechanism)
        )
        process.start()
        return process

    def _finish(self, directory: pathlib.Path, mechanism: str) -> None:
        process = self._start(directory, mechanism)
        process.join(_LONGEST_SECONDS)
        self.assertEqual(process.exitcode, 0)

    def _seen(self, directory: pathlib.Path) -> list[tuple[int, float]]:
        """Returns what an outsider has seen: rounds, and epsilon by then."""
        witness = directory / killed_run.WITNESS
        if not witness.exists():
            return []
        lines = witness.read_text().splitlines()
        return [(int(r), float(e)) for r, e in map(str.split, lines)]

    def _check_ledger(self, directory: pathlib.Path) -> int:
        """Checks the ledger against what was seen; returns its rounds."""
        seen = self._seen(directory)
        path = directory / "ledger.jsonl"
        if not path.exists():  # Killed before there was anything to see.
            self.assertEmpty(seen)
            return 0
        contents = accounting.PrivacyLedger.read(path)
        self.assertGreaterEqual(len(contents.entries), len(seen))
        if seen:
            self.assertGreaterEqual(
                contents.epsilon(killed_run.DELTA) * (1 + 1e-9),
                max(epsilon for _, epsilon in seen),
            )
        return len(contents.entries)

    def _kill(self, directory: pathlib.Path, mechanism: str) -> bool:
        """Kills a run at a random moment; False if it was faster."""
        moment = self.random.random()
        rounds = len(self._seen(directory)) + self.random.randrange(8)
        process = self._start(directory, mechanism)
        if moment < 0.1:  # While it starts, reads its checkpoint or traces.
            time.sleep(self.random.random() * 2)
        else:
            while process.is_alive() and len(self._seen(directory)) < rounds:
                time.sleep(0.002)
            time.sleep(self.random.random() * 0.02)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join(_LONGEST_SECONDS)
        self.assertIn(process.exitcode, (0, -signal.SIGKILL))
        return process.exitcode != 0

    @parameterized.parameters("adaptive", "local")
    def test_ledger_holds_and_the_run_is_finished(self, mechanism):
        kills = _KILLS // 2 + (_KILLS % 2 and mechanism == "adaptive")
        whole = self.root / "whole"
        self._finish(whole, mechanism)
        killed = charged = runs = 0
        while killed < kills:
            directory = self.root / f"run-{runs}"
            runs += 1
            while killed < kills and self._kill(directory, mechanism):
                killed += 1
                self._check_ledger(directory)
            self._finish(directory, mechanism)
            charged += self._check_ledger(directory)
            self.assertEqual(
                {each for each, _ in self._seen(directory)},
                set(range(killed_run.ROUNDS)),
            )
            for one, other in zip(
                _weights(whole / killed_run.FINAL),
                _weights(directory / killed_run.FINAL),
                strict=True,
            ):
                np.testing.assert_array_equal(one, other)
        print(
            f"{mechanism}: {killed} kills in {runs} runs; {charged} rounds "
            f"charged for {runs * killed_run.ROUNDS}"
        )


if __name__ == "__main__":
    absltest.main()
