"""Plain federated averaging as a TFF aggregation factory."""

from __future__ import annotations

from typing import Any

import tensorflow_federated as tff

from tfdp_fl import schedules
from tfdp_fl.aggregators import mechanism_factory
from tfdp_fl.mechanisms import no_privacy


class NoPrivacyFactory(mechanism_factory.MechanismFactory):
    """The mean of the updates, for the baseline (see `NoPrivacy`)."""

    def __init__(
        self,
        *,
        clients_per_round: schedules.Schedule,
        inner_factory: tff.aggregators.UnweightedAggregationFactory
        | None = None,
        **options: Any,
    ):
        """For the arguments see `MechanismFactory`.

        The mean is over the clients that answered; `clients_per_round` is not
        used for it.
        """
        super().__init__(
            no_privacy.NoPrivacy(), clients_per_round, inner_factory, **options
        )
