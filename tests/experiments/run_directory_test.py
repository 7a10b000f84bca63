"""The directory that a run writes."""

from __future__ import annotations

import json
import math

import pytest

from tfdp_fl.experiments import run_directory
from tfdp_fl.experiments.run_directory import Run
from tfdp_fl.experiments.settings import Settings


@pytest.fixture(name="path")
def _path(tmp_path):
    """A run of four rounds that was evaluated in every second one."""
    path = tmp_path / "run"
    path.mkdir()
    run_directory.write_json(path / "config.json", Settings().resolved().to_dict())
    history = run_directory.HistoryFile(path / "history.csv")
    for t in range(4):
        logs = {"loss": 1.0, "epsilon": t + 1.0}
        history.on_epoch_end(t, {**logs, "val_accuracy": t / 4} if t % 2 else logs)
    result = {"accuracy": 0.75, "epsilon": 4.0, "delta": 1e-3, "guarantee": "central"}
    run_directory.write_json(path / "result.json", result)
    return path


def test_columns_that_come_later_have_empty_cells_before(path):
    lines = (path / "history.csv").read_text().splitlines()
    assert lines[:3] == ["round,loss,epsilon,val_accuracy", "1,1,1,", "2,1,2,0.25"]
    assert Run.read(path).history["val_accuracy"] == ([2, 4], [0.25, 0.75])


def test_a_resumed_run_replaces_the_rounds_it_repeats(path):
    again = run_directory.HistoryFile(path / "history.csv")
    again.on_rounds_planned(2, 4)
    again.on_epoch_end(2, {"loss": 7.0})
    history = Run.read(path).history
    assert history["loss"] == ([1, 2, 3], [1.0, 1.0, 7.0])
    assert history["val_accuracy"] == ([2], [0.25])


def test_only_a_runs_own_files_are_ever_removed(path):
    (path / "checkpoint").mkdir()
    (path / "thesis.tex").write_text("do not lose me")
    with pytest.raises(ValueError, match="is not empty"):
        run_directory.check(path)
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        run_directory.check(path, overwrite=True)
    run_directory.clear(path)
    assert [each.name for each in path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ValueError, match="no interrupted run"):
        run_directory.check(path, resume=True)
    with pytest.raises(ValueError, match="holds no run"):
        Run.read(path)


def test_what_is_not_finite_is_null(tmp_path):
    path = tmp_path / "x.json"
    run_directory.write_json(path, {"a": [math.inf, 1.0], "b": math.nan})
    assert json.loads(path.read_text()) == {"a": [None, 1], "b": None}
