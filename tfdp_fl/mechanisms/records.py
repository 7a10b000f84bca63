"""The one door through which a client's record enters a sum.

Whatever clips an update, and wherever it was trained, its record passes `bound`
(or `bound_factor`, where only its norm is known), `to_grid` and `add`. Together
they hold two of the five sentences of docs/architecture.md:

One door. `bound` replaces by zeros the record of a client that is longer than the
mechanism's bound, is no number, or whose side sums or weight leave their declared
ranges; `add` adds tensors of the sum's own shapes only, and never broadcasts.

Exact sums. `to_grid` rounds a record to whole multiples of a step that depends on
the clip and the expected cohort alone. Float64 adds up such numbers without any
rounding, in any order and in any groups: a client more, or less, moves the sum by
its own record and by nothing else, and a record of zeros moves no bit of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdp_fl._lazy_tf import tf
from tfdp_fl.mechanisms import clipping
from tfdp_fl.mechanisms.contribution import Contribution, Scalar

# What rounding may do to a norm as it is computed (docs/clipping.md).
_ROUNDING = 1e-5

# Float64 holds whole numbers up to 2^53. Of these bits a client's coordinate takes
# 2^_STEP_BITS / m or less, so that the sum of 4 m clients and more is exact.
_STEP_BITS = 50


def bound(
    one: Contribution, norm_bound: Scalar, side_bounds: Mapping[str, float]
) -> Contribution:
    """Returns a client's contribution, or zeros if it is more than was declared.

    Args:
      one: Clipped, without any noise.
      norm_bound: S, scalar: the L2 bound on a contribution.
      side_bounds: By name, the bound on the absolute value of each side sum.
    """
    norm, usable = clipping.finite_global_norm(list(one.update))
    kept = usable & (norm <= norm_bound * (1 + _ROUNDING))
    one = _bound_sides(one, kept, side_bounds)
    return one._replace(
        update=clipping.multiply(one.update, tf.cast(one.discarded < 1, tf.float32))
    )


def bound_factor(
    one: Contribution,
    norm: tf.Tensor,
    norm_bound: Scalar,
    side_bounds: Mapping[str, float],
) -> Contribution:
    """As `bound`, for contributions whose `update` is the factor of an update.

    Args:
      one: Contributions of any shape.
      norm: Float32, the same shape: the norms of the updates, or upper bounds.
      norm_bound: S, scalar.
      side_bounds: By name, the bound on the absolute value of each side sum.
    """
    factor: Any = one.update
    kept = (factor >= 0) & (factor * norm <= norm_bound * (1 + _ROUNDING))
    one = _bound_sides(one, kept, side_bounds)
    return one._replace(update=tf.where(one.discarded < 1, factor, 0.0))


def _bound_sides(
    one: Contribution, kept: tf.Tensor, side_bounds: Mapping[str, float]
) -> Contribution:
    kept &= (one.weight >= 0) & (one.weight <= 1)
    for name, value in one.sums.items():
        # (False for a NaN.)
        kept &= tf.abs(value) <= side_bounds[name]
    return one._replace(
        sums={name: tf.where(kept, value, 0.0) for name, value in one.sums.items()},
        weight=tf.where(kept, one.weight, 0.0),
        discarded=tf.where(kept, one.discarded, 1.0),
    )


def zero_if_empty(one: Contribution, num_examples: Scalar | None) -> Contribution:
    """Returns a client's record; all zeros for a client without examples.

    Such a client is what a neighbouring run has in the place of one that left. A bit
    that says that its norm of zero is below the clip, or the answer of an upload_hook,
    would be a record of its own, and one client would move a sum by both.

    Args:
      one: The record.
      num_examples: Scalar, the client's number of examples; None if it is not known.
    """
    if num_examples is None:
        return one
    return tf.nest.map_structure(
        lambda part: tf.where(num_examples > 0, part, tf.zeros_like(part)), one
    )


def step(norm_bound: Scalar, clients_per_round: Scalar) -> tf.Tensor:
    """Returns the step of the grid: a power of two, float32 scalar; 0 for none.

    It is at most S (m + 16) 2^-49, so that 4 (m + 16) coordinates of at most 2 S
    make a whole number of steps below 2^53. A public number: S is what the server
    sent, m what was planned.

    Args:
      norm_bound: S; without a bound (infinity) there is no grid.
      clients_per_round: m, the expected cohort size.
    """
    s = tf.cast(norm_bound, tf.float32)
    m = tf.cast(clients_per_round, tf.float32) + 16.0
    size = power_of_two_below(s) * power_of_two_below(m) * 2.0 ** (1 - _STEP_BITS)
    return tf.where(tf.math.is_finite(s), size, 0.0)


def power_of_two_below(value: tf.Tensor) -> tf.Tensor:
    """Returns the largest power of two that a positive float32 is not below."""
    exponent = tf.bitwise.bitwise_and(tf.bitcast(value, tf.int32), 0x7F800000)
    return tf.bitcast(exponent, tf.float32)


def to_grid(update: list[tf.Tensor], size: tf.Tensor) -> list[tf.Tensor]:
    """Rounds an update to multiples of a step, by at most one, or 2^-23 of itself.

    A sum with 1.5 2^24 steps is at least 2^23 steps, unless the number itself is: so
    its last float32 digit is one step or more, and what is left when they are taken
    away again is a multiple of the step.

    Args:
      update: Float tensors.
      size: Float32 scalar, a power of two; 0 leaves float32 numbers as they are.
    """
    offset = size * (1.5 * 2.0**24)

    def round_off(tensor: tf.Tensor) -> tf.Tensor:
        return (tf.cast(tensor, tf.float32) + offset) - offset

    return list(map(round_off, update))


def add(total: Contribution, one: Contribution) -> Contribution:
    """Adds one client's record to a sum, in float64.

    Raises:
      ValueError: Its tensors are not those of the sum, number by number and shape
        by shape.
    """

    def added(whole: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
        part = tf.convert_to_tensor(part)
        if not whole.shape.is_compatible_with(part.shape):
            raise ValueError(
                "A client's record must have the shapes of the sum, and is never "
                f"broadcast: got {part.shape} where the sum has {whole.shape}. "
                "Mechanisms and upload_hook return one tensor for each variable, of "
                "its shape."
            )
        return whole + tf.ensure_shape(tf.cast(part, whole.dtype), whole.shape)

    tf.nest.assert_same_structure(total, one)
    return tf.nest.map_structure(added, total, one)
