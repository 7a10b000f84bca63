"""What stands in the pages comes from the runs: claims, configurations, a table."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import pytest

from research import reproduce_geyer as geyer
from tfdp_fl.experiments import run_directory, sweeps
from tfdp_fl.experiments.settings import Settings

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_CLAIMS = json.loads((_ROOT / "research" / "claims.json").read_text("utf-8"))
_CONFIGS = sorted((_ROOT / "research" / "configs").rglob("*.json"))


@pytest.mark.parametrize("claim", _CLAIMS, ids=lambda claim: claim["text"])
def test_pages_say_what_was_measured(claim):
    assert claim["text"] in (_ROOT / claim["page"]).read_text("utf-8")
    shown = re.search(r"\d+(\.(\d+))?", claim["text"])
    assert shown[0] == f"{claim['value']:.{len(shown[2] or '')}f}"
    assert (_ROOT / claim["command"].split()[1]).is_file()


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.name)
def test_every_run_of_a_configuration_is_allowed(path):
    config = json.loads(path.read_text("utf-8"))
    if config["base"]["dataset"] != "digits":
        config["base"]["data_path"] = __file__  # It is not read.
    assert sweeps.expand(config)


# The table of Geyer et al.


def _write_run(folder, name, seed, accuracy, mechanism="fixed", caveats=()):
    path = folder / name / "base" / f"seed={seed}"
    path.mkdir(parents=True)
    settings = Settings(
        dataset="mnist", num_clients=100, mechanism=mechanism, seed=seed
    ).resolved()
    (path / run_directory.HISTORY).write_text(
        "round,val_accuracy,cohort_size,between_client_variance,"
        "update_scale\n1,0.5,40,2e-5,1e-4\n2,0.75,61,3e-5,2e-5\n"
    )
    result = {"accuracy": accuracy, "num_clients": 100, "rounds": 2, "delta": 1e-3}
    result |= {"epsilon_rdp": 7.5 + seed, "epsilon_pld": 7.0, "seconds": 90.0}
    statement = {"caveats": dict.fromkeys(caveats, "...")}
    for file, content in (
        (run_directory.CONFIG, settings.to_dict()),
        (run_directory.STATEMENT_JSON, statement),
        (run_directory.RESULT, result),
    ):
        run_directory.write_json(path / file, content)


def test_means_sums_the_worst_epsilon_and_what_it_does_not_cover(tmp_path):
    _write_run(tmp_path, "k100_best_honest", 0, 0.8, caveats=["seed_given"])
    _write_run(tmp_path, "k100_best_honest", 1, 0.9, caveats=["seed_given"])
    _write_run(tmp_path, "k100_non_private", 0, 0.97, "none")
    exact = ["exact_median", "seed_given"]
    _write_run(tmp_path, "k100_as_published", 0, 0.8, caveats=exact)
    table = geyer.write_results(tmp_path)
    assert (tmp_path / "table1.md").read_text() == table
    baseline, published, best = (
        next(line for line in table.splitlines() if f"| {name} |" in line)
        for name in ("non private", "as published", "best honest")
    )
    assert "0.9700 (0.97) | 2 (380) | 101 (38000) | – | – | –" in baseline
    assert "0.8500 ± 0.0707 | 2 | 101 | 0.001 | 8.500 | 7.000" in best
    assert "Caveats of every private row: seed given." in table
    assert "| exact median |" in published
    assert "exact median" not in best
    runs = (tmp_path / "runs.csv").read_text().splitlines()
    assert len(runs) == 5
    assert any("100,non private,0,0.97,2,101" in run for run in runs)


@pytest.mark.parametrize("name", geyer.names())
def test_every_configuration_is_geyers_setting(tmp_path, name):
    path = tmp_path / "mnist.npz"
    images, labels = np.zeros((400, 28, 28), np.uint8), np.arange(400, dtype="u1") % 10
    parts = {"x_train": images, "y_train": labels}
    np.savez(path, **parts, x_test=images[:50], y_test=labels[:50])
    config = geyer.read_config(name, path)
    k = int(name.split("_")[0][1:])
    for trial in sweeps.expand(config):
        chosen = trial.settings
        assert (chosen.dataset, chosen.num_clients) == ("mnist", k)
        assert (chosen.examples_per_client, chosen.shards_per_client) == (600, 2)
        assert chosen.validation_examples == 0
        if name == "k100_non_private":
            continue
        assert chosen.target_epsilon == 8
        assert chosen.target_delta == {100: 1e-3, 1000: 1e-5, 10000: 1e-6}[k]
        exact = chosen.median_noise_multiplier == "exact"
        assert exact == ("as_published" in name)
    seeds = 1 if k == 10000 else 3
    if name.endswith("public_features"):
        seeds = 3 if k == 10000 else 5
    assert len(config["seeds"]) == seeds
