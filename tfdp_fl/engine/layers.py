"""Faster arithmetic for layers that Keras computes in many small operations.

On a CPU, Keras runs an LSTM as some thirty small operations per time step and
differentiates each of them. Here the input's projection is one matrix product over
all time steps, a step computes only what depends on the previous step, and each
weight's gradient is one product. Up to rounding, the results and gradients are the
same.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.datasets import nests

# Time steps per loop iteration; more would save little and take long to trace.
_UNROLL = 8

# A layer's `call`.
Call: TypeAlias = Callable[..., nests.Nest]


def of_kind(model: tf.keras.Model, kind: type) -> list[tf.keras.layers.Layer]:
    """Returns a model's layers of exactly this class whose `call` was not replaced."""
    layers = keras_versions.layers_of(model)
    return [
        layer for layer in layers if type(layer) is kind and "call" not in vars(layer)
    ]


@contextlib.contextmanager
def replace_calls(calls: list[tuple[tf.keras.layers.Layer, Call]]) -> Iterator[None]:
    """Replaces the `call` of layers inside the block.

    A replacement gets the layer's first argument, a function that runs Keras's
    original call, and the other given arguments as keywords.
    """
    for layer, call in calls:
        vars(layer)["call"] = _with_signature_of(layer.call, call)
    try:
        yield
    finally:
        for layer, _ in calls:
            del vars(layer)["call"]


def _with_signature_of(original: Call, call: Call) -> Call:
    """Returns the replacement with the signature of the layer's `call`."""
    signature = inspect.signature(original)
    first, *_ = signature.parameters

    @functools.wraps(original)
    @tf.autograph.experimental.do_not_convert
    def wrapper(*arguments: nests.Nest, **options: object) -> nests.Nest:
        bound = signature.bind(*arguments, **options).arguments
        inputs = bound.pop(first)
        return call(inputs, lambda: original(*arguments, **options), **bound)

    return wrapper


def fast(model: tf.keras.Model) -> contextlib.AbstractContextManager[None]:
    """Makes eligible layers use this module's functions inside the block.

    An LSTM is eligible if it has Keras's default activations and a bias, is in float32
    or mixed_bfloat16, and has no dropout, no state between batches, and no reversed or
    unrolled time axis. A call with a mask or an initial state still uses Keras's code.

    Args:
      model: The model traced in the block.
    """
    eligible = filter(_is_plain, of_kind(model, tf.keras.layers.LSTM))
    return replace_calls([(layer, _lstm_call(layer)) for layer in eligible])


def _is_plain(layer: tf.keras.layers.LSTM) -> bool:
    if type(layer.cell) is not tf.keras.layers.LSTMCell:
        return False
    unusual = "dropout recurrent_dropout stateful go_backwards unroll return_state"
    return (
        not any(getattr(layer, name) for name in unusual.split())
        and layer.use_bias
        and layer.activation is tf.keras.activations.tanh
        and layer.recurrent_activation is tf.keras.activations.sigmoid
        and layer.variable_dtype == "float32"
        and layer.compute_dtype in ("float32", "bfloat16")
    )


def _lstm_call(layer: tf.keras.layers.LSTM) -> Callable[..., tf.Tensor]:
    """Returns the function that replaces the layer's `call`, as in `replace_calls`."""

    def call(
        inputs: nests.Nest, original_call: Callable[[], tf.Tensor], **options: object
    ) -> tf.Tensor:
        if (
            any(options.get(name) is not None for name in ("mask", "initial_state"))
            or not tf.is_tensor(inputs)
            or inputs.dtype != layer.compute_dtype
            or inputs.shape[2:].num_elements() is None
        ):
            return original_call()
        # Values are rounded to bfloat16, but the recurrence runs in float32: its
        # products are too small to be faster in bfloat16.
        cell = layer.cell
        outputs = lstm(
            tf.cast(tf.transpose(inputs, [1, 0, 2]), tf.float32),
            *[
                tf.cast(tf.convert_to_tensor(weight), tf.float32)
                for weight in (cell.kernel, cell.recurrent_kernel, cell.bias)
            ],
        )
        outputs = tf.cast(outputs, inputs.dtype)
        if layer.return_sequences:
            return tf.transpose(outputs, [1, 0, 2])
        return outputs[-1]

    return call


