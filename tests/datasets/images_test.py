"""Digits, MNIST and EMNIST, and how examples are dealt to clients."""

from __future__ import annotations

import collections
import os
import sys
import tempfile
import types
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl import datasets
from tfdp_fl.datasets import images

_SIZES = {"f0000_14": 3, "f0001_41": 1, "f0005_26": 2}


def _labels(n: int, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(3).permutation(np.arange(n) % classes)


def _bytes(rows) -> set[bytes]:
    return {row.tobytes() for row in np.asarray(rows)}


class PartitionTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_passes_repeat_examples_but_no_client_has_one_twice(self, iid):
        once = images.partition(_labels(600), 30, 20, iid=iid)
        np.testing.assert_array_equal(np.sort(once.ravel()), np.arange(600))
        clients = images.partition(_labels(600), 95, 20, iid=iid)
        self.assertEqual((clients.shape, clients.dtype), ((95, 20), np.int32))
        for rows in clients:
            self.assertLen(np.unique(rows), 20)
        uses = np.bincount(clients.ravel(), minlength=600)
        self.assertEqual((uses.min(), uses.max()), (3, 4))

    @parameterized.parameters(1, 2, 4)
    def test_shards_bound_the_labels_of_a_client(self, shards):
        labels = _labels(800)  # 80 of each: shards do not straddle labels.
        clients = images.partition(labels, 100, 20, shards)
        self.assertEqual(max(len(np.unique(labels[c])) for c in clients), shards)
        # Local training takes batches in order: labels of a client are mixed.
        one_change = [np.sum(np.diff(labels[c]) != 0) <= 1 for c in clients]
        self.assertLess(np.sum(one_change), 20 if shards > 1 else 101)

    @parameterized.parameters(
        ({"num_clients": 0}, "num_clients must be"),
        ({"examples_per_client": 601}, "examples_per_client must be at most"),
        ({"examples_per_client": 21}, "multiple of shards_per_client"),
        ({"seed": -1}, "seed must be"),
    )
    def test_refuses(self, wrong, message):
        arguments = {"num_clients": 3, "examples_per_client": 20, **wrong}
        with self.assertRaisesRegex(ValueError, message):
            images.partition(_labels(600), **arguments)


class LoadDigitsTest(parameterized.TestCase):
    def test_no_test_example_is_with_a_client(self):
        clients, (x_test, y_test) = datasets.load_digits()
        x, y = (part.numpy() for part in clients.flat())
        self.assertEqual((clients.num_clients, x.shape), (100, (1437, 64)))
        for features, labels in ((x, y), (x_test, y_test)):
            self.assertEqual((features.dtype, labels.dtype), (np.float32, np.int32))
            self.assertEqual((features.min(), features.max()), (0, 1))
            self.assertEqual(set(labels), set(range(10)))
        self.assertLen(_bytes(x) | _bytes(x_test), 1797)

    def test_validation_examples_replace_the_test_set(self):
        _, (x_test, _) = datasets.load_digits()
        clients, (x_val, y_val) = datasets.load_digits(validation_examples=200)
        self.assertEqual(clients.flat()[0].shape[0], 1237)
        self.assertLen(y_val, 200)
        seen = _bytes(clients.flat()[0])
        self.assertEmpty(_bytes(x_test) & (seen | _bytes(x_val)))

    @parameterized.parameters(
        ({"test_fraction": 1.0}, "test_fraction must be"),
        ({"validation_examples": 1437}, "validation_examples must be less"),
    )
    def test_refuses(self, wrong, message):
        with self.assertRaisesRegex(ValueError, message):
            datasets.load_digits(**wrong)


class LoadMnistTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self.path = os.path.join(folder, "mnist.npz")
        rng = np.random.default_rng(0)
        self.arrays = {
            "x_train": rng.integers(0, 256, (600, 28, 28), dtype=np.uint8),
            "y_train": rng.permutation(np.arange(600) % 10).astype(np.uint8),
            "x_test": rng.integers(0, 256, (100, 28, 28), dtype=np.uint8),
            "y_test": (np.arange(100) % 10).astype(np.uint8),
        }
        np.savez(self.path, **self.arrays)

    def _load(self, **arguments):
        arguments = {"path": self.path, "examples_per_client": 20, **arguments}
        return datasets.load_mnist(30, **arguments)

    @parameterized.parameters((True, [784]), (False, [28, 28, 1]))
    def test_images_are_scaled(self, flatten, shape):
        clients, (x_test, y_test) = self._load(flatten=flatten)
        x, y = (part.numpy() for part in clients.flat())
        for name, features, labels in (("train", x, y), ("test", x_test, y_test)):
            self.assertEqual((features.dtype, labels.dtype), (np.float32, np.int32))
            pixels = self.arrays[f"x_{name}"].reshape(-1, *shape)
            np.testing.assert_allclose(features, pixels / 255, rtol=1e-6)
            np.testing.assert_array_equal(labels, self.arrays[f"y_{name}"])

    def test_validation_examples_are_nobodys_and_not_the_test_set(self):
        clients, (x_val, y_val) = self._load(validation_examples=100)
        self.assertEqual(np.bincount(y_val).tolist(), [10] * 10)
        held, seen = (
            _bytes(np.round(x * 255).astype(np.uint8).reshape(-1, 28, 28))
            for x in (x_val, clients.flat()[0].numpy())
        )
        self.assertLen(held, 100)
        self.assertLess(held, _bytes(self.arrays["x_train"]))
        self.assertEmpty(held & seen)

    def test_refuses_other_files(self):
        other = self.path + ".other.npz"
        np.savez(other, x=np.ones(3))
        with self.assertRaisesRegex(ValueError, "path must be Keras's mnist"):
            self._load(path=other)
        np.savez(other, **{**self.arrays, "x_train": np.ones((600, 784))})
        with self.assertRaisesRegex(ValueError, "path must hold uint8 images"):
            self._load(path=other)
        with self.assertRaises(FileNotFoundError):
            self._load(path=other + "missing")


class _Writers:
    """Client data in the format of TFF's EMNIST."""

    def __init__(self, factor: int):
        self._factor = factor
        self.client_ids = list(_SIZES)

    def create_tf_dataset_for_client(self, client_id):
        n = _SIZES[client_id] * self._factor
        place = self.client_ids.index(client_id)
        return tf.data.Dataset.from_tensor_slices(
            collections.OrderedDict(
                label=np.arange(n, dtype=np.int32),
                pixels=np.full((n, 28, 28), place / 4, np.float32),
            )
        )


class LoadEmnistTest(parameterized.TestCase):
    def _load(self, load_data=None, **arguments):
        tff = types.ModuleType("tensorflow_federated")
        load_data = load_data or mock.Mock(return_value=(_Writers(2), _Writers(1)))
        emnist = types.SimpleNamespace(load_data=load_data)
        tff.simulation = types.SimpleNamespace(
            datasets=types.SimpleNamespace(emnist=emnist)
        )
        with mock.patch.dict(sys.modules, {"tensorflow_federated": tff}):
            return datasets.load_emnist(**arguments)

    @parameterized.parameters((False, [28, 28, 1]), (True, [784]))
    def test_a_client_is_a_writer(self, flatten, shape):
        clients, (x_test, y_test) = self._load(flatten=flatten)
        self.assertEqual(list(clients.client_ids), list(_SIZES))
        self.assertEqual(clients.client_sizes().tolist(), [6, 2, 4])
        self.assertEqual(clients.element_spec[0], tf.TensorSpec(shape))
        x, y = clients.client("f0005_26")
        self.assertEqual(list(x.shape), [4, *shape])
        self.assertTrue(np.all(x == 0.5))
        self.assertEqual(y.tolist(), [0, 1, 2, 3])
        self.assertEqual(list(x_test.shape), [6, *shape])
        self.assertEqual(y_test.tolist(), [0, 1, 2, 0, 0, 1])

    def test_what_cannot_be_loaded(self):
        with self.assertRaisesRegex(ValueError, "num_clients must be at most 3"):
            self._load(num_clients=4)
        failing = mock.Mock(side_effect=Exception("URL fetch failure"))
        with self.assertRaisesRegex(OSError, "load_emnist must .* URL fetch"):
            self._load(failing)
        with (
            mock.patch.dict(sys.modules, {"tensorflow_federated": None}),
            self.assertRaisesRegex(ImportError, "load_emnist must have tensor"),
        ):
            datasets.load_emnist()
