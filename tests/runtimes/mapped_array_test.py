"""Workers read a file that they can see, and only what they need of it."""

import os
import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl import runtimes

try:
    import tensorflow_federated as tff
except ImportError:
    tff = None


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


class OnWorkersTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        if tff is None:
            self.skipTest("TensorFlow Federated is not installed.")

    def test_only_client_ids_travel(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        rng = np.random.default_rng(0)
        x = rng.normal(size=(40, 3)).astype(np.float32)
        # Client k has the rows rows[starts[k]:starts[k + 1]] of x.
        rows = rng.permutation(40)
        starts = np.array([0, 10, 11, 25, 40])
        arrays = {"x": x, "rows": rows, "starts": starts}
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        mapped = {
            name: runtimes.MappedArray.from_npy(
                folder / f"{name}.npy", elsewhere / f"{name}.npy"
            )
            for name in arrays
        }

        @tf.function
        def sums(broadcast, client_ids):
            data, rows, starts = (
                mapped[name].read() for name in ("x", "rows", "starts")
            )
            total = tf.zeros([3])
            for k in client_ids:
                mine = tf.gather(data, rows[starts[k] : starts[k + 1]])
                total += broadcast * tf.reduce_sum(mine, axis=0)
            return total

        computation = runtimes.computation_from_function(
            sums, tf.TensorSpec([]), tf.TensorSpec([None], tf.int32)
        )
        expected = 2.0 * sum(
            x[rows[starts[k] : starts[k + 1]]].sum(axis=0) for k in (3, 0, 1)
        )
        with runtimes.TFFWorkers(num_workers=2) as workers:

            def run():
                return workers.run_sharded(
                    computation, [np.int32([3, 0]), np.int32([1])], 2.0
                )

            with self.assertRaisesRegex(runtimes.WorkerError, "elsewhere"):
                run()
            for name in arrays:
                os.link(folder / f"{name}.npy", elsewhere / f"{name}.npy")
            np.testing.assert_allclose(run(), expected, atol=1e-5)
            os.unlink(elsewhere / "x.npy")
            np.save(elsewhere / "x.npy", x[1:])
            with self.assertRaisesRegex(
                runtimes.WorkerError, "not the array that was described"
            ):
                run()


if __name__ == "__main__":
    tf.test.main()
