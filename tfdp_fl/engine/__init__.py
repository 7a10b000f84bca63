"""How a round runs: client update, compiled cohort, server update."""

from tfdp_fl.engine.cohort import Executor, PendingRound, RoundInputs
from tfdp_fl.engine.engine import CLIENT_ERRORS, CohortEngine
from tfdp_fl.engine.trainer import LocalTraining

__all__ = [
    "CLIENT_ERRORS",
    "CohortEngine",
    "Executor",
    "LocalTraining",
    "PendingRound",
    "RoundInputs",
]
