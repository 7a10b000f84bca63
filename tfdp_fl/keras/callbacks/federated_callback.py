"""A Keras callback with further hooks around federated rounds.

To Keras's callbacks, a federated round is an epoch, and the model is the trained
Keras model. A `FederatedCallback` also sees the `DPFederatedModel`, and is asked before
each round. `PrivacyBudget` uses this to stop before overspending.
"""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp_fl import _signals, _validate, accounting, sampling
from tfdp_fl.accounting import RoundCharge, format_up, planning
from tfdp_fl.keras.training_setup import PrivacyTarget
from tfdp_fl.terms import Json

# The number of rounds with which a search for a budget's limit starts.
_FIRST_GUESS = 2**12


class FederatedCallback(tf.keras.callbacks.Callback):
    """A Keras callback that is also called before rounds run.

    Attributes:
      federated_model: The `DPFederatedModel` that is being trained; `fit` sets it.
      order: `on_rounds_planned` calls callbacks in ascending order: ledgers, then
        checkpoints (which save what the ledgers contain), then all others.
    """

    federated_model: Any = None
    order = 2

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Called before training with the rounds that `fit` was asked for.

        Args:
          first_round: The first round, counted from 0.
          last_round: One past the last round.
        """

    def allow_round(self, round_index: int) -> bool:
        """Called before a round is drawn, and again before it is charged.

        Returning False ends the training; the round is neither charged nor released.
        """
        del round_index
        return True

    def on_round_charged(
        self, round_index: int, charge: RoundCharge, details: Json
    ) -> None:
        """Called before a cohort's result can be seen by anyone.

        If the round is charged even when it is abandoned, this is before it trains.

        Raising here abandons the round; nothing is released.

        Args:
          round_index: The round, counted from 0.
          charge: The cost of the round.
          details: `cohort_size`, `noise_multiplier`, `noise_generator` and `local`.
            `local` is None unless the guarantee is composed client by client. It then
            holds `mu_squared`, (sensitivity / sigma)^2 of one client's release, and
            `max_mu_squared`, the largest sum that any client has spent after the round.
        """

    def on_round_released(self, round_index: int, logs: dict[str, float]) -> None:
        """Called after a round has changed the model, before `on_epoch_end`."""

    def on_fit_end(self) -> None:
        """Called last, even if an error or the user ended the training.

        An error raised here is reported unless another error ended the training.
        """

    def check_release(self, charge: RoundCharge) -> None:
        """Called before clients' metrics are released outside the rounds.

        Raising here refuses the release.

        Args:
          charge: The cost of the release.
        """

    def on_release_charged(self, name: str, charge: RoundCharge) -> None:
        """Called before anyone can see a release outside the rounds.

        Raising here refuses the release.

        Args:
          name: The run id under which ledgers list it, as if it were another run.
          charge: The cost of the release.
        """


@contextlib.contextmanager
def callback_session(
    callbacks: Sequence[FederatedCallback], first_round: int, last_round: int
) -> Iterator[None]:
    """Calls `on_rounds_planned` first, and `on_fit_end` however the block ends."""
    suppressed: tuple[type[Exception], ...] = (Exception,)
    remaining = [*reversed(callbacks)]
    try:
        # Everything that a ledger lists counts against every budget.
        for callback in sorted(callbacks, key=lambda c: c.order):
            callback.on_rounds_planned(first_round, last_round)
        yield
        suppressed = ()
    finally:
        # Every `on_fit_end` is called, even if one of them raises. Otherwise, a ledger
        # could stay open and locked until the process ends. `_end_all` is called twice,
        # as a signal may arrive before the first call defers signals. (It removes each
        # callback before it calls it.)
        try:
            _end_all(remaining, suppressed)
        finally:
            _end_all(remaining, suppressed)


def _end_all(
    remaining: list[FederatedCallback], suppressed: tuple[type[Exception], ...]
) -> None:
    with (
        _signals.defer_signals(),
        contextlib.suppress(*suppressed),
        contextlib.ExitStack() as stack,
    ):
        while remaining:
            stack.callback(remaining.pop().on_fit_end)


def check_callbacks(callbacks: Any) -> list[tf.keras.callbacks.Callback]:
    """Returns `fit`'s callbacks as a list; raises an error for unsuitable ones."""
    result = [callbacks]
    if callbacks is None or isinstance(callbacks, Iterable):
        result = list(callbacks or [])
    for callback in result:
        if not isinstance(callback, tf.keras.callbacks.Callback):
            raise TypeError(
                "callbacks must be a list of tf.keras.callbacks.Callback, got a "
                f"{type(callback).__name__} in it."
            )
        if isinstance(callback, tf.keras.callbacks.BackupAndRestore):
            raise ValueError(
                "callbacks must not have a BackupAndRestore: it restores weights "
                "without their cost, so epsilon would omit the rounds that made them. "
                "Use tfdp_fl.callbacks.RoundCheckpoint(directory), and "
                "fit(resume_from=directory) to continue."
            )
    return result


