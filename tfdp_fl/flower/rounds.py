"""What was released, what it cost, and what is still affordable."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from typing import Any, cast

import dp_accounting

from tfdp_fl import _validate
from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.accounting import ledger_contents

_logger = logging.getLogger(__name__)

SAMPLINGS = ("fixed_size", "shuffled")


@dataclasses.dataclass(frozen=True)
class ReleasedRound:
    """A round whose noised updates went on to the wrapped strategy.

    Attributes:
      server_round: its number.
      clip_norm: S, with which its clients clipped.
      noise_multiplier: z, what the round costs: one Gaussian of that
        multiplier, whatever was released in it; infinite if it costs nothing
        more than earlier rounds.
      clients_per_round: m, how many clients were asked.
      num_replies: how many of them were in the sum.
      available: how many clients were connected when the m were drawn; None
        if the client manager does not tell.
      num_clients: N, of whom the client manager drew the m; m itself if it was
        not seen to draw them, as nothing can be claimed for their sampling
        then; None if the client manager does not tell how many there are.
      mu_squared: where each client is private by itself, (sensitivity /
        sigma)^2 of what one of them released; None elsewhere.
    """

    server_round: int
    clip_norm: float
    noise_multiplier: float
    clients_per_round: int
    num_replies: int
    available: int | None = None
    num_clients: int | None = None
    mu_squared: float | None = None

    def charge(
        self, num_clients: int | None = None, sampling: str = "fixed_size"
    ) -> charge_lib.RoundCharge:
        """Returns the round's cost.

        Args:
          num_clients: N, where the round does not know its own; else the
            smaller of the two counts. None: the round's own, or m (no
            amplification by sampling).
          sampling: "fixed_size" or "shuffled".
        """
        known = [n for n in (self.num_clients, num_clients) if n is not None]
        return charge_lib.RoundCharge(
            sampling=sampling,
            num_clients=min(known, default=self.clients_per_round),
            clients_per_round=self.clients_per_round,
            event=dp_accounting.NoOpDpEvent()
            if math.isinf(self.noise_multiplier)
            else dp_accounting.GaussianDpEvent(self.noise_multiplier),
        )


class RoundHistory:
    """The rounds released, on disk where a ledger is kept.

    Attributes:
      released: the rounds.
      earlier: charges of rounds that the ledger holds and that others
        released: a process that is gone, or another run.
      target_epsilon: the most that may be spent; None for no limit.
      target_delta: at this delta.
      accountant: "rdp" or "pld", for the limit.
    """

    def __init__(
        self,
        target_epsilon: float | None,
        target_delta: float | None,
        accountant: str,
    ):
        if (target_epsilon is None) != (target_delta is None):
            raise ValueError(
                "target_epsilon and target_delta must be given both or not at "
                f"all, got {target_epsilon!r} and {target_delta!r}."
            )
        if target_epsilon is not None:
            target_epsilon = _validate.positive(target_epsilon=target_epsilon)
            target_delta = _validate.inside_unit_interval(target_delta=target_delta)
        self.target_epsilon = target_epsilon
        self.target_delta = target_delta
        self.accountant = _validate.one_of(
            charge_lib.ACCOUNTANTS, accountant=accountant
        )
        self.released: list[ReleasedRound] = []
        self.earlier: list[Any] = []
        self._spent = accountant_lib.PrivacyAccountant()
        self._ledger: ledger_lib.PrivacyLedger | None = None
        self._in_ledger = 0

    def open_ledger(
        self,
        ledger: str | os.PathLike[str] | ledger_lib.PrivacyLedger,
        mechanism: Mapping[str, Any],
        expected_head: str | None = None,
    ) -> None:
        """Keeps a ledger from now on, and takes over what it holds.

        Rounds that stand in it and are not known here are charged here too: the
        process that released them is gone, or another run has clients in
        common. Rounds that are known and do not stand in it are written.

        Args:
          ledger: a ledger, or the file of one, which is gone on with if it is
            there.
          mechanism: for the header of a new file.
          expected_head: the last line that was seen of it, if any.

        Raises:
          LedgerTamperedError: if it does not contain that line.
          ValueError: if it holds rounds of another neighbouring relation, or
            fewer than were known to be in it.
          LedgerError: if it cannot be gone on with.
        """
        if isinstance(ledger, ledger_lib.PrivacyLedger):
            self._take_over(ledger, expected_head)
            return
        ours = ledger_lib.PrivacyLedger(
            ledger,
            mode="append",
            target_epsilon=self.target_epsilon,
            target_delta=self.target_delta,
            mechanism=dict(mechanism),
            expected_head=expected_head,
        )
        try:
            self._take_over(ours, expected_head)
        except BaseException:
            ours.close()
            raise

    def _take_over(
        self, ledger: ledger_lib.PrivacyLedger, expected_head: str | None
    ) -> None:
        if ledger.rounds < self._in_ledger:
            raise ValueError(
                f"ledger must be the one that held {self._in_ledger} rounds "
                f"when the state was taken, got {ledger.path} with "
                f"{ledger.rounds}."
            )
        if expected_head is not None:
            ledger.require(expected_head)
        begun_later = self._in_ledger == 0
        self._charge_unknown(ledger)
        self._ledger = ledger
        if begun_later:
            for released in self.released:
                self._write(ledger, released, written_later=True)
        self._in_ledger = ledger.rounds

    def _charge_unknown(self, ledger: ledger_lib.PrivacyLedger) -> None:
        """Charges the lines of a ledger that others have written."""
        if ledger.rounds == self._in_ledger:
            return
        unknown = ledger.contents().entries[self._in_ledger :]
        charges = [self._charge_of_entry(entry, ledger) for entry in unknown]
        for charge in charges:
            self._spend(charge)
            self.earlier.append(charge)
        self._in_ledger = ledger.rounds
        _logger.warning(
            "The ledger %s holds %d rounds that others released; they are "
            "charged as well.",
            ledger.path,
            len(unknown),
        )

    @property
    def rounds_known(self) -> int:
        """How many of the ledger's rounds are counted here."""
        return self._in_ledger

    def close(self) -> None:
        """Lets go of the ledger."""
        if self._ledger is not None:
            self._ledger.close()

    def affords(self, planned: ReleasedRound) -> bool:
        """Whether a round may be run without passing the target."""
        if self._ledger is not None:
            self._charge_unknown(self._ledger)
        return (
            self.target_epsilon is None
            or self.epsilon_after(planned) <= self.target_epsilon
        )

    def add(self, released: ReleasedRound) -> None:
        """Charges a round, on disk first.

        Raises:
          LedgerWriteError: if its line could not be written. Nothing is
            charged then, and the round must not be released.
        """
        if self._ledger is not None:
            self._charge_unknown(self._ledger)
            self._write(self._ledger, released)
            self._in_ledger = self._ledger.rounds
        self._spend(self._charge_of(released))
        self.released.append(released)

    def _write(
        self,
        ledger: ledger_lib.PrivacyLedger,
        released: ReleasedRound,
        **details: Any,
    ) -> None:
        ledger.record(
            ledger.rounds,
            cohort_size=released.clients_per_round,
            **self._ledger_line(released),
            **details,
            **dataclasses.asdict(released),
        )

    # What differs where each client is private by itself (`local_rounds`).

    def epsilon_after(self, planned: ReleasedRound) -> float:
        """Returns what epsilon at `target_delta` would be after one more round.

        Only where there is a target.
        """
        return self._spent.epsilon_after(
            self._charge_of(planned),
            cast(float, self.target_delta),
            self.accountant,
        )

    def _spend(self, charge: Any) -> None:
        self._spent.add(charge)

    def _charge_of(self, released: ReleasedRound) -> Any:
        return released.charge()

    def _charge_of_entry(
        self,
        entry: ledger_contents.LedgerEntry,
        ledger: ledger_lib.PrivacyLedger,
    ) -> Any:
        """Returns what somebody else's line costs here, or raises."""
        if entry.charge is None or entry.charge.sampling != "fixed_size":
            raise ValueError(
                "ledger must hold rounds of fixed_size sampling and with "
                f"a central charge only, got {ledger.path} with one of "
                f"{entry.charge!r}: its neighbouring relation is another, "
                "and no one epsilon covers both."
            )
        return entry.charge

    def _charge_to_json(self, charge: Any) -> Any:
        return charge.to_json()

    def _charge_from_json(self, written: Any) -> Any:
        return charge_lib.RoundCharge.from_json(written)

    def _ledger_line(self, released: ReleasedRound) -> dict[str, Any]:
        return {"charge": released.charge()}

    def epsilon(
        self,
        num_clients: int | None,
        delta: float,
        sampling: str,
        accountant: str,
    ) -> float:
        """Returns epsilon at delta; see `DPFedAvgFixed.privacy_epsilon`."""
        _validate.one_of(SAMPLINGS, sampling=sampling)
        if num_clients is not None:
            num_clients = _validate.positive_integer(num_clients=num_clients)
            self._require_seen(num_clients)
        elif any(r.num_clients is None for r in self.released):
            raise ValueError(
                "num_clients must be given: the client manager did not tell "
                "how many clients there were (it has no num_available or no "
                "sample)."
            )
        charges = collections.Counter(
            released.charge(num_clients, sampling) for released in self.released
        )
        charges.update(
            dataclasses.replace(charge, sampling=sampling) for charge in self.earlier
        )
        history = accountant_lib.PrivacyAccountant()
        for charge, count in charges.items():
            history.add(charge, count)
        return history.epsilon(delta, accountant)

    def _require_seen(self, num_clients: int) -> None:
        seen = [r.available for r in self.released if r.available is not None]
        if seen and num_clients > max(seen):
            raise ValueError(
                f"num_clients must be at most {max(seen)}, the most clients "
                f"that were ever connected when a cohort was drawn, got "
                f"{num_clients}: sampling hides a client only among those who "
                "are there. Leave num_clients out, and each round is charged "
                "with the number that was there."
            )

    def state(self) -> dict[str, Any]:
        """Returns what a restarted server has to know, as JSON values."""
        return {
            "released": [dataclasses.asdict(r) for r in self.released],
            "earlier": [self._charge_to_json(each) for each in self.earlier],
            "ledger_rounds": self._in_ledger,
            "ledger_head": None if self._ledger is None else self._ledger.head,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a state; to be called before `open_ledger`."""
        self.released = [ReleasedRound(**fields) for fields in state["released"]]
        self.earlier = [self._charge_from_json(each) for each in state["earlier"]]
        for charge in map(self._charge_of, self.released):
            self._spend(charge)
        for charge in self.earlier:
            self._spend(charge)
        self._in_ledger = int(state["ledger_rounds"])
