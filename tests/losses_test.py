"""The balanced softmax against its definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy

_Balanced = tfdp_fl.losses.BalancedSoftmaxCrossentropy


@pytest.mark.parametrize("smoothing", [1e-4, 0.01, 0.5])
def test_is_its_definition(smoothing):
    labels = np.array([3, 3, 1, 3, 1, 1, 1])
    logits = np.random.default_rng(0).normal(size=(7, 5), scale=2).astype(np.float32)
    counts = np.bincount(labels, minlength=5)
    prior = (counts / len(labels) + smoothing) / (1 + 5 * smoothing)
    weighted = prior * np.exp(logits.astype(np.float64))
    expected = -np.log(weighted[np.arange(7), labels] / weighted.sum(-1))
    loss = _Balanced(smoothing)
    close = {"rtol": 1e-5}
    np.testing.assert_allclose(loss.call(labels, logits), expected, **close)
    mean = loss(labels[:, None], logits)
    np.testing.assert_allclose(mean, expected.mean(), **close)
    sequences = loss.call(labels[None], logits[None])
    np.testing.assert_allclose(sequences, expected[None], **close)


def test_updates_of_skewed_clients_are_smaller():
    x, y = toy.arrays(600)
    rows = np.argsort(y, kind="stable").reshape(30, 20)
    clients = tfdp_fl.datasets.FederatedDataset.from_indices(x, y, rows)

    def norm(loss):
        fed = toy.federated(
            tfdp_fl.FixedClipping(clip_norm=1e6, noise_multiplier=0.0),
            compile_options={"loss": loss},
        )
        fitted = fed.fit(clients, rounds=1, batch_size=10, verbose=0, seed=1)
        return fitted.history["mean_update_norm"][0]

    assert norm(_Balanced()) < 0.5 * norm(toy.loss())


def test_comes_back_from_its_configuration():
    loss = _Balanced(0.2, name="b")
    again = tf.keras.losses.deserialize(tf.keras.losses.serialize(loss))
    assert isinstance(again, _Balanced)
    assert again.get_config() == loss.get_config()
    for smoothing in (0, -1.0, float("nan"), "much"):
        with pytest.raises((ValueError, TypeError), match="smoothing"):
            _Balanced(smoothing)
