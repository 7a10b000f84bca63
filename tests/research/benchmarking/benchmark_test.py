"""The benchmark measures, stores and prints, and TFF's side does the same work.

Tiny cases; no timing.
"""

import dataclasses
import importlib.util

import numpy as np
import pytest

from research import benchmark
from research.benchmarking import engine_side, workloads

_TINY = dataclasses.replace(workloads.WORKLOADS["mlp_small"], clients=4)


def test_what_was_measured_is_printed_without_measuring(capsys):
    benchmark.main(["--rows="])
    printed = capsys.readouterr().out
    for text in ("MLP 64-128-10", "FedJAX", "sharded_ray: mlp"):
        assert text in printed


@pytest.fixture(name="side")
def _side(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "mlp_small", _TINY)
    return engine_side.EngineSide(one_thread_per_operation=False)


def test_every_round_is_timed_and_runs_are_equally_long(side):
    options = {"sampling": "cyclic", "population": 8 * 4}
    made = side.add("run", "mlp_small", mechanism="correlated", **options, warm_up=1)
    assert made["first_seconds"] > 0
    first = side.measure("run", 0.0, min_rounds=2)
    assert len(first) == len(side.measure("run", 100.0)) == 2
    assert min(first) > 0
    # Correlated noise has three buffers.
    state = side._runs["run"].federated_model.run.mechanism_state
    assert [buffer.shape[0] for buffer in state.memory.buffers] == [3] * 4


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_federated") is None,
    reason="TensorFlow Federated is not installed.",
)
def test_tff_does_the_same_work(side, monkeypatch):
    import tensorflow_federated as tff

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
