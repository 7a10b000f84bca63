"""Local DP with a clipping radius that follows the client's last updates (DISCO)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

from tfdp_fl import _validate
from tfdp_fl._lazy_tf import tf
from tfdp_fl.mechanisms import clipping, declaration, local_dp, noise
from tfdp_fl.mechanisms.contribution import (
    ClientContext,
    Contribution,
    PrivacyContext,
    RoundState,
    Tensors,
)
from tfdp_fl.terms import Json


@declaration.register("adaptive_local")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveLocalDP(local_dp.LocalMechanism):
    """DISCO's local DP, whose clipping radius follows the client's last updates.

    For every layer l of a client, the radius r_l is the mean of the layer's last
    `window` norms (from previous rounds, before noise), but at most `clipping_radius`.
    The release is Delta_l / max(1, ||Delta_l|| / r_l) plus N(0, sigma_l^2) with
    sigma_l = 2 r_l zeta, where zeta is the sigma / sensitivity of one release within
    the budget (see `LocalDP`).

    With `calibration="classic", composition="basic", layers="separate"`, it is the
    published method: sigma_l = 2 r_l sqrt(2 ln(1.25/delta_r))/epsilon_r with
    epsilon_r = epsilon / T and delta_r = delta / T. Each of the L layers then spends
    that budget, and the reported epsilon counts all of them.

    The radii come from norms without noise, so the scale of the noise itself reveals
    something that epsilon does not cover; the statement says so. Each client's noise
    follows its own radius, so their total cannot be bounded from below by the largest
    radius, and no central guarantee is claimed beyond the local one.

    A TFF client has neither a name nor a state. There, the window is empty in every
    round, and every layer's radius is `clipping_radius`.

    Attributes:
      epsilon: The budget of one client over the training.
      delta: In (0, 1).
      clipping_radius: The upper bound on every layer's radius.
      window: The number of its own previous norms that a client averages.
      calibration: "analytic" or "classic" (see `LocalDP`).
      composition: "rdp" or "basic" (see `LocalDP`).
      layers: "joint": a round's layers are one release, which stays within the budget;
        "separate": each layer spends the budget and is charged separately.
      max_participations: The maximum number of rounds of a client; a limit needs less
        noise with `composition="rdp"`. None: as often as it is drawn.
    """

    own_caveats: ClassVar[Mapping[str, str]] = {
        "radius_from_unnoised_norms": (
            "Each client's clipping radius follows the un-noised norms of its "
            "own earlier updates; what the noise's size thereby reveals is not "
            "part of epsilon."
        ),
        "layers_charged_separately": (
            "Each layer of the model was clipped and noised by itself and is "
            "charged as a separate release."
        ),
        "layers_joint": ("All layers of one update are charged as one joint release."),
    }

    epsilon: float = declaration.parameter(
        noise.require_float32_range(_validate.positive),
        "the budget of one client over the training.",
    )
    delta: float = declaration.parameter(_validate.inside_unit_interval, "its delta.")
    clipping_radius: float = declaration.parameter(
        declaration.clip, "the most that a layer's radius may be.", default=1.0
    )
    window: int = declaration.parameter(
        _validate.positive_integer,
        "how many of its own last norms a client averages.",
        default=3,
    )
    layers: str = declaration.parameter(
        declaration.OneOf("joint", "separate"),
        "whether a round's layers are one release or charged one by one.",
        default="joint",
    )

    def _num_layers(self, context: PrivacyContext) -> int:
        if context.num_variables is None:
            raise ValueError(
                "num_variables must be known to AdaptiveLocalDP, got None."
            )
        return context.num_variables

    def releases_per_round(self, context: PrivacyContext) -> int:
        """Implements `LocalMechanism.releases_per_round`."""
        return 1 if self.layers == "joint" else self._num_layers(context)

    def first_clip_norm(self) -> float:
        """Implements `Mechanism.first_clip_norm`: the largest radius."""
        return self.clipping_radius

    def window_norms(self, update: list[tf.Tensor]) -> tf.Tensor:
        """Returns the L2 norm of every layer before clipping: float32 [L]."""
        return tf.stack([clipping.global_norm([layer]) for layer in update])

    @property
    def least_radius(self) -> float:
        """The smallest radius: a thousandth of clipping_radius, or 1e-10 if larger.

        Without it, noise that shrinks with the updates could become smaller than the
        part of their norms that float32 loses: elements below 1e-19 have a square of 0.
        """
        smallest = self.clipping_radius * 1e-3
        return max(smallest, clipping.SMALLEST_CLIP_NORM)

    def radii(self, client: ClientContext, context: PrivacyContext) -> tf.Tensor:
        """Returns a client's radii for this round, float32 [L].

        r_l = min(mean of the layer's norms in the window, clipping_radius), but at
        least `least_radius`. It is clipping_radius if the window is empty or missing.
        """
        layers = self._num_layers(context)
        if client.window is None:
            return tf.fill([layers], self.clipping_radius)
        is_known = ~tf.math.is_nan(client.window)
        count = tf.reduce_sum(tf.cast(is_known, tf.float32), axis=0)
        total = tf.reduce_sum(tf.where(is_known, client.window, 0.0), axis=0)
        mean = tf.math.divide_no_nan(total, count)
        radii = tf.clip_by_value(mean, self.least_radius, self.clipping_radius)
        return tf.where(count > 0, radii, self.clipping_radius)

    def contribution(
        self,
        update: Tensors,
        round: RoundState,
        client: ClientContext,
        context: PrivacyContext,
    ) -> Contribution:
        """Implements `Mechanism.contribution`, layer by layer.

        Delta_l / max(1, ||Delta_l|| / r_l).
        """
        radii = self.radii(client, context)
        norms = self.window_norms(update)
        norm = tf.norm(norms)
        usable = tf.math.is_finite(norm)
        scales = tf.where(usable, clipping.clip_factor(norms, radii), 0.0)
        return Contribution(
            update=[
                clipping.multiply([layer], scales[index])[0]
                for index, layer in enumerate(update)
            ],
            sums={},
            weight=tf.ones([]),
            norm=tf.where(usable, norm, 0.0),
            clipped=tf.cast(tf.reduce_any(norms > radii) & usable, tf.float32),
            discarded=tf.cast(~usable, tf.float32),
        )

    def client_noise(
        self, round: RoundState, client: ClientContext, context: PrivacyContext
    ) -> list[tf.Tensor]:
        """Implements `Mechanism.client_noise`: sigma_l of every layer."""
        radii = self.radii(client, context)
        layers = self._num_layers(context)
        return tf.unstack(self._layer_noise_multiplier(context) * radii, num=layers)

    def _layer_noise_multiplier(self, context: PrivacyContext) -> float:
        """Returns sigma_l / r_l.

        L layers that are released together are one Gaussian release with the multiplier
        zeta if each has sqrt(L) zeta.
        """
        layer_factor = 1.0
        if self.layers == "joint":
            layer_factor = math.sqrt(self._num_layers(context))
        ratio = self.noise_over_sensitivity(context)
        return local_dp.SENSITIVITY * ratio * layer_factor

    def noise_stddevs(self, round: RoundState, context: PrivacyContext) -> Json:
        """Implements `Mechanism.noise_stddevs`: m clients with the largest radius."""
        client_stddev = self._layer_noise_multiplier(context) * round.clip_norm
        return {"update": round.clients_per_round**0.5 * client_stddev}

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return (
            "Adaptive local differential privacy: every client clips each "
            f"layer of its update to the mean of its last {self.window} norms "
            f"(at most {self.clipping_radius:g}) and adds Gaussian noise of "
            "its own before the update leaves it."
        )

    def caveats(self) -> tuple[str, ...]:
        """Implements `Mechanism.caveats`."""
        layers = {"joint": "layers_joint", "separate": "layers_charged_separately"}
        caveat = layers[self.layers]
        return (*super().caveats(), "radius_from_unnoised_norms", caveat)
