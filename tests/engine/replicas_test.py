from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import stacks
from tfdp_fl.engine import devices, replicas

_layers = tf.keras.layers


def _batch_norm_model():
    return tf.keras.Sequential(
        [
            _layers.Dense(4, input_shape=(3,)),
            _layers.BatchNormalization(),
            _layers.Dense(2, trainable=False),
        ]
    )


@tf.keras.utils.register_keras_serializable("tfdp_fl_test")
class _Cast(_layers.Layer):
    def call(self, x):
        return tf.cast(x, tf.float32)


class CloneTest(tf.test.TestCase):
    def test_has_the_same_weights_in_variables_of_its_own(self):
        model = _batch_norm_model()
        model.layers[1].moving_mean.assign(tf.range(4.0))
        copy = replicas.clone(model, tf.TensorSpec([3]))
        x = np.random.default_rng(0).normal(size=[5, 3]).astype(np.float32)
        self.assertAllClose(copy(x), model(x))
        self.assertEqual(
            [v.name for v in copy.trainable_variables],
            [v.name for v in model.trainable_variables],
        )
        before = model.get_weights()
        for variable in copy.variables:
            variable.assign(variable + 1)
        for old, new in zip(before, model.get_weights(), strict=True):
            self.assertAllEqual(old, new)

    def test_adapted_layers_stay_adapted(self):
        rng = np.random.default_rng(0)
        normalization = _layers.Normalization()
        normalization.adapt(rng.normal(3, 5, [50, 2]))
        bins = _layers.Discretization(num_bins=4)
        bins.adapt(rng.normal(size=[50, 1]))
        words = _layers.StringLookup(output_mode="one_hot")
        words.adapt(["x", "y", "z", "z"])
        for layer, value in (
            (normalization, np.float32([[1.0, 9.0], [3.0, -4.0]])),
            (bins, np.float32([[-1.0], [0.2], [2.0]])),
            (words, np.array([["x"], ["q"], ["z"]])),
        ):
            value = tf.constant(value)
            entry = tf.keras.Input(value.shape[1:], dtype=value.dtype)
            hidden = _Cast()(layer(entry))
            model = tf.keras.Model(entry, _layers.Dense(2)(hidden))
            copy = replicas.clone(model, tf.TensorSpec(value.shape[1:], value.dtype))
            self.assertAllClose(copy(value), model(value))

    def test_a_nested_model_keeps_what_is_frozen(self):
        inner = tf.keras.Sequential(
            [
                _layers.Dense(4, input_shape=(3,), trainable=False),
                _layers.Dense(4),
            ]
        )
        model = tf.keras.Sequential([inner, _layers.Dense(2)])
        model(tf.zeros([1, 3]))
        copy = replicas.clone(model, tf.TensorSpec([3]))
        self.assertEqual(
            [v.shape for v in copy.trainable_variables],
            [v.shape for v in model.trainable_variables],
        )
        self.assertLen(copy.trainable_variables, 4)
        x = tf.ones([2, 3])
        self.assertAllClose(copy(x), model(x))

    def test_functions_of_ones_own_are_found_again(self):
        def double(x):
            return 2 * x

        def relu(x):
            return -x

        model = tf.keras.Sequential(
            [
                _layers.Dense(4, activation=double, input_shape=(3,)),
                _layers.Dense(4, activation=relu),
                _layers.Activation(tf.nn.tanh),
            ]
        )
        copy = replicas.clone(model, tf.TensorSpec([3]))
        x = tf.random.normal([5, 3])
        self.assertAllClose(copy(x), model(x))

    def test_two_functions_of_one_name_are_told_apart_or_an_error(self):
        model = tf.keras.Sequential(
            [
                _layers.Dense(4, activation=lambda x: 2 * x, input_shape=(3,)),
                _layers.Dense(4, activation=lambda x: 3 * x),
            ]
        )
        if stacks.KERAS_3:  # It hands the functions themselves on.
            x = tf.random.normal([5, 3])
            copy = replicas.clone(model, tf.TensorSpec([3]))
            self.assertAllClose(copy(x), model(x))
            return
        with self.assertRaisesRegex(ValueError, "both named '<lambda>'"):
            replicas.clone(model, tf.TensorSpec([3]))

    def test_a_model_that_cannot_be_rebuilt_is_an_error(self):
        class Model(tf.keras.Model):
            def __init__(self, units):
                super().__init__()
                self.dense = _layers.Dense(units)

            def call(self, x):
                return self.dense(x)

            def get_config(self):
                raise NotImplementedError("no configuration")

        model = Model(3)
        model(tf.zeros([1, 2]))
        with self.assertRaisesRegex(ValueError, "^model cannot be copied"):
            replicas.clone(model, tf.TensorSpec([2]))

    def test_a_configuration_that_rebuilds_something_else_is_an_error(self):
        class Model(tf.keras.Model):
            def __init__(self, units=1):
                super().__init__()
                self.dense = _layers.Dense(units)

            def call(self, x):
                return self.dense(x)

            def get_config(self):
                return {}

        model = Model(3)
        model(tf.zeros([1, 2]))
        with self.assertRaisesRegex(ValueError, "same weights"):
            replicas.clone(model, tf.TensorSpec([2]))


class ChangedByTrainingTest(tf.test.TestCase):
    def test_moving_statistics_but_no_constants(self):
        model = _batch_norm_model()
        self.assertEqual(
            [
                v.name.split("/")[-1]
                for v in replicas.changed_by_training(model, tf.TensorSpec([3]))
            ],
            ["moving_mean:0", "moving_variance:0"],
        )

    def test_nothing_in_a_plain_model(self):
        model = tf.keras.Sequential([_layers.Dense(2, input_shape=(3,))])
        self.assertEmpty(replicas.changed_by_training(model, tf.TensorSpec([3])))

    def test_frozen_batch_normalization_does_not_move(self):
        model = _batch_norm_model()
        model.layers[1].trainable = False
        self.assertEmpty(replicas.changed_by_training(model, tf.TensorSpec([3])))


class CompileChoiceTest(parameterized.TestCase):
    def test_small_dense_models_only(self):
        small = tf.keras.Sequential(
            [_layers.Dense(16, "relu", input_shape=(8,)), _layers.Dense(3)]
        )
        self.assertTrue(devices.prefers_xla(small, 10))
        self.assertFalse(devices.prefers_xla(small, 100_000))

    @parameterized.named_parameters(
        ("convolution", lambda: [_layers.Conv2D(2, 3, input_shape=(8, 8, 1))]),
        ("recurrence", lambda: [_layers.LSTM(4, input_shape=(5, 2))]),
        ("no_layer", lambda: [tf.keras.Input([3])]),
    )
    def test_nothing_else(self, make_layers):
        model = tf.keras.Sequential(make_layers())
        self.assertFalse(devices.prefers_xla(model, 10))


if __name__ == "__main__":
    tf.test.main()
