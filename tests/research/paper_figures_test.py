"""The figures of papers: what is drawn comes from the runs."""

from __future__ import annotations

import pathlib

import numpy as np
from absl.testing import absltest, parameterized

from research import paper_figures
from tests.keras import files
from tfdp_fl.experiments import sweeps
from tfdp_fl.experiments.run_directory import Run
from tfdp_fl.experiments.settings import Settings


def _run(seed: int, losses: list[float], **settings) -> Run:
    return Run(
        pathlib.Path("nowhere"),
        Settings(dataset="mnist", seed=seed, **settings),
        {"val_loss": (list(range(1, len(losses) + 1)), losses)},
        {},
    )


def _points(x: str, runs: list[Run], best_of: str | None = None, **where):
    line = paper_figures.Line("any", x, where, ("any",), best_of)
    return paper_figures.points(line, runs, "val_loss")


class PointsTest(absltest.TestCase):
    def test_the_last_value_of_every_seed_by_setting(self):
        runs = [
            _run(seed, [2.0, loss], rounds=rounds)
            for seed, rounds, loss in ((0, 5, 1.0), (1, 5, 0.5), (0, 9, 0.25))
        ]
        self.assertEqual(_points("rounds", runs), {5: [1.0, 0.5], 9: [0.25]})

    def test_every_round_where_x_is_the_round(self):
        runs = [_run(seed, [2.0, 1.0 + seed], rounds=5) for seed in (0, 1)]
        self.assertEqual(
            _points(paper_figures.ROUND, runs), {1: [2.0, 2.0], 2: [1.0, 2.0]}
        )

    def test_a_level_is_of_all_runs_or_by_what_the_best_is_of(self):
        runs = [_run(0, [value], rounds=value) for value in (5, 9)]
        self.assertEqual(_points(paper_figures.LEVEL, runs), {None: [5, 9]})
        self.assertEqual(_points(paper_figures.LEVEL, runs, "rounds"), {5: [5], 9: [9]})

    def test_runs_with_other_settings_are_left_out(self):
        runs = [_run(0, [epsilon], target_epsilon=epsilon) for epsilon in (1, 2)]
        self.assertEqual(
            _points("seed", runs, mechanism="adaptive", target_epsilon=2),
            {0: [2]},
        )
        self.assertEqual(_points("seed", runs, mechanism="fixed"), {})


class FiguresTest(parameterized.TestCase):
    @parameterized.parameters(*paper_figures.FIGURES)
    def test_every_line_has_its_runs_and_no_others(self, name):
        figure = paper_figures.FIGURES[name]
        configs = {
            sweep: paper_figures.read_config(sweep, __file__, quick=False)
            for sweep in figure.sweeps
        }
        runs = {
            sweep: [
                Run(
                    pathlib.Path("nowhere"),
                    trial.settings.for_population(50),
                    {"val_loss": ([1], [1.0]), "val_accuracy": ([1], [1.0])},
                    {},
                )
                for trial in sweeps.expand(config)
            ]
            for sweep, config in configs.items()
        }
        for panel in figure.panels:
            for line in panel.lines:
                with self.subTest(f"{panel.title}: {line.label}"):
                    there = [run for each in line.sweeps for run in runs[each]]
                    found = paper_figures.points(line, there, panel.y)
                    self.assertNotEmpty(found)
                    seeds = {len(configs[x]["seeds"]) for x in line.sweeps}
                    for values in found.values():
                        self.assertIn(len(values), seeds)
                    if line.x not in (paper_figures.ROUND, paper_figures.LEVEL):
                        self.assertGreaterEqual(len(found), 3)


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
            name: paper_figures.read_config(name, str(folder / "mnist.npz"), quick=True)
            for name in ("nbafl_loss", "nbafl_rounds")
        }
        for config in configs.values():
            config["base"]["examples_per_client"] = 20
            config["grid"]["target_epsilon"] = [50, 100]
        panels = [
            panel
            for panel in paper_figures.FIGURES["nbafl"].panels
            if all({*line.sweeps} <= {*configs} for line in panel.lines)
        ]
        self.assertLen(panels, 2)
        figure = paper_figures.Figure(panels, columns=2, sharey="row")
        path, failed = paper_figures.reproduce(figure, configs, folder / "runs")
        self.assertEmpty(failed)
        self.assertGreater(path.stat().st_size, 5000)

    def test_mnist_needs_its_file(self):
        with self.assertRaisesRegex(ValueError, "data_path"):
            paper_figures.read_config("nbafl_loss", None, quick=True)


if __name__ == "__main__":
    absltest.main()
