"""What a new user gets wrong in the first hour has an answer that helps."""

from __future__ import annotations

import contextlib
import io
import warnings

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy


def _planned(num_clients=toy.NUM_CLIENTS, **options):
    return tfdp_fl.make_private(
        toy.dense(),
        **{
            "target_epsilon": 8.0,
            "target_delta": 1e-3,
            "num_clients": num_clients,
            "clients_per_round": 20,
            "rounds": 2,
            "num_replicas": 1,
            **options,
        },
    )


class MessagesTest(parameterized.TestCase):
    def test_a_misspelt_target(self):
        with self.assertRaisesRegex(TypeError, "do you mean target_epsilon?"):
            _planned(target_eps=3.0)

    @parameterized.parameters(
        ({"optimizer": None}, ValueError, "optimizer must be a .*'sgd' or 'adam'"),
        ({"run_eagerly": True}, TypeError, "run_eagerly: the clients' training is"),
        ({"metric": ["accuracy"]}, TypeError, "do you mean metrics?"),
    )
    def test_compile(self, given, error, message):
        with self.assertRaisesRegex(error, message):
            toy.federated(compile_options=given)

    def test_validation_data_of_clients(self):
        x, y = toy.arrays(4)
        with self.assertRaisesRegex(TypeError, "from_client_arrays"):
            toy.federated().fit(toy.clients(), validation_data={"a": (x, y)})

    def test_far_fewer_clients_than_planned_names_both_numbers(self):
        fed = _planned(num_clients=1000)
        fed.compile("sgd", toy.loss())
        with self.assertRaisesRegex(ValueError, "num_clients=1000 .* got 40"):
            fed.fit(toy.clients(), 2, verbose=0)
        self.assertIsNone(fed.run)

    def test_features_that_are_no_numbers(self):
        x, y = toy.arrays(10)
        x[3, 5] = np.nan
        (problem,) = tfdp_fl.validate(
            toy.dense(), clients={"a": (x, y)}, loss=toy.loss()
        )
        self.assertIn("column(s) 5 of input 0", problem)


class OutputTest(absltest.TestCase):
    def _printed(self, fed, **options):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            fed.fit(toy.clients(), batch_size=10, **options)
        return out.getvalue()

    def test_an_adaptive_optimizer_and_few_steps(self):
        fed = toy.federated(compile_options={"optimizer": "adam"})
        first = self._printed(fed, verbose=2)
        self.assertIn("Hint: each client starts Adam anew", first)
        self.assertNotIn("Hint", self._printed(fed, verbose=2))
        self.assertNotIn("Hint", self._printed(toy.federated(), verbose=2))

    def test_a_line_has_at_most_100_characters(self):
        metrics = [
            tf.keras.metrics.SparseCategoricalAccuracy(name="m" * k)
            for k in (9, 19, 29)
        ]
        fed = toy.federated(compile_options={"metrics": metrics}, delta=1e-3)
        for line in self._printed(fed, verbose=2, rounds=2).splitlines():
            self.assertLessEqual(len(line), 100)

    def test_a_validation_split_warns_of_nothing(self):
        fed = toy.federated()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            fed.fit(toy.clients(), 2, batch_size=10, verbose=0, validation_split=0.3)

    def test_names_of_the_first_page(self):
        self.assertIs(tfdp_fl.FederatedDataset, tfdp_fl.datasets.FederatedDataset)
        self.assertIs(tfdp_fl.Mechanism, tfdp_fl.mechanisms.Mechanism)


if __name__ == "__main__":
    absltest.main()
