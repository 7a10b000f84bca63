"""Weights of examples, classes and clients: what they count, under the same clip."""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tests.keras import hostile, toy
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

_CLASS_WEIGHT = {0: 0.25, 2: 3.0}
_S = 0.05
_SIZES = (8, 0, 3, 5)
_NUM_EXAMPLES = tfdp_fl.ClientWeighting.num_examples
_SAMPLE_WEIGHT = tfdp_fl.ClientWeighting.sample_weight
_FIXED = tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=0.0)
_BESIDE = ("side_by_side", "a_few_at_a_time", "in_groups")
_PATHS = ("one_by_one", *_BESIDE, "streamed", "xla", "sharded")


class _Trainer:
    """Trains all of some clients again and again, from the same weights."""

    def __init__(
        self, num_clients=1, mechanism=None, path="one_by_one", compiled=None, **options
    ):
        self._path, beside, few = path, path in _BESIDE, path == "a_few_at_a_time"
        self._changes = {"is_worthwhile": lambda *_: beside, "is_small": lambda *_: few}
        if path == "in_groups":
            self._changes["clients_at_once"] = lambda *_: 2
        compiled = {
            "jit_compile": None if beside else path == "xla",
            **(compiled or {}),
        }
        options = {"model": toy.two_layers, "compile_options": compiled, **options}
        mechanism = mechanism or tfdp_fl.NoPrivacy()
        self.fed = toy.federated(mechanism, clients_per_round=num_clients, **options)
        self._before = self.fed.get_weights()

    def __call__(self, clients, **options):
        self.fed.set_weights(self._before)
        if self._path == "streamed":
            read = clients.__getitem__
            clients = FederatedDataset.from_client_fn(list(clients), read)
        fit = {"batch_size": 4, "local_epochs": 3, "seed": 1, **options}
        if self._path == "sharded":
            fit["runtime"] = hostile.HereWorkers()
        with mock.patch.multiple(dense_models, **self._changes):
            history = toy.fit(self.fed, data=clients, **fit)
        assert self.fed.engine.has_trained_side_by_side == (self._path in _BESIDE)
        return history.history

    @property
    def moved(self):
        """How far the round moved all variables, as one vector, float64."""
        return toy.flat(self.fed) - toy.flat(self._before)


# What examples count in a client's loss, as in Keras.


def _weighted(count: int):
    return *toy.arrays(count, 3), np.random.default_rng(3).exponential(size=count)


def _metrics():
    weighted = tf.keras.metrics.SparseCategoricalAccuracy(name="weighted")
    return {"metrics": ["accuracy"], "weighted_metrics": [weighted]}


@functools.cache
def _by_keras(weights: str, epochs: int = 3):
    """Returns what Keras makes of one client: the weights, and the history."""
    model = toy.two_layers()
    model.compile(tf.keras.optimizers.SGD(0.1), toy.loss(), **_metrics())
    x, y, weight = _weighted(15)
    counted = np.ones(15)
    if weights in ("both", "examples"):
        counted = counted * weight
    if weights in ("both", "classes"):  # Keras does not take both.
        counted = counted * [_CLASS_WEIGHT.get(k, 1.0) for k in y]
    fit = {"sample_weight": counted.astype(np.float32), "shuffle": False, "verbose": 0}
    history = model.fit(x, y, 4, epochs, **fit)
    return model.get_weights(), history.history


def _assert_close(one, other):
    np.testing.assert_allclose(toy.flat(one), toy.flat(other), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "path, weights",
    [
        ("one_by_one", "both"),
        ("one_by_one", "examples"),
        ("side_by_side", "both"),
        ("side_by_side", "classes"),
        ("a_few_at_a_time", "both"),
        ("streamed", "both"),
        ("xla", "both"),
    ],
)
def test_one_client_without_noise(path, weights):
    client = _weighted(15)
    options = {} if weights == "examples" else {"class_weight": _CLASS_WEIGHT}
    train = _Trainer(path=path)
    train({0: client[:2] if weights == "classes" else client}, **options)
    wanted, _ = _by_keras(weights)
    _assert_close(train.fed, wanted)
    # They are not what training without weights comes to.
    plain, _ = _by_keras("none")
    assert np.abs(plain[0] - wanted[0]).max() > 1e-3


@pytest.mark.parametrize("path", ["one_by_one", "side_by_side"])
def test_the_loss_and_the_weighted_metrics(path):
    _, wanted = _by_keras("both", 1)
    train = _Trainer(path=path, compiled=_metrics())
    fit = {"class_weight": _CLASS_WEIGHT, "local_epochs": 1}
    history = train({0: _weighted(15)}, **fit)
    for name in ("loss", "weighted", "accuracy"):
        np.testing.assert_allclose(history[name], wanted[name], rtol=1e-5)


