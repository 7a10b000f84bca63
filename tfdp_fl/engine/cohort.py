"""What clients receive, what they add up to, and how it is laid out flat."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp_fl.mechanisms import contribution

# What is wanted of a cohort: the sum of the clients' contributions; every
# client's unclipped update (for a clip that depends on all of them); or every
# client's contribution (for secure aggregation).
SUM, EACH_UPDATE, EACH_CONTRIBUTION = "sum", "updates", "contributions"


class Received(NamedTuple):
    """What the server sends to every client of a round.

    Attributes:
      weights: Values of the variables that a client's update is about.
      unaggregated: Values of the other variables of the model.
      params: The query's sample params.
      learning_rate: Float32 scalar.
      seed: Of a kind of `mechanisms.noise`, new for every round.
    """

    weights: list[tf.Tensor]
    unaggregated: list[tf.Tensor]
    params: Any
    learning_rate: tf.Tensor
    seed: tf.Tensor


class Moments(NamedTuple):
    """Sums over clients for Geyer's V_c and U_s.

    Attributes:
      count: Float32 scalar, the number of usable updates.
      first: List of float32 tensors, the sum of the unclipped updates.
      second: List of float32 tensors, the sum of their squares.
    """

    count: tf.Tensor
    first: list[tf.Tensor]
    second: list[tf.Tensor]


class CohortSum(NamedTuple):
    """What a group of clients adds up to.

    Attributes:
      contribution: The sum of the clients' `Contribution`s; () where each's
        own is kept.
      loss: Float32 scalar, the sum over examples of the training loss, as far
        as it is a number.
      examples: Float32 scalar, the number of examples of which it is.
      moments: A `Moments`, or () if it was not asked for.
    """

    contribution: contribution.Contribution
    loss: tf.Tensor
    examples: tf.Tensor
    moments: Any


class CollectedUpdates(NamedTuple):
    """Each client's own contribution, where a sum is not enough.

    Attributes:
      updates: Float32 [K, D], flattened and concatenated over variables.
      norms: Float32 [K].
      scalars: Float32 [K, ...], `Contribution.scalars` of each.
    """

    updates: tf.Tensor
    norms: tf.Tensor
    scalars: tf.Tensor


class Trained(NamedTuple):
    """What a compiled function returns of the clients that it trained.

    Attributes:
      total: Their `CohortSum`.
      metrics: The values of the trainer's metric variables.
      window_norms: Float32 [K, L], each client's layer norms before noise;
        [0, 0] if the mechanism keeps no window.
      collected: Their `CollectedUpdates`, () where they are summed.
    """

    total: CohortSum
    metrics: list[tf.Tensor]
    window_norms: tf.Tensor
    collected: Any = ()


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """The shapes and dtypes of what a client hands in, variable by variable."""

    shapes: list[tf.TensorShape]
    dtypes: list[tf.DType]

    @classmethod
    def of(cls, variables: list[tf.Variable]) -> UpdateSpec:
        """Returns what is handed in about some variables."""
        return cls(
            [each.shape for each in variables],
            [as_handed_in(tf.zeros([], each.dtype)).dtype for each in variables],
        )

    @property
    def size(self) -> int:
        """Returns D, the number of elements of an update."""
        return sum(shape.num_elements() for shape in self.shapes)

    def zeros(self) -> list[tf.Tensor]:
        """Returns an update of zeros."""
        return [
            tf.zeros(shape, dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    def unflatten(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """Splits a flat vector, [D], into the tensors of an update."""
        parts = tf.split(flat, [shape.num_elements() for shape in self.shapes])
        return [
            tf.cast(tf.reshape(part, shape), dtype)
            for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True)
        ]


def as_handed_in(value: tf.Tensor | tf.Variable) -> tf.Tensor:
    """Returns a weight's value as a client hands it in: float32 or float64.

    Clipped, added up or noised with fewer bits, it would be rounded by more
    than a clip may be.
    """
    value = tf.convert_to_tensor(value)
    return value if value.dtype.size >= 4 else tf.cast(value, tf.float32)


def flatten(update: list[tf.Tensor], usable: tf.Tensor | None = None) -> tf.Tensor:
    """Returns an update as one vector, float32 [D]; zeros if not usable."""
    flat = tf.concat(
        [tf.reshape(tf.cast(part, tf.float32), [-1]) for part in update], 0
    )
    if usable is None:
        return flat
    return tf.math.multiply_no_nan(flat, tf.cast(usable, tf.float32))


def added(one: Any, other: Any) -> Any:
    """Adds up two nests of tensors."""
    return tf.nest.map_structure(tf.add, one, other)


_LARGEST_LOSS = 1e25


def bounded_loss(losses: tf.Tensor) -> tf.Tensor:
    """Returns losses of which a whole cohort's sum is still a number.

    They are reported only; training knows no bound.
    """
    return tf.clip_by_value(losses, -_LARGEST_LOSS, _LARGEST_LOSS)


def made_by_each_run(state: Any, count: tf.Tensor) -> Any:
    """Returns the same values, with zeros that no compiled function keeps.

    TensorFlow folds zeros of a known shape into the function's graph, which
    then holds a copy of the model for as long as it lives.

    Args:
      state: Nest of tensors, while a function is traced.
      count: Integer scalar, never negative, not known until the function runs.
    """
    zero = tf.cast(count < 0, tf.float32)

    def unfolded(tensor: tf.Tensor) -> tf.Tensor:
        value = tf.get_static_value(tensor)
        if value is None or value.size < 2 or value.any():
            return tensor
        return tf.fill(tensor.shape, tf.cast(zero, tensor.dtype))

    return tf.nest.map_structure(unfolded, state)
