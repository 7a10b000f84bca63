"""Weights of examples and of classes: what Keras does, under the same clip."""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models

CLASS_WEIGHT = {0: 0.25, 2: 3.0}
_PATHS = {
    "one_by_one": {},
    "side_by_side": {"beside": True},
    "side_by_side_few": {"beside": True, "few": True},
    "streamed": {"streamed": True},
    "xla": {"jit_compile": True},
}


def _weighted(count: int, seed: int = 3):
    x, y = toy.arrays(count, seed)
    weight = np.random.default_rng(seed).exponential(size=count)
    return x, y, weight


def _dataset(clients, streamed=False) -> FederatedDataset:
    if streamed:
        return FederatedDataset.from_client_fn(list(clients), clients.__getitem__)
    return FederatedDataset.from_client_arrays(clients)


@functools.cache
def _by_keras(weights: str, batch_size: int, epochs: int = 3, metrics: bool = False):
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
    history = model.fit(
        x,
        y,
        batch_size,
        epochs,
        sample_weight=counted.astype(np.float32),
        shuffle=False,
        verbose=0,
    )
    return model.get_weights(), history.history


def _metrics():
    weighted = tf.keras.metrics.SparseCategoricalAccuracy(name="weighted")
    return {"metrics": ["accuracy"], "weighted_metrics": [weighted]}


class _Trainer:
    """Trains all of some clients again and again, from the same weights."""

    def __init__(
        self,
        *,
        num_clients=1,
        beside=False,
        few=False,
        streamed=False,
        jit_compile=False,
        batch_size=4,
        mechanism=None,
        model=None,
        **compiled,
    ):
        self._beside, self._few, self._streamed = beside, few, streamed
        self._batch_size = batch_size
        self.fed = toy.federated(
            mechanism or tfdp_fl.NoPrivacy(),
            model or toy.two_layers,
            num_clients,
            compile_options={
                "jit_compile": None if beside else jit_compile,
                **compiled,
            },
        )
        self.before = self.fed.get_weights()

    def __call__(self, clients, local_epochs=3, **options):
        self.fed.set_weights(self.before)
        if isinstance(clients, dict):
            clients = _dataset(clients, self._streamed)
        with mock.patch.multiple(
            dense_models,
            is_worthwhile=lambda *_: self._beside,
            is_small=lambda *_: self._few,
        ):
            history = self.fed.fit(
                clients,
                batch_size=self._batch_size,
                local_epochs=local_epochs,
                seed=1,
                verbose=0,
                **options,
            )
        assert not self._beside or self.fed.engine.has_trained_side_by_side
        return history.history


def _assert_close(one, other):
    for own, others in zip(toy.weights_of(one), toy.weights_of(other), strict=True):
        np.testing.assert_allclose(own, others, rtol=1e-6, atol=1e-7)


class AsKerasTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *((path, "both") for path in sorted(_PATHS)),
        ("side_by_side", "classes"),
        ("one_by_one", "examples"),
    )
    def test_one_client_without_noise(self, path, weights):
        client = _weighted(15)
        options = {}
        if weights != "examples":
            options["class_weight"] = CLASS_WEIGHT
        if weights == "classes":
            client = client[:2]
        wanted, _ = _by_keras(weights, 4)
        train = _Trainer(**_PATHS[path])
        train({0: client}, **options)
        _assert_close(train.fed, wanted)
        # They are not what training without weights comes to.
        plain, _ = _by_keras("none", 4)
        self.assertGreater(np.abs(plain[0] - wanted[0]).max(), 1e-3)

    @parameterized.parameters(False, True)
    def test_the_loss_and_the_weighted_metrics(self, beside):
        _, wanted = _by_keras("both", 4, 1, metrics=True)
        train = _Trainer(beside=beside, **_metrics())
        history = train({0: _weighted(15)}, class_weight=CLASS_WEIGHT, local_epochs=1)
        self.assertAllClose(history["loss"], wanted["loss"], rtol=1e-5)
        self.assertAllClose(history["weighted"], wanted["weighted"], rtol=1e-5)
        self.assertAllClose(history["accuracy"], wanted["accuracy"], rtol=1e-5)

    def test_tf_data_and_frames(self):
        pandas = __import__("pandas")
        x, y, weight = _weighted(15)
        frame = pandas.DataFrame(x, columns=[f"x{k}" for k in range(8)])
        frame = frame.assign(who="a", y=y, w=weight)
        rows = tf.data.Dataset.from_tensor_slices
        named = {"x": x, "y": y, "sample_weight": weight}
        train, (wanted, _) = _Trainer(), _by_keras("examples", 4)
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
        own = model()
        own.compile(tf.keras.optimizers.SGD(0.1), [toy.loss(), toy.loss()])
        own.fit(x, [y, y], 4, 3, sample_weight=list(weights), shuffle=False, verbose=0)
        train = _Trainer(model=model(), loss=[toy.loss(), toy.loss()])
        train({0: (x, (y, y), weights)})
        _assert_close(train.fed, own)


class AttackTest(parameterized.TestCase):
    """The clip holds whatever a client says that its examples count."""

    @parameterized.parameters(
        "one_by_one", "side_by_side", "side_by_side_few", "streamed"
    )
    def test_the_norm_is_clipped_and_others_are_none_the_worse(self, path):
        clip = 0.3
        mechanism = tfdp_fl.FixedClipping(clip_norm=clip, noise_multiplier=0)
        train = _Trainer(
            num_clients=2,
            mechanism=mechanism,
            weighted_metrics=["accuracy"],
            **_PATHS[path],
        )
        x, y, weight = _weighted(12)
        weight = weight.astype(np.float32)
        nobody = (x[:0], y[:0], weight[:0])
        for value in (1e38, -3.0, np.nan, np.inf):
            bad = np.where(np.arange(12) == 5, value, weight).astype(np.float32)
            history = train({"bad": (x, y, bad), "none": nobody})
            # The mean is over two clients, one of whom hands in nothing.
            moved = 2 * np.linalg.norm(toy.flat(train.fed) - toy.flat(train.before))
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


class RefusedTest(parameterized.TestCase):
    def test_class_weight(self):
        fed = toy.federated()
        for value, error, message in (
            ([1, 2], TypeError, "class_weight must map .*, got a list"),
            ({"a": 1.0}, TypeError, "got 'a': 1.0"),
            ({0: np.nan}, ValueError, "got 0: nan"),
            ({3: 1.0}, ValueError, "classes of the model, from 0 to 2, got 3"),
        ):
            with self.assertRaisesRegex(error, message):
                fed.fit(toy.clients(), class_weight=value, verbose=0)
        self.assertEqual(fed.rounds, 0)

    def test_a_new_class_weight_makes_a_new_engine(self):
        fed = toy.federated()
        fed.fit(toy.clients(), verbose=0)
        before = fed.engine
        fed.fit(toy.clients(), verbose=0)
        self.assertIs(fed.engine, before)
        fed.fit(toy.clients(), class_weight={0: 2.0}, verbose=0)
        self.assertIsNot(fed.engine, before)


if __name__ == "__main__":
    absltest.main()
