"""Median clipping as a TFF aggregation factory."""

from __future__ import annotations

from typing import Any

import tensorflow_federated as tff

from tfdp_fl import schedules
from tfdp_fl.aggregators import mechanism_factory
from tfdp_fl.mechanisms import median_clipping


class MedianClippingFactory(mechanism_factory.MechanismFactory):
    """Clips to the median norm of the same round (see `MedianClipping`).

    A `next` has two phases: the norms go to the server, the clip comes back,
    then the clipped updates are summed. The second depends on the first, so
    the process has no mergeable form: it runs on one executor stack, not split
    over several aggregators.
    """

    def __init__(
        self,
        *,
        noise_multiplier: schedules.Schedule,
        clients_per_round: schedules.Schedule,
        median_noise_multiplier: float | None = None,
        noise_site: str = "server",
        inner_factory: tff.aggregators.UnweightedAggregationFactory
        | None = None,
        **options: Any,
    ):
        """For the arguments see `MedianClipping` and `MechanismFactory`."""
        super().__init__(
            median_clipping.MedianClipping(
                noise_multiplier=noise_multiplier,
                median_noise_multiplier=median_noise_multiplier,
                noise_site=noise_site,
            ),
            clients_per_round,
            inner_factory,
            **options,
        )
