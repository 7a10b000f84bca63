"""Both Keras versions have one face; models of either train alike."""

from __future__ import annotations

import inspect
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests import stacks
from tests.engine import cohorts
from tfdp_fl import keras_versions
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import client_update, dense_models, replicas
from tfdp_fl.keras_versions import keras2, keras3

_layers = tf.keras.layers


def _public(module):
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    }


def _dataset():
    return FederatedDataset.from_client_arrays(cohorts.client_arrays())


def _moves(model, **options):
    """Returns how far one round moves each weight, and the round's logs."""
    before = model.get_weights()
    engine = cohorts.make_engine(model, _dataset(), **options)
    logs = cohorts.run_round(engine, _dataset())
    after = model.get_weights()
    return [np.abs(b - a).max() for a, b in zip(before, after, strict=True)], (logs)


class FaceTest(parameterized.TestCase):
    def test_both_have_the_same_functions(self):
        one, other = _public(keras2), _public(keras3)
        self.assertEqual(one.keys(), other.keys())
        self.assertEqual(one.keys(), {*keras_versions.__all__})
        for name, value in one.items():
            if inspect.isclass(value):
                self.assertEqual(
                    {n for n in vars(value) if not n.startswith("_")},
                    {n for n in vars(other[name]) if not n.startswith("_")},
                )
            self.assertEqual(
                [*inspect.signature(value).parameters],
                [*inspect.signature(other[name]).parameters],
                msg=name,
            )

    def test_is_the_keras_of_tensorflow(self):
        room = keras3 if stacks.KERAS_3 else keras2
        self.assertEqual(keras_versions.name(), room.name())


class EitherKerasTest(tf.test.TestCase, parameterized.TestCase):
    def test_a_compiled_model_with_a_loss_of_ones_own_is_copied(self):
        model = tf.keras.Sequential([tf.keras.Input([4]), _layers.Dense(3)])
        model.compile(loss=lambda y, p: tf.reduce_mean(p - y))
        copy = replicas.clone(model, tf.TensorSpec([4]))
        self.assertAllClose(copy(tf.ones([2, 4])), model(tf.ones([2, 4])))
        self.assertIsNotNone(model.loss)

    def test_a_constraint_holds_at_the_clients(self):
        model = tf.keras.Sequential(
            [
                tf.keras.Input([4]),
                _layers.Dense(3, kernel_constraint="non_neg"),
            ]
        )
        model.set_weights([np.zeros([4, 3]), np.zeros(3)])
        _moves(model, optimizer=tf.keras.optimizers.SGD(0.5))
        self.assertAllGreaterEqual(model.get_weights()[0], 0.0)
        self.assertNotAllClose(model.get_weights()[0], np.zeros([4, 3]))

    def test_mixed_bfloat16_keeps_what_is_released_in_float32(self):
        policy = tf.keras.mixed_precision
        policy.set_global_policy("mixed_bfloat16")
        try:
            model = cohorts.mlp(32)
        finally:
            policy.set_global_policy("float32")
        self.assertEqual(model.layers[0].compute_dtype, "bfloat16")
        mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
        engine = cohorts.make_engine(
            model, _dataset(), mechanism=mechanism, jit_compile=None
        )
        pending = engine.collect(_dataset(), cohorts.inputs(_dataset()))
        for part in tf.nest.flatten(pending.sums):
            self.assertEqual(part.dtype, tf.float32)
        for variable in engine.server.variables:
            self.assertEqual(variable.dtype, tf.float32)
        logs = engine.release(pending)
        self.assertTrue(np.isfinite(logs["loss"]))
        for weight in model.get_weights():
            self.assertAllInRange(weight, -1e3, 1e3)

    def test_a_model_with_a_mixed_output_learns(self):
        policy = tf.keras.mixed_precision
        policy.set_global_policy("mixed_bfloat16")
        try:
            model = cohorts.mlp(32)
        finally:
            policy.set_global_policy("float32")
        losses = []
        engine = cohorts.make_engine(
            model, _dataset(), training={"metrics": ["accuracy"]}
        )
        for _ in range(15):
            losses.append(cohorts.run_round(engine, _dataset())["loss"])
        self.assertLess(losses[-1], 0.9 * losses[0])


