"""Sequences of unequal length, such as texts."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset

_TEXTS = {"a": [[1, 2, 3], [4]], "b": [[5, 6]]}


def _objects(rows):
    made = np.empty(len(rows), object)
    made[:] = [np.array(row) for row in rows]
    return made


@pytest.mark.parametrize("make", [lambda rows: rows, tf.ragged.constant, _objects])
def test_all_clients_are_as_wide_as_the_widest(make):
    clients = {"a": (make(_TEXTS["a"]), [0, 1]), "b": (make(_TEXTS["b"]), [1])}
    dataset = FederatedDataset.from_client_arrays(clients)
    np.testing.assert_array_equal(dataset.client("a")[0], [[1, 2, 3], [4, 0, 0]])
    np.testing.assert_array_equal(dataset.client("b")[0], [[5, 6, 0]])
    # Streamed, each has its own width.
    read = FederatedDataset.from_client_fn(list(clients), clients.__getitem__)
    assert read.element_spec[0].shape.as_list() == [None]
    np.testing.assert_array_equal(read.client("a")[0], [[1, 2, 3], [4, 0, 0]])
    np.testing.assert_array_equal(read.client("b")[0], [[5, 6]])


def test_words_and_empty_texts_and_tensors_deeper():
    deep = tf.ragged.constant([[[1, 2], [3]], [[4]]])
    x = {"t": deep, "w": [["to", "be"], ["or"]], "e": [[], [1, 2]]}
    dataset = FederatedDataset.from_client_arrays({"a": (x, [0, 1])})
    x, _ = dataset.client("a")
    np.testing.assert_array_equal(x["t"], [[[1, 2], [3, 0]], [[4, 0], [0, 0]]])
    np.testing.assert_array_equal(x["w"], [[b"to", b"be"], [b"or", b""]])
    np.testing.assert_array_equal(x["e"], [[0, 0], [1, 2]])
    assert dataset.element_spec[0]["e"].dtype == tf.int64


def test_padding_that_is_masked_changes_nothing():
    layers, slices = tf.keras.layers, tf.data.Dataset.from_tensor_slices

    def model():
        tf.keras.utils.set_random_seed(1)
        embedding = layers.Embedding(9, 4, mask_zero=True)
        pooling = layers.GlobalAveragePooling1D(), layers.Dense(2)
        inputs = layers.Input((None,), dtype="int64")
        return tf.keras.Sequential([inputs, embedding, *pooling])

    texts = {**_TEXTS, "c": [[7], [8, 1, 1, 1]]}
    clients = {name: (x, np.arange(len(x)) % 2) for name, x in texts.items()}
    streamed = FederatedDataset.from_tf_datasets(
        {k: slices((tf.ragged.constant(x), y)) for k, (x, y) in clients.items()}
    )
    trained = []
    for data in (clients, streamed):
        fed = toy.federated(tfdp_fl.NoPrivacy(), model(), clients_per_round=3)
        fed.fit(data, rounds=2, local_epochs=2, seed=1, verbose=0)
        fed.evaluate_clients(data, verbose=0)
        trained.append(fed.get_weights())
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert np.abs(trained[0][0] - model().get_weights()[0]).max() > 1e-4
