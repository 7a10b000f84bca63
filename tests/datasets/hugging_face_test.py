"""Tests of a Hugging Face `Dataset`: a stand-in, and the real one if there."""

from __future__ import annotations

import importlib.util
import unittest

import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset

_COLUMNS = {
    "who": ["b", "a", "b", "c", "b"],
    "age": [1, 2, 3, 4, 5],
    "height": [0.5, 1.5, 2.5, 3.5, 4.5],
    "label": [0, 1, 0, 1, 1],
    "w": [1.0, 2.0, 3.0, 4.0, 5.0],
    "text": ["to", "be", "or", "not", "2b"],
    "image": [[[k, 0], [0, k]] for k in range(5)],
}


def _array(values):
    lengths = {len(each) for each in values if isinstance(each, list)}
    if len(lengths) < 2:
        return np.asarray(values)
    rows = np.empty(len(values), object)
    rows[:] = [np.asarray(each, np.int64) for each in values]
    return rows


class StandIn:
    """The face of a `datasets.Dataset` that is used; counts rows read."""

    def __init__(self, columns, as_numpy=False, read=None):
        self._columns, self._numpy = columns, as_numpy
        self.read = [] if read is None else read

    @property
    def column_names(self):
        return list(self._columns)

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def select_columns(self, names):
        columns = {name: self._columns[name] for name in names}
        return StandIn(columns, self._numpy, self.read)

    def with_format(self, kind):
        return StandIn(self._columns, kind == "numpy", self.read)

    def __getitem__(self, rows):
        if isinstance(rows, slice):
            rows = range(len(self))[rows]
        self.read += [(tuple(self._columns), int(row)) for row in rows]
        held = {
            name: [values[int(row)] for row in rows]
            for name, values in self._columns.items()
        }
        if self._numpy:
            return {name: _array(each) for name, each in held.items()}
        return held


_INSTALLED = importlib.util.find_spec("datasets") is not None


class FromHuggingFaceTest(parameterized.TestCase):
    def make(self, columns):
        return StandIn(columns)

    def test_a_client_is_its_rows(self):
        dataset = FederatedDataset.from_hugging_face(
            self.make(_COLUMNS),
            "who",
            features=["age", "height"],
            sample_weight="w",
        )
        self.assertEqual(list(dataset.client_ids), ["b", "a", "c"])
        x, y, weight = dataset.client("b")
        np.testing.assert_array_equal(x, [[1, 0.5], [3, 2.5], [5, 4.5]])
        np.testing.assert_array_equal(y, [0, 0, 1])
        np.testing.assert_array_equal(weight, [1, 3, 5])
        self.assertEqual((x.dtype, y.dtype), (np.float32, np.int64))

    @parameterized.parameters(("image", (2, 2)), ("text", ()), ("age", ()))
    def test_one_column_is_what_it_holds(self, name, shape):
        dataset = FederatedDataset.from_hugging_face(
            self.make(_COLUMNS), "who", features=name
        )
        self.assertEqual(dataset.element_spec[0].shape, shape)
        np.testing.assert_array_equal(
            dataset.in_memory().client("b")[0].astype(str),
            np.asarray(_COLUMNS[name])[[0, 2, 4]].astype(str),
        )

    def test_a_mapping_and_what_is_left(self):
        columns = {k: _COLUMNS[k] for k in ("who", "label", "age", "image")}
        x, _ = FederatedDataset.from_hugging_face(
            self.make(columns), "who", {"i": "image", "n": ["age"]}
        ).client("a")
        self.assertEqual((x["i"].shape, x["n"].shape), ((1, 2, 2), (1, 1)))
        columns.pop("image")
        x, _ = FederatedDataset.from_hugging_face(self.make(columns), "who").client("a")
        self.assertEqual(x.shape, (1,))

    def test_sequences_of_unequal_length_are_filled_up(self):
        tokens = [[1], [2, 3], [4, 5, 6], [], [7, 8]]
        dataset = FederatedDataset.from_hugging_face(
            self.make({**{k: _COLUMNS[k] for k in ("who", "label")}, "t": tokens}),
            "who",
            features="t",
        )
        np.testing.assert_array_equal(
            dataset.in_memory().client("b")[0],
            [[1, 0, 0], [4, 5, 6], [7, 8, 0]],
        )

    def test_it_trains(self):
        x, y = toy.arrays(60)
        columns = {f"x{k}": x[:, k].tolist() for k in range(8)}
        columns |= {"who": [str(k % 6) for k in range(60)], "y": y.tolist()}
        clients = FederatedDataset.from_hugging_face(
            self.make(columns), "who", label="y"
        )
        weights = []
        for each in (clients, clients.in_memory()):
            fed = toy.federated(tfdp_fl.NoPrivacy(), clients_per_round=3)
            fed.fit(each, rounds=2, seed=1, verbose=0)
            weights.append(fed.get_weights()[0])
        np.testing.assert_allclose(*weights, atol=1e-6)

    def test_what_is_refused(self):
        make = FederatedDataset.from_hugging_face
        with self.assertRaisesRegex(TypeError, "one split.*'train', 'test'"):
            make({"train": self.make(_COLUMNS), "test": 1}, "who")
        with self.assertRaisesRegex(TypeError, "must be a datasets.Dataset"):
            make([1, 2], "who")
        with self.assertRaisesRegex(ValueError, "client must name columns"):
            make(self.make(_COLUMNS), "user")
        with self.assertRaisesRegex(ValueError, "must not hold the client"):
            make(self.make(_COLUMNS), "who", ["who", "age"])
        nobody = {**_COLUMNS, "who": ["a", None, "a", "b", "b"]}
        with self.assertRaisesRegex(ValueError, "'who' with 1 missing"):
            make(self.make(nobody), "who")
        with self.assertRaisesRegex(ValueError, "column 'text' .* in a list") as caught:
            _ = make(self.make(_COLUMNS), "who", ["age", "text"]).element_spec
        self.assertNotIn("2b", str(caught.exception))

    def test_fit_says_how(self):
        with self.assertRaisesRegex(TypeError, "from_hugging_face"):
            tfdp_fl.datasets.as_federated(self.make(_COLUMNS))


class ReadTest(absltest.TestCase):
    def test_only_the_clients_are_read_at_once(self):
        held = StandIn(_COLUMNS)
        dataset = FederatedDataset.from_hugging_face(held, "who", "image")
        self.assertEqual({columns for columns, _ in held.read}, {("who",)})
        self.assertLen(dataset.element_spec, 2)
        del held.read[:]
        list(dataset.read_clients([1]))
        self.assertEqual(held.read, [(("image", "label"), 1)])


@unittest.skipUnless(_INSTALLED, "datasets is not installed (tests only)")
class RealTest(FromHuggingFaceTest):
    def make(self, columns):
        import datasets

        return datasets.Dataset.from_dict(columns)


if __name__ == "__main__":
    absltest.main()
