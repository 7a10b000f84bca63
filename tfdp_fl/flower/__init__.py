"""Client-level differential privacy around Flower's strategies and clients.

Nothing here imports Flower: the wrappers go by the shape of what they wrap.
TensorFlow is imported only by what clips at the server (`server_clipping`).
"""

from tfdp_fl.flower.adaptive import DPFedAvgAdaptive
from tfdp_fl.flower.any_mechanism import DPFedAvg
from tfdp_fl.flower.client import DPFedAvgNumPyClient
from tfdp_fl.flower.errors import (
    RoundError,
    RoundNotConfiguredError,
    RoundsAbandonedError,
)
from tfdp_fl.flower.fixed import DPFedAvgFixed
from tfdp_fl.flower.mod import private_mod
from tfdp_fl.flower.private_strategy import PrivateStrategy
from tfdp_fl.flower.rounds import ReleasedRound

__all__ = [
    "DPFedAvg",
    "DPFedAvgAdaptive",
    "DPFedAvgFixed",
    "DPFedAvgNumPyClient",
    "PrivateStrategy",
    "ReleasedRound",
    "RoundError",
    "RoundNotConfiguredError",
    "RoundsAbandonedError",
    "private_mod",
]
