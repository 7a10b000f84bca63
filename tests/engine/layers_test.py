import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tfdp_fl import keras_versions
from tfdp_fl.engine import layers

_layers, _LSTM = tf.keras.layers, tf.keras.layers.LSTM


def _model(*stack, length=None):
    return cohorts.sequential([length, 5], *stack)


def _normal(*shape):
    return tf.constant(np.random.default_rng(len(shape)).normal(size=shape), tf.float32)


def _changed(model):
    """Returns the layers that compute fast, and how."""
    with layers.fast(model):
        return [
            (layer, vars(layer)["call"])
            for layer in keras_versions.layers_of(model)
            if "call" in vars(layer)
        ]


def _pair(model):
    """Returns two copies with the same weights; one layer of the second is fast."""
    copies = [tf.keras.models.clone_model(model) for _ in range(2)]
    rng = np.random.default_rng(0)
    weights = [rng.normal(0, 0.4, w.shape) for w in model.get_weights()]
    for copy in copies:
        copy.set_weights(weights)
    ((layer, layer.call),) = _changed(copies[1])
    return copies


def _output_and_gradients(model, x, shape=None, xla=False):

    @tf.function(input_signature=[tf.TensorSpec(shape or x.shape)], jit_compile=xla)
    def compute(x):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            variables = keras_versions.tf_variables(model.trainable_variables)
            tape.watch([x, *variables])
            output = model(x, training=True)
            factors = tf.range(tf.cast(tf.size(output), tf.float32))
            factors = tf.sin(tf.reshape(factors, tf.shape(output)))
            loss = tf.reduce_sum(tf.cast(output, tf.float32) * factors)
        return output, tape.gradient(loss, [x, *variables])

    output, gradients = compute(x)
    return [output, *map(tf.convert_to_tensor, gradients)]


def _assert_same(actual, expected, tolerance=1e-5):
    assert max(np.abs(each).max() for each in expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


# A mask goes the way of Keras, and of two directions one goes backwards.
@pytest.mark.parametrize(
    ("stack", "length", "data"),
    [
        ([_LSTM(6, return_sequences=True)], 16, _normal(3, 16, 5)),
        ([_LSTM(6, return_sequences=True)], None, _normal(4, 19, 5)),
        ([_LSTM(6)], 16, _normal(2, 16, 5)),
        ([_LSTM(4, return_sequences=True)], 10, 20 * _normal(3, 10, 5)),  # Saturated.
        ([_layers.Bidirectional(_LSTM(3))], None, _normal(2, 9, 5)),
        (
            [_layers.Masking(), _LSTM(4, return_sequences=True)],
            *(None, _normal(3, 9, 5) * tf.cast(tf.range(9) < 6, tf.float32)[:, None]),
        ),
    ],
)
def test_outputs_and_gradients_are_those_of_keras(stack, length, data):
    keras, fast = _pair(_model(*stack, length=length))
    exact = _output_and_gradients(keras, data)
    _assert_same(_output_and_gradients(fast, data), exact)
    _assert_same(_output_and_gradients(fast, data, [None, length, 5]), exact)
    if length != 16:
        return
    _assert_same(_output_and_gradients(fast, data, xla=True), exact)
    # In bfloat16 it is Keras with less rounding.
    config = {**stack[0].get_config(), "dtype": "mixed_bfloat16"}
    pair = _pair(_model(_LSTM.from_config(config), length=16))
    expected, found = (_output_and_gradients(model, data) for model in pair)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert found[0].dtype == tf.bfloat16
    found, expected = (
        [tf.cast(each, tf.float32) for each in some] for some in (found, expected)
    )
    _assert_same(found, exact, 0.02)
    _assert_same(found, expected, 0.06)


def test_an_initial_state_goes_the_way_of_keras():
    x, state = _normal(3, 9, 5), [_normal(3, 4), 2 * _normal(3, 4)]
    keras, fast = (m.layers[0](x, initial_state=state) for m in _pair(_model(_LSTM(4))))
    _assert_same([fast], [keras])


class _Own(_LSTM):
    def call(self, sequences, initial_state=None, mask=None, training=False):
        return 2 * super().call(sequences, initial_state, mask, training)


@pytest.mark.parametrize(
    "layer",
    [
        *(_layers.GRU(3), _layers.SimpleRNN(3), _Own(3), _LSTM(3, use_bias=False)),
        *(
            _LSTM(3, "relu"),
            _LSTM(3, "tanh", "hard_sigmoid"),
            _LSTM(3, dtype="float64"),
        ),
        *(_LSTM(3, go_backwards=True), _LSTM(3, unroll=True), _LSTM(3, dropout=0.1)),
        *(_LSTM(3, return_state=True), _LSTM(3, stateful=True)),
        _LSTM(3, recurrent_dropout=0.1),
    ],
)
def test_other_layers_and_settings_are_left_alone(layer):
    inputs = tf.keras.Input((4, 5), batch_size=2)
    assert not _changed(tf.keras.Model(inputs, layer(inputs)))
    assert "call" not in vars(layer)
