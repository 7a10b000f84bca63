"""Privacy accounting of the rounds that actually ran."""

from tfdp_fl.accounting.account import ChargeError, PrivacyAccount, Receipt
from tfdp_fl.accounting.accountant import (
    BudgetExceededError,
    PrivacyAccountant,
    PrivacyBudget,
    select_accountant,
)
from tfdp_fl.accounting.charge import Participation, Relation, RoundCharge
from tfdp_fl.accounting.gaussian import (
    analytic_noise_multiplier,
    epsilon_of_mu_squared,
    gaussian_delta,
    gaussian_epsilon,
)
from tfdp_fl.accounting.ledger import (
    LedgerContents,
    LedgerEntry,
    LedgerEntryError,
    LedgerError,
    LedgerForkedError,
    LedgerInUseError,
    LedgerMovedError,
    LedgerTamperedError,
    LedgerWriteError,
    PrivacyLedger,
    epsilon_from_ledger,
)
from tfdp_fl.accounting.planning import (
    calibrate,
    calibrate_noise_multiplier,
    delta,
    epsilon,
    max_rounds,
)
from tfdp_fl.accounting.rounding import format_factor_up, format_up
from tfdp_fl.accounting.statement import CAVEATS, StatementFacts, privacy_statement

__all__ = [
    "CAVEATS",
    "BudgetExceededError",
    "ChargeError",
    "LedgerContents",
    "LedgerEntry",
    "LedgerEntryError",
    "LedgerError",
    "LedgerForkedError",
    "LedgerInUseError",
    "LedgerMovedError",
    "LedgerTamperedError",
    "LedgerWriteError",
    "Participation",
    "PrivacyAccount",
    "PrivacyAccountant",
    "PrivacyBudget",
    "PrivacyLedger",
    "Receipt",
    "Relation",
    "RoundCharge",
    "StatementFacts",
    "analytic_noise_multiplier",
    "calibrate",
    "calibrate_noise_multiplier",
    "delta",
    "epsilon",
    "epsilon_from_ledger",
    "epsilon_of_mu_squared",
    "format_factor_up",
    "format_up",
    "gaussian_delta",
    "gaussian_epsilon",
    "max_rounds",
    "privacy_statement",
    "select_accountant",
]
