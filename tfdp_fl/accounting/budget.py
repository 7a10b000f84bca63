"""The one type of a budget."""

from __future__ import annotations

import dataclasses

from tfdp_fl import _validate
from tfdp_fl.accounting import charge as charge_lib


class BudgetExceededError(RuntimeError):
    """The release would spend more than the budget; nothing was written."""


@dataclasses.dataclass(frozen=True)
class PrivacyBudget:
    """The most that releases may cost together.

    Attributes:
      epsilon: The most that may be spent, above 0.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld": what epsilon is computed by.

    Raises:
      TypeError, ValueError: An argument is not allowed.
    """

    epsilon: float
    delta: float
    accountant: str = "rdp"

    def __post_init__(self):
        _validate.positive(epsilon=self.epsilon)
        _validate.inside_unit_interval(delta=self.delta)
        _validate.one_of(charge_lib.ACCOUNTANTS, accountant=self.accountant)
