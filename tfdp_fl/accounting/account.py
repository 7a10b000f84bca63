"""What was spent, and the one act that spends.

`PrivacyAccount.charge` is the only place of the package that moves spending: in
rounds, private evaluations, searches and the rounds of servers. Under the account's
lock it asks whoever may refuse, then the budgets, writes every ledger, and then memory.
What it returns is the receipt without which nothing can be released.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdp_fl import _signals, _validate
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import ledger
from tfdp_fl.accounting.accountant import PrivacyAccountant, one_at_a_time
from tfdp_fl.accounting.budget import BudgetExceededError, PrivacyBudget
from tfdp_fl.accounting.gaussian import epsilon_of_mu_squared
from tfdp_fl.accounting.rounding import format_up
from tfdp_fl.terms import Json, TrustModel

# What is released beside the rounds stands in ledgers as a run of its own, with
# an id that begins so and one line: every reader of a ledger counts it.
_EVALUATION = "evaluation "


def new_evaluation() -> str:
    """Returns the id of a release that is not a round."""
    return _EVALUATION + ledger.new_run()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherRun:
    """What another run spent, as a ledger tells it.

    Attributes:
      charges: Its rounds, and how often each.
      mu_squared: The most that one client can have spent in it.
    """

    charges: collections.Counter[charge_lib.RoundCharge]
    mu_squared: float


class ChargeError(RuntimeError):
    """A charge was asked for within another, or a release without its charge."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Charge:
    """What `PrivacyAccount.charge` was asked for; once it is paid, a receipt.

    Attributes:
      cost: What the release costs.
      round_index: The round, from 0.
      cohort_size: How many clients were drawn.
      name: The id of a release that is not a round; None for a round.
      local: As in a `LedgerEntry`.
      details: What else ledgers keep of it.
    """

    cost: charge_lib.RoundCharge
    round_index: int
    cohort_size: int
    name: str | None
    local: dict[str, float] | None
    details: Json
    _uses: int = 0  # Set when it is paid.

    def use(self) -> None:
        """Called by whatever releases; raises ChargeError unless it is paid for.

        A receipt is good for as many releases as were charged, mostly one.
        """
        if self._uses < 1:
            raise ChargeError(
                "A release needs a charge of its own, got one that was not paid, or "
                "used before. Nothing was released."
            )
        self._uses -= 1


class _ChargeLock:
    """An account's lock, which refuses whoever holds it already.

    A callback that is called within a charge and asks for another would wait for ever.
    """

    def __init__(self) -> None:
        self._lock, self._holder = threading.Lock(), (0, 0)

    def __enter__(self) -> None:
        this = process, _ = os.getpid(), threading.get_ident()
        if self._holder == this:
            raise ChargeError(
                "A charge was asked for while another one of the same account is "
                "made, by a callback that is called within it (allow_round, "
                "on_round_charged, check_release): ask when the round is over, in "
                "on_round_released or on_epoch_end. Nothing of it was charged."
            )
        if self._holder[0] not in (0, process):
            self._lock = threading.Lock()  # A fork: nobody here holds the old one.
        self._lock.acquire()
        self._holder = this

    def __exit__(self, *_: object) -> None:
        self._holder = 0, 0
        with contextlib.suppress(RuntimeError):  # Of a fork within a charge.
            self._lock.release()


@dataclasses.dataclass(frozen=True)
class _Kept:
    """An open ledger that gets a line of every charge.

    Attributes:
      ledger: The ledger.
      run: The id under which the account's rounds stand in it.
      elsewhere: The most that any client may have spent elsewhere, not in this ledger.
    """

    ledger: ledger.PrivacyLedger
    run: str
    elsewhere: float


