"""Training runs that are defined by settings, for the scripts and the sweeps."""

from tfdp_fl.experiments.settings import Settings
from tfdp_fl.experiments.training import Prepared, prepare, run

__all__ = ["Prepared", "Settings", "prepare", "run"]
