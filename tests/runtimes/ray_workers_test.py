"""A model that is trained on Ray's workers is the one that is trained here."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import sys
import time
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.conformance.runtimes import ray_workers as shared_workers
from tests.engine import clip_attack_test
from tests.engine.cohorts import policy, sequential, side_by_side
from tests.keras import toy
from tests.mechanisms import references
from tests.runtimes import cohorts
from tfdp_fl import runtimes
from tfdp_fl.engine import program
from tfdp_fl.runtimes import ray_workers
from tfdp_fl.runtimes import workers as workers_lib

_layers = tf.keras.layers
_ONE_BY_ONE = cohorts.CASES["one_by_one"]
_SIDE_BY_SIDE = cohorts.CASES["side_by_side"]
pytest.importorskip("ray", reason="ray is not installed (tests only)")


@pytest.fixture
def workers():
    return shared_workers()


def test_a_program_that_travelled_is_the_program():
    table = tf.random.normal([300, 4])  # Too large to be part of the graph.

    def function(nest, rows):
        tf.debugging.assert_positive(nest["a"])  # It runs although nobody uses it.
        total = tf.add_n([nest["a"], nest["b"], nest["b"]])
        return {"sum": total, "t": (tf.gather(table, rows),)}

    spec = tf.TensorSpec([None], tf.float32)
    specs = {"a": spec, "b": spec}, tf.TensorSpec([None], tf.int32)
    traced = program.Program(function, *specs)
    message = pickle.loads(pickle.dumps(ray_workers._Message.of(traced)))
    run = message.runnable()
    a, b = np.ones(3, np.float32), np.arange(3, dtype=np.float32)
    here = traced({"a": a, "b": b}, np.array([7, 2], np.int32))
    there = run([a, b, np.array([7, 2], np.int32)])
    np.testing.assert_array_equal(there[0], a + 2 * b)
    for one, other in zip(tf.nest.flatten(here), there, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(traced.constants) == 1
    with pytest.raises(tf.errors.InvalidArgumentError):
        traced({"a": -a, "b": b}, np.array([7, 2], np.int32))
    with pytest.raises(tf.errors.InvalidArgumentError):
        run([-a, b, np.array([7, 2], np.int32)])


@pytest.mark.parametrize("said", [None, True])
def test_products_of_a_ray_that_was_there_are_not_trusted(workers, said, monkeypatch):
    monkeypatch.setattr(workers._cluster, "_started", False)
    monkeypatch.setattr(workers, "_float32_products", said)
    federated = _SIDE_BY_SIDE.federated()
    _SIDE_BY_SIDE.train(federated, runtime=workers)
    for strategy in federated.engine.programs.traced:
        assert (strategy.kind == "side by side") == (said is True)
    # Those of one that is started here are known.
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for address, started in ((None, True), (None, False), ("auto", True)):
        cluster = ray_workers._Cluster(address, {})
        cluster._started = started
        assert cluster.is_here == (started and address is None)
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        assert not cluster.is_here
        monkeypatch.delenv("RAY_ADDRESS")


def _compare(case, workers, clients=None):
    here, there = case.federated(), case.federated()
    start = here.get_weights()
    expected = case.train(here, clients).history
    actual = case.train(there, clients, runtime=workers).history
    assert np.abs(start[0] - here.get_weights()[0]).max() > 1e-3
    for a, b in zip(here.get_weights(), there.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert list(expected) == list(actual)
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, atol=1e-4, rtol=1e-4)
    if there.run.windows is not None:
        np.testing.assert_allclose(here.run.windows, there.run.windows, atol=1e-5)
        assert np.isfinite(there.run.windows).any()
    for strategy in there.engine.programs.traced:
        assert (strategy.kind == "side by side") == case.side_by_side
    return there


@pytest.mark.parametrize("name", cohorts.CASES)
def test_whatever_is_trained_is_the_same(workers, name):
    case = cohorts.CASES[name]
    with mock.patch.object(workers, "run", wraps=workers.run) as run:
        _compare(case, workers)
    # All workers, or one where the cohort is small, had a shard.
    for call in run.mock_calls:
        assert len(call.args[0].shards) == (1 if case.small else 2)


def test_several_shards_of_large_arrays_that_ray_stores(workers, monkeypatch):
    monkeypatch.setattr(workers, "shards_per_worker", 2)
    monkeypatch.setattr(ray_workers, "_INLINE_BYTES", 0)
    _compare(cohorts.ADAPTIVE, workers)


def test_requests_of_bounded_size(workers):
    # Of a dataset in memory Ray has all examples, once.
    limit = 5 * 4 * (cohorts.FEATURES + 1)  # 5 examples.
    with (
        mock.patch.object(workers_lib, "MESSAGE_BYTES", limit),
        mock.patch.object(workers, "run", wraps=workers.run) as run,
    ):
        _compare(cohorts.STREAMED, workers)
    assert run.call_count > 2 * cohorts.ROUNDS


def test_a_nan_of_one_client_takes_nobody_with_it(workers):
    x, y = cohorts.arrays()
    x[8 * 3, 0] = np.nan
    case = dataclasses.replace(
        cohorts.CASES["small"], sampling="poisson", fit={"rounds": 6}
    )
    there = _compare(case, workers, cohorts.in_rows(x, y))
    assert np.isfinite(there.get_weights()[0]).all()
    # Cohorts of any size are one program.
    assert len(set(there.model.history.history["cohort_size"])) > 3
    assert len(there.engine.programs.traced) == 1


@pytest.mark.parametrize("name", ["float32", "mixed_bfloat16"])
def test_the_clip_holds_for_data_that_an_adversary_would_choose(workers, name):
    clip, clients = 0.01, {0: clip_attack_test.cancelling(400, 10, 3000.0)}
    with policy(name):
        model = clip_attack_test.network(400, (128,))
        federated = tfdp_fl.DPFederatedModel(
            *(model, cohorts.fixed(clip_norm=clip), 1, "fixed_size"), num_replicas=1
        )
        loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
        federated.compile(tf.keras.optimizers.SGD(50.0), loss)
        before = [w.astype(np.float64) for w in model.get_weights()]
        federated.fit(clients, batch_size=10, verbose=0, runtime=workers)
    moved = [new - old for old, new in zip(before, model.get_weights(), strict=True)]
    kinds = {strategy.kind for strategy in federated.engine.programs.traced}
    assert kinds == {"side by side"}
    # Up to how a weight of 0.1 is rounded.
    assert 0.01 * clip <= references.l2_norm(moved) <= clip * 1.001


# The divergence of an infinite output is 0, and its metric no number.
@pytest.mark.parametrize(
    ("loss", "batch_size", "on_ray"),
    [
        ("mean_absolute_error", 4, True),
        ("kl_divergence", 8, True),
        ("mean_absolute_error", 8, False),
        ("kl_divergence", 4, False),
    ],
)
def test_a_client_that_passes_all_bounds_leaves_the_history_in_them(
    loss, batch_size, on_ray
):
    x, _ = cohorts.arrays(7 * 7)
    y = np.full([len(x), cohorts.CLASSES], 2.0, np.float32)
    options = {
        "kernel_initializer": "glorot_uniform" if "error" in loss else "zeros",
        "bias_initializer": tf.keras.initializers.Constant(0.5),
    }
    found = {}
    for name, size, weight in (("usual", 1.0, 1.0), ("high", 1e18, 1e8)):
        own = np.where(np.arange(len(x))[:, None] // 7 == 3, size, x).astype("f4")
        weights = np.where(own[:, 0] == size, weight, 1.0)
        dense = _layers.Dense(cohorts.CLASSES, **options)
        cosine = tf.keras.metrics.CosineSimilarity(name="cosine")
        case = cohorts.Case(
            clients=lambda o=own, w=weights: cohorts.in_rows(o, y, 7, sample_weight=w),
            model=lambda d=dense: sequential([cohorts.FEATURES], d),
            compiled={"loss": loss, "metrics": [cosine], "jit_compile": None},
            fit={"rounds": 1, "batch_size": batch_size, "seed": 3},
        )
        with side_by_side():
            runtime = shared_workers() if on_ray else None
            found[name] = case.train(case.federated(), runtime=runtime).history
    high = found["high"]
    assert high["discarded_clients"] == [0.0]
    assert abs(high["cosine"][0]) <= 1.0 + 1e-6
    assert 1e6 <= high["loss"][0] <= 1e25
    assert 0.1 <= found["usual"]["loss"][0] <= 10.0


def test_a_cohort_without_clients(workers):
    case = cohorts.Case(
        sampling="poisson", mechanism=lambda: cohorts.fixed(noise_multiplier=1.0)
    )
    there, here = case.federated(), case.federated()
    for each in there, here:
        each._setup = dataclasses.replace(each.setup, clients_per_round=0.01)
    with mock.patch.object(workers, "run") as run:
        history = case.train(there, runtime=workers)
    run.assert_not_called()
    case.train(here)
    assert set(history.history["cohort_size"]) == {0.0}
    for a, b in zip(here.get_weights(), there.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def _trained(workers, kill):
    """Returns a model whose training loses a worker, once."""
    federated, places = _ONE_BY_ONE.federated(), []
    original, victim = workers._cluster.actor, workers.pids[1]

    def actor(place):
        places.append(place)
        if kill and place == 1 and places.count(1) == 1:
            # As its shards are sent.
            os.kill(victim, signal.SIGKILL)
        return original(place)

    with mock.patch.object(workers._cluster, "actor", actor):
        _ONE_BY_ONE.train(federated, runtime=workers)
    assert (workers.pids[1] != victim) == kill
    return federated


def test_the_shard_of_a_lost_worker_is_repeated_and_the_model_is_the_same(workers):
    whole, mended = (_trained(workers, kill) for kill in (False, True))
    toy.assert_same(whole, mended)
    assert whole.epsilon(1e-3) == mended.epsilon(1e-3)


def test_a_program_that_no_worker_can_take_over_ends_the_round(workers):
    # A program that no other test has.
    stack = _layers.Dense(3), _layers.Dense(cohorts.CLASSES)
    case = cohorts.Case(model=lambda: sequential([cohorts.FEATURES], *stack))
    federated = case.federated()
    of = ray_workers._Message.of

    def broken(traced):
        return dataclasses.replace(of(traced), graph=b"no graph")

    with (
        mock.patch.object(ray_workers._Message, "of", broken),
        pytest.raises(runtimes.WorkerError),
    ):
        case.train(federated, runtime=workers)
    assert federated.epsilon(1e-3) == 0.0


def test_else_the_round_is_abandoned_and_nothing_is_charged(workers, monkeypatch):
    federated = _ONE_BY_ONE.federated()
    before = federated.get_weights()
    monkeypatch.setattr(workers, "_max_repeats", 0)
    os.kill(workers.pids[1], signal.SIGKILL)
    time.sleep(1)
    with pytest.raises(runtimes.WorkerLost, match="of Ray is lost"):
        _ONE_BY_ONE.train(federated, runtime=workers)
    toy.assert_same(before, federated)
    assert federated.epsilon(1e-3) == 0.0
    # And the next call starts it anew.
    _ONE_BY_ONE.train(federated, runtime=workers)


def test_what_is_refused():
    case = cohorts.Case()
    with pytest.raises(TypeError, match=r"runtime .*'local'"):
        case.train(case.federated(), runtime="local")
    with pytest.raises(TypeError, match="float32_products"):
        runtimes.RayWorkers(float32_products="yes")
    workers = runtimes.RayWorkers()
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        workers.open()
    with (
        mock.patch.dict(sys.modules, {"ray": None}),
        pytest.raises(ImportError, match=r"RayWorkers.*pip install ray"),
    ):
        runtimes.RayWorkers()
