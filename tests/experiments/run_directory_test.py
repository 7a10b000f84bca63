"""The directory that a run writes."""

from __future__ import annotations

import json
import math
import pathlib
import tempfile

from absl.testing import absltest

from tfdp_fl.experiments import run_directory
from tfdp_fl.experiments.run_directory import Run
from tfdp_fl.experiments.settings import Settings


class _InFolder(absltest.TestCase):
    def setUp(self):
        super().setUp()
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def write_run(self, name, accuracies, epsilons, seed=None):
        """Writes a run that was evaluated in every second round."""
        path = self.folder / name
        path.mkdir(parents=True)
        settings = Settings(seed=seed).resolved()
        run_directory.write_json(path / "config.json", settings.to_dict())
        history = run_directory.HistoryFile(path / "history.csv")
        for t, epsilon in enumerate(epsilons):
            logs = {"loss": 1.0, "epsilon": epsilon}
            if t % 2:
                logs["val_accuracy"] = accuracies[t // 2]
            history.on_epoch_end(t, logs)
        result = {
            "accuracy": accuracies[-1],
            "epsilon": epsilons[-1],
            "delta": 1e-3,
            "guarantee": "central",
        }
        run_directory.write_json(path / "result.json", result)
        return path


class HistoryFileTest(_InFolder):
    def test_columns_that_come_later_have_empty_cells_before(self):
        path = self.write_run("a", [0.5, 0.75], [1.0, 2.0, 3.0, 4.0])
        lines = (path / "history.csv").read_text().splitlines()
        self.assertEqual(
            lines[:3],
            ["round,loss,epsilon,val_accuracy", "1,1,1,", "2,1,2,0.5"],
        )
        history = Run.read(path).history
        self.assertEqual(history["val_accuracy"], ([2, 4], [0.5, 0.75]))

    def test_a_resumed_run_replaces_the_rounds_it_repeats(self):
        path = self.write_run("a", [0.5, 0.75], [1.0, 2.0, 3.0, 4.0])
        again = run_directory.HistoryFile(path / "history.csv")
        again.on_rounds_planned(2, 4)
        again.on_epoch_end(2, {"loss": 7.0})
        history = Run.read(path).history
        self.assertEqual(history["loss"], ([1, 2, 3], [1.0, 1.0, 7.0]))
        self.assertEqual(history["val_accuracy"], ([2], [0.5]))


class CheckTest(_InFolder):
    def test_only_a_runs_own_files_are_ever_removed(self):
        path = self.write_run("a", [0.5], [1.0, 2.0])
        (path / "checkpoint").mkdir()
        (path / "thesis.tex").write_text("do not lose me")
        with self.assertRaisesRegex(ValueError, "is not empty"):
            run_directory.check(path)
        with self.assertRaisesRegex(ValueError, "thesis.tex"):
            run_directory.check(path, overwrite=True)
        run_directory.clear(path)
        self.assertEqual([each.name for each in path.iterdir()], ["thesis.tex"])

    def test_resume_needs_checkpoints(self):
        path = self.write_run("a", [0.5], [1.0, 2.0])
        with self.assertRaisesRegex(ValueError, "no interrupted run"):
            run_directory.check(path, resume=True)


class ReadTest(_InFolder):
    def test_what_is_not_finite_is_null(self):
        path = self.folder / "x.json"
        run_directory.write_json(path, {"a": [math.inf, 1.0], "b": math.nan})
        self.assertEqual(json.loads(path.read_text()), {"a": [None, 1], "b": None})

    def test_no_run(self):
        with self.assertRaisesRegex(ValueError, "holds no run"):
            Run.read(self.folder)
