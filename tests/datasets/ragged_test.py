"""Tests of sequences of unequal length, such as texts."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset

_TEXTS = {"a": [[1, 2, 3], [4]], "b": [[5, 6]]}


def _objects(rows):
    made = np.empty(len(rows), object)
    made[:] = rows
    return made


class FilledUpTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("lists", lambda rows: rows),
        ("tensors", tf.ragged.constant),
        ("objects", _objects),
        ("arrays", lambda rows: _objects([np.array(r) for r in rows])),
    )
    def test_all_clients_are_as_wide_as_the_widest(self, make):
        dataset = FederatedDataset.from_client_arrays(
            {
                "a": (make(_TEXTS["a"]), [0, 1]),
                "b": (make(_TEXTS["b"]), [1]),
            }
        )
        np.testing.assert_array_equal(dataset.client("a")[0], [[1, 2, 3], [4, 0, 0]])
        np.testing.assert_array_equal(dataset.client("b")[0], [[5, 6, 0]])

    def test_words(self):
        dataset = FederatedDataset.from_client_arrays(
            {"a": ([["to", "be"], ["or"]], [0, 1]), "b": ([["not"]], [1])}
        )
        np.testing.assert_array_equal(
            dataset.client("a")[0], [[b"to", b"be"], [b"or", b""]]
        )

    def test_in_a_dict_and_as_a_tensor_deeper(self):
        deep = tf.ragged.constant([[[1, 2], [3]], [[4]]])
        dataset = FederatedDataset.from_client_arrays(
            {"a": ({"t": deep, "n": [1.0, 2.0]}, [0, 1])}
        )
        np.testing.assert_array_equal(
            dataset.client("a")[0]["t"], [[[1, 2], [3, 0]], [[4, 0], [0, 0]]]
        )

    def test_an_empty_text(self):
        dataset = FederatedDataset.from_client_arrays(
            {"a": ([[], [1, 2]], [0, 1]), "b": ([[]], [1])}
        )
        self.assertEqual(dataset.element_spec[0].dtype, tf.int64)
        np.testing.assert_array_equal(dataset.client("b")[0], [[0, 0]])

    def test_arrays_of_other_widths_are_refused_as_before(self):
        with self.assertRaisesRegex(ValueError, "Client 'b'.*example shape"):
            FederatedDataset.from_client_arrays(
                {"a": (np.ones((1, 3)), [1]), "b": (np.ones((1, 2)), [1])}
            )

    def test_streamed(self):
        read = FederatedDataset.from_client_fn(
            list(_TEXTS), lambda k: (_TEXTS[k], np.arange(len(_TEXTS[k])))
        )
        self.assertEqual(read.element_spec[0].shape.as_list(), [None])
        generated = FederatedDataset.from_tf_datasets(
            {
                name: tf.data.Dataset.from_tensor_slices(
                    (tf.ragged.constant(rows), tf.range(len(rows)))
                )
                for name, rows in _TEXTS.items()
            }
        )
        for dataset in (read, generated):
            np.testing.assert_array_equal(
                dataset.client("a")[0], [[1, 2, 3], [4, 0, 0]]
            )
            np.testing.assert_array_equal(dataset.client("b")[0], [[5, 6]])


class TrainTest(absltest.TestCase):
    def test_padding_that_is_masked_changes_nothing(self):
        def model():
            tf.keras.utils.set_random_seed(1)
            return tf.keras.Sequential(
                [
                    tf.keras.layers.Input((None,), dtype="int64"),
                    tf.keras.layers.Embedding(9, 4, mask_zero=True),
                    tf.keras.layers.GlobalAveragePooling1D(),
                    tf.keras.layers.Dense(2),
                ]
            )

        clients = {
            name: (rows, np.arange(len(rows)) % 2)
            for name, rows in {**_TEXTS, "c": [[7], [8, 1, 1, 1]]}.items()
        }
        streamed = FederatedDataset.from_client_fn(list(clients), clients.__getitem__)
        trained = []
        for data in (clients, streamed):
            fed = toy.federated(tfdp_fl.NoPrivacy(), model(), clients_per_round=3)
            fed.fit(data, rounds=2, local_epochs=2, seed=1, verbose=0)
            fed.evaluate_clients(data, verbose=0)
            trained.append(fed.get_weights())
        for one, other in zip(*trained, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
        self.assertGreater(np.abs(trained[0][0] - model().get_weights()[0]).max(), 1e-4)
