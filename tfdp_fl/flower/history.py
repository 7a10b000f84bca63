"""The charged rounds, their cost, and what the budget still allows.

For correlated noise, also the state on which later rounds depend: its noise state, and
which clients took part in which round.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdp_fl import _signals, _validate, accounting, mechanisms
from tfdp_fl.accounting import account as account_lib
from tfdp_fl.terms import Json, PrivacyUnit, TrustModel

if TYPE_CHECKING:
    from tfdp_fl.mechanisms.contribution import NoiseStateLike

# Returns the name of the client that a node belongs to.
ClientOf = Callable[[int], str | int]


@dataclasses.dataclass(frozen=True)
class ChargedRound:
    """A round that was charged, whether or not it was released.

    Attributes:
      server_round: Flower's number of the round.
      clip_norm: S, to which its clients clipped.
      num_replies: The number of clients in the sum; None if the round was charged
        before clients were asked, and not released.
      charge: Its cost against anyone who sees the models: one Gaussian for all that it
        released, with m, N, and how the m clients were drawn.
      is_released: False for a round that was abandoned after its clients were drawn.
    """

    server_round: int
    clip_norm: float
    num_replies: int | None
    charge: accounting.RoundCharge
    is_released: bool = True


class RoundHistory:
    """The charged rounds: all rounds in the ledger, or those charged here.

    The ledger may also hold rounds that were released by an earlier process, or by
    another strategy on some of the same clients. They count equally.

    Attributes:
      charged: The rounds charged to this strategy.
      budget: The budget; None for no limit.
      ledger: The open ledger, or None.
    """

    def __init__(
        self,
        sampling: str,
        budget: accounting.PrivacyBudget | None,
        ledger: str | os.PathLike[str] | accounting.PrivacyLedger | None,
        description: str,
        privacy_unit: str = PrivacyUnit.CLIENT,
    ):
        """Opens the ledger, if there is one.

        Raises:
          ValueError: It has rounds with another neighbouring relation.
          LedgerError: It cannot be continued.
        """
        self.charged: list[ChargedRound] = []
        self.budget, self._sampling = budget, sampling
        self.ledger: accounting.PrivacyLedger | None = None
        self._account = account_lib.PrivacyAccount(TrustModel.CENTRAL, 1)
        if ledger is None:
            return
        kinds = (str, os.PathLike, accounting.PrivacyLedger)
        _validate.instance_of(kinds, ledger=ledger)
        if isinstance(ledger, accounting.PrivacyLedger):
            self.ledger = ledger
        else:
            self.ledger = accounting.PrivacyLedger(
                ledger,
                mode="append",
                target_epsilon=budget.epsilon if budget else None,
                target_delta=budget.delta if budget else None,
                mechanism={"trust_model": TrustModel.CENTRAL, "name": description},
                privacy_unit=privacy_unit,
            )
        try:
            self._check_entries()
            self._account.attach_ledger("", self.ledger, self.ledger.run)
        except ValueError:
            if self.ledger is not ledger:
                self.ledger.close()
            raise

    @property
    def num_rounds(self) -> int:
        """The number of charged rounds, whichever strategy released them."""
        return len(self.charged) if self.ledger is None else self.ledger.rounds

    @property
    def num_from_ledger(self) -> int:
        """The number of rounds in the ledger that others released."""
        return self.num_rounds - len(self.charged)

    def accountant(self) -> accounting.PrivacyAccountant:
        """Returns the cost of all charged rounds."""
        self._refresh()
        return self._account.central

    def _refresh(self, _: object = None) -> None:
        """Counts rounds that others have written to the ledger.

        Raises:
          ValueError: A round has no central charge, or another sampling.
        """
        ledger, known_head = self.ledger, self._account.known_ledgers.get("")
        if ledger is None or ledger.head == known_head:
            return
        with ledger.lock:  # Count exactly the entries that were checked.
            self._check_entries()
            self._account.refresh()

    def _check_entries(self) -> None:
        assert self.ledger is not None
        for entry in self.ledger.entries:
            if entry.charge is None or entry.charge.sampling != self._sampling:
                raise ValueError(
                    f"ledger must have only rounds of {self._sampling} sampling with a "
                    f"central charge, got {self.ledger.path} with one of "
                    f"{entry.charge!r}: its neighbouring relation differs, and one "
                    "epsilon cannot cover both."
                )

    def affords(self, planned: ChargedRound) -> bool:
        """Returns whether the budget allows a round."""
        self._refresh()
        return self.budget is None or self._account.allows(self.budget, planned.charge)

    def mark_released(self, num_replies: int) -> None:
        """Records that the last charged round is released."""
        self.charged[-1] = dataclasses.replace(
            self.charged[-1], num_replies=num_replies, is_released=True
        )

    def charge(self, charged: ChargedRound) -> accounting.Receipt:
        """Charges a round, first in the ledger; returns the receipt.

        An abandoned round is charged even beyond the budget, because what it reveals
        cannot be taken back. No further round is then started. After an error, nothing
        is charged, and the round must not be released.

        Raises:
          BudgetExceededError: The round would exceed the budget because others have
            written to the ledger since the budget was last checked.
          LedgerWriteError: Its line could not be written.
        """
        # (Not the number of replies: anyone who knows which clients never reply could
        # infer how many of the others were drawn.)
        details: Json = {}
        if charged.num_replies is None:
            details["charged_first"] = 1  # It is not yet known if it is released.
        elif not charged.is_released:
            details["abandoned"] = 1
        budgets = [self.budget] if self.budget and "abandoned" not in details else []
        # An interrupt waits until the round is counted here as well.
        with _signals.defer_signals():
            paid = self._account.charge(
                charged.charge,
                budgets=budgets,
                ask=self._refresh,
                round_index=self.num_rounds,
                cohort_size=int(charged.charge.clients_per_round),
                details={
                    "server_round": charged.server_round,
                    "clip_norm": charged.clip_norm,
                    **details,
                },
            )
            self.charged.append(charged)
        return paid


class CorrelatedNoiseState:
    """The secret state of correlated noise between rounds, in addition to the model.

    Attributes:
      client_of: Returns the name of a node's client; None if every node is a client.
      record: Records which clients took part in which round.
      noise_state: The noise state; None before the first round.
    """

    def __init__(
        self, mechanism: mechanisms.CorrelatedNoise, client_of: ClientOf | None
    ):
        if client_of is not None and not callable(client_of):
            raise TypeError(f"client_of must be a function or None, got {client_of!r}.")
        self.client_of = client_of
        self.record = mechanism.participation_record()
        self.noise_state: NoiseStateLike = None
        self._mechanism = mechanism
        # Each node's client when the round's clients were drawn.
        self._names: dict[Hashable, str | int] = {}

    def eligible(self, nodes: Iterable[Hashable]) -> tuple[list[Hashable], int]:
        """Returns a node for each client that may take part, and the number of clients.

        Raises:
          TypeError: `client_of` returns something other than a string or an integer.
        """
        name_of: Callable[[Any], str | int] = self.client_of or int
        self._names = {node: name_of(node) for node in nodes}
        for name in self._names.values():
            if isinstance(name, bool) or not isinstance(name, (str, int)):
                raise TypeError(
                    f"client_of must return strings or integers, got {name!r}."
                )
        by_client = {name: node for node, name in self._names.items()}
        eligible = [by_client[name] for name in self.record.eligible(by_client)]
        return eligible, len(by_client)

    def begin(self, model: Sequence[np.ndarray]) -> None:
        """Creates the noise state (zeros) for a model in the first round.

        Raises:
          ValueError: The model's shapes differ from those in earlier rounds.
        """
        shapes = tuple(array.shape for array in model)
        if self.noise_state is None:
            self.noise_state = self._mechanism.init_noise_state(
                mechanisms.PrivacyContext(clients_per_round=1, shapes=shapes)
            )
        state_shapes = tuple(tuple(b.shape[1:]) for b in self.noise_state.buffers)
        if shapes != state_shapes:
            raise ValueError(
                "The wrapped strategy must send a model of the same shapes in "
                f"every round, {state_shapes}, because the noise is correlated across "
                f"rounds, got {shapes}."
            )

    def record_round(
        self, noise_state: NoiseStateLike, nodes: Iterable[Hashable]
    ) -> None:
        """Stores a round's noise state, and which nodes were in its sum."""
        self.record.add([self._names[node] for node in nodes])
        self.noise_state = noise_state
