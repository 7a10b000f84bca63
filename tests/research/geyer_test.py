"""The table of Geyer et al.: what stands in it comes from the runs."""

from __future__ import annotations

import pathlib

import numpy as np
from absl.testing import absltest

from research import reproduce_geyer as geyer
from tests.keras import files
from tfdp_fl.experiments import run_directory, sweeps
from tfdp_fl.experiments.settings import Settings


def _mnist(folder: pathlib.Path) -> pathlib.Path:
    rng = np.random.default_rng(0)
    path = folder / "mnist.npz"
    np.savez(
        path,
        x_train=rng.integers(0, 255, (400, 28, 28), dtype=np.uint8),
        y_train=np.arange(400, dtype=np.uint8) % 10,
        x_test=rng.integers(0, 255, (50, 28, 28), dtype=np.uint8),
        y_test=np.arange(50, dtype=np.uint8) % 10,
    )
    return path


class GeyerTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = files.directory(self)

    def _write_run(self, name, seed, accuracy, mechanism="fixed", k=100, caveats=()):
        path = self.folder / name / "base" / f"seed={seed}"
        path.mkdir(parents=True)
        settings = Settings(
            dataset="mnist", num_clients=k, mechanism=mechanism, seed=seed
        ).resolved()
        run_directory.write_json(path / run_directory.CONFIG, settings.to_dict())
        (path / run_directory.HISTORY).write_text(
            "round,val_accuracy,cohort_size,between_client_variance,"
            "update_scale\n1,0.5,40,2e-5,1e-4\n2,0.75,61,3e-5,2e-5\n"
        )
        run_directory.write_json(
            path / run_directory.STATEMENT_JSON,
            {"caveats": dict.fromkeys(caveats, "...")},
        )
        run_directory.write_json(
            path / run_directory.RESULT,
            {
                "accuracy": accuracy,
                "num_clients": k,
                "rounds": 2,
                "delta": 1e-3,
                "epsilon_rdp": 7.5 + seed,
                "epsilon_pld": 7.0,
                "seconds": 90.0,
            },
        )

    def test_means_sums_and_the_worst_epsilon(self):
        self._write_run("k100_best_honest", 0, 0.8)
        self._write_run("k100_best_honest", 1, 0.9)
        self._write_run("k100_non_private", 0, 0.97, "none")
        table = geyer.write_results(self.folder)
        baseline, best = table.splitlines()[2:4]
        self.assertIn("0.9700 (0.97) | 2 (380) | 101 (38000) | – | – | –", baseline)
        self.assertIn("0.8500 ± 0.0707 | 2 | 101 | 0.001 | 8.500 | 7.000", best)
        self.assertEqual((self.folder / "table1.md").read_text(), table)
        runs = (self.folder / "runs.csv").read_text().splitlines()
        self.assertLen(runs, 4)
        self.assertIn("100,non private,0,0.97,2,101", runs[1])

    def test_what_epsilon_does_not_cover_is_what_the_statements_say(self):
        self._write_run("k100_non_private", 0, 0.97, "none")
        self._write_run(
            "k100_as_published", 0, 0.8, caveats=["exact_median", "seed_given"]
        )
        self._write_run("k100_best_honest", 0, 0.8, caveats=["seed_given"])
        table = geyer.write_results(self.folder)
        self.assertIn("Caveats of every private row: seed given.", table)
        (published,) = [x for x in table.split("\n") if "as published" in x]
        (best,) = [x for x in table.split("\n") if "best honest" in x]
        self.assertIn("| exact median |", published)
        self.assertNotIn("exact median", best)

    def test_every_configuration_is_geyers_setting(self):
        path = _mnist(self.folder)
        configs = {name: geyer.read_config(name, path) for name in geyer.names()}
        deltas = {100: 1e-3, 1000: 1e-5, 10000: 1e-6}
        for name, config in configs.items():
            for trial in sweeps.expand(config):
                chosen = trial.settings
                k = int(name.split("_")[0][1:])
                self.assertEqual(chosen.dataset, "mnist")
                self.assertEqual(chosen.num_clients, k)
                self.assertEqual(chosen.examples_per_client, 600)
                self.assertEqual(chosen.shards_per_client, 2)
                self.assertEqual(chosen.validation_examples, 0)
                if name == "k100_non_private":
                    continue
                self.assertEqual(chosen.target_epsilon, 8)
                self.assertEqual(chosen.target_delta, deltas[k])
                exact = chosen.median_noise_multiplier == "exact"
                self.assertEqual(exact, "as_published" in name)
            seeds = 1 if k == 10000 else 3
            if name.endswith("public_features"):
                seeds = 3 if k == 10000 else 5
            self.assertLen(config["seeds"], seeds)
