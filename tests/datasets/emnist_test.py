from __future__ import annotations

import collections
import sys
import types
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tfdp_fl import datasets

_SIZES = {"f0000_14": 3, "f0001_41": 1, "f0005_26": 2}


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


def _fake_tff(load_data):
    """A `tensorflow_federated` that has nothing but EMNIST."""
    tff = types.ModuleType("tensorflow_federated")
    tff.simulation = types.SimpleNamespace(
        datasets=types.SimpleNamespace(
            emnist=types.SimpleNamespace(load_data=load_data)
        )
    )
    return mock.patch.dict(sys.modules, {"tensorflow_federated": tff})


class LoadEmnistTest(parameterized.TestCase):
    def _load(self, **arguments):
        self.load_data = mock.Mock(return_value=(_Writers(2), _Writers(1)))
        with _fake_tff(self.load_data):
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

    def test_refuses_more_writers_than_there_are(self):
        with self.assertRaisesRegex(ValueError, "num_clients must be at most 3"):
            self._load(num_clients=4)

    def test_says_so_without_tff(self):
        with (
            mock.patch.dict(sys.modules, {"tensorflow_federated": None}),
            self.assertRaisesRegex(ImportError, "load_emnist must have tensor"),
        ):
            datasets.load_emnist()

    def test_says_so_without_a_network(self):
        failing = mock.Mock(side_effect=Exception("URL fetch failure"))
        with (
            _fake_tff(failing),
            self.assertRaisesRegex(OSError, "load_emnist must .* URL fetch"),
        ):
            datasets.load_emnist()


if __name__ == "__main__":
    absltest.main()
