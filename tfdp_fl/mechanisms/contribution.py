"""What a round knows, what a client knows, and what a client hands in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from tfdp_fl import schedules
from tfdp_fl._on_use import tf
from tfdp_fl.mechanisms.client_weighting import ClientWeighting

# One tensor for each variable of the model.
Tensors: TypeAlias = "list[tf.Tensor]"
Scalar: TypeAlias = "float | tf.Tensor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """Where a mechanism is used: the facts that are not the mechanism's own.

    Attributes:
      clients_per_round: The expected cohort size m, constant or a schedule.
      num_clients: The population N, or None if unknown.
      sampling: One of `accounting.charge.SAMPLINGS`, or None if unknown.
      rounds: The number of rounds T that are planned, or None if unknown.
      max_participations: The most rounds that any one client may take part
        in, or None if unknown.
      num_variables: How many tensors an update has, or None if unknown.
      shapes: Theirs, or None if unknown.
      min_examples: The smallest number of examples that a client holds, or
        None if unknown.
      client_weighting: What clients count in the mean; None: 1 each.
      noise_generator: "exact" for a sum and noise on a grid (`grid`); else what
        the noise is drawn from does not matter here.
    """

    clients_per_round: schedules.Schedule
    num_clients: int | None = None
    sampling: str | None = None
    rounds: int | None = None
    max_participations: int | None = None
    num_variables: int | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    min_examples: int | None = None
    client_weighting: ClientWeighting | None = None
    noise_generator: str = "philox"

    def cohort_size(self, round_index: int) -> float:
        """Returns the expected cohort size m_t of one round."""
        return float(
            schedules.value_at(self.clients_per_round, round_index, "clients_per_round")
        )


class Round(NamedTuple):
    """What holds in one round: Python floats, or float32 scalars.

    It is what a query carries from round to round, and what every client of a
    round gets to know.

    Attributes:
      clip_norm: The clip S of this round, or of the coming one.
      noise_multiplier: This round's z.
      clients_per_round: This round's expected cohort size m.
      memory: What only the server keeps from round to round, such as the noise
        that later noise is correlated with: a nest of tensors, () for nothing.
    """

    clip_norm: Scalar
    noise_multiplier: Scalar
    clients_per_round: Scalar
    memory: tuple[()] | list[Any] | dict[str, Any] = ()


class Client(NamedTuple):
    """What a client knows of itself.

    Attributes:
      num_examples: Scalar, its number of examples n.
      window: Float32 [W, L], the norms that its last updates had in each of
        the L variables, NaN where there are none; None without such a memory.
      weight: Float32 scalar in [0, 1], what it counts; None: 1.
    """

    num_examples: tf.Tensor | None = None
    window: tf.Tensor | None = None
    weight: tf.Tensor | None = None


class Contribution(NamedTuple):
    """What one client hands in, and (summed) what the server gets.

    Attributes:
      update: List of float tensors, clipped, with noise if it is the client's
        to add.
      sums: Float32 scalars by name, released beside the update (such as the
        bit of adaptive clipping).
      weight: Float32 scalar, the client's weight in the mean.
      norm: Float32 scalar, the L2 norm before clipping.
      clipped: Float32 scalar, 1 if the update was scaled down.
      discarded: Float32 scalar, 1 if the update was replaced by zero.

    `norm`, `clipped` and `discarded` are diagnostics: they are not noised and
    not covered by the guarantee.
    """

    update: Tensors | tf.Tensor
    sums: Mapping[str, tf.Tensor]
    weight: tf.Tensor
    norm: tf.Tensor
    clipped: tf.Tensor
    discarded: tf.Tensor

    def scalars(self) -> list[tf.Tensor]:
        """Returns all but the update, what is handed in first."""
        return [*self.sums.values(), *self[2:]]

    def with_scalars(self, update: Any, scalars: Any) -> Contribution:
        """Returns a contribution of the same kind: `scalars` turned round."""
        count = len(self.sums)
        sums = dict(zip(self.sums, scalars[:count], strict=True))
        return Contribution(update, sums, *scalars[count:])

    def weighted(self, weight: Any) -> Contribution:
        """Returns contributions that count less, and hand in as much else.

        Args:
          weight: Float32 in [0, 1], of the shape of `update`, which is the
            factor of updates of which only the norm is known; None: 1.
        """
        if weight is None:
            return self
        return self._replace(update=self.update * weight, weight=self.weight * weight)


# How many of `Contribution.scalars` are diagnostics, at their end.
NUM_DIAGNOSTICS = 3
