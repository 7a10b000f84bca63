"""The rounds that were charged, what they cost, and what the budget allows."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import dp_accounting

from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import gaussian
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
      mu_squared: where each client is private by itself, (sensitivity /
        sigma)^2 of what one of them released; None elsewhere.
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
    mu_squared: float | None = None
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

    A central guarantee composes by an accountant. A local one is the guarantee
    of a client that was in every round: Gaussian releases of one client compose
    exactly, mu^2 adds up. (A client that comes back under another node id
    cannot be told from another client.)

    Attributes:
      released: the rounds that this strategy was charged with.
      budget: the most that may be spent; None for no limit.
    """

    def __init__(self, sampling: str, local: bool, budget: ledger_lib.Budget | None):
        self.released: list[ReleasedRound] = []
        self.budget = budget
        self._sampling, self._local = sampling, local
        self._ledger: ledger_lib.PrivacyLedger | None = None
        self._read: Sequence[ledger_lib.LedgerEntry] = ()

    def open_ledger(
        self,
        ledger: str | os.PathLike[str] | ledger_lib.PrivacyLedger,
        mechanism: Mapping[str, Any],
        known: Mapping[str, Any] | None = None,
    ) -> None:
        """Keeps a ledger from now on.

        Args:
          ledger: a ledger, or the file of one, which is continued if it exists.
          mechanism: for the header of a new file.
          known: what `ledger_state` said of the ledger; None if there was none:
            rounds that were released without one are written now.

        Raises:
          ValueError: if it is not the ledger of the state, or holds rounds of
            another neighbouring relation.
          LedgerError: if it cannot be continued.
        """
        if isinstance(ledger, ledger_lib.PrivacyLedger):
            self._take_over(ledger, known)
            return
        if known is not None and not os.path.exists(ledger):
            raise _not_the_ledger(ledger, known)
        ours = ledger_lib.PrivacyLedger(
            ledger,
            mode="append",
            target_epsilon=self.budget.epsilon if self.budget else None,
            target_delta=self.budget.delta if self.budget else None,
            mechanism=dict(mechanism),
        )
        try:
            self._take_over(ours, known)
        except BaseException:
            ours.close()
            raise

    def _take_over(
        self, ledger: ledger_lib.PrivacyLedger, known: Mapping[str, Any] | None
    ) -> None:
        entries = ledger.contents().entries
        if known is not None:
            last = known["rounds"] - 1
            if len(entries) <= last or (
                last >= 0 and entries[last].run != known["run"]
            ):
                raise _not_the_ledger(ledger.path, known)
        for entry in entries:
            self._cost_of(entry, ledger)  # Or raises.
        self._ledger = ledger
        if known is None:
            for released in self.released:
                self._record(released, budget=None, written_later=True)
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

    def _entries(self) -> Sequence[ledger_lib.LedgerEntry]:
        """Returns the ledger's rounds; the file is read when there are more."""
        if self._ledger is not None and len(self._read) != self._ledger.rounds:
            self._read = self._ledger.contents().entries
        return self._read

    @property
    def num_rounds(self) -> int:
        """How many rounds are charged, whichever strategy released them."""
        return len(self.released if self._ledger is None else self._entries())

    @property
    def num_from_ledger(self) -> int:
        """How many of them others released: they stand in the ledger only."""
        return self.num_rounds - len(self.released)

    def is_taken(self, segment: str, position: int) -> bool:
        """Whether a round at this place of a segment, or after it, was charged."""
        return any(
            entry.details.get("segment") == segment
            and entry.details["position"] >= position
            for entry in self._entries()
        )

    def affords(self, planned: ReleasedRound) -> bool:
        """Whether a round may be run without passing the budget."""
        return self.budget is None or (
            self.epsilon(self.budget.delta, self.budget.accountant, planned)
            <= self.budget.epsilon
        )

    def add(self, released: ReleasedRound) -> None:
        """Charges a round, on disk first; asks the budget in the same act.

        Raises:
          BudgetExceededError: if it would pass the budget, because others wrote
            into the ledger since it was asked.
          LedgerWriteError: if its line could not be written.
          In both cases nothing is charged, and it must not be released.
        """
        if self._ledger is not None:
            self._record(released, budget=self.budget)
        self.released.append(released)

    def _record(self, released: ReleasedRound, **details: Any) -> None:
        ledger = cast(ledger_lib.PrivacyLedger, self._ledger)
        entries, local = self._entries(), None
        if released.mu_squared is not None:
            own = [e.local for e in entries if e.run == ledger.run and e.local]
            spent = math.fsum(
                [*(line["mu_squared"] for line in own), released.mu_squared]
            )
            local = {"mu_squared": released.mu_squared, "max_mu_squared": spent}
        ledger.record(
            len(entries),
            None if self._local else released.charge(),
            released.clients_per_round,
            local=local,
            **details,
            **dataclasses.asdict(released),
        )

    def epsilon(
        self,
        delta: float,
        accountant: str = "rdp",
        planned: ReleasedRound | None = None,
        cohorts_known: bool = False,
    ) -> float:
        """Returns epsilon at delta of all charged rounds.

        Args:
          delta: between 0 and 1.
          accountant: "rdp" or "pld"; a local guarantee is exact without.
          planned: one more round.
          cohorts_known: towards somebody who knows which clients were in which
            round: a client counts as having been in all of them.
        """
        rounds = [] if planned is None else [planned]
        if self._ledger is None:
            rounds = self.released + rounds
        costs = [self._cost_of(entry, self._ledger) for entry in self._entries()]
        if self._local:
            spent = [*costs, *(r.mu_squared for r in rounds)]
            return gaussian.epsilon_of_mu_squared(math.fsum(spent), delta)
        composed = accountant_lib.PrivacyAccountant()
        counts = collections.Counter([*costs, *(r.charge() for r in rounds)])
        for charge, count in counts.items():
            if cohorts_known and charge.sampling == "fixed_size":
                charge = dataclasses.replace(
                    charge, num_clients=int(charge.clients_per_round)
                )
            composed.add(charge, count)
        return composed.epsilon(delta, accountant)

    def _cost_of(self, entry: ledger_lib.LedgerEntry, ledger: Any) -> Any:
        """Returns what a ledger's line costs here, or raises."""
        if self._local and entry.local is not None:
            return entry.local["mu_squared"]
        charge = entry.charge
        if not self._local and charge and charge.sampling == self._sampling:
            return charge
        wanted = f"{self._sampling} sampling and with a central charge"
        if self._local:
            wanted = "a client and with a local charge"
        raise ValueError(
            f"ledger must hold rounds of {wanted} only, got {ledger.path} with one "
            f"of {charge!r}: its neighbouring relation is another, and no one "
            "epsilon covers both."
        )

    def ledger_state(self) -> dict[str, Any] | None:
        """Returns what a restarted server has to know of the ledger."""
        if self._ledger is None:
            return None
        entries = self._entries()
        return {"rounds": len(entries), "run": entries[-1].run if entries else None}


def _not_the_ledger(path: Any, known: Mapping[str, Any]) -> ValueError:
    return ValueError(
        f"ledger must be the one that held {known['rounds']} rounds when the "
        f"state was taken, got {path}."
    )
