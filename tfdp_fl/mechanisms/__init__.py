"""What is released about a cohort: clip and noise, one file each."""

from tfdp_fl.mechanisms.adaptive_clipping import AdaptiveClipping
from tfdp_fl.mechanisms.adaptive_local_dp import AdaptiveLocalDP
from tfdp_fl.mechanisms.cohort_query import CohortQuery
from tfdp_fl.mechanisms.contribution import (
    NUM_DIAGNOSTICS,
    ClientContext,
    ClientWeighting,
    Contribution,
    PrivacyContext,
    RoundState,
)
from tfdp_fl.mechanisms.correlated_noise import CorrelatedNoise
from tfdp_fl.mechanisms.declaration import (
    by_name,
    names,
    non_negative,
    parameter,
    positive,
    register,
)
from tfdp_fl.mechanisms.fixed_clipping import (
    FixedClipping,
    NoPrivacy,
    noise_multiplier_parameter,
)
from tfdp_fl.mechanisms.local_dp import LocalDP
from tfdp_fl.mechanisms.mechanism import CalibrationTarget, Mechanism
from tfdp_fl.mechanisms.median_clipping import (
    MedianClipping,
    default_median_noise_multiplier,
)
from tfdp_fl.mechanisms.nbafl import NbAFL
from tfdp_fl.mechanisms.noise import add_normal
from tfdp_fl.mechanisms.per_layer_clipping import PerLayerClipping
from tfdp_fl.mechanisms.query_mechanism import QueryMechanism

__all__ = [
    "NUM_DIAGNOSTICS",
    "AdaptiveClipping",
    "AdaptiveLocalDP",
    "CalibrationTarget",
    "ClientContext",
    "ClientWeighting",
    "CohortQuery",
    "Contribution",
    "CorrelatedNoise",
    "FixedClipping",
    "LocalDP",
    "Mechanism",
    "MedianClipping",
    "NbAFL",
    "NoPrivacy",
    "PerLayerClipping",
    "PrivacyContext",
    "QueryMechanism",
    "RoundState",
    "add_normal",
    "by_name",
    "default_median_noise_multiplier",
    "names",
    "noise_multiplier_parameter",
    "non_negative",
    "parameter",
    "positive",
    "register",
]
