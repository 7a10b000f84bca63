"""Weights of examples, classes and clients: what they count, under the same clip."""

import functools

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tests.keras import hostile, toy
from tfdp_fl.datasets import FederatedDataset

_S = 0.05
_SIZES = (8, 0, 3, 5)
_NUM_EXAMPLES = tfdp_fl.ClientWeighting.num_examples
_FIXED = tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=0.0)
_WAYS = (
    *("one_by_one", "side_by_side", "few_side_by_side"),
    *("streamed", "xla", "sharded"),
)


class _Trainer:
    """Trains all of some clients again and again, from the same weights."""

    def __init__(
        self, num_clients=1, mechanism=None, way="one_by_one", compiled=None, **options
    ):
        compiled = {"jit_compile": hostile.jit_compile(way), **(compiled or {})}
        options = {"model": toy.two_layers, "compile_options": compiled, **options}
        mechanism = mechanism or tfdp_fl.NoPrivacy()
        self.fed = toy.federated(mechanism, clients_per_round=num_clients, **options)
        self._way, self._before = way, self.fed.get_weights()

    def __call__(self, clients, **options):
        self.fed.set_weights(self._before)
        fit = {"batch_size": 4, "seed": 1, "steps": (4,), **options}
        history = hostile.fit(self.fed, self._way, clients, **fit)
        beside = self._way.endswith("side_by_side")
        assert self.fed.engine.has_trained_side_by_side == beside
        return history

    @property
    def moved(self):
        """How far the round moved all variables, as one vector, float64."""
        return toy.flat(self.fed) - toy.flat(self._before)


def _weighted(count: int):
    return *toy.arrays(count, 3), np.random.default_rng(3).exponential(size=count)


def _metrics():
    weighted = tf.keras.metrics.SparseCategoricalAccuracy(name="weighted")
    return {"metrics": ["accuracy"], "weighted_metrics": [weighted]}


@functools.cache
def _by_keras(weights: str = "examples"):
    """Returns what Keras makes of one client: the weights, and the history."""
    model = toy.two_layers()
    model.compile(tf.keras.optimizers.SGD(0.1), toy.loss(), **_metrics())
    x, y, counted = _weighted(15)
    if weights == "none":
        counted = np.ones(15)
    fit = {"sample_weight": counted.astype(np.float32), "shuffle": False, "verbose": 0}
    history = model.fit(x, y, 4, **fit)
    return model.get_weights(), history.history


