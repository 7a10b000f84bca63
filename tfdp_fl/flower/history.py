"""The rounds that were charged, what they cost, and what the budget allows."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import os
from typing import Any

import dp_accounting

from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import ledger as ledger_lib

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ReleasedRound:
    """A round that was charged.

    Attributes:
      server_round: its number.
      clip_norm: S, with which its clients clipped.
      noise_multiplier: z, what the round costs: one Gaussian of that
        multiplier, whatever was released in it; infinite if it costs nothing
        more than earlier rounds.
      clients_per_round: m, how many clients were asked.
      num_replies: how many of them were in the sum.
      num_clients: N, from which the m were drawn uniformly.
      sampling: "fixed_size" or "separated".
      segment: of correlated noise, its random name; None for other noise.
      position: the round's place in the segment.
    """

    server_round: int
    clip_norm: float
    noise_multiplier: float
    clients_per_round: int
    num_replies: int
    num_clients: int
    sampling: str = "fixed_size"
    segment: str | None = None
    position: int | None = None

    def charge(self) -> charge_lib.RoundCharge:
        """Returns the round's cost to somebody who sees the models."""
        return charge_lib.RoundCharge(
            sampling=self.sampling,
            num_clients=self.num_clients,
            clients_per_round=self.clients_per_round,
            event=dp_accounting.NoOpDpEvent()
            if math.isinf(self.noise_multiplier)
            else dp_accounting.GaussianDpEvent(self.noise_multiplier),
        )


class RoundHistory:
    """The charged rounds: all that the ledger holds, or those released here.

    Rounds in a ledger that this strategy has not released were released by a
    process that is gone, or by another strategy with clients in common. They
    count alike.

    Attributes:
      released: the rounds that this strategy was charged with.
      budget: the most that may be spent; None for no limit.
    """

    def __init__(self, sampling: str, budget: ledger_lib.Budget | None):
        self.released: list[ReleasedRound] = []
        self.budget = budget
        self._sampling = sampling
        self._ledger: ledger_lib.PrivacyLedger | None = None

    def open_ledger(
        self,
        ledger: str | os.PathLike[str] | ledger_lib.PrivacyLedger,
        description: str,
        known: dict[str, Any] | None = None,
    ) -> None:
        """Keeps a ledger from now on.

        Args:
          ledger: a ledger, or the file of one, which is continued if it exists.
          description: of the run, for the header of a new file.
          known: what `ledger_state` said of the ledger; None if there was none:
            rounds that were released without one are written now.

        Raises:
          ValueError: if it is not the ledger of the state, or holds rounds of
            another neighbouring relation.
          LedgerError: if it cannot be continued.
        """
        with contextlib.ExitStack() as unless_kept:
            if not isinstance(ledger, ledger_lib.PrivacyLedger):
                if known is not None and not os.path.exists(ledger):
                    raise _not_the_ledger(ledger, known)
                ledger = unless_kept.enter_context(
                    ledger_lib.PrivacyLedger(
                        ledger,
                        mode="append",
                        target_epsilon=self.budget.epsilon if self.budget else None,
                        target_delta=self.budget.delta if self.budget else None,
                        mechanism={"guarantee": "central", "name": description},
                    )
                )
            entries = ledger.entries
            if known and (
                len(entries) < known["rounds"]
                or (
                    known["rounds"] and entries[known["rounds"] - 1].run != known["run"]
                )
            ):
                raise _not_the_ledger(ledger.path, known)
            self._charges_of(ledger)
            self._ledger = ledger
            if known is None:
                for released in self.released:
                    self._record(released, written_later=True)
            unless_kept.pop_all()
        if self.num_from_ledger:
            _logger.warning(
                "The ledger %s holds %d rounds that others released; they are "
                "charged as well.",
                ledger.path,
                self.num_from_ledger,
            )

    def close(self) -> None:
        """Closes the ledger."""
        if self._ledger is not None:
            self._ledger.close()

    @property
    def num_rounds(self) -> int:
        """How many rounds are charged, whichever strategy released them."""
        return len(self.released) if self._ledger is None else self._ledger.rounds

    @property
    def num_from_ledger(self) -> int:
        """How many of them others released: they stand in the ledger only."""
        return self.num_rounds - len(self.released)

    def is_taken(self, segment: str, position: int) -> bool:
        """Whether a round at this place of a segment, or after it, was charged."""
        return self._ledger is not None and any(
            entry.details.get("segment") == segment
            and entry.details["position"] >= position
            for entry in self._ledger.entries
        )

    def accountant(self) -> accountant_lib.PrivacyAccountant:
        """Returns what all charged rounds cost."""
        charges = [released.charge() for released in self.released]
        if self._ledger is not None:
            charges = self._charges_of(self._ledger)
        composed = accountant_lib.PrivacyAccountant()
        for charge, count in collections.Counter(charges).items():
            composed.add(charge, count)
        return composed

    def _charges_of(
        self, ledger: ledger_lib.PrivacyLedger
    ) -> list[charge_lib.RoundCharge]:
        """Returns what the ledger's rounds cost, whoever wrote them.

        Raises:
          ValueError: One has no central charge, or another sampling.
        """
        charges = []
        for entry in ledger.entries:
            if entry.charge is None or entry.charge.sampling != self._sampling:
                raise ValueError(
                    f"ledger must hold rounds of {self._sampling} sampling and "
                    f"with a central charge only, got {ledger.path} with one of "
                    f"{entry.charge!r}: its neighbouring relation is another, and "
                    "no one epsilon covers both."
                )
            charges.append(entry.charge)
        return charges

    def affords(self, planned: ReleasedRound) -> bool:
        """Whether a round may be run without passing the budget."""
        if self.budget is None:
            return True
        after = self.accountant().would_be(planned.charge())
        epsilon = after.epsilon(self.budget.delta, self.budget.accountant)
        return epsilon <= self.budget.epsilon

    def add(self, released: ReleasedRound) -> None:
        """Charges a round, on disk first; asks the budget in the same act.

        Raises:
          BudgetExceededError: if it would pass the budget, because others wrote
            into the ledger since it was asked.
          LedgerWriteError: if its line could not be written.
          In both cases nothing is charged, and it must not be released.
        """
        self._record(released, budget=self.budget)
        self.released.append(released)

    def _record(self, released: ReleasedRound, **details: Any) -> None:
        if self._ledger is not None:
            self._ledger.record(
                self._ledger.rounds,
                released.charge(),
                released.clients_per_round,
                **details,
                **dataclasses.asdict(released),
            )

    def ledger_state(self) -> dict[str, Any] | None:
        """Returns what a restarted server has to know of the ledger."""
        if self._ledger is None:
            return None
        entries = self._ledger.entries
        return {"rounds": len(entries), "run": entries[-1].run if entries else None}


def _not_the_ledger(path: Any, known: Any) -> ValueError:
    return ValueError(
        f"ledger must be the one that held {known['rounds']} rounds when the "
        f"state was taken, got {path}."
    )
