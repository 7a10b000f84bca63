"""A model that is trained on Ray's workers is the one that is trained here."""

import dataclasses
import os
import pickle
import signal
import sys
import threading
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
from tests.keras.hostile import HereWorkers
from tests.mechanisms import references
from tfdp_fl import engine, runtimes, secure_aggregation
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import layout, program, ray_workers

ray = pytest.importorskip("ray", reason="ray is not installed (tests only)")
_layers = tf.keras.layers
_NUM_CLIENTS, _ROUNDS = 14, 2


def _in_rows(x, y, num_clients=_NUM_CLIENTS, **options):
    rows = np.arange(len(y)).reshape(num_clients, -1)
    return FederatedDataset.from_indices(x, y, rows, **options)


def _uneven():
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 60, size) for size in [0, 9, 1, 4, 8, 3, 6] * 2]
    return FederatedDataset.from_indices(*toy.arrays(60), rows)


def _streamed():

    def read(client):
        if client in (3, 8):
            raise OSError("gone")
        return toy.arrays(5 + client % 3, seed=client)

    return FederatedDataset.from_client_fn(range(_NUM_CLIENTS), read)


def _nested():
    x, y = toy.arrays(8 * _NUM_CLIENTS)
    return _in_rows({"z": x, "a": np.arange(len(x), dtype=np.uint8)[:, None]}, y)


def _weighted():
    weight = np.random.default_rng(2).exponential(size=8 * _NUM_CLIENTS)
    return _in_rows(*toy.arrays(8 * _NUM_CLIENTS), sample_weight=weight)


def _two_inputs():
    a, z = _layers.Input((1,), name="a"), _layers.Input((8,), name="z")
    both = _layers.concatenate([_layers.Rescaling(0.01)(a), z])
    return tf.keras.Model({"z": z, "a": a}, _layers.Dense(3)(both))


def _fixed(**changes):
    values = {"clip_norm": 0.05, "noise_multiplier": 0.0, **changes}
    return tfdp_fl.FixedClipping(**values)


def _noisy(weights, seed):
    return [w + 0.01 * tf.random.stateless_normal(w.shape, seed) for w in weights]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    clients: object = lambda: toy.clients(_NUM_CLIENTS, 8)  # Two full batches each.
    model: object = toy.two_layers
    mechanism: object = dataclasses.field(default_factory=_fixed)
    sampling: str = "fixed_size"
    options: dict = dataclasses.field(default_factory=dict)
    compiled: dict = dataclasses.field(default_factory=dict)
    fit: dict = dataclasses.field(default_factory=dict)
    side_by_side: bool = False
    small: bool = False

    def federated(self):
        toy.seed(1)
        compiled = {"optimizer": tf.keras.optimizers.SGD(0.2), "metrics": ["accuracy"]}
        compiled |= {"jit_compile": None if self.side_by_side else False}
        how = (self.mechanism, self.model, 7, self.sampling, compiled | self.compiled)
        return toy.federated(*how, **self.options)

    def train(self, federated, clients=None, **arguments):
        clients = self.clients() if clients is None else clients
        options = {"rounds": _ROUNDS, "batch_size": 4, "seed": 5, **self.fit}
        with side_by_side(self.side_by_side, self.small, steps=(1, 2)):
            return toy.fit(federated, data=clients, **options, **arguments)


_SIDE_BY_SIDE = _Case(side_by_side=True)
_SMALL = _Case(side_by_side=True, small=True)
_ONE_BY_ONE = _Case(
    clients=_uneven, sampling="poisson", fit={"shuffle": True, "local_epochs": 2}
)
_CASES = {
    "side_by_side": _SIDE_BY_SIDE,
    "small": _SMALL,
    "one_by_one": _ONE_BY_ONE,
    "batch_normalization_and_dropout": _Case(model=toy.normalized),
    "nested_features": _Case(clients=_nested, model=_two_inputs),
    "weights": _Case(clients=_weighted, side_by_side=True),
    # With a seed, each client's own noise is the same wherever it trains.
    "windows": _Case(
        mechanism=tfdp_fl.AdaptiveLocalDP(
            epsilon=100.0, delta=1e-5, clipping_radius=0.05
        )
    ),
    "median": _Case(
        mechanism=tfdp_fl.MedianClipping(noise_multiplier=0.5), clients=_uneven
    ),
    "secure_aggregation": _Case(
        options={"secure_aggregation": secure_aggregation.AdditiveSecretSharing()}
    ),
    "hooks_variance_and_xla_here": _Case(
        fit={"between_client_variance": True},
        compiled={
            "jit_compile": True,
            "broadcast_hook": _noisy,
            "upload_hook": lambda tensors: [2.0 * each for each in tensors],
        },
    ),
}


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
    run = ray_workers.runnable(pickle.loads(pickle.dumps(traced)))
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


