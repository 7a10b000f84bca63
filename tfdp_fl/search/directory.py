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

_LEDGER, _STATE = "ledger.jsonl", "search.npz"


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

    def __init__(self, path: str | os.PathLike[str] | None):
        """Makes the directory.

        Args:
          path: The directory, or None.
        """
        self._path = None if path is None else pathlib.Path(path)
        self._ledger: accounting.PrivacyLedger | None = None

    @contextlib.contextmanager
    def opened(
        self, run_id: str, head: str, target: tuple[float, float]
    ) -> Iterator[accounting.LedgerContents | None]:
        """Holds the ledger's lock; yields what it has of this run and of others.

        It must have the line `head`, unless that is ""; a new one has the target.
        """
        if self._path is None:
            yield None
            return
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with accounting.PrivacyLedger(
            self._path / _LEDGER,
            mode="append",
            expected_head=head or None,
            target_epsilon=target[0],
            target_delta=target[1],
            mechanism={"name": "PrivateSearch", "guarantee": "central"},
            run=run_id,
        ) as self._ledger:
            yield self._ledger.contents()

    @property
    def head(self) -> str:
        """The hash of the ledger's last line; "" without a ledger."""
        return "" if self._ledger is None else self._ledger.head

    def record(self, charge: accounting.RoundCharge, trials: str) -> None:
        """Writes the search into the ledger, as one line with the law of its trials."""
        if self._ledger is not None:
            self._ledger.record(0, charge, charge.num_clients, search=trials)

    def check_empty(self) -> None:
        """Raises ValueError if an interrupted search is waiting here."""
        if self._path is not None and (self._path / _STATE).exists():
            raise ValueError(
                f"directory must not hold an interrupted search, and {self._path} "
                "does: go on with it by fit(resume_from=directory)."
            )

    def read(self) -> SearchState:
        """Returns the state of an interrupted search; raises ValueError without one."""
        assert self._path is not None
        if not (self._path / _STATE).exists():
            raise ValueError(
                "resume_from must be the directory of an interrupted search, and "
                f"{self._path} holds none."
            )
        data = (self._path / _STATE).read_bytes()
        return SearchState(**checkpoint.Checkpoint.from_bytes(0, data).state)

    def write(self, state: SearchState) -> None:
        """Replaces the state on the disk."""
        if self._path is None:
            return
        kept = checkpoint.Checkpoint(round_index=0, state=vars(state))
        checkpoint.write_atomically(self._path / _STATE, kept.to_bytes())

    def forget(self) -> None:
        """Deletes the state: the search has ended."""
        if self._path is not None:
            (self._path / _STATE).unlink(missing_ok=True)
