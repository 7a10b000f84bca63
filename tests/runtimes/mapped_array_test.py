"""Workers read a file that they can see, and only what they need of it."""

import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl import runtimes


class MappedArrayTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def _save(self, array, name="array.npy"):
        path = self.folder / name
        np.save(path, array)
        return path

    @parameterized.product(
        dtype=["float32", "float64", "uint8", "int64", "float16"],
        shape=[(7,), (5, 3), (2, 3, 4)],
    )
    def test_reads_what_was_saved(self, dtype, shape):
        rng = np.random.default_rng(0)
        array = (rng.random(shape) * 100).astype(dtype)
        mapped = runtimes.MappedArray.from_npy(self._save(array))
        self.assertEqual((mapped.dtype, mapped.shape), (array.dtype, shape))
        for read in (mapped.read, tf.function(mapped.read)):
            tensor = read()
            self.assertEqual(tensor.shape, shape)
            np.testing.assert_array_equal(tensor, array)

    def test_nothing_is_copied(self):
        # A file of 4 GiB, with holes: its pages are read when touched.
        path = self.folder / "large.npy"
        array = np.lib.format.open_memmap(path, "w+", np.float32, (1 << 20, 1 << 10))
        array[123_456] = 7.0
        array.flush()
        mapped = runtimes.MappedArray.from_npy(path)
        row = tf.function(lambda i: tf.gather(mapped.read(), i))(123_456)
        np.testing.assert_array_equal(row, np.full(1 << 10, 7.0))

    @parameterized.named_parameters(
        ("fortran", np.asfortranarray(np.ones((2, 3)))),
        ("text", np.array(["a"])),
        ("booleans", np.array([True])),
        ("byte_order", np.ones(3, ">f4")),
        ("empty", np.ones((0, 3))),
    )
    def test_refused(self, array):
        with self.assertRaisesRegex(ValueError, "path must be a .npy file"):
            runtimes.MappedArray.from_npy(self._save(array))

    def test_another_file_by_now(self):
        path = self._save(np.ones((4, 3), np.float32))
        mapped = runtimes.MappedArray.from_npy(path)
        self._save(np.ones((3, 4), np.float32))
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "not the array"):
            tf.function(mapped.read)()


if __name__ == "__main__":
    tf.test.main()