class PrivacyBudget(FederatedCallback):
    """Ends the training before the round that would overspend a budget.

    Whatever the schedules of noise and cohort size, a round is run only if the
    epsilon after it, at `delta`, is still within the budget. (This corrects Geyer et
    al. 2017, Algorithm 1, lines 4 and 5: here the check comes first.) A second or
    resumed `fit` of the same model continues from what has been spent.

    Attributes:
      epsilon: The largest epsilon allowed.
      delta: The delta at which epsilon is computed.
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

    @property
    def budget(self) -> accounting.PrivacyBudget:
        """The limit that the model's account must stay within."""
        accountant = self.accountant or self.federated_model.setup.accountant
        return accounting.PrivacyBudget(self.epsilon, self.delta, accountant)

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Tells the user at the start if the budget will not last for all rounds."""
        fed, num_rounds = self.federated_model, last_round - first_round
        self.stopped_before_round = None
        # First, as another thread may charge an evaluation at any time.
        version = fed.run.spending.version
        charges_ahead = fed.run.charges_ahead()
        cost = fed.run.epsilon_after(self.delta, self.accountant, charges_ahead)
        allowed = planning.largest_affordable(
            cost, self.budget.epsilon, num_rounds, _FIRST_GUESS
        )
        # Abandoned rounds cost nothing, so more rounds than this may be allowed.
        charges = collections.Counter(dict(charges_ahead(0, allowed)))
        fed.run.spending.note_allowed(self.budget, version, charges)
        if allowed < num_rounds:
            # Only samplers that make passes know the clients of later cohorts.
            knows_cohorts = isinstance(fed.run.sampler, sampling.PassSampler)
            at_least = fed.run.spending.by_client and not knows_cohorts
            self._announce_allowed_rounds(
                f"{self._name}: epsilon={format_up(self.epsilon)} at delta="
                f"{format_up(self.delta)} "
                f"allows {'at least ' * at_least}{allowed} of the {num_rounds} rounds "
                f"asked for; training {'may' if at_least else 'will'} end after those."
            )

    def _announce_allowed_rounds(self, message: str) -> None:
        self.federated_model.say(message)

    def allow_round(self, round_index: int) -> bool:
        """Returns False if the round would overspend the budget."""
        fed = self.federated_model
        run, budget = fed.run, self.budget
        if run.spending.by_client:
            epsilon = run.epsilon_after(self.delta)(1)
        elif run.spending.allows(budget, cost := run.cost(round_index)):
            return True
        else:
            epsilon = run.spending.epsilon_with(budget, cost)
        if epsilon <= budget.epsilon:
            return True
        self.stopped_before_round = round_index
        fed.say(
            f"{self._name}: stopped before round {round_index + 1}, which would bring "
            f"epsilon to {format_up(epsilon)} (budget {format_up(self.epsilon)} at "
            f"delta={format_up(self.delta)})."
        )
        return False

    def check_release(self, charge: RoundCharge) -> None:
        """Raises ValueError if a release would overspend the budget."""
        fed = self.federated_model
        epsilon = fed.run.spending.epsilon_with(self.budget, charge)
        if epsilon > self.budget.epsilon:
            limit = format_up(self.epsilon)
            raise ValueError(
                f"private would bring epsilon to {format_up(epsilon)} at delta="
                f"{format_up(self.delta)}, above the epsilon={limit} of the "
                f"{self._name}: raise its noise_multiplier, or train fewer rounds. "
                "Nothing was evaluated."
            )


class TargetBudget(PrivacyBudget):
    """Enforces, in every `fit`, the target for which a model was calibrated.

    If the target allows fewer rounds than were asked for, it warns, even if the
    training is silent.
    """

    _name = "target of make_private"

    def __init__(self, target: PrivacyTarget):
        super().__init__(target.epsilon, target.delta, target.accountant)

    def _announce_allowed_rounds(self, message: str) -> None:
        fed = self.federated_model
        declared, (size, _) = fed.setup.target.num_clients, fed.run.population
        if size < declared:
            message += (
                f" There are {size} clients, fewer than the num_clients={declared} "
                "that make_private was given (validation_split holds some out)."
            )
        warnings.warn(message, RuntimeWarning, stacklevel=4)
