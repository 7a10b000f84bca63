"""TFF aggregation factories of the mechanisms."""

from tfdp_fl.aggregators.adaptive_clipping import AdaptiveClippingFactory
from tfdp_fl.aggregators.adaptive_local_dp import (
    AdaptiveLocalDPFactory,
    WindowedAdaptiveLocalDPFactory,
)
from tfdp_fl.aggregators.fixed_clipping import FixedClippingFactory
from tfdp_fl.aggregators.local_dp import LocalDPFactory
from tfdp_fl.aggregators.mechanism_factory import (
    MechanismFactory,
    from_mechanism,
)
from tfdp_fl.aggregators.median_clipping import MedianClippingFactory
from tfdp_fl.aggregators.nbafl import NbAFLFactory
from tfdp_fl.aggregators.no_privacy import NoPrivacyFactory
from tfdp_fl.aggregators.query import QueryFactory
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
    "find_aggregator_state",
    "from_mechanism",
]
