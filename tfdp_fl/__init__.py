"""Client-level differential privacy for Keras in federated learning."""

import importlib
from typing import TYPE_CHECKING

from tfdp_fl.version import __version__

if TYPE_CHECKING:
    from tfdp_fl import accounting, datasets, losses
    from tfdp_fl.keras import DPFederatedModel, callbacks, make_private
    from tfdp_fl.mechanisms import (
        AdaptiveClipping,
        AdaptiveLocalDP,
        FixedClipping,
        LocalDP,
        MedianClipping,
        NbAFL,
        NoPrivacy,
        QueryMechanism,
    )

# Rooms, and what they hand on under the package's own name. Each opens when it
# is used: a server of Flower's that only adds up needs no TensorFlow, and few
# people enter the room of TFF.
_ROOMS = (
    "accounting",
    "aggregators",
    "datasets",
    "engine",
    "experiments",
    "flower",
    "keras",
    "learning",
    "losses",
    "mechanisms",
    "runtimes",
    "sampling",
    "schedules",
    "secure_aggregation",
)
_FROM = {
    "AdaptiveClipping": "mechanisms",
    "AdaptiveLocalDP": "mechanisms",
    "DPFederatedModel": "keras",
    "FixedClipping": "mechanisms",
    "LocalDP": "mechanisms",
    "MedianClipping": "mechanisms",
    "NbAFL": "mechanisms",
    "NoPrivacy": "mechanisms",
    "QueryMechanism": "mechanisms",
    "callbacks": "keras",
    "make_private": "keras",
}

__all__ = [
    "AdaptiveClipping",
    "AdaptiveLocalDP",
    "DPFederatedModel",
    "FixedClipping",
    "LocalDP",
    "MedianClipping",
    "NbAFL",
    "NoPrivacy",
    "QueryMechanism",
    "__version__",
    "accounting",
    "callbacks",
    "datasets",
    "losses",
    "make_private",
]


def __getattr__(name: str):
    if name in _FROM:
        room = importlib.import_module(f"tfdp_fl.{_FROM[name]}")
        value = getattr(room, name)
    elif name in _ROOMS:
        value = importlib.import_module(f"tfdp_fl.{name}")
    else:
        raise AttributeError(f"module 'tfdp_fl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM, *_ROOMS})
