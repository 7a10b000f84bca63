"""Saves a training after rounds."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.accounting import RoundCharge
from tfdp_fl.keras import checkpoint, resuming
from tfdp_fl.keras.callbacks.federated_callback import FederatedCallback
from tfdp_fl.keras.callbacks.ledger import Ledger


class RoundCheckpoint(Ledger):
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
      path: The directory's ledger.
    """

    order = 1

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: int = 1,
        keep: int = 3,
        delta: float | None = None,
    ):
        super().__init__(resuming.ledger_path(directory))
        self.directory = pathlib.Path(directory)
        self.every = _validate.positive_integer(every=every)
        self.keep = _validate.positive_integer(keep=keep)
        if delta is not None:
            delta = _validate.inside_unit_interval(delta=delta)
        self.delta = delta
        self._files = checkpoint.CheckpointDirectory(self.directory)
        self._begun = False
        self._charged_round = -1

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Takes the directory, and saves the state before the first round."""
        self._files.acquire()
        run = self.federated_model.run
        rounds = self._files.rounds()
        if rounds and resuming.ledger_key(self.path) not in run.known_ledgers:
            raise ValueError(
                "directory must not hold the checkpoints of another run, and "
                f"{self.directory} holds one of round {rounds[0]}: go on with that run "
                "by fit(resume_from=directory), or choose another directory."
            )
        is_new = not self.path.exists()
        if not is_new:
            super().on_rounds_planned(first_round, last_round)
        self._files.set_aside_after(run.rounds)
        # Before the first line: whatever was charged can be resumed from.
        self._save()
        if is_new:
            super().on_rounds_planned(first_round, last_round)
        self._begun = True
        self._charged_round = -1

    def on_round_charged(
        self, round_index: int, charge: RoundCharge, details: dict[str, Any]
    ) -> None:
        """Writes the round into the ledger."""
        self._charged_round = round_index
        super().on_round_charged(round_index, charge, details)

    def on_round_released(self, round_index: int, logs: dict[str, float]) -> None:
        """Saves, if it is time to."""
        del logs
        if (round_index + 1) % self.every == 0:
            self._save()

    def on_fit_end(self) -> None:
        """Saves the end of the training, and lets go of the directory.

        Other callbacks may have changed the model: Keras's `EarlyStopping` restores
        its best weights. After an interrupt between a round's charge and its release
        nothing is saved: that round has to be run, and charged, again.
        """
        ended_by_error = self._is_ended_by_error
        try:
            # An interrupt while TensorFlow traces can leave it in the graph.
            with tf.init_scope():
                if self._begun and self._is_between_rounds:
                    self._save()
                if self._begun:
                    self._write_statement()
        except Exception:
            if not ended_by_error:
                raise
        finally:
            self._begun = False
            super().on_fit_end()
            self._files.release()

    def on_release_counted(self) -> None:
        """Saves again what was charged since; of the same round."""
        self._files.acquire()
        try:
            self._save()
            self._write_statement()
        finally:
            if not self._begun:
                self._files.release()

    @property
    def _is_between_rounds(self) -> bool:
        """Whether nothing was charged that was not released, and counted."""
        run = self.federated_model.run
        return self._charged_round < run.rounds and not run.releasing

    def _save(self) -> None:
        fed, head = self.federated_model, self.head
        if head is None:  # After `fit`, where a private evaluation is saved.
            key = resuming.ledger_key(self.path)
            head = fed.run.known_ledgers.get(key) or None
        self._files.write(resuming.capture(fed, head), self.keep)

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
    path = resuming.ledger_path(directory)
    kept = [resuming.ledger_key(c.path) for c in callbacks if isinstance(c, Ledger)]
    return [] if resuming.ledger_key(path) in kept else [Ledger(path)]