def test_fits_in_two_threads_take_turns():
    # The workers hold the examples of one dataset.
    workers, inside, most = ray_workers.RayWorkers(), [], []

    def open_(*arguments):
        inside.append(arguments)
        time.sleep(0.05)
        most.append(len(inside))
        inside.pop()
        raise ray_workers.WorkerUnavailable("They are never started.")

    def run():
        with pytest.raises(ray_workers.WorkerUnavailable):
            workers.run(None, [], None, [])

    with mock.patch.object(workers, "open", open_):
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1, 1, 1]


def test_side_by_side_needs_products_of_all_their_bits(workers, monkeypatch):
    facts = {**workers.open()._facts_of([0])[0], "float32_products": False}
    monkeypatch.setattr(workers, "_facts_of", lambda places: [facts for _ in places])
    monkeypatch.setattr(workers, "run", HereWorkers().run)
    federated = _SIDE_BY_SIDE.federated()
    _SIDE_BY_SIDE.train(federated, runtime=workers)
    assert not federated.engine.has_trained_side_by_side


def test_workers_that_compute_otherwise_do_not_train(workers, monkeypatch):
    # As one of another processor does, or one that is told to compute as an older one.
    facts = workers.open()._facts_of([0])[0]
    assert facts == workers._facts_of([1])[0]
    other = {**facts, "results": "others"}
    monkeypatch.setattr(
        workers, "_facts_of", lambda places: [(facts, other)[n % 2] for n in places]
    )
    federated = _SIDE_BY_SIDE.federated()
    before = federated.get_weights()[0]
    with pytest.raises(ray_workers.WorkerError, match="differ in results"):
        _SIDE_BY_SIDE.train(federated, runtime=workers)
    np.testing.assert_array_equal(federated.get_weights()[0], before)
    # Nor does such a one take another one's place.
    traced = program.Program(tf.identity, tf.TensorSpec([]))
    actor = ray_workers._Actor(1)
    actor._runnables[traced.name] = ray_workers.runnable(traced)
    arguments = traced.name, [], [np.float32(2.0)], None, []
    with pytest.raises(ValueError, match="differ in threads"):
        actor.run({**actor.facts(), "threads": 99}, *arguments)
    for alike in (actor.facts(), None):
        assert ray_workers._unpack(actor.run(alike, *arguments)) == [2.0]


def test_without_an_address_no_cluster_is_joined(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for asked, joined in ((None, "local"), ("head:1", "head:1")):
        with mock.patch.object(ray, "init") as init:
            ray_workers._Cluster(asked, {}).connect()
        assert init.call_args.kwargs["address"] == joined
    monkeypatch.setenv("RAY_ADDRESS", "head:2")
    with mock.patch.object(ray, "init") as init:
        ray_workers._Cluster(None, {}).connect()
    assert init.call_args.kwargs["address"] == "head:2"


def _compare(case, workers, clients=None):
    here, there = case.federated(), case.federated()
    start = here.get_weights()
    expected = case.train(here, clients).history
    actual = case.train(there, clients, runtime=workers).history
    assert np.abs(start[0] - here.get_weights()[0]).max() > 1e-3
    np.testing.assert_allclose(toy.flat(here), toy.flat(there), atol=1e-5)
    assert list(expected) == list(actual)
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, atol=1e-4, rtol=1e-4)
    if there.run.windows is not None:
        np.testing.assert_allclose(here.run.windows, there.run.windows, atol=1e-5)
        assert np.isfinite(there.run.windows).any()
    for strategy in there.engine.used_strategies:
        assert (strategy.kind == "side by side") == case.side_by_side
    return there


@pytest.mark.parametrize("name", _CASES)
def test_whatever_is_trained_is_the_same(workers, name):
    case = _CASES[name]
    with mock.patch.object(workers, "run", wraps=workers.run) as run:
        _compare(case, workers)
    # All workers, or one where the cohort is small, or fits in one call's width.
    for call in run.mock_calls:
        few = case.small or case.side_by_side
        assert len(call.args[3]) in ((1, 2) if few else (2,))


