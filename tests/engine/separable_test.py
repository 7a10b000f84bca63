"""What may train side by side is a sum over rows: one by one gives the same."""

from __future__ import annotations

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import stacks
from tests.engine import cohorts
from tfdp_fl import losses as our_losses
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models, separable

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


def _round(clients, beside, *, loss, metrics=(), layers=(), activation="tanh"):
    """Returns weights and logs after a round, and whether it went so."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [
            tf.keras.Input([4]),
            *layers,
            _layers.Dense(6, activation),
            _layers.Dense(_CLASSES, "sigmoid"),
        ]
    )
    dataset = FederatedDataset.from_client_arrays(clients)
    engine = cohorts.make_engine(
        model,
        dataset,
        loss=loss,
        training={"metrics": list(metrics)},
        jit_compile=None if beside else False,
    )
    with mock.patch.object(dense_models, "is_worthwhile", lambda *_: True):
        logs = cohorts.run_round(engine, dataset, local_epochs=1)
    used = engine.has_trained_side_by_side
    return model.get_weights(), logs, used


class SeparableTest(tf.test.TestCase, parameterized.TestCase):
    def _assert_same(self, clients, **options):
        fast, fast_logs, used = _round(clients, True, **options)
        slow, slow_logs, _ = _round(clients, False, **options)
        self.assertTrue(used)
        for one, other in zip(fast, slow, strict=True):
            self.assertAllClose(one, other, rtol=1e-4, atol=1e-6)
        self.assertAllClose(fast_logs, slow_logs, rtol=1e-4)

    @parameterized.parameters(*separable.LOSSES)
    def test_every_allowed_loss(self, loss):
        self._assert_same(_clients(_labels_for(loss.__name__)), loss=loss())

    def test_the_allowed_functions_are_those_that_these_losses_compute(self):
        functions = [loss().fn for loss in separable.LOSSES]
        self.assertCountEqual(separable.LOSS_FUNCTIONS, functions)
        for function in functions:
            self.assertTrue(separable.is_mean_over_rows(function))
        loss = functions[0]
        self._assert_same(_clients(_labels_for(loss.__name__)), loss=loss)

    def test_every_allowed_metric(self):
        by_labels = {}
        for metric in separable.METRICS:
            kind = _labels_for(metric.__name__)
            if metric is tf.keras.metrics.Accuracy:
                kind = "bits"
            by_labels.setdefault(kind, []).append(metric())
        losses = {"sparse": "sparse_categorical_crossentropy"}
        for kind, metrics in by_labels.items():
            with self.subTest(kind):
                self._assert_same(
                    _clients(kind),
                    loss=losses.get(kind, "mse"),
                    metrics=metrics,
                )

    @parameterized.parameters(
        *("accuracy", "mse", "binary_accuracy"),
        *([] if stacks.KERAS_3 else ["ce"]),
    )
    def test_metrics_by_name(self, name):
        kind = "numbers" if name == "mse" else "bits"
        self._assert_same(_clients(kind), loss="mse", metrics=[name])

    @parameterized.parameters(*separable.ACTIVATIONS)
    def test_every_allowed_activation(self, activation):
        self._assert_same(
            _clients("sparse"),
            loss="sparse_categorical_crossentropy",
            activation=activation,
            layers=[_layers.Activation(activation)],
        )

    def test_every_allowed_layer(self):
        self._assert_same(
            _clients("sparse"),
            loss="sparse_categorical_crossentropy",
            layers=[
                _layers.Flatten(),
                _layers.ReLU(),
                _layers.LeakyReLU(),
                _layers.Rescaling(0.5, 0.1),
            ],
        )

    @parameterized.named_parameters(
        (
            "ignore_class",
            {"loss": tf.keras.losses.SparseCategoricalCrossentropy(ignore_class=0)},
            "sparse",
        ),
        ("hinge", {"loss": "hinge"}, "bits"),
        ("squared_hinge", {"loss": tf.keras.losses.SquaredHinge()}, "bits"),
        (
            "balanced",
            {"loss": our_losses.BalancedSoftmaxCrossentropy(0.1)},
            "sparse",
        ),
        (
            "sum",
            {"loss": tf.keras.losses.MeanSquaredError(reduction="sum")},
            "numbers",
        ),
        (
            "own_call",
            {"loss": type("Own", (tf.keras.losses.MeanSquaredError,), {})()},
            "numbers",
        ),
        (
            "metric",
            {
                "loss": "mse",
                "metrics": [tf.keras.metrics.Hinge()],
            },
            "bits",
        ),
        (
            "own_metric",
            {
                "loss": "mse",
                "metrics": [lambda y, p: tf.reduce_max(y - p)],
            },
            "bits",
        ),
        (
            "regulariser",
            {
                "loss": "mse",
                "layers": [_layers.Activation("relu", activity_regularizer="l2")],
            },
            "bits",
        ),
        (
            "scale_of_rows",
            {
                "loss": "mse",
                "layers": [_layers.Rescaling(np.ones([1, 4], np.float32))],
            },
            "bits",
        ),
    )
    def test_what_is_not_listed_trains_one_by_one(self, options, kind):
        *_, used = _round(_clients(kind), True, **options)
        self.assertFalse(used)

    def test_one_clients_labels_do_not_move_anothers_update(self):
        # With ignore_class, Keras rescales by the rows of the whole batch.
        loss = tf.keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
        clients = _clients("sparse")
        alone, *_ = _round({1: clients[1]}, True, loss=loss)
        x, y = clients[0]
        moved = []
        for labels in (np.zeros_like(y), np.ones_like(y)):
            both, *_ = _round({0: (x, labels), 1: clients[1]}, True, loss=loss)
            first, *_ = _round({0: (x, labels)}, True, loss=loss)
            moved.append([2 * b - f for b, f in zip(both, first, strict=True)])
        for one, other, wanted in zip(*moved, alone, strict=True):
            self.assertAllClose(one, wanted, atol=1e-5)
            self.assertAllClose(other, wanted, atol=1e-5)


if __name__ == "__main__":
    tf.test.main()