class LocalAccount:
    """Per-client spending on Gaussian releases that clients noise themselves.

    A release of sensitivity s with noise sigma has mu = s/sigma. Gaussian
    releases of one client compose exactly: mu^2 adds up (Dong, Roth & Su 2019,
    corollary 3.3), so a client's whole history is one Gaussian, of noise
    multiplier 1/sqrt(sum mu^2), and epsilon needs no accountant. A client that
    takes no part spends nothing. The guarantee reported is that of the client
    that spent most.

    Attributes:
      num_clients: The number of clients, N.
      mu_squared: Each client's sum of mu^2, float64 [N].
      participations: How often each client took part, int64 [N].
    """

    def __init__(self, num_clients: int):
        self.num_clients = _validate.positive_integer(num_clients=num_clients)
        self.mu_squared = np.zeros(self.num_clients)
        self.participations = np.zeros(self.num_clients, np.int64)
        # Kept, as it is asked for in every round, of however many clients.
        self._most = 0.0

    @property
    def max_participations(self) -> int:
        """How often the most-seen client took part."""
        return int(self.participations.max())

    @property
    def max_mu_squared(self) -> float:
        """The largest sum of mu^2 over the clients."""
        return self._most

    def max_mu_squared_after(
        self,
        positions: np.ndarray,
        mu_squared: float,
        limit: int | None = None,
        whole_passes: int = 0,
    ) -> float:
        """Returns `max_mu_squared` after releases, each client in at most `limit`."""
        members, times = np.unique(positions, return_counts=True)
        if whole_passes:
            more = np.full(self.num_clients, whole_passes)
            more[members] += times
            members, times = np.arange(self.num_clients), more
        if limit is not None:
            times = np.clip(limit - self.participations[members], 0, times)
        members, times = members[times > 0], times[times > 0]
        after = self.mu_squared[members] + times * mu_squared
        return float(after.max(initial=self._most))

    def add(self, positions: np.ndarray, mu_squared: float) -> None:
        """Charges one release to each of a cohort's clients.

        Args:
          positions: Int64 [m], the clients' positions; a client listed twice is
            charged twice.
          mu_squared: (sensitivity / sigma)^2 of the release; infinity for one
            without noise.

        Raises:
          ValueError: `mu_squared` is negative or NaN; nothing is charged then.
        """
        if not mu_squared >= 0:
            raise ValueError(
                f"mu_squared must be a number of at least 0, got {mu_squared!r}."
            )
        np.add.at(self.mu_squared, positions, mu_squared)
        np.add.at(self.participations, positions, 1)
        self._most = float(self.mu_squared[positions].max(initial=self._most))

    def restore(self, mu_squared: np.ndarray, participations: np.ndarray) -> None:
        """Takes over what each client had spent, float64 [N] and int64 [N]."""
        self.mu_squared[:], self.participations[:] = mu_squared, participations
        self._most = float(self.mu_squared.max())

    def max_mu_squared_after_cohorts(
        self,
        cohorts: Sequence[np.ndarray],
        mu_squared: float,
        max_participations: int | None = None,
        whole_passes: int = 0,
    ) -> float:
        """Returns `max_mu_squared` as it would be after the given cohorts.

        Args:
          cohorts: The clients' positions in each, int64 [m].
          mu_squared: As in `add`.
          max_participations: The most rounds that one client takes part in.
          whole_passes: How often every client takes part besides.
        """
        drawn = np.concatenate([np.zeros(0, np.int64), *cohorts])
        return self.max_mu_squared_after(
            drawn, mu_squared, max_participations, whole_passes
        )

    def max_mu_squared_after_draws(
        self,
        draws: int,
        mu_squared: float,
        max_participations: int | None = None,
    ) -> float:
        """Returns the most `max_mu_squared` can be after more rounds.

        Which clients they will draw is not known: any client may be in all of
        them.

        Args:
          draws: How many rounds.
          mu_squared: (sensitivity / sigma)^2 of one client's release in each.
          max_participations: The most rounds that one client takes part in.
        """
        if max_participations is None:
            # (No draws cost nothing, also where a draw has no noise.)
            return self._most + draws * mu_squared if draws else self._most
        more = np.clip(max_participations - self.participations, 0, draws)
        # What is not drawn costs nothing, also where a draw has no noise.
        added = np.multiply(more, mu_squared, where=more > 0, out=np.zeros(len(more)))
        return float((self.mu_squared + added).max())


