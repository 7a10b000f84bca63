"""Client-level differential privacy for Keras in federated learning."""

import importlib

from tfdp_fl import accounting, datasets, losses
from tfdp_fl.correlated_noise import BLT, BandedToeplitz, Tree
from tfdp_fl.keras import (
    DPFederatedModel,
    callbacks,
    make_private,
    validate,
)
from tfdp_fl.mechanisms import (
    AdaptiveClipping,
    AdaptiveLocalDP,
    CorrelatedNoise,
    FixedClipping,
    LocalDP,
    MedianClipping,
    NbAFL,
    NoPrivacy,
    QueryMechanism,
)
from tfdp_fl.version import __version__

__all__ = [
    "BLT",
    "AdaptiveClipping",
    "AdaptiveLocalDP",
    "BandedToeplitz",
    "CorrelatedNoise",
    "DPFederatedModel",
    "FixedClipping",
    "LocalDP",
    "MedianClipping",
    "NbAFL",
    "NoPrivacy",
    "QueryMechanism",
    "Tree",
    "__version__",
    "accounting",
    "callbacks",
    "datasets",
    "losses",
    "make_private",
    "validate",
]

# Rooms that import TFF, or that few people enter, open when they are used.
_ON_DEMAND = (
    "aggregators",
    "auditing",
    "flower",
    "learning",
    "runtimes",
    "secure_aggregation",
)


def __getattr__(name: str):
    if name in _ON_DEMAND:
        return importlib.import_module(f"tfdp_fl.{name}")
    raise AttributeError(f"module 'tfdp_fl' has no attribute {name!r}")
