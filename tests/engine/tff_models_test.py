"""Keras 2 in TFF's environment, through TFF's functional models."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tfdp_fl import datasets

_layers, _optimizers = tf.keras.layers, tf.keras.optimizers


def _model(*hidden):
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            _layers.InputLayer((4,)),
            *(hidden or [_layers.Dense(6, "tanh")]),
            _layers.Dense(3),
        ]
    )


def _clients(num_clients=4):
    rng = np.random.default_rng(0)
    return {
        f"c{k}": (
            rng.normal(size=[5 + k, 4]).astype(np.float32),
            rng.integers(0, 3, 5 + k),
        )
        for k in range(num_clients)
    }


def _loss():
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _fit(model, clients, mechanism=None, optimizer=None, compiled=None, **fit):
    federated = tfdp_fl.DPFederatedModel(
        model,
        mechanism or tfdp_fl.NoPrivacy(),
        clients_per_round=len(clients),
        sampling="fixed_size",
    )
    compiled = {"loss": _loss(), "metrics": ["accuracy"], **(compiled or {})}
    federated.compile(optimizer or _optimizers.SGD(0.5), **compiled)
    return federated.fit(clients, batch_size=5, verbose=0, **fit).history


class FunctionalTrainerTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("sgd", lambda: _optimizers.SGD(0.5)),
        ("momentum", lambda: _optimizers.SGD(0.5, 0.9)),
        ("adam", lambda: _optimizers.Adam(0.1)),
    )
    def test_a_round_is_the_mean_of_a_plain_keras_loop(self, optimizer):
        clients, model = _clients(), _model()
        start = model.get_weights()
        updates = []
        for x, y in clients.values():
            alone = _model()
            alone.set_weights(start)
            alone.compile(optimizer(), _loss())
            alone.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
            updates.append(
                [new - old for new, old in zip(alone.get_weights(), start, strict=True)]
            )
        history = _fit(model, clients, optimizer=optimizer(), local_epochs=2)
        for place, (new, old) in enumerate(
            zip(model.get_weights(), start, strict=True)
        ):
            mean = np.mean([update[place] for update in updates], axis=0)
            self.assertAllClose(new - old, mean, atol=2e-5, rtol=1e-4)
        self.assertBetween(history["accuracy"][0], 0.05, 1.0)

    def test_a_hostile_client_moves_the_model_by_its_clip(self):
        clients = _clients()
        clients["c1"] = (np.full([5, 4], 1e30, np.float32), np.zeros(5, np.int64))
        clients["c2"] = (np.full([5, 4], np.nan, np.float32), np.zeros(5, np.int64))
        model = _model()
        start = model.get_weights()
        mechanism = tfdp_fl.FixedClipping(clip_norm=0.1, noise_multiplier=0.0)
        _fit(model, clients, mechanism, _optimizers.SGD(100.0))
        moved = [new - old for new, old in zip(model.get_weights(), start, strict=True)]
        norm = np.sqrt(sum(np.sum(part.astype(np.float64) ** 2) for part in moved))
        self.assertBetween(norm, 1e-4, 0.1 * (1 + 1e-5))

    def test_target_evaluation_and_metrics_of_clients(self):
        clients, test = datasets.load_digits(num_clients=100)
        model = tf.keras.Sequential([_layers.InputLayer((64,)), _layers.Dense(10)])
        federated = tfdp_fl.make_private(
            model,
            target_epsilon=8,
            target_delta=1e-3,
            num_clients=100,
            clients_per_round=50,
            rounds=15,
        )
        federated.compile(_optimizers.SGD(0.3), _loss(), ["accuracy"])
        federated.fit(clients, rounds=15, batch_size=5, verbose=0, seed=3)
        self.assertBetween(federated.epsilon(1e-3), 6.0, 8.0)
        self.assertGreater(federated.evaluate(*test, verbose=0)[1], 0.5)
        by_client = federated.evaluate_clients(clients, verbose=0)
        self.assertAllInRange(by_client["accuracy"], 0.0, 1.0)
        self.assertGreater(np.mean(by_client["accuracy"]), 0.5)

    @parameterized.named_parameters(
        ("batch_norm", lambda: [_layers.BatchNormalization()], {}, "batch norm"),
        ("dropout", lambda: [_layers.Dropout(0.5)], {}, "dropout|operations"),
        (
            "nesterov",
            None,
            {"optimizer": lambda: _optimizers.SGD(0.1, 0.9, True)},
            "SGD",
        ),
        ("rmsprop", None, {"optimizer": lambda: _optimizers.RMSprop(0.1)}, "SGD"),
        ("loss", None, {"compiled": {"loss": lambda y, p: p}}, "the loss"),
        ("weights", None, {"class_weight": {0: 2.0}}, "weights of examples"),
    )
    def test_what_tff_cannot_do_is_refused(self, hidden, options, pattern):
        if "optimizer" in options:
            options = {"optimizer": options["optimizer"]()}
        with self.assertRaisesRegex(ValueError, pattern):
            _fit(_model(*(hidden() if hidden else [])), _clients(), **options)
