"""The server's side of a round, for both of Flower's APIs.

This module plans, draws, charges, releases, abandons and reports rounds. A subclass for
each API reads and writes Flower's messages.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import os
import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import dp_accounting
import numpy as np

from tfdp_fl import _files, _validate, accounting, algorithm, mechanisms, schedules
from tfdp_fl import sampling as sampling_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.accounting import statement
from tfdp_fl.flower import history, replies, sums
from tfdp_fl.terms import Json, NoiseSite, Sampling

if TYPE_CHECKING:
    from flwr.server.client_proxy import ClientProxy
    from flwr.serverapp.strategy import Strategy

# Flower's strategies (as of flwr 1.12 and 1.42) that only average the clients' replies
# with the given weights.
_AVERAGING_STRATEGIES = (
    *("FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedOpt", "FedProx", "FedYogi"),
    "FaultTolerantFedAvg",
)

_Content = TypeVar("_Content")
_Result = TypeVar("_Result")

_logger = logging.getLogger(__name__)


class RoundNotConfiguredError(RuntimeError):
    """Results arrived for a round whose model and clip norm are unknown."""


class PrivateRounds:
    """A wrapped strategy with a budget, and its rounds from cohort to release.

    Rounds run one at a time: configuring a round abandons an unfinished one.

    Attributes:
      strategy: The wrapped strategy.
      rounds: The number of rounds, T, or None.
      clip_norm: S of the next round.
      discarded_updates: The number of updates that were not finite and became zero.
      rejected_replies: The number of unusable replies.
      stopped_before_round: Flower's number of the last round that the budget did not
        allow; None if there was none.
    """

    # Names in the strategy: of the method that makes the clients' messages, of the
    # method that averages, and of the attribute with the metrics' aggregation function.
    _configure_method: str
    _aggregate_method: str
    _metrics_attribute: str
    # Flower's number of the current round, and its configuration (None if no clients
    # were asked).
    _open_round: tuple[int | None, sums.ConfiguredRound | None] = (None, None)
    # The receipt for the open round, if it was charged before clients were asked.
    _paid: accounting.Receipt | None = None
    # How far SecAgg+ may round a coordinate of one update; None without SecAgg+.
    _secagg_step: float | None = None

    def __init__(
        self,
        strategy: Strategy,
        mechanism: mechanisms.Mechanism,
        *,
        num_clients: int,
        clients_per_round: int,
        sampling: str | None = None,
        rounds: int | None = None,
        on_client_failure: str | None = None,
        ledger: str | os.PathLike[str] | ledger_lib.PrivacyLedger | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        accountant: str | None = None,
        client_of: history.ClientOf | None = None,
        non_negative: sums.NonNegative = None,
    ):
        """Wraps a strategy.

        Args:
          strategy: One of Flower's averaging strategies, a subclass of one, or one of
            your own. It gets one reply per round, the noisy mean.
          mechanism: The mechanism, which defines what is released.
          num_clients: N. At least this many must be connected in each round.
          clients_per_round: m, the number of clients asked in each round (expected, if
            random), drawn with the operating system's random numbers.
          sampling: "fixed_size": m of the connected clients; "poisson": each of them
            with probability m/N; or "random_allocation": each of them, independently,
            in one of the floor(N/m) rounds of each pass. The last two cost less. With
            them, a round may have no clients at all, and is then released as pure
            noise. A server that restarts begins a new pass. None: "fixed_size"; with
            `CorrelatedNoise`, "min_separation", which is the only one allowed then.
          rounds: T. No further rounds are started; rounds in a ledger count.
          on_client_failure: "exclude" (release the others' sum; the default) or "abort"
            (abandon the round). If each client adds a share of the noise
            (`noise_site="client"`), all of them must reply, so only "abort" is allowed.
            An unusable reply is then not a failure: its update counts as zero, and the
            server adds the missing noise.
          ledger: A `PrivacyLedger`, or the file of one, created or continued. A
            round's line is on disk before its result is returned.
          target_epsilon: The budget. A round that would exceed it is not started.
          target_delta: The delta of the budget; give both or neither.
          accountant: "rdp" or "pld", for the budget and the reports; None: PLD, the
            tighter one, if it is fast (`accounting.select_accountant`).
          client_of: For `CorrelatedNoise`: takes a node's id and returns the name (a
            string or an integer) of the client that the node belongs to. None: every
            node is a separate client and must keep its id.
          non_negative: The indices or names of the model's arrays that noise must not
            push below zero, such as the variances of a BatchNorm; or a built Keras
            model whose `get_weights()` are the arrays, to find them automatically.
            None: no arrays, with a warning if there may be one.

        Raises:
          TypeError, ValueError: An argument is invalid.
          LedgerError: The ledger cannot be continued.
        """
        self._check_strategy(strategy)
        self.strategy = strategy
        _validate.instance_of(mechanisms.Mechanism, mechanism=mechanism)
        self._mechanism = mechanism
        self._num_clients = _validate.positive_integer(num_clients=num_clients)
        self._clients_per_round = int(
            charge_lib.check_size(clients_per_round, self.num_clients)
        )
        self.rounds = (
            rounds if rounds is None else _validate.positive_integer(rounds=rounds)
        )
        allowed = (None, "fixed_size", *charge_lib.OF_RANDOM_SIZE)
        self._sampling = _validate.one_of(allowed, sampling=sampling) or "fixed_size"
        self._expected_size = cast(
            float,
            sampling_lib.expected_sizes(
                self._sampling, self.num_clients, self.clients_per_round
            ),
        )
        self._allocation = sampling_lib.NamedAllocation(
            self.num_clients, self.clients_per_round
        )
        self._correlation: history.CorrelatedNoiseState | None = None
        if isinstance(mechanism, mechanisms.CorrelatedNoise):
            if sampling is not None:
                raise ValueError(
                    "sampling must be None with CorrelatedNoise, which needs a minimum "
                    f"separation between a client's rounds, got {sampling!r}."
                )
            self._sampling = "min_separation"
            self._correlation = history.CorrelatedNoiseState(mechanism, client_of)
        elif client_of is not None:
            raise ValueError(
                f"client_of must be None except for CorrelatedNoise, got {client_of!r}."
            )
        constant = schedules.is_constant(mechanism.noise_multiplier)
        if self._sampling == Sampling.RANDOM_ALLOCATION and not constant:
            raise ValueError(
                "mechanism must have one noise_multiplier with random allocation, "
                f"whose passes are charged as a whole, got {mechanism!r}."
            )
        sums.check_mechanism(mechanism, self._context)
        # A clip that is computed from each cohort is 0 before there is one.
        self.clip_norm = mechanism.first_clip_norm()
        rules = ("abort",) if mechanism.needs_exact_cohort else ("exclude", "abort")
        self._on_client_failure = on_client_failure or rules[0]
        _validate.one_of(rules, on_client_failure=self._on_client_failure)
        if accountant is None:
            events = (
                mechanism.round_event(index, self._context)
                for index in range(rounds or 1)
            )
            kinds = {self._participation.cost(event) for event in set(events)}
            accountant = accounting.select_accountant(kinds)
        _validate.one_of(charge_lib.ACCOUNTANTS, accountant=accountant)
        self._accountant = accountant
        budget = None
        if target_epsilon is not None or target_delta is not None:
            budget = accounting.PrivacyBudget(
                _validate.positive(target_epsilon=target_epsilon),
                _validate.inside_unit_interval(target_delta=target_delta),
                accountant,
            )
        self._history = history.RoundHistory(
            self._sampling, budget, ledger, repr(mechanism), mechanism.privacy_unit
        )
        self._non_negative = sums.resolve_non_negative(non_negative)
        self.discarded_updates = self.rejected_replies = 0
        self.stopped_before_round: int | None = None

    def _check_strategy(self, strategy: Strategy) -> None:
        """Raises an error unless a strategy can work with one averaged reply.

        The guarantee does not depend on this check, as the strategy only
        post-processes.
        """
        if isinstance(strategy, PrivateRounds):
            raise TypeError(
                f"strategy must not be private already, got {strategy!r}: it would "
                "reject the noisy mean, which no client sent."
            )
        for method in (self._configure_method, self._aggregate_method):
            if not callable(getattr(strategy, method, None)):
                raise TypeError(
                    f"strategy must have a method {method}, got {strategy!r}."
                )
        function = getattr(strategy, self._metrics_attribute, None)
        if function is not None and not _is_from_flower(function):
            raise ValueError(
                f"strategy must have no {self._metrics_attribute}, got {function!r}: "
                "it gets only the noisy mean. Compute metrics in an evaluation."
            )
        for cls in type(strategy).__mro__:
            if _is_from_flower(cls) and self._aggregate_method in vars(cls):
                if cls.__name__ not in (*_AVERAGING_STRATEGIES, "Strategy"):
                    raise ValueError(
                        "strategy must be one that averages "
                        f"({', '.join(_AVERAGING_STRATEGIES)}, or one of your own), "
                        f"got {strategy!r} with the {self._aggregate_method} of "
                        f"{cls.__name__}: it gets only one reply, the noisy mean."
                    )
                return

    def __getattr__(self, name: str) -> Any:
        if name == "strategy" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled: each copy would "
            "count only its own spending. Make a new one with the same ledger."
        )

    # The releases and their cost.

    @property
    def mechanism(self) -> mechanisms.Mechanism:
        """The mechanism; it cannot be replaced during a run."""
        return self._mechanism

    @property
    def num_clients(self) -> int:
        """N; it cannot be changed during a run, as rounds are charged with it."""
        return self._num_clients

    @property
    def clients_per_round(self) -> int:
        """m, likewise."""
        return self._clients_per_round

    @property
    def on_client_failure(self) -> str:
        """What happens to a round if a client fails; affects the cost of all rounds."""
        return self._on_client_failure

    @property
    def charged_rounds(self) -> tuple[history.ChargedRound, ...]:
        """The rounds charged to this strategy."""
        return tuple(self._history.charged)

    def privacy_epsilon(
        self, delta: float | None = None, accountant: str | None = None
    ) -> float:
        """Returns epsilon at delta after the rounds charged so far.

        These include rounds of other strategies in the same ledger.

        Args:
          delta: The delta of the guarantee; None: `target_delta`.
          accountant: "rdp" or "pld"; None: the strategy's own.

        Returns:
          Epsilon; infinity if a round was released without noise.

        Raises:
          ValueError: An argument is not allowed.
        """
        delta, accountant = self._resolve_delta(delta), accountant or self._accountant
        return self._history.accountant().epsilon(delta, accountant)

    def _resolve_delta(self, delta: float | None) -> float:
        if delta is not None:
            return delta
        if self._history.budget is None:
            raise ValueError("delta must be given if there is no target_delta.")
        return self._history.budget.delta

    def privacy_report(
        self, delta: float | None = None, accountant: str | None = None
    ) -> Json:
        """Returns the guarantee and its assumptions as JSON values.

        Args:
          delta: The delta of the guarantee; None: `target_delta`.
          accountant: "rdp" or "pld"; None: the strategy's own.

        Returns:
          epsilon (None if there is no guarantee), epsilon_if_cohorts_are_known
          (against anyone who knows which clients were in which round), delta,
          accountant, trust_model ("central"), relation, rounds, rounds_from_ledger,
          planned_rounds and epsilon_of_planned_rounds (None if they are unknown, or
          all have run; this epsilon holds if the run is ended because of what its
          models show), clients_per_round, num_clients, and caveats: sentences that
          qualify epsilon.
        """
        delta, composed = self._resolve_delta(delta), self._history.accountant()
        accountant = accountant or self._accountant
        epsilon = composed.epsilon(delta, accountant)
        epsilon_if_known = composed.epsilon_if_participation_is_known(delta, accountant)
        ahead = self._charges_ahead()
        planned = composed.with_charges(*ahead.items()).epsilon(delta, accountant)
        report = {
            "epsilon": epsilon,
            "epsilon_if_cohorts_are_known": epsilon_if_known,
            "delta": delta,
            "accountant": accountant,
            "trust_model": self.mechanism.trust_model,
            "relation": f"one client is {self._participation.relation.value}",
            "rounds": len(self._history.charged),
            "rounds_from_ledger": self._history.num_from_ledger,
            "planned_rounds": self.rounds if ahead else None,
            "epsilon_of_planned_rounds": planned if ahead else None,
            "clients_per_round": self.clients_per_round,
            "num_clients": self.num_clients,
            "caveats": self._caveats(epsilon, epsilon_if_known),
        }
        return _files.to_finite(report)

    def _charges_ahead(self) -> collections.Counter[accounting.RoundCharge]:
        """Returns the costs of planned rounds not yet run; empty if unknown."""
        index, participation = self._history.num_rounds, self._participation
        ahead = 0 if self.rounds is None else max(0, self.rounds - index)
        if self._secagg_step is not None:  # Its rounding depends on the model.
            ahead = 0
        if self._correlation is not None:
            index = self._correlation.record.released
        rounds, context = range(index, index + ahead), self._context
        events = (self.mechanism.round_event(t, context) for t in rounds)
        costs = [*map(participation.cost, events)]
        if self._sampling == Sampling.RANDOM_ALLOCATION:  # Charged pass by pass.
            length = participation.rounds_per_pass
            passes = (costs[k : k + length] for k in range(0, ahead, length))
            costs = [
                min(each, key=lambda cost: cost.noise_multiplier or 0)
                for each in passes
            ]
        return collections.Counter(costs)

    def _caveats(self, epsilon: float, epsilon_if_known: float) -> list[str]:
        """Returns the caveats that apply, as self-contained sentences."""
        num_other_rounds, correlated = self._history.num_from_ledger, self._correlation
        has_random_size = self._sampling in charge_lib.OF_RANDOM_SIZE
        applies = {
            "plan_fixed_in_advance": True,
            "floating_point_noise": True,
            "hyperparameter_search_not_counted": not num_other_rounds,
            "only_runs_in_ledgers_counted": num_other_rounds,
            "flower_noise": True,
            "separated_zero_out": correlated,
            "participations_checked": correlated,
            "flower_nodes_are_clients": not (correlated and correlated.client_of),
            "flower_cohorts_secret": not correlated and epsilon != epsilon_if_known,
            "population_stated": has_random_size,
            "allocation_charged_whole": self._sampling == Sampling.RANDOM_ALLOCATION,
            "plan_assumes_none_abandoned": self.rounds is not None
            and self._sampling in charge_lib.IN_PASSES,
            "clients_excluded": self.on_client_failure == "exclude",
            "rounds_may_be_abandoned": self._participation.is_charged_if_abandoned,
            "noised_updates_charged": not self._participation.is_charged_if_abandoned
            and self._charges_first,
            "cohort_redrawn": self._participation.draws_depend_on_each_other,
            "client_noise_needs_honest_clients": self.mechanism.needs_exact_cohort,
            "flower_secagg": self._secagg_step is not None,
            "flower_beside_the_model": True,
        }
        keys = (
            *self.mechanism.all_caveats(),
            *(key for key in applies if applies[key]),
        )
        return [statement.CAVEATS[key] for key in keys]

    def close(self) -> None:
        """Closes the ledger, so that another process can continue it."""
        self._settle()
        if self._history.ledger is not None:
            self._history.ledger.close()

    @property
    def _context(self) -> mechanisms.PrivacyContext:
        return mechanisms.PrivacyContext(
            clients_per_round=self._expected_size,
            num_clients=self.num_clients,
            sampling=self._sampling,
            rounds=self.rounds,
        )

    @property
    def _participation(self) -> charge_lib.Participation:
        """Which clients could be in a round, without its place in a pass.

        It covers what abandoning reveals. With SecAgg+, one failure abandons a round.
        """
        may_abandon = self.on_client_failure == "abort" or self._secagg_step is not None
        return charge_lib.Participation(
            sampling=self._sampling,
            num_clients=self.num_clients,
            clients_per_round=self._expected_size,
            known_selection=may_abandon and self._sampling == Sampling.FIXED_SIZE,
        )

    @property
    def _charges_first(self) -> bool:
        """Whether a round is charged as soon as it begins, even if it is abandoned.

        Abandoning it may reveal who was drawn. And noised updates that have arrived
        cannot be taken back.
        """
        noised = self.mechanism.noise_site == NoiseSite.CLIENT
        return noised or self._participation.is_charged_if_abandoned

    # A round.

    def _ask_strategy(self, server_round: int, *arguments: object) -> list[Any]:
        """Settles the previous round; returns the wrapped strategy's messages."""
        self._settle()
        self._open_round = server_round, None
        if self._is_over(server_round, self._history.num_rounds):
            return []  # Flower's own strategies would first wait for clients.
        configure = getattr(self.strategy, self._configure_method)
        return list(configure(server_round, *arguments))

    def _settle(self) -> None:
        """Abandons a round that was started but not released."""
        if self._open_round[1] is not None:
            _logger.warning(
                "Round %s is abandoned: no replies arrived.", self._open_round[0]
            )
            no_replies = sums.Collected(0, False, self._open_round[1].round_state)
            algorithm.finish_round(
                _Server(self), self._open_round[1], no_replies, self._paid
            )

    def _is_over(self, server_round: int, index: int) -> bool:
        is_over = self.rounds is not None and index >= self.rounds
        if is_over:
            _logger.warning(
                "Round %s is not started: all rounds=%d are charged.",
                server_round,
                self.rounds,
            )
        return is_over

    def _begin_round(
        self,
        server_round: int,
        connected: Mapping[Hashable, ClientProxy | None],
        model: Sequence[np.ndarray],
        template: sums.Template,
        names: Sequence[str] = (),
    ) -> sums.ConfiguredRound | None:
        """Draws a round, and charges it if it must be paid first; None: not started.

        Args:
          server_round: Flower's number of the round.
          connected: The connected clients, by id.
          model: The weights before the round.
          template: The model's form in Flower's messages.
          names: The arrays' names, if they have any.
        """
        for array in model:
            if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
                raise ValueError(
                    "The model must hold real numbers of at most 64 bits, got an array "
                    f"of dtype {array.dtype}."
                )
        non_negative = self._find_non_negative(model, names)
        # Only charged rounds count. It is read once, as other processes may write to
        # the ledger.
        index = self._history.num_rounds
        if self._is_over(server_round, index):
            return None
        draw = self._draw_cohort(server_round, connected)
        if draw is None:
            return None
        cohort, pass_fields = draw
        if self._correlation is not None:
            self._correlation.begin(model)  # May raise, before any client is asked.
            index = self._correlation.record.released
        event = self.mechanism.round_event(index, self._context)
        z = charge_lib.noise_multiplier_of(event)
        if self._secagg_step is not None and z is not None:
            # SecAgg+ rounds after the clip, so a client can add more than S.
            size = sum(array.size for array in model)
            share = math.sqrt(size) * self._secagg_step
            enlargement = 1 + (share / self.clip_norm if self.clip_norm else math.inf)
            event = dp_accounting.GaussianDpEvent(z / enlargement)
        charge = dataclasses.replace(self._participation, **pass_fields).cost(event)
        plan = history.ChargedRound(server_round, self.clip_norm, len(cohort), charge)
        if not self._history.affords(plan):
            self._stop_before(server_round)
            return None
        configured = sums.ConfiguredRound(
            sent_model=[np.array(array) for array in model],
            clients={name: connected[name] for name in cohort},
            plan=plan,
            mechanism=self.mechanism,
            context=self._context,
            round_state=mechanisms.RoundState(
                self.clip_norm,
                self.mechanism.noise_multiplier_at(index),
                float(self._expected_size),
            ),
            template=template,
            non_negative=non_negative,
        )
        try:
            self._paid = algorithm.begin_round(_Server(self), configured)
        except accounting.BudgetExceededError:
            self._stop_before(server_round)
            return None
        self._open_round = server_round, configured
        return configured

    def _find_non_negative(
        self, model: Sequence[np.ndarray], names: Sequence[str]
    ) -> list[int]:
        """Returns the arrays to keep at 0 or above; warns once if none are given."""
        if self._non_negative is None:
            self._non_negative = ()
            positive = [
                index
                for index, array in enumerate(model)
                if array.dtype.kind == "f" and array.size and np.min(array) > 0
            ]
            if positive:
                _logger.warning(
                    "The model has arrays that are positive (%s). Noise may push them "
                    "below zero. If some must not be negative, such as the variances "
                    "of a BatchNorm, give non_negative=[...]; otherwise ().",
                    ", ".join(str(names[k]) if names else str(k) for k in positive),
                )
        indices: dict[int | str, int] = {index: index for index in range(len(model))}
        indices |= {name: index for index, name in enumerate(names)}
        for key in self._non_negative:
            if key not in indices:
                raise ValueError(
                    "non_negative must name arrays of the model, or their indices "
                    f"below {len(model)}, got {key!r}."
                )
        return [indices[key] for key in self._non_negative]

    def _draw_cohort(
        self, server_round: int, connected: Mapping[Hashable, object]
    ) -> tuple[list[Hashable], Json] | None:
        """Draws clients unpredictably; also returns the round's position in its pass.

        Returns None if too few clients are connected.
        """
        eligible, num_connected = list(connected), len(connected)
        if self._correlation is not None:
            eligible, num_connected = self._correlation.eligible(connected)
        if num_connected < self.num_clients:
            text = (
                "num_clients must be at most the number of connected clients, "
                f"{num_connected}, got {self.num_clients}: sampling hides a client "
                "only among the connected ones"
            )
            if not self._history.charged:
                raise ValueError(
                    f"{text}. Let the strategy wait for them "
                    f"(min_available_nodes={self.num_clients})."
                )
            _logger.warning("Round %s is abandoned: %s.", server_round, text)
            return None
        participation = self._participation
        if self._sampling == Sampling.RANDOM_ALLOCATION:
            return self._allocation.draw(eligible)
        if self._sampling == Sampling.POISSON:
            draw, q = secrets.SystemRandom().random, participation.sampling_probability
            return [client for client in eligible if draw() < q], {}
        if len(eligible) < self.clients_per_round:
            _logger.warning(
                "Round %s is not started: only %d of %d connected clients may take "
                "part; the others did so too recently or too often.",
                server_round,
                len(eligible),
                num_connected,
            )
            return None
        # Flower draws with Python's `random`, which is predictable.
        return secrets.SystemRandom().sample(eligible, self.clients_per_round), {}

    def _stop_before(self, server_round: int) -> None:
        self.stopped_before_round = server_round
        budget = cast(accounting.PrivacyBudget, self._history.budget)
        _logger.warning(
            "Stopped before round %s, which would bring epsilon above %s at delta=%s.",
            server_round,
            *map(accounting.format_up, (budget.epsilon, budget.delta)),
        )

    def _finish_round(
        self,
        server_round: int,
        results: Iterable[tuple[Hashable, _Result]],
        read: Callable[[_Result, sums.ConfiguredRound], replies.Reply],
        is_average: bool = False,
    ) -> tuple[sums.ConfiguredRound, list[np.ndarray]] | None:
        """Returns a round and its model; None if there is nothing to release.

        Args:
          server_round: Flower's number of the round.
          results: Each client with its reply.
          read: Reads a reply, or raises ReplyError.
          is_average: Whether all results are one average, which also includes the
            unusable replies.

        Raises:
          RoundNotConfiguredError: The results belong to no round, or have arrived
            before.
        """
        number, configured = self._open_round
        if number != server_round:
            raise RoundNotConfiguredError(
                f"{self._configure_method} was not called for round {server_round}, "
                "or its results have arrived before. Nothing is released or charged."
            )
        # The round stays open until it is settled, even if something fails.
        self._open_round = None, configured
        if configured is None:
            return None
        usable: dict[Hashable, replies.Reply] = {}
        replied, rejected = set(), 0
        for client, result in results:
            try:
                if client not in configured.clients:
                    raise replies.ReplyError("it was not asked")
                if client in usable:
                    raise replies.ReplyError("it has already replied")
                replied.add(client)
                usable[client] = read(result, configured)
            except replies.ReplyError as error:
                rejected += 1
                _logger.warning(
                    "Round %s, a reply is not used: client %.100r: %s.",
                    server_round,
                    client,
                    error,
                )
        self.rejected_replies += rejected
        m = len(configured.clients)
        # No client may end a run by its reply. If a reply is unusable, the server adds
        # that client's share of the noise.
        counted = replied if self.mechanism.needs_exact_cohort else usable
        is_enough = len(counted) == m or self.on_client_failure == "exclude"
        charge = configured.plan.charge
        if not charge.is_amplified or charge.known_selection:
            is_enough = is_enough and bool(usable)
        # Otherwise, release even a round without replies, as pure noise: knowing that
        # all drawn clients failed would reveal who was drawn for the other rounds.
        if not is_enough or (is_average and rejected):
            _logger.warning(
                "Round %s is abandoned: %d of %d clients sent a usable reply, and %d "
                "replies are unusable.",
                server_round,
                len(usable),
                m,
                rejected,
            )
            collected = sums.Collected(len(usable), False, configured.round_state)
        else:
            collected = sums.collect(configured, list(usable.values()))
        try:
            outcome = algorithm.finish_round(
                _Server(self, list(usable)), configured, collected, self._paid
            )
        except accounting.BudgetExceededError:
            self._stop_before(server_round)
            return None
        return None if outcome is None else (configured, outcome.model)


