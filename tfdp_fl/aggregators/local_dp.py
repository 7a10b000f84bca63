"""Local differential privacy as a TFF aggregation factory."""

from __future__ import annotations

from typing import Any

import tensorflow_federated as tff

from tfdp_fl import schedules
from tfdp_fl.aggregators import mechanism_factory
from tfdp_fl.mechanisms import local_dp


class LocalDPFactory(mechanism_factory.MechanismFactory):
    """Every client noises its own release (see `LocalDP`).

    A budget (`epsilon` and `delta`) is one client's over the whole training,
    and needs `rounds`.
    """

    def __init__(
        self,
        *,
        clip_norm: float,
        clients_per_round: schedules.Schedule,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        calibration: str = "analytic",
        composition: str = "rdp",
        inner_factory: tff.aggregators.UnweightedAggregationFactory
        | None = None,
        **options: Any,
    ):
        """For the arguments see `LocalDP` and `MechanismFactory`."""
        super().__init__(
            local_dp.LocalDP(
                clip_norm=clip_norm,
                epsilon=epsilon,
                delta=delta,
                noise_multiplier=noise_multiplier,
                calibration=calibration,
                composition=composition,
            ),
            clients_per_round,
            inner_factory,
            **options,
        )
