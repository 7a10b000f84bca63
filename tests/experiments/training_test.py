"""What settings become: the loss, the server's schedule, what is reported."""

from __future__ import annotations

import tensorflow as tf
from absl.testing import absltest

from tests.keras import files
from tfdp_fl import losses
from tfdp_fl.experiments import run_directory, training
from tfdp_fl.experiments.settings import Settings

_SMALL = {
    "dataset": "digits",
    "num_clients": 20,
    "model": "linear",
    "clients_per_round": 10,
    "rounds": 4,
    "seed": 1,
}


class TrainingTest(tf.test.TestCase):
    def test_server_schedules_end_at_zero(self):
        for schedule, halfway in (("linear", 1.0), ("cosine", 1.0)):
            prepared = training.prepare(
                Settings(
                    **_SMALL,
                    server_optimizer="sgd",
                    server_learning_rate=2,
                    server_schedule=schedule,
                )
            )
            optimizer = prepared.federated_model._compiled.server_optimizer
            rate = optimizer._learning_rate
            self.assertAlmostEqual(float(rate(0)), 2.0)
            self.assertAlmostEqual(float(rate(2)), halfway, places=6)
            self.assertAlmostEqual(float(rate(4)), 0.0, places=6)

    def test_a_run_with_balanced_clients_and_geyers_figures(self):
        prepared = training.prepare(
            Settings(
                **_SMALL,
                client_loss="balanced",
                prior_smoothing=0.02,
                between_client_variance=True,
            )
        )
        loss = prepared.federated_model.model.loss
        self.assertIsInstance(loss, losses.BalancedSoftmaxCrossentropy)
        self.assertEqual(loss.smoothing, 0.02)
        path = files.directory(self) / "run"
        result = training.run(prepared, path, verbose=0)
        self.assertLessEqual(result["epsilon_pld"], result["epsilon_rdp"])
        history = run_directory.Run.read(path).history
        for name in ("between_client_variance", "update_scale"):
            self.assertLen(history[name][1], 4)
            self.assertTrue(all(value > 0 for value in history[name][1]))

    def test_refused(self):
        for options, flag in (
            ({"prior_smoothing": 0.1}, "--client_loss=balanced"),
            ({"server_schedule": "linear"}, "--server_optimizer"),
            (
                {"dataset": "emnist", "model": "cnn", "input_pooling": 2},
                "--input_pooling",
            ),
        ):
            with self.assertRaisesRegex(ValueError, flag):
                Settings(**{**_SMALL, **options}).resolved()


if __name__ == "__main__":
    absltest.main()