@dataclasses.dataclass(frozen=True)
class _Server:
    """The server of one round (see `algorithm.Server`).

    Attributes:
      rounds: The strategy.
      clients: The clients whose replies are used.
    """

    rounds: PrivateRounds
    clients: Sequence[Hashable] = ()

    def charges_first(self, configured: sums.ConfiguredRound) -> bool:
        """See `algorithm.Server`."""
        return self.rounds._charges_first

    def abandons(self, collected: sums.Collected) -> bool:
        """See `algorithm.Server`."""
        return not collected.is_enough

    def charge(
        self, configured: sums.ConfiguredRound, collected: sums.Collected | None = None
    ) -> accounting.Receipt:
        """See `algorithm.Server`: the charge is on disk before anyone sees a result."""
        # As charged before any client is asked; the other cases follow.
        changes: Json = {"num_replies": None, "is_released": False}
        if collected is not None and collected.is_enough:
            self.rounds._open_round = None, None
            changes = {"num_replies": collected.num_replies}
        elif collected is not None:
            changes |= {"num_replies": 0, "charge": configured.participation}
        return self.rounds._history.charge(
            dataclasses.replace(configured.plan, **changes)
        )

    def abandon(self, configured: sums.ConfiguredRound) -> None:
        """See `algorithm.Server`."""
        del configured
        self.rounds._open_round = None, None

    def release(
        self,
        configured: sums.ConfiguredRound,
        collected: sums.Collected,
        paid: accounting.Receipt,
    ) -> sums.Outcome:
        """See `algorithm.Server`."""
        rounds, correlation = self.rounds, self.rounds._correlation
        rounds._open_round = None, None  # If this raises, nothing was updated.
        rounds._history.mark_released(collected.num_replies)
        noise_state = () if correlation is None else correlation.noise_state
        outcome = sums.release(configured, collected, paid, noise_state)
        if correlation is not None:
            nodes = [configured.clients[client] for client in self.clients]
            correlation.record_round(outcome.noise_state, nodes)
        rounds.discarded_updates += collected.discarded
        rounds.clip_norm = outcome.next_clip_norm
        return outcome


def _is_from_flower(value: object) -> bool:
    """Returns whether Flower itself defines a class or function."""
    return (getattr(value, "__module__", None) or "").partition(".")[0] == "flwr"


def require_identical(contents: Sequence[_Content]) -> _Content:
    """Returns the content sent to all clients; raises ValueError if it differs."""
    for other in contents[1:]:
        if other is not contents[0] and other != contents[0]:
            raise ValueError(
                "The wrapped strategy sends its clients different models or configs, "
                "but the noise hides updates to one model only."
            )
    return contents[0]
