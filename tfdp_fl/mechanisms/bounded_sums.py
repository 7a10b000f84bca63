"""The one door through which a client's contribution enters a sum.

Wherever an update was trained and however it was clipped, under a central guarantee its
contribution passes `bound` (or `bound_factor`, if only its norm is known) and
`to_grid`; one that is added alone passes `add`. (Side by side, `_sum_of` in
engine/side_by_side.py rounds; `accumulate` in engine/lookups.py adds the embedding rows
that a client used; Flower's server does the same in NumPy, in flower/sums.py.) Together
they ensure two of the five rules in docs/architecture.md:

One door. `as_tensors` makes dense tensors of a contribution, so that what is measured
is what is added, and requires the update's shapes. `bound` replaces it by zeros if it
is longer than the mechanism's bound, is not finite, or has side sums or a weight
outside their declared ranges. `add` only adds tensors of the sum's own shapes, and
never broadcasts.

Exact sums. `to_grid` rounds a contribution to integer multiples of a step that depends
only on the clip and the expected cohort size. Float64 adds up such numbers without any
rounding, in any order and grouping. So adding or removing a client changes the sum by
exactly its own contribution, and a contribution of zeros changes no bit. Where the
noise is far larger than a step of 2^-20 S, `to_int32` makes int32 multiples of that,
which take half the memory and time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdp_fl._lazy_tf import tf
from tfdp_fl.mechanisms import clipping
from tfdp_fl.mechanisms.contribution import Contribution, Scalar

# The relative rounding error allowed in a computed norm (docs/clipping.md).
_ROUNDING = 1e-5

# Float64 represents integers up to 2^53 exactly; see `fine_grid_step`.
_STEP_BITS = 49


def as_tensors(
    parts: Iterable[Any], like: Sequence[tf.Tensor | tf.TensorSpec] | None = None
) -> list[tf.Tensor]:
    """Returns an update's parts as dense tensors, as they will be added.

    Otherwise, the measured norm could change when it is added: a `tf.IndexedSlices`
    adds up its repeated rows, and a number is broadcast.

    Args:
      parts: The parts.
      like: Tensors, or specs, whose shapes they must have; None: any.

    Raises:
      ValueError: A part is not a float or complex tensor, or has another shape.
    """
    tensors = list(map(tf.convert_to_tensor, parts))
    for tensor in tensors:
        if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            raise ValueError(
                "An update (of an upload_hook, or of a mechanism's contribution) must "
                f"be a list of float tensors, got {tensor.dtype.name}."
            )
    shapes = [tensor.shape for tensor in tensors]
    if like is not None and shapes != (expected := [part.shape for part in like]):
        raise ValueError(
            "An update (of an upload_hook or a mechanism's contribution) must have "
            "one tensor per variable, with the variable's shape, got "
            f"{[*map(str, shapes)]} for {[*map(str, expected)]}."
        )
    return tensors


def bound(
    contribution: Contribution, norm_bound: Scalar, side_bounds: Mapping[str, float]
) -> Contribution:
    """Returns a client's contribution, or zeros if it exceeds the declared bounds.

    Args:
      contribution: The clipped contribution, without noise.
      norm_bound: S, scalar: the L2 bound on a contribution. Below
        `SMALLEST_CLIP_NORM`, where float32 measures norms as 0, the update is zeros.
      side_bounds: By name, the bound on the absolute value of each side sum.
    """
    norm, usable = clipping.finite_global_norm(list(contribution.update))
    is_bounded = usable & (norm <= norm_bound * (1 + _ROUNDING))
    contribution = _bound_sides(contribution, is_bounded, side_bounds)
    counts = (contribution.discarded < 1) & _is_measurable(norm_bound)
    update = clipping.multiply(contribution.update, tf.cast(counts, tf.float32))
    return contribution._replace(update=update)


def _is_measurable(norm_bound: Scalar) -> tf.Tensor:
    return tf.cast(norm_bound, tf.float32) >= clipping.SMALLEST_CLIP_NORM


def bound_factor(
    contribution: Contribution,
    norm: tf.Tensor,
    norm_bound: Scalar,
    side_bounds: Mapping[str, float],
) -> Contribution:
    """Like `bound`, where `contribution.update` is the factor that scales an update.

    Args:
      contribution: Contributions of any shape.
      norm: Float32, the same shape: the norms of the updates, or upper bounds.
      norm_bound: S, scalar.
      side_bounds: By name, the bound on the absolute value of each side sum.
    """
    factor: Any = contribution.update
    is_bounded = (factor >= 0) & (factor * norm <= norm_bound * (1 + _ROUNDING))
    contribution = _bound_sides(contribution, is_bounded, side_bounds)
    counts = (contribution.discarded < 1) & _is_measurable(norm_bound)
    return contribution._replace(update=tf.where(counts, factor, 0.0))


def _bound_sides(
    contribution: Contribution, is_bounded: tf.Tensor, side_bounds: Mapping[str, float]
) -> Contribution:
    is_bounded &= (contribution.weight >= 0) & (contribution.weight <= 1)
    if set(contribution.sums) != set(side_bounds):
        raise ValueError(
            "side_statistics must return a number for each name in side_bounds, "
            f"{sorted(side_bounds)}, got {sorted(contribution.sums)}."
        )
    for name, limit in side_bounds.items():
        # (False for a NaN.)
        is_bounded &= tf.abs(contribution.sums[name]) <= limit
    return contribution._replace(
        # In declared order, as they are stacked and unstacked by position.
        sums={
            name: _on_side_grid(
                tf.where(is_bounded, contribution.sums[name], 0.0), limit
            )
            for name, limit in side_bounds.items()
        },
        weight=tf.where(is_bounded, contribution.weight, 0.0),
        discarded=tf.where(is_bounded, contribution.discarded, 1.0),
    )


def _on_side_grid(value: tf.Tensor, limit: float) -> tf.Tensor:
    """Rounds a number in [-limit, limit] to a grid whose step is at most 2^-29 limit.

    Float64 adds up 2^23 of them exactly. (TensorFlow would simplify `to_grid` with a
    constant step.)
    """
    if not clipping.SMALLEST_CLIP_NORM <= limit <= clipping.LARGEST_CLIP_NORM:
        return value
    steps = 2.0 ** (30 - math.frexp(limit)[1])
    return tf.round(value * steps) / steps


def zero_if_empty(
    contribution: Contribution, num_examples: Scalar | None
) -> Contribution:
    """Returns a client's contribution; all zeros for a client without examples.

    Neighbouring runs replace a client by an empty one. Otherwise, its zero norm would
    count as below the clip, and an upload_hook could upload for it, so one client would
    move a sum by two contributions.

    Args:
      contribution: The contribution.
      num_examples: Scalar, the client's number of examples; None if unknown.
    """
    if num_examples is None:
        return contribution
    return tf.nest.map_structure(
        lambda part: tf.where(num_examples > 0, part, tf.zeros_like(part)), contribution
    )


def fine_grid_step(norm_bound: Scalar, clients_per_round: Scalar) -> tf.Tensor:
    """Returns the step of the grid: a power of two, float32 scalar; 0 for none.

    It is more than S (m + 16) 2^-50, so the sum of 4 (m + 16) coordinates, each at
    most 2 S, is less than 2^53 steps. The step is public: S is sent by the server, and
    m is planned.

    Args:
      norm_bound: S; without a bound (infinity) there is no grid.
      clients_per_round: m, the expected cohort size.
    """
    s = tf.cast(norm_bound, tf.float32)
    m = tf.cast(clients_per_round, tf.float32) + 16.0
    size = power_of_two_below(s) * power_of_two_below(m) * 2.0 ** (1 - _STEP_BITS)
    return tf.where(tf.math.is_finite(s), size, 0.0)


# Int32 holds the sum of this many numbers of up to 2^21 steps each, and rounding.
MAX_INT32_CLIENTS = 512


def coarse_grid_step(norm_bound: Scalar) -> tf.Tensor:
    """Returns the step of int32 sums: the largest power of two up to S, times 2^-20.

    A coordinate of at most S, which is less than twice that power, is less than 2^21
    steps. (Below `SMALLEST_CLIP_NORM`, all are 0, and the step stays above 0.)

    Args:
      norm_bound: S, finite.
    """
    s = tf.maximum(tf.cast(norm_bound, tf.float32), clipping.SMALLEST_CLIP_NORM)
    return power_of_two_below(s) * 2.0**-20


def to_int32(update: list[tf.Tensor], grid_step: tf.Tensor) -> list[tf.Tensor]:
    """Returns an update in whole steps, int32, rounded towards zero.

    So its norm does not increase.
    """
    return [tf.cast(tf.cast(t, tf.float32) / grid_step, tf.int32) for t in update]


def from_int32(update: list[tf.Tensor], grid_step: tf.Tensor) -> list[tf.Tensor]:
    """Converts sums of whole steps back to updates, float64 and exact."""
    return [tf.cast(t, tf.float64) * tf.cast(grid_step, tf.float64) for t in update]


def power_of_two_below(value: tf.Tensor) -> tf.Tensor:
    """Returns the largest power of two up to a positive float32."""
    exponent = tf.bitwise.bitwise_and(tf.bitcast(value, tf.int32), 0x7F800000)
    return tf.bitcast(exponent, tf.float32)


def to_grid(update: list[tf.Tensor], grid_step: tf.Tensor) -> list[tf.Tensor]:
    """Rounds an update to multiples of a step, with an error of at most one step.

    (Or 2^-23 of the number, if that is more.) Adding 1.5 2^24 steps makes the last
    float32 digit at least one step, unless the number itself is as large. Subtracting
    them again leaves a multiple of the step.

    Args:
      update: Float tensors.
      grid_step: Float32 scalar, a power of two; 0 leaves float32 numbers as they are.
    """
    offset = grid_step * (1.5 * 2.0**24)

    def round_off(tensor: tf.Tensor) -> tf.Tensor:
        return (tf.cast(tensor, tf.float32) + offset) - offset

    return list(map(round_off, update))


def add(total: Contribution, contribution: Contribution) -> Contribution:
    """Adds one client's contribution to a sum in float64.

    Raises:
      ValueError: The number or the shapes of its tensors differ from the sum's.
    """

    def add_tensor(tensor: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
        part = tf.convert_to_tensor(part)
        if not tensor.shape.is_compatible_with(part.shape):
            raise ValueError(
                "A client's contribution must have the shapes of the sum, and is never "
                f"broadcast: got {part.shape} where the sum has {tensor.shape}. "
                "Mechanisms and upload_hook return one tensor for each variable, of "
                "its shape."
            )
        part = tf.ensure_shape(part, tensor.shape)
        if (tensor.shape.num_elements() or 0) > _LARGE and not tf.executing_eagerly():
            return _add_in_place(tensor, part)
        return tensor + tf.cast(part, tensor.dtype)

    tf.nest.assert_same_structure(total, contribution)
    return tf.nest.map_structure(add_tensor, total, contribution)


# Larger tensors are added in this many parts, as a contribution in float64 takes as
# much memory as the sum. (For smaller ones, time matters more.)
_LARGE, _PARTS = 2**24, 32


def _add_in_place(whole: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    """Returns whole + part. A loop that carries only the sum writes it in place."""
    size = whole.shape.num_elements()
    contribution, total = tf.reshape(part, [-1]), tf.reshape(whole, [-1])
    for start in range(0, size, -(-size // _PARTS)):
        stop = min(start + -(-size // _PARTS), size)
        # One part at a time, to save memory.
        with tf.control_dependencies([total]):
            some = tf.cast(tf.identity(contribution)[start:stop], total.dtype)
        total = tf.raw_ops.TensorStridedSliceUpdate(
            input=total,
            begin=[start],
            end=[stop],
            strides=[1],
            value=total[start:stop] + some,
        )
    return tf.reshape(total, whole.shape)
