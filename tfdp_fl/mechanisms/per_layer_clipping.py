"""DP-FedAvg whose clients clip each layer separately (McMahan et al. 2018)."""

from __future__ import annotations

import dataclasses
import math

from tfdp_fl import schedules
from tfdp_fl._lazy_tf import tf
from tfdp_fl.mechanisms import clipping, declaration, fixed_clipping, mechanism
from tfdp_fl.mechanisms.contribution import (
    ClientContext,
    Contribution,
    PrivacyContext,
    RoundState,
    Tensors,
)


@declaration.register("per_layer")
@dataclasses.dataclass(frozen=True, kw_only=True)
class PerLayerClipping(mechanism.Mechanism):
    """DP-FedAvg in which every layer has its own share of the clip.

    McMahan et al. (2018), "Learning Differentially Private Recurrent Language
    Models", Algorithm 1 with PerLayerClip: layer l of an update is clipped to S_l, so
    that the whole update has a norm of at most S, S^2 = sum_l S_l^2. With L layers,
    each has S_l = S / sqrt(L). A layer is one variable of the model: a kernel and a
    bias are two.

    The clip is no longer a single factor. So clients train one by one, each with weight
    1, and Flower servers refuse it. The noise and its cost are as in `FixedClipping`.

    Attributes:
      clip_norm: S > 0, the largest L2 norm of a whole update.
      noise_multiplier: z >= 0, stddev of the noise on the sum divided by S; a constant,
        a sequence with one value per round, or a callable of the round.
      noise_site: "server", or "client": each of the m clients adds N(0, (z S)^2 / m).
    """

    clip_norm: float = declaration.parameter(
        declaration.clip, "S, the L2 bound on the whole update.", start=0.5
    )
    noise_multiplier: schedules.Schedule = fixed_clipping.noise_multiplier_parameter()
    noise_site: str = fixed_clipping.noise_site_parameter()

    def contribution(
        self,
        update: Tensors,
        round: RoundState,
        client: ClientContext,
        context: PrivacyContext,
    ) -> Contribution:
        """Implements `Mechanism.contribution`: Delta_l min(1, S_l / ||Delta_l||)."""
        norm, usable = clipping.finite_global_norm(update)
        bound = round.clip_norm / math.sqrt(len(update))
        norms = [clipping.global_norm([layer]) for layer in update]
        factors = [
            tf.where(usable, clipping.clip_factor(layer_norm, bound), 0.0)
            for layer_norm in norms
        ]
        pairs = zip(update, factors, strict=True)
        return Contribution(
            update=[clipping.multiply([layer], factor)[0] for layer, factor in pairs],
            sums={},
            weight=tf.ones_like(norm),
            norm=norm,
            clipped=tf.cast(usable & (tf.reduce_min(factors) < 1), tf.float32),
            discarded=tf.cast(~usable, tf.float32),
        )

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return (
            "DP-FedAvg with per-layer clipping: every layer of a client's update is "
            "clipped by itself, so that the whole has an L2 norm of at most "
            f"{self.clip_norm:g}, and Gaussian noise is added to the sum "
            f"{fixed_clipping.site_phrase(self.noise_site)}."
        )
