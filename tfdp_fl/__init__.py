"""Client-level differential privacy for Keras in federated learning."""

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdp_fl import accounting, datasets, losses
    from tfdp_fl.datasets import FederatedDataset, limit_rows_per_client
    from tfdp_fl.keras import DPFederatedModel, PrivateMetrics, callbacks, validate
    from tfdp_fl.keras.make_private import make_private
    from tfdp_fl.matrix_factorization import BLT, BandedToeplitz
    from tfdp_fl.mechanisms import (
        AdaptiveClipping,
        AdaptiveLocalDP,
        ClientWeighting,
        CorrelatedNoise,
        FixedClipping,
        LocalDP,
        Mechanism,
        MedianClipping,
        NbAFL,
        NoPrivacy,
        PerLayerClipping,
        QueryMechanism,
    )
    from tfdp_fl.search import PrivateScore, PrivateSearch, PublicScore
    from tfdp_fl.silo import Silo, SiloUpdate

# The one place where the version is written.
__version__ = "0.1.0"

# A package is imported when it is first used: a Flower server that only adds up
# needs no TensorFlow.
_PACKAGES = {
    module.name
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
}
# Those that hand names on to here, each after all that it imports.
_REEXPORTING_PACKAGES = (
    "mechanisms",
    "matrix_factorization",
    "datasets",
    "keras",
    "search",
    "silo",
)

__all__ = [
    "BLT",
    "AdaptiveClipping",
    "AdaptiveLocalDP",
    "BandedToeplitz",
    "ClientWeighting",
    "CorrelatedNoise",
    "DPFederatedModel",
    "FederatedDataset",
    "FixedClipping",
    "LocalDP",
    "Mechanism",
    "MedianClipping",
    "NbAFL",
    "NoPrivacy",
    "PerLayerClipping",
    "PrivateMetrics",
    "PrivateScore",
    "PrivateSearch",
    "PublicScore",
    "QueryMechanism",
    "Silo",
    "SiloUpdate",
    "__version__",
    "accounting",
    "callbacks",
    "datasets",
    "limit_rows_per_client",
    "losses",
    "make_private",
    "validate",
]


def __getattr__(name: str):
    if name in _PACKAGES:
        value = importlib.import_module(f"tfdp_fl.{name}")
    elif name in __all__:
        packages = (
            importlib.import_module(f"tfdp_fl.{package}")
            for package in _REEXPORTING_PACKAGES
        )
        value = next(
            getattr(package, name) for package in packages if hasattr(package, name)
        )
    else:
        raise AttributeError(f"module 'tfdp_fl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
