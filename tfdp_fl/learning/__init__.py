"""Learning processes of `tff.learning` with a mechanism: names of `tfdp_fl.tff`."""

from tfdp_fl.tff.fed_avg import DPLearningProcess, build_dp_fed_avg
from tfdp_fl.tff.privacy import Epsilon, epsilon, privacy_charges

__all__ = [
    "DPLearningProcess",
    "Epsilon",
    "build_dp_fed_avg",
    "epsilon",
    "privacy_charges",
]
