"""DP-FedAvg with a clip that follows a quantile (Andrew et al. 2021).

The formulas accept both Python floats and TensorFlow scalars.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from tfdp_fl import _validate, schedules
from tfdp_fl._lazy_tf import tf
from tfdp_fl.mechanisms import (
    clipping,
    declaration,
    fixed_clipping,
    mechanism,
    noise,
)
from tfdp_fl.mechanisms.contribution import PrivacyContext, RoundState, Scalar
from tfdp_fl.terms import Json

# The name of the released sum of bits.
BELOW = "below_clip"
# The default of sigma_b, as a fraction of m.
COUNT_NOISE_FRACTION = 1 / 20
# Closer to 2 sigma_b, float32 has a relative error above 0.001 in z_Delta.
_MAX_RATIO = 1 - 1e-4


def check_count_noise(noise_multiplier: Any, count_noise_stddev: Any) -> None:
    """Raises ValueError if the count alone costs (nearly) as much as z, or more.

    Args:
      noise_multiplier: z, the joint cost of a round's two releases; 0 is never refused.
      count_noise_stddev: sigma_b, in clients.
    """
    limit = 2 * count_noise_stddev * _MAX_RATIO
    if noise_multiplier > 0 and not noise_multiplier <= limit:
        raise ValueError(
            "noise_multiplier must be less than 2 * count_noise_stddev (by at "
            "least a ten-thousandth), or the count alone would cost as much as "
            "the round may, got "
            f"noise_multiplier={noise_multiplier!r} and count_noise_stddev="
            f"{count_noise_stddev!r} (which is clients_per_round / 20 unless given)."
        )


def _choose(condition: bool | tf.Tensor, if_true: Scalar, if_false: Scalar) -> Scalar:
    """Returns `if_true` or `if_false`, numbers or tensors, by a condition."""
    if isinstance(condition, bool | np.bool_):
        return if_true if condition else if_false
    return tf.where(condition, if_true, if_false)


@declaration.register("adaptive")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveClipping(mechanism.Mechanism):
    """DP-FedAvg with a clip that follows a quantile of the update norms.

    Andrew et al. (2021), "Differentially Private Learning with Adaptive
    Clipping", Algorithm 1; Flower's `DPFedAvgAdaptive`. Within a round, it is
    `FixedClipping` with the clip S and noise z_Delta S. After the aggregation,
    S <- S exp(-eta (b - gamma)), where b is the noisy fraction of clients
    whose norm was at most S.

    Two sums are released: the updates, and the bits b_k - 1/2 that say whether
    a norm was at most S. Centred bits have sensitivity 1/2, so the noise
    multiplier of their count is 2 sigma_b, and the two together cost z (Andrew et
    al. 2021, Theorem 1).

    Attributes:
      noise_multiplier: z >= 0, the joint cost of a round's two releases; a constant, a
        sequence, or a callable of the round. The noise multiplier of the updates is
        slightly larger: z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2).
      initial_clip_norm: S of the first round.
      target_quantile: gamma, the fraction of clients that should remain
        unclipped.
      clip_learning_rate: The step of the clip norm, eta.
      count_noise_stddev: sigma_b > z/2, stddev of the noise on the count; None
        means clients_per_round / 20 (and 0 if z is 0).
      noise_site: "server" or "client" (needs fixed-size sampling).
    """

    side_bounds: ClassVar[Mapping[str, float]] = {BELOW: 0.5}
    noise_multiplier_limit_reason: ClassVar[str] = (
        "An adaptive clip needs less noise than twice count_noise_stddev, "
        "which is clients_per_round / 20 unless given: raise either, or use "
        "mechanism='fixed'."
    )

    noise_multiplier: schedules.Schedule = fixed_clipping.noise_multiplier_parameter()
    initial_clip_norm: float = declaration.parameter(
        declaration.clip, "the clip of the first round.", default=0.1
    )
    target_quantile: float = declaration.parameter(
        _validate.probability,
        "the fraction of clients that should remain unclipped.",
        default=0.5,
    )
    clip_learning_rate: float = declaration.parameter(
        _validate.non_negative, "how fast the clip follows.", default=0.2
    )
    count_noise_stddev: float | None = declaration.parameter(
        declaration.optional(noise.require_float32_range(_validate.non_negative)),
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
        check_count_noise(cast(float, largest), self.count_noise_stddev)

    def count_noise_stddev_of(self, clients_per_round: Scalar) -> Scalar:
        """Returns sigma_b of a round with this expected cohort size."""
        if self.count_noise_stddev is not None:
            return self.count_noise_stddev
        return clients_per_round * COUNT_NOISE_FRACTION

    @classmethod
    def from_budget(
        cls, target: mechanism.CalibrationTarget, **options: Any
    ) -> mechanism.Mechanism:
        """Implements `Mechanism.from_budget`.

        By default, `count_noise_stddev` is the larger of m / 20 and z, so that z_Delta
        is at most 1.155 z. In small cohorts, m / 20 alone could cost more than the
        target allows.
        """
        if options.get("count_noise_stddev") is None:
            largest: Any = target.noise_multiplier
            if isinstance(largest, Sequence):
                largest = max(largest)
            default = target.clients_per_round * COUNT_NOISE_FRACTION
            if isinstance(largest, float | int) and largest > default:
                options["count_noise_stddev"] = largest
        return super().from_budget(target, **options)

    def first_clip_norm(self) -> float:
        """Implements `Mechanism.first_clip_norm`."""
        return self.initial_clip_norm

    def noise_multiplier_limit(
        self, round_index: int, context: PrivacyContext
    ) -> float:
        """Implements `Mechanism.noise_multiplier_limit`: just below 2 sigma_b."""
        size = context.cohort_size(round_index)
        return 2 * self.count_noise_stddev_of(size) * _MAX_RATIO

    def _check_round(self, round_index: int, context: PrivacyContext) -> None:
        check_count_noise(
            self.noise_multiplier_at(round_index),
            self.count_noise_stddev_of(context.cohort_size(round_index)),
        )

    def check(self, context: PrivacyContext) -> None:
        """Implements `Mechanism.check`."""
        super().check(context)
        values = (self.noise_multiplier, context.clients_per_round)
        constant = all(map(schedules.is_constant, values))
        for round_index in range(1 if constant else context.rounds or 1):
            self._check_round(round_index, context)

    def noise_stddevs(self, round: RoundState, context: PrivacyContext) -> Json:
        """Implements `Mechanism.noise_stddevs`: z_Delta S, and sigma_b.

        z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), written so that it is 0 at z = 0. By
        default, the count has no noise if the updates have none.

        Raises:
          ValueError: Of numbers, z >= 2 sigma_b > 0: the count alone would cost more
            than the whole round may.
        """
        z = round.noise_multiplier
        count = self.count_noise_stddev_of(round.clients_per_round)
        if isinstance(z, numbers.Real) and isinstance(count, numbers.Real):
            check_count_noise(z, count)
        sigma_b = _choose(z > 0, count, 1.0)
        z_delta = z * (1.0 - (z / (2.0 * sigma_b)) ** 2) ** -0.5
        if self.count_noise_stddev is None:
            count = _choose(z > 0, count, 0.0)
        return {"update": z_delta * round.clip_norm, BELOW: count}

    def side_statistics(
        self, norm: tf.Tensor, round: RoundState
    ) -> dict[str, tf.Tensor]:
        """Implements `Mechanism.side_statistics`: b_k - 1/2, if norms are at most S.

        They are centred, so that one client's presence moves their sum by only 1/2.
        """
        return {BELOW: tf.cast(norm <= round.clip_norm, tf.float32) - 0.5}

    def next_clip_norm(self, sums: Mapping[str, Scalar], round: RoundState) -> Scalar:
        """Implements `Mechanism.next_clip_norm`: S exp(-eta (b - gamma)).

        b is the noisy count divided by m, which may lie outside [0, 1]. S stays between
        the constants `SMALLEST_CLIP_NORM` and `LARGEST_CLIP_NORM`. Otherwise, noise
        alone could lower it by hundreds of decades, and it could then recover by only
        about a tenth per round.
        """
        fraction = sums[BELOW] / round.clients_per_round + 0.5
        power = -self.clip_learning_rate * (fraction - self.target_quantile)
        if isinstance(power, numbers.Real):
            clip_norm = round.clip_norm * math.exp(min(float(power), 700.0))
        else:
            clip_norm = round.clip_norm * tf.exp(power)
        low, high = clipping.SMALLEST_CLIP_NORM, clipping.LARGEST_CLIP_NORM
        clip_norm = _choose(clip_norm > low, clip_norm, low)
        return _choose(clip_norm < high, clip_norm, high)

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
