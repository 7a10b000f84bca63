"""Privacy accounting of what really ran."""

from tfdp_fl.accounting.accountant import PrivacyAccountant
from tfdp_fl.accounting.calibration import calibrate
from tfdp_fl.accounting.charge import RoundCharge
from tfdp_fl.accounting.gaussian import (
    analytic_noise_multiplier,
    classic_noise_multiplier,
    gaussian_delta,
    gaussian_epsilon,
)
from tfdp_fl.accounting.local import LocalAccount
from tfdp_fl.accounting.planning import (
    calibrate_noise_multiplier,
    delta,
    epsilon,
    max_rounds,
)

__all__ = [
    "LocalAccount",
    "PrivacyAccountant",
    "RoundCharge",
    "analytic_noise_multiplier",
    "calibrate",
    "calibrate_noise_multiplier",
    "classic_noise_multiplier",
    "delta",
    "epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "max_rounds",
]
