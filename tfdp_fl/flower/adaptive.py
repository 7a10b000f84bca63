"""The server's side with a clip norm that follows a quantile."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.flower import fixed, keys
from tfdp_fl.mechanisms import formulas


class DPFedAvgAdaptive(fixed.DPFedAvgFixed):
    """DP-FedAvg with adaptive clipping around any strategy.

    As `DPFedAvgFixed`, and each client reports whether its update's norm was
    at most S. After the round, with the noised fraction b of those that were,

        S <- S exp(-eta (b - gamma)).

    The round's noise belongs to the S with which its clients clipped. Updates
    and count together cost z; the noise on the updates is that of
    z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2).

    The bits reach the server without noise, which it adds to their count:
    `server_side_noising=False` does not hide a client's bit from the server.

    Source: Flower's "Differential Privacy Wrappers", `DPFedAvgAdaptive`;
    Andrew et al. (2021), Algorithm 1 and Theorem 1.

    Attributes:
      clip_norm_lr: eta.
      clip_norm_target_quantile: gamma.
      clip_count_stddev: sigma_b.
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

        Raises:
          TypeError, ValueError: if an argument is not what it should be.
        """
        _validate.positive(init_clip_norm=init_clip_norm)
        super().__init__(
            strategy,
            num_sampled_clients,
            init_clip_norm,
            noise_multiplier,
            server_side_noising,
        )
        self.clip_norm_lr = _validate.non_negative(clip_norm_lr=clip_norm_lr)
        self.clip_norm_target_quantile = _validate.probability(
            clip_norm_target_quantile=clip_norm_target_quantile
        )
        if clip_count_stddev is None:
            clip_count_stddev = 0.0
            if self.noise_multiplier > 0:
                clip_count_stddev = self.num_sampled_clients / 20
        self.clip_count_stddev = _validate.non_negative(
            clip_count_stddev=clip_count_stddev
        )
        if 0 < self.noise_multiplier >= 2 * self.clip_count_stddev:
            raise ValueError(
                "clip_count_stddev must be above noise_multiplier / 2, or the "
                "count alone costs more than the round may; got "
                f"{self.clip_count_stddev!r} (by default num_sampled_clients "
                f"/ 20) and noise_multiplier={self.noise_multiplier!r}."
            )

    @property
    def _update_noise_multiplier(self) -> float:
        return formulas.update_noise_multiplier(
            self.noise_multiplier, self.clip_count_stddev
        )

    def _dp_config(self) -> dict[str, Any]:
        return {**super()._dp_config(), keys.ADAPTIVE_CLIP_ENABLED: True}

    def _next_clip_norm(self, clip_norm: float, results: list) -> float:
        count = 0
        for client, fit_res in results:
            if keys.NORM_BIT not in fit_res.metrics:
                raise KeyError(
                    f"Client {getattr(client, 'cid', client)!r} returned no "
                    f"{keys.NORM_BIT}. Is it wrapped in DPFedAvgNumPyClient?"
                )
            # One client moves the count by one at most, whatever it sends.
            count += bool(fit_res.metrics[keys.NORM_BIT])
        noised = np.random.default_rng().normal(count, self.clip_count_stddev)
        return formulas.next_clip_norm(
            clip_norm,
            float(noised) / self.num_sampled_clients,
            self.clip_norm_target_quantile,
            self.clip_norm_lr,
        )
