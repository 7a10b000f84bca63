"""Sweeps: what a configuration asks for, and going on with it."""

from __future__ import annotations

import csv
from unittest import mock

import pytest

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
    "grid": {"mechanism": ["local"]},
    "seeds": [0, 1],
}


def test_grid_times_seeds():
    grid = {"mechanism": ["fixed", "none"], "batch_size": [5, 7]}
    trials = sweeps.expand({"base": {"rounds": 5}, "grid": grid, "seeds": [3, 4]})
    assert len(trials) == 8
    assert trials[3].name == "mechanism=fixed,batch_size=7"
    assert trials[3].directory == "mechanism=fixed,batch_size=7/seed=4"
    settings = trials[3].settings
    assert (settings.rounds, settings.batch_size, settings.seed) == (5, 7, 4)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"grid": {"clip_norm": [3.0]}}, r"clip_norm=3.*no parameter"),
        ({"seed": 3}, "part must be one of"),
        ({"seeds": [1, 1]}, "the same"),
    ],
)
def test_a_bad_run_is_refused_before_any_is_run(config, message):
    with pytest.raises(ValueError, match=message):
        sweeps.expand(config)


def _table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_sweep_goes_on_past_what_fails_and_where_it_was_cut_short(tmp_path):
    def sweep(config=_CONFIG):
        return sweeps.run_sweep(config, tmp_path, say=lambda line: None)

    def prepare(settings, original=training.prepare):
        if settings.mechanism == "fixed":
            raise RuntimeError("out of luck")
        return original(settings)

    grid = {"mechanism": ["fixed", "none"]}
    with mock.patch.object(training, "prepare", prepare):
        failed = sweep({**_CONFIG, "grid": grid, "seeds": [0]})
    assert failed == ["mechanism=fixed/seed=0: out of luck"]
    (row,) = _table(tmp_path / "runs.csv")
    assert row["mechanism"] == "none"
    # Nobody but a local mechanism has two epsilons.
    assert row["central_epsilon"] == ""

    assert sweep() == []
    rows = _table(tmp_path / "runs.csv")
    named = [(row["mechanism"], row["seed"]) for row in rows]
    assert named == [("local", "0"), ("local", "1")]
    (summary,) = _table(tmp_path / "summary.csv")
    mean = sum(float(row["accuracy"]) for row in rows) / 2
    assert float(summary["accuracy"]) == pytest.approx(mean, abs=1e-5)
    assert summary["delta"] == rows[0]["delta"]
    assert float(summary["central_epsilon"]) < float(summary["epsilon"]) <= 16.0

    lost = tmp_path / "mechanism=local" / "seed=1"
    (lost / run_directory.RESULT).unlink()
    with mock.patch.object(training, "run", wraps=training.run) as run:
        assert sweep() == []
    run.assert_called_once()
    again = _table(tmp_path / "runs.csv")
    # The same seed, the same run.
    assert [r["accuracy"] for r in again] == [r["accuracy"] for r in rows]

    changed = {**_CONFIG, "base": {**_CONFIG["base"], "batch_size": 4}}
    with pytest.raises(ValueError, match="batch_size=10"):
        sweep(changed)
