"""A training run: all state between two rounds, and the cost of coming rounds.

The randomness of a round comes from secret entropy, or from the seed and `attempts`.
The variables of the model and the server optimizer are not part of it; a checkpoint
adds their values.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdp_fl import _signals, accounting, sampling, schedules
from tfdp_fl.accounting import account as account_lib
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.auditing import CanaryAudit
from tfdp_fl.engine import RoundInputs
from tfdp_fl.keras.training_setup import TrainingSetup
from tfdp_fl.mechanisms import (
    CohortQuery,
    Mechanism,
    PrivacyContext,
    RoundState,
    noise,
)
from tfdp_fl.terms import Json, Sampling, TrustModel

# Separate streams of random numbers; cohorts have their own (see `sampling`).
NOISE_STREAM, SHUFFLE_STREAM = 1, 2

# The number of the attempt, and four uint32 words of entropy since the last resume.
Attempt = tuple[int, ...]


class Attempts:
    """Gives each attempt at a round a number of its own.

    If two different sums had the same noise, their difference would have none. So
    with a seed, the key of the noise is not the round but the attempt at it, and a
    repeated round is always a new attempt. A resumed run cannot know which numbers
    were used after its checkpoint, nor can a forked process know which ones its parent
    uses. So they add fresh entropy to their keys. (Only one `fit` at a time takes any.)
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._num_taken = 0
        self._entropy: tuple[int, ...] = ()
        # The id of this process's attempts.
        self.session = secrets.token_hex(8)

    def take(self) -> Attempt:
        """Returns an attempt that is never returned again."""
        if os.getpid() != self._process:
            self.renew()
        self._num_taken += 1
        return (self._num_taken - 1, *self._entropy)

    def renew(self) -> None:
        """Makes all later attempts different from those of any other process."""
        self._process = os.getpid()
        words = np.frombuffer(secrets.token_bytes(16), np.uint32)
        self._entropy = tuple(words.tolist())
        self.session = secrets.token_hex(8)


def round_seed(seed: int | None, attempt: Attempt) -> np.ndarray:
    """Returns the seed of a round's noise and dropout.

    Without a user's seed, it is fresh entropy from the operating system. Otherwise, it
    depends only on that seed and the attempt.
    """
    if seed is None:
        return noise.fresh_seed()
    sequence = sampling.seed_sequence(seed, NOISE_STREAM, attempt)
    return sequence.generate_state(2, np.uint64)


def shuffle_generator(seed: int | None, attempt: Attempt) -> np.random.Generator:
    """Returns the generator that shuffles the clients' examples in a round."""
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng(sampling.seed_sequence(seed, SHUFFLE_STREAM, attempt))


# The number of clients, and a digest of their ids in order.
Population = tuple[int, str]

# How many rounds have each cost.
Charges = collections.Counter[accounting.RoundCharge]

# The caveats, written to ledger lines, that depend on a `fit` or on what was shown.
_LEDGER_CAVEATS = frozenset(
    (
        *("seed_given", "validation_data_not_covered", "client_metrics_shown"),
        *("non_trainable_released", "non_trainable_kept"),
    )
)