@tf.custom_gradient
def lstm(
    x: tf.Tensor,
    kernel: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    bias: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, ...]]]:
    """Computes an LSTM that starts from zeros (Hochreiter, Schmidhuber 1997).

    With z_t = W'x_t + U'h_{t-1} + b, made of the four blocks i, f, g, o:
    c_t = sigmoid(z_f) c_{t-1} + sigmoid(z_i) tanh(z_g) and
    h_t = sigmoid(z_o) tanh(c_t). As sigmoid(z) = (1 + tanh(z / 2)) / 2, the
    weights of i, f and o are halved beforehand (which is exact), and one tanh
    serves all four blocks.

    Args:
      x: Float32 [T, B, I], T at least 1.
      kernel: W, float32 [I, 4u], in Keras's order of blocks.
      recurrent_kernel: U, float32 [u, 4u].
      bias: b, float32 [4u].

    Returns:
      h, float32 [T, B, u]; and the gradient function.
    """
    units = recurrent_kernel.shape[0]
    steps, batch = _length(x, 0), _length(x, 1)
    zeros = tf.zeros([batch, units])
    halved = _block_factors(units, 0.5, 0.5, 1.0, 0.5)
    projected = tf.reshape(
        tf.nn.bias_add(tf.matmul(_rows(x), kernel * halved), bias * halved),
        [steps, batch, 4 * units],
    )
    recurrent = recurrent_kernel * halved

    def array(width: int) -> tf.TensorArray:
        return tf.TensorArray(
            tf.float32,
            size=steps,
            element_shape=[x.shape[1], width],
            clear_after_read=False,
        )

    def forward(t, z, state):
        h, c, (outputs, by_state, by_output, forget) = state
        a = tf.tanh(z + tf.matmul(h, recurrent))
        a_i, a_f, g, a_o = tf.split(a, 4, axis=1)
        i, f, o = a_i * 0.5 + 0.5, a_f * 0.5 + 0.5, a_o * 0.5 + 0.5
        before, c = c, f * c + i * g
        tanh_c = tf.tanh(c)
        h = o * tanh_c
        # The derivatives that the backward pass needs, while their parts are still in
        # the cache: of c with respect to a (its first three blocks), and of h with
        # respect to a (its last block) and to c. They lack the sigmoids' factors 1/2.
        slopes = tf.concat([g, before, i, tanh_c], 1)
        arrays = (
            outputs.write(t, h),
            by_state.write(t, tf.raw_ops.TanhGrad(y=a, dy=slopes)),
            by_output.write(t, tf.raw_ops.TanhGrad(y=tanh_c, dy=o)),
            forget.write(t, f),
        )
        return h, c, arrays

    arrays = (array(units), array(4 * units), array(units), array(units))
    _, _, (outputs, by_state, by_output, forget) = _for_each_step(
        forward, projected, (zeros, zeros, arrays)
    )
    h = tf.reshape(outputs.stack(), [steps, batch, units])

    def gradients(dh_all: tf.Tensor) -> tuple[tf.Tensor, ...]:
        # The factors 1/2 that `by_state` lacks, and those of the halved weights.
        scale = _block_factors(units, 0.25, 0.25, 1.0, 0.25)
        recurrent_back = tf.transpose(recurrent_kernel * scale)

        def backward(t, dh_t, state):
            dh, dc, dz_all = state
            dh += dh_t
            dc += dh * by_output.read(t)
            dz = tf.concat([dc, dc, dc, dh], 1) * by_state.read(t)
            dc *= forget.read(t)
            dh = tf.matmul(dz, recurrent_back)
            return dh, dc, dz_all.write(t, dz)

        _, _, dz_all = _for_each_step(
            backward,
            tf.reshape(dh_all, [steps, batch, units]),
            (zeros, zeros, array(4 * units)),
            reverse=True,
        )
        dz = tf.reshape(dz_all.stack(), [steps, batch, 4 * units])
        dx = tf.matmul(_rows(dz), kernel * scale, transpose_b=True)
        return (
            tf.reshape(dx, tf.shape(x)),
            tf.matmul(_rows(x), _rows(dz), transpose_a=True) * scale,
            tf.matmul(_rows(h[:-1]), _rows(dz[1:]), transpose_a=True) * scale,
            tf.raw_ops.BiasAddGrad(out_backprop=_rows(dz)) * scale,
        )

    return h, gradients


def _block_factors(units: int, *factors: float) -> tf.Tensor:
    """Returns float32 [4u], a factor for each block of weights."""
    return tf.constant(np.repeat(np.asarray(factors, np.float32), units))


def _length(tensor: tf.Tensor, axis: int) -> int | tf.Tensor:
    static = tensor.shape[axis]
    return tf.shape(tensor)[axis] if static is None else static


def _rows(tensor: tf.Tensor) -> tf.Tensor:
    """Returns [T, B, n] as [T B, n]."""
    return tf.reshape(tensor, [-1, tensor.shape[2]])


def _for_each_step(
    step: Callable[[tf.Tensor, tf.Tensor, nests.Nest], nests.Nest],
    values: tf.Tensor,
    state: nests.Nest,
    reverse: bool = False,
) -> nests.Nest:
    """Folds `step(t, values[t], state) -> state` over time.

    Each loop iteration covers several steps; a second loop covers those that remain
    at the end of the sequence.

    Args:
      step: Computes time step t, an int32 scalar.
      values: Float32 [T, B, n].
      state: Nest of tensors and arrays.
      reverse: Whether time runs from T - 1 down to 0.
    """
    length = _length(values, 0)
    inner_shape = [_length(values, 1), values.shape[2]]
    unrolled_length = length - length % _UNROLL

    def loop(
        count: int, first: tf.Tensor, last: tf.Tensor, state: nests.Nest
    ) -> nests.Nest:
        """Runs over [first, last), `count` steps per iteration."""

        def body(start: tf.Tensor, state: nests.Nest) -> tuple[tf.Tensor, nests.Nest]:
            # With a size that XLA knows statically; nothing is copied.
            parts = tf.unstack(
                tf.slice(values, [start, 0, 0], [count, *inner_shape]), num=count
            )
            order = reversed(range(count)) if reverse else range(count)
            for k in order:
                state = step(start + k, parts[k], state)
            return start - count if reverse else start + count, state

        start = last - count if reverse else first
        _, state = tf.while_loop(
            (lambda t, _: t >= first) if reverse else (lambda t, _: t < last),
            body,
            (start, state),
            parallel_iterations=1,
        )
        return state

    parts = [(_UNROLL, 0, unrolled_length), (1, unrolled_length, length)]
    for count, first, last in reversed(parts) if reverse else parts:
        if not isinstance(length, int) or first < last:
            state = loop(count, first, last, state)
    return state
