"""Metrics client by client, those that are no means or no numbers, and `validate`."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset


class EvaluateClientsTest(absltest.TestCase):
    def test_the_statement_says_that_they_were_shown(self):
        for before in (True, False):
            fed = toy.federated()
            toy.fit(fed)
            with self.subTest(before_the_last_fit=before):
                facts = fed.privacy_statement(1e-2, "dict")
                self.assertNotIn("client_metrics_shown", facts["caveats"])
                fed.evaluate_clients(toy.clients(2), verbose=0)
                if before:
                    toy.fit(fed)
                facts = fed.privacy_statement(1e-2, "dict")
                self.assertIn("client_metrics_shown", facts["caveats"])
        fed = toy.federated()
        fed.evaluate_clients(toy.clients(2), verbose=0)
        toy.fit(fed)
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

        clients = FederatedDataset.from_client_fn(["whole", "broken", "empty"], read)
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


def _is_first(y, predicted):
    return tf.cast(tf.reshape(y, [-1]) == 0, tf.float32), tf.nn.softmax(predicted)[:, 0]


class _AUC(tf.keras.metrics.AUC):
    def update_state(self, y, predicted, sample_weight=None):
        return super().update_state(*_is_first(y, predicted), sample_weight)


class _Vector(tf.keras.metrics.Metric):
    """Says how often each class is there."""

    def __init__(self, name="by_class", **options):
        super().__init__(name=name, **options)
        shape = (toy.NUM_CLASSES,)
        self.counts = self.add_weight(shape=shape, initializer="zeros", name="counts")

    def update_state(self, y, predicted, sample_weight=None):
        labels = tf.cast(tf.reshape(y, [-1]), tf.int32)
        self.counts.assign_add(
            tf.math.bincount(
                labels,
                minlength=toy.NUM_CLASSES,
                maxlength=toy.NUM_CLASSES,
                dtype=tf.float32,
            )
        )

    def result(self):
        return tf.convert_to_tensor(self.counts)

    def reset_state(self):  # Keras 2's is for scalars.
        self.counts.assign(tf.zeros_like(self.counts))


def _federated(metric, **options):
    return toy.federated(compile_options={"metrics": [metric]}, **options)


class AreaTest(parameterized.TestCase):
    def test_of_a_round_it_is_that_of_all_clients_together(self):
        found = []
        for count in (40, 1):  # Of forty clients, or of one that holds everything.
            x, y = toy.arrays(400)
            rows = np.arange(400).reshape(count, -1)
            fed = _federated(
                _AUC(name="auc"),
                mechanism=tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.0),
                clients_per_round=count,
                num_replicas=2,
            )
            clients = FederatedDataset.from_indices(x, y, rows)
            # One batch each, so that all are measured by the same weights.
            history = toy.fit(fed, data=clients, batch_size=400).history
            found.append(history["auc"][0])
        self.assertBetween(found[0], 0.01, 0.99)
        self.assertAlmostEqual(*found, places=4)


class SeveralNumbersTest(parameterized.TestCase):
    _MESSAGE = "metrics must give one number each, got 'by_class'"

    @parameterized.parameters("metrics", "weighted_metrics")
    def test_fit_refuses_them_before_anything_starts(self, argument):
        fed = toy.federated(compile_options={argument: ["accuracy", _Vector()]})
        with self.assertRaisesRegex(ValueError, self._MESSAGE):
            toy.fit(fed)
        self.assertIsNone(fed.run)

    @parameterized.parameters(False, True)
    def test_evaluate_clients_refuses_them(self, private):
        fed, bounds = _federated(_Vector()), {"by_class": (0.0, 1.0)}
        options = {}
        if private:
            trained = toy.federated(model=fed.model)
            toy.fit(trained)
            trained.compile("sgd", toy.loss(), metrics=[_Vector()])
            fed = trained
            options["private"] = tfdp_fl.PrivateMetrics(
                bounds=bounds, noise_multiplier=1.0
            )
        with self.assertRaisesRegex(ValueError, self._MESSAGE):
            fed.evaluate_clients(toy.clients(), verbose=0, **options)
        if private:
            self.assertEqual(fed.spending.evaluations, 0)


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
