"""TFF aggregation factories of the mechanisms: the public names of `tfdp_fl.tff`."""

from tfdp_fl.tff.mechanism_factory import (
    AdaptiveClippingFactory,
    AdaptiveLocalDPFactory,
    CorrelatedNoiseFactory,
    FixedClippingFactory,
    LocalDPFactory,
    MechanismFactory,
    MedianClippingFactory,
    NbAFLFactory,
    NoPrivacyFactory,
    PerLayerClippingFactory,
    QueryFactory,
    WeightsFactory,
    factory_of,
    from_mechanism,
)
from tfdp_fl.tff.state import (
    AggregatorState,
    RoundHistory,
    accounted_state,
    with_cohort,
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
    "PerLayerClippingFactory",
    "QueryFactory",
    "RoundHistory",
    "WeightsFactory",
    "accounted_state",
    "factory_of",
    "from_mechanism",
    "with_cohort",
]