def test_shards_of_large_arrays_that_ray_stores(workers, monkeypatch):
    monkeypatch.setattr(ray_workers, "_INLINE_BYTES", 0)
    mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=0.0, initial_clip_norm=0.05)
    _compare(dataclasses.replace(_SIDE_BY_SIDE, mechanism=mechanism), workers)


def test_requests_of_bounded_size(workers, monkeypatch):
    # Of a dataset in memory Ray has all examples, once.
    limit = 5 * 4 * (8 + 1)  # 5 examples.
    monkeypatch.setattr(layout, "CHUNK_BYTES", limit)
    with mock.patch.object(workers, "run", wraps=workers.run) as run:
        _compare(_Case(clients=_streamed), workers)
    assert run.call_count > 2 * _ROUNDS


def test_a_nan_of_one_client_takes_nobody_with_it(workers):
    x, y = toy.arrays(8 * _NUM_CLIENTS)
    x[8 * 3, 0] = np.nan
    case = dataclasses.replace(_SMALL, sampling="poisson", fit={"rounds": 6})
    there = _compare(case, workers, _in_rows(x, y))
    assert np.isfinite(there.get_weights()[0]).all()
    # Cohorts of any size are one program.
    assert len(set(there.model.history.history["cohort_size"])) > 3
    assert len(there.engine.used_strategies) == 1


@pytest.mark.parametrize("name", ["float32", "mixed_bfloat16"])
def test_the_clip_holds_for_data_that_an_adversary_would_choose(workers, name):
    clip, clients = 0.01, {0: clip_attack_test.cancelling(400, 10, 3000.0)}
    with policy(name):
        model = clip_attack_test.network(400, (128,))
        federated = tfdp_fl.DPFederatedModel(
            *(model, _fixed(clip_norm=clip), 1, "fixed_size"), max_parallel_clients=1
        )
        loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
        federated.compile(tf.keras.optimizers.SGD(50.0), loss)
        before = [w.astype(np.float64) for w in model.get_weights()]
        federated.fit(clients, batch_size=10, verbose=0, runtime=workers)
    moved = [new - old for old, new in zip(before, model.get_weights(), strict=True)]
    kinds = {strategy.kind for strategy in federated.engine.used_strategies}
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
    x = np.random.default_rng(0).normal(size=[49, 40])
    y, hostile = (
        np.full([49, 3], 2.0, np.float32),
        np.arange(49) // 7 == 3,
    )
    start = "glorot_uniform" if "error" in loss else "zeros"
    bias, found = tf.keras.initializers.Constant(0.5), []
    cosine = tf.keras.metrics.CosineSimilarity(name="cosine")
    case = _Case(
        model=lambda: sequential([40], _layers.Dense(3, None, True, start, bias)),
        compiled={"loss": loss, "metrics": [cosine]},
        side_by_side=True,
        fit={"rounds": 1, "batch_size": batch_size, "seed": 3},
    )
    federated, runtime = toy.lent(case.federated), shared_workers() if on_ray else None
    for size, weight in ((x, 1.0), (1e18, 1e8)):
        own = np.where(hostile[:, None], size, x).astype("f4")
        clients = _in_rows(own, y, 7, sample_weight=np.where(hostile, weight, 1.0))
        found.append(case.train(federated(), clients, runtime=runtime).history)
    usual, high = found
    assert high["discarded_clients"] == [0.0]
    assert abs(high["cosine"][0]) <= 1.0 + 1e-6
    assert 1e6 <= high["loss"][0] <= 1e25
    assert 0.1 <= usual["loss"][0] <= 10.0


def test_data_of_one_client_that_raises_ends_its_own_training_alone(workers):
    x = np.ones([_NUM_CLIENTS * 4, 2], np.int32)
    x[::8] = 271828  # What the embedding has no row of, of every other client.
    layers = [_layers.Input((2,), dtype="int32"), toy.Table(10, 3)]
    layers += [_layers.Flatten(), _layers.Dense(3)]
    case = _Case(
        clients=lambda: _in_rows(x, x[:, 0] % 3),
        model=lambda: tf.keras.Sequential(layers),
    )
    # They train again where they did before, alone, and not here.
    with mock.patch.object(engine.CohortEngine, "_train") as here:
        history = case.train(case.federated(), runtime=workers).history
    here.assert_not_called()
    assert min(history["failed_clients"]) > 0.0