def _assert_close(one, other):
    np.testing.assert_allclose(toy.flat(one), toy.flat(other), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", ["side_by_side", "few_side_by_side", "streamed", "xla"])
def test_weights_loss_and_metrics_of_one_client_are_those_of_keras(way):
    client = _weighted(15)
    train = _Trainer(way=way, compiled=_metrics())
    history = train({0: client})
    wanted, of_keras = _by_keras()
    _assert_close(train.fed, wanted)
    for name in ("loss", "weighted", "accuracy"):
        np.testing.assert_allclose(history[name], of_keras[name], rtol=1e-5)
    # They are not what training without weights comes to.
    plain, _ = _by_keras("none")
    assert np.abs(plain[0] - wanted[0]).max() > 1e-3


def test_every_way_to_give_them_validation_clients_and_several_outputs():
    x, y, weight = client = (*toy.arrays(15, 3), _weighted(15)[2].astype(np.float32))
    frame = pd.DataFrame(x, columns=[f"x{k}" for k in range(8)])
    frame = frame.assign(who="a", y=y, w=weight)
    rows = tf.data.Dataset.from_tensor_slices
    named = {"x": x, "y": y, "sample_weight": weight}
    train, (wanted, _) = _Trainer(), _by_keras()
    for dataset in (
        FederatedDataset.from_dataframe(frame, "who", label="y", sample_weight="w"),
        FederatedDataset.from_tf_datasets({"a": rows(client)}),
        FederatedDataset.from_tf_datasets({"a": rows(named)}),
        FederatedDataset.from_indices(x, y, [range(15)], sample_weight=weight),
    ):
        history = train(dataset, validation_data=client)
        _assert_close(train.fed, wanted)
    values = train.fed.evaluate_clients({0: client}, verbose=0)
    loss = train.fed.evaluate(x, y, sample_weight=weight, verbose=0)
    for found in (history["val_loss"], values["loss"]):
        np.testing.assert_allclose(found, [loss], rtol=1e-5)
    # Of several outputs each has its own.
    inputs = tf.keras.Input((8,))
    outputs = [tf.keras.layers.Dense(3, name=name)(inputs) for name in "ab"]
    model, weights = tf.keras.Model(inputs, outputs), (weight, weight[::-1].copy())
    own = tf.keras.models.clone_model(model)
    own.set_weights(model.get_weights())
    losses = [toy.loss(), toy.loss()]
    own.compile(tf.keras.optimizers.SGD(0.1), losses)
    own.fit(x, [y, y], 4, sample_weight=list(weights), shuffle=False, verbose=0)
    train = _Trainer(model=model, compiled={"loss": losses})
    train({0: (x, (y, y), weights)})
    _assert_close(train.fed, own)


def _clients(sizes=_SIZES):
    return {k: toy.arrays(size, seed=k) for k, size in enumerate(sizes)}


def _mean_of(clients, weighting, mechanism=_FIXED, batch_size=4, **options):
    """Trains a round of all clients; returns the trainer and the history."""
    train = _Trainer(len(clients), mechanism, client_weighting=weighting, **options)
    return train, train(clients, batch_size=batch_size, local_epochs=2)


@functools.cache
def _updates(sizes=_SIZES):
    """Returns the update of each of `_clients` by a plain loop, in float64."""
    with_ = (tf.keras.optimizers.SGD(0.1), toy.loss())
    fit = {"batch_size": 4, "local_epochs": 2}
    update = functools.partial(cohorts.reference_update, toy.two_layers())
    return [toy.flat(update(c, *with_, **fit)) for c in _clients(sizes).values()]


def _assert_moved(moved, counted, clip=_S, divisor=4, sizes=_SIZES):
    """Asserts sum_k w_k clip(Delta_k, S) / divisor, in float64."""
    wanted = 0.0
    for update, w in zip(_updates(sizes), counted, strict=True):
        norm = max(np.linalg.norm(update), 1e-30)
        wanted += w * min(1.0, clip / norm) * update / divisor
    assert np.linalg.norm(wanted) > 1e-3
    np.testing.assert_allclose(moved, wanted, rtol=1e-3, atol=2e-7)


@pytest.mark.parametrize("way", _WAYS)
def test_the_papers_estimator(way):
    weighting = _NUM_EXAMPLES(cap=6, mean_weight=0.4)
    train, history = _mean_of(_clients(), weighting, way=way)
    counted = [min(size / 6, 1.0) for size in _SIZES]
    _assert_moved(train.moved, counted, divisor=4 * 0.4)
    # A client that counts less was clipped all the same.
    assert history["clipped_fraction"] == [0.75]


def test_medians_bits_and_means_without_privacy():
    sizes = (8, 6, 3, 5)
    median = float(np.median([np.linalg.norm(each) for each in _updates(sizes)]))
    mechanism = tfdp_fl.MedianClipping(noise_multiplier=0.0)
    train, history = _mean_of(
        _clients(sizes), _NUM_EXAMPLES(cap=6), mechanism, max_parallel_clients=2
    )
    assert history["clip_norm"] == [pytest.approx(median, rel=1e-5)]
    counted = [min(size / 6, 1.0) for size in sizes]
    _assert_moved(train.moved, counted, median, sizes=sizes)
    # Adaptive clipping counts each bit once.
    mechanism = tfdp_fl.AdaptiveClipping(
        noise_multiplier=0.0, initial_clip_norm=_S, count_noise_stddev=0.0
    )
    clips = []
    for weighting in (None, _NUM_EXAMPLES(cap=1000)):
        train, _ = _mean_of(_clients(), weighting, mechanism)
        clips.append(float(train.fed.run.mechanism_state.clip_norm))
    assert clips[0] == clips[1] > _S
    # Without privacy it is McMahan's weighted mean.
    train, _ = _mean_of(_clients(), _NUM_EXAMPLES(cap=100), tfdp_fl.NoPrivacy())
    _assert_moved(train.moved, _SIZES, np.inf, sum(_SIZES))


def test_the_noise_and_its_price_are_the_same_and_the_statement_says_what_counts():
    # Of 10 000 numbers 4 % are 5.5 standard deviations of their own: 5e-8.
    x, y = toy.arrays(4)
    clients = dict.fromkeys(range(4), (x[:1], y[:1]))
    mechanism = tfdp_fl.FixedClipping(clip_norm=1e-3, noise_multiplier=50.0)
    spent = []
    for share in (1.0, 0.5):
        layers = [tf.keras.layers.Dense(n) for n in (1100, toy.NUM_CLASSES)]
        wide = tf.keras.Sequential([tf.keras.layers.Input((8,)), *layers])
        weighting = _NUM_EXAMPLES(cap=2, mean_weight=share) if share < 1 else None
        train, _ = _mean_of(clients, weighting, mechanism, model=wide)
        wanted = 50.0 * 1e-3 / (4 * share)
        assert np.std(train.moved) == pytest.approx(wanted, rel=0.04)
        spent.append(train.fed.epsilon(1e-5))
    assert spent[0] == spent[1]
    text = " ".join(train.fed.privacy_statement(1e-3).split())
    for part in (
        "counts by its number of examples n, as min(n / 2, 1)",
        "divided by m times 0.5, which was fixed beforehand",
        "the expected mean of the clients' weights are assumed to be fixed",
    ):
        assert part in text
    assert "cap=2.0" in str(train.fed.privacy_statement(1e-3, format="dict"))


@pytest.mark.parametrize(
    "way, weighting",
    [
        *(("one_by_one", None), ("streamed", None)),
        *((way, _NUM_EXAMPLES(cap=15)) for way in ("side_by_side", "xla")),
        ("few_side_by_side", _NUM_EXAMPLES(cap=0.1)),
    ],
)
def test_the_sum_moves_by_s_at_most_and_others_are_none_the_worse(way, weighting):
    x, y, weight = _weighted(12)
    weight = weight.astype(np.float32)
    nobody = (x[:0], y[:0], weight[:0])
    train = _Trainer(4, _FIXED, way, client_weighting=weighting)
    fit = {"batch_size": 6, "local_epochs": 2}

    def with_weight(value):
        bad = np.where(np.arange(12) == 5, value, weight).astype(np.float32)
        return x, y, bad

    for value in (1e38, -3.0, -300.0, np.nan, np.inf):
        clients = dict.fromkeys(range(3), nobody) | {"bad": with_weight(value)}
        history = train(clients, **fit)
        # The mean is over four clients, three of which hand in nothing.
        moved = 4 * np.linalg.norm(train.moved)
        assert moved <= _S * (1 + 1e-5)
        if not np.isfinite(value):
            assert moved == 0.0
            assert history["discarded_clients"] == [1.0]
    found = []
    for other in (with_weight(np.nan), nobody):
        clients = {0: (x, y, weight), 1: other, 2: nobody, 3: nobody}
        history = train(clients, **fit)
        found.append(toy.flat(train.fed))
        assert np.isfinite(history["loss"][0])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
