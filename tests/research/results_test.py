"""Pages say what runs measured, and the benchmark's sides do the same work."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from research import pages
from research import reproduce_geyer as geyer
from research.benchmarking import engine_side, report, results, workloads
from tfdp_fl.experiments import sweeps

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_CONFIGS = sorted(
    path
    for each in ("research", "scripts")
    for path in (_ROOT / each / "configs").rglob("*.json")
)


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.name)
def test_tables_are_written_from_what_was_measured(path):
    page = path.read_text("utf-8")
    blocks = re.findall(r"<!--results:(\w+)-->", page)
    assert set(blocks) <= set(pages.BLOCKS)
    assert blocks
    assert pages.written(page) == page


def test_the_benchmarks_page_is_written_from_what_was_measured():
    measured = results.Results(_ROOT / "docs" / "benchmarks.json")
    page = (_ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert set(re.findall(r"<!--measured:(\w+)-->", page)) == set(report.BLOCKS)
    assert report.written(page, measured) == page


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.name)
def test_every_run_of_a_configuration_is_allowed(path):
    config = json.loads(path.read_text("utf-8"))
    if config["base"]["dataset"] != "digits":
        config["base"]["data_path"] = __file__  # It is not read.
    assert sweeps.expand(config)


@pytest.mark.parametrize("name", geyer.names())
def test_every_configuration_is_geyers_setting(tmp_path, name):
    path = tmp_path / "mnist.npz"
    images, labels = np.zeros((400, 28, 28), np.uint8), np.arange(400, dtype="u1") % 10
    parts = {"x_train": images, "y_train": labels}
    np.savez(path, **parts, x_test=images[:50], y_test=labels[:50])
    k = int(name.split("_")[0][1:])
    for trial in sweeps.expand(geyer.read_config(name, path)):
        chosen = trial.settings
        assert (chosen.dataset, chosen.num_clients) == ("mnist", k)
        assert (chosen.examples_per_client, chosen.iid) == (600, False)
        if name != "k100_non_private":
            delta = {100: 1e-3, 1000: 1e-5, 10000: 1e-6}[k]
            assert (chosen.target_epsilon, chosen.target_delta) == (8, delta)
            exact = chosen.median_noise_multiplier == "exact"
            assert exact == ("as_published" in name)


_TINY = dataclasses.replace(workloads.WORKLOADS["mlp_small"], clients=4)


@pytest.fixture(name="side")
def _side(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "mlp_small", _TINY)
    return engine_side.EngineSide()


def test_every_round_is_timed_and_runs_are_equally_long(side):
    options = {"sampling": "cyclic", "population": 8 * 4}
    made = side.add("run", "mlp_small", mechanism="correlated", **options, warm_up=1)
    assert made["first_seconds"] > 0
    first = side.measure("run", 0.0, min_rounds=2)
    assert len(first) == len(side.measure("run", 100.0)) == 2
    assert min(first) > 0
    # Correlated noise has three buffers.
    state = side._runs["run"].federated_model.run.mechanism_state
    assert [buffer.shape[0] for buffer in state.noise_state.buffers] == [3] * 4


def test_tff_does_the_same_work(side, monkeypatch):
    tff = pytest.importorskip("tensorflow_federated")
    from research.benchmarking import tff_side

    monkeypatch.setattr(workloads, "NOISE_MULTIPLIER", 0.0)
    monkeypatch.setattr(workloads, "CLIP_NORM", 0.02)
    theirs = tff_side.TFFSide("mlp_small")
    tff.backends.native.set_sync_local_cpp_execution_context()
    spec = theirs._clients[0].element_spec
    process = tff_side.build_process(_TINY, "DATASET_ITERATOR", spec)
    clients = side._clients(_TINY, None)
    ours = engine_side._Run(_TINY, clients, "fixed_size", "fixed", None)
    fed = ours.federated_model
    start = fed.get_weights()
    weights = tff.learning.models.ModelWeights(start, [])
    state = process.set_model_weights(process.initialize(), weights)
    state = process.next(state, theirs._clients).state
    ours.fit(1)
    moved = process.get_model_weights(state).trainable
    assert not np.allclose(moved[0], start[0], atol=1e-7)
    for actual, expected in zip(fed.get_weights(), moved, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)