class PrivacyAccount:
    """The cost of the rounds that ran, and of those in ledgers.

    A central guarantee is composed over rounds under the sampling that ran. A
    local one (and a guarantee per record) is composed for each client over the
    rounds it took part in; the client that was seen most sets the epsilon.

    Attributes:
      trust_model: "central", "local" or "none".
      own: This run's rounds, and how often each.
      others: What runs of other models spent on the same clients, by run
        and ledger file, as the files tell it.
      central: The `PrivacyAccountant` of all rounds, those of other runs
        included.
      per_client: The `LocalAccount` of the clients' own releases.
      lost_mu_squared: What any one client may have spent on top in rounds that
        a crash cut off between their charge and their checkpoint: nobody can
        tell any more which clients those were.
      known_ledgers: The hash of the last line that is counted of each ledger, by the
        ledger's name.
    """

    def __init__(self, trust_model: str, num_clients: int):
        self.trust_model = trust_model
        self.own: collections.Counter[charge_lib.RoundCharge] = collections.Counter()
        self.others: dict[str, OtherRun] = {}
        self.central = PrivacyAccountant()
        self.per_client = LocalAccount(num_clients)
        self.lost_mu_squared = 0.0
        self.known_ledgers: dict[str, str] = {}
        self._charge_lock = _ChargeLock()
        self._ledgers: dict[str, _Kept] = {}
        self._rounds = 0
        # Counts what else than a round was counted since.
        self._version = 0
        # What was asked about last, and the accountant after it.
        self._asked: (
            tuple[int, int, charge_lib.RoundCharge, PrivacyAccountant] | None
        ) = None
        # Of a budget, rounds that it is known to allow, the own ones included.
        self._allowed: dict[
            PrivacyBudget, collections.Counter[charge_lib.RoundCharge]
        ] = {}

    @property
    def rounds(self) -> int:
        """How many rounds were charged to this run."""
        return self._rounds

    @property
    def rounds_of_others(self) -> int:
        """How many rounds of other runs are counted as well."""
        return sum(each.charges.total() for each in self.others.values())

    @property
    def evaluations(self) -> int:
        """How many releases beside the rounds are among `others`."""
        return len(self.charges_of_evaluations)

    @property
    def charges_of_evaluations(self) -> dict[str, charge_lib.RoundCharge]:
        """What each release beside the rounds cost, by its id."""
        return {
            name: charge
            for name, other in self.others.items()
            if name.startswith(_EVALUATION)
            for charge in other.charges
        }

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
        """What counts against every client on top of its own account.

        Rounds that were lost, and other runs.
        """
        others = sum(each.mu_squared for each in self.others.values())
        return self.lost_mu_squared + others

    def set_population(self, num_clients: int) -> None:
        """Sets the number of clients; clients other than before start anew.

        What was spent centrally does not depend on who the clients are.
        """
        if self.per_client.num_clients != num_clients:
            self.per_client = LocalAccount(num_clients)

    def attach_ledger(
        self, name: str, kept: ledger.PrivacyLedger, run: str, elsewhere: float = 0.0
    ) -> None:
        """Counts what an open ledger holds; writes every charge into it from now on.

        All ledgers of a run hold the same rounds of it. A start that does not go on
        with them is another run, and needs another id.

        Args:
          name: What the account knows it by.
          kept: The ledger to write to.
          run: The id under which the account's rounds stand in it.
          elsewhere: The most that any client may have spent elsewhere.
        """
        self._ledgers[name] = _Kept(kept, run, elsewhere)
        try:
            self.refresh()
        except ValueError:
            del self._ledgers[name]
            raise

    def detach_ledger(self, name: str) -> None:
        """Stops writing charges to a ledger, which may then be closed."""
        self._ledgers.pop(name, None)

    def pause_charges(self) -> contextlib.AbstractContextManager[None]:
        """Has every charge wait until the block ends, in which a ledger may join."""
        return self._charge_lock

    def refresh(self) -> None:
        """Counts what others wrote into the ledgers that are kept."""
        for name, kept in self._ledgers.items():
            if kept.ledger.head != self.known_ledgers.get(name):
                self.merge_ledger(kept.ledger.contents(), kept.run, name)

    def charge(
        self,
        cost: charge_lib.RoundCharge,
        *,
        budgets: Iterable[PrivacyBudget] = (),
        ask: Callable[[Charge], None] | None = None,
        positions: np.ndarray | None = None,
        mu_squared: float = 0.0,
        round_index: int = 0,
        cohort_size: int | None = None,
        name: str | None = None,
        details: Mapping[str, Any] | None = None,
        uses: int = 1,
        resumes: bool = False,
    ) -> Charge:
        """Charges a release, or raises; nothing can be released without.

        Args:
          cost: What it costs centrally.
          budgets: Budgets that the total must not exceed.
          ask: Called first; raises to refuse.
          positions: Int64 [K], the clients of a round; None: none in particular.
          mu_squared: (sensitivity / sigma)^2 of one client's release; used
            only if the guarantee is composed client by client.
          round_index: The round, from 0.
          cohort_size: How many clients were drawn; None: as `cost` says.
          name: The new id of a release that is not a round; ledgers list it as if it
            were another run.
          details: What else ledgers keep of it.
          uses: How many releases it pays for.
          resumes: Whether `name` may be known. Then it is not charged again: whoever
            asks releases nothing twice.

        Returns:
          The receipt.

        Raises:
          ChargeError: It was asked for within another charge of this account.
          BudgetExceededError: A budget would be exceeded. Nothing is charged.
          LedgerError: A ledger could not be written, and nothing may be released. If
            others had their line by then, it is charged all the same.
          ValueError: No one guarantee covers it and what was charged before; or a
            name was charged before.
        """
        positions = np.zeros(0, np.int64) if positions is None else positions
        mu_squared = mu_squared if self.by_client else 0.0
        receipt = Charge(
            cost=cost,
            round_index=round_index,
            cohort_size=round(
                cost.clients_per_round if cohort_size is None else cohort_size
            ),
            name=name,
            local=None,
            details=dict(details or {}),
        )
        with (
            # Broken off between, a ledger could have a line that memory has not.
            _signals.defer_signals(),
            self._charge_lock,
            contextlib.ExitStack() as stack,
        ):
            most = 0.0
            if self.by_client:
                most = self.per_client.max_mu_squared_after(positions, mu_squared)
                receipt.local = {"mu_squared": mu_squared, "max_mu_squared": most}
            if ask is not None:
                ask(receipt)
            for _, kept in sorted(self._ledgers.items()):
                # Accounts of one process may share a ledger.
                stack.enter_context(kept.ledger.lock)
            self.refresh()
            key = self._key(name)
            if key not in self.others:
                self.central.require_relation(cost.relation)
                for budget in budgets:
                    self._require(budget, cost, most)
                self._write(receipt, positions, mu_squared)
            elif not resumes or [*self.others[key].charges] != [cost]:
                raise ValueError(
                    f"name must be new, got {name!r}, which was charged before: give "
                    "another release another name."
                )
            receipt._uses = uses
        return receipt

    @one_at_a_time
    def epsilon_with(
        self, budget: PrivacyBudget, cost: charge_lib.RoundCharge, most: float = 0.0
    ) -> float:
        """Returns what epsilon would be at a budget's delta after another charge.

        Args:
          budget: At whose delta, by whose accountant.
          cost: The charge.
          most: Of a guarantee for each client, the largest sum of mu^2 after it.
        """
        if self.by_client:
            spent = most + self.mu_squared_elsewhere
            return epsilon_of_mu_squared(spent, budget.delta)
        asked = self._asked
        if asked is None or asked[:3] != (self._version, self._rounds, cost):
            # Several ask in a round, and a copy costs by the kinds of rounds so far.
            after = self.central.with_charges(cost)
            self._asked = asked = self._version, self._rounds, cost, after
        return asked[3].epsilon(budget.delta, budget.accountant)

    @one_at_a_time
    def note_allowed(
        self,
        budget: PrivacyBudget,
        version: int,
        charges: collections.Counter[charge_lib.RoundCharge],
    ) -> None:
        """Notes that a budget allows rounds, beside all that was counted.

        Args:
          budget: The budget that is asked.
          version: `version` when they were computed: what was counted since then, the
            note does not know of.
          charges: What the rounds cost.
        """
        if version == self._version and not self.by_client:
            self._allowed[budget] = self.own + charges

    @property
    def version(self) -> int:
        """Counts how often something else than a round was counted."""
        return self._version

    def allows(
        self, budget: PrivacyBudget, cost: charge_lib.RoundCharge, most: float = 0.0
    ) -> bool:
        """Returns whether a budget allows another charge; see `epsilon_with`."""
        allowed = self._allowed.get(budget)
        if allowed is not None and self.own[cost] < allowed[cost]:
            return True
        return self.epsilon_with(budget, cost, most) <= budget.epsilon

    def _require(
        self, budget: PrivacyBudget, cost: charge_lib.RoundCharge, most: float
    ) -> None:
        if not self.allows(budget, cost, most):
            epsilon = self.epsilon_with(budget, cost, most)
            raise BudgetExceededError(
                f"A release would bring epsilon to {format_up(epsilon)} at delta="
                f"{format_up(budget.delta)}, and the budget is "
                f"{format_up(budget.epsilon)}. Nothing was charged or released."
            )

    def _write(self, receipt: Charge, positions: np.ndarray, mu_squared: float) -> None:
        """Writes a charge into all ledgers, then into memory.

        Memory has it as soon as one ledger has, whatever comes between.
        """
        heads = {name: kept.ledger.head for name, kept in self._ledgers.items()}
        written = not heads
        try:
            for kept in self._ledgers.values():
                local = receipt.local and {
                    "mu_squared": receipt.local["mu_squared"],
                    "max_mu_squared": receipt.local["max_mu_squared"] + kept.elsewhere,
                }
                kept.ledger.record(
                    receipt.round_index,
                    receipt.cost,
                    receipt.cohort_size,
                    local=local,
                    run=receipt.name or kept.run,
                    **receipt.details,
                )
        finally:
            for name, kept in self._ledgers.items():
                if kept.ledger.head != heads[name]:
                    self.known_ledgers[name], written = kept.ledger.head, True
            if written:
                self._move(receipt, positions, mu_squared)

    @one_at_a_time
    def _move(self, receipt: Charge, positions: np.ndarray, mu_squared: float) -> None:
        cost = receipt.cost
        self.central.add(cost)
        if receipt.name is not None:
            one = OtherRun(charges=collections.Counter([cost]), mu_squared=mu_squared)
            self.others = {**self.others, self._key(receipt.name): one}
            self._forget_allowed()
            return
        self.own[cost] += 1
        self._rounds += 1
        self.per_client.add(positions, mu_squared)
        for budget, allowed in [*self._allowed.items()]:
            if self.own[cost] > allowed[cost]:
                del self._allowed[budget]

    def _key(self, name: str | None) -> str:
        """Returns the key in `others` of what is charged outside of rounds."""
        # Several ledgers may list an evaluation, which is in all of them.
        if name is None or name.startswith(_EVALUATION) or not self._ledgers:
            return name or ""
        return f"{name} in {min(self._ledgers)}"

    def _forget_allowed(self) -> None:
        self._version += 1
        self._allowed.clear()

    @one_at_a_time
    def merge_ledger(
        self, contents: ledger.LedgerContents, run: str, source: str
    ) -> None:
        """Counts what a ledger lists and is not counted yet.

        Rounds of this run that only the ledger knows (a crash cut them off
        from their checkpoint) and all rounds of the other runs in it. To read
        a ledger again adds what was written to it since, and nothing else.
        Two files that list the same other run count twice: a run may have
        gone on from one checkpoint in two places.

        Args:
          contents: What the ledger holds.
          run: The id of this run.
          source: The name of the file.

        Raises:
          ValueError: A round of the ledger has a guarantee of another kind;
            nothing is counted then.
        """
        own = self.own
        others: dict[str, OtherRun] = {}
        for other, entries in contents.by_run().items():
            charges = collections.Counter(
                entry.charge for entry in entries if entry.charge is not None
            )
            if other == run:
                own = own | charges  # Of each kind, as many as either knows of.
                continue
            if any(
                (entry.local if self.by_client else entry.charge) is None
                for entry in entries
            ):
                raise ValueError(
                    "path must be a ledger whose rounds all have a "
                    f"{self.trust_model} guarantee, to be counted together with "
                    f"this run's, got one with rounds of run {other} that "
                    "have none."
                )
            # Several files may list one release, which is in all of them.
            beside = other.startswith(_EVALUATION)
            spent = ledger.largest_mu_squared(entries) if self.by_client else 0.0
            others[other if beside else f"{other} in {source}"] = OtherRun(
                charges=charges, mu_squared=spent
            )
        self.merge_runs(others, own)
        self.known_ledgers[source] = contents.head

    @one_at_a_time
    def merge_runs(
        self,
        others: dict[str, OtherRun],
        own: collections.Counter[charge_lib.RoundCharge] | None = None,
    ) -> None:
        """Counts what is known of other runs, and of this one, if more than so far."""
        own = self.own if own is None else own
        counted = dict(self.others)
        for name, other in others.items():
            known = counted.get(name, other)
            # By two accounts of one run, neither complete.
            counted[name] = OtherRun(
                charges=other.charges | known.charges,
                mu_squared=max(other.mu_squared, known.mu_squared),
            )
        runs = (*(each.charges for each in counted.values()), own)
        self.central = PrivacyAccountant(
            item for charges in runs for item in charges.items()
        )
        self.own, self.others, self._rounds = own, counted, own.total()
        self._forget_allowed()

    @one_at_a_time
    def epsilon(
        self, delta: float, accountant: str = "rdp", coarse: bool = False
    ) -> float:
        """Returns the epsilon of the mechanism's own guarantee at delta.

        A composition of Gaussian releases of one client is converted exactly
        (Balle & Wang 2018), so `accountant` makes no difference there.
        """
        if self.by_client:
            return epsilon_of_mu_squared(self.max_mu_squared, delta)
        return self.central.epsilon(delta, accountant, coarse)

    def state(
        self, per_client: bool = True, beside: ledger.PrivacyLedger | None = None
    ) -> Json:
        """Returns what a checkpoint must keep: JSON values and arrays.

        Args:
          per_client: Whether rounds depend on what each client had part in; they do
            where the guarantee is composed client by client.
          beside: This run's ledger, which is merged when the state is read. If it has
            all rounds, the state leaves them out: checkpoints do not grow.
        """
        kept, accounts = per_client or self.by_client, self.per_client
        has_all = beside is not None and beside.rounds_of(beside.run) >= self._rounds
        return {
            "num_clients": accounts.num_clients,
            "mu_squared": accounts.mu_squared.copy() if kept else None,
            "participations": accounts.participations.copy() if kept else None,
            "trust_model": self.trust_model,
            "rounds": self._rounds,
            "charges": [] if has_all else _as_json(self.own),
            "others": {
                name: [_as_json(other.charges), other.mu_squared]
                for name, other in self.others.items()
                if not (beside and beside.rounds_of(name))
            },
            "lost_mu_squared": self.lost_mu_squared,
        }

    @classmethod
    def from_state(cls, state: Json) -> PrivacyAccount:
        """Returns the spending that `state` was taken of, but for what was left out."""
        spending = cls(state["trust_model"], state["num_clients"])
        others = {
            name: OtherRun(charges=_from_json(charges), mu_squared=float(mu_squared))
            for name, (charges, mu_squared) in state["others"].items()
        }
        spending.merge_runs(others, _from_json(state["charges"]))
        if state["mu_squared"] is not None:
            spending.per_client.restore(state["mu_squared"], state["participations"])
        spending.lost_mu_squared = float(state["lost_mu_squared"])
        return spending


def _as_json(charges: collections.Counter[charge_lib.RoundCharge]) -> list:
    return [[charge.to_json(), count] for charge, count in charges.items()]


def _from_json(charges: list) -> collections.Counter[charge_lib.RoundCharge]:
    read = charge_lib.RoundCharge.from_json
    return collections.Counter({read(charge): count for charge, count in charges})
