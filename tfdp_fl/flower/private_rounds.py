"""The server's side of a round, whichever of Flower's APIs asks for it.

A wrapper says what its mechanism is, who clips, and how Flower's messages are
read and written; what is planned, released, abandoned and charged is here. The
file is long because its subject is one, a class whose state (what was released)
a round, its report and its checkpoint share.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import dp_accounting
import numpy as np

from tfdp_fl import _validate, mechanisms
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import answers as answers_lib
from tfdp_fl.flower import (
    client_clipping,
    errors,
    keys,
    local_rounds,
    population,
    remembering,
    replies,
    report,
    rounds,
    server_clipping,
    strategies,
)
from tfdp_fl.flower import configured as configured_lib

_logger = logging.getLogger(__name__)

_Wrapper = TypeVar("_Wrapper", bound="PrivateRounds")
_STATE_FORMAT = "tfdp_fl flower state 1"


class PrivateRounds(abc.ABC):
    """What every wrapper of a strategy has in common.

    Attributes:
      strategy: the wrapped strategy.
      num_sampled_clients: m.
      clip_norm: S, of the next round.
      on_client_failure: "exclude" or "abort".
      max_abandoned_rounds: after so many abandoned in a row the run ends.
      averages: whether the user vouched for the strategy.
      discarded_updates: how many updates arrived not finite, and became zero.
      rejected_replies: how many replies could not be used.
      stopped_before_round: the server's number of the last round that the
        budget did not allow; None if there was none.
    """

    # What a wrapped strategy has to have.
    _api = strategies.LEGACY
    # What sums, noises and divides; with this one the clients have clipped.
    _sum: configured_lib.Release = staticmethod(client_clipping.release)

    def __init__(
        self,
        strategy: Any,
        num_sampled_clients: int,
        clip_norm: float,
        noised_by_clients: bool,
        *,
        on_client_failure: str | None = None,
        max_abandoned_rounds: int | None = 10,
        averages: bool = False,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        accountant: str = "rdp",
        guarantee: str = "central",
        remembered: remembering.Remembered | None = None,
    ):
        self._remembered = remembered
        self.averages = _validate.instance_of(bool, averages=averages)
        strategies.require_averaging(strategy, self.averages, self._api)
        self.strategy = strategy
        self.num_sampled_clients = num_sampled_clients
        self.clip_norm = clip_norm
        self.on_client_failure = _checked_failure(on_client_failure, noised_by_clients)
        if max_abandoned_rounds is not None:
            max_abandoned_rounds = _validate.positive_integer(
                max_abandoned_rounds=max_abandoned_rounds
            )
        self.max_abandoned_rounds = max_abandoned_rounds
        self.discarded_updates = 0
        self.rejected_replies = 0
        self.stopped_before_round: int | None = None
        self._abandoned_in_a_row = 0
        self._configured: configured_lib.ConfiguredRound | None = None
        self._idle_round: int | None = None
        history = rounds.RoundHistory
        if guarantee == "local":
            history = local_rounds.LocalHistory
        elif remembered is not None:
            history = remembering.SeparatedHistory
        self._history = history(target_epsilon, target_delta, accountant)

    def __getattr__(self, name: str) -> Any:
        if name == "strategy" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.strategy, name)

    # What a wrapper has to say.

    @abc.abstractmethod
    def _current_mechanism(self) -> mechanisms.Mechanism:
        """The mechanism of the next round."""

    def _arguments(self) -> dict[str, Any]:
        """The arguments that make a wrapper like this one, as JSON values."""
        return {
            "on_client_failure": self.on_client_failure,
            "max_abandoned_rounds": self.max_abandoned_rounds,
            "averages": self.averages,
            "target_epsilon": self._history.target_epsilon,
            "target_delta": self._history.target_delta,
            "accountant": self._history.accountant,
        }

    # What was released, and what it cost.

    @property
    def released_rounds(self) -> tuple[rounds.ReleasedRound, ...]:
        """The rounds that were released, and are charged."""
        return tuple(self._history.released)

    def privacy_epsilon(
        self,
        num_clients: int | None = None,
        delta: float | None = None,
        sampling: str = "fixed_size",
        accountant: str = "rdp",
    ) -> float:
        """Returns epsilon at delta after the rounds released so far.

        Each round is charged with the number of clients that were there when
        its cohort was drawn.

        Args:
          num_clients: N. Needed only if Flower does not tell how many clients
            there are, and believed only then: else a round is charged with the
            smaller of the two numbers.
          delta: the failure probability; None means `target_delta`.
          sampling: "fixed_size", if the m clients of each round are drawn
            uniformly without replacement (neighbours: one client replaced by
            another); else "shuffled", which claims nothing for the sampling
            (neighbours: one client added or removed). Poisson sampling is not
            what happens here.
          accountant: "rdp" or "pld".

        Returns:
          Epsilon; infinity if a round was released without noise.

        Raises:
          ValueError: if an argument is not allowed; among others, if
            `num_clients` is more than ever were there.
        """
        if delta is None:
            delta = self._history.target_delta
        if delta is None:
            raise ValueError("delta must be given, as no target_delta was, got None.")
        return self._history.epsilon(num_clients, delta, sampling, accountant)

    def privacy_report(
        self,
        delta: float | None = None,
        num_clients: int | None = None,
        accountant: str = "rdp",
    ) -> dict[str, Any]:
        """Returns what is guaranteed, and what was assumed, as JSON values.

        Args:
          delta: see `privacy_epsilon`.
          num_clients: see `privacy_epsilon`.
          accountant: "rdp" or "pld".

        Returns:
          epsilon (None if there is no guarantee), delta, accountant, guarantee
          ("central" or "local"), relation, rounds, clients_per_round,
          num_clients (smallest and largest N that was charged),
          noise_added_by, on_client_failure, strategy, and caveats: sentences
          that have to be read with epsilon.
        """
        epsilon = self.privacy_epsilon(num_clients, delta, accountant=accountant)
        mechanism = self._current_mechanism()
        by_server = mechanism.noise_site == "server"
        return {
            "epsilon": epsilon if np.isfinite(epsilon) else None,
            "delta": self._history.target_delta if delta is None else delta,
            "accountant": accountant,
            **report.facts(self._history, num_clients, mechanism.guarantee),
            "clients_per_round": self.num_sampled_clients,
            "noise_added_by": "server" if by_server else "clients",
            "on_client_failure": self.on_client_failure,
            "strategy": (
                f"{type(self.strategy).__module__}.{type(self.strategy).__qualname__}"
            ),
            "averages": self.averages,
            "caveats": report.caveats(
                self._history,
                remembered=self._remembered,
                averages=self.averages,
                is_flowers=strategies.is_flowers(self.strategy),
                mechanism=mechanism,
            ),
        }

    def state(self) -> dict[str, Any]:
        """Returns what a restarted server has to know, as JSON values.

        To be saved together with the model, after each round. A round that
        clients are at work for is not in it.
        """
        return {
            "format": _STATE_FORMAT,
            "wrapper": type(self).__name__,
            "arguments": self._arguments(),
            "abandoned_in_a_row": self._abandoned_in_a_row,
            "discarded_updates": self.discarded_updates,
            "rejected_replies": self.rejected_replies,
            "history": self._history.state(),
            "remembered": None
            if self._remembered is None
            else self._remembered.state(),
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
          **changes: arguments other than those the state was taken with.

        Raises:
          ValueError: if the state is not of this class.
          LedgerTamperedError: if the ledger is not the one the state knows.
        """
        found = (state.get("format"), state.get("wrapper"))
        if found != (_STATE_FORMAT, cls.__name__):
            raise ValueError(
                f"state must be one of {cls.__name__} (format "
                f"{_STATE_FORMAT!r}), got {found!r}."
            )
        history = state["history"]
        if history["ledger_head"] is not None and ledger is None:
            raise ValueError(
                "ledger must be given, as the state was taken of a run that "
                "kept one: it may hold rounds that the state does not, got "
                "None."
            )
        wrapper = cls(strategy, **{**state["arguments"], **changes})
        wrapper._abandoned_in_a_row = int(state["abandoned_in_a_row"])
        wrapper.discarded_updates = int(state["discarded_updates"])
        wrapper.rejected_replies = int(state["rejected_replies"])
        wrapper._history.restore(history)
        wrapper._open(ledger, history["ledger_head"])
        if wrapper._remembered is not None:
            # Without a ledger nobody can tell what was released since.
            goes_on = (
                ledger is not None
                and wrapper._history.rounds_known == history["ledger_rounds"]
            )
            wrapper._remembered.restore(state["remembered"], goes_on)
        return wrapper

    def close(self) -> None:
        """Lets go of the ledger, so that another process may go on with it."""
        self._history.close()

    def _open(
        self,
        ledger: str | os.PathLike[str] | ledger_lib.PrivacyLedger | None,
        expected_head: str | None = None,
    ) -> None:
        """Opens the ledger, once all arguments are known to be right."""
        mechanism = self._current_mechanism()
        mechanism.check(self._deployment)
        if ledger is None:
            return
        header = {
            "name": type(self).__name__,
            "guarantee": mechanism.guarantee,
            "description": repr(self),
        }
        self._history.open_ledger(ledger, header, expected_head)

    # A round, from its cohort to its release.

    @property
    def _deployment(self) -> mechanisms.Deployment:
        return mechanisms.Deployment(
            clients_per_round=self.num_sampled_clients, sampling="fixed_size"
        )

    @property
    def _round_index(self) -> int:
        """The mechanism's count of rounds, which those abandoned are not in."""
        return len(self._history.released)

    def _begin(
        self,
        server_round: int,
        clients: Sequence[Any],
        message: Any,
        sent: list[np.ndarray],
        seen: population.Population | None,
    ) -> configured_lib.ConfiguredRound | None:
        """Plans a round of these clients; None if the budget forbids it.

        Args:
          server_round: its number.
          clients: those who are asked, m of them.
          message: the model as they get it.
          sent: the arrays in it.
          seen: whom they were drawn from; None if nobody tells.

        Raises:
          ValueError: if they are not m.
        """
        m = self.num_sampled_clients
        if len(clients) != m:
            raise ValueError(
                f"The wrapped strategy sampled {len(clients)} clients, and "
                f"{self._api.m}={m}: the noise is made for exactly that many. "
                f"({self._api.advice})"
            )
        mechanism, deployment = self._current_mechanism(), self._deployment
        index, memory = self._round_index, ()
        if self._remembered is not None:
            self._remembered.check(clients)
            memory = self._remembered.memory_for(sent)
            index = mechanism.event_index(index, memory)
        plan = self._planned(server_round, mechanism, index, seen, clients)
        if not self._history.affords(plan):
            self._stop_before(server_round, plan)
            return None
        configured = configured_lib.ConfiguredRound(
            server_round=server_round,
            message=message,
            sent=sent,
            asked=frozenset(
                name for name in map(answers_lib.name_of, clients) if name is not None
            ),
            plan=plan,
            mechanism=mechanism,
            deployment=deployment,
            this=mechanisms.Round(
                self.clip_norm, mechanism.noise_multiplier_at(index), float(m)
            ),
            memory=memory,
        )
        if mechanism.guarantee == "local":
            # What a client sends has left it, whatever comes of the round.
            self._history.add(plan)
        self._configured = configured
        return configured

    def _planned(
        self,
        server_round: int,
        mechanism: mechanisms.Mechanism,
        index: int,
        seen: population.Population | None,
        clients: Sequence[Any],
    ) -> rounds.ReleasedRound:
        """Returns the round as it is charged, with the N that is there now."""
        m = self.num_sampled_clients
        available = num_clients = mu_squared = None
        if seen is not None:
            available, num_clients = seen.available, seen.drawn_from
            if num_clients is None:
                num_clients = m
            if (
                seen.drawn_from is None
                and (available is None or available > m)
                and self._remembered is None
            ):
                _logger.warning(
                    "The clients of round %s were not seen to be drawn by %s: "
                    "nothing is claimed for their sampling, and the round "
                    "costs as much as if all clients were in it.",
                    server_round,
                    self._api.drawn_by,
                )
        if mechanism.guarantee == "local":
            # Who is asked twice releases twice.
            most = max(collections.Counter(clients).values())
            mu_squared = most * mechanism.mu_squared(self._deployment)
        event = mechanism.round_event(index, self._deployment)
        multiplier = 0.0
        if isinstance(event, dp_accounting.NoOpDpEvent):
            multiplier = math.inf
        elif not isinstance(event, dp_accounting.NonPrivateDpEvent):
            multiplier = float(event.noise_multiplier)
        return rounds.ReleasedRound(
            server_round=server_round,
            clip_norm=self.clip_norm,
            noise_multiplier=multiplier,
            clients_per_round=m,
            num_replies=m,
            available=available,
            num_clients=num_clients,
            mu_squared=mu_squared,
        )

    def _stop_before(self, server_round: int, planned: rounds.ReleasedRound) -> None:
        self.stopped_before_round = server_round
        _logger.warning(
            "Stopped before round %s, which would bring epsilon to %.4g "
            "(budget %g at delta=%g).",
            server_round,
            self._history.epsilon_after(planned),
            self._history.target_epsilon,
            self._history.target_delta,
        )

    def _finish(
        self,
        server_round: int,
        results: Sequence[tuple[Any, Any]],
        failures: Sequence[Any],
        read: Callable[..., replies.Reply],
    ) -> tuple[answers_lib.Answers, configured_lib.ConfiguredRound, Any] | None:
        """Releases a round; None if there is nothing to release.

        Args:
          server_round: its number.
          results: clients and what they replied.
          failures: of clients that did not reply.
          read: `read(result, configured, wants_norm_bit=)`, or raises
            `ReplyError`.

        Returns:
          The answers, the round, and the arrays of the released model.

        Raises:
          RoundNotConfiguredError, RoundsAbandonedError, LedgerWriteError.
        """
        configured = self._taken(server_round)
        if configured is None:
            return None
        answers = answers_lib.collect(
            server_round,
            results,
            failures,
            configured.asked,
            functools.partial(
                read,
                configured=configured,
                # Whether clients say if their norm was within S.
                wants_norm_bit=self._clients_clip
                and bool(configured.mechanism.released_sums),
            ),
        )
        self.rejected_replies += len(answers.reasons)
        if not self._releasable(answers, configured):
            self._abandon(server_round, answers.summary(self.num_sampled_clients))
            return None
        outcome = self._sum(configured, [reply for *_, reply in answers.valid])
        self.discarded_updates += outcome.discarded
        if configured.mechanism.guarantee != "local":
            # On the disk before anything of the round can be seen; if this
            # raises, nothing has moved.
            self._history.add(
                dataclasses.replace(configured.plan, num_replies=len(answers.valid))
            )
        if self._remembered is not None:
            self._remembered.released(
                outcome.memory, [client for client, *_ in answers.valid]
            )
        self.clip_norm = self._bounded(outcome.next_clip_norm)
        self._abandoned_in_a_row = 0
        return answers, configured, outcome.model

    def _taken(self, server_round: int) -> configured_lib.ConfiguredRound | None:
        """Returns the round that these results belong to, once."""
        configured = self._configured
        if configured is None or configured.server_round != server_round:
            if server_round in (self._idle_round, self.stopped_before_round):
                return None
            raise errors.RoundNotConfiguredError(
                f"Round {server_round} has no {self._api.configure} that "
                "belongs to these results, or they were here before: the model "
                "that its clients were sent and the norm they clipped to are "
                "not known. Nothing is released or charged."
            )
        self._configured = None
        return configured

    @property
    def _clients_clip(self) -> bool:
        return self._sum is client_clipping.release

    def _told(self, configured: configured_lib.ConfiguredRound) -> dict[str, Any]:
        """Returns what clients are told: to clip, or not to."""
        if self._clients_clip:
            return configured_lib.for_clients(configured)
        return {keys.CLIP_NORM: server_clipping.NO_CLIP}

    def _bounded(self, clip_norm: float) -> float:
        """Returns a clip norm that the next round can work with."""
        return clip_norm

    def _releasable(
        self,
        answers: answers_lib.Answers,
        configured: configured_lib.ConfiguredRound,
    ) -> bool:
        m = self.num_sampled_clients
        if not answers.valid or answers.num_results > m:
            return False
        if answers.complete(m):
            return True
        # Before anything is charged that the strategy would throw away.
        if strategies.refuses(self.strategy, len(answers.valid), len(answers.failures)):
            return False
        if self.on_client_failure == "exclude":
            return True
        # A client may end no run by what it sends: if that is of no use, the
        # server adds the client's share of the noise.
        shared = configured.mechanism.needs_exact_cohort
        return shared and answers.everybody_replied(m)

    def _abandon(self, server_round: int, reason: str) -> None:
        _logger.warning("Round %s is abandoned: %s.", server_round, reason)
        self._abandoned_in_a_row += 1
        limit = self.max_abandoned_rounds
        if limit is not None and self._abandoned_in_a_row >= limit:
            raise errors.RoundsAbandonedError(
                f"{self._abandoned_in_a_row} rounds in a row were abandoned "
                f"(max_abandoned_rounds={limit}), the last of them round "
                f"{server_round}: {reason}."
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
