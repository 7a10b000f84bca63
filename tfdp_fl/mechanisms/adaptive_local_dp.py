"""Window-based adaptive local differential privacy (DISCO)."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import dp_accounting
import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.mechanisms import clipping, local_dp, mechanism, noise

LAYER_ACCOUNTS = ("joint", "separate")


class WindowParams(NamedTuple):
    """What one client uses in one round.

    Attributes:
      radii: Float32 vector of shape [L], the clipping radius of each layer.
    """

    radii: tf.Tensor


class AdaptiveLocalDPQuery(mechanism.CohortQuery):
    """Clips and noises every layer of a client with the layer's own radius.

    A layer is one variable of the model (a kernel and its bias are two). The
    state of a client is its window: the norms of its last rounds, kept by the
    runtime, and handed in as a float32 matrix [window, L] with NaN where there
    is no norm yet.
    """

    uses_window = True
    client_noise = "own"

    def __init__(
        self,
        clipping_radius: float,
        window: int,
        noise_over_sensitivity: float,
        num_layers: int,
        layers: str,
    ):
        self._clipping_radius = clipping_radius
        self.window = window
        self.num_layers = num_layers
        # L layers that are released together are one Gaussian release of
        # multiplier zeta if each has sqrt(L) zeta.
        together = math.sqrt(num_layers) if layers == "joint" else 1.0
        self._layer_noise_multiplier = (
            local_dp.SENSITIVITY * noise_over_sensitivity * together
        )

    def initial_global_state(self) -> mechanism.QueryState:
        """Implements `DPQuery.initial_global_state`."""
        state = super().initial_global_state()
        return state._replace(clip_norm=tf.constant(self._clipping_radius))

    def noise_stddev(self, state: mechanism.QueryState) -> tf.Tensor:
        """Returns the noise on the sum of m layers at the largest radius."""
        return (
            tf.sqrt(state.clients_per_round)
            * self._layer_noise_multiplier
            * state.clip_norm
        )

    def radii(self, window_norms: tf.Tensor) -> tf.Tensor:
        """Returns a client's radii for this round.

        r_l = min(mean of the layer's norms in the window, clipping_radius);
        clipping_radius while the window is empty.

        Args:
          window_norms: Float32 [window, L], NaN where there is no norm.

        Returns:
          Float32 [L].
        """
        seen = ~tf.math.is_nan(window_norms)
        count = tf.reduce_sum(tf.cast(seen, tf.float32), axis=0)
        total = tf.reduce_sum(tf.where(seen, window_norms, 0.0), axis=0)
        mean = tf.math.divide_no_nan(total, count)
        return tf.where(
            count > 0,
            tf.minimum(mean, self._clipping_radius),
            self._clipping_radius,
        )

    def derive_sample_params(self, state: mechanism.QueryState) -> WindowParams:
        """Returns the parameters of a client without a window."""
        del state
        return WindowParams(
            radii=tf.fill([self.num_layers], self._clipping_radius)
        )

    def layer_norms(self, record: list[tf.Tensor]) -> tf.Tensor:
        """Returns the L2 norm of every layer before clipping: float32 [L]."""
        return tf.stack([clipping.global_norm([layer]) for layer in record])

    def preprocess_record(
        self, params: WindowParams, record: list[tf.Tensor]
    ) -> mechanism.Record:
        """Clips and noises layer by layer.

        Delta_l / max(1, ||Delta_l|| / r_l) + N(0, sigma_l^2).
        """
        norms = self.layer_norms(record)
        norm = tf.norm(norms)
        usable = tf.math.is_finite(norm)
        update, stddevs = [], []
        for index, layer in enumerate(record):
            radius = params.radii[index]
            scale = clipping.clip_factor(norms[index], radius)
            update += clipping.scaled([layer], tf.where(usable, scale, 0.0))
            stddevs.append(self._layer_noise_multiplier * radius)
        clipped = tf.reduce_any(norms > params.radii) & usable
        return mechanism.Record(
            update=noise.add_normal(update, stddevs),
            below_clip=tf.zeros([]),
            weight=tf.ones([]),
            norm=tf.where(usable, norm, 0.0),
            clipped=tf.cast(clipped, tf.float32),
            discarded=tf.cast(~usable, tf.float32),
        )

    def get_noised_result(
        self, sample_state: mechanism.Record, global_state: mechanism.QueryState
    ) -> tuple[
        list[tf.Tensor], mechanism.QueryState, dp_accounting.NonPrivateDpEvent
    ]:
        """Returns the mean of the releases; the server adds nothing."""
        mean = [
            tf.math.divide_no_nan(
                tensor, tf.cast(sample_state.weight, tensor.dtype)
            )
            for tensor in sample_state.update
        ]
        return mean, global_state, dp_accounting.NonPrivateDpEvent()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveLocalDP(local_dp.LocalMechanism):
    """DISCO's local DP, whose radius follows the client's own last updates.

    For every layer l of a client: the radius r_l is the mean of the layer's
    last `window` norms (before noise, of previous rounds), at most
    `clipping_radius`; the release is Delta_l / max(1, ||Delta_l|| / r_l) plus
    N(0, sigma_l^2), sigma_l = 2 r_l zeta, where zeta is sigma over sensitivity
    of one release within the budget (see `LocalDP`).

    With `calibration="classic", composition="basic", layers="separate"` it is
    the published behaviour, sigma_l = 2 r_l sqrt(2 ln(1.25/delta_r))/epsilon_r
    with epsilon_r = epsilon / T, delta_r = delta / T; each of the L layers then
    spends that budget, and the reported epsilon counts all of them.

    The radii come from un-noised norms, so the scale of the noise itself tells
    something that epsilon does not cover; the statement says so.

    Attributes:
      epsilon: The budget of one client over the training.
      delta: In (0, 1).
      clipping_radius: The upper bound of every layer's radius.
      window: How many previous norms of its own a client averages.
      calibration: "analytic" or "classic" (see `LocalDP`).
      composition: "rdp" or "basic" (see `LocalDP`).
      layers: "joint": the layers of a round are one release, within the
        budget together; "separate": each layer spends it, and is charged.
      max_participations: After so many rounds a client sits out, which with
        `composition="rdp"` needs less noise; None: as often as it is drawn.
    """

    epsilon: float
    delta: float
    clipping_radius: float = 1.0
    window: int = 3
    calibration: str = "analytic"
    composition: str = "rdp"
    layers: str = "joint"
    max_participations: int | None = None

    def __post_init__(self):
        set_ = object.__setattr__
        epsilon, delta = local_dp.check_budget(self.epsilon, self.delta)
        set_(self, "epsilon", epsilon)
        set_(self, "delta", delta)
        set_(
            self,
            "clipping_radius",
            _validate.positive(clipping_radius=self.clipping_radius),
        )
        _validate.positive_integer(window=self.window)
        _validate.one_of(local_dp.CALIBRATIONS, calibration=self.calibration)
        _validate.one_of(local_dp.COMPOSITIONS, composition=self.composition)
        _validate.one_of(LAYER_ACCOUNTS, layers=self.layers)
        local_dp.check_participations(self.max_participations)

    def _num_layers(self, deployment: mechanism.Deployment) -> int:
        if deployment.num_variables is None:
            raise ValueError(
                "num_variables must be known to AdaptiveLocalDP, got None."
            )
        return deployment.num_variables

    def releases_per_round(self, deployment: mechanism.Deployment) -> int:
        """Implements `LocalMechanism.releases_per_round`."""
        if self.layers == "joint":
            return 1
        return self._num_layers(deployment)

    def bind(self, deployment: mechanism.Deployment) -> AdaptiveLocalDPQuery:
        """Implements `Mechanism.bind`."""
        return AdaptiveLocalDPQuery(
            clipping_radius=self.clipping_radius,
            window=self.window,
            noise_over_sensitivity=self.noise_over_sensitivity(deployment),
            num_layers=self._num_layers(deployment),
            layers=self.layers,
        )

    def round_event(
        self, round_index: int, deployment: mechanism.Deployment
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.round_event`.

        Each client's noise follows its own radius, so the sum of the noises
        has no bound in terms of the largest radius: no central guarantee is
        claimed beyond the local one.
        """
        del round_index, deployment
        return dp_accounting.NonPrivateDpEvent()

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        together = (
            "All layers of a round are one release."
            if self.layers == "joint"
            else "Every layer of a round is charged as a release of its own."
        )
        return (
            "Adaptive local differential privacy: every client clips each "
            f"layer of its update to the mean of its last {self.window} norms "
            f"(at most {self.clipping_radius:g}) and adds Gaussian noise of "
            f"its own before the update leaves it. {together}"
        )

    def caveats(self) -> tuple[str, ...]:
        """Implements `Mechanism.caveats`."""
        layers = (
            "layers_joint"
            if self.layers == "joint"
            else "layers_charged_separately"
        )
        return (*super().caveats(), "radius_from_unnoised_norms", layers)
