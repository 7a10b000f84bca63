"""The server's side with a fixed clip norm."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import answers as answers_lib
from tfdp_fl.flower import (
    errors,
    keys,
    population,
    report,
    rounds,
    strategies,
    updates,
)
from tfdp_fl.flower import parameters as parameters_lib
from tfdp_fl.mechanisms import formulas

_logger = logging.getLogger(__name__)

# A client of the last round (a proxy) and what it was sent or returned.
_Messages = list[tuple[Any, Any]]
_Wrapper = TypeVar("_Wrapper", bound="DPFedAvgFixed")

_STATE_FORMAT = "tfdp_fl flower state 1"


@dataclasses.dataclass(frozen=True)
class _ConfiguredRound:
    """A round whose clients are at work.

    Attributes:
      server_round: its number.
      clip_norm: S.
      message: the model that all of them were sent, as the strategy made it.
      sent: w, the arrays in it.
      asked: the names of those who were asked, where clients have names.
      plan: the round as it is released if nobody fails.
    """

    server_round: int
    clip_norm: float
    message: Any
    sent: list[np.ndarray]
    asked: frozenset[str]
    plan: rounds.ReleasedRound


class DPFedAvgFixed:
    """DP-FedAvg with a fixed clip norm around any strategy that averages.

    For any object with `configure_fit(server_round, parameters,
    client_manager)` and `aggregate_fit(server_round, results, failures)` in
    Flower's shape; its clients are wrapped in `DPFedAvgNumPyClient`. All other
    methods are the wrapped strategy's.

    Each round m clients are sampled without replacement. Each client's update
    is clipped to S, the updates are added, the sum carries noise N(0, (z S)^2)
    and is divided by m, however many replied. The noise is added by the server
    to the sum, or, where `server_side_noising` is False, by each client to its
    update before it sends it, with stddev z S / sqrt(m) (only then are they
    told to, by `dpfedavg_noise_stddev`).

    The wrapped strategy is handed this noised mean in place of every client's
    reply, with equal weights: it averages copies of it, and whatever it makes
    of it costs nothing more.

    A client that failed, or whose reply is not what a wrapped client sends, is
    left out of the sum ("exclude": the noise and m stay, so that the others
    are hidden as before), or the round is abandoned whole ("abort": the model
    stays, and nothing is charged). Noise of the clients is right only if all m
    reply, so there it is "abort".

    The server clips once more what it is about to noise itself, so that the
    guarantee does not hang on the clients' code; noise that clients add has to
    be taken on trust, and their replies are only bounded by what an honest
    client's noise can reach. An update that is not finite counts as zero.

    The guarantee is about the model. It does not cover what clients report
    beside it: losses, metrics, that they failed, or the initial parameters, if
    the server asks a client for them.

    Source: Flower's "Differential Privacy Wrappers", `DPFedAvgFixed`, with the
    noise where `server_side_noising` says; McMahan et al. (2018), Algorithm 1.

    Attributes:
      strategy: the wrapped strategy.
      num_sampled_clients: m.
      clip_norm: S, of the next round.
      noise_multiplier: z, noise stddev on the sum of updates divided by S.
      server_side_noising: whether the server adds the noise.
      on_client_failure: "exclude" or "abort".
      max_abandoned_rounds: after so many abandoned in a row the run ends.
      averages: whether the user vouched for the strategy.
      discarded_updates: how many updates arrived not finite, and became zero.
      rejected_replies: how many replies could not be used.
      stopped_before_round: the server's number of the last round that the
        budget did not allow; None if there was none.
    """

    def __init__(
        self,
        strategy: Any,
        num_sampled_clients: int,
        clip_norm: float,
        noise_multiplier: float = 1,
        server_side_noising: bool = True,
        *,
        on_client_failure: str | None = None,
        max_abandoned_rounds: int | None = 10,
        averages: bool = False,
        ledger: str | os.PathLike[str] | ledger_lib.PrivacyLedger | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        accountant: str = "rdp",
    ):
        """Wraps a strategy.

        Args:
          strategy: what is to be wrapped (see `averages`).
          num_sampled_clients: m, how many clients it samples in each round.
          clip_norm: S.
          noise_multiplier: z.
          server_side_noising: whether the server adds the noise.
          on_client_failure: "exclude" or "abort"; None means "exclude" if the
            server adds the noise, else "abort".
          max_abandoned_rounds: how many rounds in a row may be abandoned before
            `aggregate_fit` raises; None for any number.
          averages: the user's word that the strategy makes what it should of a
            mean. Needed for strategies of Flower's that are not known to
            average, and for subclasses with an `aggregate_fit` of their own.
          ledger: a `PrivacyLedger`, or the file of one, made or gone on with. A
            round's line is on the disk before its result is returned. Rounds
            that stand in it already are charged as well.
          target_epsilon: the budget: a round that would bring epsilon above it
            is not begun.
          target_delta: at this delta; both or neither.
          accountant: "rdp" or "pld", for the budget.

        Raises:
          TypeError, ValueError: if an argument is not what it should be.
          LedgerError: if the ledger cannot be gone on with.
        """
        self.averages = _validate.instance_of(bool, averages=averages)
        strategies.require_averaging(strategy, self.averages)
        self.strategy = strategy
        self.num_sampled_clients = _validate.positive_integer(
            num_sampled_clients=num_sampled_clients
        )
        self.clip_norm = _validate.positive(clip_norm=clip_norm)
        self.noise_multiplier = _validate.non_negative(
            noise_multiplier=noise_multiplier
        )
        self.server_side_noising = _validate.instance_of(
            bool, server_side_noising=server_side_noising
        )
        if on_client_failure is None:
            on_client_failure = "exclude" if server_side_noising else "abort"
        self.on_client_failure = _validate.one_of(
            ("exclude", "abort"), on_client_failure=on_client_failure
        )
        if on_client_failure == "exclude" and not server_side_noising:
            raise ValueError(
                "on_client_failure must be 'abort' with server_side_noising="
                "False, got 'exclude': the clients' shares of the noise are "
                "enough only if all of them reply."
            )
        if max_abandoned_rounds is not None:
            max_abandoned_rounds = _validate.positive_integer(
                max_abandoned_rounds=max_abandoned_rounds
            )
        self.max_abandoned_rounds = max_abandoned_rounds
        self.discarded_updates = 0
        self.rejected_replies = 0
        self.stopped_before_round: int | None = None
        self._abandoned_in_a_row = 0
        self._configured: _ConfiguredRound | None = None
        self._idle_round: int | None = None
        self._history = rounds.RoundHistory(
            target_epsilon, target_delta, accountant
        )
        if ledger is not None:
            self._history.open_ledger(ledger, self._mechanism())

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.strategy!r}, "
            f"num_sampled_clients={self.num_sampled_clients}, "
            f"clip_norm={self.clip_norm}, "
            f"noise_multiplier={self.noise_multiplier}, "
            f"server_side_noising={self.server_side_noising})"
        )

    def __getattr__(self, name: str) -> Any:
        if name == "strategy" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.strategy, name)

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
          num_clients: N. Needed only if the client manager does not tell how
            many clients there are, and believed only then: else a round is
            charged with the smaller of the two numbers.
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
            raise ValueError(
                "delta must be given, as no target_delta was, got None."
            )
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
          epsilon (None if there is no guarantee), delta, accountant, relation,
          rounds, clients_per_round, num_clients (smallest and largest N that
          was charged), noise_added_by, on_client_failure, strategy, and
          caveats: sentences that have to be read with epsilon.
        """
        epsilon = self.privacy_epsilon(
            num_clients, delta, accountant=accountant
        )
        return {
            "epsilon": epsilon if np.isfinite(epsilon) else None,
            "delta": self._history.target_delta if delta is None else delta,
            "accountant": accountant,
            **report.facts(self._history, num_clients),
            "clients_per_round": self.num_sampled_clients,
            "noise_added_by": (
                "server" if self.server_side_noising else "clients"
            ),
            "on_client_failure": self.on_client_failure,
            "strategy": (
                f"{type(self.strategy).__module__}."
                f"{type(self.strategy).__qualname__}"
            ),
            "averages": self.averages,
            "caveats": report.caveats(
                self._history,
                averages=self.averages,
                is_flowers=strategies.is_flowers(self.strategy),
                server_side_noising=self.server_side_noising,
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
        if ledger is not None:
            wrapper._history.open_ledger(
                ledger, wrapper._mechanism(), history["ledger_head"]
            )
        return wrapper

    def close(self) -> None:
        """Lets go of the ledger, so that another process may go on with it."""
        self._history.close()

    def configure_fit(
        self, server_round: int, parameters: Any, client_manager: Any
    ) -> _Messages:
        """Adds the clip norm (and a noise stddev) to each client's config.

        Returns:
          What the wrapped strategy returned, with copies of its instructions.
          Nothing if it sampled nobody, or if the round would overspend the
          budget.

        Raises:
          ValueError: if it sampled other than m clients, or sends them
            different models, or one that is not of real numbers.
        """
        self._configured = self._idle_round = None
        watched = population.watched(client_manager)
        instructions = self.strategy.configure_fit(
            server_round,
            parameters,
            client_manager if watched is None else watched,
        )
        if not instructions:
            self._idle_round = server_round
            return instructions
        if len(instructions) != self.num_sampled_clients:
            raise ValueError(
                "The wrapped strategy sampled "
                f"{len(instructions)} clients, and num_sampled_clients="
                f"{self.num_sampled_clients}: the noise is made for exactly "
                "that many. (For Flower's FedAvg set min_fit_clients to it and "
                "fraction_fit to 0.)"
            )
        clients = [client for client, _ in instructions]
        plan = self._planned(server_round, clients, watched)
        if not self._history.affords(plan.charge()):
            self._stop_before(server_round, plan.charge())
            return []
        self._configured = _ConfiguredRound(
            server_round,
            self.clip_norm,
            instructions[0][1].parameters,
            _the_one_model(instructions),
            frozenset(map(answers_lib.name_of, clients)) - {None},
            plan,
        )
        dp_config = self._dp_config()
        return [
            (
                client,
                parameters_lib.replaced(
                    fit_ins, config={**fit_ins.config, **dp_config}
                ),
            )
            for client, fit_ins in instructions
        ]

    def aggregate_fit(
        self, server_round: int, results: _Messages, failures: Sequence[Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Hands the noised mean, in place of each reply, to the strategy.

        Whatever a client replied, it is no error here: such a client counts
        as failed.

        Returns:
          What the wrapped strategy makes of it; `(None, {})` if the round is
          abandoned.

        Raises:
          RoundNotConfiguredError: if the round's `configure_fit` was not
            called, or its results were here before. Nothing is released then.
          RoundsAbandonedError: if `max_abandoned_rounds` are in a row.
          LedgerWriteError: if the round could not be written down. Nothing is
            released then.
        """
        configured = self._configured
        if configured is None or configured.server_round != server_round:
            if server_round in (self._idle_round, self.stopped_before_round):
                return None, {}
            raise errors.RoundNotConfiguredError(
                f"Round {server_round} has no configure_fit that belongs to "
                "these results, or they were here before: the model that its "
                "clients were sent and the norm they clipped to are not known. "
                "Nothing is released or charged."
            )
        self._configured = None
        answers = answers_lib.collect(
            server_round,
            results,
            failures,
            configured.asked,
            [array.shape for array in configured.sent],
            self._wants_norm_bit,
        )
        self.rejected_replies += len(answers.reasons)
        if not self._releasable(answers):
            return self._abandon(
                server_round, answers.summary(self.num_sampled_clients)
            )
        mean = self._noised_mean(configured, answers)
        next_clip_norm = self._next_clip_norm(
            configured.clip_norm,
            [reply.norm_bit for *_, reply in answers.valid],
        )
        # On the disk before anything of the round can be seen; if this raises,
        # nothing has moved.
        self._history.add(
            dataclasses.replace(configured.plan, num_replies=len(answers.valid))
        )
        self.clip_norm = next_clip_norm
        self._abandoned_in_a_row = 0
        released = parameters_lib.like(configured.message, mean)
        handed = [
            (
                client,
                parameters_lib.replaced(
                    fit_res,
                    parameters=released,
                    num_examples=1,
                    metrics=reply.metrics,
                ),
            )
            for client, fit_res, reply in answers.valid
        ]
        with strategies.metrics_errors_logged(self.strategy):
            return self.strategy.aggregate_fit(
                server_round, handed, answers.failures
            )

    @property
    def _update_noise_multiplier(self) -> float:
        """The noise multiplier that is left for the updates themselves."""
        return self.noise_multiplier

    @property
    def _wants_norm_bit(self) -> bool:
        return False

    def _client_noise_stddev(self, clip_norm: float) -> float:
        return float(
            formulas.client_noise_stddev(
                clip_norm,
                self._update_noise_multiplier,
                self.num_sampled_clients,
            )
        )

    def _dp_config(self) -> dict[str, Any]:
        config = {keys.CLIP_NORM: self.clip_norm}
        if not self.server_side_noising:
            config[keys.NOISE_STDDEV] = self._client_noise_stddev(
                self.clip_norm
            )
        return config

    def _next_clip_norm(
        self, clip_norm: float, norm_bits: Sequence[bool | None]
    ) -> float:
        """The clip norm of the next round; here it never moves."""
        del norm_bits
        return clip_norm

    def _arguments(self) -> dict[str, Any]:
        """The arguments that make a wrapper like this one, as JSON values."""
        return {
            "num_sampled_clients": self.num_sampled_clients,
            "clip_norm": self.clip_norm,
            "noise_multiplier": self.noise_multiplier,
            "server_side_noising": self.server_side_noising,
            "on_client_failure": self.on_client_failure,
            "max_abandoned_rounds": self.max_abandoned_rounds,
            "averages": self.averages,
            "target_epsilon": self._history.target_epsilon,
            "target_delta": self._history.target_delta,
            "accountant": self._history.accountant,
        }

    def _mechanism(self) -> dict[str, Any]:
        """Describes this wrapper in the header of a ledger."""
        return {
            "name": type(self).__name__,
            "guarantee": "central",
            "description": repr(self),
        }

    def _planned(
        self,
        server_round: int,
        clients: Sequence[Any],
        watched: population.WatchedManager | None,
    ) -> rounds.ReleasedRound:
        """Returns the round as it is charged, with the N that is there now."""
        m = self.num_sampled_clients
        available = num_clients = None
        if watched is not None:
            seen = watched.population(clients)
            available, num_clients = seen.available, seen.drawn_from
            if num_clients is None:
                num_clients = m
                _logger.warning(
                    "The clients of round %s were not seen to be drawn by the "
                    "client manager's sample: nothing is claimed for their "
                    "sampling, and the round costs as much as if all clients "
                    "were in it.",
                    server_round,
                )
        return rounds.ReleasedRound(
            server_round=server_round,
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            clients_per_round=m,
            num_replies=m,
            available=available,
            num_clients=num_clients,
        )

    def _stop_before(
        self, server_round: int, charge: charge_lib.RoundCharge
    ) -> None:
        self.stopped_before_round = server_round
        _logger.warning(
            "Stopped before round %s, which would bring epsilon to %.4g "
            "(budget %g at delta=%g).",
            server_round,
            self._history.epsilon_after(charge),
            self._history.target_epsilon,
            self._history.target_delta,
        )

    def _releasable(self, answers: answers_lib.Answers) -> bool:
        m = self.num_sampled_clients
        if not answers.valid or answers.num_results > m:
            return False
        if answers.complete(m):
            return True
        # Flower's own word for "abort".
        refuses = getattr(self.strategy, "accept_failures", True) is False
        return self.on_client_failure == "exclude" and not refuses

    def _abandon(
        self, server_round: int, reason: str
    ) -> tuple[None, dict[str, Any]]:
        _logger.warning("Round %s is abandoned: %s.", server_round, reason)
        self._abandoned_in_a_row += 1
        limit = self.max_abandoned_rounds
        if limit is not None and self._abandoned_in_a_row >= limit:
            raise errors.RoundsAbandonedError(
                f"{self._abandoned_in_a_row} rounds in a row were abandoned "
                f"(max_abandoned_rounds={limit}), the last of them round "
                f"{server_round}: {reason}."
            )
        return None, {}

    def _noised_mean(
        self, configured: _ConfiguredRound, answers: answers_lib.Answers
    ) -> list[np.ndarray]:
        """Returns w + (sum_k clip(Delta_k) + N(0, (z S)^2)) / m.

        Computed in float64 and rounded once, after the noise: what rounding
        adds to single updates (much, in float16) is not in the sum. A missing
        client only lowers it: noise and m are those of the plan.
        """
        clip_norm = configured.clip_norm
        stddev = self._client_noise_stddev(clip_norm)
        bound = clip_norm
        if not self.server_side_noising:
            size = sum(array.size for array in configured.sent)
            bound = updates.largest_honest_norm(clip_norm, stddev, size)
        total = [np.zeros(array.shape) for array in configured.sent]
        discarded = 0
        for *_, reply in answers.valid:
            update = updates.clipped(
                updates.difference(reply.arrays, configured.sent), bound
            )
            discarded += update.discarded
            for array, change in zip(total, update.arrays, strict=True):
                array += change
        self.discarded_updates += discarded
        # One share of the noise for each client whose noise is not there: all
        # m of them, or those who had theirs discarded with their update.
        m = self.num_sampled_clients
        shares = m if self.server_side_noising else discarded
        if shares:
            total = updates.noised(total, stddev * shares**0.5)
        return updates.applied(configured.sent, [array / m for array in total])


def _the_one_model(instructions: _Messages) -> list[np.ndarray]:
    """Returns the model that all clients are sent."""
    first = instructions[0][1].parameters
    arrays = parameters_lib.to_arrays(first)
    for array in arrays:
        if array.dtype.kind not in "fiub":
            raise ValueError(
                "parameters must hold arrays of real numbers, got one of "
                f"dtype {array.dtype}: no noise can be added to it."
            )
    for _, fit_ins in instructions[1:]:
        if fit_ins.parameters is first:
            continue
        others = parameters_lib.to_arrays(fit_ins.parameters)
        if len(others) != len(arrays) or not all(
            np.array_equal(a, b) for a, b in zip(arrays, others, strict=True)
        ):
            raise ValueError(
                "The wrapped strategy sends its clients different models; the "
                "noise hides an update to one model only."
            )
    return [np.array(array) for array in arrays]
