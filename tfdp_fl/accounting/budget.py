"""A privacy budget, and the error for exceeding it."""

from __future__ import annotations

import dataclasses

from tfdp_fl import _validate
from tfdp_fl.accounting import charge as charge_lib


class BudgetExceededError(RuntimeError):
    """The release would exceed the budget; nothing was written."""


@dataclasses.dataclass(frozen=True)
class PrivacyBudget:
    """The most that releases may cost together.

    Attributes:
      epsilon: The largest epsilon allowed, above 0.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld", with which epsilon is computed.

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
