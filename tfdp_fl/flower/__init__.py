"""Client-level differential privacy around Flower's strategies and clients.

Nothing here imports Flower: the wrappers go by the shape of what they wrap.
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
from tfdp_fl.flower.rounds import ReleasedRound

__all__ = [
    "DPFedAvg",
    "DPFedAvgAdaptive",
    "DPFedAvgFixed",
    "DPFedAvgNumPyClient",
    "ReleasedRound",
    "RoundError",
    "RoundNotConfiguredError",
    "RoundsAbandonedError",
]
