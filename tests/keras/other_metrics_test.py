"""Metrics that are no means: AUC and its like, and those of several numbers."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset


def _is_first(y, predicted):
    return tf.cast(tf.reshape(y, [-1]) == 0, tf.float32), tf.nn.softmax(predicted)[:, 0]


class _AUC(tf.keras.metrics.AUC):
    def update_state(self, y, predicted, sample_weight=None):
        return super().update_state(*_is_first(y, predicted), sample_weight)


class _Vector(tf.keras.metrics.Metric):
    """Says how often each class is there."""

    def __init__(self, name="by_class", **options):
        super().__init__(name=name, **options)
        shape = (toy.NUM_CLASSES,)
        self.counts = self.add_weight(shape=shape, initializer="zeros", name="counts")

    def update_state(self, y, predicted, sample_weight=None):
        labels = tf.cast(tf.reshape(y, [-1]), tf.int32)
        self.counts.assign_add(
            tf.math.bincount(
                labels,
                minlength=toy.NUM_CLASSES,
                maxlength=toy.NUM_CLASSES,
                dtype=tf.float32,
            )
        )

    def result(self):
        return tf.convert_to_tensor(self.counts)

    def reset_state(self):  # Keras 2's is for scalars.
        self.counts.assign(tf.zeros_like(self.counts))


def _federated(metric, **options):
    return toy.federated(compile_options={"metrics": [metric]}, **options)


class AreaTest(parameterized.TestCase):
    def test_of_a_round_it_is_that_of_all_clients_together(self):
        found = []
        for count in (40, 1):  # Of forty clients, or of one that holds everything.
            x, y = toy.arrays(400)
            rows = np.arange(400).reshape(count, -1)
            fed = _federated(
                _AUC(name="auc"),
                mechanism=tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.0),
                clients_per_round=count,
                num_replicas=2,
            )
            clients = FederatedDataset.from_indices(x, y, rows)
            # One batch each, so that all are measured by the same weights.
            history = fed.fit(clients, batch_size=400, verbose=0).history
            found.append(history["auc"][0])
        self.assertBetween(found[0], 0.01, 0.99)
        self.assertAlmostEqual(*found, places=4)

    def test_a_private_mean_of_it_is_bounded_and_charged(self):
        fed = _federated(_AUC(name="auc"))
        fed.fit(toy.clients(), verbose=0)
        before = fed.epsilon(1e-3)
        x, y = toy.arrays(10)
        clients = {0: (x, y), 1: (x, np.zeros_like(y)), 2: (x, np.ones_like(y))}
        private = tfdp_fl.PrivateMetrics(
            bounds={"auc": (0.0, 1.0)}, noise_multiplier=1.0
        )
        vectors = private.contributions(fed.evaluate_clients(clients, verbose=0))
        self.assertLessEqual(np.linalg.norm(vectors, axis=1).max(), 1 + 1e-9)
        fed.evaluate_clients(clients, verbose=0, private=private)
        self.assertGreater(fed.epsilon(1e-3), before)


class SeveralNumbersTest(parameterized.TestCase):
    _MESSAGE = "metrics must give one number each, got 'by_class'"

    @parameterized.parameters("metrics", "weighted_metrics")
    def test_fit_refuses_them_before_anything_starts(self, argument):
        fed = toy.federated(compile_options={argument: ["accuracy", _Vector()]})
        with self.assertRaisesRegex(ValueError, self._MESSAGE):
            fed.fit(toy.clients(), verbose=0)
        self.assertIsNone(fed.run)

    @parameterized.parameters(False, True)
    def test_evaluate_clients_refuses_them(self, private):
        fed, bounds = _federated(_Vector()), {"by_class": (0.0, 1.0)}
        options = {}
        if private:
            trained = toy.federated(model=fed.model)
            trained.fit(toy.clients(), verbose=0)
            trained.compile("sgd", toy.loss(), metrics=[_Vector()])
            fed = trained
            options["private"] = tfdp_fl.PrivateMetrics(
                bounds=bounds, noise_multiplier=1.0
            )
        with self.assertRaisesRegex(ValueError, self._MESSAGE):
            fed.evaluate_clients(toy.clients(), verbose=0, **options)
        if private:
            self.assertEqual(fed.spending.evaluations, 0)


if __name__ == "__main__":
    absltest.main()
