"""The server's side with a clip norm that follows a quantile."""

from __future__ import annotations

from typing import Any

from tfdp_fl import _validate, mechanisms
from tfdp_fl.flower import fixed
from tfdp_fl.mechanisms import formulas


class DPFedAvgAdaptive(fixed.DPFedAvgFixed):
    """DP-FedAvg with adaptive clipping around any strategy.

    As `DPFedAvgFixed`, and each client reports whether its update's norm was
    at most S. After the round, with the noised fraction b of those that were,

        S <- S exp(-eta (b - gamma)).

    The round's noise belongs to the S with which its clients clipped. Updates
    and count together cost z; the noise on the updates is that of
    z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2).

    S never falls below `min_clip_norm`: it would take as many rounds to come
    back, a factor of exp(eta (1 - gamma)) or exp(eta gamma) each. The floor
    looks at no data, so it costs nothing.

    The bits reach the server without noise, which it adds to their count:
    `server_side_noising=False` does not hide a client's bit from the server.

    Source: Flower's "Differential Privacy Wrappers", `DPFedAvgAdaptive`;
    Andrew et al. (2021), Algorithm 1 and Theorem 1.

    Attributes:
      clip_norm_lr: eta.
      clip_norm_target_quantile: gamma.
      clip_count_stddev: sigma_b.
      min_clip_norm: the smallest S.
    """

    def __init__(
        self,
        strategy: Any,
        num_sampled_clients: int,
        init_clip_norm: float = 0.1,
        noise_multiplier: float = 1,
        server_side_noising: bool = True,
        clip_norm_lr: float = 0.2,
        clip_norm_target_quantile: float = 0.5,
        clip_count_stddev: float | None = None,
        *,
        min_clip_norm: float = 1e-8,
        **options: Any,
    ):
        """Wraps a strategy.

        Args:
          strategy: see `DPFedAvgFixed`.
          num_sampled_clients: m.
          init_clip_norm: S of the first round.
          noise_multiplier: z, what a round's two releases together cost.
          server_side_noising: whether the server adds the updates' noise.
          clip_norm_lr: eta.
          clip_norm_target_quantile: gamma.
          clip_count_stddev: sigma_b, above z / 2; None means m / 20, or 0 if
            there is no noise at all.
          min_clip_norm: S never falls below it. Weights of 1 in float32 are
            6e-8 apart downwards, so that an update of norm 1e-8 is lost to
            their rounding: a smaller S is of no use to a model.
          **options: the keyword-only arguments of `DPFedAvgFixed`.

        Raises:
          TypeError, ValueError: if an argument is not what it should be.
        """
        init_clip_norm = _validate.positive(init_clip_norm=init_clip_norm)
        self.min_clip_norm = _validate.positive(min_clip_norm=min_clip_norm)
        ledger = options.pop("ledger", None)
        super().__init__(
            strategy,
            num_sampled_clients,
            max(init_clip_norm, self.min_clip_norm),
            noise_multiplier,
            server_side_noising,
            **options,
        )
        self.clip_norm_lr = _validate.non_negative(clip_norm_lr=clip_norm_lr)
        self.clip_norm_target_quantile = _validate.probability(
            clip_norm_target_quantile=clip_norm_target_quantile
        )
        if clip_count_stddev is None:
            clip_count_stddev = 0.0
            if self.noise_multiplier > 0:
                clip_count_stddev = (
                    self.num_sampled_clients * formulas.COUNT_NOISE_FRACTION
                )
        self.clip_count_stddev = _validate.non_negative(
            clip_count_stddev=clip_count_stddev
        )
        formulas.check_count_noise(
            self.noise_multiplier,
            self.clip_count_stddev,
            "clip_count_stddev",
            "num_sampled_clients",
        )
        self._open(ledger)

    def _current_mechanism(self) -> mechanisms.Mechanism:
        return mechanisms.AdaptiveClipping(
            noise_multiplier=self.noise_multiplier,
            # Of no consequence: S of this round is `clip_norm`, whatever it is.
            initial_clip_norm=1.0,
            target_quantile=self.clip_norm_target_quantile,
            clip_learning_rate=self.clip_norm_lr,
            count_noise_stddev=self.clip_count_stddev,
            noise_site=self._noise_site,
        )

    def _arguments(self) -> dict[str, Any]:
        arguments = super()._arguments()
        arguments["init_clip_norm"] = arguments.pop("clip_norm")
        return {
            **arguments,
            "clip_norm_lr": self.clip_norm_lr,
            "clip_norm_target_quantile": self.clip_norm_target_quantile,
            "clip_count_stddev": self.clip_count_stddev,
            "min_clip_norm": self.min_clip_norm,
        }

    def _bounded(self, clip_norm: float) -> float:
        return max(clip_norm, self.min_clip_norm)
