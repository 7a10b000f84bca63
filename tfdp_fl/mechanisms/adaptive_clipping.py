"""DP-FedAvg with a clip that follows a quantile (Andrew et al. 2021)."""

from __future__ import annotations

import dataclasses

import dp_accounting
import tensorflow as tf

from tfdp_fl import _validate, schedules
from tfdp_fl.mechanisms import (
    fixed_clipping,
    formulas,
    mechanism,
    noise,
)

_DEFAULT_COUNT_NOISE_FRACTION = 1 / 20


class AdaptiveClippingQuery(fixed_clipping.FixedClippingQuery):
    """Fixed clipping within a round; S moves after the round.

    Two sums are released: the updates, and the bits b_k - 1/2 that say whether
    a norm was at most S. Centred bits have sensitivity 1/2, so the two
    together cost z if the updates are noised with
    z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2) (Andrew et al. 2021, Theorem 1).
    """

    def __init__(
        self,
        initial_clip_norm: float,
        target_quantile: float,
        clip_learning_rate: float,
        count_noise_stddev: float | None,
        noise_site: str,
    ):
        super().__init__(initial_clip_norm, noise_site)
        self._target_quantile = target_quantile
        self._clip_learning_rate = clip_learning_rate
        self._count_noise_stddev = count_noise_stddev

    def count_noise_stddev(self, state: mechanism.QueryState) -> tf.Tensor:
        """Returns sigma_b (float32 scalar), the noise on the sum of bits.

        The default is m / 20, and no noise where there is none on the updates.
        """
        if self._count_noise_stddev is not None:
            return tf.constant(self._count_noise_stddev, tf.float32)
        return tf.where(
            state.noise_multiplier > 0,
            state.clients_per_round * _DEFAULT_COUNT_NOISE_FRACTION,
            0.0,
        )

    def update_noise_multiplier(self, state: mechanism.QueryState) -> tf.Tensor:
        """Returns z_Delta (float32 scalar)."""
        noisy = state.noise_multiplier > 0
        count_stddev = tf.where(noisy, self.count_noise_stddev(state), 1.0)
        return tf.where(
            noisy,
            formulas.update_noise_multiplier(
                state.noise_multiplier, count_stddev
            ),
            0.0,
        )

    def derive_sample_params(
        self, state: mechanism.QueryState
    ) -> mechanism.SampleParams:
        """Implements `DPQuery.derive_sample_params`."""
        params = super().derive_sample_params(state)
        if self._noise_site == "client":
            share = self.count_noise_stddev(state) / tf.sqrt(
                state.clients_per_round
            )
            params = params._replace(count_noise_stddev=share)
        return params

    def scale_of(
        self,
        params: mechanism.SampleParams,
        norm: tf.Tensor,
        usable: tf.Tensor,
    ) -> mechanism.Record:
        """Implements `CohortQuery.scale_of`, and takes the centred bits."""
        below = tf.cast(norm <= params.clip_norm, tf.float32) - 0.5
        return super().scale_of(params, norm, usable)._replace(below_clip=below)

    def preprocess_record(
        self, params: mechanism.SampleParams, record: list[tf.Tensor]
    ) -> mechanism.Record:
        """Clips one client's update and takes its bit."""
        clipped = super().preprocess_record(params, record)
        if self._noise_site == "client":
            share = noise.normal([], params.count_noise_stddev)
            clipped = clipped._replace(below_clip=clipped.below_clip + share)
        return clipped

    def get_noised_result(
        self, sample_state: mechanism.Record, global_state: mechanism.QueryState
    ) -> tuple[
        list[tf.Tensor], mechanism.QueryState, dp_accounting.GaussianDpEvent
    ]:
        """Returns the noised mean, and a state with the next round's clip."""
        mean, state, event = super().get_noised_result(
            sample_state, global_state
        )
        count = sample_state.below_clip
        if self._noise_site == "server":
            count += noise.normal([], self.count_noise_stddev(state))
        clip_norm = formulas.next_clip_norm(
            state.clip_norm,
            count / state.clients_per_round + 0.5,
            self._target_quantile,
            self._clip_learning_rate,
            exp=tf.exp,
        )
        return mean, state._replace(clip_norm=clip_norm), event


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveClipping(mechanism.Mechanism):
    """DP-FedAvg with a clip that follows a quantile of the update norms.

    Andrew et al. (2021), "Differentially Private Learning with Adaptive
    Clipping", Algorithm 1; Flower's `DPFedAvgAdaptive`. Within a round it is
    `FixedClipping` with the clip S and noise z_Delta S; after the aggregation
    S <- S exp(-eta (b - gamma)), where b is the noised fraction of clients
    whose norm was at most S.

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

    noise_multiplier: schedules.Schedule
    initial_clip_norm: float = 0.1
    target_quantile: float = 0.5
    clip_learning_rate: float = 0.2
    count_noise_stddev: float | None = None
    noise_site: str = "server"

    def __post_init__(self):
        set_ = object.__setattr__
        set_(
            self,
            "noise_multiplier",
            schedules.checked(
                self.noise_multiplier,
                _validate.non_negative,
                "noise_multiplier",
            ),
        )
        set_(
            self,
            "initial_clip_norm",
            _validate.positive(initial_clip_norm=self.initial_clip_norm),
        )
        set_(
            self,
            "target_quantile",
            _validate.probability(target_quantile=self.target_quantile),
        )
        set_(
            self,
            "clip_learning_rate",
            _validate.non_negative(clip_learning_rate=self.clip_learning_rate),
        )
        if self.count_noise_stddev is not None:
            set_(
                self,
                "count_noise_stddev",
                _validate.non_negative(
                    count_noise_stddev=self.count_noise_stddev
                ),
            )
            if not callable(self.noise_multiplier):
                largest = self.noise_multiplier
                if isinstance(largest, tuple):
                    largest = max(largest)
                self._check_count_noise(largest, self.count_noise_stddev)
        _validate.one_of(fixed_clipping.NOISE_SITES, noise_site=self.noise_site)

    @staticmethod
    def _check_count_noise(noise_multiplier: float, count_stddev: float):
        if noise_multiplier > 0 and noise_multiplier >= 2 * count_stddev:
            raise ValueError(
                "noise_multiplier must be less than 2 * count_noise_stddev, "
                "or the count alone would cost more than the round may, got "
                f"noise_multiplier={noise_multiplier!r} and "
                f"count_noise_stddev={count_stddev!r} (which is "
                "clients_per_round / 20 unless given)."
            )

    def count_noise_stddev_of(self, clients_per_round: float) -> float:
        """Returns sigma_b of a round of so many clients."""
        if self.count_noise_stddev is not None:
            return self.count_noise_stddev
        return clients_per_round * _DEFAULT_COUNT_NOISE_FRACTION

    def check(self, deployment: mechanism.Deployment) -> None:
        """Implements `Mechanism.check`."""
        fixed_clipping.check_noise_site(self.noise_site, deployment)
        rounds = deployment.rounds or 1
        for round_index in range(rounds):
            self._check_count_noise(
                self.noise_multiplier_at(round_index),
                self.count_noise_stddev_of(deployment.cohort_size(round_index)),
            )
            if schedules.is_constant(
                self.noise_multiplier
            ) and schedules.is_constant(deployment.clients_per_round):
                return

    def round_event(
        self, round_index: int, deployment: mechanism.Deployment
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.round_event`: updates and count as one.

        Raises:
          ValueError: The count alone would cost more than this round may.
        """
        self._check_count_noise(
            self.noise_multiplier_at(round_index),
            self.count_noise_stddev_of(deployment.cohort_size(round_index)),
        )
        return super().round_event(round_index, deployment)

    def bind(self, deployment: mechanism.Deployment) -> AdaptiveClippingQuery:
        """Implements `Mechanism.bind`."""
        self.check(deployment)
        return AdaptiveClippingQuery(
            initial_clip_norm=self.initial_clip_norm,
            target_quantile=self.target_quantile,
            clip_learning_rate=self.clip_learning_rate,
            count_noise_stddev=self.count_noise_stddev,
            noise_site=self.noise_site,
        )

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
