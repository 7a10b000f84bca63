"""`kill -9` at every point of a round with correlated noise."""

from __future__ import annotations

import multiprocessing
import pathlib
import signal

import numpy as np
from absl.testing import absltest, parameterized

from tests.keras import files, killed_correlated_run, toy
from tfdp_fl import accounting

_LONGEST_SECONDS = 600
# Where a process dies: the point, the round (counted from 0), and how many
# rounds were charged and saved by then.
_DEATHS = (
    ("collected", 4, 4, 4),
    ("charged", 4, 5, 4),
    ("released", 4, 5, 4),
    ("seen", 4, 5, 4),
    ("half a checkpoint", 5, 6, 4),
    ("saved", 5, 6, 6),
)


class CorrelatedKillTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # Forked from one process that has imported everything, once.
        cls.context = multiprocessing.get_context("forkserver")
        cls.context.set_forkserver_preload(["tests.keras.killed_correlated_run"])

    def _run(self, directory, name, point=None, round_index=0):
        process = self.context.Process(
            target=killed_correlated_run.run,
            args=(str(directory), name, point, round_index),
        )
        process.start()
        process.join(_LONGEST_SECONDS)
        return process.exitcode

    def _noise(self, directory: pathlib.Path, name: str) -> dict:
        """Returns the noise of each round that could be seen, by round."""
        start = np.concatenate([np.ravel(w) for w in toy.dense().get_weights()])
        models = {-1: start}
        for file in directory.glob("*-*.npy"):
            process, number = file.stem.split("-")
            if process == "first" or process == name:
                models.setdefault(int(number), np.load(file))
        # The second process goes on from a model of the first.
        own = {
            int(file.stem.split("-")[1]): np.load(file)
            for file in directory.glob(f"{name}-*.npy")
        }
        scale = (
            killed_correlated_run.COHORT
            / killed_correlated_run.CLIP
            / killed_correlated_run.NOISE
        )
        return {
            number: scale * (model - own.get(number - 1, models[number - 1]))
            for number, model in own.items()
        }

    @parameterized.parameters(*_DEATHS)
    def test_what_was_seen_is_charged_and_the_noise_goes_on_right(
        self, point, round_index, charged, saved
    ):
        path = files.directory(self) / "run"
        path.mkdir()
        code = self._run(path, "first", point, round_index)
        self.assertEqual(code, -signal.SIGKILL)
        contents = accounting.PrivacyLedger.read(path / "ledger.jsonl")
        self.assertLen(contents.entries, charged)
        first = self._noise(path, "first")
        self.assertLessEqual(len(first), charged)
        if point in ("seen", "half a checkpoint", "saved"):
            self.assertLen(first, round_index + 1)

        self.assertEqual(self._run(path, "second"), 0)
        second = self._noise(path, "second")
        rounds = killed_correlated_run.ROUNDS
        self.assertEqual(sorted(second), list(range(saved, rounds)))
        generator = killed_correlated_run.mechanism().generator
        squares = (generator.charges / killed_correlated_run.NOISE) ** 2
        end = np.load(path / "end.npz")
        if charged == saved:  # Nothing is lost: one segment.
            segment = [first[t] for t in range(saved)]
            spent = squares.sum()
        else:
            segment = []
            spent = squares[:charged].sum() + squares[: rounds - saved].sum()
        segment += [second[t] for t in range(saved, rounds)]
        self.assertAlmostEqual(float(end["spent"]), spent)
        ledger = accounting.PrivacyLedger.read(path / "ledger.jsonl")
        self.assertAlmostEqual(
            sum(each.charge.noise_multiplier**-2 for each in ledger.entries),
            spent,
        )
        self.assertEqual(int(end["position"]), len(segment))
        # The buffers hold the noise of the segment, all of it and no other.
        buffers = np.zeros_like(end["buffers"])
        for noise in segment:
            buffers = generator.theta[:, None] * buffers + noise
        np.testing.assert_allclose(end["buffers"], buffers, atol=1e-3)
        self.assertGreater(np.abs(end["buffers"]).max(), 0.1)
        # A round that is run again has a draw of its own.
        for t in set(first) & set(second):
            alike = np.corrcoef(first[t], second[t])[0, 1]
            self.assertLess(abs(alike), 0.99)


if __name__ == "__main__":
    absltest.main()
