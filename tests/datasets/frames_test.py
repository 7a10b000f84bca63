"""Tests of clients from a pandas frame."""

import numpy as np
import pandas as pd
from absl.testing import parameterized

from tfdp_fl.datasets import FederatedDataset


def _frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "who": ["b", "a", "b", "c", "b"],
            "age": [1, 2, 3, 4, 5],
            "height": [0.5, 1.5, 2.5, 3.5, 4.5],
            "label": [0, 1, 0, 1, 1],
        }
    )


class FromDataframeTest(parameterized.TestCase):
    def test_rows_stay_in_order_and_clients_as_they_appear(self):
        dataset = FederatedDataset.from_dataframe(
            _frame(), client="who", features=["age", "height"], label="label"
        )
        self.assertEqual(list(dataset.client_ids), ["b", "a", "c"])
        x, y = dataset.client("b")
        np.testing.assert_array_equal(x, [[1, 0.5], [3, 2.5], [5, 4.5]])
        np.testing.assert_array_equal(y, [0, 0, 1])
        self.assertEqual((x.dtype, y.dtype), (np.float32, np.int64))

    def test_an_index_that_is_not_a_range_changes_nothing(self):
        frame = _frame()
        frame.index = [7, 7, 3, 1, 0]
        dataset = FederatedDataset.from_dataframe(frame, client="who")
        np.testing.assert_array_equal(
            dataset.client("b")[0], [[1, 0.5], [3, 2.5], [5, 4.5]]
        )

    def test_without_features_all_other_columns(self):
        dataset = FederatedDataset.from_dataframe(_frame(), client="who")
        self.assertEqual(dataset.element_spec[0].shape, (2,))

    def test_one_column_and_a_mapping(self):
        one = FederatedDataset.from_dataframe(_frame(), client="who", features="height")
        self.assertEqual(one.element_spec[0].shape, ())
        several = FederatedDataset.from_dataframe(
            _frame(),
            client="who",
            features={"left": "age", "right": ["age", "height"]},
            label=["label", "age"],
        )
        (x, y) = several.client("a")
        np.testing.assert_array_equal(x["left"], [2])
        np.testing.assert_array_equal(x["right"], [[2, 1.5]])
        np.testing.assert_array_equal(y, [[1, 2]])

    @parameterized.named_parameters(
        ("no_frame", [1], {}, TypeError, "pandas.DataFrame, got list"),
        ("client", None, {"client": "whom"}, ValueError, "client.*'whom'"),
        ("features", None, {"features": ["x"]}, ValueError, "features.*'x'"),
        ("no_features", None, {"features": []}, ValueError, "features must"),
        ("label", None, {"label": "y"}, ValueError, "label.*'y'"),
        (
            "client_as_feature",
            None,
            {"features": ["who", "age"]},
            ValueError,
            "must not hold the client column",
        ),
    )
    def test_what_does_not_go(self, frame, arguments, error, message):
        with self.assertRaisesRegex(error, message):
            FederatedDataset.from_dataframe(
                _frame() if frame is None else frame,
                **{"client": "who", **arguments},
            )

    @parameterized.named_parameters(
        ("words", "age", ["Secret"] * 5, "features must be numbers.*'age'"),
        ("missing", "age", [1, None, 1, 1, 1], "'age' with 1 missing"),
        ("infinite", "height", [np.inf] * 5, "finite.*'height' with 5"),
        ("large", "height", [1e300] * 5, "finite"),
        ("unsigned", "age", np.full(5, 2**63, np.uint64), "fit into int64"),
        ("no_client", "who", ["a", None, "b", "b", "b"], "'who' with 1 miss"),
        ("label", "label", ["Secret"] * 5, "label must be numbers"),
    )
    def test_values_that_cannot_be_trained_on(self, column, values, message):
        frame = _frame()
        frame[column] = values
        with self.assertRaisesRegex(ValueError, message) as caught:
            FederatedDataset.from_dataframe(frame, client="who")
        self.assertNotIn("Secret", str(caught.exception))

    def test_no_rows_and_repeated_columns(self):
        with self.assertRaisesRegex(ValueError, "have rows"):
            FederatedDataset.from_dataframe(_frame().head(0), client="who")
        frame = pd.concat([_frame(), _frame()[["age"]]], axis=1)
        with self.assertRaisesRegex(ValueError, "distinct"):
            FederatedDataset.from_dataframe(frame, client="who")
