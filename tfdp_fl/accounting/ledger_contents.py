"""What a ledger says: its rounds, what they cost, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import gaussian


class LedgerError(RuntimeError):
    """Something is wrong with a ledger file."""


class LedgerTamperedError(LedgerError):
    """A line was removed, changed or moved."""


class LedgerInUseError(LedgerError):
    """Another run writes this ledger."""


class LedgerWriteError(LedgerError):
    """A line could not be written; what stood before is as it was."""


class LedgerMovedError(LedgerError):
    """The file was deleted, moved or replaced while it was open."""


class LedgerForkedError(LedgerError):
    """Another process than the one that opened the ledger uses it."""


class LedgerEntryError(LedgerError, ValueError):
    """A line would say what no round can have cost."""


# The shorter name, as in a sentence.
LedgerTampered = LedgerTamperedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One round of a ledger.

    Attributes:
      round_index: The round, from 0.
      cohort_size: How many clients were drawn.
      charge: What the round costs centrally; None where only a local
        guarantee is given.
      local: For noise added by clients, the largest spending of a single
        client: {"mu_squared": of this round, "max_mu_squared": so far}.
      time: When the line was written, UTC, ISO 8601.
      details: The mechanism's parameters of the round, and anything else.
      run: The id of the run that released the round; None in a ledger of the
        first format.
      line_hash: The hash of its line: a `head` that the ledger once had.
    """

    round_index: int
    cohort_size: int
    charge: charge_lib.RoundCharge | None
    local: dict[str, float] | None
    time: str
    details: dict[str, Any]
    run: str | None = None
    line_hash: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerContents:
    """A ledger that was read.

    Attributes:
      header: What was known at the start; empty if not even that was written.
      entries: The rounds, in the order in which they were released.
      truncated: Whether the last line was cut short by a crash.
      head: The hash of the last whole line.
      identity: The hash of the first line, which no other ledger has; it
        stands for the run of the lines that name none.
    """

    header: dict[str, Any]
    entries: tuple[LedgerEntry, ...]
    truncated: bool
    head: str
    identity: str

    def by_run(self) -> dict[str, tuple[LedgerEntry, ...]]:
        """Returns the rounds of each run, by the run's id.

        Lines without an id count as one run, named by `identity`.
        """
        runs: dict[str, list[LedgerEntry]] = {}
        for entry in self.entries:
            runs.setdefault(entry.run or self.identity, []).append(entry)
        return {run: tuple(entries) for run, entries in runs.items()}

    def rounds_known(self, run: str, head: str) -> int:
        """Returns how many rounds of a run were written by the time of a head.

        Args:
          run: The run's id.
          head: A `head` that the ledger had; 0 for one that is none of a round.
        """
        count = 0
        for entry in self.entries:
            count += (entry.run or self.identity) == run
            if entry.line_hash == head:
                return count
        return 0

    def accountant(self) -> accountant_lib.PrivacyAccountant:
        """Returns an accountant to which all rounds were added."""
        history = accountant_lib.PrivacyAccountant()
        for entry in self.entries:
            if entry.charge is not None:
                history.add(entry.charge)
        return history

    def epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """Returns the epsilon of all rounds at delta.

        That of the guarantee which the header names; without a name the
        central one, or, where no round has one, the local one.
        """
        guarantee = self.header.get("mechanism", {}).get("guarantee")
        if guarantee in ("local", "record"):
            return self.local_epsilon(delta)
        central = [e for e in self.entries if e.charge is not None]
        if not central and any(e.local is not None for e in self.entries):
            return self.local_epsilon(delta)
        return self.accountant().epsilon(delta, accountant)

    def local_epsilon(self, delta: float) -> float:
        """Returns the local epsilon of the client that spent most, at delta.

        The spending so far that a run's last line tells, plus, for rounds that
        it did again after it was resumed, the most a client can have spent in
        what was lost. Runs add up, as if the client that spent most in one had
        spent most in every other. Infinite if a round has no local guarantee.
        """
        if any(entry.local is None for entry in self.entries):
            return math.inf
        spent = math.fsum(
            largest_mu_squared(entries) for entries in self.by_run().values()
        )
        return gaussian.epsilon_of_mu_squared(spent, delta)

    def lost_mu_squared(self, next_round: int, run: str) -> float:
        """Returns what one client may have spent in rounds that were lost.

        Args:
          next_round: The round that the run goes on with; its lines of this
            round and later ones belong to what was lost.
          run: The run's id.
        """
        return _spent_and_lost(self.by_run().get(run, ()), next_round)[1]


def largest_mu_squared(entries: tuple[LedgerEntry, ...]) -> float:
    """Returns the most that one client can have spent in one run's rounds."""
    return math.fsum(_spent_and_lost(entries, math.inf))


def _spent_and_lost(
    entries: tuple[LedgerEntry, ...], earliest_later: float
) -> tuple[float, float]:
    spent, lost = 0.0, 0.0
    for entry in reversed(entries):
        if entry.local is not None:
            if entry.round_index >= earliest_later:
                lost += entry.local["mu_squared"]
            else:
                spent = max(spent, entry.local["max_mu_squared"])
        earliest_later = min(earliest_later, entry.round_index)
    return spent, lost
