"""What is released about a cohort: clip and noise, one file each."""

from tfdp_fl.mechanisms.adaptive_clipping import AdaptiveClipping
from tfdp_fl.mechanisms.adaptive_local_dp import AdaptiveLocalDP
from tfdp_fl.mechanisms.fixed_clipping import FixedClipping
from tfdp_fl.mechanisms.local_dp import LocalDP
from tfdp_fl.mechanisms.mechanism import (
    CohortQuery,
    Deployment,
    Mechanism,
    Record,
)
from tfdp_fl.mechanisms.median_clipping import (
    MedianClipping,
    default_median_noise_multiplier,
)
from tfdp_fl.mechanisms.nbafl import NbAFL
from tfdp_fl.mechanisms.no_privacy import NoPrivacy
from tfdp_fl.mechanisms.query_mechanism import QueryMechanism

__all__ = [
    "AdaptiveClipping",
    "AdaptiveLocalDP",
    "CohortQuery",
    "Deployment",
    "FixedClipping",
    "LocalDP",
    "Mechanism",
    "MedianClipping",
    "NbAFL",
    "NoPrivacy",
    "QueryMechanism",
    "Record",
    "default_median_noise_multiplier",
]
