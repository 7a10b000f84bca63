"""Callbacks that know about rounds, next to Keras's own.

To Keras's callbacks a federated round is an epoch, and the model is the
trained Keras model. A `FederatedCallback` also gets to know the
`DPFederatedModel`, and is asked before each round.
"""

from __future__ import annotations

import collections
import os
import pathlib
import sys
import warnings
from typing import Any

import tensorflow as tf

from tfdp_fl import _validate, accounting
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.keras import checkpoint, run_state, statement
from tfdp_fl.keras.privacy_target import PrivacyTarget


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
          details: `cohort_size`, `noise_multiplier`, and, where a guarantee is
            composed client by client, `mu_squared`, (sensitivity / sigma)^2 of
            one client's release, and `max_mu_squared`, the largest sum of them
            that a client has spent after the round.
        """

    def on_round_released(
        self, round_index: int, logs: dict[str, float]
    ) -> None:
        """Called after a round changed the model, before `on_epoch_end`."""

    def on_train_ended(self) -> None:
        """Called when every callback's `on_train_end` is done.

        Some change the model there: Keras 3's `EarlyStopping` restores its best
        weights.
        """

    def on_fit_end(self) -> None:
        """Called last, also where an error or the user ended the training."""


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

    def __init__(
        self, epsilon: float, delta: float, accountant: str | None = None
    ):
        super().__init__()
        self.epsilon = _validate.positive(epsilon=epsilon)
        self.delta = _validate.inside_unit_interval(delta=delta)
        self.accountant = _validate.one_of(
            (None, "rdp", "pld"), accountant=accountant
        )
        self.stopped_before_round: int | None = None
        self._affordable_before = 0

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Says at the start if the budget ends before the rounds do."""
        self.stopped_before_round = None
        asked = last_round - first_round
        allowed = self.federated_model.affordable_rounds(
            self.epsilon, self.delta, asked, self.accountant
        )
        # Rounds that are abandoned cost nothing, so it can only be more.
        self._affordable_before = first_round + allowed
        if allowed < asked:
            fed = self.federated_model
            # Whom later cohorts draw is not known, but for shuffled ones.
            at_least = fed.spending.by_client and fed.sampling != "shuffled"
            self._say_what_is_allowed(
                f"{self._name}: epsilon={self.epsilon:g} at "
                f"delta={self.delta:g} allows "
                f"{'at least ' * at_least}{allowed} of the {asked} rounds "
                "asked for",
                "may" if at_least else "will",
            )

    def _say_what_is_allowed(self, message: str, will: str) -> None:
        self.federated_model.say(f"{message}; training {will} end there.")

    def allow_round(self, round_index: int) -> bool:
        """Returns False if the round would overspend the budget."""
        if round_index < self._affordable_before:
            return True
        after = self.federated_model.epsilon_after_round(
            round_index, self.delta, self.accountant
        )
        if after <= self.epsilon:
            return True
        self.stopped_before_round = round_index
        self.federated_model.say(
            f"{self._name}: stopped before round {round_index + 1}, which "
            f"would bring epsilon to {after:.4g} (budget {self.epsilon:g} at "
            f"delta={self.delta:g})."
        )
        return False


class KeepTarget(PrivacyBudget):
    """Keeps the target that a model was calibrated for, in every `fit`.

    Where fewer rounds are allowed than were asked for, it warns, however
    silent the training is.
    """

    _name = "make_private"

    def __init__(self, target: PrivacyTarget):
        # Calibration may be off by rounding; that is no reason to stop.
        super().__init__(
            target.epsilon * (1 + 1e-9), target.delta, target.accountant
        )
        self._goes_on = target.on_overspend == "warn"
        self._warned = False

    def _say_what_is_allowed(self, message: str, will: str) -> None:
        if not self._goes_on:
            warnings.warn(
                f"{message}; training {will} end there. (on_overspend='warn' "
                "goes on.)",
                RuntimeWarning,
                stacklevel=4,
            )
        elif not self._warned:
            self._warned = True
            warnings.warn(
                f"{message}; training goes on and spends more "
                "(on_overspend='warn').",
                RuntimeWarning,
                stacklevel=4,
            )

    def allow_round(self, round_index: int) -> bool:
        """Returns False if the round would pass a target that is to be kept."""
        return self._goes_on or super().allow_round(round_index)