def test_tf_data_and_frames():
    x, y, weight = _weighted(15)
    frame = pd.DataFrame(x, columns=[f"x{k}" for k in range(8)])
    frame = frame.assign(who="a", y=y, w=weight)
    rows = tf.data.Dataset.from_tensor_slices
    named = {"x": x, "y": y, "sample_weight": weight}
    train, (wanted, _) = _Trainer(), _by_keras("examples")
    for dataset in (
        FederatedDataset.from_dataframe(frame, "who", label="y", sample_weight="w"),
        FederatedDataset.from_tf_datasets({"a": rows((x, y, weight))}),
        FederatedDataset.from_tf_datasets({"a": rows(named)}),
        FederatedDataset.from_indices(x, y, [range(15)], sample_weight=weight),
    ):
        train(dataset)
        _assert_close(train.fed, wanted)


def test_validation_and_clients():
    x, y, weight = client = _weighted(12)
    train = _Trainer()
    history = train({0: client}, validation_data=client)
    weight = weight.astype(np.float32)
    wanted = train.fed.evaluate(x, y, sample_weight=weight, verbose=0)
    values = train.fed.evaluate_clients({0: client}, verbose=0)
    for found in (history["val_loss"], values["loss"]):
        np.testing.assert_allclose(found, [wanted], rtol=1e-5)


def test_several_outputs():
    def model():
        tf.keras.utils.set_random_seed(1)
        inputs = tf.keras.Input((8,))
        outputs = [tf.keras.layers.Dense(3, name=name)(inputs) for name in "ab"]
        return tf.keras.Model(inputs, outputs)

    x, y, weight = _weighted(12)
    weights = (weight, weight[::-1].copy())
    own, losses = model(), [toy.loss(), toy.loss()]
    own.compile(tf.keras.optimizers.SGD(0.1), losses)
    own.fit(x, [y, y], 4, 3, sample_weight=list(weights), shuffle=False, verbose=0)
    train = _Trainer(model=model(), compiled={"loss": losses})
    train({0: (x, (y, y), weights)})
    _assert_close(train.fed, own)


def test_class_weights_that_are_refused_or_new():
    fed = toy.federated()
    for value in ([1, 2], {"a": 1.0}, {0: np.nan}):
        with pytest.raises((TypeError, ValueError), match="class_weight must map"):
            toy.fit(fed, class_weight=value)
    assert fed.rounds == 0
    toy.fit(fed)
    before = fed.engine
    toy.fit(fed)
    assert fed.engine is before
    toy.fit(fed, class_weight={0: 2.0})
    assert fed.engine is not before


# What clients count in the mean.


def _clients(sizes=_SIZES):
    return {k: toy.arrays(size, seed=k) for k, size in enumerate(sizes)}


def _mean_of(clients, weighting, mechanism=_FIXED, batch_size=2, **options):
    """Trains a round of all clients; returns the trainer and the history."""
    train = _Trainer(len(clients), mechanism, client_weighting=weighting, **options)
    return train, train(clients, batch_size=batch_size, local_epochs=2)


@functools.cache
def _updates(sizes=_SIZES):
    """Returns the update of each of `_clients` by a plain loop, in float64."""
    optimizer, loss = tf.keras.optimizers.SGD(0.1), toy.loss()
    fit = {"batch_size": 2, "local_epochs": 2}
    return [
        toy.flat(
            cohorts.reference_update(toy.two_layers(), client, optimizer, loss, **fit)
        )
        for client in _clients(sizes).values()
    ]


def _assert_moved(moved, counted, clip=_S, divisor=4, sizes=_SIZES):
    """Asserts sum_k w_k clip(Delta_k, S) / divisor, in float64."""
    wanted = sum(
        w * min(1.0, clip / max(np.linalg.norm(update), 1e-30)) * update / divisor
        for update, w in zip(_updates(sizes), counted, strict=True)
    )
    assert np.linalg.norm(wanted) > 1e-3
    np.testing.assert_allclose(moved, wanted, rtol=1e-3, atol=2e-7)


@pytest.mark.parametrize("path", _PATHS)
def test_the_papers_estimator(path):
    weighting = _NUM_EXAMPLES(cap=6, mean_weight=0.4)
    train, history = _mean_of(_clients(), weighting, path=path)
    counted = [min(size / 6, 1.0) for size in _SIZES]
    _assert_moved(train.moved, counted, divisor=4 * 0.4)
    # A client that counts less was clipped all the same.
    assert history["clipped_fraction"] == [0.75]


@pytest.mark.parametrize("path", ["one_by_one", "side_by_side", "streamed"])
def test_by_the_weights_of_examples(path):
    # Weights of 1 train as none do, and count as they add up.
    clients = {
        k: (x, y, np.ones(len(y), np.float32)) for k, (x, y) in _clients().items()
    }
    train, _ = _mean_of(clients, _SAMPLE_WEIGHT(cap=6), path=path)
    _assert_moved(train.moved, [min(size / 6, 1.0) for size in _SIZES])


def test_a_median_is_of_the_norms_and_not_of_weights():
    sizes = (8, 6, 3, 5)
    median = float(np.median([np.linalg.norm(each) for each in _updates(sizes)]))
    mechanism = tfdp_fl.MedianClipping(noise_multiplier=0.0)
    train, history = _mean_of(
        _clients(sizes), _NUM_EXAMPLES(cap=6), mechanism, num_replicas=2
    )
    assert history["clip_norm"] == [pytest.approx(median, rel=1e-5)]
    counted = [min(size / 6, 1.0) for size in sizes]
    _assert_moved(train.moved, counted, median, sizes=sizes)


