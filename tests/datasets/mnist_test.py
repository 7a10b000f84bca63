from __future__ import annotations

import os
import pathlib
import tempfile
import tracemalloc
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tfdp_fl import datasets

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_DATA = pathlib.Path(
    os.environ.get("TFDP_FL_DATA", _REPOSITORY.parent / "shared" / "data")
)
_MNIST = _DATA / "mnist.npz"


def _write_small(path: str) -> dict[str, np.ndarray]:
    """Writes 600 images in the format of Keras's `mnist.npz`."""
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (600, 28, 28), dtype=np.uint8),
        "y_train": rng.permutation(np.arange(600) % 10).astype(np.uint8),
        "x_test": rng.integers(0, 256, (100, 28, 28), dtype=np.uint8),
        "y_test": (np.arange(100) % 10).astype(np.uint8),
    }
    np.savez(path, **arrays)
    return arrays


class LoadMnistTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = os.path.join(directory.name, "mnist.npz")
        self.arrays = _write_small(self.path)

    def _load(self, num_clients=30, **arguments):
        arguments = {"path": self.path, "examples_per_client": 20, **arguments}
        return datasets.load_mnist(num_clients, **arguments)

    def test_images_are_scaled_and_flat(self):
        clients, (x_test, y_test) = self._load()
        x, y = clients.flat()
        self.assertEqual(x.dtype, tf.float32)
        self.assertEqual(y.dtype, tf.int32)
        np.testing.assert_allclose(
            x.numpy(), self.arrays["x_train"].reshape(-1, 784) / 255, rtol=1e-6
        )
        np.testing.assert_array_equal(y.numpy(), self.arrays["y_train"])
        np.testing.assert_allclose(
            x_test, self.arrays["x_test"].reshape(-1, 784) / 255, rtol=1e-6
        )
        np.testing.assert_array_equal(y_test, self.arrays["y_test"])

    def test_validation_examples_are_nobodys_and_not_the_test_set(self):
        clients, (x_val, y_val) = self._load(validation_examples=100)
        self.assertEqual(np.bincount(y_val).tolist(), [10] * 10)
        pixels = {row.tobytes() for row in self.arrays["x_train"]}
        back = np.round(x_val * 255).astype(np.uint8).reshape(-1, 28, 28)
        held = {row.tobytes() for row in back}
        self.assertLen(held, 100)
        self.assertLess(held, pixels)
        back = np.round(clients.flat()[0].numpy() * 255).astype(np.uint8)
        self.assertEmpty(held & {row.tobytes() for row in back})

    def test_says_so_where_it_cannot_be_downloaded(self):
        with (
            mock.patch.object(
                tf.keras.datasets.mnist,
                "load_data",
                side_effect=Exception("URL fetch failure"),
            ),
            self.assertRaisesRegex(OSError, "path must be given, .* URL fetch"),
        ):
            self._load(path=None)

    @parameterized.parameters(
        ({"validation_examples": 600}, "validation_examples must be less"),
        ({"num_clients": 0}, "num_clients must be"),
        ({"shards_per_client": 3}, "multiple of shards_per_client"),
    )
    def test_refuses(self, wrong, message):
        with self.assertRaisesRegex(ValueError, message):
            self._load(**wrong)

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


@absltest.skipUnless(_MNIST.exists(), f"no mnist.npz in {_DATA.name}")
class RealMnistTest(absltest.TestCase):
    def test_ten_thousand_clients_hold_one_copy(self):
        one_copy = 60000 * 784 * 4
        tracemalloc.start()
        clients, (x_test, _) = datasets.load_mnist(10000, path=_MNIST)
        in_numpy, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        self.assertEqual(clients.flat()[0].shape.num_elements() * 4, one_copy)
        # NumPy holds the test images and the clients' rows, and no more.
        rows = 10000 * 600 * 4
        self.assertLess(in_numpy - x_test.nbytes - rows, 0.02 * one_copy)
        uses = np.bincount(clients.client_rows(range(10000))[0])
        self.assertEqual((uses.min(), uses.max()), (100, 100))


if __name__ == "__main__":
    absltest.main()
