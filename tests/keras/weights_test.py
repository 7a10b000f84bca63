"""Weights of examples and of classes: what Keras does, under the same clip."""

from __future__ import annotations

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models

CLASS_WEIGHT = {0: 0.25, 2: 3.0}


def _weighted(count: int, seed: int = 3):
    x, y = toy.arrays(count, seed)
    weight = np.random.default_rng(seed).exponential(size=count)
    return x, y, weight


def _model(kind: str) -> tf.keras.Model:
    if kind != "functional":
        return toy.two_layers()
    tf.keras.utils.set_random_seed(1)
    inputs = tf.keras.Input((8,))
    hidden = tf.keras.layers.Dense(5, activation="tanh")(inputs)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(3)(hidden))


def _dataset(client, streamed: bool) -> FederatedDataset:
    if streamed:
        return FederatedDataset.from_client_fn([0], lambda _: client)
    return FederatedDataset.from_client_arrays({0: client})


def _by_keras(client, class_weight, batch_size, epochs, options=None):
    model = toy.two_layers()
    model.compile(tf.keras.optimizers.SGD(0.1), toy.loss(), **(options or {}))
    x, y, *weight = client
    if class_weight is not None:
        class_weight = {k: class_weight.get(k, 1.0) for k in range(3)}
    if class_weight is not None and weight:
        # Keras 3 does not take both; Keras 2 multiplies.
        weight = [weight[0] * np.vectorize(class_weight.get)(y)]
        class_weight = None
    history = model.fit(
        x,
        y,
        batch_size,
        epochs,
        sample_weight=np.asarray(weight[0], np.float32) if weight else None,
        class_weight=class_weight,
        shuffle=False,
        verbose=0,
    )
    return model.get_weights(), history.history


def _trained(
    clients,
    *,
    class_weight=None,
    beside=False,
    few=False,
    model=None,
    mechanism=None,
    rounds=1,
    jit_compile=False,
    compile_options=None,
    runtime=None,
    **options,
):
    fed = toy.federated(
        mechanism or tfdp_fl.NoPrivacy(),
        model or toy.two_layers(),
        clients.num_clients,
        compile_options={
            "jit_compile": None if beside else jit_compile,
            **(compile_options or {}),
        },
    )
    with mock.patch.multiple(
        dense_models, is_worthwhile=lambda *_: beside, is_small=lambda *_: few
    ):
        history = fed.fit(
            clients,
            rounds,
            class_weight=class_weight,
            verbose=0,
            seed=1,
            runtime=runtime,
            **{"batch_size": 4, "local_epochs": 3, **options},
        )
    if beside:
        assert fed.engine.has_trained_side_by_side
    return fed, history.history


_PATHS = {
    "one_by_one": {},
    "functional": {"model": "functional"},
    "side_by_side": {"beside": True},
    "side_by_side_few": {"beside": True, "few": True},
    "streamed": {"streamed": True},
    "xla": {"jit_compile": True, "batch_size": 5},
    "xla_short_batches": {"jit_compile": True},
}


class AsKerasTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *((path, "both") for path in sorted(_PATHS)),
        ("one_by_one", "classes"),
        ("side_by_side", "classes"),
        ("one_by_one", "examples"),
    )
    def test_one_client_without_noise(self, path, weights):
        options = dict(_PATHS[path])
        client = _weighted(15)
        class_weight = None if weights == "examples" else CLASS_WEIGHT
        if weights == "classes":
            client = client[:2]
        batch_size = options.setdefault("batch_size", 4)
        wanted, _ = _by_keras(client, class_weight, batch_size, 3)
        dataset = _dataset(client, options.pop("streamed", False))
        model = options.pop("model", None)
        fed, _ = _trained(
            dataset,
            class_weight=class_weight,
            model=model and _model(model),
            **options,
        )
        for one, other in zip(fed.get_weights(), wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
        # They are not what training without weights comes to.
        plain, _ = _by_keras(client[:2], None, batch_size, 3)
        self.assertGreater(np.abs(plain[0] - wanted[0]).max(), 1e-3)

    @parameterized.parameters(False, True)
    def test_the_loss_and_the_weighted_metrics(self, beside):
        def options():
            return {
                "metrics": ["accuracy"],
                "weighted_metrics": [
                    tf.keras.metrics.SparseCategoricalAccuracy(name="weighted")
                ],
            }

        client = _weighted(15)
        _, wanted = _by_keras(client, CLASS_WEIGHT, 4, 1, options())
        _, history = _trained(
            _dataset(client, False),
            class_weight=CLASS_WEIGHT,
            beside=beside,
            local_epochs=1,
            compile_options=options(),
        )
        for name in ("loss", "accuracy", "weighted"):
            self.assertAllClose(history[name], wanted[name], rtol=1e-5)

    def test_tf_data_and_frames(self):
        pandas = __import__("pandas")
        x, y, weight = _weighted(15)
        frame = pandas.DataFrame(x, columns=[f"x{k}" for k in range(8)])
        frame = frame.assign(who="a", y=y, w=weight)
        made = [
            FederatedDataset.from_client_arrays({"a": (x, y, weight)}),
            FederatedDataset.from_dataframe(frame, "who", label="y", sample_weight="w"),
            FederatedDataset.from_tf_datasets(
                {"a": tf.data.Dataset.from_tensor_slices((x, y, weight))}
            ),
            FederatedDataset.from_tf_datasets(
                {
                    "a": tf.data.Dataset.from_tensor_slices(
                        {"x": x, "y": y, "sample_weight": weight}
                    )
                }
            ),
            FederatedDataset.from_indices(x, y, [range(15)], sample_weight=weight),
        ]
        wanted, _ = _by_keras((x, y, weight), None, 4, 3)
        for dataset in made:
            fed, _ = _trained(dataset)
            for one, other in zip(fed.get_weights(), wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)

    def test_validation_and_clients(self):
        client = _weighted(12)
        x, y, weight = client
        fed, history = _trained(_dataset(client, False), validation_data=client)
        wanted = fed.evaluate(x, y, sample_weight=weight.astype(np.float32), verbose=0)
        self.assertAllClose(history["val_loss"], [wanted], rtol=1e-5)
        values = fed.evaluate_clients({0: client}, verbose=0)
        self.assertAllClose(values["loss"], [wanted], rtol=1e-5)

    def test_several_outputs(self):
        def model():
            tf.keras.utils.set_random_seed(1)
            inputs = tf.keras.Input((8,))
            outputs = [tf.keras.layers.Dense(3, name=name)(inputs) for name in "ab"]
            return tf.keras.Model(inputs, outputs)

        x, y, weight = _weighted(12)
        other = weight[::-1].copy()
        client = (x, (y, y), (weight, other))
        own = model()
        own.compile(tf.keras.optimizers.SGD(0.1), [toy.loss(), toy.loss()])
        own.fit(
            x,
            [y, y],
            4,
            3,
            sample_weight=[weight, other],
            shuffle=False,
            verbose=0,
        )
        fed, _ = _trained(
            _dataset(client, False),
            model=model(),
            compile_options={"loss": [toy.loss(), toy.loss()]},
        )
        for one, same in zip(fed.get_weights(), own.get_weights(), strict=True):
            np.testing.assert_allclose(one, same, rtol=1e-6, atol=1e-7)


class AttackTest(tf.test.TestCase, parameterized.TestCase):
    """The clip holds whatever a client says that its examples count."""

    @parameterized.product(
        value=[1e38, -3.0, np.nan, np.inf],
        path=["one_by_one", "side_by_side", "side_by_side_few", "streamed"],
    )
    def test_the_norm_is_clipped(self, value, path):
        options = dict(_PATHS[path])
        clip = 0.3
        x, y, weight = _weighted(12)
        weight = weight.astype(np.float32)
        weight[5] = value
        clients = {"bad": (x, y, weight), "none": (x[:0], y[:0], weight[:0])}
        if options.pop("streamed", False):
            dataset = FederatedDataset.from_client_fn(
                list(clients), clients.__getitem__
            )
        else:
            dataset = FederatedDataset.from_client_arrays(clients)
        model = toy.two_layers()
        before = model.get_weights()
        mechanism = tfdp_fl.FixedClipping(clip_norm=clip, noise_multiplier=0)
        fed, history = _trained(dataset, model=model, mechanism=mechanism, **options)
        # The mean is over two clients, one of whom hands in nothing.
        moved = 2 * np.sqrt(
            sum(
                np.sum(np.square((a - b).astype(np.float64)))
                for a, b in zip(fed.get_weights(), before, strict=True)
            )
        )
        self.assertLessEqual(moved, clip * (1 + 1e-5))
        if not np.isfinite(value):
            self.assertEqual(moved, 0.0)
            self.assertEqual(history["discarded_clients"], [1.0])

    @parameterized.parameters("one_by_one", "side_by_side", "side_by_side_few")
    def test_others_are_none_the_worse(self, path):
        x, y, weight = _weighted(12)
        weight = weight.astype(np.float32)
        bad = np.where(np.arange(12) == 5, np.nan, weight)
        mechanism = tfdp_fl.FixedClipping(clip_norm=0.3, noise_multiplier=0)
        moved = []
        for other in ((x, y, bad), (x[:0], y[:0], weight[:0])):
            dataset = FederatedDataset.from_client_arrays({0: (x, y, weight), 1: other})
            fed, history = _trained(
                dataset,
                mechanism=mechanism,
                compile_options={
                    "weighted_metrics": ["accuracy"],
                },
                **_PATHS[path],
            )
            moved.append(fed.get_weights())
            self.assertTrue(np.isfinite(history["loss"][0]))
        for one, same in zip(*moved, strict=True):
            np.testing.assert_allclose(one, same, rtol=1e-5, atol=1e-6)


class RefusedTest(parameterized.TestCase):
    @parameterized.parameters(
        ([1, 2], TypeError, "class_weight must map .*, got a list"),
        ({}, ValueError, "class_weight must map .*, got none"),
        ({"a": 1.0}, TypeError, "got 'a': 1.0"),
        ({0: "1"}, TypeError, "got 0: '1'"),
        ({-1: 1.0}, ValueError, "got -1: 1.0"),
        ({0: np.nan}, ValueError, "got 0: nan"),
        ({3: 1.0}, ValueError, "classes of the model, from 0 to 2, got 3"),
    )
    def test_class_weight(self, value, error, message):
        fed = toy.federated()
        with self.assertRaisesRegex(error, message):
            fed.fit(toy.clients(), class_weight=value, verbose=0)
        self.assertEqual(fed.rounds, 0)

    def test_class_weight_of_a_regression_with_two_outputs(self):
        inputs = tf.keras.Input((8,))
        outputs = [tf.keras.layers.Dense(3)(inputs) for _ in "ab"]
        fed = toy.federated(
            model=tf.keras.Model(inputs, outputs),
            compile_options={"loss": [toy.loss(), toy.loss()]},
            clients_per_round=1,
        )
        x, y = toy.arrays(5)
        with self.assertRaisesRegex(ValueError, "class_weight must be None"):
            fed.fit({0: (x, (y, y))}, class_weight={0: 1.0}, verbose=0)

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
