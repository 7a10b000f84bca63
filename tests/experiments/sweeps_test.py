"""Sweeps: what a configuration asks for, and going on with it."""

from __future__ import annotations

import csv
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from tfdp_fl.experiments import run_directory, sweeps, training

_CONFIG = {
    "base": {
        "dataset": "digits",
        "num_clients": 20,
        # All of them: to count what is not amplified takes no time.
        "clients_per_round": 20,
        "model": "linear",
        "rounds": 2,
    },
    "grid": {"mechanism": ["fixed"]},
    "seeds": [0, 1],
}


class ExpandTest(absltest.TestCase):
    def test_grid_times_seeds(self):
        trials = sweeps.expand(
            {
                "base": {"rounds": 5},
                "grid": {"mechanism": ["fixed", "none"], "batch_size": [5, 7]},
                "seeds": [3, 4],
            }
        )
        self.assertLen(trials, 8)
        self.assertEqual(trials[3].name, "mechanism=fixed,batch_size=7")
        self.assertEqual(trials[3].directory, "mechanism=fixed,batch_size=7/seed=4")
        self.assertEqual(trials[3].settings.rounds, 5)
        self.assertEqual(trials[3].settings.batch_size, 7)
        self.assertEqual(trials[3].settings.seed, 4)

    def test_a_bad_run_is_refused_before_any_is_run(self):
        with self.assertRaisesRegex(ValueError, "clip_norm=3.*no parameter"):
            sweeps.expand({"grid": {"clip_norm": [3.0]}})
        with self.assertRaisesRegex(ValueError, "part must be one of"):
            sweeps.expand({"seed": 3})
        with self.assertRaisesRegex(ValueError, "the same"):
            sweeps.expand({"seeds": [1, 1]})


class RunSweepTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.said = []

    def _sweep(self, config):
        return sweeps.run_sweep(config, self.folder, say=self.said.append)

    def test_a_sweep_goes_on_where_it_was_cut_short(self):
        self.assertEqual(self._sweep(_CONFIG), [])
        rows = list(csv.DictReader((self.folder / "runs.csv").open()))
        self.assertEqual(
            [(row["mechanism"], row["seed"]) for row in rows],
            [("fixed", "0"), ("fixed", "1")],
        )
        summary = list(csv.DictReader((self.folder / "summary.csv").open()))
        self.assertLen(summary, 1)
        self.assertAlmostEqual(
            float(summary[0]["accuracy"]),
            (float(rows[0]["accuracy"]) + float(rows[1]["accuracy"])) / 2,
            places=5,
        )
        self.assertLessEqual(float(summary[0]["epsilon"]), 8.0)
        self.assertEqual(summary[0]["delta"], rows[0]["delta"])
        # Nobody but a local mechanism has two epsilons.
        self.assertEqual(summary[0]["central_epsilon"], "")

        lost = self.folder / "mechanism=fixed" / "seed=1"
        accuracy = rows[1]["accuracy"]
        (lost / run_directory.RESULT).unlink()
        with mock.patch.object(training, "run", wraps=training.run) as run:
            self.assertEqual(self._sweep(_CONFIG), [])
        run.assert_called_once()
        again = list(csv.DictReader((self.folder / "runs.csv").open()))
        self.assertLen(again, 2)
        # The same seed, the same run.
        self.assertEqual(again[1]["accuracy"], accuracy)

        changed = {**_CONFIG, "base": {**_CONFIG["base"], "batch_size": 4}}
        with self.assertRaisesRegex(ValueError, "batch_size=10"):
            self._sweep(changed)

    def test_local_runs_have_the_central_epsilon_too(self):
        local = {"rounds": 2, "clients_per_round": "all"}
        config = {
            "base": {**_CONFIG["base"], **local},
            "grid": {"mechanism": ["local"]},
        }
        self.assertEqual(self._sweep(config), [])
        (row,) = csv.DictReader((self.folder / "summary.csv").open())
        self.assertLess(float(row["central_epsilon"]), float(row["epsilon"]))

    def test_a_run_that_fails_does_not_end_the_sweep(self):
        original = training.prepare

        def prepare(settings):
            if settings.mechanism == "fixed":
                raise RuntimeError("out of luck")
            return original(settings)

        with mock.patch.object(training, "prepare", prepare):
            grid = {"mechanism": ["fixed", "none"]}
            failed = self._sweep({**_CONFIG, "grid": grid, "seeds": [0]})
        self.assertEqual(failed, ["mechanism=fixed/seed=0: out of luck"])
        rows = list(csv.DictReader((self.folder / "runs.csv").open()))
        self.assertEqual([row["mechanism"] for row in rows], ["none"])
