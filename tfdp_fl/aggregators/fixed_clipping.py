"""Fixed clipping as a TFF aggregation factory."""

from __future__ import annotations

from typing import Any

import tensorflow_federated as tff

from tfdp_fl import schedules
from tfdp_fl.aggregators import mechanism_factory
from tfdp_fl.mechanisms import fixed_clipping


class FixedClippingFactory(mechanism_factory.MechanismFactory):
    """DP-FedAvg with a clip that does not move (see `FixedClipping`)."""

    def __init__(
        self,
        *,
        clip_norm: float,
        noise_multiplier: schedules.Schedule,
        clients_per_round: schedules.Schedule,
        noise_site: str = "server",
        inner_factory: tff.aggregators.UnweightedAggregationFactory
        | None = None,
        **options: Any,
    ):
        """For the arguments see `FixedClipping` and `MechanismFactory`."""
        super().__init__(
            fixed_clipping.FixedClipping(
                clip_norm=clip_norm,
                noise_multiplier=noise_multiplier,
                noise_site=noise_site,
            ),
            clients_per_round,
            inner_factory,
            **options,
        )
