"""A callback that knows about rounds, next to Keras's own.

To Keras's callbacks a federated round is an epoch, and the model is the
trained Keras model. A `FederatedCallback` also gets to know the
`DPFederatedModel`, and is asked before each round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdp_fl.accounting import RoundCharge


class FederatedCallback(tf.keras.callbacks.Callback):
    """A Keras callback that also hears of rounds before they run.

    Attributes:
      federated_model: The `DPFederatedModel` that is being trained.
      order: Callbacks of a smaller one hear first of the rounds planned: ledgers,
        then checkpoints, which save what ledgers tell, then all others.
    """

    federated_model: Any = None
    order = 2
    # The error in whose handler `fit` was called.
    _handled: BaseException | None = None

    def set_federated_model(self, federated_model: Any) -> None:
        """Called once, before training begins."""
        self.federated_model = federated_model
        self._handled = sys.exc_info()[1]

    @property
    def _is_ended_by_error(self) -> bool:
        """Whether an error ends the training, which is then the one to report."""
        return sys.exc_info()[1] is not self._handled

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Called before training with the rounds `fit` was asked for.

        Args:
          first_round: The first round, counted from 0.
          last_round: One past the last round.
        """

    def allow_round(self, round_index: int) -> bool:
        """Called before a round is drawn, and again before it is charged.

        False ends the training there; nothing of the round is charged or seen.
        """
        del round_index
        return True

    def on_round_charged(
        self, round_index: int, charge: RoundCharge, details: dict[str, Any]
    ) -> None:
        """Called before a trained cohort's result can be seen by anyone.

        Raising here abandons the round: nothing is released.

        Args:
          round_index: The round, counted from 0.
          charge: What the round costs.
          details: `cohort_size`, `noise_multiplier`, and `local`: None, or where a
            guarantee is composed client by client, `mu_squared`, (sensitivity /
            sigma)^2 of one client's release, and `max_mu_squared`, the largest sum
            of them that a client has spent after the round.
        """

    def on_round_released(self, round_index: int, logs: dict[str, float]) -> None:
        """Called after a round changed the model, before `on_epoch_end`."""

    def on_fit_end(self) -> None:
        """Called last, also where an error or the user ended the training."""

    def check_release(self, charge: RoundCharge) -> None:
        """Called before metrics of clients are released beside the rounds.

        Raising refuses the release.

        Args:
          charge: What it costs.
        """

    def on_release_charged(self, name: str, charge: RoundCharge) -> None:
        """Called before what is released beside the rounds can be seen.

        Raising here refuses the release.

        Args:
          name: The id under which it stands in ledgers, as if it were another run.
          charge: What it costs.
        """

    def on_release_counted(self) -> None:
        """Called when the model's epsilon has what was released beside the rounds."""


def checked(callbacks: Any) -> list[tf.keras.callbacks.Callback]:
    """Returns the callbacks that `fit` was given, as a list."""
    given = [callbacks]
    if callbacks is None or isinstance(callbacks, Iterable):
        given = list(callbacks or [])
    for callback in given:
        if not isinstance(callback, tf.keras.callbacks.Callback):
            raise TypeError(
                "callbacks must be a list of tf.keras.callbacks.Callback, got a "
                f"{type(callback).__name__} in it."
            )
        if isinstance(callback, tf.keras.callbacks.BackupAndRestore):
            raise ValueError(
                "callbacks must not have a BackupAndRestore: it brings back weights "
                "without what they cost, so epsilon would leave out the rounds that "
                "made them. Use tfdp_fl.callbacks.RoundCheckpoint(directory), and "
                "fit(resume_from=directory) to go on."
            )
    return given
