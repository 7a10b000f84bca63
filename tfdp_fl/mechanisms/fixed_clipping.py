"""DP-FedAvg with a fixed clip (McMahan et al. 2018), and plain federated averaging."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from tfdp_fl import _validate, schedules
from tfdp_fl._lazy_tf import tf
from tfdp_fl.mechanisms import declaration, mechanism, noise
from tfdp_fl.mechanisms.contribution import NoiseStateLike, RoundState, Tensors
from tfdp_fl.terms import TrustModel


def noise_multiplier_parameter() -> schedules.Schedule:
    """Returns the parameter z of a mechanism with a trusted server."""
    return declaration.parameter(
        declaration.schedule_of(noise.require_float32_range(_validate.non_negative)),
        "z, noise stddev on the sum of the clipped updates over the clip; a "
        "number, or one value a round.",
    )


def noise_site_parameter() -> str:
    """Returns the parameter that says who adds the noise, if the server is trusted."""
    return declaration.parameter(
        declaration.OneOf("server", "client"),
        "who adds the noise; client needs fixed-size sampling.",
        default="server",
    )


def site_phrase(noise_site: str) -> str:
    """Returns the phrase that says where the noise is added."""
    return {"client": "in equal shares by the clients", "server": "by the server"}[
        noise_site
    ]


@declaration.register("fixed")
@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedClipping(mechanism.Mechanism):
    """DP-FedAvg with a constant clip.

    McMahan et al. (2018), "Learning Differentially Private Recurrent Language
    Models", Algorithm 1 with FlatClip and equal weights; Flower's
    `DPFedAvgFixed`. One round releases
    (sum_k Delta_k min(1, S/||Delta_k||) + N(0, (zS)^2 I)) / m.

    TF-Privacy's `GaussianSumQuery` computes the same sum, but lets a NaN through.

    Attributes:
      clip_norm: The clip S > 0, an L2 norm over all variables of the model.
      noise_multiplier: z >= 0, stddev of the noise on the sum divided by S;
        a constant, a sequence with one value per round, or a callable of the
        round.
      noise_site: "server", or "client": each of the m clients adds
        N(0, (zS)^2 / m), which needs fixed-size sampling.
    """

    clip_norm: float = declaration.parameter(
        declaration.clip, "the clip S, L2 over the whole update.", start=0.5
    )
    noise_multiplier: schedules.Schedule = noise_multiplier_parameter()
    noise_site: str = noise_site_parameter()

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return (
            "DP-FedAvg with fixed clipping: every client's update is clipped "
            f"to an L2 norm of {self.clip_norm:g}, and Gaussian noise is added "
            f"to the sum {site_phrase(self.noise_site)}."
        )


@declaration.register("none")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NoPrivacy(mechanism.Mechanism):
    """Federated averaging without clipping or noise (McMahan et al. 2017).

    The mean is over the clients that answered; each has the same weight, whatever its
    number of examples. There is no guarantee, and the statement says so.
    """

    trust_model: ClassVar[str] = TrustModel.NONE

    @classmethod
    def from_budget(
        cls, target: mechanism.CalibrationTarget, **options: Any
    ) -> NoPrivacy:
        """Implements `Mechanism.from_budget`: there is no target."""
        return cls(**options)

    def l2_norm_bound(self, round: RoundState) -> float:
        """Implements `Mechanism.l2_norm_bound`: there is no bound."""
        return float("inf")

    def scale(self, norm: tf.Tensor, round: RoundState) -> tf.Tensor:
        """Implements `Mechanism.scale`: nothing is clipped."""
        return tf.ones_like(norm)

    def add_noise(
        self, update: Tensors, stddev: tf.Tensor, noise_state: NoiseStateLike
    ) -> tuple[Tensors, NoiseStateLike]:
        """Implements `Mechanism.add_noise`: nothing is added."""
        return update, noise_state

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return "Plain federated averaging: nothing is clipped or noised."
