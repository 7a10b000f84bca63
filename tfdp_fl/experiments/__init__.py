"""Training runs from settings: what the scripts and the sweeps are made of."""

from tfdp_fl.experiments.settings import Settings
from tfdp_fl.experiments.training import Prepared, prepare, run

__all__ = ["Prepared", "Settings", "prepare", "run"]
