"""Tests for stored_npz: the arrays, and the errors, that np.load gives."""

import io
import os
import pathlib
import tempfile
import zipfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl.datasets import stored_npz

_RNG = np.random.default_rng(0)
# Mutations of a file; of a hundredth of them NumPy reads something.
_TRIES = 3000
_ARRAYS = {
    "x": _RNG.random((6, 4, 3), np.float32),
    "y": np.arange(6),
    "order": np.asfortranarray(_RNG.random((5, 7))),
    "scalar": np.float64(3.0),
    "empty": np.zeros((0, 4), np.float16),
    "flags": np.array([True, False]),
    "complex": np.array([1 + 2j]),
}


def _same(one, other):
    """Whether two dicts of arrays are the same to the last bit."""
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].tobytes() == other[name].tobytes()
        for name in one
    )


def _numpy(path):
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


class StoredNpzTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self._path = pathlib.Path(folder) / "c.npz"

    def _is_read_as_by_numpy(self, content):
        """Fails unless both read the same, or both raise; whether they read."""
        self._path.write_bytes(content)
        try:
            expected = _numpy(self._path)
        except Exception as error:
            with self.assertRaises(type(error)):
                stored_npz.load(self._path)
            return False
        self.assertTrue(_same(stored_npz.load(self._path), expected))
        return True

    def test_arrays_without_numpys_reader(self):
        np.savez(self._path, **_ARRAYS)
        with mock.patch.object(np, "load", side_effect=AssertionError):
            found = stored_npz.load(self._path)
        self.assertTrue(_same(found, _numpy(self._path)))
        self.assertTrue(_same(found, _ARRAYS | {"scalar": np.array(3.0)}))
        for array in found.values():  # As one's own.
            self.assertTrue(array.flags.writeable and array.flags.aligned)
            self.assertIs(array.flags.owndata, True)
        self.assertTrue(found["order"].flags.f_contiguous)

    def test_more_than_the_first_reads(self):
        arrays = {f"{'long' * 30}_{i}": np.arange(i) for i in range(40)}
        np.savez(self._path, **arrays)
        self.assertTrue(_same(stored_npz.load(self._path), arrays))

    @parameterized.parameters(
        (np.array(["ab", "c"]),),
        (np.zeros(2, [("a", np.int8), ("b", np.float32)]),),
        (np.arange(3, dtype=">i4"),),
        (np.array(["2020-01-01"], "datetime64[D]"),),
    )
    def test_other_dtypes(self, array):
        np.savez(self._path, x=array)
        self.assertTrue(_same(stored_npz.load(self._path), {"x": array}))

    def test_other_archives(self):
        np.savez_compressed(self._path, **_ARRAYS)
        self.assertTrue(_same(stored_npz.load(self._path), _numpy(self._path)))
        with zipfile.ZipFile(self._path, "w") as archive:
            archive.comment = b"why not"
            archive.writestr("x.npy", _npy(np.arange(3)))
            archive.writestr("\u00fc.npy", _npy(np.arange(4)))
        self.assertTrue(_same(stored_npz.load(self._path), _numpy(self._path)))
        self._path.write_bytes(b"before" + self._path.read_bytes())
        with self.assertRaises(Exception) as theirs:
            _numpy(self._path)
        with self.assertRaises(type(theirs.exception)):
            stored_npz.load(self._path)

    def test_errors_are_numpys(self):
        with self.assertRaises(FileNotFoundError):
            stored_npz.load(self._path)
        self._path.write_bytes(b"")
        with self.assertRaises(EOFError):
            stored_npz.load(self._path)
        np.savez(self._path, x=np.array([{}], object))
        with self.assertRaisesRegex(ValueError, "allow_pickle=False"):
            stored_npz.load(self._path)
        # The array is as large as its header says, which nobody believes.
        header = _npy(np.arange(3)).replace(b"(3,), }", b"(3" + b"0" * 12)
        header = header.replace(b"0" * 12, b"0" * 9 + b",)}")
        with zipfile.ZipFile(self._path, "w") as archive:
            archive.writestr("x.npy", header)
        with (
            mock.patch.object(np, "empty", side_effect=AssertionError),
            self.assertRaises(ValueError),
        ):
            stored_npz.load(self._path)

    def test_mutations(self):
        """Nothing is read that NumPy refuses, and nothing else than it reads.

        Seen to fail without the checksum, without the comparison of the local
        name, and without that of the flags.
        """
        np.savez(self._path, x=np.arange(6.0), y=np.arange(6))
        content = self._path.read_bytes()
        rng = np.random.default_rng(1)
        read = 0
        for _ in range(_TRIES):
            changed = bytearray(content)
            for _ in range(rng.integers(1, 4)):
                place = rng.integers(len(changed))
                changed[place] = rng.choice([0, 1, 255, rng.integers(256)])
            if rng.random() < 0.1:
                del changed[rng.integers(len(changed)) :]
            read += self._is_read_as_by_numpy(changed)
        self.assertBetween(read, 20, _TRIES - 200)

    def test_directories_that_lie(self):
        """Entries that overlap, repeat a name, or point beyond the file."""
        np.savez(self._path, x=np.arange(6), y=np.arange(6))
        content = self._path.read_bytes()
        second = content.rindex(b"PK\1\2")
        first = content.rindex(b"PK\1\2", 0, second)
        for place, value in [
            (second, content[first:second]),  # Python 3.13 refuses it.
            (second + 42, b"\0\0\0\0"),  # Where the first one is.
            (second + 46, b"x"),  # Its name.
            (first + 42, b"\xff\xff\xff\x7f"),
            (first + 24, b"\xff\xff\xff\xff"),
            (len(content) - 12, b"\xff\xff\0\0"),
            (len(content) - 6, b"\0\0\0\0"),
        ]:
            changed = bytearray(content)
            changed[place : place + len(value)] = value
            self._is_read_as_by_numpy(changed)

    def test_files_are_closed(self):
        np.savez(self._path, x=np.arange(3))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            stored_npz.load(self._path)
        self.assertLen(os.listdir("/proc/self/fd"), before)


def _npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


if __name__ == "__main__":
    absltest.main()
