"""How a round runs: client update, compiled cohort, server update."""

from tfdp_fl.engine.cohort import Executor, PendingRound, RoundInputs
from tfdp_fl.engine.engine import CohortEngine, Trials, needs_fine_grid
from tfdp_fl.engine.program import CLIENT_ERRORS
from tfdp_fl.engine.trainer import Training

__all__ = [
    "CLIENT_ERRORS",
    "CohortEngine",
    "Executor",
    "PendingRound",
    "RoundInputs",
    "Training",
    "Trials",
    "needs_fine_grid",
]
