"""TFF aggregation factories of the mechanisms."""

from tfdp_fl.aggregators.adaptive_local_dp import WindowedAdaptiveLocalDPFactory
from tfdp_fl.aggregators.mechanism_factory import (
    MechanismFactory,
    from_mechanism,
)
from tfdp_fl.aggregators.named import (
    AdaptiveClippingFactory,
    AdaptiveLocalDPFactory,
    CorrelatedNoiseFactory,
    FixedClippingFactory,
    LocalDPFactory,
    MedianClippingFactory,
    NoPrivacyFactory,
    QueryFactory,
    factory_of,
)
from tfdp_fl.aggregators.nbafl import NbAFLFactory
from tfdp_fl.aggregators.state import (
    AggregatorState,
    RoundHistory,
    accountable_state,
    extract_dp_event,
    find_aggregator_state,
)

__all__ = [
    "AdaptiveClippingFactory",
    "AdaptiveLocalDPFactory",
    "AggregatorState",
    "CorrelatedNoiseFactory",
    "FixedClippingFactory",
    "LocalDPFactory",
    "MechanismFactory",
    "MedianClippingFactory",
    "NbAFLFactory",
    "NoPrivacyFactory",
    "QueryFactory",
    "RoundHistory",
    "WindowedAdaptiveLocalDPFactory",
    "accountable_state",
    "extract_dp_event",
    "factory_of",
    "find_aggregator_state",
    "from_mechanism",
]
