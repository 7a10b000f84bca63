"""Weights of examples, classes and clients: what they count, under the same clip."""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import pandas as pd
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.engine import cohorts
from tests.keras import hostile, toy
from tfdp_fl import secure_aggregation
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models

CLASS_WEIGHT = {0: 0.25, 2: 3.0}
_S = 0.05
_SIZES = (8, 0, 3, 5)
_NUM_EXAMPLES = tfdp_fl.ClientWeighting.num_examples
_SAMPLE_WEIGHT = tfdp_fl.ClientWeighting.sample_weight
_FIXED = tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=0.0)
# Ways to train, as arguments of `_Trainer`.
_PATHS = {
    "one_by_one": {},
    "side_by_side": {"beside": True},
    "a_few_at_a_time": {"beside": True, "few": True},
    "in_groups": {"beside": True, "at_once": 2},
    "streamed": {"streamed": True},
    "xla": {"jit_compile": True},
    "sharded": {"runtime": hostile.HereWorkers()},
}


class _Trainer:
    """Trains all of some clients again and again, from the same weights."""

    def __init__(
        self,
        *,
        num_clients=1,
        mechanism=None,
        beside=False,
        few=False,
        at_once=None,
        streamed=False,
        jit_compile=False,
        runtime=None,
        model=None,
        compiled=None,
        **options,
    ):
        self._beside, self._streamed, self._runtime = beside, streamed, runtime
        self._changes = {"is_worthwhile": lambda *_: beside, "is_small": lambda *_: few}
        if at_once is not None:
            self._changes["clients_at_once"] = lambda *_: at_once
        self.fed = toy.federated(
            mechanism or tfdp_fl.NoPrivacy(),
            model or toy.two_layers,
            num_clients,
            compile_options={
                "jit_compile": None if beside else jit_compile,
                **(compiled or {}),
            },
            **options,
        )
        self.before = self.fed.get_weights()

    def __call__(self, clients, **options):
        self.fed.set_weights(self.before)
        if isinstance(clients, dict):
            if self._streamed:
                read = clients.__getitem__
                clients = FederatedDataset.from_client_fn(list(clients), read)
            else:
                clients = FederatedDataset.from_client_arrays(clients)
        fit = {"batch_size": 4, "local_epochs": 3, "seed": 1, "verbose": 0}
        with mock.patch.multiple(dense_models, **self._changes):
            history = self.fed.fit(
                clients, runtime=self._runtime, **{**fit, **options}
            ).history
        assert not self._beside or self.fed.engine.has_trained_side_by_side
        return history

    @property
    def moved(self):
        """How far the round moved each variable, float64."""
        after = self.fed.get_weights()
        return [
            new.astype(np.float64) - old
            for old, new in zip(self.before, after, strict=True)
        ]


def _norm(tensors):
    return np.sqrt(sum(np.sum(np.square(each)) for each in tensors))


# What examples count in a client's loss, as in Keras.


def _weighted(count: int, seed: int = 3):
    x, y = toy.arrays(count, seed)
    weight = np.random.default_rng(seed).exponential(size=count)
    return x, y, weight


@functools.cache
def _by_keras(weights: str, epochs: int = 3, metrics: bool = False):
    """Returns what Keras makes of one client: the weights, and the history."""
    model = toy.two_layers()
    options = _metrics() if metrics else {}
    model.compile(tf.keras.optimizers.SGD(0.1), toy.loss(), **options)
    x, y, weight = _weighted(15)
    counted = np.ones(15)
    if weights in ("both", "examples"):
        counted = counted * weight
    if weights in ("both", "classes"):
        # Keras does not take both.
        counted = counted * np.vectorize(lambda k: CLASS_WEIGHT.get(k, 1.0))(y)
    fit = {"sample_weight": counted.astype(np.float32), "shuffle": False, "verbose": 0}
    history = model.fit(x, y, 4, epochs, **fit)
    return model.get_weights(), history.history


def _metrics():
    weighted = tf.keras.metrics.SparseCategoricalAccuracy(name="weighted")
    return {"metrics": ["accuracy"], "weighted_metrics": [weighted]}


