from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl import keras_versions
from tfdp_fl.engine import layers

_LSTM = tf.keras.layers.LSTM


def _model(*stack, features=5, length=None):
    return tf.keras.Sequential([tf.keras.layers.InputLayer((length, features)), *stack])


def _normal(*shape):
    return tf.constant(np.random.default_rng(len(shape)).normal(size=shape), tf.float32)


def _pair(model):
    """Returns two copies with the same weights; the second one is fast."""
    copies = [tf.keras.models.clone_model(model) for _ in range(2)]
    rng = np.random.default_rng(0)
    weights = [rng.normal(0, 0.4, w.shape) for w in model.get_weights()]
    for copy in copies:
        copy.set_weights(weights)
    changed = _changed(copies[1])
    for layer, call in changed:
        layer.call = call
    return copies[0], copies[1], [layer for layer, _ in changed]


def _changed(model):
    """Returns the layers that compute fast, and how."""
    with layers.fast(model):
        return [
            (layer, vars(layer)["call"])
            for layer in keras_versions.layers_of(model)
            if "call" in vars(layer)
        ]


def _output_and_gradients(model, x, shape=None):
    """As `Trainer.step` does: the tape watches what it is told to."""

    @tf.function(input_signature=[tf.TensorSpec(shape or x.shape)])
    def compute(x):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            variables = keras_versions.tf_variables(model.trainable_variables)
            tape.watch([x, *variables])
            output = model(x, training=True)
            factors = tf.reshape(
                tf.range(tf.cast(tf.size(output), tf.float32)),
                tf.shape(output),
            )
            loss = tf.reduce_sum(tf.cast(output, tf.float32) * tf.sin(factors))
        return output, tape.gradient(loss, [x, *variables])

    output, gradients = compute(x)
    return [output, *map(tf.convert_to_tensor, gradients)]


class LstmTest(tf.test.TestCase, parameterized.TestCase):
    def assert_same(self, actual, expected, tolerance=1e-5):
        """Compares tensors relative to the largest element of each."""
        self.assertEqual(len(actual), len(expected))
        self.assertGreater(max(np.abs(each).max() for each in expected), 0)
        for one, other in zip(actual, expected, strict=True):
            self.assertEqual(one.shape, other.shape)
            self.assertLessEqual(
                np.abs(one - other).max(), tolerance * np.abs(other).max()
            )

    @parameterized.parameters(
        (3, 16, True, True),
        (4, 19, True, False),
        (2, 5, False, False),
    )
    def test_outputs_and_gradients_are_those_of_keras(
        self, batch, length, return_sequences, static
    ):
        keras, fast, changed = _pair(
            _model(
                _LSTM(6, return_sequences=return_sequences),
                length=length if static else None,
            )
        )
        self.assertLen(changed, 1)
        x = _normal(batch, length, 5)
        expected = _output_and_gradients(keras, x)
        self.assert_same(_output_and_gradients(fast, x), expected)
        unknown = [None, length, 5] if static else [None, None, 5]
        self.assert_same(_output_and_gradients(fast, x, unknown), expected)

    @parameterized.parameters(True, False)
    def test_in_bfloat16_it_is_keras_with_less_rounding(self, sequences):
        def model():
            return _model(_LSTM(6, return_sequences=sequences), length=16)

        x = _normal(3, 16, 5)
        exact = _output_and_gradients(_pair(model())[0], x)
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
        self.addCleanup(tf.keras.mixed_precision.set_global_policy, "float32")
        keras, fast, changed = _pair(model())
        self.assertLen(changed, 1)
        expected = _output_and_gradients(keras, x)
        found = _output_and_gradients(fast, x)
        self.assertEqual(
            [each.dtype for each in found], [each.dtype for each in expected]
        )
        self.assertEqual(found[0].dtype, tf.bfloat16)
        found, expected = (
            [tf.cast(each, tf.float32) for each in some] for some in (found, expected)
        )
        self.assert_same(found, exact, 0.02)
        self.assert_same(found, expected, 0.06)

    def test_saturated_gates(self):
        keras, fast, _ = _pair(_model(_LSTM(4, return_sequences=True)))
        x = 20 * _normal(3, 10, 5)
        self.assert_same(
            _output_and_gradients(fast, x), _output_and_gradients(keras, x)
        )

    def test_inside_a_bidirectional_layer(self):
        model = _model(tf.keras.layers.Bidirectional(_LSTM(3, return_sequences=True)))
        keras, fast, changed = _pair(model)
        self.assertLen(changed, 1)  # The other one goes backwards.
        x = _normal(2, 9, 5)
        self.assert_same(
            _output_and_gradients(fast, x), _output_and_gradients(keras, x)
        )

    def test_compiled_by_xla(self):
        _, fast, _ = _pair(_model(_LSTM(6), length=10))
        x = _normal(3, 10, 5)

        def gradients():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.sin(fast(x)))
            return tape.gradient(loss, fast.trainable_variables)

        self.assert_same(
            tf.function(gradients, jit_compile=True)(), tf.function(gradients)()
        )

    @parameterized.parameters(
        {"activation": "relu"},
        {"recurrent_activation": "hard_sigmoid"},
        {"use_bias": False},
        {"dropout": 0.1},
        {"recurrent_dropout": 0.1},
        {"go_backwards": True},
        {"unroll": True},
        {"return_state": True},
        {"dtype": "float64"},
    )
    def test_other_settings_are_left_alone(self, **settings):
        layer = _LSTM(3, **settings)
        inputs = tf.keras.Input((4, 5))
        model = tf.keras.Model(inputs, layer(inputs))
        self.assertEmpty(_changed(model))
        self.assertNotIn("call", vars(layer))

    def test_a_stateful_layer_is_left_alone(self):
        model = tf.keras.Sequential(
            [tf.keras.Input((4, 5), batch_size=2), _LSTM(3, stateful=True)]
        )
        self.assertEmpty(_changed(model))

    def test_other_recurrent_layers_are_left_alone(self):
        class Own(_LSTM):
            def call(self, sequences, initial_state=None, mask=None, training=False):
                return 2 * super().call(
                    sequences,
                    initial_state=initial_state,
                    mask=mask,
                    training=training,
                )

        stack = [
            tf.keras.layers.GRU(3, return_sequences=True),
            tf.keras.layers.SimpleRNN(3, return_sequences=True),
            Own(3),
        ]
        self.assertEmpty(_changed(_model(*stack)))

    def test_a_mask_goes_the_way_of_keras(self):
        model = _model(tf.keras.layers.Masking(), _LSTM(4, return_sequences=True))
        keras, fast, changed = _pair(model)
        self.assertLen(changed, 1)
        x = _normal(3, 9, 5) * tf.cast(tf.range(9) < 6, tf.float32)[:, None]
        self.assert_same(
            _output_and_gradients(fast, x), _output_and_gradients(keras, x)
        )

    def test_an_initial_state_goes_the_way_of_keras(self):
        keras, fast, _ = _pair(_model(_LSTM(4)))
        x, state = _normal(3, 9, 5), [_normal(3, 4), 2 * _normal(3, 4)]
        self.assert_same(
            [fast.layers[0](x, initial_state=state)],
            [keras.layers[0](x, initial_state=state)],
        )
