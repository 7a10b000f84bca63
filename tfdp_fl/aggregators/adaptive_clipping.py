"""Adaptive clipping as a TFF aggregation factory."""

from __future__ import annotations

from typing import Any

import tensorflow_federated as tff

from tfdp_fl import schedules
from tfdp_fl.aggregators import mechanism_factory
from tfdp_fl.mechanisms import adaptive_clipping


class AdaptiveClippingFactory(mechanism_factory.MechanismFactory):
    """DP-FedAvg with a clip that follows a quantile (see `AdaptiveClipping`).

    The clip is part of the state: that of the coming round.
    """

    def __init__(
        self,
        *,
        noise_multiplier: schedules.Schedule,
        clients_per_round: schedules.Schedule,
        initial_clip_norm: float = 0.1,
        target_quantile: float = 0.5,
        clip_learning_rate: float = 0.2,
        count_noise_stddev: float | None = None,
        noise_site: str = "server",
        inner_factory: tff.aggregators.UnweightedAggregationFactory
        | None = None,
        **options: Any,
    ):
        """For the arguments see `AdaptiveClipping` and `MechanismFactory`."""
        super().__init__(
            adaptive_clipping.AdaptiveClipping(
                noise_multiplier=noise_multiplier,
                initial_clip_norm=initial_clip_norm,
                target_quantile=target_quantile,
                clip_learning_rate=clip_learning_rate,
                count_noise_stddev=count_noise_stddev,
                noise_site=noise_site,
            ),
            clients_per_round,
            inner_factory,
            **options,
        )