def _assert_close(one, other):
    for own, others in zip(toy.weights_of(one), toy.weights_of(other), strict=True):
        np.testing.assert_allclose(own, others, rtol=1e-6, atol=1e-7)


class AsKerasTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("one_by_one", "both"),
        ("one_by_one", "examples"),
        ("side_by_side", "both"),
        ("side_by_side", "classes"),
        ("a_few_at_a_time", "both"),
        ("streamed", "both"),
        ("xla", "both"),
    )
    def test_one_client_without_noise(self, path, weights):
        client = _weighted(15)
        options = {} if weights == "examples" else {"class_weight": CLASS_WEIGHT}
        train = _Trainer(**_PATHS[path])
        train({0: client[:2] if weights == "classes" else client}, **options)
        wanted, _ = _by_keras(weights)
        _assert_close(train.fed, wanted)
        # They are not what training without weights comes to.
        plain, _ = _by_keras("none")
        self.assertGreater(np.abs(plain[0] - wanted[0]).max(), 1e-3)

    @parameterized.parameters(False, True)
    def test_the_loss_and_the_weighted_metrics(self, beside):
        _, wanted = _by_keras("both", 1, metrics=True)
        train = _Trainer(beside=beside, compiled=_metrics())
        history = train({0: _weighted(15)}, class_weight=CLASS_WEIGHT, local_epochs=1)
        for name in ("loss", "weighted", "accuracy"):
            self.assertAllClose(history[name], wanted[name], rtol=1e-5)

    def test_tf_data_and_frames(self):
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

    def test_validation_and_clients(self):
        client = _weighted(12)
        x, y, weight = client
        train = _Trainer()
        history = train({0: client}, validation_data=client)
        wanted = train.fed.evaluate(
            x, y, sample_weight=weight.astype(np.float32), verbose=0
        )
        self.assertAllClose(history["val_loss"], [wanted], rtol=1e-5)
        values = train.fed.evaluate_clients({0: client}, verbose=0)
        self.assertAllClose(values["loss"], [wanted], rtol=1e-5)

    def test_several_outputs(self):
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

    def test_class_weights_that_are_refused_or_new(self):
        fed = toy.federated()
        for value, error, message in (
            ([1, 2], TypeError, "class_weight must map .*, got a list"),
            ({"a": 1.0}, TypeError, "got 'a': 1.0"),
            ({0: np.nan}, ValueError, "got 0: nan"),
        ):
            with self.assertRaisesRegex(error, message):
                toy.fit(fed, class_weight=value)
        self.assertEqual(fed.rounds, 0)
        toy.fit(fed)
        before = fed.engine
        toy.fit(fed)
        self.assertIs(fed.engine, before)
        toy.fit(fed, class_weight={0: 2.0})
        self.assertIsNot(fed.engine, before)


# What clients count in the mean.


def _clients(sizes=_SIZES):
    return {k: toy.arrays(size, seed=k) for k, size in enumerate(sizes)}


def _mean_of(clients, weighting, mechanism=_FIXED, batch_size=2, **options):
    """Trains a round of all clients; returns the trainer and the history."""
    train = _Trainer(
        num_clients=len(clients),
        mechanism=mechanism,
        client_weighting=weighting,
        **options,
    )
    return train, train(clients, batch_size=batch_size, local_epochs=2)


@functools.cache
def _updates(sizes=_SIZES):
    """Returns the update of each of `_clients` by a plain loop, in float64."""
    made = []
    for client in _clients(sizes).values():
        update = cohorts.reference_update(
            *(toy.two_layers(), client, tf.keras.optimizers.SGD(0.1), toy.loss()),
            batch_size=2,
            local_epochs=2,
        )
        made.append([each.astype(np.float64) for each in update])
    return made


def _expected(counted, clip=_S, divisor=4, sizes=_SIZES):
    """Returns sum_k w_k clip(Delta_k, S) / divisor, in float64."""
    updates = _updates(sizes)
    total = [np.zeros_like(each) for each in updates[0]]
    for update, w in zip(updates, counted, strict=True):
        factor = w * min(1.0, clip / max(_norm(update), 1e-30))
        for part, each in zip(total, update, strict=True):
            part += factor * each / divisor
    return total


