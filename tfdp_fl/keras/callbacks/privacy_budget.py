"""Ends a training before it overspends."""

from __future__ import annotations

import math
import warnings
from typing import Any

from tfdp_fl import _validate
from tfdp_fl.accounting import RoundCharge
from tfdp_fl.keras.callbacks.federated_callback import FederatedCallback
from tfdp_fl.keras.training_setup import PrivacyTarget


class PrivacyBudget(FederatedCallback):
    """Ends the training before the round that would overspend a budget.

    Whatever the schedules of noise and cohort size, a round is run only if the
    epsilon after it, at `delta`, is still within the budget (Geyer et al.
    2017, Algorithm 1, lines 4 and 5, put right: the check comes first).
    A second or resumed `fit` of the same model goes on with what was spent.

    Attributes:
      epsilon: The most that may be spent.
      delta: At this delta.
      accountant: "rdp", "pld", or None for the model's own.
      stopped_before_round: The round (from 0) that was not run, or None.
    """

    _name = "PrivacyBudget"

    def __init__(self, epsilon: float, delta: float, accountant: str | None = None):
        super().__init__()
        self.epsilon = _validate.positive(epsilon=epsilon)
        self.delta = _validate.inside_unit_interval(delta=delta)
        self.accountant = _validate.one_of((None, "rdp", "pld"), accountant=accountant)
        self.stopped_before_round: int | None = None
        # Rounds before this one are known to fit, unless something else was
        # charged since: `_counted` is what was known then.
        self._affordable_before = 0
        self._counted: Any = None

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Says at the start if the budget ends before the rounds do."""
        fed, asked = self.federated_model, last_round - first_round
        self.stopped_before_round = None
        # First: another thread may charge an evaluation at any time.
        self._counted = fed.run.spending.others
        allowed = fed.costs.affordable_rounds(
            self.epsilon, self.delta, asked, self.accountant
        )
        # Rounds that are abandoned cost nothing, so it can only be more.
        self._affordable_before = first_round + allowed
        if allowed < asked:
            # Which clients later cohorts draw is known of shuffled ones only.
            at_least = fed.run.spending.by_client and fed.setup.sampling != "shuffled"
            self._say_what_is_allowed(
                f"{self._name}: epsilon={self.epsilon:g} at delta={self.delta:g} "
                f"allows {'at least ' * at_least}{allowed} of the {asked} rounds "
                f"asked for; training {'may' if at_least else 'will'} end there."
            )

    def _say_what_is_allowed(self, message: str) -> None:
        self.federated_model.say(message)

    def allow_round(self, round_index: int) -> bool:
        """Returns False if the round would overspend the budget."""
        fed = self.federated_model
        counted = fed.run.spending.others
        if round_index < self._affordable_before and counted == self._counted:
            return True
        after = fed.costs.epsilon_after_round(round_index, self.delta, self.accountant)
        if after <= self.epsilon:
            return True
        self.stopped_before_round = round_index
        fed.say(
            f"{self._name}: stopped before round {round_index + 1}, which would bring "
            f"epsilon to {after:.4g} (budget {self.epsilon:g} at delta={self.delta:g})."
        )
        return False

    def check_release(self, charge: RoundCharge) -> None:
        """Raises ValueError if a release would overspend the budget."""
        fed = self.federated_model
        after = fed.run.spending.epsilon_after(
            charge, 0.0, self.delta, self.accountant or fed.setup.accountant
        )
        if after > self.epsilon:
            # Rounded up to three decimals.
            rounded = math.ceil(after * 1000) / 1000 if after < math.inf else after
            raise ValueError(
                f"private would bring epsilon to {rounded:.3f} at delta="
                f"{self.delta:g}, above the epsilon={self.epsilon:g} of the "
                f"{self._name}: raise its noise_multiplier, or train fewer rounds. "
                "Nothing was evaluated."
            )


class KeepTarget(PrivacyBudget):
    """Keeps the target that a model was calibrated for, in every `fit`.

    Where fewer rounds are allowed than were asked for, it warns, however
    silent the training is.
    """

    _name = "target of make_private"

    def __init__(self, target: PrivacyTarget):
        # Calibration may be off by rounding; that is no reason to stop.
        super().__init__(target.epsilon * (1 + 1e-9), target.delta, target.accountant)

    def _say_what_is_allowed(self, message: str) -> None:
        warnings.warn(message, RuntimeWarning, stacklevel=4)
