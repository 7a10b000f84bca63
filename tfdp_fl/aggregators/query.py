"""Any TF-Privacy query as a TFF aggregation factory."""

from __future__ import annotations

from typing import Any

import dp_accounting
import tensorflow_federated as tff
import tensorflow_privacy as tfp

from tfdp_fl import schedules
from tfdp_fl.aggregators import mechanism_factory
from tfdp_fl.mechanisms import query_mechanism


class QueryFactory(mechanism_factory.MechanismFactory):
    """Any sum query of TF-Privacy (see `QueryMechanism`).

    Next to `tff.aggregators.DifferentiallyPrivateFactory(query)`: a NaN or an
    Inf is replaced by zero first, the result is the mean, and the event that
    is charged is the one given here. Records are added up by the inner factory;
    a query whose `accumulate_preprocessed_record` is not a sum cannot be used.
    """

    def __init__(
        self,
        *,
        query: tfp.SumAggregationDPQuery,
        dp_event: dp_accounting.DpEvent,
        clients_per_round: schedules.Schedule,
        inner_factory: tff.aggregators.UnweightedAggregationFactory
        | None = None,
        **options: Any,
    ):
        """For the arguments see `QueryMechanism` and `MechanismFactory`."""
        super().__init__(
            query_mechanism.QueryMechanism(query=query, dp_event=dp_event),
            clients_per_round,
            inner_factory,
            **options,
        )
