"""The balanced softmax against its definition in float64."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.keras import toy


def _reference(labels, logits, smoothing):
    classes = logits.shape[-1]
    counts = np.bincount(labels, minlength=classes)
    prior = (counts / len(labels) + smoothing) / (1 + classes * smoothing)
    weighted = prior * np.exp(logits.astype(np.float64))
    chosen = weighted[np.arange(len(labels)), labels]
    return -np.log(chosen / weighted.sum(-1))


class BalancedSoftmaxCrossentropyTest(parameterized.TestCase):
    @parameterized.parameters(1e-4, 0.01, 0.5)
    def test_is_its_definition(self, smoothing):
        rng = np.random.default_rng(0)
        labels = np.array([3, 3, 1, 3, 1, 1, 1])
        logits = rng.normal(size=(7, 5), scale=2).astype(np.float32)
        expected = _reference(labels, logits, smoothing)
        loss = tfdp_fl.losses.BalancedSoftmaxCrossentropy(smoothing)
        np.testing.assert_allclose(loss.call(labels, logits), expected, rtol=1e-5)
        np.testing.assert_allclose(
            loss(labels[:, None], logits), expected.mean(), rtol=1e-5
        )
        sequences = loss.call(labels[None], logits[None])
        np.testing.assert_allclose(sequences, expected[None], rtol=1e-5)

    def test_says_little_about_classes_never_seen(self):
        logits = tf.Variable(tf.zeros([4, 10]))
        labels = [0, 0, 1, 1]
        loss = tfdp_fl.losses.BalancedSoftmaxCrossentropy(0.01)
        with tf.GradientTape() as tape:
            value = loss(labels, logits)
        gradient = tf.reduce_sum(tape.gradient(value, logits), axis=0)
        np.testing.assert_allclose(gradient[2:], 0.01 / 1.1, rtol=1e-5)
        np.testing.assert_allclose(gradient[:2], 0.51 / 1.1 - 0.5, rtol=1e-4)

    def test_updates_of_skewed_clients_are_smaller(self):
        x, y = toy.arrays(600)
        rows = np.argsort(y, kind="stable").reshape(30, 20)
        clients = tfdp_fl.datasets.FederatedDataset.from_indices(x, y, rows)

        def norm(loss):
            fed = toy.federated(
                tfdp_fl.FixedClipping(clip_norm=1e6, noise_multiplier=0.0),
                compile_options={"loss": loss},
            )
            history = fed.fit(
                clients, rounds=1, batch_size=10, verbose=0, seed=1
            ).history
            return history["mean_update_norm"][0]

        balanced = norm(tfdp_fl.losses.BalancedSoftmaxCrossentropy())
        self.assertLess(balanced, 0.5 * norm(toy.loss()))

    def test_comes_back_from_its_configuration(self):
        loss = tfdp_fl.losses.BalancedSoftmaxCrossentropy(0.2, name="b")
        again = tf.keras.losses.deserialize(tf.keras.losses.serialize(loss))
        self.assertIsInstance(again, tfdp_fl.losses.BalancedSoftmaxCrossentropy)
        self.assertEqual(again.get_config(), loss.get_config())

    @parameterized.parameters(0, -1.0, float("nan"), "much")
    def test_smoothing_must_be_positive(self, smoothing):
        with self.assertRaisesRegex((ValueError, TypeError), "smoothing"):
            tfdp_fl.losses.BalancedSoftmaxCrossentropy(smoothing)
