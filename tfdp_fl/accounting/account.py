"""A run's privacy account, and the one operation that spends from it.

`PrivacyAccount.charge` is the only code in the package that spends: for
rounds, private evaluations, searches and servers' rounds. Under the account's lock, it
first runs every check that may refuse, then checks the budgets, then writes to every
ledger and to memory. It returns the receipt that a release uses up.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfdp_fl import _signals, _validate
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import ledger
from tfdp_fl.accounting.accountant import (
    BudgetExceededError,
    PrivacyAccountant,
    PrivacyBudget,
    one_at_a_time,
)
from tfdp_fl.accounting.gaussian import epsilon_of_mu_squared
from tfdp_fl.accounting.rounding import format_up
from tfdp_fl.terms import Json, TrustModel

# Ledgers list a release outside the rounds as a separate run of one line, whose id
# starts with this prefix. So every reader of a ledger counts it.
_EVALUATION = "evaluation "


def new_evaluation_id() -> str:
    """Returns the id of a release that is not a round."""
    return _EVALUATION + ledger.new_id()


class Cost(NamedTuple):
    """What a charge costs.

    Attributes:
      central: The central cost; None if it has only a local one.
      mu_squared: (sensitivity / sigma)^2 of one client's own release; 0 without one.
      place: Its place in a segment of correlated noise, if any (`ledger.PLACE`).
    """

    central: charge_lib.RoundCharge | None
    mu_squared: float
    place: ledger.Place | None = None


# The cost of each charge of a run, by the charge's id.
_Costs = Mapping[str, Cost]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherRun:
    """The spending of another run, or of a release outside the rounds.

    Attributes:
      costs: The cost of each of its charges, by the charge's id.
      mu_squared: The most that one client can have spent in all of them.
    """

    costs: _Costs
    mu_squared: float

    def with_run(self, other: OtherRun) -> OtherRun:
        """Returns the spending of both lists of charges, each charge counted once."""
        new = other.costs.keys() - self.costs.keys()
        # As if one client had been in all charges that are not known.
        mu_squared = self.mu_squared + math.fsum(
            other.costs[charge_id].mu_squared for charge_id in new
        )
        if self.costs.keys() <= other.costs.keys():
            mu_squared = min(mu_squared, other.mu_squared)
        return OtherRun(costs={**self.costs, **other.costs}, mu_squared=mu_squared)


# The fields of a line's local spending.
_LOCAL = ("mu_squared", "max_mu_squared")


class ChargeError(RuntimeError):
    """A charge was requested within another, or a release without a charge."""


@dataclasses.dataclass(eq=False)
class _Uses:
    """How many releases a receipt still pays for: one number for all of its copies.

    (Its lock can be neither pickled nor copied.)
    """

    left: int = 0  # Set when it is paid.
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@dataclasses.dataclass(kw_only=True, eq=False)
class Receipt:
    """A request to `PrivacyAccount.charge`; once it is paid, a receipt.

    Attributes:
      cost: The cost of the release.
      round_index: The round, from 0.
      cohort_size: The number of clients drawn.
      name: The id of a release that is not a round; None for a round.
      local: As in a `LedgerEntry`.
      details: Further facts to store in ledgers.
      charge_id: The random id by which ledgers know it.
    """

    cost: charge_lib.RoundCharge
    round_index: int
    cohort_size: int
    name: str | None
    local: dict[str, float] | None
    details: Json
    charge_id: str = dataclasses.field(default_factory=ledger.new_charge_id)
    _paid: _Uses = dataclasses.field(default_factory=_Uses)

    def redeem(self) -> float | None:
        """Uses the receipt for one release, of as many as were charged (usually one).

        Returns:
          The noise multiplier that was paid for (`RoundCharge.noise_multiplier`).

        Raises:
          ChargeError: The release is not paid for.
        """
        with self._paid.lock:
            if self._paid.left < 1:
                raise ChargeError(
                    "Each release needs its own charge, got one that was not paid or "
                    "has already been used. Nothing was released."
                )
            self._paid.left -= 1
            return self.cost.noise_multiplier


class _ChargeLock:
    """An account's lock, which raises an error for a thread that already holds it.

    Otherwise, a callback that requests a charge within a charge would deadlock.
    """

    def __init__(self) -> None:
        self._lock, self._holder = threading.Lock(), (0, 0)

    def __enter__(self) -> None:
        caller = process, _ = os.getpid(), threading.get_ident()
        if self._holder == caller:
            raise ChargeError(
                "A charge was requested while another one of the same account was "
                "being made, by a callback called within it (allow_round, "
                "on_round_charged, check_release): request it after the round, in "
                "on_round_released or on_epoch_end. It was not charged."
            )
        if self._holder[0] not in (0, process):
            self._lock = threading.Lock()  # After a fork, no thread here holds it.
        self._lock.acquire()
        self._holder = caller

    def __exit__(self, *_: object) -> None:
        self._holder = 0, 0
        with contextlib.suppress(RuntimeError):  # After a fork within a charge.
            self._lock.release()


@dataclasses.dataclass(frozen=True)
class _AttachedLedger:
    """An open ledger to which every charge is written.

    Attributes:
      ledger: The ledger.
      run: The run id of the account's rounds in it.
    """

    ledger: ledger.PrivacyLedger
    run: str


class LocalAccount:
    """Per-client spending on Gaussian releases to which clients add the noise.

    A release of sensitivity s with noise sigma has mu = s/sigma. Gaussian releases of
    one client compose exactly, as mu^2 adds up (Dong, Roth & Su 2019, corollary 3.3).
    So a client's whole history is one Gaussian with the noise multiplier
    1/sqrt(sum mu^2), and epsilon needs no accountant. A client spends only in rounds
    in which it takes part. The guarantee is reported for the client that spent most.

    Attributes:
      num_clients: The number of clients, N.
      mu_squared: Each client's sum of mu^2, float64 [N].
      participations: How often each client took part, int64 [N].
    """

    def __init__(self, num_clients: int):
        self.num_clients = _validate.positive_integer(num_clients=num_clients)
        self.mu_squared = np.zeros(self.num_clients)
        self.participations = np.zeros(self.num_clients, np.int64)
        # Cached, as every round asks for it, however many clients there are.
        self._max_mu_squared = 0.0

    @property
    def max_participations(self) -> int:
        """The number of rounds of the client that took part most often."""
        return int(self.participations.max())

    @property
    def max_mu_squared(self) -> float:
        """The largest sum of mu^2 over the clients."""
        return self._max_mu_squared

    def max_mu_squared_after(
        self,
        positions: np.ndarray,
        mu_squared: float,
        limit: int | None = None,
        whole_passes: int = 0,
    ) -> float:
        """Returns `max_mu_squared` after more releases.

        Args:
          positions: Int64 [K], the client of each release; repeats count.
          mu_squared: (sensitivity / sigma)^2 of each release.
          limit: The most rounds of a client, including earlier ones; None: no limit.
          whole_passes: Further releases of every client.
        """
        members, times = np.unique(positions, return_counts=True)
        if whole_passes:
            counts = np.full(self.num_clients, whole_passes)
            counts[members] += times
            members, times = np.arange(self.num_clients), counts
        if limit is not None:
            times = np.clip(limit - self.participations[members], 0, times)
        members, times = members[times > 0], times[times > 0]
        after = self.mu_squared[members] + times * mu_squared
        return float(after.max(initial=self._max_mu_squared))

    def add(self, positions: np.ndarray, mu_squared: float) -> None:
        """Charges one release to each of a cohort's clients.

        Args:
          positions: Int64 [m], the clients' positions; a client listed twice is
            charged twice.
          mu_squared: (sensitivity / sigma)^2 of the release; infinite without noise.

        Raises:
          ValueError: `mu_squared` is negative or NaN; nothing is charged then.
        """
        if not mu_squared >= 0:
            raise ValueError(
                f"mu_squared must be a number of at least 0, got {mu_squared!r}."
            )
        np.add.at(self.mu_squared, positions, mu_squared)
        np.add.at(self.participations, positions, 1)
        self._max_mu_squared = float(
            self.mu_squared[positions].max(initial=self._max_mu_squared)
        )

    def restore(self, mu_squared: np.ndarray, participations: np.ndarray) -> None:
        """Restores each client's spending, float64 [N] and int64 [N]."""
        self.mu_squared[:], self.participations[:] = mu_squared, participations
        self._max_mu_squared = float(self.mu_squared.max())

    def max_mu_squared_after_draws(
        self,
        draws: int,
        mu_squared: float,
        max_participations: int | None = None,
    ) -> float:
        """Returns the largest possible `max_mu_squared` after more rounds.

        It is not known which clients will be drawn: any client may be in all rounds.

        Args:
          draws: The number of rounds.
          mu_squared: (sensitivity / sigma)^2 of one client's release in each.
          max_participations: The maximum number of rounds of a client.
        """
        if max_participations is None:
            # (Zero draws cost nothing, even if a draw has no noise.)
            return self._max_mu_squared + (draws * mu_squared if draws else 0.0)
        remaining = np.clip(max_participations - self.participations, 0, draws)
        # A client that is not drawn spends nothing, even if a draw has no noise.
        added = np.multiply(
            remaining, mu_squared, where=remaining > 0, out=np.zeros(len(remaining))
        )
        return float((self.mu_squared + added).max())


