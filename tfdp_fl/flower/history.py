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

from tfdp_fl import _validate
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
      num_clients: N, of whom the m were drawn uniformly.
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
          ledger: a ledger, or the file of one, which is gone on with if it is
            there.
          mechanism: for the header of a new file.
          known: what `state` said of the ledger; None if there was none: rounds
            that were released without one are written now.

        Raises:
          ValueError: if it is not the ledger of the state, or holds rounds of
            another neighbouring relation.
          LedgerError: if it cannot be gone on with.
        """
        if isinstance(ledger, ledger_lib.PrivacyLedger):
            self._take_over(ledger, known)
            return
        if known is not None and not os.path.exists(ledger):
            raise _not_the_ledger(ledger, known)
        target = self.budget
        ours = ledger_lib.PrivacyLedger(
            ledger,
            mode="append",
            target_epsilon=None if target is None else target.epsilon,
            target_delta=None if target is None else target.delta,
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
        """Lets go of the ledger."""
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
            own = [entry.local for entry in entries if entry.run == ledger.run]
            spent = [line["max_mu_squared"] for line in own if line is not None]
            local = {
                "mu_squared": released.mu_squared,
                "max_mu_squared": max(spent, default=0.0) + released.mu_squared,
            }
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
        charges = collections.Counter([*costs, *(r.charge() for r in rounds)])
        composed = accountant_lib.PrivacyAccountant()
        for charge, count in charges.items():
            if cohorts_known and charge.sampling == "fixed_size":
                charge = dataclasses.replace(
                    charge, num_clients=int(charge.clients_per_round)
                )
            composed.add(charge, count)
        return composed.epsilon(delta, accountant)

    def _cost_of(self, entry: ledger_lib.LedgerEntry, ledger: Any) -> Any:
        """Returns what a ledger's line costs here, or raises."""
        if self._local:
            if entry.local is None:
                raise ValueError(
                    "ledger must hold rounds with a local charge only, got "
                    f"{ledger.path} with one of {entry.charge!r}: a central "
                    "guarantee and a local one are no one epsilon."
                )
            return entry.local["mu_squared"]
        if entry.charge is None or entry.charge.sampling != self._sampling:
            raise ValueError(
                f"ledger must hold rounds of {self._sampling} sampling and with "
                f"a central charge only, got {ledger.path} with one of "
                f"{entry.charge!r}: its neighbouring relation is another, "
                "and no one epsilon covers both."
            )
        return entry.charge

    def state(self) -> dict[str, Any]:
        """Returns what a restarted server has to know, as JSON values."""
        known = None
        if self._ledger is not None:
            entries = self._entries()
            known = {
                "rounds": len(entries),
                "run": entries[-1].run if entries else None,
            }
        return {
            "released": [dataclasses.asdict(r) for r in self.released],
            "ledger": known,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a state; to be called before `open_ledger`."""
        self.released = [ReleasedRound(**fields) for fields in state["released"]]


def budget_of(
    target_epsilon: float | None, target_delta: float | None, accountant: str
) -> ledger_lib.Budget | None:
    """Returns the budget that a strategy's arguments name."""
    _validate.one_of(charge_lib.ACCOUNTANTS, accountant=accountant)
    if target_epsilon is None and target_delta is None:
        return None
    if target_epsilon is None or target_delta is None:
        raise ValueError(
            "target_epsilon and target_delta must be given both or not at "
            f"all, got {target_epsilon!r} and {target_delta!r}."
        )
    return ledger_lib.Budget(
        _validate.positive(target_epsilon=target_epsilon),
        _validate.inside_unit_interval(target_delta=target_delta),
        accountant,
    )


def _not_the_ledger(path: Any, known: Mapping[str, Any]) -> ValueError:
    return ValueError(
        f"ledger must be the one that held {known['rounds']} rounds when the "
        f"state was taken, got {path}."
    )
