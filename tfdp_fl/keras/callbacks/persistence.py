"""Callbacks that record rounds in a ledger before release, and save checkpoints."""

from __future__ import annotations

import contextlib
import os
import pathlib
import warnings
from typing import Any

import tensorflow as tf

from tfdp_fl import _signals, _validate, accounting
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.keras import checkpoint
from tfdp_fl.keras.callbacks.federated_callback import FederatedCallback
from tfdp_fl.keras.run import Run
from tfdp_fl.terms import TrustModel


class Ledger(FederatedCallback):
    """Keeps a `tfdp_fl.accounting.PrivacyLedger` of the training.

    Each round's line is on disk before anyone can see the round's result. If the line
    cannot be written, the round is not released. Rounds from before the ledger was
    opened are written first. All later `fit`s of the run, also resumed, continue the
    same file for as long as it is there, with or without the callback.

    Attributes:
      path: The file. If it is created here, only its owner can read it.
    """

    order = 0

    def __init__(self, path: str | os.PathLike[str], append: bool = False):
        """Makes a callback that opens the file when training starts.

        Args:
          path: The file; its folder must exist.
          append: Whether to append to another run's ledger. Ledger and model then
            count all runs on the same clients together: the other runs' spending is
            part of the model's epsilon from then on.
        """
        super().__init__()
        self.path = pathlib.Path(path).absolute()
        self._append = append
        self._ledger: accounting.PrivacyLedger | None = None
        self._account: accounting.PrivacyAccount | None = None

    @property
    def _run(self) -> Run:
        return self.federated_model.run

    @property
    def _key(self) -> str:
        return checkpoint.ledger_key(self.path)

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Opens the ledger; refuses another run's unless `append` is set."""
        del first_round, last_round
        fed, run = self.federated_model, self._run
        target = fed.setup.target
        known = run.known_ledgers.get(self._key)
        with _signals.defer_signals():  # So that `on_fit_end` knows of an open file.
            self._ledger = ledger = accounting.PrivacyLedger(
                self.path,
                mode="append",
                target_epsilon=None if target is None else target.epsilon,
                target_delta=fed.setup.delta if target is None else target.delta,
                mechanism={
                    "name": fed.mechanism.name,
                    "trust_model": fed.mechanism.trust_model,
                    "description": fed.mechanism.describe(),
                },
                privacy_unit=fed.mechanism.privacy_unit,
                expected_head=known,
                run=run.run_id,
            )
            with run.spending.pause_charges():
                with ledger.lock:
                    self._join(ledger, known)
                # (Any of the ledgers may have told of charges that others lack.)
                run.spending.write_missing(max(0, run.rounds - 1), run.facts_of_line())

    def _join(self, ledger: accounting.PrivacyLedger, known: str | None) -> None:
        """Counts an open ledger's lines, and records all later charges in it."""
        run, contents = self._run, ledger.contents()
        if contents.entries and not self._append:
            if known is None:
                raise ValueError(
                    f"path must not be the ledger of another run, which {self.path} is "
                    f"({len(contents.entries)} rounds): continue that run with "
                    "fit(resume_from=...), choose another path, or count both together "
                    "with append=True."
                )
            if known != contents.head:
                raise ValueError(
                    f"path must be a ledger that no other run continued, but "
                    f"{self.path} has rounds that this model does not know of; resume "
                    "from its directory."
                )
        self._check_runs(contents)
        run.spending.merge_ledger(contents, run.run_id, self._key)
        if run.spending.has_unseen_rounds:
            _, cohort_engine = self.federated_model.require_trained("fit")
            run.begin_segment(cohort_engine.query)
        self._begin()
        self._account = run.spending
        run.spending.attach_ledger(self._key, ledger, run.run_id)

    def _begin(self) -> None:
        """Called after the open ledger is counted, before this run's first line."""

    def _check_runs(self, contents: accounting.LedgerContents) -> None:
        """Refuses a ledger whose rounds cannot be counted together with this run's."""
        fed, run = self.federated_model, self._run
        runs = contents.by_run()
        runs.pop(run.run_id, None)
        own_kind = fed.mechanism.trust_model, fed.mechanism.privacy_unit
        written = contents.header.get("mechanism", {})
        other = (
            written.get("trust_model", own_kind[0]),
            contents.header["privacy_unit"],
        )
        # (Even if the file has no lines yet: others may add lines of its kind.)
        if other[1] != own_kind[1] or (
            other != own_kind and TrustModel.LOCAL in (other[0], own_kind[0])
        ):
            raise ValueError(
                f"path must be a ledger of runs with a {own_kind[0]} guarantee per "
                f"{own_kind[1]}, so that they can be counted together, but {self.path} "
                f"has a {other[0]} guarantee per {other[1]}."
            )
        if not runs:
            return
        sampling = fed.setup.sampling
        relation = charge_lib.relation_of(sampling).in_accounting
        charges = (entry.charge for entry in contents.entries if entry.charge)
        found = next((charge.relation.in_accounting for charge in charges), None)
        if found not in (None, relation):
            raise ValueError(
                "path must be a ledger of rounds with the neighbouring relation "
                f"{relation.name}, as for {sampling} sampling, but {self.path} has "
                f"{found.name}; one guarantee cannot cover both."
            )

    def check_release(self, charge: accounting.RoundCharge) -> None:
        """Raises LedgerError if a `fit` in another thread has closed the file."""
        del charge
        if self._ledger is None:
            raise accounting.LedgerError(
                f"The ledger {self.path} was closed by a fit that ended while this "
                "release was prepared. Nothing was released: try again."
            )

    def on_fit_end(self) -> None:
        """Closes the file once no charge is in progress."""
        account, self._account = self._account, None
        with contextlib.nullcontext() if account is None else account.pause_charges():
            if account is not None:
                account.detach_ledger(self._key)
            if self._ledger is not None:
                self._ledger.close()
                self._ledger = None