class PrivacyAccount:
    """The cost of the rounds that ran, and of the rounds in ledgers.

    A central guarantee is composed over rounds under the sampling that ran. A local
    guarantee, or one per record, is composed for each client over the rounds in which
    it took part; the client that took part most determines epsilon.

    Attributes:
      trust_model: "central", "local" or "none".
      own: The costs of this run's rounds, with counts.
      others: By id, the spending of other runs on the same clients, according to
        ledgers, and of every release outside the rounds.
      central: The `PrivacyAccountant` of all rounds, including those of other runs.
      per_client: The `LocalAccount` of the clients' own releases.
      lost_mu_squared: What any client may have spent in addition, in this run's rounds
        that only ledgers list: they were lost in a crash before their checkpoint, or
        the run was resumed in two places. There is no record of which clients those
        were.
      known_ledgers: By ledger name, the hash of the last line that is counted.
      has_unseen_rounds: Whether ledgers list rounds of this run whose results it does
        not have; False again after `Run.begin_segment`.
    """

    def __init__(self, trust_model: str, num_clients: int):
        self.trust_model = trust_model
        self.own: collections.Counter[charge_lib.RoundCharge] = collections.Counter()
        self.others: dict[str, OtherRun] = {}
        self.central = PrivacyAccountant()
        self.per_client = LocalAccount(num_clients)
        self.lost_mu_squared = 0.0
        self.known_ledgers: dict[str, str] = {}
        self.has_unseen_rounds = False
        self._charge_lock = _ChargeLock()
        # The charges that `own` counts.
        self._own_costs: dict[str, Cost] = {}
        self._ledgers: dict[str, _AttachedLedger] = {}
        self._rounds = 0
        # Incremented when something other than a round is counted.
        self._version = 0
        # The last cost asked about, and the accountant with it added.
        self._cached: (
            tuple[int, int, charge_lib.RoundCharge, PrivacyAccountant] | None
        ) = None
        # By budget, the rounds that it is known to allow, including this run's own.
        self._allowed: dict[
            PrivacyBudget, collections.Counter[charge_lib.RoundCharge]
        ] = {}

    @property
    def rounds(self) -> int:
        """The number of rounds charged to this run."""
        return self._rounds

    @property
    def rounds_of_others(self) -> int:
        """The number of releases counted here that are not rounds of this run."""
        return sum(len(run.costs) for run in self.others.values())

    @property
    def evaluations(self) -> int:
        """The number of releases outside the rounds among `others`."""
        return len(self.evaluation_costs)

    @property
    def evaluation_costs(self) -> list[charge_lib.RoundCharge]:
        """The central cost of each release outside the rounds."""
        costs = [cost.central for _, _, cost in self._evaluations()]
        return [cost for cost in costs if cost is not None]

    def _evaluations(self) -> Iterator[tuple[str, str, Cost]]:
        """Yields the name, the charge's id and the cost of each such release."""
        for name, run in self.others.items():
            for charge_id, cost in run.costs.items():
                if name.startswith(_EVALUATION):
                    yield name, charge_id, cost

    def lacks_rounds(self, contents: ledger.LedgerContents, run: str) -> bool:
        """Returns whether a ledger lacks rounds of this run."""
        return any(name == run for name, _, _ in self._unwritten(contents, run))

    def _unwritten(
        self, contents: ledger.LedgerContents, run: str
    ) -> Iterator[tuple[str, str, Cost]]:
        """Yields this run's charges that a ledger lacks, as name, id and cost.

        Args:
          contents: The ledger's contents.
          run: The name of this run; a release outside the rounds has a name of its own.
        """
        known = {entry.charge_id for entry in contents.entries}
        rounds = [(run, charge_id, cost) for charge_id, cost in self._own_costs.items()]
        for name, charge_id, cost in [*rounds, *self._evaluations()]:
            if charge_id not in known:
                yield name, charge_id, cost

    @property
    def by_client(self) -> bool:
        """Whether the guarantee is composed client by client."""
        return self.trust_model == TrustModel.LOCAL

    @property
    def max_mu_squared(self) -> float:
        """The most that one client can have spent, in all runs."""
        return self.per_client.max_mu_squared + self.mu_squared_elsewhere

    @property
    def mu_squared_elsewhere(self) -> float:
        """What counts against every client in addition to its own account.

        These are lost rounds and other runs.
        """
        others = sum(run.mu_squared for run in self.others.values())
        return self.lost_mu_squared + others

    def set_population(self, num_clients: int) -> None:
        """Sets the number of clients; a changed population starts from zero.

        Central spending does not depend on who the clients are.
        """
        if self.per_client.num_clients != num_clients:
            self.per_client = LocalAccount(num_clients)

    def attach_ledger(self, name: str, kept: ledger.PrivacyLedger, run: str) -> None:
        """Counts the rounds in an open ledger; writes every later charge to it as well.

        Args:
          name: The account's name for the ledger.
          kept: The ledger to write to.
          run: The run id of the account's rounds in it.
        """
        if kept.head != self.known_ledgers.get(name):
            self.merge_ledger(kept.contents(), run, name)
        self._ledgers = {**self._ledgers, name: _AttachedLedger(kept, run)}

    def write_missing(self, round_index: int, details: Json) -> None:
        """Writes to each attached ledger the charges of this run that it lacks.

        Args:
          round_index: The round of the lines.
          details: Facts for the lines.
        """
        for name, attached in sorted(self._ledgers.items()):
            with _signals.defer_signals(), attached.ledger.lock:
                contents = attached.ledger.contents()
                if contents.head != self.known_ledgers.get(name):
                    self.merge_ledger(contents, attached.run, name)
                for run, charge_id, cost in self._unwritten(contents, attached.run):
                    assert cost.central is not None  # A run's own charges have one.
                    local = self._local_fields(
                        cost.mu_squared, self.per_client.max_mu_squared
                    )
                    attached.ledger.record(
                        round_index,
                        cost.central,
                        round(cost.central.clients_per_round),
                        local=local,
                        run=run,
                        charge_id=charge_id,
                        **{
                            **details,
                            **self._facts_of_lines,
                            **({ledger.PLACE: list(cost.place)} if cost.place else {}),
                            "written_later": True,
                        },
                    )
                self.known_ledgers[name] = attached.ledger.head

    def _local_fields(
        self, mu_squared: float, max_mu_squared: float
    ) -> dict[str, float] | None:
        """Returns a line's local spending, of all charges of this run that are known.

        Args:
          mu_squared: That of one client's release.
          max_mu_squared: The most that one client spent according to `per_client`.
        """
        if not self.by_client:
            return None
        total = max_mu_squared + self.lost_mu_squared
        return dict(zip(_LOCAL, (mu_squared, total), strict=True))

    @property
    def _facts_of_lines(self) -> Json:
        return {ledger.COVERS_ALL: True} if self.by_client else {}

    def detach_ledger(self, name: str) -> None:
        """Stops writing charges to a ledger; close it before the pause ends.

        Call it within `pause_charges`. Otherwise, a charge that has already asked
        whether the ledger is open would be made without a line in it.
        """
        self._ledgers = {k: kept for k, kept in self._ledgers.items() if k != name}

    def pause_charges(self) -> contextlib.AbstractContextManager[None]:
        """Makes charges wait until the block ends; to open and to close a ledger."""
        return self._charge_lock

    def refresh(self) -> None:
        """Counts what others have written to the attached ledgers."""
        for name, attached in self._ledgers.items():
            if attached.ledger.head != self.known_ledgers.get(name):
                self.merge_ledger(attached.ledger.contents(), attached.run, name)

    def charge(
        self,
        cost: charge_lib.RoundCharge,
        *,
        budgets: Iterable[PrivacyBudget] = (),
        ask: Callable[[Receipt], None] | None = None,
        positions: np.ndarray | None = None,
        mu_squared: float = 0.0,
        round_index: int = 0,
        cohort_size: int | None = None,
        name: str | None = None,
        details: Mapping[str, Any] | None = None,
        uses: int = 1,
        resumes: bool = False,
    ) -> Receipt:
        """Charges a release, or raises an error. Nothing can be released uncharged.

        Args:
          cost: The central cost.
          budgets: Budgets that the total must not exceed.
          ask: Called first; raises an error to refuse.
          positions: Int64 [K], the clients of a round; None: no clients. A release
            with a name is about all clients.
          mu_squared: (sensitivity / sigma)^2 of one client's release; used
            only if the guarantee is composed client by client.
          round_index: The round, from 0.
          cohort_size: How many clients were drawn; None: as in `cost`.
          name: The new id of a release that is not a round; ledgers list it as if it
            were another run.
          details: Further facts for ledgers.
          uses: How many releases it pays for.
          resumes: Whether `name` may be known. It then costs nothing; the caller must
            not release twice.

        Returns:
          The receipt.

        Raises:
          ChargeError: It was requested within another charge of this account.
          BudgetExceededError: A budget would be exceeded. Nothing is charged.
          LedgerError: A ledger could not be written, and nothing may be released. If
            other ledgers already had the line, it is charged anyway.
          ValueError: No single guarantee covers it and the earlier charges; or the name
            was charged before.
        """
        mu_squared = mu_squared if self.by_client else 0.0
        if positions is None and name is None and mu_squared:
            raise ValueError(
                "positions must be given with mu_squared, got None: the round's "
                "clients would not be charged."
            )
        positions = np.zeros(0, np.int64) if positions is None else positions
        receipt = Receipt(
            cost=cost,
            round_index=round_index,
            cohort_size=round(
                cost.clients_per_round if cohort_size is None else cohort_size
            ),
            name=name,
            local=None,
            details={**(details or {}), **self._facts_of_lines},
        )
        with (
            # An interrupt could leave a ledger with a line that memory lacks.
            _signals.defer_signals(),
            self._charge_lock,
            contextlib.ExitStack() as stack,
        ):
            max_mu_squared = 0.0
            if self.by_client:
                max_mu_squared = self.per_client.max_mu_squared_after(
                    positions, mu_squared
                )
            if name is None:
                receipt.local = self._local_fields(mu_squared, max_mu_squared)
            elif self.by_client:  # It concerns every client, as a separate run.
                max_mu_squared += mu_squared
                receipt.local = dict.fromkeys(_LOCAL, mu_squared)
            if ask is not None:
                ask(receipt)
            for _, attached in sorted(self._ledgers.items()):
                # Accounts of one process may share a ledger.
                stack.enter_context(attached.ledger.lock)
            self.refresh()
            known = self.others.get(name or "")
            if known and not (
                resumes and all(c.central == cost for c in known.costs.values())
            ):
                raise ValueError(
                    f"name must be new, got {name!r}, which was charged before: use "
                    "another name."
                )
            if known is None or not self._is_in_all_ledgers(name):
                self.central.check(cost)
                for budget in budgets:
                    self._require_affordable(budget, cost, max_mu_squared)
                self._write(receipt, positions, mu_squared)
            receipt._paid.left = uses
        return receipt

    @one_at_a_time
    def epsilon_with(
        self,
        budget: PrivacyBudget,
        cost: charge_lib.RoundCharge,
        max_mu_squared: float = 0.0,
    ) -> float:
        """Returns what epsilon would be after another charge.

        Args:
          budget: Its delta and accountant are used.
          cost: The charge.
          max_mu_squared: For a guarantee composed client by client, the largest sum of
            mu^2 after the charge.
        """
        if self.by_client:
            spent = max_mu_squared + self.mu_squared_elsewhere
            return epsilon_of_mu_squared(spent, budget.delta)
        cached = self._cached
        if cached is None or cached[:3] != (self._version, self._rounds, cost):
            # A round asks several times, and copying takes time per distinct cost.
            after = self.central.with_charges(cost)
            self._cached = cached = self._version, self._rounds, cost, after
        return cached[3].epsilon(budget.delta, budget.accountant)

    @one_at_a_time
    def note_allowed(
        self,
        budget: PrivacyBudget,
        version: int,
        charges: collections.Counter[charge_lib.RoundCharge],
    ) -> None:
        """Records that a budget allows rounds on top of everything counted so far.

        Args:
          budget: The budget.
          version: `version` from before that was computed; nothing counted since then
            is included.
          charges: The costs of the rounds.
        """
        if version == self._version and not self.by_client:
            self._allowed[budget] = self.own + charges

    @property
    def version(self) -> int:
        """Changes whenever something other than a round is counted."""
        return self._version

    def allows(
        self,
        budget: PrivacyBudget,
        cost: charge_lib.RoundCharge,
        max_mu_squared: float = 0.0,
    ) -> bool:
        """Returns whether a budget allows another charge; see `epsilon_with`."""
        allowed = self._allowed.get(budget)
        if allowed is not None and self.own[cost] < allowed[cost]:
            return True
        return self.epsilon_with(budget, cost, max_mu_squared) <= budget.epsilon

    def _require_affordable(
        self, budget: PrivacyBudget, cost: charge_lib.RoundCharge, max_mu_squared: float
    ) -> None:
        if not self.allows(budget, cost, max_mu_squared):
            epsilon = self.epsilon_with(budget, cost, max_mu_squared)
            raise BudgetExceededError(
                f"A release would bring epsilon to {format_up(epsilon)} at delta="
                f"{format_up(budget.delta)}, and the budget is "
                f"{format_up(budget.epsilon)}. Nothing was charged or released."
            )

    def _is_in_all_ledgers(self, name: str | None) -> bool:
        attached = self._ledgers.values()
        return all(each.ledger.rounds_of(name or "") for each in attached)

    def _write(
        self, receipt: Receipt, positions: np.ndarray, mu_squared: float
    ) -> None:
        """Writes a charge to all ledgers, then to memory.

        If any ledger has it, so does memory, even after an error in between.
        """
        ledgers = self._ledgers
        heads = {name: attached.ledger.head for name, attached in ledgers.items()}
        try:
            for attached in ledgers.values():
                attached.ledger.record(
                    receipt.round_index,
                    receipt.cost,
                    receipt.cohort_size,
                    local=receipt.local,
                    run=receipt.name or attached.run,
                    charge_id=receipt.charge_id,
                    **receipt.details,
                )
        finally:
            # A user who asks twice cannot wait for a ledger's disk, but for this.
            with _signals.defer_signals(repeated=True):
                written = {
                    name: attached.ledger.head
                    for name, attached in ledgers.items()
                    if attached.ledger.head != heads[name]
                }
                if written or not heads:
                    self._add_to_memory(receipt, positions, mu_squared)
                # Last, so that what memory lacks is read from the ledger.
                self.known_ledgers.update(written)

    @one_at_a_time
    def _add_to_memory(
        self, receipt: Receipt, positions: np.ndarray, mu_squared: float
    ) -> None:
        cost = receipt.cost
        charge_id = _charge_key(
            receipt.charge_id, receipt.details, min(self._ledgers, default="")
        )
        costs = {charge_id: Cost(cost, mu_squared, ledger.place_of(receipt.details))}
        self.central.add(cost)
        if (name := receipt.name) is not None:
            run = OtherRun(costs=costs, mu_squared=mu_squared)
            if name in self.others:
                run = self.others[name].with_run(run)
            self.others = {**self.others, name: run}
            self._forget_allowed()
            return
        self._own_costs.update(costs)
        self.own[cost] += 1
        self._rounds += 1
        self.per_client.add(positions, mu_squared)
        for budget, allowed in [*self._allowed.items()]:
            if self.own[cost] > allowed[cost]:
                del self._allowed[budget]

    def _forget_allowed(self) -> None:
        self._version += 1
        self._allowed.clear()

    @one_at_a_time
    def merge_ledger(
        self,
        contents: ledger.LedgerContents,
        run: str,
        source: str,
        clients_known: bool = False,
    ) -> None:
        """Counts every charge that a ledger lists and that is not counted yet.

        These are rounds of this run that only the ledger has (a crash came before their
        checkpoint, or the run was resumed in two places), and all charges of the other
        runs in it.

        Args:
          contents: The ledger's contents.
          run: The id of this run.
          source: The name of the file.
          clients_known: Whether `per_client` already has this run's rounds.

        Raises:
          ValueError: A round of the ledger has a different type of guarantee;
            nothing is counted then.
        """
        own: _Costs = {}
        others: dict[str, OtherRun] = {}
        for name, entries in contents.by_run().items():
            if any(
                (entry.local if self.by_client else entry.charge) is None
                for entry in entries
            ):
                raise ValueError(
                    "path must be a ledger whose rounds all have a "
                    f"{self.trust_model} guarantee, to be counted together with "
                    f"this run's, got one with rounds of run {name} that "
                    "have none."
                )
            costs = {
                _charge_key(entry.charge_id, entry.details, source): _cost_of(entry)
                for entry in entries
            }
            if name == run:
                own = costs
            else:
                largest = ledger.largest_mu_squared(entries) if self.by_client else 0.0
                others[name] = OtherRun(costs=costs, mu_squared=largest)
        with _signals.defer_signals():  # What is known is counted in full.
            self._count(own, others, clients_known)
            self.known_ledgers[source] = contents.head

    def merge_others(self, account: PrivacyAccount, run: str) -> None:
        """Counts the other runs of another account, of which one may be this run."""
        others = dict(account.others)
        own = others.pop(run).costs if run in others else {}
        with _signals.defer_signals():
            self._count(own, others)

    @one_at_a_time
    def _count(
        self,
        own: _Costs,
        others: Mapping[str, OtherRun],
        clients_known: bool = False,
    ) -> None:
        """Counts charges that are not counted yet, or raises ValueError.

        Args:
          own: Charges of this run.
          others: Charges of other runs, by the run.
          clients_known: Whether `per_client` already has this run's charges.
        """
        counted, central = dict(self.others), [*self.central.charges]
        new_own = _new_costs(self._own_costs, own)
        new_own |= _costs_of_branches({**self._own_costs, **new_own})
        for name, run in others.items():
            known = counted.get(name)
            known_costs = known.costs if known else {}
            new = _new_costs(known_costs, run.costs)
            new |= _costs_of_branches({**known_costs, **new})
            central += _count_central(new.values()).items()
            run = dataclasses.replace(run, costs={**run.costs, **new})
            counted[name] = known.with_run(run) if known else run
        own_charges = _count_central(new_own.values())
        self.central = PrivacyAccountant([*central, *own_charges.items()])
        self._own_costs = {**self._own_costs, **new_own}
        self.own, self.others = self.own + own_charges, counted
        self._rounds = self.own.total()
        self._forget_allowed()
        if new_own and not clients_known:
            self.has_unseen_rounds = True
            if self.by_client:
                spent = [cost.mu_squared for cost in new_own.values()]
                self.lost_mu_squared += math.fsum(spent)

    @one_at_a_time
    def epsilon(
        self, delta: float, accountant: str = "rdp", coarse: bool = False
    ) -> float:
        """Returns the epsilon of the mechanism's own guarantee at delta.

        For Gaussian releases composed client by client, the conversion is exact (Balle
        & Wang 2018), so `accountant` makes no difference.
        """
        if self.by_client:
            return epsilon_of_mu_squared(self.max_mu_squared, delta)
        return self.central.epsilon(delta, accountant, coarse)

    def state(
        self, per_client: bool = True, beside: ledger.PrivacyLedger | None = None
    ) -> Json:
        """Returns what a checkpoint must store: JSON values and arrays.

        Args:
          per_client: Whether to include each client's spending; always included if the
            guarantee is composed client by client.
          beside: This run's ledger, which is merged when the state is read. If it has
            all rounds, the state omits them, so that checkpoints do not grow.
        """
        with_clients, clients = per_client or self.by_client, self.per_client
        has_all = beside is not None and beside.rounds_of(beside.run) >= self._rounds
        return {
            "num_clients": clients.num_clients,
            "mu_squared": clients.mu_squared.copy() if with_clients else None,
            "participations": clients.participations.copy() if with_clients else None,
            "trust_model": self.trust_model,
            "rounds": self._rounds,
            "charges": [] if has_all else _as_json(self._own_costs),
            "others": {
                name: [_as_json(other.costs), other.mu_squared]
                for name, other in self.others.items()
                if not (beside and beside.rounds_of(name) >= len(other.costs))
            },
            "lost_mu_squared": self.lost_mu_squared,
            "has_unseen_rounds": self.has_unseen_rounds,
        }

    @classmethod
    def from_state(cls, state: Json) -> PrivacyAccount:
        """Returns the account that `state` was taken from, without omitted rounds."""
        account = cls(state["trust_model"], state["num_clients"])
        others = {
            name: OtherRun(costs=_from_json(costs), mu_squared=float(mu_squared))
            for name, (costs, mu_squared) in state["others"].items()
        }
        account._count(_from_json(state["charges"]), others, clients_known=True)
        if state["mu_squared"] is not None:
            account.per_client.restore(state["mu_squared"], state["participations"])
        account.lost_mu_squared = float(state["lost_mu_squared"])
        account.has_unseen_rounds = bool(state["has_unseen_rounds"])
        return account


