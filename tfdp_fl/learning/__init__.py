"""Learning processes of `tff.learning` with a mechanism inside."""

from tfdp_fl.learning.fed_avg import DPLearningProcess, build_dp_fed_avg
from tfdp_fl.learning.privacy import Epsilon, epsilon, privacy_charges

__all__ = [
    "DPLearningProcess",
    "Epsilon",
    "build_dp_fed_avg",
    "epsilon",
    "privacy_charges",
]
