"""The server's side of a round, whichever of Flower's APIs asks for it.

A wrapper says how Flower's messages are read and written. What is planned, drawn,
released, abandoned and charged is here.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

import dp_accounting
import numpy as np

from tfdp_fl import mechanisms
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import charged_strategy, history, replies, sums, wrapped

_logger = logging.getLogger(__name__)

# Strategies may share an open ledger, and one memory of noise (`from_state`).
_RELEASING = threading.Lock()


class RoundError(RuntimeError):
    """A round cannot be released, or the run cannot go on.

    One client's reply does not cause it, unless the user chose to abort rounds
    for it.
    """


class RoundNotConfiguredError(RoundError):
    """Results came for a round of which model and clip norm are not known."""


class RoundsAbandonedError(RoundError):
    """Round after round was abandoned; the message says why."""


class PrivateRounds(charged_strategy.ChargedStrategy):
    """A round, from its cohort to its release.

    One after the other: a round is forgotten when the next one is configured.
    """

    _configured: sums.ConfiguredRound | None = None
    # The last round for which no clients were asked.
    _idle_round: int | None = None

    def _is_over(self, server_round: int) -> bool:
        """Forgets the last round; returns whether T rounds were charged."""
        self._configured = self._idle_round = None
        if self.rounds is None or self._history.num_rounds < self.rounds:
            return False
        _logger.warning(
            "Round %s is not begun: all rounds=%d are charged, of which %d by the "
            "ledger alone.",
            server_round,
            self.rounds,
            self._history.num_from_ledger,
        )
        self._idle_round = server_round
        return True

    def _begin(
        self,
        server_round: int,
        connected: Mapping[Hashable, Any],
        sent: Sequence[np.ndarray],
        template: Any,
        names: Sequence[str] = (),
    ) -> sums.ConfiguredRound | None:
        """Draws the clients of a round; None if there is to be none."""
        for array in sent:
            if array.dtype.kind not in "fiub":
                raise ValueError(
                    "The model must hold real numbers, got an array of dtype "
                    f"{array.dtype}: no noise can be added to it."
                )
        cohort = self._cohort(server_round, connected)
        if not cohort:
            self._idle_round = server_round
            return None
        mechanism, plan = self.mechanism, self._planned(server_round)
        if self._remembered is not None:
            self._remembered.memory_for(sent)  # Or raises, before anybody is asked.
        this = mechanisms.Round(
            self.clip_norm,
            mechanism.noise_multiplier_at(self._round_index),
            float(self.clients_per_round),
        )
        try:
            if not self._history.affords(plan):
                raise ledger_lib.BudgetExceededError()
            if mechanism.guarantee == "local":
                # What a client sends has left it, whatever comes of the round.
                with _RELEASING:
                    self._history.add(plan)
        except ledger_lib.BudgetExceededError:
            self._stop_before(server_round)
            return None
        self._configured = sums.ConfiguredRound(
            server_round=server_round,
            sent=[np.array(array) for array in sent],
            asked={name: connected[name] for name in cohort},
            plan=plan,
            mechanism=mechanism,
            deployment=self._deployment,
            this=this,
            clients_clip=self._clients_clip,
            template=template,
            names=names,
        )
        return self._configured

    def _cohort(
        self, server_round: int, connected: Mapping[Hashable, Any]
    ) -> list[Hashable]:
        """Returns m clients, drawn uniformly and unforeseeably; [] if too few."""
        eligible, num_connected = list(connected), len(connected)
        if self._remembered is not None:
            nodes = cast(list[int], eligible)
            num_connected = len({self._remembered.client(node) for node in nodes})
            eligible = cast(list[Hashable], self._remembered.eligible(nodes))
        if num_connected < self.num_clients:
            text = (
                "num_clients must be at most the number of connected clients, "
                f"{num_connected}, got {self.num_clients}: sampling hides a client "
                "only among those that are there"
            )
            if not self._history.released:
                raise ValueError(
                    f"{text}. Let the strategy wait for them "
                    f"(min_available_nodes={self.num_clients})."
                )
            self._abandon(server_round, text)
            return []
        if len(eligible) < self.clients_per_round:
            _logger.warning(
                "Only %d of %d connected clients may take part, and %d are "
                "needed: the others were in a round too lately, or as often as "
                "they may. Round %s is not begun.",
                len(eligible),
                num_connected,
                self.clients_per_round,
                server_round,
            )
            return []
        # Flower draws by Python's `random`, which can be foretold.
        return secrets.SystemRandom().sample(eligible, self.clients_per_round)

    @property
    def _round_index(self) -> int:
        """The mechanism's count of rounds, which those abandoned are not in."""
        if self._remembered is not None:
            return self._remembered.position
        return len(self._history.released)

    def _planned(self, server_round: int) -> history.ReleasedRound:
        """Returns the round as it is charged if everybody replies."""
        mechanism = self.mechanism
        place: dict[str, Any] = {}
        if self._remembered is not None:
            # Another server may have gone on from the same state meanwhile.
            self._remembered.go_on(self._history)
            place["segment"] = self._remembered.segment
            place["position"] = self._remembered.position
        mu_squared = None
        if mechanism.guarantee == "local":
            mu_squared = mechanism.mu_squared(self._deployment)
        event = mechanism.round_event(self._round_index, self._deployment)
        multiplier = 0.0
        if isinstance(event, dp_accounting.NoOpDpEvent):
            multiplier = math.inf
        elif not isinstance(event, dp_accounting.NonPrivateDpEvent):
            multiplier = float(event.noise_multiplier)
        return history.ReleasedRound(
            server_round=server_round,
            clip_norm=self.clip_norm,
            noise_multiplier=multiplier,
            clients_per_round=self.clients_per_round,
            num_replies=self.clients_per_round,
            num_clients=self.num_clients,
            sampling=cast(str, self._deployment.sampling),
            mu_squared=mu_squared,
            **place,
        )

    def _stop_before(self, server_round: int) -> None:
        self.stopped_before_round = server_round
        budget = cast(ledger_lib.Budget, self._history.budget)
        _logger.warning(
            "Stopped before round %s, which would bring epsilon above %g at delta=%g.",
            server_round,
            budget.epsilon,
            budget.delta,
        )

    def _finish(
        self,
        configured: sums.ConfiguredRound,
        results: Iterable[tuple[Hashable, Any]],
        read: Callable[[Any], replies.Reply],
    ) -> list[np.ndarray] | None:
        """Releases a round: returns its model; None if there is none to release."""
        server_round = configured.server_round
        answers = replies.collect(server_round, results, configured.asked.keys(), read)
        self.rejected_replies += answers.rejected
        if not self._releasable(answers, configured):
            self._abandon(
                server_round,
                f"{len(answers.replies)} of {self.clients_per_round} clients sent a "
                f"reply that can be used, and {answers.rejected} replies cannot be "
                "used",
            )
            return None
        usable, remembered = list(answers.replies.values()), self._remembered
        with _RELEASING:
            plan = configured.plan
            if remembered is not None:
                plan = dataclasses.replace(
                    self._planned(server_round), clip_norm=plan.clip_norm
                )
                outcome = sums.of_unclipped(
                    configured, usable, remembered.memory_for(configured.sent)
                )
            elif configured.clients_clip:
                outcome = sums.of_clipped(configured, usable)
            else:
                outcome = sums.of_unclipped(configured, usable, None)
            if configured.mechanism.guarantee != "local":
                plan = dataclasses.replace(plan, num_replies=len(usable))
                try:
                    # On the disk before anything of the round can be seen; if
                    # this raises, nothing has moved.
                    self._history.add(plan)
                except ledger_lib.BudgetExceededError:
                    self._stop_before(server_round)
                    return None
            if remembered is not None:
                remembered.released(
                    outcome.memory, [configured.asked[name] for name in answers.replies]
                )
        self.discarded_updates += outcome.discarded
        self.clip_norm = outcome.next_clip_norm
        self._abandoned_in_a_row = 0
        return outcome.model

    def _taken(self, server_round: int) -> sums.ConfiguredRound | None:
        """Returns the round that results belong to, once; None if it had no clients."""
        configured = self._configured
        if configured is not None and configured.server_round == server_round:
            self._configured = None
            return configured
        if server_round in (self._idle_round, self.stopped_before_round):
            return None
        raise RoundNotConfiguredError(
            f"Round {server_round} has no {self._api.configure} that "
            "belongs to these results, or they were here before: the model "
            "that its clients were sent and the norm they clipped to are "
            "not known. Nothing is released or charged."
        )

    def _releasable(
        self, answers: replies.Answers, configured: sums.ConfiguredRound
    ) -> bool:
        m, usable = self.clients_per_round, len(answers.replies)
        if usable in (0, m):
            return usable > 0
        # Before anything is charged that the strategy would throw away.
        if wrapped.refuses(self.strategy, usable, m - usable):
            return False
        if self.on_client_failure == "exclude":
            return True
        # A client may end no run by what it sends: if that is of no use, the
        # server adds the client's share of the noise.
        return configured.mechanism.needs_exact_cohort and answers.num_replied == m

    def _abandon(self, server_round: int, reason: str) -> None:
        _logger.warning("Round %s is abandoned: %s.", server_round, reason)
        self._abandoned_in_a_row += 1
        limit = self.max_abandoned_rounds
        if limit is not None and self._abandoned_in_a_row >= limit:
            raise RoundsAbandonedError(
                f"{self._abandoned_in_a_row} rounds in a row were abandoned "
                f"(max_abandoned_rounds={limit}), the last of them round "
                f"{server_round}: {reason}."
            )