def _charge_key(charge_id: str, details: Mapping[str, Any], source: str) -> str:
    """Returns the key under which an account counts a charge.

    A copy of a search's directory can release a second result without a second charge,
    so a search counts once for each ledger that lists it.
    """
    return f"{charge_id} in {source}" if "search" in details else charge_id


def _new_costs(known: _Costs, costs: _Costs) -> dict[str, Cost]:
    """Returns the costs of the charges that are not known.

    Raises:
      ValueError: A known charge has another cost.
    """
    for charge_id in known.keys() & costs.keys():
        if known[charge_id] != costs[charge_id]:
            raise ValueError(
                f"path must be a ledger in which a charge costs what it costs in other "
                f"ledgers, got one in which the charge {charge_id:.80} costs something "
                "else."
            )
    return {charge_id: costs[charge_id] for charge_id in costs.keys() - known.keys()}


def _costs_of_branches(costs: _Costs) -> dict[str, Cost]:
    """Returns what branches of segments cost again; see `repeated_by_branches`."""
    places = {charge_id: cost.place for charge_id, cost in costs.items()}
    return {
        new_id: costs[charge_id]._replace(place=None)
        for new_id, charge_id in ledger.repeated_by_branches(places).items()
    }


def _cost_of(entry: ledger.LedgerEntry) -> Cost:
    mu_squared = entry.local["mu_squared"] if entry.local else 0.0
    return Cost(entry.charge, mu_squared, ledger.place_of(entry.details))


def _count_central(
    costs: Iterable[Cost],
) -> collections.Counter[charge_lib.RoundCharge]:
    return collections.Counter(cost.central for cost in costs if cost.central)


def _as_json(costs: _Costs) -> list:
    ids = collections.defaultdict(list)
    for charge_id, cost in costs.items():
        ids[cost].append(charge_id)
    return [
        [charge and charge.to_json(), mu_squared, place and list(place), each]
        for (charge, mu_squared, place), each in ids.items()
    ]


def _from_json(costs: list) -> dict[str, Cost]:
    return {
        charge_id: Cost(
            None if text is None else charge_lib.RoundCharge.from_json(text),
            float(mu_squared),
            None if place is None else (place[0], place[1], place[2]),
        )
        for text, mu_squared, place, ids in costs
        for charge_id in ids
    }