class Keras3Test(tf.test.TestCase, parameterized.TestCase):
    """What only Keras 3 has."""

    def setUp(self):
        super().setUp()
        if not stacks.KERAS_3:
            self.skipTest("tf.keras is Keras 2, which has nothing of this.")

    def test_layers_of_keras_ops(self):
        import keras

        class Scaled(keras.layers.Layer):
            def build(self, shape):
                self.scale = self.add_weight(shape=[shape[-1]])

            def call(self, x):
                return keras.ops.multiply(x, self.scale)

        entry = keras.Input([4])
        hidden = keras.ops.tanh(Scaled()(keras.layers.Dense(6)(entry)))
        hidden = keras.ops.concatenate([hidden, entry], axis=-1)
        model = keras.Model(entry, keras.layers.Dense(3)(hidden))
        moved, logs = _moves(model)
        self.assertTrue(np.isfinite(logs["loss"]))
        self.assertAllGreater(np.array(moved), 0.0)

    def test_low_rank_adaptation_trains_one_by_one(self):
        model = cohorts.mlp(16)
        model.layers[0].enable_lora(2)
        training = client_update.LocalTraining(
            optimizer=tf.keras.optimizers.SGD(0.1),
            loss=cohorts.cross_entropy(),
        )
        engine = cohorts.make_engine(model, _dataset(), jit_compile=None)
        self.assertFalse(dense_models.supports(model, training, engine.query))
        before = model.get_weights()
        cohorts.run_round(engine, _dataset())
        kernel = model.layers[0]._kernel
        for variable, old in zip(model.weights, before, strict=True):
            if variable is kernel:
                self.assertAllEqual(variable, old)
        self.assertNotAllClose(model.layers[0].lora_kernel_b, before[0][:2, :])

    def test_random_numbers_of_no_layer_are_refused(self):
        import keras

        class Noisy(keras.layers.Layer):
            def call(self, x):
                return x + keras.random.normal(keras.ops.shape(x))

        model = keras.Sequential([keras.Input([4]), Noisy(), keras.layers.Dense(3)])
        with self.assertRaisesRegex(ValueError, "keras.random.SeedGenerator"):
            cohorts.make_engine(model, _dataset())

    def test_own_seed_generators_repeat_and_differ_between_clients(self):
        import keras

        class Noisy(keras.layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.seeds = keras.random.SeedGenerator(5)

            def build(self, shape):
                self.shift = self.add_weight(shape=[shape[-1]], initializer="zeros")

            def call(self, x):
                normal = keras.random.normal(keras.ops.shape(x), seed=self.seeds)
                return (x + self.shift) * normal

        x = np.ones([1, 500], np.float32)
        clients = {k: (x, np.zeros([1, 500], np.float32)) for k in range(2)}
        dataset = FederatedDataset.from_client_arrays(clients)

        def updates(seed):
            model = keras.Sequential([keras.Input([500]), Noisy()])
            engine = cohorts.make_engine(
                model,
                dataset,
                loss=lambda y, p: tf.reduce_sum(p, axis=-1),
                collect_records=True,
            )
            pending = engine.collect(
                dataset,
                cohorts.inputs(dataset, batch_size=1, local_epochs=1, seed=seed),
            )
            ((_, collected),) = pending.collected[0]
            return collected.updates.numpy()

        first = updates(np.array([3, 4]))
        self.assertAllEqual(first, updates(np.array([3, 4])))
        other = updates(np.array([3, 5]))
        for one, two in ((first[0], first[1]), (first[0], other[0])):
            self.assertLess(abs(np.corrcoef(one, two)[0, 1]), 0.25)

    def test_another_backend_is_refused(self):
        with (
            mock.patch.object(tf.keras.config, "backend", return_value="jax"),
            self.assertRaisesRegex(ImportError, "KERAS_BACKEND must be"),
        ):
            tfdp_fl.DPFederatedModel(cohorts.mlp(), tfdp_fl.NoPrivacy(), 2)

    def test_an_old_keras_3_is_refused(self):
        with (
            mock.patch.object(tf.keras, "version", return_value="3.7.0"),
            self.assertRaisesRegex(ImportError, "keras must be 3.8 or later"),
        ):
            tfdp_fl.DPFederatedModel(cohorts.mlp(), tfdp_fl.NoPrivacy(), 2)

    def test_a_scaled_loss_is_refused(self):
        optimizer = tf.keras.optimizers.SGD(0.1, loss_scale_factor=128.0)
        with self.assertRaisesRegex(ValueError, "must not scale the loss"):
            cohorts.make_engine(cohorts.mlp(), _dataset(), optimizer=optimizer)


if __name__ == "__main__":
    tf.test.main()
