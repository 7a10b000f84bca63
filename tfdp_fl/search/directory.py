"""The directory of a search: its ledger, and what a crash would lose."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdp_fl import accounting
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.keras import checkpoint

Weights = list[np.ndarray]


@dataclasses.dataclass(kw_only=True)
class SearchState:
    """A search between two trials. All of it is secret.

    Attributes:
      plan: What the search was told, by the names of the arguments.
      run_id: Names the search in its ledger.
      ledger_head: The hash of the ledger's last line that the search knows.
      trials: The secret number of trials.
      begun: How many of them were begun. One that was broken off is not run again.
      initial: The weights that each candidate begins with.
      best: The place of the best candidate so far, or None.
      score: Its score.
      weights: Its weights; until there is one, those of the first candidate.
    """

    plan: dict[str, Any]
    trials: int
    initial: list[Weights]
    weights: Weights
    run_id: str = dataclasses.field(default_factory=ledger_lib.new_run)
    ledger_head: str = ""
    begun: int = 0
    best: int | None = None
    score: float = -np.inf


class SearchDirectory:
    """Keeps a ledger of searches and, until one has ended, its state.

    The state is readable by its owner only, and is deleted before the result of the
    search is returned. Without a path nothing is kept.
    """

    LEDGER, STATE = "ledger.jsonl", "search.npz"

    def __init__(self, path: str | os.PathLike[str] | None):
        """Names the directory."""
        self._path = None if path is None else pathlib.Path(path)
        self._ledger: accounting.PrivacyLedger | None = None

    @contextlib.contextmanager
    def locked(self, resumes: bool, target: tuple[float, float]) -> Iterator[None]:
        """Holds the ledger's lock; a new ledger has the target.

        Raises:
          ValueError: An interrupted search waits here, and is not resumed; or none
            does, and is.
        """
        if self._path is None:
            yield
            return
        self._check(resumes)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with accounting.PrivacyLedger(
            self._path / self.LEDGER,
            mode="append",
            target_epsilon=target[0],
            target_delta=target[1],
            mechanism={"name": "PrivateSearch", "guarantee": "central"},
        ) as self._ledger:
            self._check(resumes)  # Others may have been here meanwhile.
            yield

    def _check(self, resumes: bool) -> None:
        assert self._path is not None
        waits = (self._path / self.STATE).exists()
        if waits and not resumes:
            raise ValueError(
                f"directory must not hold an interrupted search, and {self._path} "
                "does: go on with it by fit(resume_from=directory)."
            )
        if resumes and not waits:
            raise ValueError(
                "resume_from must be the directory of an interrupted search, and "
                f"{self._path} holds none."
            )

    def contents(self) -> accounting.LedgerContents | None:
        """Returns what the ledger holds; None without one."""
        return None if self._ledger is None else self._ledger.contents()

    def record(self, run: str, charge: accounting.RoundCharge, trials: str) -> None:
        """Writes a search, with the law of its trials, unless its line is there."""
        if self._ledger is not None and run not in self._ledger.contents().by_run():
            size = charge.num_clients
            self._ledger.record(0, charge, size, run=run, search=trials)

    def read(self) -> SearchState:
        """Returns the state of an interrupted search, whose ledger has to be here."""
        assert self._path is not None
        data = (self._path / self.STATE).read_bytes()
        state = SearchState(**checkpoint.Checkpoint.from_bytes(0, data).state)
        ledger = self._path / self.LEDGER
        accounting.PrivacyLedger.read(ledger, expected_head=state.ledger_head)
        return state

    def write(self, state: SearchState) -> None:
        """Replaces the state on the disk."""
        if self._path is not None and self._ledger is not None:
            state.ledger_head = self._ledger.head
            kept = checkpoint.Checkpoint(round_index=0, state=vars(state))
            checkpoint.write_atomically(self._path / self.STATE, kept.to_bytes())

    def forget(self) -> None:
        """Deletes the state: the search has ended."""
        if self._path is not None:
            (self._path / self.STATE).unlink(missing_ok=True)
