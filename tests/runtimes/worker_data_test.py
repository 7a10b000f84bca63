"""Examples in files for workers are the dataset's, or are refused."""

import os
import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tfdp_fl import runtimes
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.runtimes import worker_data


def _clients(changed=0.0, dtype=np.int64):
    x = {
        "b": np.arange(24, dtype=np.float32).reshape(6, 4),
        "a": np.arange(6, dtype=np.uint8),
    }
    x["b"][-1, -1] += changed
    y = np.arange(6).astype(dtype)
    return FederatedDataset.from_indices(x, y, [[0, 5], [1, 1, 2]])


class WorkerDataTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        temporary = self.enter_context(tempfile.TemporaryDirectory())
        self.path = pathlib.Path(temporary) / "new" / "folder"

    def test_what_is_written_is_read(self):
        clients = _clients()
        runtimes.export_for_workers(clients, self.path)
        data = worker_data.WorkerData.of(clients, self.path)
        x, y = clients.flat()
        read = tf.function(data.read)()
        for actual, expected in zip(
            tf.nest.flatten(read), tf.nest.flatten((x, y)), strict=True
        ):
            self.assertEqual(actual.dtype, expected.dtype)
            np.testing.assert_array_equal(actual, expected)
        self.assertEqual(
            sorted(os.listdir(self.path)),
            ["manifest.json", "x_0.npy", "x_1.npy", "y_0.npy"],
        )

    def test_the_same_examples_are_written_once(self):
        def written():
            return {path: path.stat().st_ino for path in self.path.iterdir()}

        runtimes.export_for_workers(_clients(), self.path)
        before = written()
        runtimes.export_for_workers(_clients(), str(self.path))
        self.assertEqual(written(), before)
        runtimes.export_for_workers(_clients(changed=1.0), self.path)
        self.assertNotEqual(written(), before)
        worker_data.WorkerData.of(_clients(changed=1.0), self.path)

    @parameterized.named_parameters(
        ("values", lambda: _clients(changed=1e-6 + 1.0), "x_1.npy differs"),
        ("dtype", lambda: _clients(dtype=np.int32), "y_0.npy differs"),
        (
            "arrays",
            lambda: FederatedDataset.from_indices(
                np.zeros((6, 4), np.float32), np.zeros(6), [[0]]
            ),
            "other arrays",
        ),
    )
    def test_examples_of_others(self, clients, message):
        runtimes.export_for_workers(_clients(), self.path)
        with self.assertRaisesRegex(ValueError, f"data must .*{message}"):
            worker_data.WorkerData.of(clients(), self.path)

    def test_a_directory_without_examples(self):
        with self.assertRaisesRegex(ValueError, "data must .*new/folder"):
            worker_data.WorkerData.of(_clients(), self.path)

    def test_an_export_that_was_not_finished(self):
        runtimes.export_for_workers(_clients(), self.path)
        (self.path / "manifest.json").unlink()
        with self.assertRaisesRegex(ValueError, "data must .*manifest"):
            worker_data.WorkerData.of(_clients(), self.path)

    @parameterized.named_parameters(
        ("strings", np.array(["a", "b"]), TypeError, "string in x_0"),
        ("booleans", np.array([True, False]), TypeError, "bool in x_0"),
        ("nothing", np.zeros((2, 0)), ValueError, "examples, got x_0"),
    )
    def test_what_cannot_be_written(self, x, error, message):
        clients = FederatedDataset.from_indices(x, [0, 1], [[0, 1]])
        with self.assertRaisesRegex(error, message):
            runtimes.export_for_workers(clients, self.path)
        self.assertFalse(self.path.exists())

    def test_clients_that_are_read_one_by_one(self):
        clients = FederatedDataset.from_client_fn(
            [1, 2], lambda k: (np.zeros((3, 2)), np.zeros(3))
        )
        with self.assertRaisesRegex(ValueError, r"indexed.*in_memory\(\)"):
            runtimes.export_for_workers(clients, self.path)


if __name__ == "__main__":
    absltest.main()
