"""What settings become: the loss, the server's schedule, what is reported."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.keras import files, toy
from tfdp_fl import accounting, engine, features, losses
from tfdp_fl.experiments import run_directory, training
from tfdp_fl.experiments.settings import Settings

_SMALL = {
    "dataset": "digits",
    "num_clients": 20,
    "model": "linear",
    # All of them: to count what is not amplified takes no time.
    "clients_per_round": 20,
    "rounds": 4,
    "seed": 1,
}


class TrainingTest(tf.test.TestCase, parameterized.TestCase):
    def test_the_servers_rate_ends_at_zero(self):
        prepared = training.prepare(
            Settings(
                **_SMALL,
                server_optimizer="sgd",
                server_learning_rate=2,
                server_schedule="linear",
            )
        )
        rate = prepared.federated_model._compiled.server_optimizer._learning_rate
        self.assertAllClose([rate(0), rate(2), rate(4)], [2.0, 1.0, 0.0])

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

    def test_features_are_computed_once_and_the_saved_model_takes_images(self):
        prepared = training.prepare(
            Settings(**_SMALL, input_features="oriented_gradients")
        )
        original = training.prepare(Settings(**_SMALL)).task
        layer = features.OrientedGradients()
        for position in (0, 7, 19):
            name = original.clients.client_ids[position]
            images, labels = original.clients.client(name)
            x, y = prepared.task.clients.client(name)
            wanted = layer(np.reshape(images, [-1, 8, 8]))
            self.assertAllClose(x, wanted, atol=1e-6)
            self.assertAllEqual(y, labels)
        path = files.directory(self) / "run"
        result = training.run(prepared, path, verbose=0)
        saved = tf.keras.models.load_model(path / run_directory.MODEL, compile=False)
        images, labels = original.test
        right = np.argmax(saved.predict(images, verbose=0), -1) == labels
        self.assertAlmostEqual(np.mean(right), result["accuracy"], places=6)

    def test_shifted_images_are_the_clients_own(self):
        original = training.prepare(Settings(**_SMALL)).task
        task = training.prepare(
            Settings(**_SMALL, input_shifts=1, input_features="oriented_gradients")
        ).task
        layer = features.OrientedGradients()

        def computed(images):
            return layer(images).numpy()

        counts = np.zeros(5)
        for name in original.clients.client_ids:
            images, labels = original.clients.client(name)
            x, y = task.clients.client(name)
            self.assertAllEqual(y, labels)
            grid = np.pad(np.reshape(images, [-1, 8, 8]), ((0, 0), (1, 1), (1, 1)))
            versions = [
                computed(grid[:, 1 + down : 9 + down, 1 + right : 9 + right])
                for down, right in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
            ]
            x = np.reshape(x, versions[0].shape)
            same = [
                np.abs(x - each).reshape(len(x), -1).max(1) < 1e-5 for each in versions
            ]
            self.assertTrue(np.any(same, 0).all())
            counts += np.sum(same, 1)
        # Of 400 images each is drawn 80 times; 9 standard deviations.
        self.assertAllInRange(counts, 10, 150)
        self.assertAllClose(task.test[1], original.test[1])
        self.assertAllClose(
            np.reshape(task.test[0], [len(task.test[0]), -1]),
            np.reshape(
                computed(np.reshape(original.test[0], [-1, 8, 8])),
                [len(task.test[0]), -1],
            ),
            atol=1e-6,
        )

    def test_refused(self):
        for options, flag in (
            ({"input_shifts": 8}, "input_shifts"),
            (
                {
                    "dataset": "shakespeare",
                    "data_path": __file__,
                    "num_clients": None,
                    "model": None,
                    "input_shifts": 1,
                },
                "--input_shifts",
            ),
            ({"prior_smoothing": 0.1}, "--client_loss=balanced"),
            ({"server_schedule": "linear"}, "--server_optimizer"),
            ({"model": "cnn", "input_pooling": 2}, "--input_pooling"),
            (
                {"input_pooling": 2, "input_features": "oriented_gradients"},
                "--input_features",
            ),
            (
                {"model": "cnn", "input_features": "oriented_gradients"},
                "--input_features",
            ),
        ):
            with self.assertRaisesRegex(ValueError, flag):
                training.prepare(Settings(**{**_SMALL, **options}))


class InterruptedTest(parameterized.TestCase):
    """Ctrl-C: what ran is saved, and no round is charged twice."""

    def test_also_while_tensorflow_traces(self):
        settings = Settings(**_SMALL)
        path = files.directory(self)
        left = contextlib.ExitStack()
        self.addCleanup(left.close)

        def broken_off(*_):
            left.enter_context(tf.__internal__.FuncGraph("traced").as_default())
            raise KeyboardInterrupt

        with mock.patch.object(engine.CohortEngine, "collect", broken_off):
            result = training.run(training.prepare(settings), path, verbose=0)
        self.assertEqual(result["stopped"], "interrupted")
        self.assertTrue((path / run_directory.MODEL).exists())
        left.close()
        result = training.run(training.prepare(settings), path, resume=True, verbose=0)
        self.assertEqual((result["stopped"], result["rounds"]), (None, 4))

    @toy.same_draws_when_resumed()
    def test_is_gone_on_with_where_it_was(self):
        settings = Settings(**_SMALL)
        whole, path = files.directory(self), files.directory(self)
        training.run(training.prepare(settings), whole, verbose=0)
        collect, calls = engine.CohortEngine.collect, []

        def broken_off(*arguments):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return collect(*arguments)

        with mock.patch.object(engine.CohortEngine, "collect", broken_off):
            result = training.run(training.prepare(settings), path, verbose=0)
        self.assertEqual(result["stopped"], "interrupted")
        self.assertEqual(result["rounds"], 2)
        result = training.run(training.prepare(settings), path, resume=True, verbose=0)
        self.assertEqual((result["stopped"], result["rounds"]), (None, 4))
        run = run_directory.Run.read(path)
        self.assertEqual(run.history["loss"][0], [1, 2, 3, 4])
        self.assertFalse((path / run_directory.CHECKPOINT).exists())
        ledger = path / run_directory.LEDGER
        self.assertLen(accounting.PrivacyLedger.read(ledger).entries, 4)
        # The same seed, so the same model as without an interrupt.
        one, other = (
            tf.keras.models.load_model(each / run_directory.MODEL).get_weights()
            for each in (whole, path)
        )
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
