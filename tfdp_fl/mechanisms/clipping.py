"""Norms of updates, and the factor that clips them (`bounded_sums` then bounds them).

An update is a list of float tensors, one for each variable of the model. It is
always clipped as a whole: one L2 norm over all its variables (McMahan et al.
2018, "flat clipping").
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tfdp_fl._lazy_tf import tf

# Within this range, float32 clips and adds noise correctly. Below it, the squares of
# small elements vanish; above it, the noise overflows.
SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 1e-10, 1e30
# The most terms in a float32 sum of squares, and a preferred minimum, as each sum costs
# a float64 number.
_MAX_TERMS, _MIN_TERMS = 128, 32
# Larger tensors are squared one part at a time, in at most this many parts, as all
# squares at once would take another copy of the tensor.
_MAX_COPIED, _MAX_PARTS = 2**20, 64
# At least the norm of 2^28 elements of 1e-19, whose squares are 0 in float32.
_UNSEEN = 2.0**-49


def add_up(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of tensors of one shape, without `tf.add_n`.

    TensorFlow may compute `tf.add_n` in a variable that it looks up by the operation's
    name: threads that clip at the same time would write into each other's norms.
    """
    return functools.reduce(tf.add, tensors)


def sum_of_squares(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sum of squares (float64 scalar), with at most 8e-6 relative error.

    A float32 sum of n squares may be too small by a fraction gamma_n, about n 2^-24
    (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 4.2). For
    ten million weights, that is more than half. So no float32 sum here has more than
    `_MAX_TERMS` terms; their sums are added in float64.
    """
    if tensor.dtype == tf.float64:
        return tf.reduce_sum(tf.square(tensor))
    flat = tf.reshape(tf.cast(tensor, tf.float32), [-1])
    size = flat.shape[0]
    if not size or size <= _MAX_COPIED:
        return _sum_of_rows(flat)
    chunk_size = max(
        _MAX_COPIED, math.ceil(size / _MAX_PARTS / _MAX_TERMS) * _MAX_TERMS
    )
    sums: list[tf.Tensor] = []
    for start in range(0, size, chunk_size):
        with tf.control_dependencies(sums[-1:]):
            part = tf.identity(flat)[start : start + chunk_size]
        sums.append(_sum_of_rows(part))
    return add_up(sums)


def _sum_of_rows(flat: tf.Tensor) -> tf.Tensor:
    """Returns a float64 sum of float32 sums of squares of a few elements."""
    size = flat.shape[0]
    width = _MAX_TERMS
    if size:
        width = max(n for n in range(1, _MAX_TERMS + 1) if size % n == 0)
    if size is None or width < min(size, _MIN_TERMS):
        width = _MAX_TERMS
        flat = tf.pad(flat, [[0, -tf.size(flat) % _MAX_TERMS]])
    squares = tf.square(tf.reshape(flat, [-1, width]))
    return tf.reduce_sum(tf.cast(tf.reduce_sum(squares, axis=1), tf.float64))


def global_norm(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Returns the L2 norm (float32 scalar) over all tensors together.

    Its relative error is at most 8e-6, whatever the tensors' size (`sum_of_squares`;
    the plain sum of a few elements is as accurate). Elements below 1e-19 count as 0
    (see `norm_with_unseen`), and elements above 1e19 make the norm infinite.

    Raises:
      ValueError: A tensor is complex; norm and noise have no imaginary part.
    """
    for tensor in tensors:
        if tensor.dtype.is_complex:
            raise ValueError(
                "model must have weights of real numbers, got "
                f"{tensor.dtype.name}: imaginary parts would have no noise."
            )
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    if None not in sizes and sum(sizes) <= 2 * _MAX_TERMS:
        return tf.linalg.global_norm(
            [tf.cast(tensor, tf.float32) for tensor in tensors]
        )
    squares = add_up([sum_of_squares(tensor) for tensor in tensors])
    return tf.cast(tf.sqrt(squares), tf.float32)


def multiply(tensors: list[tf.Tensor], scale: tf.Tensor) -> list[tf.Tensor]:
    """Multiplies tensors by a scalar; a scale of 0 gives 0 even for NaN and Inf."""
    return [
        tf.math.multiply_no_nan(tensor, tf.cast(scale, tensor.dtype))
        for tensor in tensors
    ]


def finite_global_norm(update: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns an update's norm and whether the update is usable.

    Returns:
      `(norm, usable)`: a float32 scalar that is 0 if the update is not usable, and a
      boolean scalar that is False if any element is NaN or Inf.
    """
    norm = global_norm(update)
    usable = tf.math.is_finite(norm)
    return tf.where(usable, norm, 0.0), usable


def norm_with_unseen(norm: tf.Tensor) -> tf.Tensor:
    """Returns a norm (float32) that includes elements which `global_norm` takes for 0.

    A factor of at most 1 leaves them far below any clip, but a larger one would not.
    """
    squared = tf.square(tf.cast(norm, tf.float64)) + _UNSEEN**2
    return tf.cast(tf.sqrt(squared), tf.float32)


def clip_factor(norm: tf.Tensor, clip_norm: tf.Tensor) -> tf.Tensor:
    """Returns min(1, S / norm); 1 for a zero norm, 0 if both are zero."""
    return tf.math.divide_no_nan(clip_norm, tf.maximum(norm, clip_norm))


def mean_of_answers(total: list[tf.Tensor], weight: tf.Tensor) -> list[tf.Tensor]:
    """Returns a sum divided by the weight of the clients that answered; 0 for none."""
    return [
        tf.math.divide_no_nan(tensor, tf.cast(weight, tensor.dtype)) for tensor in total
    ]
