"""Callbacks that know about rounds, next to Keras's own.

To Keras's callbacks a federated round is an epoch, and the model is the
trained Keras model. A `FederatedCallback` also gets to know the
`DPFederatedModel`, and is asked before each round.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp_fl import _validate


class FederatedCallback(tf.keras.callbacks.Callback):
    """A Keras callback that also hears of rounds before they run.

    Attributes:
      federated_model: The `DPFederatedModel` that is being trained.
    """

    federated_model: Any = None

    def set_federated_model(self, federated_model: Any) -> None:
        """Called once, before training begins."""
        self.federated_model = federated_model

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Called before training with the rounds `fit` was asked for.

        Args:
          first_round: The first round, counted from 0.
          last_round: One past the last round.
        """

    def allow_round(self, round_index: int) -> bool:
        """Called before a round is drawn; False ends the training there."""
        del round_index
        return True

    def on_round_charged(
        self, round_index: int, charge: Any, details: dict[str, Any]
    ) -> None:
        """Called before a trained cohort's result can be seen by anyone.

        Raising here abandons the round: nothing is released.

        Args:
          round_index: The round, counted from 0.
          charge: The `RoundCharge` that the round costs.
          details: `cohort_size`, and `max_mu_squared`, the largest
            (sensitivity / sigma)^2 that a client has spent after the round
            where a guarantee is composed client by client.
        """

    def on_round_released(
        self, round_index: int, logs: dict[str, float]
    ) -> None:
        """Called after a round changed the model, before `on_epoch_end`."""


class PrivacyBudget(FederatedCallback):
    """Ends the training before the round that would overspend a budget.

    Whatever the schedules of noise and cohort size, a round is run only if the
    epsilon after it, at `delta`, is still within the budget (Geyer et al.
    2017, Algorithm 1, lines 4 and 5, put right: the check comes first).
    A second or resumed `fit` of the same model goes on with what was spent.

    Attributes:
      epsilon: The most that may be spent.
      delta: At this delta.
      accountant: "rdp" or "pld".
    """

    def __init__(self, epsilon: float, delta: float, accountant: str = "rdp"):
        super().__init__()
        self.epsilon = _validate.positive(epsilon=epsilon)
        self.delta = _validate.inside_unit_interval(delta=delta)
        self.accountant = _validate.one_of(
            ("rdp", "pld"), accountant=accountant
        )
        self.stopped_before_round: int | None = None

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Says at the start if the budget ends before the rounds do."""
        allowed = self.federated_model.affordable_rounds(
            self.epsilon, self.delta, last_round - first_round, self.accountant
        )
        if allowed < last_round - first_round:
            self.federated_model.say(
                f"PrivacyBudget: epsilon={self.epsilon:g} at "
                f"delta={self.delta:g} allows {allowed} of the "
                f"{last_round - first_round} rounds asked for; training will "
                "end there."
            )

    def allow_round(self, round_index: int) -> bool:
        """Returns False if the round would overspend the budget."""
        after = self.federated_model.epsilon_after_round(
            round_index, self.delta, self.accountant
        )
        if after <= self.epsilon:
            return True
        self.stopped_before_round = round_index
        self.federated_model.say(
            f"PrivacyBudget: stopped before round {round_index + 1}, which "
            f"would bring epsilon to {after:.4g} (budget {self.epsilon:g} at "
            f"delta={self.delta:g})."
        )
        return False
