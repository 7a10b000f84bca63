"""Client-level differential privacy for Keras in federated learning."""

import importlib
from typing import TYPE_CHECKING

from tfdp_fl.version import __version__

if TYPE_CHECKING:
    from tfdp_fl import accounting, datasets, losses
    from tfdp_fl.correlated_noise import BLT, BandedToeplitz, Tree
    from tfdp_fl.keras import (
        DPFederatedModel,
        PrivateMetrics,
        callbacks,
        validate,
    )
    from tfdp_fl.keras.make_private import make_private
    from tfdp_fl.mechanisms import (
        AdaptiveClipping,
        AdaptiveLocalDP,
        ClientWeighting,
        CorrelatedNoise,
        FixedClipping,
        LocalDP,
        MedianClipping,
        NbAFL,
        NoPrivacy,
        QueryMechanism,
    )

# Each room opens when it is used: a server of Flower's that only adds up needs
# no TensorFlow. What everybody may need is named in full, for the BUILD files;
# few people enter the other rooms.
_ROOMS = {
    "accounting": lambda: importlib.import_module("tfdp_fl.accounting"),
    "correlated_noise": lambda: importlib.import_module("tfdp_fl.correlated_noise"),
    "datasets": lambda: importlib.import_module("tfdp_fl.datasets"),
    "keras": lambda: importlib.import_module("tfdp_fl.keras"),
    "losses": lambda: importlib.import_module("tfdp_fl.losses"),
    "mechanisms": lambda: importlib.import_module("tfdp_fl.mechanisms"),
}
_OTHER_ROOMS = (
    "aggregators",
    "auditing",
    "engine",
    "experiments",
    "features",
    "flower",
    "learning",
    "runtimes",
    "sampling",
    "schedules",
    "secure_aggregation",
)
# What rooms hand on under the package's own name.
_FROM = {
    "AdaptiveClipping": "mechanisms",
    "AdaptiveLocalDP": "mechanisms",
    "BLT": "correlated_noise",
    "BandedToeplitz": "correlated_noise",
    "ClientWeighting": "mechanisms",
    "CorrelatedNoise": "mechanisms",
    "DPFederatedModel": "keras",
    "FixedClipping": "mechanisms",
    "LocalDP": "mechanisms",
    "MedianClipping": "mechanisms",
    "NbAFL": "mechanisms",
    "NoPrivacy": "mechanisms",
    "PrivateMetrics": "keras",
    "QueryMechanism": "mechanisms",
    "Tree": "correlated_noise",
    "callbacks": "keras",
    "make_private": "keras",
    "validate": "keras",
}

__all__ = [
    "BLT",
    "AdaptiveClipping",
    "AdaptiveLocalDP",
    "BandedToeplitz",
    "ClientWeighting",
    "CorrelatedNoise",
    "DPFederatedModel",
    "FixedClipping",
    "LocalDP",
    "MedianClipping",
    "NbAFL",
    "NoPrivacy",
    "PrivateMetrics",
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


def __getattr__(name: str):
    if name in _FROM:
        value = getattr(_ROOMS[_FROM[name]](), name)
    elif name in _ROOMS:
        value = _ROOMS[name]()
    elif name in _OTHER_ROOMS:
        value = importlib.import_module(f"tfdp_fl.{name}")
    else:
        raise AttributeError(f"module 'tfdp_fl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM, *_ROOMS, *_OTHER_ROOMS})
