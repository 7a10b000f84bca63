"""Tests of what `fit` and its neighbours take as clients' data."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl.datasets import FederatedDataset, as_federated


def _pair(n: int = 3):
    x = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    return x, np.arange(n, dtype=np.int64)


class _ClientData:
    client_ids = ("a", "b")

    def create_tf_dataset_for_client(self, client_id):
        del client_id
        return tf.data.Dataset.from_tensor_slices(_pair())


class DataFrame:
    """Named as pandas names its own."""


class AsFederatedTest(parameterized.TestCase):
    def test_a_dataset_is_itself(self):
        dataset = FederatedDataset.from_client_arrays({"a": _pair()})
        self.assertIs(as_federated(dataset), dataset)

    @parameterized.named_parameters(
        ("mapping", {"a": _pair(), "b": _pair()}, ["a", "b"]),
        ("list", [_pair(), _pair()], [0, 1]),
        ("client_data", _ClientData(), ["a", "b"]),
    )
    def test_arrays(self, clients, ids):
        dataset = as_federated(clients)
        self.assertEqual(list(dataset.client_ids), ids)
        np.testing.assert_array_equal(dataset.client(ids[1])[1], [0, 1, 2])

    def test_tf_datasets(self):
        one = tf.data.Dataset.from_tensor_slices(_pair())
        for clients in ([one, one], {0: one, 1: one}):
            dataset = as_federated(clients)
            np.testing.assert_array_equal(dataset.client(1)[0], _pair()[0])

    @parameterized.named_parameters(
        ("arrays", _pair(), "client_ids=ids"),
        ("list_of_arrays", list(_pair()), "client_ids=ids"),
        ("frame", DataFrame(), "from_dataframe"),
        ("number", 3, "got int"),
        ("text", "clients", "got str"),
        ("features_only", {"a": _pair()[0]}, "got ndarray for client 'a'"),
        ("four", {"a": (*_pair(), [1], [1])}, "got tuple for client 'a'"),
        (
            "mixed",
            [_pair(), tf.data.Dataset.from_tensor_slices(_pair())],
            "for client 1",
        ),
    )
    def test_what_is_none_of_them(self, clients, message):
        with self.assertRaisesRegex(TypeError, message):
            as_federated(clients)

    @parameterized.parameters(({},), ([],))
    def test_nobody(self, clients):
        with self.assertRaisesRegex(ValueError, "at least one client"):
            as_federated(clients)
