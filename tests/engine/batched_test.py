"""A batch of clients as one program: what one by one gives, and no more."""

from __future__ import annotations

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.engine import cohorts
from tfdp_fl import mechanisms
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import devices

_layers = tf.keras.layers
_SIZES = (5, 7, 5, 0, 3, 5, 12, 2)
_MECHANISMS = {
    "fixed": mechanisms.FixedClipping(clip_norm=0.1, noise_multiplier=0.0),
    "median": mechanisms.MedianClipping(noise_multiplier=0.0),
    "windows": mechanisms.AdaptiveLocalDP(epsilon=5, delta=1e-5),
}


def _model():
    tf.keras.utils.set_random_seed(2)
    return tf.keras.Sequential(
        [
            tf.keras.Input([cohorts.FEATURES]),
            _layers.Dense(5),
            _layers.BatchNormalization(),
            _layers.Dropout(0.3),
            _layers.Dense(cohorts.CLASSES),
        ]
    )


def _engine(dataset, at_once, model=None, **options):
    with mock.patch.object(devices, "clients_at_once", lambda *_: at_once):
        return cohorts.make_engine(model or _model(), dataset, **options)


class BatchedTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_MECHANISMS)
    def test_it_is_one_by_one_to_rounding(self, name):
        # Of every size: no example, short and full batches, two epochs.
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays(_SIZES))
        rounds = []
        for at_once in (None, 3):
            model = _model() if name == "fixed" else cohorts.mlp()
            engine = _engine(
                dataset,
                at_once,
                model,
                mechanism=_MECHANISMS[name],
                moments=name == "fixed",
                training={"metrics": ["accuracy"]},
            )
            windows = None
            if name == "windows":
                windows = np.full([len(_SIZES), 3, engine.num_variables], np.nan)
            logs = cohorts.run_round(engine, dataset, windows=windows)
            self.assertEqual("batches of 3" in engine.executor, at_once == 3)
            rounds.append((model.get_weights(), logs))
        (one, logs), (batched, logs_batched) = rounds
        self.assertAllClose(one, batched, atol=3e-6)
        self.assertAllClose(logs, logs_batched, rtol=1e-5, atol=1e-6)

    def test_convolutions_and_their_statistics(self):
        rng = np.random.default_rng(0)
        clients = {
            k: (rng.normal(size=[n, 6, 6, 2]).astype("f4"), rng.integers(0, 3, n))
            for k, n in enumerate((5, 8, 10, 3))
        }
        dataset = FederatedDataset.from_client_arrays(clients)
        weights = []
        for at_once in (None, 3):
            tf.keras.utils.set_random_seed(2)
            model = tf.keras.Sequential(
                [
                    tf.keras.Input([6, 6, 2]),
                    _layers.Conv2D(4, 3, activation="relu"),
                    _layers.BatchNormalization(),
                    _layers.MaxPool2D(),
                    _layers.Flatten(),
                    _layers.Dense(3),
                ]
            )
            engine = _engine(dataset, at_once, model, mechanism=_MECHANISMS["fixed"])
            cohorts.run_round(engine, dataset)
            self.assertEqual("batches of 3" in engine.executor, at_once == 3)
            weights.append(model.get_weights())
        self.assertAllClose(*weights, atol=3e-6)

    def test_a_batch_without_room_is_halved(self):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays((5,) * 9))
        whole, halved = (_engine(dataset, 8, cohorts.mlp()) for _ in range(2))
        expected = cohorts.run_round(whole, dataset)
        train = halved._train
        sizes = []

        def with_little_room(pending, chunk, part, thread):
            sizes.append(len(part.members))
            if sizes[-1] > 2:
                raise tf.errors.ResourceExhaustedError(None, None, "no room")
            train(pending, chunk, part, thread)

        halved._train = with_little_room
        self.assertAllClose(cohorts.run_round(halved, dataset), expected, rtol=1e-5)
        self.assertEqual(halved.layout.at_once, 2)
        self.assertEqual(sum(size for size in sizes if size <= 2), 9)

    def test_who_raises_has_failed_alone(self):
        model = tf.keras.Sequential([tf.keras.Input([2]), _layers.Embedding(4, 3)])
        model.add(_layers.Flatten())
        model.add(_layers.Dense(cohorts.CLASSES))
        y = np.array([0, 1])
        clients = {k: (np.array([[0, 1], [2, 3]], np.int32), y) for k in range(4)}
        clients[2] = (np.array([[0, 99], [1, 1]], np.int32), y)
        dataset = FederatedDataset.from_client_arrays(clients)
        engine = _engine(dataset, 4, model)
        pending = engine.collect(dataset, cohorts.inputs(dataset))
        self.assertEqual([each.position for each in pending.failures], [2])
        self.assertEqual(float(pending.sums[0].contribution.weight), 3.0)

    def test_nobody_writes_into_the_segments_of_another_client(self):
        class Segments(_layers.Layer):
            def build(self, _):
                self.kernel = self.add_weight(shape=[4], name="kernel")

            def call(self, x):
                ids = tf.reshape(tf.cast(x[:, :, 0], tf.int32), [-1])
                sums = tf.math.unsorted_segment_sum(
                    tf.reshape(x[:, :, 1], [-1]), ids, 4
                )
                return tf.ones_like(x[:, 0, :1]) * (sums * self.kernel)

        updates = []
        for ids, size in (([[0, 1], [2, 3]], 1.0), ([[4, 5], [6, 7]], -1e3)):
            x = np.ones([3, 2, 2, 2], np.float32)
            x[:, :, :, 0] = [[0, 1], [2, 3]]
            x[0, :, :, 0], x[0, :, :, 1] = ids, size
            y = np.array([0, 1])
            dataset = FederatedDataset.from_client_arrays(
                {k: (x[k], y) for k in range(3)}
            )
            tf.keras.utils.set_random_seed(2)
            model = tf.keras.Sequential([tf.keras.Input([2, 2]), Segments()])
            model.add(_layers.Dense(cohorts.CLASSES))
            engine = _engine(dataset, 3, model, mechanism=_MECHANISMS["fixed"])
            # Vectorized, an index out of range would be another client's.
            self.assertIsNone(engine.layout.at_once)
            self.assertIn("UnsortedSegmentSum cannot be batched", engine.executor)
            pending = engine.collect(dataset, cohorts.inputs(dataset))
            update = pending.sums[0].contribution.update
            updates.append(np.concatenate([np.ravel(each) for each in update]))
        moved = np.linalg.norm(updates[1] - updates[0])
        self.assertLessEqual(moved, 2 * 0.1 * (1 + 1e-5))

    def test_what_cannot_be_batched_trains_one_by_one(self):
        # TensorFlow cannot vectorize the gradient of a recurrent layer's mask.
        clients = {k: (np.array([[0, 1], [2, 3]]), np.array([0, 1])) for k in range(4)}
        dataset = FederatedDataset.from_client_arrays(clients)
        model = tf.keras.Sequential([tf.keras.Input([2], dtype="int64")])
        model.add(_layers.Embedding(4, 3, mask_zero=True))
        model.add(_layers.LSTM(2))
        model.add(_layers.Dense(cohorts.CLASSES))
        engine = _engine(dataset, 3, model)
        for _ in range(2):
            pending = engine.collect(dataset, cohorts.inputs(dataset))
            self.assertEqual(float(pending.sums[0].contribution.weight), 4.0)
        self.assertIn("one by one", engine.executor)
        self.assertIn("not in batches: TensorFlow cannot vectorize", engine.executor)

    def test_a_client_without_company_trains_as_it_would_alone(self):
        arrays = cohorts.client_arrays((3,))
        dataset = FederatedDataset.from_client_arrays(arrays)
        weights = []
        for at_once in (None, 3):
            tf.keras.utils.set_random_seed(2)
            model = tf.keras.Sequential([tf.keras.Input([cohorts.FEATURES])])
            model.add(_layers.Reshape([2, 2, 1]))
            model.add(_layers.Conv2D(3, 2, padding="same"))
            model.add(_layers.Flatten())
            model.add(_layers.Dense(cohorts.CLASSES))
            cohorts.run_round(_engine(dataset, at_once, model), dataset)
            weights.append(model.get_weights())
        self.assertAllClose(*weights, atol=1e-6)

    def test_a_cpu_takes_threads_and_anything_else_batches(self):
        model = _model()
        self.assertIsNone(devices.clients_at_once("/device:CPU:0", model, 63, 5))
        with mock.patch.object(devices, "_device_bytes", lambda _: 2.0**20):
            small = devices.clients_at_once("/device:GPU:0", model, 63, 5)
            large = devices.clients_at_once("/device:GPU:0", model, 10**9, 5)
        self.assertGreater(small, 50)
        self.assertEqual(large, 1)
