from __future__ import annotations

import json
import os
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tfdp_fl import datasets
from tfdp_fl.datasets import FederatedDataset


def _examples(n: int, offset: float = 0.0):
    x = offset + np.arange(n * 3, dtype=np.float32).reshape(n, 3)
    return x, np.arange(n, dtype=np.int64)


def _uneven() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        "few": _examples(2),
        "none": _examples(0),
        "many": _examples(5, 100.0),
    }


def _streamed(arrays) -> FederatedDataset:
    return FederatedDataset.from_client_fn(list(arrays), arrays.__getitem__)


def _assert_same_clients(test, actual, expected):
    test.assertEqual(list(actual.client_ids), list(expected.client_ids))
    test.assertEqual(actual.element_spec, expected.element_spec)
    for client_id in expected.client_ids:
        tf.nest.map_structure(
            np.testing.assert_array_equal,
            actual.client(client_id),
            expected.client(client_id),
        )


class NpzTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = os.path.join(directory.name, "clients.npz")

    @parameterized.parameters(FederatedDataset.from_client_arrays, _streamed)
    def test_brings_back_what_was_saved(self, make):
        dataset = make(_uneven())
        dataset.save_npz(self.path)
        _assert_same_clients(self, FederatedDataset.from_npz(self.path), dataset)

    def test_nests_and_shared_rows(self):
        x = {"a": np.ones((4, 2)), "b": (np.arange(4), [np.zeros((4, 1))])}
        y = np.arange(4, dtype=np.uint8)
        dataset = FederatedDataset.from_indices(x, y, [[3, 0], [0], []])
        dataset.save_npz(self.path)
        loaded = FederatedDataset.from_npz(self.path)
        _assert_same_clients(self, loaded, dataset)
        self.assertEqual(loaded.client_ids, range(3))

    def test_writes_only_what_its_clients_have(self):
        dataset = FederatedDataset.from_indices(
            *_examples(10), [[9, 2], [5], [2, 5]]
        ).take([2, 0])
        dataset.save_npz(self.path)
        loaded = FederatedDataset.from_npz(self.path)
        _assert_same_clients(self, loaded, dataset)
        self.assertEqual(loaded.flat()[1].numpy().tolist(), [2, 5, 9])

    def test_workers_load_it_by_config(self):
        FederatedDataset.from_client_arrays(_uneven()).save_npz(self.path)
        dataset = FederatedDataset.from_npz(self.path).take([2, 0])
        config = json.loads(json.dumps(dataset.config))
        _assert_same_clients(self, datasets.load_from_config(config), dataset)

    def test_refuses_what_it_cannot_hold_and_leaves_the_file_alone(self):
        FederatedDataset.from_client_arrays(_uneven()).save_npz(self.path)
        for clients, message in (
            ({0: (np.array(["a"]), np.ones(1))}, "numbers that NumPy stores"),
            ({(0, 1): _examples(1)}, "client ids that are integers or str"),
            ({0: ({5: np.ones(1)}, np.ones(1))}, "keys that are strings"),
        ):
            dataset = FederatedDataset.from_client_arrays(clients)
            with self.assertRaisesRegex(TypeError, message):
                dataset.save_npz(self.path)
        self.assertEqual(FederatedDataset.from_npz(self.path).num_clients, 3)

    def test_refuses_other_files(self):
        np.savez(self.path, x=np.ones(3))
        with self.assertRaisesRegex(ValueError, "path must be a file that save"):
            FederatedDataset.from_npz(self.path)
        with self.assertRaises(FileNotFoundError):
            FederatedDataset.from_npz(self.path + "missing")


if __name__ == "__main__":
    absltest.main()
