"""Bounding what one client can do to the sum.

An update is a list of float tensors, one for each variable of the model. It is
always clipped as a whole: one L2 norm over all its variables (McMahan et al.
2018, "flat clipping").
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tfdp_fl._lazy_tf import tf

# Terms of one float32 sum of squares: no more than these, and not fewer than
# those without need, as each sum costs a float64 number.
_TERMS, _FEWEST_TERMS = 128, 32
# A larger tensor is squared in parts, one after the other and no more than so
# many: all squares at once would be another copy of it.
_COPIED, _PARTS = 2**20, 64


def add_up(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of tensors of one shape, never by `tf.add_n`.

    TensorFlow may add that up in a variable that it finds by the operation's name:
    threads that clip at the same time would write into each other's norms.
    """
    return functools.reduce(tf.add, tensors)


def sum_of_squares(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sum of squares (float64 scalar), right to 8e-6 of itself.

    A float32 sum of n squares may fall short by gamma_n, about n 2^-24 of
    itself (Higham 2002, "Accuracy and Stability of Numerical Algorithms",
    section 4.2), which for ten million weights is more than half of it. No
    float32 sum here has more than `_TERMS` terms; their sums are added in
    float64.
    """
    if tensor.dtype == tf.float64:
        return tf.reduce_sum(tf.square(tensor))
    flat = tf.reshape(tf.cast(tensor, tf.float32), [-1])
    size = flat.shape[0]
    if not size or size <= _COPIED:
        return _sum_of_rows(flat)
    at_once = max(_COPIED, math.ceil(size / _PARTS / _TERMS) * _TERMS)
    sums: list[tf.Tensor] = []
    for start in range(0, size, at_once):
        with tf.control_dependencies(sums[-1:]):
            part = tf.identity(flat)[start : start + at_once]
        sums.append(_sum_of_rows(part))
    return add_up(sums)


def _sum_of_rows(flat: tf.Tensor) -> tf.Tensor:
    """Returns a float64 sum of float32 sums of squares of a few elements."""
    size = flat.shape[0]
    width = _TERMS
    if size:
        width = max(n for n in range(1, _TERMS + 1) if size % n == 0)
    if size is None or width < min(size, _FEWEST_TERMS):
        width = _TERMS
        flat = tf.pad(flat, [[0, -tf.size(flat) % _TERMS]])
    squares = tf.square(tf.reshape(flat, [-1, width]))
    return tf.reduce_sum(tf.cast(tf.reduce_sum(squares, axis=1), tf.float64))


def global_norm(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Returns the L2 norm (float32 scalar) over all tensors together.

    It is right to 8e-6 of itself, whatever the tensors' size (see
    `sum_of_squares`; the plain sum of a few elements is as good). Elements
    under 1e-19 count for nothing, and such over 1e19 make it infinite.

    Raises:
      ValueError: Some are complex: neither norm nor noise has an imaginary part.
    """
    for tensor in tensors:
        if tensor.dtype.is_complex:
            raise ValueError(
                "model must have weights of real numbers, got "
                f"{tensor.dtype.name}: what is imaginary would have no noise."
            )
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    if None not in sizes and sum(sizes) <= 2 * _TERMS:
        return tf.linalg.global_norm(
            [tf.cast(tensor, tf.float32) for tensor in tensors]
        )
    squares = add_up([sum_of_squares(tensor) for tensor in tensors])
    return tf.cast(tf.sqrt(squares), tf.float32)


def multiply(tensors: list[tf.Tensor], scale: tf.Tensor) -> list[tf.Tensor]:
    """Multiplies by a scalar; a scale of 0 gives 0 even for NaN and Inf."""
    return [
        tf.math.multiply_no_nan(tensor, tf.cast(scale, tensor.dtype))
        for tensor in tensors
    ]


def finite_global_norm(update: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the norm of an update, and whether it can be used at all.

    Returns:
      `(norm, usable)`: a float32 scalar that is 0 for an update that cannot be
      used, and a boolean scalar that is False if any element is NaN or Inf.
    """
    norm = global_norm(update)
    usable = tf.math.is_finite(norm)
    return tf.where(usable, norm, 0.0), usable


def clip_factor(norm: tf.Tensor, clip_norm: tf.Tensor) -> tf.Tensor:
    """Returns min(1, S / norm); 1 for a zero norm, 0 if both are zero."""
    return tf.math.divide_no_nan(clip_norm, tf.maximum(norm, clip_norm))


def mean_of_answers(total: list[tf.Tensor], weight: tf.Tensor) -> list[tf.Tensor]:
    """Returns a sum divided by the weight that answered; 0 for none."""
    return [
        tf.math.divide_no_nan(tensor, tf.cast(weight, tensor.dtype)) for tensor in total
    ]
