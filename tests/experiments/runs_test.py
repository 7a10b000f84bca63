"""The directory that a run writes; sweeps: what they run, and going on with one."""

import json
import math
from unittest import mock

import pandas as pd
import pytest

from tfdp_fl.experiments import sweeps, training


@pytest.fixture(name="path")
def _path(tmp_path):
    """A run of four rounds that was evaluated in every second one."""
    path = tmp_path / "run"
    path.mkdir()
    history = training.HistoryFile(path / "history.csv")
    for t in range(4):
        logs = {"loss": 1.0, "epsilon": t + 1.0}
        history.on_epoch_end(t, {**logs, "val_accuracy": t / 4} if t % 2 else logs)
    return path


def test_a_history_has_all_columns_and_a_resumed_run_replaces_rounds(path):
    lines = (path / "history.csv").read_text().splitlines()
    assert lines[:3] == ["round,loss,epsilon,val_accuracy", "1,1,1,", "2,1,2,0.25"]
    again = training.HistoryFile(path / "history.csv")
    again.on_rounds_planned(2, 4)
    again.on_epoch_end(2, {"loss": 7.0})
    history = pd.read_csv(path / "history.csv")
    assert history["round"].tolist() == [1, 2, 3]
    assert history["loss"].tolist() == [1.0, 1.0, 7.0]
    assert history["val_accuracy"].fillna(0).tolist() == [0, 0.25, 0]


def test_only_a_runs_own_files_are_ever_removed(path):
    (path / "checkpoint").mkdir()
    (path / "thesis.tex").write_text("do not lose me")
    with pytest.raises(ValueError, match="is not empty"):
        training.check_directory(path)
    training.check_directory(path, overwrite=True)
    training.clear_directory(path)
    assert [each.name for each in path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ValueError, match="no interrupted run"):
        training.check_directory(path, resume=True)


_CONFIG = {
    "base": {
        "dataset": "digits",
        "num_clients": 20,
        # All of them: to count what is not amplified takes no time.
        "clients_per_round": 20,
        "model": "linear",
        "rounds": 2,
    },
    "grid": {"mechanism": ["none", "local"]},
    "seeds": [0, 1],
}


def test_a_bad_run_is_refused_before_any_is_run():
    bad = {"grid": {"clip_norm": [3.0]}}, {"seed": 3}, {"seeds": [1, 1]}
    said = "clip_norm=3.*no parameter", "part must be one of", "the same"
    for config, message in zip(bad, said, strict=True):
        with pytest.raises(ValueError, match=message):
            sweeps.expand(config)


def _tables(path):
    return [pd.read_csv(path / f"{name}.csv") for name in ("runs", "summary")]


def test_a_sweep_goes_on_where_it_was_cut_short(tmp_path):
    there = {"accuracy": 0.5, "loss": 1.0, "delta": 1e-3, "seconds": 1.0, "rounds": 0}
    local = {"epsilon": 7.0, "central_epsilon": 0.1}
    for name, seed, figures in (
        ("none", 0, {"epsilon": math.inf}),
        ("none", 1, {"epsilon": math.inf, "rounds": 2}),
        ("local", 1, local),
    ):
        path = tmp_path / f"mechanism={name}" / f"seed={seed}"
        path.mkdir(parents=True)
        training.write_json(path / "result.json", there | figures)
    sweeps.run_sweep(_CONFIG, tmp_path)
    runs, summary = _tables(tmp_path)
    assert runs["mechanism"].tolist() == ["none"] * 2 + ["local"] * 2
    assert runs["seed"].tolist() == [0, 1] * 2
    assert summary["runs"].tolist() == [2, 2]
    assert (summary["epsilon"][0], summary["rounds"][0]) == (math.inf, 1.0)
    assert summary["central_epsilon"].isna().tolist() == [True, False]
    mean = runs["accuracy"][2:].mean()
    assert summary["accuracy"][1] == pytest.approx(mean, abs=1e-5)
    assert summary["central_epsilon"][1] < 7 < summary["epsilon"][1] <= 16.0

    # A second Ctrl-C left its result there, which counted as a whole run's.
    cut = tmp_path / "mechanism=local" / "seed=0" / training.RESULT
    result = json.loads(cut.read_text())
    training.write_json(cut, {**result, "accuracy": 0.1, "stopped": "interrupted"})
    with mock.patch.object(training, "run", wraps=training.run) as run:
        sweeps.run_sweep(_CONFIG, tmp_path)
    run.assert_called_once()
    # The same seed, the same run.
    assert _tables(tmp_path)[0]["accuracy"].equals(runs["accuracy"])

    changed = {**_CONFIG, "base": {**_CONFIG["base"], "batch_size": 4}}
    with pytest.raises(ValueError, match="batch_size=10"):
        sweeps.run_sweep(changed, tmp_path)
