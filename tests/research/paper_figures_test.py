"""The figures of papers: what is drawn comes from the runs."""

from __future__ import annotations

import pathlib

import numpy as np
from absl.testing import absltest

from research import paper_figures
from tests.keras import files
from tfdp_fl.experiments.run_directory import Run
from tfdp_fl.experiments.settings import Settings


def _run(seed: int, losses: list[float], **settings) -> Run:
    return Run(
        pathlib.Path("nowhere"),
        Settings(dataset="mnist", seed=seed, **settings),
        {"val_loss": (list(range(1, len(losses) + 1)), losses)},
        {},
    )


class PointsTest(absltest.TestCase):
    def test_the_last_value_of_every_seed_by_setting(self):
        panel = paper_figures.Panel("any", "", "rounds", "target_epsilon")
        runs = [
            _run(seed, [2.0, loss], rounds=rounds, target_epsilon=50)
            for seed, rounds, loss in ((0, 5, 1.0), (1, 5, 0.5), (0, 9, 0.25))
        ]
        self.assertEqual(
            paper_figures.points(panel, runs),
            {50: {5: [1.0, 0.5], 9: [0.25]}},
        )

    def test_every_round_where_x_is_the_round(self):
        panel = paper_figures.Panel("any", "", None, "target_epsilon")
        runs = [
            _run(seed, [2.0, 1.0 + seed], rounds=5, target_epsilon=50)
            for seed in (0, 1)
        ]
        self.assertEqual(
            paper_figures.points(panel, runs),
            {50: {1: [2.0, 2.0], 2: [1.0, 2.0]}},
        )

    def test_runs_without_the_setting_are_left_out(self):
        panel = paper_figures.Panel("any", "", "clip_norm")
        self.assertEqual(
            paper_figures.points(panel, [_run(0, [2.0], rounds=5)]), {}
        )


class QuickTest(absltest.TestCase):
    def test_nbafl(self):
        folder = files.directory(self)
        rng = np.random.default_rng(0)
        images = rng.integers(0, 255, (1000, 28, 28), dtype=np.uint8)
        labels = np.arange(1000, dtype=np.uint8) % 10
        np.savez(
            folder / "mnist.npz",
            x_train=images,
            y_train=labels,
            x_test=images[:50],
            y_test=labels[:50],
        )
        configs = {
            name: paper_figures.read_config(
                name, str(folder / "mnist.npz"), quick=True
            )
            for name in ("nbafl_loss", "nbafl_rounds")
        }
        for config in configs.values():
            config["base"]["examples_per_client"] = 20
            config["grid"]["target_epsilon"] = [50, 100]
        panels = [
            panel
            for panel in paper_figures.FIGURES["nbafl"]
            if panel.sweep in configs
        ]
        path, failed = paper_figures.reproduce(panels, configs, folder / "runs")
        self.assertEmpty(failed)
        self.assertGreater(path.stat().st_size, 5000)

    def test_mnist_needs_its_file(self):
        with self.assertRaisesRegex(ValueError, "data_path"):
            paper_figures.read_config("nbafl_loss", None, quick=True)


if __name__ == "__main__":
    absltest.main()