# Attributes that a checkpoint stores unchanged.
_STORED_ATTRIBUTES = ("run_id", "rounds", "log_names", "segment", "held_out", "windows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitPlan:
    """The settings of one call of `fit`, which hold for all of its rounds.

    Attributes:
      first_round: The first round of this call, counted from 0 over all calls.
      last_round: One past its last round.
      batch_size: Examples in one local batch.
      local_epochs: Passes over a client's examples.
      shuffle: Whether clients shuffle their examples.
      seed: The user's seed, or None.
    """

    first_round: int
    last_round: int
    batch_size: int
    local_epochs: int
    shuffle: bool
    seed: int | None


@dataclasses.dataclass(kw_only=True)
class Run:
    """The state of a training between two rounds, from its first `fit` on.

    Attributes:
      setup: How cohorts are drawn, and what is released about them.
      plan: The current or last call of `fit`.
      sampler: Draws the cohorts.
      context: What the mechanism may know about the run.
      account: What the run has spent, and its ledgers.
      population: The number of the current `fit`'s clients, and a digest of their ids.
      source_identity: Their `FederatedDataset.source_identity`; not in checkpoints.
      run_id: The run's name in ledgers; a resumed run keeps it.
      rounds: The number of rounds run, including abandoned ones.
      planned_rounds: The most rounds that any `fit` of the current clients planned,
        within its budgets.
      unrun: How many rounds of each cost a `fit` of earlier clients planned but did
        not run.
      num_unrun: The number of those rounds.
      populations: The populations of all charged rounds, one entry per change.
      num_records: The number of the clients' examples, if those are protected.
      mechanism_state: The state of the mechanism's query before the next round: its
        clip, and the noise state, if any.
      segment: The id of the segment of correlated noise to which the noise state
        belongs.
      windows: Float32 [N, W, L], each client's window of norms; None if the
        mechanism keeps none.
      cohort_sizes: The number of released rounds for each cohort size.
      log_names: The names of the values that a round reports.
      caveats: Keys of `accounting.CAVEATS` that apply because of the rounds run.
      held_out: The digest of the clients that every `fit` so far held out for
        validation; empty if a `fit` held out none, or different ones.
      budget_delta: The delta of the last `PrivacyBudget`.
      audits: The audits of every `fit`, in order; not in checkpoints.
      releasing: Whether a release has started but not finished. If it was interrupted,
        the model may include a round that `rounds` does not count.
      prepaid_round: The last round that was charged before it trained (-1: none); not
        in checkpoints.
      attempts: Numbers the attempts at rounds; not in checkpoints.
      executor: Describes to users how clients were trained; not in checkpoints.
    """

    setup: TrainingSetup
    plan: FitPlan
    sampler: sampling.CohortSampler
    context: PrivacyContext
    account: account_lib.PrivacyAccount
    population: Population
    source_identity: tuple[object, ...] | None = None
    run_id: str = dataclasses.field(default_factory=ledger_lib.new_id)
    rounds: int = 0
    planned_rounds: int = 0
    unrun: Charges = dataclasses.field(default_factory=collections.Counter)
    num_unrun: int = 0
    populations: list[Population] = dataclasses.field(default_factory=list)
    num_records: int | None = None
    mechanism_state: RoundState
    segment: str = dataclasses.field(default_factory=ledger_lib.new_id)
    windows: np.ndarray | None = None
    cohort_sizes: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter
    )
    log_names: list[str] = dataclasses.field(default_factory=lambda: ["loss"])
    caveats: set[str] = dataclasses.field(default_factory=set)
    held_out: str | None = None
    budget_delta: float | None = None
    audits: list[CanaryAudit] = dataclasses.field(default_factory=list)
    releasing: bool = False
    prepaid_round: int = -1
    attempts: Attempts = dataclasses.field(default_factory=Attempts)
    executor: str | None = None

    @property
    def known_ledgers(self) -> dict[str, str]:
        """Maps a ledger's path to the hash of its last line that is counted."""
        return self.account.known_ledgers

    def begin_fit(self, *, validates: bool, held_out: str | None) -> None:
        """Prepares for the clients of a `fit` and records its arguments.

        Args:
          validates: Whether there is validation data.
          held_out: The digest of the clients held out for validation.
        """
        self.account.set_population(self.population[0])
        if self.plan.seed is not None:
            self.caveats.add("seed_given")
        if self.setup.noise_generator == noise.PHILOX:
            self.caveats |= {"floating_point_noise", "pseudorandom_noise"}
        else:
            self.caveats.add("exact_noise")
        if validates:
            self.caveats.add("validation_data_not_covered")
        # A charged round may have been released, even if it was interrupted.
        has_begun = self.rounds or self.account.rounds
        is_continued = not has_begun or self.held_out == held_out
        self.held_out = held_out if is_continued else ""

    def begin_segment(self, query: CohortQuery) -> None:
        """Restarts correlated noise, as ledgers list rounds that its state lacks.

        They were lost in a crash, or the run was resumed in two places.
        """
        with _signals.defer_signals():
            self.caveats.add("rounds_charged_twice")
            self.mechanism_state = query.restart_noise(self.mechanism_state)
            self.segment = ledger_lib.new_id()
            self.account.has_unseen_rounds = False

    def update_windows(self, positions: np.ndarray, norms: np.ndarray | None) -> None:
        """Adds a round's norms to the clients' windows; a failed client's are NaN."""
        if norms is None or self.windows is None:
            return
        usable = np.isfinite(norms).all(axis=1)
        positions, norms = positions[usable], norms[usable]
        self.windows[positions] = np.concatenate(
            [self.windows[positions, 1:], norms[:, None]], axis=1
        )

    def state(self, ledger: ledger_lib.PrivacyLedger | None = None) -> Json:
        """Returns what a checkpoint stores beside its ledger: JSON values and arrays.

        `ledger` is as for `PrivacyAccount.state`.
        """
        leaves = tf.nest.flatten(self.mechanism_state)
        return {
            **{name: getattr(self, name) for name in _STORED_ATTRIBUTES},
            "planned_rounds": self.planned_rounds,
            "unrun": [(each.to_json(), number) for each, number in self.unrun.items()],
            "num_unrun": self.num_unrun,
            "populations": self.populations,
            "known_ledgers": self.known_ledgers,
            "plan": dataclasses.asdict(self.plan),
            "calibration": (self.context.rounds, self.context.max_participations),
            "caveats": sorted(self.caveats),
            "sampler": self.sampler.state(),
            "spending": self.account.state(
                self.setup.mechanism.max_participations is not None, ledger
            ),
            "cohort_sizes": [*self.cohort_sizes.items()],
            "mechanism_state": [tf.convert_to_tensor(v).numpy() for v in leaves],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], prepared: Run) -> Run:
        """Returns the run from which a state was captured.

        `prepared` is a fresh run with the same arguments. The state's sampler position
        is set on a copy of its sampler, and the mechanism's state must match its
        structure.
        """
        values = [tf.constant(value) for value in state["mechanism_state"]]
        # A copy, so that a later failure leaves the previous run unchanged.
        sampler = copy.deepcopy(prepared.sampler)
        sampler.restore(state["sampler"])
        account = account_lib.PrivacyAccount.from_state(state["spending"])
        account.known_ledgers = {**prepared.known_ledgers, **state["known_ledgers"]}
        return dataclasses.replace(
            prepared,
            **{name: state[name] for name in _STORED_ATTRIBUTES},
            # (Checkpoints from before November 2026 have none of these.)
            planned_rounds=state.get("planned_rounds", 0),
            num_unrun=state.get("num_unrun", 0),
            unrun=collections.Counter(
                {
                    accounting.RoundCharge.from_json(text): number
                    for text, number in state.get("unrun", ())
                }
            ),
            populations=[(n, ids) for n, ids in state["populations"]],
            sampler=sampler,
            caveats=set(state["caveats"]),
            cohort_sizes=collections.Counter(dict(state["cohort_sizes"])),
            account=account,
            mechanism_state=tf.nest.pack_sequence_as(prepared.mechanism_state, values),
        )

    # The cohorts and costs of coming rounds.

    @_signals.defer_signals()
    def end_interrupted_round(self) -> None:
        """Makes sure that an interrupted round's cohort is not trained later.

        If one of its clients caused the interruption, that client would be known to be
        in it, yet charged as if drawn by chance. Fixed-size cohorts depend on each
        other, so those must be trained as they were drawn.
        """
        cohort = self.sampler.unsettled
        if cohort is None or cohort.participation.draws_depend_on_each_other:
            return
        if cohort.participation.is_amplified and not self.account.by_client:
            self.caveats.add("rounds_interrupted")
        self.sampler.abandon(cohort)
        if cohort.participation.sampling == Sampling.RANDOM_ALLOCATION:
            self.rounds += 1  # This round would have the same clients again.
        self.sampler.next_round = self.rounds

    def draw(self) -> sampling.Cohort:
        """Returns the next cohort; of a fixed size, an interrupted one again."""
        if self.sampler.unsettled is None:
            self.sampler.next_round = self.rounds
        return self.sampler.unsettled or self.sampler.draw()

    def facts_of_line(self) -> Json:
        """Returns what a resumed run must learn from a line after its checkpoint."""
        facts: Json = {}
        if len(self.known_ledgers) > 1:
            facts["ledgers"] = sorted(self.known_ledgers)
        if caveats := sorted(self.caveats & _LEDGER_CAVEATS):
            facts["caveats"] = caveats
        if self.planned_rounds > self.rounds + 1:
            facts["planned"] = [self.planned_rounds]
        return facts

    def next_place(self) -> Json:
        """Returns the next round's place in correlated noise, for its line.

        Where the mechanism restarts its noise, a new segment begins.
        """
        mechanism, noise_state = self.setup.mechanism, self.mechanism_state.noise_state
        period = mechanism.event_period
        if period is None:
            return {}
        position = mechanism.event_index(self.rounds, noise_state)
        if position and not position % period:
            self.segment, position = ledger_lib.new_id(), 0
        return {ledger_lib.PLACE: [self.segment, self.attempts.session, position]}

    def next_inputs(self, learning_rate: float, attempt: Attempt) -> RoundInputs:
        """Returns the next round's inputs, with an empty cohort so far."""
        plan, nobody = self.plan, np.zeros(0, np.int64)
        return RoundInputs(
            round_index=self.rounds,
            state=self.mechanism_state,
            positions=nobody,
            # The fixed m, even for the smaller last cohort of a pass.
            clients_per_round=self.context.cohort_size(self.rounds),
            noise_multiplier=self.setup.mechanism.noise_multiplier_at(self.rounds),
            batch_size=plan.batch_size,
            local_epochs=plan.local_epochs,
            learning_rate=learning_rate,
            seed=round_seed(plan.seed, attempt),
            shuffle=shuffle_generator(plan.seed, attempt) if plan.shuffle else None,
            windows=None if self.windows is None else self.windows[nobody],
        )

    def eligible(self, positions: np.ndarray) -> np.ndarray:
        """Returns a cohort without the clients that may not take part again."""
        mechanism, clients = self.setup.mechanism, self.account.per_client
        if mechanism.max_participations is None:
            return positions
        if mechanism.begins_segment(self.mechanism_state.noise_state):
            clients.participations[:] = 0
        counts = clients.participations[positions]
        return positions[counts < mechanism.max_participations]

    def cost(
        self,
        round_index: int,
        num_with_noise: int | None = None,
        cohort: sampling.Cohort | None = None,
    ) -> accounting.RoundCharge:
        """Returns the cost of a round.

        Args:
          round_index: The next round, or a later one.
          num_with_noise: The number of clients that added noise; None: all.
          cohort: The cohort to charge for; None: as planned, or the one that has
            already been drawn for that round.
        """
        mechanism = self.setup.mechanism
        state, ahead = self.mechanism_state, round_index - self.rounds
        index = mechanism.event_index(self.rounds, state.noise_state) + ahead
        if ahead:
            event = mechanism.round_event(index, self.context)
        else:
            event = mechanism.event_at(index, self.context, state)
        size = self.sampler.expected_cohort_size(round_index)
        if num_with_noise is not None:
            size = num_with_noise
        expected = self.context.cohort_size(round_index)
        if mechanism.trust_model == TrustModel.LOCAL and size < expected:
            # Missing clients did not add their noise.
            event = dp_accounting.NonPrivateDpEvent()
        drawn = self.sampler.unsettled
        if cohort is None and drawn is not None and drawn.round_index == round_index:
            cohort = drawn
        return self.sampler.charge(round_index if cohort is None else cohort, event)

    @property
    def mu_squared(self) -> float:
        """(sensitivity / sigma)^2 of one client's own release; 0 without one."""
        if not self.account.by_client:
            return 0.0
        return self.setup.mechanism.mu_squared(self.context)

    def _mu_squared_after(self, rounds: int) -> float:
        """Returns the most that one client can have spent after `rounds` more rounds.

        The cohorts of a pass are known in advance. With other samplers, any client
        below its limit of participations may be drawn.
        """
        mu_squared, clients = self.mu_squared, self.account.per_client
        elsewhere = self.account.mu_squared_elsewhere
        max_participations = self.setup.mechanism.max_participations
        if not isinstance(self.sampler, sampling.PassSampler):
            return elsewhere + clients.max_mu_squared_after_draws(
                rounds, mu_squared, max_participations
            )
        ahead = range(self.rounds, self.rounds + rounds)
        head, num_passes, tail = self.sampler.split(ahead)
        cohorts = map(self.sampler.plan_cohort, (*head, *tail))
        positions = np.concatenate([np.zeros(0, np.int64), *cohorts])
        return elsewhere + clients.max_mu_squared_after(
            positions, mu_squared, max_participations, num_passes
        )

    def costs_ahead(self) -> Callable[[int, int], Charges]:
        """Returns a function that counts the costs of coming rounds (`cost_counter`).

        It takes the first of the rounds and the one after the last, both counted from
        the next round.
        """
        count = cost_counter(
            self.setup.mechanism, self.sampler, self.context, self.cost
        )

        def charges(first: int, end: int) -> Charges:
            rounds = range(self.rounds + first, self.rounds + end)
            if first or not rounds:
                return count(rounds)
            # The next round's cohort may already be drawn.
            return collections.Counter([self.cost(self.rounds)]) + count(rounds[1:])

        return charges

    def costs_not_run(self) -> Charges:
        """Returns the costs of rounds that were planned and have not run.

        A `fit` that was stopped because of its models might have run its whole plan,
        and so might a later one on other clients. So these add up. (A `fit` on the same
        clients continues the previous plan.)
        """
        ahead = max(0, self.planned_rounds - self.rounds)
        return self.unrun + self.costs_ahead()(0, ahead)

    def epsilon_after(
        self,
        delta: float,
        accountant: str | None = None,
        ahead: Callable[[int, int], Charges] | None = None,
    ) -> Callable[[int], float]:
        """Returns a function from a number of further rounds to epsilon after them."""
        charges = ahead or self.costs_ahead()
        composed = {0: self.account.central}

        def epsilon(count: int) -> float:
            if self.account.by_client:
                mu_squared = self._mu_squared_after(count)
                return accounting.epsilon_of_mu_squared(mu_squared, delta)
            previous = max(n for n in composed if n <= count)
            extended = composed[previous].with_charges(
                *charges(previous, count).items()
            )
            composed[count] = extended
            return extended.epsilon(delta, accountant or self.setup.accountant)

        return epsilon


