"""Tests of metrics client by client."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest

import tfdp_fl
from tests.keras import toy


class EvaluateClientsTest(absltest.TestCase):
    def test_the_statement_says_that_they_were_shown(self):
        for before in (True, False):
            fed = toy.federated()
            fed.fit(toy.clients(), verbose=0)
            with self.subTest(before_the_last_fit=before):
                facts = fed.privacy_statement(1e-2, "dict")
                self.assertNotIn("client_metrics_shown", facts["caveats"])
                fed.evaluate_clients(toy.clients(2), verbose=0)
                if before:
                    fed.fit(toy.clients(), verbose=0)
                facts = fed.privacy_statement(1e-2, "dict")
                self.assertIn("client_metrics_shown", facts["caveats"])
        fed = toy.federated()
        fed.evaluate_clients(toy.clients(2), verbose=0)
        fed.fit(toy.clients(), verbose=0)
        self.assertIn("without noise", fed.privacy_statement(1e-2))
        self.assertIn(
            "client_metrics_shown", fed.privacy_statement(1e-2, "dict")["caveats"]
        )

    def test_a_client_that_cannot_be_read_or_has_nothing(self):
        def read(name):
            if name == "broken":
                raise OSError("secret.csv is not there")
            n = 0 if name == "empty" else 5
            return toy.arrays(n) if n else tuple(e[:0] for e in toy.arrays(1))

        clients = tfdp_fl.datasets.FederatedDataset.from_client_fn(
            ["whole", "broken", "empty"], read
        )
        fed = toy.federated()
        with self.assertWarnsRegex(RuntimeWarning, "'broken': OSError") as seen:
            values = fed.evaluate_clients(clients, verbose=0)
        self.assertNotIn("secret", str(seen.warning))
        np.testing.assert_array_equal(values["num_examples"], [5, 0, 0])
        np.testing.assert_array_equal(np.isnan(values["loss"]), [False, True, True])

    def test_one_that_cannot_be_evaluated_on(self):
        clients = {k: toy.clients().client(k) for k in range(3)}
        clients[1] = (np.array(clients[1][0]), np.full(10, 271828, np.int32))
        fed = toy.federated()
        others = fed.evaluate_clients({0: clients[0], 2: clients[2]}, verbose=0)
        with self.assertWarnsRegex(RuntimeWarning, "1 of 3 .* evaluated") as w:
            values = fed.evaluate_clients(clients, verbose=0)
        self.assertNotIn("271828", str(w.warning))
        np.testing.assert_array_equal(
            values["loss"], [others["loss"][0], np.nan, others["loss"][1]]
        )
        with self.assertRaisesRegex(ValueError, "none of 1 has") as error:
            fed.evaluate_clients({1: clients[1]}, verbose=0)
        self.assertNotIn("271828", str(error.exception))


class ValidateTest(absltest.TestCase):
    def test_a_model_that_can_be_trained(self):
        self.assertEqual(tfdp_fl.validate(toy.dense()), [])
        self.assertEqual(
            tfdp_fl.validate(toy.dense(), clients=toy.clients(), loss=toy.loss()),
            [],
        )

    def test_problems_are_named(self):
        unbuilt = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        frozen = toy.dense()
        frozen.trainable = False
        for model, message in (
            ("model", "of type str"),
            (unbuilt, "input shape"),
            (frozen, "must have trainable variables"),
        ):
            (problem,) = tfdp_fl.validate(model)
            self.assertIn(message, problem)
            with self.assertRaisesRegex(ValueError, message):
                tfdp_fl.validate(model, strict=True)

    def test_labels_without_a_class(self):
        x, y = toy.arrays(10)
        (problem,) = tfdp_fl.validate(
            toy.dense(), clients={"a": (x, y + 7)}, loss=toy.loss()
        )
        self.assertRegex(problem, "label")

    def test_clients_and_loss_go_together(self):
        with self.assertRaisesRegex(ValueError, "clients alone"):
            tfdp_fl.validate(toy.dense(), clients=toy.clients())


if __name__ == "__main__":
    absltest.main()
