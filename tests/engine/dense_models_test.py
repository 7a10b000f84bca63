"""What may train side by side is a function of single rows, or a sum of them."""

from __future__ import annotations

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.engine import cohorts
from tfdp_fl import keras_versions
from tfdp_fl import losses as our_losses
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models, trainer
from tfdp_fl.mechanisms import Deployment

_SIZES, _CLASSES = (5, 2, 7), 3
_layers = tf.keras.layers


def _clients(kind):
    """Returns clients with labels of a kind."""
    rng = np.random.default_rng(0)
    clients = {}
    for k, size in enumerate(_SIZES):
        labels = {
            "sparse": rng.integers(0, _CLASSES, size),
            "one_hot": np.eye(_CLASSES)[rng.integers(0, _CLASSES, size)],
            "bits": rng.integers(0, 2, [size, _CLASSES]),
            "numbers": rng.uniform(0.1, 2, [size, _CLASSES]),
        }[kind]
        if kind != "sparse":
            labels = labels.astype(np.float32)
        clients[k] = (rng.normal(size=[size, 4]).astype(np.float32), labels)
    return clients


def _labels_for(name):
    name = name.lower().replace("_", "")
    if "sparse" in name:
        return "sparse"
    if "categorical" in name:
        return "one_hot"
    numbers = ("mean", "poisson", "huber", "log", "cosine", "kl", "root")
    return "numbers" if name.startswith(numbers) else "bits"


def _model(layers=(), activation="tanh"):
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            tf.keras.Input([4]),
            *layers,
            _layers.Dense(6, activation),
            _layers.Dense(_CLASSES, "sigmoid"),
        ]
    )


def _sums(clients, engine):
    """Returns what clients add up to, and the metrics' state."""
    dataset = FederatedDataset.from_client_arrays(clients)
    inputs = cohorts.inputs(dataset, local_epochs=1)
    with mock.patch.object(dense_models, "is_worthwhile", lambda *_: True):
        (total,) = engine.collect(dataset, inputs).sums
    return total


def _batch(kind):
    """Returns labels and outputs, rows of which differ."""
    clients = _clients(kind).values()
    labels = np.concatenate([labels for _, labels in clients])
    outputs = np.random.default_rng(1).dirichlet(np.ones(_CLASSES), len(labels))
    return labels, outputs.astype(np.float32)


class SeparableTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*dense_models.LOSSES)
    def test_every_allowed_loss_is_a_mean_over_rows(self, kind):
        loss, (labels, outputs) = kind(), _batch(_labels_for(kind.__name__))
        self.assertTrue(dense_models.is_mean_over_rows(loss))
        self.assertTrue(dense_models.is_mean_over_rows(loss.fn))
        rows = [
            float(loss(labels[k : k + 1], outputs[k : k + 1]))
            for k in range(len(labels))
        ]
        self.assertAllClose(loss(labels, outputs), np.mean(rows), rtol=1e-5)
        # The engine takes its gradient from these.
        of_rows = keras_versions.losses_of_rows(loss, labels, outputs)
        self.assertAllClose(of_rows, rows, rtol=1e-5, atol=1e-7)

    @parameterized.parameters(
        *dense_models.METRICS,
        *("accuracy", "mse", "binary_accuracy"),
    )
    def test_every_allowed_metric_adds_up_over_rows(self, kind):
        by_name = isinstance(kind, str)
        name = kind if by_name else kind.__name__
        labels, outputs = _batch("bits" if name[1:] == "ccuracy" else _labels_for(name))
        metric = kind if by_name else kind()
        self.assertTrue(dense_models._is_sum_over_rows(metric))
        compiled = keras_versions.compiled_loss_and_metrics(
            _model(), "mse", [metric], None, None
        )[1]
        compiled.build(labels, outputs)
        nothing = [tf.zeros(v.shape, v.dtype) for v in compiled.variables]
        whole = compiled.stateless_update_state(nothing, labels, outputs, None)
        rows = [
            compiled.stateless_update_state(
                nothing, labels[k : k + 1], outputs[k : k + 1], None
            )
            for k in range(len(labels))
        ]
        for one, *others in zip(whole, *rows, strict=True):
            self.assertAllClose(one, np.sum(others, axis=0), rtol=1e-5)

    @parameterized.parameters(*dense_models.ACTIVATIONS)
    def test_every_allowed_activation_takes_rows_one_by_one(self, activation):
        x = np.random.default_rng(0).normal(size=[5, 4]).astype(np.float32)
        rows = [activation(tf.constant(x[k : k + 1]))[0] for k in range(5)]
        self.assertAllClose(activation(tf.constant(x)), rows)
        self.assertTrue(
            self._is_supported(
                layers=[_layers.Activation(activation)], activation=activation
            )
        )

    def test_every_allowed_layer_takes_rows_one_by_one(self):
        x = np.random.default_rng(0).normal(size=[5, 4]).astype(np.float32)
        layers = [
            _layers.Flatten(),
            _layers.ReLU(),
            _layers.LeakyReLU(),
            _layers.Rescaling(0.5, 0.1),
        ]
        for layer in layers:
            rows = [layer(x[k : k + 1])[0] for k in range(5)]
            self.assertAllClose(layer(x), rows)
        self.assertTrue(self._is_supported(layers=layers))

    @parameterized.parameters("sparse", "bits")
    def test_one_by_one_gives_the_same(self, kind):
        loss = "mse" if kind == "bits" else "sparse_categorical_crossentropy"
        metrics = ["accuracy", tf.keras.metrics.AUC()] if kind == "bits" else ["acc"]
        totals = []
        for jit_compile in (None, False):
            engine = cohorts.make_engine(
                _model([_layers.Activation("softmax"), _layers.LeakyReLU()]),
                FederatedDataset.from_client_arrays(_clients(kind)),
                jit_compile=jit_compile,
                loss=loss,
                training={"metrics": metrics},
            )
            totals.append(_sums(_clients(kind), engine))
            self.assertEqual(engine.has_trained_side_by_side, jit_compile is None)
        for one, other in zip(*map(tf.nest.flatten, totals), strict=True):
            self.assertAllClose(one, other, rtol=1e-4, atol=1e-6)

    def _is_supported(self, loss="mse", metrics=None, **options):
        training = trainer.LocalTraining(
            optimizer=tf.keras.optimizers.SGD(0.1), loss=loss, metrics=metrics
        )
        query = tfdp_fl.NoPrivacy().bind(Deployment(clients_per_round=3))
        return dense_models.supports(_model(**options), training, query)

    @parameterized.named_parameters(
        (
            "ignore_class",
            {"loss": tf.keras.losses.SparseCategoricalCrossentropy(ignore_class=0)},
        ),
        ("hinge", {"loss": "hinge"}),
        ("squared_hinge", {"loss": tf.keras.losses.SquaredHinge()}),
        (
            "balanced",
            {"loss": our_losses.BalancedSoftmaxCrossentropy(0.1)},
        ),
        (
            "sum",
            {"loss": tf.keras.losses.MeanSquaredError(reduction="sum")},
        ),
        (
            "own_call",
            {"loss": type("Own", (tf.keras.losses.MeanSquaredError,), {})()},
        ),
        (
            "metric",
            {
                "loss": "mse",
                "metrics": [tf.keras.metrics.Hinge()],
            },
        ),
        (
            "own_metric",
            {
                "loss": "mse",
                "metrics": [lambda y, p: tf.reduce_max(y - p)],
            },
        ),
        (
            "regulariser",
            {
                "loss": "mse",
                "layers": [_layers.Activation("relu", activity_regularizer="l2")],
            },
        ),
        (
            "scale_of_rows",
            {
                "loss": "mse",
                "layers": [_layers.Rescaling(np.ones([1, 4], np.float32))],
            },
        ),
    )
    def test_what_is_not_listed_trains_one_by_one(self, options):
        self.assertFalse(self._is_supported(**options))

    def test_one_clients_labels_do_not_move_anothers_update(self):
        # With ignore_class, Keras rescales by the rows of the whole batch.
        loss = tf.keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
        clients = _clients("sparse")
        dataset = FederatedDataset.from_client_arrays(clients)
        engine = cohorts.make_engine(_model(), dataset, loss=loss, jit_compile=None)

        def updates(clients):
            return _sums(clients, engine).contribution.update

        alone = updates({1: clients[1]})
        self.assertFalse(engine.has_trained_side_by_side)
        x, y = clients[0]
        for labels in (np.zeros_like(y), np.ones_like(y)):
            both = updates({0: (x, labels), 1: clients[1]})
            first = updates({0: (x, labels)})
            for b, f, wanted in zip(both, first, alone, strict=True):
                self.assertAllClose(b - f, wanted, atol=1e-5)