class MeanTest(tf.test.TestCase, parameterized.TestCase):
    def _assert_close(self, moved, wanted):
        self.assertGreater(_norm(wanted), 1e-3)
        for one, other in zip(moved, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-7)

    @parameterized.parameters(*sorted(_PATHS))
    def test_the_papers_estimator(self, path):
        weighting = _NUM_EXAMPLES(cap=6, mean_weight=0.4)
        train, history = _mean_of(_clients(), weighting, **_PATHS[path])
        counted = [min(size / 6, 1.0) for size in _SIZES]
        self._assert_close(train.moved, _expected(counted, divisor=4 * 0.4))
        # Whoever counts less was clipped all the same.
        self.assertEqual(history["clipped_fraction"], [0.75])

    @parameterized.parameters("one_by_one", "side_by_side", "streamed")
    def test_by_the_weights_of_examples(self, path):
        # Weights of 1 train as none do, and count as they add up.
        clients = {
            k: (x, y, np.ones(len(y), np.float32)) for k, (x, y) in _clients().items()
        }
        train, _ = _mean_of(clients, _SAMPLE_WEIGHT(cap=6), **_PATHS[path])
        counted = [min(size / 6, 1.0) for size in _SIZES]
        self._assert_close(train.moved, _expected(counted))

    def test_a_median_is_of_the_norms_and_not_of_weights(self):
        sizes = (8, 6, 3, 5)
        median = float(np.median([_norm(each) for each in _updates(sizes)]))
        train, history = _mean_of(
            _clients(sizes),
            _NUM_EXAMPLES(cap=6),
            tfdp_fl.MedianClipping(noise_multiplier=0.0),
            num_replicas=2,
        )
        self.assertAllClose(history["clip_norm"], [median], rtol=1e-5)
        counted = [min(size / 6, 1.0) for size in sizes]
        self._assert_close(train.moved, _expected(counted, median, sizes=sizes))

    def test_adaptive_clipping_counts_each_bit_once(self):
        mechanism = tfdp_fl.AdaptiveClipping(
            noise_multiplier=0.0, initial_clip_norm=_S, count_noise_stddev=0.0
        )
        clips = []
        for weighting in (None, _NUM_EXAMPLES(cap=1000)):
            train, _ = _mean_of(_clients(), weighting, mechanism)
            clips.append(float(train.fed.engine.state.clip_norm))
        self.assertEqual(clips[0], clips[1])
        self.assertGreater(clips[0], _S)

    def test_without_privacy_it_is_mcmahans_weighted_mean(self):
        weighting = _NUM_EXAMPLES(cap=100)
        train, _ = _mean_of(_clients(), weighting, tfdp_fl.NoPrivacy())
        self._assert_close(train.moved, _expected(_SIZES, np.inf, sum(_SIZES)))

    def test_the_noise_and_its_price_are_the_same(self):
        # Noise of stddev z S on the sum, over m * mean_weight. 10 000 numbers
        # tell 2 % of a stddev at 5e-8 (chi-squared, normal approximation:
        # 5.45 stddevs of 0.7 % are 3.9 %), and a tenth is far beyond.
        x, y = toy.arrays(4)
        clients = dict.fromkeys(range(4), (x[:1], y[:1]))
        mechanism = tfdp_fl.FixedClipping(clip_norm=1e-3, noise_multiplier=50.0)

        def wide():
            layers = [tf.keras.layers.Dense(n) for n in (1100, toy.NUM_CLASSES)]
            return tf.keras.Sequential([tf.keras.layers.Input((8,)), *layers])

        spent = []
        for share in (1.0, 0.5):
            weighting = _NUM_EXAMPLES(cap=2, mean_weight=share) if share < 1 else None
            train, _ = _mean_of(clients, weighting, mechanism, model=wide())
            moved = np.concatenate([np.ravel(each) for each in train.moved])
            self.assertAllClose(np.std(moved), 50.0 * 1e-3 / (4 * share), rtol=0.04)
            spent.append(train.fed.epsilon(1e-5))
        self.assertEqual(*spent)


