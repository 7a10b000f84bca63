"""No error, warning or line of output quotes anybody's examples."""

from __future__ import annotations

import contextlib
import io
import warnings

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset

_SECRET = 271828


def _embedding() -> tf.keras.Model:
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((4,), dtype="int32"),
            tf.keras.layers.Embedding(10, 3),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(3),
        ]
    )


def _tokens(value: int) -> np.ndarray:
    x = np.zeros((5, 4), np.int32)
    x[2, 1] = value
    return x


def _said(function) -> str:
    """Returns all that calling a function says, errors and warnings too."""
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        try:
            function()
        except Exception as error:
            each: BaseException | None = error
            while each is not None:
                said.write(f"{type(each).__name__}: {each}\n")
                each = each.__cause__ or (
                    None if each.__suppress_context__ else each.__context__
                )
    return said.getvalue() + "".join(str(each.message) for each in seen)


class QuotesNothingTest(parameterized.TestCase):
    def _fit(self, clients, model=None, **options):
        fed = toy.federated(
            tfdp_fl.NoPrivacy(), model or toy.dense, clients_per_round=2
        )
        return _said(lambda: fed.fit(clients, verbose=1, **options))

    def test_a_number_that_no_embedding_has(self):
        y = np.zeros(5, np.int64)
        clients = {name: (_tokens(_SECRET), y) for name in "ab"}
        said = self._fit(clients, _embedding())
        self.assertIn("No client could be trained", said)
        self.assertNotIn(str(_SECRET), said)

    def test_of_one_client_only(self):
        y = np.zeros(5, np.int64)
        clients = {"a": (_tokens(1), y), "b": (_tokens(_SECRET), y)}
        said = self._fit(clients, _embedding())
        self.assertRegex(said, "1 client.* Client 'b': .*Error")
        self.assertNotIn(str(_SECRET), said)

    def test_what_reading_raised(self):
        def read(name):
            if name == "b":
                raise ValueError(f"cannot make a number of {_SECRET}")
            return toy.arrays(5)

        said = self._fit(FederatedDataset.from_client_fn(["a", "b"], read))
        self.assertRegex(said, "Client 'b': ValueError")
        self.assertNotIn(str(_SECRET), said)
        said = self._fit(FederatedDataset.from_client_fn(["b"], read))
        self.assertIn("ValueError", said)
        self.assertNotIn(str(_SECRET), said)

    @parameterized.named_parameters(
        ("array", np.full(3, _SECRET)),
        ("array_of_clients", {"a": np.full(3, _SECRET)}),
        ("lists", [[_SECRET], [_SECRET]]),
        ("label", {"a": (np.ones((1, 8), np.float32), [_SECRET])}),
        ("text", {"a": (np.ones((1, 8), np.float32), [str(_SECRET)])}),
        ("objects", {"a": (np.array([{}, _SECRET], object), [0, 1])}),
        ("mixed", {"a": ([[_SECRET, 1], [str(_SECRET)]], [0, 1])}),
        ("depths", {"a": ([[_SECRET], _SECRET], [0, 1])}),
        ("weights", {"a": (*toy.arrays(1), [str(_SECRET)])}),
        ("lengths", {"a": (np.full((3, 8), _SECRET), [_SECRET])}),
        ("width", {"a": (np.full((3, 7), float(_SECRET)), [0, 1, 2])}),
    )
    def test_data_that_does_not_fit(self, clients):
        said = self._fit(clients)
        self.assertRegex(said, "Error")
        self.assertNotIn(str(_SECRET), said)

    def test_arguments_that_are_data(self):
        data = np.full(3, _SECRET)
        for make in (
            FederatedDataset.from_client_arrays,
            FederatedDataset.from_tf_datasets,
            FederatedDataset.from_client_data,
            lambda each: FederatedDataset.from_dataframe(each, "who"),
            lambda each: tfdp_fl.DPFederatedModel(each, each, 3),
            lambda each: toy.federated().fit(toy.clients(), audit=each),
            lambda each: toy.federated().fit(toy.clients(), validation_data=each),
        ):
            said = _said(lambda make=make: make(data))
            self.assertRegex(said, "Error")
            self.assertNotIn(str(_SECRET), said)
