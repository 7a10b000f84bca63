"""Tests of tables of persons: `fit(x, y, client_ids=)`, and Parquet files."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import pandas as pd
from absl.testing import parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset, persons


def _table(rows=60, people=12):
    x, y = toy.arrays(rows)
    return x, y, np.array([f"anna {k % people}" for k in range(rows)])


class FitTest(parameterized.TestCase):
    def _fed(self):
        return toy.federated(
            tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0),
            clients_per_round=4,
            sampling="poisson",
        )

    def test_a_person_is_one_client_with_all_its_rows(self):
        x, y, ids = _table()
        dataset = persons.of_fit(x, y, ids, None)
        self.assertEqual(dataset.num_clients, 12)
        own_x, own_y = dataset.client("anna 3")
        np.testing.assert_array_equal(own_x, x[ids == "anna 3"])
        np.testing.assert_array_equal(own_y, y[ids == "anna 3"])

    def test_fit_is_that_of_the_clients(self):
        x, y, ids = _table()
        weight = np.linspace(0, 1, len(x), dtype=np.float32)
        one, other = self._fed(), self._fed()
        options = {"rounds": 3, "batch_size": 5, "verbose": 0, "seed": 1}
        one.fit(x, y, client_ids=ids, sample_weight=weight, **options)
        clients = {
            name: (x[ids == name], y[ids == name], weight[ids == name])
            for name in dict.fromkeys(ids.tolist())
        }
        other.fit(clients, **options)
        for left, right in zip(one.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(left, right)
        self.assertEqual(one.epsilon(1e-3), other.epsilon(1e-3))

    def test_names_as_in_keras_and_rounds_in_their_place(self):
        x, y, ids = _table()
        fed = self._fed()
        fed.fit(x=x, y=y, client_ids=pd.Series(ids), verbose=0)
        fed.fit(persons.by_person(x, y, ids), 2, verbose=0)
        self.assertEqual(fed.rounds, 3)
        self.assertLen(fed.evaluate(x, y, verbose=0, return_dict=True), 1)

    def test_validation_holds_out_persons_and_no_rows(self):
        x, y, ids = _table()
        fed = self._fed()
        fed.fit(x, y, client_ids=ids, rounds=1, validation_split=0.3, verbose=0)
        self.assertLess(fed.run.population[0], 12)

    def test_a_frame_and_a_series(self):
        frame = pd.DataFrame({"age": [1, 2, 3], "height": [0.5, 1.5, 2.5]})
        dataset = persons.by_person(
            frame, pd.Series([0, 1, 0], index=[7, 8, 9]), [5, 5, 6]
        )
        np.testing.assert_array_equal(dataset.client(5)[0], [[1, 0.5], [2, 1.5]])
        np.testing.assert_array_equal(dataset.client(5)[1], [0, 1])

    @parameterized.named_parameters(
        ("short", lambda x, y, i: (x, y, i[:-1]), "client_ids.*60 rows, got .59"),
        ("flat", lambda x, y, i: (x, y, i[:, None]), "client_ids"),
        ("labels", lambda x, y, i: (x, y[:-1], i), "59|60"),
        ("none", lambda x, y, i: (x, y, [None, *i[1:]]), "NoneType.* row 0"),
        ("nan", lambda x, y, i: (x, y, np.where(i == "anna 1", np.nan, 1.0)), "row 1"),
    )
    def test_what_does_not_go_together(self, change, message):
        with self.assertRaisesRegex(ValueError, message):
            persons.by_person(*change(*_table()))

    def test_missing_values_are_refused_by_column_and_row(self):
        x, y, ids = _table()
        x[7, 2] = np.nan
        with self.assertRaisesRegex(ValueError, "column 2 of row 7"):
            self._fed().fit(x, y, client_ids=ids, rounds=1)
        frame = pd.DataFrame(x, columns=list("abcdefgh"))
        with self.assertRaisesRegex(ValueError, "column 'c' with 1.*row 7"):
            persons.by_person(frame, y, ids)

    def test_labels_without_persons(self):
        x, y, _ = _table()
        with self.assertRaisesRegex(TypeError, "client_ids must say whose"):
            self._fed().fit(x, y, rounds=1)
        with self.assertRaisesRegex(TypeError, r"fit\(x, y, client_ids=ids\)"):
            self._fed().fit((x, y), rounds=1)


class BoundRowsTest(parameterized.TestCase):
    @parameterized.parameters("random", "first", "last")
    def test_nobody_keeps_more(self, choose):
        x = {"a": np.arange(9), "b": pd.DataFrame({"c": np.arange(9)})}
        ids = np.array([1, 1, 1, 1, 1, 2, 2, 3, 1])
        left, y, kept = tfdp_fl.bound_rows(x, np.arange(9), ids, most=2, choose=choose)
        self.assertEqual(np.bincount(kept).tolist(), [0, 2, 2, 1])
        np.testing.assert_array_equal(left["a"], y)
        np.testing.assert_array_equal(left["b"]["c"], y)
        np.testing.assert_array_equal(ids[y], kept)
        if choose != "random":
            own = {"first": [0, 1], "last": [4, 8]}[choose]
            self.assertEqual([row for row in y if ids[row] == 1], own)

    @parameterized.parameters(({"most": 0}, "most"), ({"choose": "best"}, "choose"))
    def test_what_is_refused(self, options, name):
        with self.assertRaisesRegex(ValueError, name):
            tfdp_fl.bound_rows(*_table(), **{"most": 2, **options})


class VocabularyTest(parameterized.TestCase):
    def _frame(self, **columns):
        frame = pd.DataFrame(
            {
                "who": [1, 1, 2],
                "age": [30, 31, 40],
                "town": ["b", "a", "b"],
                "label": ["no", "yes", "no"],
            }
        )
        return frame.assign(**columns)

    _VOCABULARY = {"town": ["a", "b", "c"], "label": ["no", "yes"]}  # noqa: RUF012

    def test_alone_a_place_and_in_a_list_zeros_and_ones(self):
        for frame in (self._frame(), self._frame(town=pd.Categorical(["b", "a", "b"]))):
            dataset = FederatedDataset.from_dataframe(
                frame, "who", vocabulary=self._VOCABULARY
            )
            x, y = dataset.client(1)
            np.testing.assert_array_equal(x, [[30, 0, 1, 0], [31, 1, 0, 0]])
            np.testing.assert_array_equal(y, [0, 1])
            alone = FederatedDataset.from_dataframe(
                frame, "who", features={"t": "town"}, vocabulary=self._VOCABULARY
            )
            np.testing.assert_array_equal(alone.client(1)[0]["t"], [1, 0])

    @parameterized.named_parameters(
        ("undeclared", {}, {}, r"vocabulary=\{'town': \[...\]\}"),
        ("other", {"town": ["b", "Secret", "b"]}, _VOCABULARY, "'town'.*1 .*row 1"),
        ("missing", {"town": ["b", "a", None]}, _VOCABULARY, "'town' with 1.*row 2"),
        ("repeated", {}, {"town": ["a", "a", "b"]}, "repeatedly"),
        (
            "categories_of_the_data",
            {"town": pd.Categorical(["b", "a", "b"])},
            {},
            "vocabulary",
        ),
    )
    def test_what_is_refused(self, columns, vocabulary, message):
        with self.assertRaisesRegex(ValueError, message) as caught:
            FederatedDataset.from_dataframe(
                self._frame(**columns), "who", vocabulary=vocabulary
            )
        self.assertNotIn("Secret", str(caught.exception))


class ParquetTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self.path = os.path.join(folder, "table.parquet")
        rng = np.random.default_rng(0)
        self.frame = pd.DataFrame(
            {
                "who": rng.integers(0, 9, 100),
                "a": rng.normal(size=100),
                "town": rng.choice(["a", "b"], 100),
                "label": rng.integers(0, 2, 100),
            }
        )
        self.vocabulary = {"town": ["a", "b"]}

    def test_it_has_what_the_frame_has(self):
        self.frame.set_index("a", drop=False).to_parquet(self.path)
        dataset, expected = (
            make(source, "who", vocabulary=self.vocabulary)
            for make, source in (
                (FederatedDataset.from_parquet, self.path),
                (FederatedDataset.from_dataframe, self.frame),
            )
        )
        self.assertEqual(list(dataset.client_ids), list(expected.client_ids))
        for client_id in expected.client_ids:
            for one, other in zip(
                dataset.client(client_id), expected.client(client_id), strict=True
            ):
                np.testing.assert_array_equal(one, other)
