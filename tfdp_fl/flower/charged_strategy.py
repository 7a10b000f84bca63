"""A strategy with a budget: what was released, what it cost, what a restart needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from tfdp_fl import _validate, mechanisms, schedules
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import correlated, history, report, sums, wrapped
from tfdp_fl.mechanisms import registry

_Wrapper = TypeVar("_Wrapper", bound="ChargedStrategy")
_STATE_FORMAT = "tfdp_fl flower state 2"


class ChargedStrategy:
    """A wrapped strategy, its arguments, and what its rounds have cost.

    Attributes:
      strategy: the wrapped strategy.
      num_clients: N.
      clients_per_round: m.
      rounds: T, or None.
      clip_norm: S, of the next round.
      on_client_failure: "exclude" or "abort".
      max_abandoned_rounds: after so many abandoned in a row the run ends.
      averages: whether the user vouched for the strategy.
      discarded_updates: how many updates arrived not finite, and became zero.
      rejected_replies: how many replies could not be used.
      stopped_before_round: the server's number of the last round that the
        budget did not allow; None if there was none.
    """

    _api: wrapped.Api

    def __init__(
        self,
        strategy: Any,
        mechanism: mechanisms.Mechanism,
        *,
        num_clients: int,
        clients_per_round: int,
        rounds: int | None = None,
        clip_norm: float | None = None,
        on_client_failure: str | None = None,
        max_abandoned_rounds: int | None = 10,
        averages: bool = False,
        ledger: str | os.PathLike[str] | ledger_lib.PrivacyLedger | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        accountant: str = "rdp",
        client_of: correlated.ClientOf | None = None,
    ):
        """Wraps a strategy.

        Args:
          strategy: what is to be wrapped (see `averages`).
          mechanism: what is released.
          num_clients: N. In each round at least so many must be connected.
          clients_per_round: m, how many of them are asked in each round, drawn
            by the operating system's random numbers.
          rounds: T. No more are begun; those that a ledger holds count. Needed
            where a mechanism splits a budget over them.
          clip_norm: S of the next round, if it is not the mechanism's first.
          on_client_failure: "exclude" (the others are released) or "abort" (the
            round is abandoned); None means "abort" if the clients share the
            noise (`noise_site="client"`), which is enough only if all of them
            reply, else "exclude". A reply of no use is no failure if they do:
            the update is zero, and the server adds the noise in its place.
          max_abandoned_rounds: how many rounds in a row may be abandoned before
            `RoundsAbandonedError` is raised; None for any number.
          averages: the user's word that a subclass of one of Flower's averaging
            strategies, with an aggregation of its own, makes what it should of
            one averaged reply.
          ledger: a `PrivacyLedger`, or the file of one, made or gone on with. A
            round's line is on the disk before its result is returned.
          target_epsilon: the budget: a round that would bring epsilon above it
            is not begun.
          target_delta: at this delta; both or neither.
          accountant: "rdp" or "pld", for the budget.
          client_of: for `CorrelatedNoise`: the name (a text or a whole number)
            of the client that a node is, by what the server knows of it. None:
            every node is a client of its own, and must keep its id.

        Raises:
          TypeError, ValueError: if an argument is not what it should be.
          LedgerError: if the ledger cannot be gone on with.
        """
        self.averages = _validate.instance_of(bool, averages=averages)
        wrapped.require_averaging(strategy, self.averages, self._api)
        self.strategy = strategy
        _validate.instance_of(mechanisms.Mechanism, mechanism=mechanism)
        if callable(mechanism.noise_multiplier):
            # A schedule that cannot change under the run.
            mechanism = mechanism.with_noise_multiplier(
                schedules.fixed(mechanism.noise_multiplier)
            )
        self._mechanism = mechanism
        self.num_clients = _validate.positive_integer(num_clients=num_clients)
        self.clients_per_round = _validate.positive_integer(
            clients_per_round=clients_per_round
        )
        if self.clients_per_round > self.num_clients:
            raise ValueError(
                f"clients_per_round must be at most num_clients={num_clients}, "
                f"got {clients_per_round!r}."
            )
        if rounds is not None:
            rounds = _validate.positive_integer(rounds=rounds)
        self.rounds = rounds
        self._clients_clip = sums.clients_clip(mechanism, self._deployment)
        self._remembered: correlated.Remembered | None = None
        if isinstance(mechanism, mechanisms.CorrelatedNoise):
            self._remembered = correlated.Remembered(mechanism, client_of)
        elif client_of is not None:
            raise ValueError(
                "client_of must be left out, as it does not matter with "
                f"{mechanism.name} which clients take part when, got {client_of!r}."
            )
        if clip_norm is not None:
            clip_norm = _validate.positive(clip_norm=clip_norm)
        # A clip that only the cohort tells is 0 before there is one.
        self.clip_norm = clip_norm or mechanism.first_clip_norm() or sums.NO_CLIP
        self.on_client_failure = _checked_failure(
            on_client_failure, mechanism.needs_exact_cohort
        )
        if max_abandoned_rounds is not None:
            max_abandoned_rounds = _validate.positive_integer(
                max_abandoned_rounds=max_abandoned_rounds
            )
        self.max_abandoned_rounds = max_abandoned_rounds
        self.accountant = accountant
        self._history = history.RoundHistory(
            cast(str, self._deployment.sampling),
            mechanism.guarantee == "local",
            history.budget_of(target_epsilon, target_delta, accountant),
        )
        self.discarded_updates = 0
        self.rejected_replies = 0
        self.stopped_before_round: int | None = None
        self._abandoned_in_a_row = 0
        if ledger is not None:
            self._history.open_ledger(ledger, self._header())

    def __getattr__(self, name: str) -> Any:
        if name == "strategy" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled: two of them would "
            "say what one has spent. Use state() and from_state(), with a ledger."
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.strategy!r}, {self.mechanism!r}, "
            f"num_clients={self.num_clients}, "
            f"clients_per_round={self.clients_per_round})"
        )

    # What was released, and what it cost.

    @property
    def mechanism(self) -> mechanisms.Mechanism:
        """What is released; it cannot be exchanged during a run."""
        return self._mechanism

    @property
    def released_rounds(self) -> tuple[history.ReleasedRound, ...]:
        """The rounds that this strategy was charged with."""
        return tuple(self._history.released)

    def privacy_epsilon(
        self, delta: float | None = None, accountant: str = "rdp"
    ) -> float:
        """Returns epsilon at delta after the rounds charged so far.

        Those of other strategies in the same ledger are among them.

        Args:
          delta: the failure probability; None means `target_delta`.
          accountant: "rdp" or "pld".

        Returns:
          Epsilon; infinity if a round was released without noise.

        Raises:
          ValueError: if an argument is not allowed.
        """
        return self._history.epsilon(self._delta(delta), accountant)

    def privacy_report(
        self, delta: float | None = None, accountant: str = "rdp"
    ) -> dict[str, Any]:
        """Returns what is guaranteed, and what was assumed, as JSON values.

        Args:
          delta: the failure probability; None means `target_delta`.
          accountant: "rdp" or "pld".

        Returns:
          epsilon (None if there is no guarantee), epsilon_if_cohorts_are_known
          (towards somebody who knows which clients were in which round), delta,
          accountant, guarantee ("central" or "local"), relation, rounds,
          rounds_from_ledger, clients_per_round, num_clients, noise_added_by,
          on_client_failure, strategy, averages, and caveats: sentences that have
          to be read with epsilon.
        """
        kind = type(self.strategy)
        by_server = self.mechanism.noise_site == "server"
        return {
            **report.facts(
                self._history,
                self.mechanism,
                self._delta(delta),
                accountant,
                self._remembered,
            ),
            "clients_per_round": self.clients_per_round,
            "num_clients": self.num_clients,
            "noise_added_by": "server" if by_server else "clients",
            "on_client_failure": self.on_client_failure,
            "strategy": f"{kind.__module__}.{kind.__qualname__}",
            "averages": self.averages,
        }

    def state(self) -> dict[str, Any]:
        """Returns what a restarted server has to know, as JSON values.

        To be saved together with the model, after each round. A round that
        clients are at work for is not in it. With `CorrelatedNoise` it is as
        secret as the data.
        """
        budget = self._history.budget
        return {
            "format": _STATE_FORMAT,
            "wrapper": type(self).__name__,
            "arguments": {
                "mechanism": {
                    "name": self.mechanism.registered_name,
                    "parameters": self.mechanism.parameters(),
                },
                "num_clients": self.num_clients,
                "clients_per_round": self.clients_per_round,
                "rounds": self.rounds,
                "clip_norm": self.clip_norm,
                "on_client_failure": self.on_client_failure,
                "max_abandoned_rounds": self.max_abandoned_rounds,
                "averages": self.averages,
                "target_epsilon": budget and budget.epsilon,
                "target_delta": budget and budget.delta,
                "accountant": self.accountant,
            },
            "abandoned_in_a_row": self._abandoned_in_a_row,
            "discarded_updates": self.discarded_updates,
            "rejected_replies": self.rejected_replies,
            "history": self._history.state(),
            "remembered": self._remembered and self._remembered.state(),
        }

    @classmethod
    def from_state(
        cls: type[_Wrapper],
        state: Mapping[str, Any],
        strategy: Any,
        *,
        ledger: str | os.PathLike[str] | ledger_lib.PrivacyLedger | None = None,
        **changes: Any,
    ) -> _Wrapper:
        """Returns a wrapper that goes on where another stopped.

        Args:
          state: what `state` returned.
          strategy: the strategy to be wrapped.
          ledger: the ledger that the other kept, if it did. Rounds that stand
            in it and not in the state were released all the same, and are
            charged.
          **changes: arguments of `PrivateStrategy` other than those the state was
            taken with.

        Raises:
          ValueError: if the state is not of this class, or the ledger is not
            the one that the state knows.
        """
        found = (state.get("format"), state.get("wrapper"))
        if found != (_STATE_FORMAT, cls.__name__):
            raise ValueError(
                f"state must be one of {cls.__name__} (format "
                f"{_STATE_FORMAT!r}), got {found!r}."
            )
        known = state["history"]["ledger"]
        if known is not None and ledger is None:
            raise ValueError(
                "ledger must be given, as the state was taken of a run that "
                "kept one: it may hold rounds that the state does not, got "
                "None."
            )
        saved = state["arguments"]["mechanism"]
        mechanism = registry.by_name(saved["name"])(**saved["parameters"])
        wrapper = cls.__new__(cls)
        ChargedStrategy.__init__(
            wrapper,
            strategy,
            **{**state["arguments"], "mechanism": mechanism, **changes},
        )
        wrapper._abandoned_in_a_row = int(state["abandoned_in_a_row"])
        wrapper.discarded_updates = int(state["discarded_updates"])
        wrapper.rejected_replies = int(state["rejected_replies"])
        wrapper._history.restore(state["history"])
        if wrapper._remembered is not None and state["remembered"] is not None:
            wrapper._remembered.restore(state["remembered"], ledger is not None)
        if ledger is not None:
            wrapper._history.open_ledger(ledger, wrapper._header(), known)
        return wrapper

    def close(self) -> None:
        """Lets go of the ledger, so that another process may go on with it."""
        self._history.close()

    def _header(self) -> dict[str, Any]:
        """Returns what a new ledger says of the run."""
        return {
            "name": type(self).__name__,
            "guarantee": self.mechanism.guarantee,
            "description": repr(self),
        }

    def _delta(self, delta: float | None) -> float:
        if delta is not None:
            return delta
        if self._history.budget is None:
            raise ValueError("delta must be given, as no target_delta was, got None.")
        return self._history.budget.delta

    @property
    def _deployment(self) -> mechanisms.Deployment:
        separated = correlated.remembers(self.mechanism)
        return mechanisms.Deployment(
            clients_per_round=self.clients_per_round,
            num_clients=self.num_clients,
            sampling="separated" if separated else "fixed_size",
            rounds=self.rounds,
        )


def _checked_failure(on_client_failure: str | None, noised_by_clients: bool) -> str:
    """Returns what a client's failure means, by default what is right."""
    if on_client_failure is None:
        return "abort" if noised_by_clients else "exclude"
    _validate.one_of(("exclude", "abort"), on_client_failure=on_client_failure)
    if on_client_failure == "exclude" and noised_by_clients:
        raise ValueError(
            "on_client_failure must be 'abort' where the clients add the noise "
            "(server_side_noising=False, noise_site='client'), got 'exclude': "
            "their shares are enough only if all of them reply."
        )
    return on_client_failure