def test_adaptive_clipping_counts_each_bit_once():
    mechanism = tfdp_fl.AdaptiveClipping(
        noise_multiplier=0.0, initial_clip_norm=_S, count_noise_stddev=0.0
    )
    clips = []
    for weighting in (None, _NUM_EXAMPLES(cap=1000)):
        train, _ = _mean_of(_clients(), weighting, mechanism)
        clips.append(float(train.fed.engine.state.clip_norm))
    assert clips[0] == clips[1] > _S


def test_without_privacy_it_is_mcmahans_weighted_mean():
    weighting = _NUM_EXAMPLES(cap=100)
    train, _ = _mean_of(_clients(), weighting, tfdp_fl.NoPrivacy())
    _assert_moved(train.moved, _SIZES, np.inf, sum(_SIZES))


def test_the_noise_and_its_price_are_the_same():
    # Noise of stddev z S on the sum, over m * mean_weight. 10 000 numbers
    # tell 2 % of a stddev at 5e-8 (chi-squared, normal approximation:
    # 5.45 stddevs of 0.7 % are 3.9 %), and a tenth is far beyond.
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


# The sum moves by S at most, whatever a client says that it or they count.


def _added(client, path, weighting):
    nobody = tuple(each[:0] for each in client)
    clients = {0: client, 1: nobody}
    train, _ = _mean_of(clients, weighting, batch_size=150, path=path)
    return 2 * np.linalg.norm(train.moved)


@pytest.mark.parametrize("value", [1e38, -300.0, np.nan])
@pytest.mark.parametrize("path", ["one_by_one", "side_by_side"])
def test_weights_of_examples_as_the_clients(value, path):
    weight = np.ones(9, np.float32)
    weight[5] = value
    added = _added((*toy.arrays(9), weight), path, _SAMPLE_WEIGHT(cap=0.1))
    assert added <= _S * (1 + 1e-5)
    if not value > 0:
        assert added == 0.0


@pytest.mark.parametrize("path", ["one_by_one", "side_by_side", "xla"])
def test_many_examples(path):
    added = _added(toy.arrays(300), path, _NUM_EXAMPLES(cap=1))
    assert 0.999 * _S <= added <= _S * (1 + 1e-5)


@pytest.mark.parametrize(
    "path", ["one_by_one", "side_by_side", "a_few_at_a_time", "streamed"]
)
@pytest.mark.parametrize("weighting", [None, _SAMPLE_WEIGHT(cap=9)])
def test_the_norm_is_clipped_and_others_are_none_the_worse(path, weighting):
    clip = 0.3
    train = _Trainer(
        2,
        tfdp_fl.FixedClipping(clip_norm=clip, noise_multiplier=0),
        compiled={"weighted_metrics": ["accuracy"]},
        client_weighting=weighting,
        path=path,
    )
    x, y, weight = _weighted(12)
    weight = weight.astype(np.float32)
    nobody = (x[:0], y[:0], weight[:0])

    def with_weight(value):
        bad = np.where(np.arange(12) == 5, value, weight).astype(np.float32)
        return x, y, bad

    for value in (1e38, -3.0, np.nan, np.inf):
        history = train({"bad": with_weight(value), "none": nobody})
        # The mean is over two clients, one of which hands in nothing.
        moved = 2 * np.linalg.norm(train.moved)
        assert moved <= clip * (1 + 1e-5)
        if not np.isfinite(value):
            assert moved == 0.0
            assert history["discarded_clients"] == [1.0]
    found = []
    for other in (with_weight(np.nan), nobody):
        history = train({0: (x, y, weight), 1: other})
        found.append(toy.flat(train.fed))
        assert np.isfinite(history["loss"][0])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_the_statement_says_what_clients_count():
    fed = toy.federated(client_weighting=_NUM_EXAMPLES(cap=6, mean_weight=0.4))
    toy.fit(fed)
    text = " ".join(fed.privacy_statement(1e-3).split())
    for part in (
        "counts by its number of examples n, as min(n / 6, 1)",
        "divided by m times 0.4, which was given beforehand",
        "the expected mean of the clients' weights count as given before",
    ):
        assert part in text
    assert "cap=6.0" in str(fed.privacy_statement(1e-3, format="dict"))


def test_a_weighting_that_is_refused():
    local = tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1)
    weighting = {"client_weighting": _NUM_EXAMPLES(cap=6)}
    with pytest.raises(ValueError, match="client_weighting must be None with LocalDP"):
        toy.federated(local, **weighting)
    with pytest.raises(ValueError, match="client_weighting must be None with secure"):
        toy.federated(secure_aggregation=AdditiveSecretSharing(), **weighting)
    fed = toy.federated(client_weighting=_SAMPLE_WEIGHT(cap=6))
    with pytest.raises(ValueError, match=r"client_weighting must be .*sample_weight"):
        toy.fit(fed)
    assert fed.rounds == 0