def cost_counter(
    mechanism: Mechanism,
    sampler: sampling.CohortSampler,
    context: PrivacyContext,
    cost: Callable[[int], accounting.RoundCharge],
) -> Callable[[range], Charges]:
    """Returns a function that counts the distinct costs of planned rounds.

    Rounds of a pass that together cost no more than one of them may count as one.

    Args:
      mechanism: The mechanism.
      sampler: The sampler.
      context: What the mechanism may know about the run.
      cost: Returns a round's cost. It is called once for rounds whose costs are known
        to be equal.
    """
    # Rounds with equal noise and size need not cost the same with correlated noise or a
    # user-defined mechanism.
    defined_in = type(mechanism).round_event.__module__
    is_built_in = defined_in.startswith("tfdp_fl.mechanisms.")
    is_steady = is_built_in and not mechanism.min_separation
    planned = mechanism.noise_multiplier, context.clients_per_round
    is_constant = is_steady and all(map(schedules.is_constant, planned))
    by_round = not is_steady or isinstance(sampler, sampling.PassSampler)
    costs: dict[Any, accounting.RoundCharge] = {}

    def cost_of(round_index: int) -> accounting.RoundCharge:
        key: Any = round_index
        if not by_round:
            size = sampler.expected_cohort_size(round_index)
            key = mechanism.noise_multiplier_at(round_index), size
        if key not in costs:
            costs[key] = cost(round_index)
        return costs[key]

    def count(rounds: range) -> Charges:
        if not (is_constant and rounds):
            return collections.Counter(map(cost_of, rounds))
        counted: Charges = collections.Counter()
        event = mechanism.round_event(rounds[0], context)
        for cost, number in sampler.costs(rounds, event):
            counted[cost] += number
        return counted

    return count