class RoundCheckpoint(Ledger):
    """Saves checkpoints of the training, so that it survives a crash.

    `fit(..., resume_from=directory)` continues exactly from the last checkpoint. The
    directory also has a `ledger.jsonl`, to which every round is written before its
    result can be seen. A directory belongs to one run: a new training refuses a
    directory with another run's checkpoints, and two trainings cannot use it at once.
    Only the owner can read the files, because with a seed, or with sampling in passes,
    they reveal who takes part.

    Attributes:
      directory: The directory of the files, created if necessary.
      every: The number of rounds between saves; the last round is always saved.
      keep: The number of checkpoints to keep.
      path: The directory's ledger.
    """

    order = 1

    def __init__(
        self, directory: str | os.PathLike[str], every: int = 1, keep: int = 3
    ):
        super().__init__(checkpoint.ledger_path(directory))
        self.directory = pathlib.Path(directory).absolute()
        self.every = _validate.positive_integer(every=every)
        self.keep = _validate.positive_integer(keep=keep)
        self._files = checkpoint.CheckpointDirectory(self.directory)
        self._begun = False

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Opens the ledger and saves the state before the first round."""
        rounds = self._files.rounds()
        if rounds and self._key not in self._run.known_ledgers:
            raise ValueError(
                "directory must not hold the checkpoints of another run, but "
                f"{self.directory} has one of round {rounds[0]}: continue that run "
                "with fit(resume_from=directory), or choose another directory."
            )
        if self._key not in self._run.known_ledgers:  # Otherwise, it must exist.
            self._files.make()
        super().on_rounds_planned(first_round, last_round)

    def _begin(self) -> None:
        # The ledger's lock also protects the directory.
        self._files.clear_after(self._run.rounds)
        # Before the first line, so that a run can be resumed after any charge.
        self._save()
        self._begun = True

    def on_round_released(self, round_index: int, logs: dict[str, float]) -> None:
        """Saves a checkpoint if one is due."""
        del logs
        # (After the last round too: a kill before `on_fit_end` would lose it.)
        if (round_index + 1) % self.every == 0:
            self._save()

    def on_fit_end(self) -> None:
        """Saves the end of the training and releases the directory.

        Other callbacks may have changed the model (Keras's `EarlyStopping` restores the
        best weights); without a change, the last save is kept. After an interrupt
        during a round's release, nothing is saved: that round must be run, and charged,
        again.
        """
        try:
            # An interrupt during tracing can leave TensorFlow inside a graph.
            with tf.init_scope():
                if self._begun:
                    self._save(if_changed=True)
        finally:
            self._begun = False
            super().on_fit_end()

    def _save(self, if_changed: bool = False) -> None:
        fed, run = self.federated_model, self._run
        if not run.releasing:
            state = checkpoint.capture(fed, self._key, self._ledger)
            if not (if_changed and self._files.holds(run.rounds, state)):
                self._files.write(run.rounds, state, self.keep)


def missing_ledgers(
    run: Run | None, interrupted: checkpoint.InterruptedRun | None, callbacks: list[Any]
) -> list[FederatedCallback]:
    """Returns a `Ledger` for each file of a run that no callback writes.

    Whatever a run releases must be in all of its ledgers, by which others count.

    Args:
      run: The training before this `fit`, if any.
      interrupted: The run that is resumed instead, if any.
      callbacks: The callbacks given to `fit`.
    """
    needed: list[Ledger] = []
    paths = [] if run is None else list(run.known_ledgers)
    if interrupted is not None:
        needed = [Ledger(checkpoint.ledger_path(interrupted.directory))]
        paths += interrupted.other_ledgers
    written = {
        checkpoint.ledger_key(c.path) for c in callbacks if isinstance(c, Ledger)
    }
    keys = {checkpoint.ledger_key(path): path for path in paths}
    for key, path in keys.items():
        if os.path.exists(path):
            needed.append(Ledger(path, append=True))
        elif key not in written:
            warnings.warn(
                f"The ledger {path}, in which this run recorded rounds, is missing: "
                "other runs that count by it will not know of this fit's rounds. If it "
                "was moved, add tfdp_fl.callbacks.Ledger(its new path, append=True).",
                RuntimeWarning,
                stacklevel=3,
            )
    missing = {checkpoint.ledger_key(c.path): c for c in reversed(needed)}
    return [c for key, c in missing.items() if key not in written]