def test_a_cohort_without_clients(workers):
    case = _Case(sampling="poisson", mechanism=_fixed(noise_multiplier=1.0))
    there, here = case.federated(), case.federated()
    for each in there, here:
        each._setup = dataclasses.replace(each.setup, clients_per_round=0.01)
    with mock.patch.object(workers, "run") as run:
        history = case.train(there, runtime=workers)
    run.assert_not_called()
    case.train(here)
    assert set(history.history["cohort_size"]) == {0.0}
    np.testing.assert_allclose(toy.flat(here), toy.flat(there), atol=1e-5)


def _pid(workers, place=1):
    """Returns a worker's process id; one that is lost is started again."""
    actor = workers.open()._cluster.actors[place]
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def _kill(actor):
    actor.__ray_call__.remote(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def _losing(workers, kill=True):
    """Has a training lose a worker, once."""
    original, places = workers._cluster.actor, []

    def actor(place):
        places.append(place)
        if kill and place == 1 and places.count(1) == 2:
            _kill(original(place))  # As its shard is sent, after the first question.
        return original(place)

    return mock.patch.object(workers._cluster, "actor", actor)


def _trained(workers, kill):
    federated, victim = _ONE_BY_ONE.federated(), _pid(workers)
    with _losing(workers, kill):
        _ONE_BY_ONE.train(federated, runtime=workers)
    assert (_pid(workers) != victim) == kill
    return federated


def test_the_shard_of_a_lost_worker_is_repeated_and_the_model_is_the_same(workers):
    whole, mended = (_trained(workers, kill) for kill in (False, True))
    toy.assert_same(whole, mended)
    assert whole.epsilon(1e-3) == mended.epsilon(1e-3)


def test_a_worker_that_was_lost_between_two_trainings_is_replaced(workers):
    victim = _pid(workers)
    os.kill(victim, signal.SIGKILL)
    alone = _ONE_BY_ONE.federated()
    _ONE_BY_ONE.train(alone, runtime=workers)
    assert _pid(workers) != victim
    toy.assert_same(alone, _trained(workers, kill=False))


def test_clients_whose_part_fails_keep_the_widths_of_the_workers(workers, monkeypatch):
    # The widths tried here were taken, of which there may be none.
    tried, shard = engine.CohortEngine.fits, ray_workers.ShardedCohorts._shard

    def only_there(self, *where, trials=None):
        return trials is not None and tried(self, *where, trials=trials)

    def too_large(self, chunk, part):
        if len(part.members) > 1:
            raise tf.errors.ResourceExhaustedError(None, None, "no memory")
        return shard(self, chunk, part)

    found = []
    for fail in (shard, too_large):
        monkeypatch.setattr(ray_workers.ShardedCohorts, "_shard", fail)
        monkeypatch.setattr(engine.CohortEngine, "fits", only_there)
        found.append(_SIDE_BY_SIDE.federated())
        history = _SIDE_BY_SIDE.train(found[-1], runtime=workers)
        assert sum(history.history["failed_clients"]) == 0
        assert found[-1].engine.has_trained_side_by_side
    toy.assert_same(*found)


def test_a_program_that_no_worker_can_take_over_ends_the_round(workers):
    # A program that no other test has.
    stack = _layers.Dense(3), _layers.Dense(3)
    case = _Case(model=lambda: sequential([8], *stack))
    federated = case.federated()
    getstate = program.Program.__getstate__

    def broken(self):
        return {**getstate(self), "outputs": ["no operation"]}

    with (
        mock.patch.object(program.Program, "__getstate__", broken),
        pytest.raises(runtimes.WorkerError),
    ):
        case.train(federated, runtime=workers)
    assert federated.epsilon(1e-3) == 0.0


def test_else_the_round_is_abandoned_and_nothing_is_charged(workers, monkeypatch):
    federated = _ONE_BY_ONE.federated()
    before = federated.get_weights()
    monkeypatch.setattr(workers, "_max_repeats", 0)
    with (
        _losing(workers),
        pytest.raises(runtimes.WorkerLost, match="of Ray is lost"),
    ):
        _ONE_BY_ONE.train(federated, runtime=workers)
    toy.assert_same(before, federated)
    assert federated.epsilon(1e-3) == 0.0
    # And the next call starts it anew.
    _ONE_BY_ONE.train(federated, runtime=workers)


def test_what_is_refused():
    case = _Case()
    with pytest.raises(TypeError, match=r"runtime .*'local'"):
        case.train(case.federated(), runtime="local")
    workers = runtimes.RayWorkers()
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        workers.open()
    with (
        mock.patch.dict(sys.modules, {"ray": None}),
        pytest.raises(ImportError, match=r"RayWorkers.*pip install ray"),
    ):
        runtimes.RayWorkers()
