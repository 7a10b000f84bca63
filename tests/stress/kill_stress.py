"""50 kills at random moments in each mode: nothing released is uncharged.

A planted fault that this found: a ledger that writes each line one round late.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pathlib
import random
import signal
import time

import numpy as np
from absl.testing import absltest, parameterized

from tests.keras import files, toy
from tests.stress import killed_run
from tfdp_fl import accounting
from tfdp_fl.experiments import run_directory
from tfdp_fl.keras import checkpoint

_RAY = importlib.util.find_spec("ray")
_KILLS = int(os.environ.get("TFDP_FL_KILLS", "50"))


def _weights(directory: pathlib.Path) -> list[np.ndarray]:
    fed = toy.federated()
    fed.load_weights(directory / killed_run.FINAL)
    return fed.get_weights()


class KillTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # Forked from one process that has imported everything, once.
        cls.context = multiprocessing.get_context("forkserver")
        cls.context.set_forkserver_preload(["tests.stress.killed_run"])

    def setUp(self):
        super().setUp()
        self.root = files.directory(self)
        self.random = random.Random(16)

    def _witness(self, directory: pathlib.Path, mode: str) -> pathlib.Path:
        if mode == "plain":  # It empties its directory.
            name = f"{directory.name}-{killed_run.WITNESS}"
            return directory.parent / name
        return directory / killed_run.WITNESS

    def _seen(self, directory: pathlib.Path, mode: str) -> dict[int, float]:
        """Returns what an outsider has seen: rounds, and epsilon by then."""
        path = self._witness(directory, mode)
        if not path.exists():
            return {}
        lines = path.read_text().splitlines()
        return {int(r): float(e) for r, e in map(str.split, lines)}

    def _start(self, directory: pathlib.Path, mode: str):
        directory.mkdir(exist_ok=True)
        process = self.context.Process(
            target=killed_run.run, args=(str(directory), mode)
        )
        process.start()
        return process

    def _kill(self, directory: pathlib.Path, mode: str) -> bool:
        """Kills a run at a random moment; False if it was faster."""
        seen = len(self._seen(directory, mode))
        rounds = seen + self.random.randrange(8)
        process = self._start(directory, mode)
        if self.random.random() < 0.15:  # As it starts, resumes or traces.
            time.sleep(self.random.random() * 3)
        else:
            while process.is_alive() and len(self._seen(directory, mode)) < rounds:
                time.sleep(0.002)
            time.sleep(self.random.random() * 0.03)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        killed_run.join(process)
        self.assertIn(process.exitcode, (0, -signal.SIGKILL))
        return process.exitcode != 0

    def _check(self, directory: pathlib.Path, mode: str, kills: int) -> int:
        """Checks every file; returns how many rounds are charged.

        Args:
          directory: Of the run.
          mode: The mode.
          kills: How often the run was killed up to now.
        """
        seen = self._seen(directory, mode)
        charged = 0
        for path in killed_run.ledgers(directory, mode):
            if not path.exists():  # Killed before there was anything to see.
                self.assertEmpty(seen)
                continue
            contents = accounting.PrivacyLedger.read(path)
            charged = len(contents.entries)
            # No released round is uncharged, and at most one a kill was
            # charged and not seen.
            lines = len(self._witness(directory, mode).read_text().splitlines())
            self.assertBetween(charged - lines, 0, kills)
            uncharged = set(seen) - {e.round_index for e in contents.entries}
            self.assertEmpty(uncharged)
            told = contents.epsilon(killed_run.DELTA) * (1 + 1e-9)
            self.assertGreaterEqual(told, max(seen.values(), default=0.0))
        saved = directory / killed_run.CHECKPOINTS
        if mode == "plain":
            saved = directory / run_directory.CHECKPOINT
        if any(saved.glob("round-*.npz")):
            checkpoint.CheckpointDirectory(saved).newest()
        if mode == "plain" and (directory / run_directory.CONFIG).exists():
            run_directory.Run.read(directory)
        return charged

    @parameterized.parameters(*killed_run.MODES)
    def test_every_released_round_is_charged(self, mode):
        if mode == "workers" and _RAY is None:
            self.skipTest("Ray is not installed.")
        killed, runs, charged, seen, whole = 0, 0, 0, 0, None
        if mode in killed_run.SAME:
            whole = self.root / "whole"
            killed_run.join(self._start(whole, mode))
        while killed < _KILLS:
            directory = self.root / f"run-{runs}"
            runs += 1
            own = 0
            while killed < _KILLS and self._kill(directory, mode):
                killed, own = killed + 1, own + 1
                self._check(directory, mode, own)
                if not killed_run.resumes(mode):
                    break
            if killed_run.resumes(mode):
                process = self._start(directory, mode)
                killed_run.join(process)
                self.assertEqual(process.exitcode, 0)
                self.assertEqual(
                    set(self._seen(directory, mode)),
                    set(range(killed_run.ROUNDS)),
                )
            if whole is not None:
                for one, other in zip(*map(_weights, (whole, directory)), strict=True):
                    np.testing.assert_array_equal(one, other)
            charged += self._check(directory, mode, own)
            seen += len(self._seen(directory, mode))
        self.assertGreater(seen, 0)
        print(
            f"{mode}: {killed} kills in {runs} runs, {charged} rounds charged, "
            f"{seen} released"
        )


if __name__ == "__main__":
    absltest.main()