class Ledger(FederatedCallback):
    """Keeps a `tfdp_fl.accounting.PrivacyLedger` of the training.

    Each round's line is on the disk before its result can be seen by anyone;
    if it cannot be written, the round is not released. Rounds that the model
    was trained for before the ledger began are written first. A later `fit` of
    the same model goes on with the same file.

    Attributes:
      path: The file, readable by its owner only if it is made here.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        append: bool = False,
        key: bytes | None = None,
    ):
        """Nothing is opened before training starts.

        Args:
          path: The file; its folder must exist.
          append: Whether to go on with a ledger of another run, so that it
            and the model count all runs on the same clients together: what the
            other runs spent is part of the model's epsilon from then on.
          key: A secret that authenticates the lines (HMAC).
        """
        super().__init__()
        self.path = pathlib.Path(path)
        self._append = append
        self._key = key
        self._ledger: accounting.PrivacyLedger | None = None
        self._elsewhere = 0.0

    @property
    def head(self) -> str | None:
        """Returns the hash of the last line; None if it is not open."""
        return None if self._ledger is None else self._ledger.head

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Opens the ledger, refusing that of another run."""
        del first_round, last_round
        federated_model = self.federated_model
        target = federated_model.target
        name = run_state.ledger_key(self.path)
        known = federated_model.known_ledgers.get(name)
        self._ledger = accounting.PrivacyLedger(
            self.path,
            mode="append",
            target_epsilon=None if target is None else target.epsilon,
            target_delta=federated_model.delta
            if target is None
            else target.delta,
            mechanism={
                "name": federated_model.mechanism.name,
                "guarantee": federated_model.mechanism.guarantee,
                "description": federated_model.mechanism.describe(),
            },
            unit=statement.unit(federated_model.mechanism),
            key=self._key,
            expected_head=known or None,
            run=federated_model.run_id,
        )
        contents = self._ledger.contents()
        if contents.entries and not self._append:
            if known is None:
                raise ValueError(
                    f"path must not be the ledger of another run, which "
                    f"{self.path} is ({len(contents.entries)} rounds): go on "
                    "with that run by fit(resume_from=...), choose another "
                    "path, or count both together with append=True."
                )
            ahead = name in federated_model.ledgers_ahead
            if known != contents.head and not ahead:
                raise ValueError(
                    f"path must be a ledger that no other run went on with, "
                    f"and {self.path} has rounds that this model does not "
                    "know of; resume from its directory."
                )
        self._check_runs(contents, known is not None)
        federated_model.spending.absorb(contents, federated_model.run_id, name)
        federated_model.ledgers_ahead.discard(name)
        self._catch_up(contents)
        self._remember()

    def _check_runs(
        self, contents: accounting.LedgerContents, known: bool
    ) -> None:
        """Refuses rounds that cannot be told apart from or added to our own."""
        federated_model = self.federated_model
        runs = contents.by_run()
        own = runs.pop(federated_model.run_id, ())
        heads = federated_model.known_ledgers.values()
        if own and not known and contents.head not in heads:
            raise ValueError(
                f"path must not hold rounds of this very run that this model "
                f"does not know of, and {self.path} does: the run was gone on "
                "with in two places. Resume from that ledger's directory, or "
                "choose another path."
            )
        if not runs:
            return
        guarantee = federated_model.mechanism.guarantee
        other = contents.header.get("mechanism", {}).get("guarantee", guarantee)
        central = (spending_lib.CENTRAL, spending_lib.NONE)
        if other != guarantee and not {other, guarantee} <= {*central}:
            raise ValueError(
                f"path must be a ledger of runs with a {guarantee} guarantee, "
                f"to be counted together, and {self.path} is one of runs with "
                f"a {other} guarantee."
            )
        relation = charge_lib.relation_of(federated_model.sampling)
        others = [entry for entries in runs.values() for entry in entries]
        for entry in others:
            if entry.charge is not None and entry.charge.relation != relation:
                raise ValueError(
                    "path must be a ledger of rounds whose neighbouring "
                    f"relation is {relation.name}, as for "
                    f"{federated_model.sampling} sampling, and {self.path} has "
                    "rounds of "
                    f"{entry.charge.sampling} sampling; one guarantee cannot "
                    "cover both."
                )
        if federated_model.seed_given and any(
            entry.details.get("seeded") for entry in others
        ):
            warnings.warn(
                f"A seed was given, as it was to another run in {self.path}. "
                "If it is the same one, both have the same noise in the same "
                "rounds, and the difference of what they release has none: "
                "give another seed, or none.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _catch_up(self, contents: accounting.LedgerContents) -> None:
        """Writes the rounds that were charged while no ledger was kept."""
        spending = self.federated_model.spending
        next_round = self.federated_model.rounds
        run = self.federated_model.run_id
        lost = contents.lost_mu_squared(next_round, run)
        self._elsewhere = max(0.0, spending.lost_mu_squared - lost)
        written = collections.Counter(
            entry.charge for entry in contents.by_run().get(run, ())
        )
        for charge, count in spending.charges:
            for _ in range(count - written[charge]):
                self._ledger.record(
                    max(0, next_round - 1),
                    charge,
                    round(charge.clients_per_round),
                    local={
                        "mu_squared": 0.0,
                        "max_mu_squared": spending.clients.max_mu_squared
                        + self._elsewhere,
                    }
                    if spending.by_client
                    else None,
                    written_later=True,
                )

    def on_round_charged(
        self, round_index: int, charge: Any, details: dict[str, Any]
    ) -> None:
        """Writes the round's line and syncs it."""
        rest = dict(details)
        cohort_size = rest.pop("cohort_size")
        spent = {
            "mu_squared": rest.pop("mu_squared"),
            "max_mu_squared": rest.pop("max_mu_squared") + self._elsewhere,
        }
        self._ledger.record(
            round_index,
            charge,
            cohort_size,
            local=spent if self.federated_model.spending.by_client else None,
            **rest,
        )
        self._remember()

    def on_fit_end(self) -> None:
        """Closes the file."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _remember(self) -> None:
        key = run_state.ledger_key(self.path)
        self.federated_model.known_ledgers[key] = self._ledger.head


class RoundCheckpoint(FederatedCallback):
    """Saves the training after rounds, so that it survives a crash.

    `fit(..., resume_from=directory)` goes on exactly where the last checkpoint
    was taken. The directory also holds `ledger.jsonl`, in which every round is
    written before its result can be seen, and, when the training has ended,
    `privacy.txt`, the privacy statement. It belongs to one run: a new training
    refuses a directory that holds another's checkpoints, and two at once are
    refused. The files are readable by their owner only: with a seed, or
    shuffled cohorts, they tell who takes part.

    Attributes:
      directory: Where the files are; made if need be.
      every: Save after every so many rounds (and at the end).
      keep: How many checkpoints stay.
      delta: At which the statement is made; None: what the model knows (see
        `DPFederatedModel.privacy_statement`).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: int = 1,
        keep: int = 3,
        delta: float | None = None,
    ):
        super().__init__()
        self.directory = pathlib.Path(directory)
        self.every = _validate.positive_integer(every=every)
        self.keep = _validate.positive_integer(keep=keep)
        if delta is not None:
            delta = _validate.inside_unit_interval(delta=delta)
        self.delta = delta
        self._files = checkpoint.CheckpointDirectory(self.directory)
        self._ledger = Ledger(run_state.ledger_path(self.directory))
        self._saved_round: int | None = None
        self._begun = False

    def set_federated_model(self, federated_model: Any) -> None:
        """See base class."""
        super().set_federated_model(federated_model)
        self._ledger.set_federated_model(federated_model)

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Takes the directory, and saves the state before the first round."""
        self._files.acquire()
        fed = self.federated_model
        path = self._ledger.path
        known = run_state.ledger_key(path) in fed.known_ledgers
        rounds = self._files.rounds()
        if rounds and not known:
            raise ValueError(
                "directory must not hold the checkpoints of another run, and "
                f"{self.directory} holds one of round {rounds[0]}: go on with "
                "that run by fit(resume_from=directory), or choose another "
                "directory."
            )
        self._files.set_aside_after(fed.rounds)
        if path.exists():
            self._ledger.on_rounds_planned(first_round, last_round)
        # Before the first line: whatever was charged can be resumed from.
        self._save()
        if not path.exists():
            self._ledger.on_rounds_planned(first_round, last_round)
        self._begun = True

    def on_round_charged(
        self, round_index: int, charge: Any, details: dict[str, Any]
    ) -> None:
        """Writes the round into the ledger."""
        self._ledger.on_round_charged(round_index, charge, details)

    def on_round_released(
        self, round_index: int, logs: dict[str, float]
    ) -> None:
        """Saves, if it is time to."""
        del logs
        if (round_index + 1) % self.every == 0:
            self._save()

    def on_train_ended(self) -> None:
        """Saves the end of the training, as other callbacks left it."""
        self._save()

    def on_fit_end(self) -> None:
        """Writes the statement, and lets go of the directory."""
        ended_by_error = sys.exc_info()[0] is not None
        try:
            if self._begun:
                self._write_statement()
        except Exception:
            if not ended_by_error:
                raise  # Else that error is the one to report.
        finally:
            self._begun = False
            self._ledger.on_fit_end()
            self._files.release()

    def _save(self) -> None:
        self._files.write(
            run_state.capture(self.federated_model, self._ledger.head),
            self.keep,
        )

    def _write_statement(self) -> None:
        text = self.federated_model.privacy_statement(self.delta)
        checkpoint.write_atomically(
            self.directory / "privacy.txt", f"{text}\n".encode(), mode=0o644
        )


def ledger_of_resumed(
    directory: str | os.PathLike[str], callbacks: list[Any]
) -> list[FederatedCallback]:
    """Returns a `Ledger` for a resumed run, unless a callback keeps it.

    Whatever a resumed run releases has to be in the ledger of its directory.
    """
    path = run_state.ledger_path(directory)
    key = run_state.ledger_key(path)
    for each in callbacks:
        kept = None
        if isinstance(each, RoundCheckpoint):
            kept = run_state.ledger_path(each.directory)
        elif isinstance(each, Ledger):
            kept = each.path
        if kept is not None and run_state.ledger_key(kept) == key:
            return []
    return [Ledger(path)]
