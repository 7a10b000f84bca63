"""What a training run has spent, whatever its mechanism protects."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import ledger
from tfdp_fl.accounting.accountant import PrivacyAccountant
from tfdp_fl.accounting.gaussian import epsilon_of_mu_squared

CENTRAL, LOCAL, RECORD, NONE = "central", "local", "record", "none"
# Guarantees that are composed for each client.
BY_CLIENT = (LOCAL, RECORD)

# What is released beside the rounds stands in ledgers as a run of its own, with
# an id that begins so and one line: every reader of a ledger counts it.
_EVALUATION = "evaluation "


def new_evaluation() -> str:
    """Returns the id of a release beside the rounds."""
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


class LocalAccount:
    """Per-client spending on Gaussian releases that clients noise themselves.

    A release of sensitivity s with noise sigma has mu = s/sigma. Gaussian
    releases of one client compose exactly: mu^2 adds up (Dong, Roth & Su 2019,
    corollary 3.3), so a client's whole history is one Gaussian, of noise
    multiplier 1/sqrt(sum mu^2), and epsilon needs no accountant. A client that
    takes no part spends nothing. The guarantee reported is that of the client
    that spent most.

    Attributes:
      num_clients: N.
      mu_squared: Each client's sum of mu^2, float64 [N].
      participations: How often each client took part, int64 [N].
    """

    def __init__(self, num_clients: int):
        self.num_clients = _validate.positive_integer(num_clients=num_clients)
        self.mu_squared = np.zeros(self.num_clients)
        self.participations = np.zeros(self.num_clients, np.int64)

    @property
    def max_participations(self) -> int:
        """How often the most-seen client took part."""
        return int(self.participations.max())

    @property
    def max_mu_squared(self) -> float:
        """The largest sum of mu^2 over the clients."""
        return float(self.mu_squared.max())

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

    def copy(self) -> LocalAccount:
        """Returns an independent copy."""
        return copy.deepcopy(self)

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
          max_participations: After so many rounds a client sits out.
        """
        more = np.full(self.num_clients, draws)
        if max_participations is not None:
            more = np.clip(max_participations - self.participations, 0, draws)
        # What is not drawn costs nothing, also where a draw has no noise.
        added = np.multiply(more, mu_squared, where=more > 0, out=np.zeros(len(more)))
        return float((self.mu_squared + added).max())


class PrivacyAccount:
    """The cost of the rounds that ran, and of those that ledgers tell of.

    A central guarantee is composed over rounds under the sampling that ran. A
    local one (and a guarantee per record) is composed for each client over the
    rounds it took part in; the client that was seen most sets the epsilon.

    Attributes:
      guarantee: "central", "local", "record" or "none".
      own: This run's rounds, and how often each.
      others: What runs of other models spent on the same clients, by run
        and ledger file, as the files tell it.
      central: The `PrivacyAccountant` of all rounds, those of other runs
        included.
      per_client: The `LocalAccount` of the clients' own releases.
      lost_mu_squared: What any one client may have spent on top in rounds that
        a crash cut off between their charge and their checkpoint: nobody can
        tell any more which clients those were.
    """

    def __init__(self, guarantee: str, num_clients: int):
        self.guarantee = guarantee
        self.own: collections.Counter[charge_lib.RoundCharge] = collections.Counter()
        self.others: dict[str, OtherRun] = {}
        self.central = PrivacyAccountant()
        self.per_client = LocalAccount(num_clients)
        self.lost_mu_squared = 0.0

    @property
    def rounds(self) -> int:
        """How many rounds were charged to this run."""
        return self.own.total()

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
        return self.guarantee in BY_CLIENT

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

    def charge(
        self,
        charge: charge_lib.RoundCharge,
        positions: np.ndarray,
        mu_squared: float,
    ) -> None:
        """Charges one round.

        Args:
          charge: What the round costs centrally.
          positions: Int64 [K], the clients that took part.
          mu_squared: (sensitivity / sigma)^2 of one client's release; used
            only if the guarantee is composed client by client.
        """
        self.central.add(charge)
        self.own[charge] += 1
        self.per_client.add(positions, mu_squared if self.by_client else 0.0)

    def merge_ledger(
        self, contents: ledger.LedgerContents, run: str, source: str
    ) -> None:
        """Counts what a ledger tells of and is not counted yet.

        Rounds of this run that only the ledger knows (a crash cut them off
        from their checkpoint) and all rounds of the other runs in it. To read
        a ledger again adds what was written to it since, and nothing else.
        Two files that tell of the same other run count twice: a run may have
        gone on from one checkpoint in two places.

        Args:
          contents: The ledger.
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
                    f"{self.guarantee} guarantee, to be counted together with "
                    f"this run's, got one with rounds of run {other} that "
                    "have none."
                )
            # Several files may tell of one release, as it is in all of them.
            beside = other.startswith(_EVALUATION)
            spent = ledger.largest_mu_squared(entries) if self.by_client else 0.0
            others[other if beside else f"{other} in {source}"] = OtherRun(
                charges=charges, mu_squared=spent
            )
        self.merge_runs(others, own)

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
        self.own, self.others = own, counted

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

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint must keep: JSON values and arrays."""
        return {
            "mu_squared": self.per_client.mu_squared.copy(),
            "participations": self.per_client.participations.copy(),
            "guarantee": self.guarantee,
            "charges": _as_json(self.own),
            "others": {
                name: [_as_json(other.charges), other.mu_squared]
                for name, other in self.others.items()
            },
            "lost_mu_squared": self.lost_mu_squared,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PrivacyAccount:
        """Returns the spending that `state` was taken of."""
        spending = cls(state["guarantee"], len(state["mu_squared"]))
        others = {
            name: OtherRun(charges=_from_json(charges), mu_squared=float(mu_squared))
            for name, (charges, mu_squared) in state["others"].items()
        }
        spending.merge_runs(others, _from_json(state["charges"]))
        per_client = spending.per_client
        per_client.mu_squared[:] = state["mu_squared"]
        per_client.participations[:] = state["participations"]
        spending.lost_mu_squared = float(state["lost_mu_squared"])
        return spending


def _as_json(charges: collections.Counter[charge_lib.RoundCharge]) -> list:
    return [[charge.to_json(), count] for charge, count in charges.items()]


def _from_json(charges: list) -> collections.Counter[charge_lib.RoundCharge]:
    read = charge_lib.RoundCharge.from_json
    return collections.Counter({read(charge): count for charge, count in charges})
