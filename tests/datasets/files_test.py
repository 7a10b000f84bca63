"""Tests of a directory with one file for each client."""

import importlib.util
import pathlib
import tempfile
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from absl.testing import absltest, parameterized

from tfdp_fl.datasets import ClientFailure, FederatedDataset


def _frame(n: int) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "age": np.arange(n) + 0.5,
            "height": np.arange(n) * 2,
            "label": np.arange(n) % 2,
            "w": np.arange(n) + 1.0,
        }
    )


class FromDirectoryTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    @parameterized.parameters("csv", "parquet")
    def test_tables(self, suffix):
        if suffix == "parquet":
            pytest.importorskip("pyarrow")
        for name, n in (("b", 3), ("a", 1)):
            path = self.path / f"{name}.{suffix}"
            if suffix == "parquet":
                _frame(n).to_parquet(path)
            else:
                _frame(n).to_csv(path, index=False)
        (self.path / "README.md").write_text("not a client")
        dataset = FederatedDataset.from_directory(
            self.path, features=["age", "height"], sample_weight="w"
        )
        self.assertEqual(list(dataset.client_ids), ["a", "b"])
        x, y, weight = dataset.client("b")
        np.testing.assert_array_equal(x, [[0.5, 0], [1.5, 2], [2.5, 4]])
        np.testing.assert_array_equal(y, [0, 1, 0])
        np.testing.assert_array_equal(weight, [1, 2, 3])
        self.assertFalse(dataset.is_indexed)
        self.assertEqual(dataset.in_memory().client_sizes().tolist(), [1, 3])

    def test_a_table_without_rows_is_a_client_without_examples(self):
        for name, n in (("a", 0), ("b", 3)):
            _frame(n).to_csv(self.path / f"{name}.csv", index=False)
        dataset = FederatedDataset.from_directory(self.path, features=["age", "height"])
        self.assertEqual(dataset.client_sizes().tolist(), [0, 3])
        for one, other in zip(dataset.client("a"), dataset.client("b"), strict=True):
            self.assertEqual(one.dtype, other.dtype)

    def test_parquet_without_what_reads_it(self):
        (self.path / "a.parquet").write_bytes(b"PAR1")
        missing = {"pyarrow": None, "fastparquet": None}
        with (
            mock.patch.object(importlib.util, "find_spec", lambda _: None),
            mock.patch.dict("sys.modules", missing),
            self.assertRaisesRegex(
                ImportError,
                "Reading .parquet files needs pyarrow, .*pip install pyarrow",
            ),
        ):
            FederatedDataset.from_directory(self.path)

    def test_tables_without_pandas(self):
        _frame(2).to_csv(self.path / "a.csv", index=False)
        with (
            mock.patch.dict("sys.modules", {"pandas": None}),
            self.assertRaisesRegex(ImportError, "needs pandas"),
        ):
            FederatedDataset.from_directory(self.path)

    def test_features_are_what_is_left(self):
        _frame(2).to_csv(self.path / "a.csv", index=False)
        dataset = FederatedDataset.from_directory(self.path, sample_weight="w")
        self.assertEqual(dataset.element_spec[0].shape, (2,))

    def test_npz(self):
        below = self.path / "ward" / "one"
        below.mkdir(parents=True)
        np.savez(below / "p7.npz", x=np.ones((4, 2)), y=np.arange(4))
        dataset = FederatedDataset.from_directory(self.path, "**/*.npz")
        self.assertEqual(list(dataset.client_ids), ["ward/one/p7"])
        x, y = dataset.client("ward/one/p7")
        self.assertEqual((x.shape, x.dtype), ((4, 2), np.float32))
        np.testing.assert_array_equal(y, range(4))

    def test_npz_with_several_features_and_weights(self):
        np.savez(
            self.path / "p.npz",
            x_left=np.ones(2),
            x_right=np.zeros((2, 3)),
            y=np.arange(2),
            sample_weight=np.arange(2),
        )
        x, _, weight = FederatedDataset.from_directory(self.path).client("p")
        self.assertEqual(sorted(x), ["left", "right"])
        self.assertEqual(weight.dtype, np.float32)

    def test_a_file_that_cannot_be_read_fails_alone_and_quotes_nothing(self):
        _frame(2).to_csv(self.path / "a.csv", index=False)
        (self.path / "b.csv").write_text("age,height,label,w\nsecret,1,0,1\n")
        np.savez(self.path / "c.npz", x=np.array(["s", {}], object), y=[1, 2])
        np.savez(self.path / "d.npz", features=np.ones(2), y=[1, 2])
        read = list(
            FederatedDataset.from_directory(
                self.path, features=["age", "height"]
            ).read_clients(None)
        )
        failed = [each for each in read if isinstance(each, ClientFailure)]
        self.assertEqual([each.position for each in failed], [1, 2, 3])
        for each in failed:
            self.assertNotIn("secret", each.reason)
        self.assertIn("got 'features'", failed[-1].reason)

    @parameterized.parameters(None, "*", "*.npz", "[ab]*.npz", ".*", "a?*")
    def test_clients_are_those_that_pathlib_finds(self, pattern):
        for name in ("b", "a", "a-b", "A", ".hidden", "a.b", "ab"):
            np.savez(self.path / f"{name}.npz", x=np.ones(1), y=np.ones(1))
        (self.path / "c.npz").mkdir()  # No file, whatever its name.
        (self.path / "d.npz").symlink_to(self.path / "a.npz")
        (self.path / "e.npz").symlink_to(self.path / "gone.npz")
        dataset = FederatedDataset.from_directory(self.path, pattern)
        expected = [
            path.name.removesuffix(".npz")
            for path in sorted(self.path.glob(pattern or "*"))
            if path.is_file()
        ]
        self.assertEqual(list(dataset.client_ids), expected)
        self.assertEqual(dataset.client(expected[0])[0].shape, (1,))

    def test_what_is_refused(self):
        make = FederatedDataset.from_directory
        with self.assertRaisesRegex(ValueError, "directory must be .* 'gone'"):
            make("gone")
        with self.assertRaisesRegex(ValueError, "must hold files of clients"):
            make(self.path)
        (self.path / "a.txt").write_text("")
        with self.assertRaisesRegex(ValueError, r"of \.csv.*, got 'a.txt'"):
            make(self.path, "*.txt")
        _frame(2).to_csv(self.path / "a.csv", index=False)
        np.savez(self.path / "a.npz", x=np.ones(1), y=np.ones(1))
        with self.assertRaisesRegex(ValueError, "one file for each client"):
            make(self.path)


if __name__ == "__main__":
    absltest.main()
