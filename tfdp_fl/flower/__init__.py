"""Client-level differential privacy around Flower's strategies and clients.

Nothing here imports Flower: the wrappers rely only on the methods of the wrapped
objects. Clients do not import TensorFlow.
"""

from tfdp_fl.flower.client import DPFedAvgNumPyClient, private_mod, silo_app
from tfdp_fl.flower.dp_fed_avg import DPFedAvg, DPFedAvgAdaptive, DPFedAvgFixed
from tfdp_fl.flower.history import ChargedRound
from tfdp_fl.flower.private_rounds import RoundNotConfiguredError
from tfdp_fl.flower.private_strategy import PrivateStrategy

__all__ = [
    "ChargedRound",
    "DPFedAvg",
    "DPFedAvgAdaptive",
    "DPFedAvgFixed",
    "DPFedAvgNumPyClient",
    "PrivateStrategy",
    "RoundNotConfiguredError",
    "private_mod",
    "silo_app",
]