class AttackTest(tf.test.TestCase, parameterized.TestCase):
    """The sum moves by S at most, whatever a client says that it or they count."""

    def _added(self, client, path, weighting):
        nobody = tuple(each[:0] for each in client)
        train, _ = _mean_of(
            {0: client, 1: nobody}, weighting, batch_size=150, **_PATHS[path]
        )
        return 2 * _norm(train.moved)

    @parameterized.product(
        value=[1e38, -300.0, np.nan], path=["one_by_one", "side_by_side"]
    )
    def test_weights_of_examples_as_the_clients(self, value, path):
        x, y = toy.arrays(9)
        weight = np.ones(9, np.float32)
        weight[5] = value
        added = self._added((x, y, weight), path, _SAMPLE_WEIGHT(cap=0.1))
        self.assertLessEqual(added, _S * (1 + 1e-5))
        if not value > 0:
            self.assertEqual(added, 0.0)

    @parameterized.parameters("one_by_one", "side_by_side", "xla")
    def test_many_examples(self, path):
        added = self._added(toy.arrays(300), path, _NUM_EXAMPLES(cap=1))
        self.assertBetween(added, 0.999 * _S, _S * (1 + 1e-5))

    @parameterized.product(
        path=["one_by_one", "side_by_side", "a_few_at_a_time", "streamed"],
        weighting=[None, _SAMPLE_WEIGHT(cap=9)],
    )
    def test_the_norm_is_clipped_and_others_are_none_the_worse(self, path, weighting):
        clip = 0.3
        train = _Trainer(
            num_clients=2,
            mechanism=tfdp_fl.FixedClipping(clip_norm=clip, noise_multiplier=0),
            compiled={"weighted_metrics": ["accuracy"]},
            client_weighting=weighting,
            **_PATHS[path],
        )
        x, y, weight = _weighted(12)
        weight = weight.astype(np.float32)
        nobody = (x[:0], y[:0], weight[:0])
        for value in (1e38, -3.0, np.nan, np.inf):
            bad = np.where(np.arange(12) == 5, value, weight).astype(np.float32)
            history = train({"bad": (x, y, bad), "none": nobody})
            # The mean is over two clients, one of whom hands in nothing.
            moved = 2 * _norm(train.moved)
            self.assertLessEqual(moved, clip * (1 + 1e-5))
            if not np.isfinite(value):
                self.assertEqual(moved, 0.0)
                self.assertEqual(history["discarded_clients"], [1.0])
        bad = np.where(np.arange(12) == 5, np.nan, weight).astype(np.float32)
        found = []
        for other in ((x, y, bad), nobody):
            history = train({0: (x, y, weight), 1: other})
            found.append(toy.flat(train.fed))
            self.assertTrue(np.isfinite(history["loss"][0]))
        np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


class FrontTest(parameterized.TestCase):
    def test_the_statement_says_it(self):
        fed = toy.federated(client_weighting=_NUM_EXAMPLES(cap=6, mean_weight=0.4))
        toy.fit(fed)
        text = " ".join(fed.privacy_statement(1e-3).split())
        for part in (
            "counts by its number of examples n, as min(n / 6, 1)",
            "divided by m times 0.4, which was given beforehand",
            "the expected mean of the clients' weights count as given before",
        ):
            self.assertIn(part, text)
        facts = fed.privacy_statement(1e-3, format="dict")
        self.assertIn("cap=6.0", str(facts))

    @parameterized.parameters(
        ({"mechanism": tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1)}, "LocalDP"),
        (
            {"secure_aggregation": secure_aggregation.AdditiveSecretSharing()},
            "secure_aggregation",
        ),
    )
    def test_refused_when_made(self, options, message):
        with self.assertRaisesRegex(
            ValueError, f"client_weighting must be None with {message}"
        ):
            toy.federated(**{"client_weighting": _NUM_EXAMPLES(cap=6), **options})

    def test_clients_without_weights_of_examples(self):
        fed = toy.federated(client_weighting=_SAMPLE_WEIGHT(cap=6))
        with self.assertRaisesRegex(
            ValueError, "client_weighting must be .*sample_weight"
        ):
            toy.fit(fed)
        self.assertEqual(fed.rounds, 0)
