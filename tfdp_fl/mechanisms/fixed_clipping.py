"""DP-FedAvg with a fixed clip (McMahan et al. 2018)."""

from __future__ import annotations

import dataclasses

import dp_accounting
import tensorflow as tf

from tfdp_fl import _validate, schedules
from tfdp_fl.mechanisms import clipping, formulas, mechanism, noise

NOISE_SITES = ("server", "client")


def check_noise_site(noise_site: str, deployment: mechanism.Deployment) -> None:
    """Raises ValueError if noise at the clients would fall short.

    Each of m clients adds its share N(0, (zS)^2 / m); fewer than m shares are
    less noise than what is charged, so exactly m have to answer.
    """
    if noise_site == "client" and deployment.sampling not in (
        "fixed_size",
        None,
    ):
        raise ValueError(
            "noise_site='client' needs sampling='fixed_size', because the "
            "noise is complete only if exactly clients_per_round clients "
            f"answer, got sampling={deployment.sampling!r}."
        )


class FixedClippingQuery(mechanism.CohortQuery):
    """Clip to S, sum, add N(0, (zS)^2 I), divide by the fixed m.

    With `noise_site="client"` each client adds N(0, (zS)^2 / m) to its own
    clipped update, and the server adds nothing.
    """

    def __init__(self, clip_norm: float, noise_site: str):
        self._clip_norm = clip_norm
        self._noise_site = noise_site
        self.client_noise = "share" if noise_site == "client" else "none"

    def initial_global_state(self) -> mechanism.QueryState:
        """Implements `DPQuery.initial_global_state`."""
        return (
            super()
            .initial_global_state()
            ._replace(clip_norm=tf.constant(self._clip_norm, tf.float32))
        )

    def update_noise_multiplier(self, state: mechanism.QueryState) -> tf.Tensor:
        """Returns the noise on the sum of updates, divided by the clip."""
        return state.noise_multiplier

    def noise_stddev(self, state: mechanism.QueryState) -> tf.Tensor:
        """Implements `CohortQuery.noise_stddev`."""
        return self.update_noise_multiplier(state) * state.clip_norm

    def derive_sample_params(
        self, state: mechanism.QueryState
    ) -> mechanism.SampleParams:
        """Implements `DPQuery.derive_sample_params`."""
        stddev = tf.zeros([])
        if self._noise_site == "client":
            stddev = formulas.client_noise_stddev(
                state.clip_norm,
                self.update_noise_multiplier(state),
                state.clients_per_round,
            )
        return mechanism.SampleParams(
            clip_norm=state.clip_norm,
            noise_stddev=stddev,
            count_noise_stddev=tf.zeros([]),
        )

    @property
    def only_scales(self) -> bool:
        """Implements `CohortQuery.only_scales`."""
        return self._noise_site == "server"

    def scale_of(
        self,
        params: mechanism.SampleParams,
        norm: tf.Tensor,
        usable: tf.Tensor,
    ) -> mechanism.Record:
        """Implements `CohortQuery.scale_of`: min(1, S / norm)."""
        scale = clipping.clip_factor(norm, params.clip_norm)
        return mechanism.Record(
            update=tf.where(usable, scale, 0.0),
            below_clip=tf.zeros_like(norm),
            weight=tf.ones_like(norm),
            norm=norm,
            clipped=tf.cast(norm > params.clip_norm, tf.float32),
            discarded=tf.cast(~usable, tf.float32),
        )

    def preprocess_record(
        self, params: mechanism.SampleParams, record: list[tf.Tensor]
    ) -> mechanism.Record:
        """Clips one client's update, and adds its noise if it is to."""
        one = self.scale_of(params, *clipping.usable_norm(record))
        update = clipping.scaled(record, one.update)
        if self._noise_site == "client":
            update = noise.add_normal(update, params.noise_stddev)
        return one._replace(update=update)

    def get_noised_result(
        self, sample_state: mechanism.Record, global_state: mechanism.QueryState
    ) -> tuple[
        list[tf.Tensor], mechanism.QueryState, dp_accounting.GaussianDpEvent
    ]:
        """Returns (sum + noise) / m, with the clip of this round."""
        total = sample_state.update
        if self._noise_site == "server":
            total = noise.add_normal(total, self.noise_stddev(global_state))
        mean = [
            tensor / tf.cast(global_state.clients_per_round, tensor.dtype)
            for tensor in total
        ]
        event = dp_accounting.GaussianDpEvent(global_state.noise_multiplier)
        return mean, global_state, event


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedClipping(mechanism.Mechanism):
    """DP-FedAvg with a clip that does not move.

    McMahan et al. (2018), "Learning Differentially Private Recurrent Language
    Models", Algorithm 1 with FlatClip and equal weights; Flower's
    `DPFedAvgFixed`. One round releases
    (sum_k Delta_k min(1, S/||Delta_k||) + N(0, (zS)^2 I)) / m.

    TF-Privacy's `GaussianSumQuery` computes the same sum, but lets a NaN
    through and cannot repeat its noise from a seed; hence a query of our own.

    Attributes:
      clip_norm: The clip S > 0, an L2 norm over all variables of the model.
      noise_multiplier: z >= 0, stddev of the noise on the sum divided by S;
        a constant, a sequence with one value a round, or a callable of the
        round.
      noise_site: "server", or "client": each of the m clients adds
        N(0, (zS)^2 / m), which needs fixed-size sampling.
    """

    clip_norm: float
    noise_multiplier: schedules.Schedule
    noise_site: str = "server"

    def __post_init__(self):
        object.__setattr__(
            self, "clip_norm", _validate.positive(clip_norm=self.clip_norm)
        )
        object.__setattr__(
            self,
            "noise_multiplier",
            schedules.checked(
                self.noise_multiplier,
                _validate.non_negative,
                "noise_multiplier",
            ),
        )
        _validate.one_of(NOISE_SITES, noise_site=self.noise_site)

    def check(self, deployment: mechanism.Deployment) -> None:
        """Implements `Mechanism.check`."""
        check_noise_site(self.noise_site, deployment)

    def bind(self, deployment: mechanism.Deployment) -> FixedClippingQuery:
        """Implements `Mechanism.bind`."""
        self.check(deployment)
        return FixedClippingQuery(self.clip_norm, self.noise_site)

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return (
            "DP-FedAvg with fixed clipping: every client's update is clipped "
            f"to an L2 norm of {self.clip_norm:g}, and Gaussian noise is added "
            f"to the sum {site_phrase(self.noise_site)}."
        )


def site_phrase(noise_site: str) -> str:
    """Returns the words that say where the noise is added."""
    if noise_site == "client":
        return "in equal shares by the clients"
    return "by the server"
