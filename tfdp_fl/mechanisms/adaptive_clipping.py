"""DP-FedAvg with a clip that follows a quantile (Andrew et al. 2021)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import dp_accounting

from tfdp_fl import _validate, schedules
from tfdp_fl._on_use import tf
from tfdp_fl.mechanisms import (
    contribution,
    fixed_clipping,
    formulas,
    mechanism,
    parameters,
    registry,
)

# The name of the released sum of bits.
BELOW = "below_clip"


def bits_below(norm: tf.Tensor, clip_norm: Any) -> tf.Tensor:
    """Returns b_k - 1/2, float32: whether norms are at most the clip.

    Centred, so that a client that is there or not moves their sum by 1/2.
    """
    return tf.cast(norm <= clip_norm, tf.float32) - 0.5


def moved_clip(
    sums: Mapping[str, Any],
    round: contribution.Round,
    target_quantile: float,
    clip_learning_rate: float,
) -> Any:
    """Returns S exp(-eta (b - gamma)), b from the noised sum of `bits_below`.

    Args:
      sums: The noised sums by name; Python floats or TensorFlow scalars.
      round: This round, likewise.
      target_quantile: gamma.
      clip_learning_rate: eta.
    """
    return formulas.next_clip_norm(
        round.clip_norm,
        sums[BELOW] / round.clients_per_round + 0.5,
        target_quantile,
        clip_learning_rate,
        exp=math.exp if isinstance(sums[BELOW], float) else tf.exp,
    )


@registry.register("adaptive")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveClipping(mechanism.Mechanism):
    """DP-FedAvg with a clip that follows a quantile of the update norms.

    Andrew et al. (2021), "Differentially Private Learning with Adaptive
    Clipping", Algorithm 1; Flower's `DPFedAvgAdaptive`. Within a round it is
    `FixedClipping` with the clip S and noise z_Delta S; after the aggregation
    S <- S exp(-eta (b - gamma)), where b is the noised fraction of clients
    whose norm was at most S.

    Two sums are released: the updates, and the bits b_k - 1/2 that say whether
    a norm was at most S. Centred bits have sensitivity 1/2, so the two
    together cost z (Andrew et al. 2021, Theorem 1). S never falls below
    `formulas.SMALLEST_CLIP_NORM`, from where it could hardly rise again.

    Attributes:
      noise_multiplier: z >= 0, what both releases of a round cost together; a
        constant, a sequence, or a callable of the round. The noise on the
        updates is z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), a little more.
      initial_clip_norm: S of the first round.
      target_quantile: gamma, the fraction of clients that should remain
        unclipped.
      clip_learning_rate: eta.
      count_noise_stddev: sigma_b > z/2, stddev of the noise on the count; None
        stands for clients_per_round / 20 (and for 0 where z is 0).
      noise_site: "server" or "client" (needs fixed-size sampling).
    """

    released_sums: ClassVar[tuple[str, ...]] = (BELOW,)
    noise_limit_reason: ClassVar[str] = (
        "An adaptive clip needs less noise than twice count_noise_stddev, "
        "which is clients_per_round / 20 unless given: raise either, or use "
        "mechanism='fixed'."
    )

    noise_multiplier: schedules.Schedule = fixed_clipping.noise_multiplier_parameter()
    initial_clip_norm: float = parameters.parameter(
        parameters.clip, "the clip of the first round.", default=0.1
    )
    target_quantile: float = parameters.parameter(
        _validate.probability,
        "the fraction of clients that should remain unclipped.",
        default=0.5,
    )
    clip_learning_rate: float = parameters.parameter(
        _validate.non_negative, "how fast the clip follows.", default=0.2
    )
    count_noise_stddev: float | None = parameters.parameter(
        parameters.Optional(_validate.non_negative),
        "noise on the count of unclipped clients; m / 20 unless given.",
        default=None,
    )
    noise_site: str = fixed_clipping.noise_site_parameter()

    def check_parameters(self) -> None:
        """Implements `Mechanism.check_parameters`."""
        if self.count_noise_stddev is None or callable(self.noise_multiplier):
            return
        largest = self.noise_multiplier
        if isinstance(largest, tuple):
            largest = max(largest)
        formulas.check_count_noise(cast(float, largest), self.count_noise_stddev)

    def count_noise_stddev_of(self, clients_per_round: Any) -> Any:
        """Returns sigma_b of a round of so many clients (number or tensor)."""
        if self.count_noise_stddev is not None:
            return self.count_noise_stddev
        return clients_per_round * formulas.COUNT_NOISE_FRACTION

    @classmethod
    def for_target(
        cls, target: mechanism.Target, **options: Any
    ) -> mechanism.Mechanism:
        """Implements `Mechanism.for_target`.

        Unless `count_noise_stddev` is given it is m / 20, or z where that is
        more: z_Delta is then at most 1.155 z. With small cohorts m / 20 would
        cost more by itself than the target may.
        """
        if options.get("count_noise_stddev") is None:
            largest: Any = target.noise_multiplier
            if isinstance(largest, Sequence):
                largest = max(largest)
            default = target.clients_per_round * formulas.COUNT_NOISE_FRACTION
            if isinstance(largest, float | int) and largest > default:
                options["count_noise_stddev"] = largest
        return super().for_target(target, **options)

    def first_clip_norm(self) -> float:
        """Implements `Mechanism.first_clip_norm`."""
        return self.initial_clip_norm

    def noise_limit(
        self, round_index: int, deployment: contribution.Deployment
    ) -> float:
        """Implements `Mechanism.noise_limit`: just below 2 sigma_b."""
        return formulas.largest_noise_multiplier(
            self.count_noise_stddev_of(deployment.cohort_size(round_index))
        )

    def _check_round(
        self, round_index: int, deployment: contribution.Deployment
    ) -> None:
        formulas.check_count_noise(
            self.noise_multiplier_at(round_index),
            self.count_noise_stddev_of(deployment.cohort_size(round_index)),
        )

    def check(self, deployment: contribution.Deployment) -> None:
        """Implements `Mechanism.check`."""
        super().check(deployment)
        constant = schedules.is_constant(
            self.noise_multiplier
        ) and schedules.is_constant(deployment.clients_per_round)
        for round_index in range(1 if constant else deployment.rounds or 1):
            self._check_round(round_index, deployment)

    def noise_stddevs(
        self, round: contribution.Round, deployment: contribution.Deployment
    ) -> dict[str, Any]:
        """Implements `Mechanism.noise_stddevs`: z_Delta S, and sigma_b.

        The count has no noise where the updates have none.
        """
        del deployment
        z = round.noise_multiplier
        count = self.count_noise_stddev_of(round.clients_per_round)
        noisy = formulas.choose(z > 0, count, 1.0)
        return {
            "update": formulas.choose(
                z > 0, formulas.update_noise_multiplier(z, noisy), 0.0
            )
            * round.clip_norm,
            BELOW: formulas.choose(z > 0, count, 0.0)
            if self.count_noise_stddev is None
            else count,
        }

    def sums_of(
        self, norm: tf.Tensor, round: contribution.Round
    ) -> dict[str, tf.Tensor]:
        """Implements `Mechanism.sums_of`: the centred bits."""
        return {BELOW: bits_below(norm, round.clip_norm)}

    def next_clip_norm(self, sums: Mapping[str, Any], round: contribution.Round) -> Any:
        """Implements `Mechanism.next_clip_norm`: S exp(-eta (b - gamma))."""
        return moved_clip(sums, round, self.target_quantile, self.clip_learning_rate)

    def round_event(
        self, round_index: int, deployment: contribution.Deployment
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.round_event`: updates and count as one.

        Raises:
          ValueError: The count alone would cost more than this round may.
        """
        self._check_round(round_index, deployment)
        return super().round_event(round_index, deployment)

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return (
            "DP-FedAvg with adaptive clipping: every client's update is "
            "clipped to an L2 norm that follows the "
            f"{self.target_quantile:g} quantile of the update norms, estimated "
            "from a noised count, and Gaussian noise is added to the sum "
            f"{fixed_clipping.site_phrase(self.noise_site)}; the cost of the "
            "count is included."
        )
