"""A training run: all state between two rounds, and what the coming ones cost.

The randomness of a round is secret entropy or follows from the seed, and from
`attempts`. The values of the model's and the server optimizer's variables are in
these; a checkpoint adds them.
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

from tfdp_fl import accounting, sampling, schedules
from tfdp_fl.accounting import account as account_lib
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.auditing import CanaryAudit
from tfdp_fl.keras.training_setup import TrainingSetup
from tfdp_fl.mechanisms import PrivacyContext, RoundState, noise
from tfdp_fl.terms import Json, TrustModel

# What each stream of random numbers is for; cohorts have their own (sampling).
NOISE_STREAM, SHUFFLE_STREAM = 1, 2

# The number of a draw, and the entropy of the last resume (none: no words).
Attempt = tuple[int, ...]


class Attempts:
    """Numbers the draws of a model's rounds; none has the number of another.

    With a seed, two sums with one noise differ by a sum without any. So the key
    of a round's noise is not the round, but the attempt at it. A round that is
    run again, by whatever way, is another attempt. A resumed run does not know which
    numbers were used after its checkpoint, nor a fork which ones its parent uses:
    they go on with fresh entropy in their keys. (One `fit` at a time takes them.)
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._taken = 0
        self._entropy: tuple[int, ...] = ()

    def take(self) -> Attempt:
        """Returns an attempt that nothing had before, nor has afterwards."""
        if os.getpid() != self._process:
            self.renew()
        self._taken += 1
        return (self._taken - 1, *self._entropy)

    def renew(self) -> None:
        """Sets all later attempts apart from those of any other process."""
        self._process = os.getpid()
        words = np.frombuffer(secrets.token_bytes(16), np.uint32)
        self._entropy = tuple(words.tolist())


def round_seed(seed: int | None, attempt: Attempt) -> np.ndarray:
    """Returns the seed of a round's noise and dropout.

    Without a user's seed it is fresh entropy from the operating system. With one it
    depends on that seed and the attempt alone.
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


# How many clients there are, and a digest of their ids, in order.
Population = tuple[int, str]

# Kinds of rounds, and how many there are of each.
Charges = list[tuple[accounting.RoundCharge, int]]

# What a checkpoint keeps as it is.
_PLAIN = (
    *("run_id", "rounds", "populations", "known_ledgers", "log_names"),
    *("held_out", "windows"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitPlan:
    """One call of `fit`: what holds for all of its rounds.

    Attributes:
      first_round: The first round of this training, counted from 0 over the
        life of the model.
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
    """What a training is between two rounds, from its first `fit` on.

    Attributes:
      setup: How cohorts are drawn, and what is released of them.
      plan: The present or last call of `fit`.
      sampler: Draws the cohorts.
      deployment: Where the mechanism is used.
      spending: What the rounds have cost.
      population: The clients of the present `fit`.
      reading: See `FederatedDataset.reading`; no checkpoint keeps it.
      run_id: Names the run in ledgers; a resumed one has the same.
      rounds: How many rounds were run, abandoned ones included.
      populations: Those of all that were charged, each where it began.
      num_records: The clients' examples, where those are protected.
      mechanism_state: The state of the mechanism's query before the coming
        round: its clip, and its memory if it has any.
      windows: Float32 [N, W, L], each client's window of norms; None if the
        mechanism keeps none.
      cohort_sizes: How many released rounds had how many clients.
      log_names: The values that a round reports.
      caveats: Keys of `accounting.CAVEATS` of which the rounds are the reason.
      held_out: The digest of the clients that each `fit` so far held out for
        validation; empty if one held out none, or others.
      budget_delta: The delta of the last `PrivacyBudget`.
      audit: The last `CanaryAudit`; no checkpoint keeps it.
      releasing: Whether a release has begun and not ended: if it was broken off, the
        model may have moved by a round that `rounds` does not count.
      attempts: Numbers the draws of all rounds; no checkpoint keeps it.
      executor: How clients were trained, for people to read; nor this.
    """

    setup: TrainingSetup
    plan: FitPlan
    sampler: sampling.CohortSampler
    deployment: PrivacyContext
    spending: account_lib.PrivacyAccount
    population: Population
    reading: tuple[object, ...] | None = None
    run_id: str = dataclasses.field(default_factory=ledger_lib.new_run)
    rounds: int = 0
    populations: list[Population] = dataclasses.field(default_factory=list)
    num_records: int | None = None
    mechanism_state: RoundState
    windows: np.ndarray | None = None
    cohort_sizes: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter
    )
    log_names: list[str] = dataclasses.field(default_factory=lambda: ["loss"])
    caveats: set[str] = dataclasses.field(default_factory=set)
    held_out: str | None = None
    budget_delta: float | None = None
    audit: CanaryAudit | None = None
    releasing: bool = False
    attempts: Attempts = dataclasses.field(default_factory=Attempts)
    executor: str | None = None

    @property
    def known_ledgers(self) -> dict[str, str]:
        """The hash of the last line that is counted of each ledger, by its path."""
        return self.spending.known_ledgers

    def begin_fit(self, *, validates: bool, held_out: str | None) -> None:
        """Prepares for the clients of a `fit`, and notes what it was given.

        Args:
          validates: Whether there is validation data.
          held_out: The digest of the clients that are held out for it.
        """
        self.spending.set_population(self.population[0])
        if self.plan.seed is not None:
            self.caveats.add("seed_given")
        if self.setup.noise_generator == noise.PHILOX:
            self.caveats |= {"floating_point_noise", "pseudorandom_noise"}
        else:
            self.caveats.add("exact_noise")
        if validates:
            self.caveats.add("validation_data_not_covered")
        # A round that was charged may have been released, also if it broke off.
        begun = self.rounds or self.spending.rounds
        goes_on = not begun or self.held_out == held_out
        self.held_out = held_out if goes_on else ""

    def remember_norms(self, positions: np.ndarray, norms: np.ndarray | None) -> None:
        """Moves clients' windows on by one round; norms are NaN where none answered."""
        if norms is None or self.windows is None:
            return
        usable = np.isfinite(norms).all(axis=1)
        positions, norms = positions[usable], norms[usable]
        self.windows[positions] = np.concatenate(
            [self.windows[positions, 1:], norms[:, None]], axis=1
        )

    def state(self, ledger: ledger_lib.PrivacyLedger | None = None) -> Json:
        """Returns what a checkpoint keeps, beside its ledger: JSON values and arrays.

        (See `PrivacyAccount.state`.)
        """
        memory = tf.nest.flatten(self.mechanism_state)
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "plan": dataclasses.asdict(self.plan),
            "calibration": (self.deployment.rounds, self.deployment.max_participations),
            "caveats": sorted(self.caveats),
            "sampler": self.sampler.state(),
            "spending": self.spending.state(
                self.setup.mechanism.max_participations is not None, ledger
            ),
            "cohort_sizes": [*self.cohort_sizes.items()],
            "mechanism_state": [tf.convert_to_tensor(v).numpy() for v in memory],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], prepared: Run) -> Run:
        """Returns the run that a state was taken of.

        `prepared` is about to begin with the same arguments: its sampler is put where
        the state was, and the mechanism's state must match `prepared`'s structure.
        """
        values = [tf.constant(value) for value in state["mechanism_state"]]
        # Of its own: whatever fails later leaves the run that was as it is.
        sampler = copy.deepcopy(prepared.sampler)
        sampler.restore(state["sampler"])
        plain = {name: state[name] for name in _PLAIN}
        plain["populations"] = [(n, ids) for n, ids in state["populations"]]
        spending = account_lib.PrivacyAccount.from_state(state["spending"])
        known = plain.pop("known_ledgers")
        spending.known_ledgers = {**prepared.known_ledgers, **known}
        return dataclasses.replace(
            prepared,
            **plain,
            sampler=sampler,
            caveats=set(state["caveats"]),
            cohort_sizes=collections.Counter(dict(state["cohort_sizes"])),
            spending=spending,
            mechanism_state=tf.nest.pack_sequence_as(prepared.mechanism_state, values),
        )

    # What the coming rounds draw and cost.

    def draw(self) -> sampling.Cohort:
        """Returns the next round's cohort, or that of a round that was broken off."""
        if self.sampler.unsettled is None:
            self.sampler.next_round = self.rounds
        return self.sampler.unsettled or self.sampler.draw()

    def taking_part(self, positions: np.ndarray) -> np.ndarray:
        """Returns a cohort without those who took part as often as they may."""
        limit = self.setup.mechanism.max_participations
        if limit is None:
            return positions
        times = self.spending.per_client.participations[positions]
        return positions[times < limit]

    def cost(
        self, round_index: int, answered: int | None = None
    ) -> accounting.RoundCharge:
        """Returns the cost of a round."""
        mechanism = self.setup.mechanism
        state, ahead = self.mechanism_state, round_index - self.rounds
        index = mechanism.event_index(self.rounds, state.memory) + ahead
        if ahead:
            event = mechanism.round_event(index, self.deployment)
        else:
            event = mechanism.event_at(index, self.deployment, state)
        size = self.sampler.expected_cohort_size(round_index)
        if answered is not None:
            size = answered
        expected = self.deployment.cohort_size(round_index)
        if mechanism.trust_model == TrustModel.LOCAL and size < expected:
            # Clients that are missing did not add their noise.
            event = dp_accounting.NonPrivateDpEvent()
        cohort = self.sampler.unsettled
        if cohort is None or cohort.round_index != round_index:
            return self.sampler.charge(round_index, event)
        return self.sampler.charge(cohort, event)

    @property
    def mu_squared(self) -> float:
        """(sensitivity / sigma)^2 of one client's own release; 0 if none."""
        if not self.spending.by_client:
            return 0.0
        return self.setup.mechanism.mu_squared(self.deployment)

    def _mu_squared_after(self, rounds: int) -> float:
        """Returns the most that one client can have spent after so many more rounds.

        The cohorts of passes are known beforehand. Others may draw any client that
        may still take part.
        """
        mu_squared, clients = self.mu_squared, self.spending.per_client
        elsewhere = self.spending.mu_squared_elsewhere
        most = self.setup.mechanism.max_participations
        if not isinstance(self.sampler, sampling.PassSampler):
            return elsewhere + clients.max_mu_squared_after_draws(
                rounds, mu_squared, most
            )
        ahead = range(self.rounds, self.rounds + rounds)
        head, whole, tail = self.sampler.split(ahead)
        planned = [*map(self.sampler.plan_cohort, (*head, *tail))]
        return elsewhere + clients.max_mu_squared_after_cohorts(
            planned, mu_squared, most, whole
        )

    def charges_ahead(self) -> Callable[[int, int], Charges]:
        """Returns the costs of a range of the coming rounds, by kind.

        Rounds of a pass that cost as much together as one of them may stand as one.
        """
        mechanism, sampler = self.setup.mechanism, self.sampler
        steady = is_steady(mechanism)
        given = mechanism.noise_multiplier, self.setup.clients_per_round
        constant = steady and all(map(schedules.is_constant, given))
        places: dict[Any, int] = {}
        kinds: list[accounting.RoundCharge] = []
        numbers: list[int] = []  # Of each coming round's kind.

        def number_of(ahead: int) -> int:
            index: Any = self.rounds + ahead
            # (The coming round's cohort may be drawn.)
            if ahead and steady and not isinstance(sampler, sampling.PassSampler):
                index = (
                    mechanism.noise_multiplier_at(index),
                    sampler.expected_cohort_size(index),
                )
            if index not in places:
                cost = self.cost(self.rounds + ahead)
                if cost not in places:
                    places[cost] = len(kinds)
                    kinds.append(cost)
                places[index] = places[cost]
            return places[index]

        def charges(first: int, end: int) -> Charges:
            if constant and end > first:
                rounds = range(self.rounds + first, self.rounds + end)
                planned = collections.Counter([self.cost(rounds[0])])
                event = mechanism.round_event(self.rounds + 1, self.deployment)
                for kind, count in sampler.charges(rounds[1:], event):
                    planned[kind] += count
                return [*planned.items()]
            numbers.extend(map(number_of, range(len(numbers), end)))
            times = np.bincount(np.array(numbers[first:end], np.int64))
            found = np.flatnonzero(times).tolist()
            return [(kinds[number], int(times[number])) for number in found]

        return charges

    def epsilon_after(
        self,
        delta: float,
        accountant: str | None = None,
        ahead: Callable[[int, int], Charges] | None = None,
    ) -> Callable[[int], float]:
        """Returns epsilon as it would be after a number of further rounds."""
        charges = ahead or self.charges_ahead()
        composed = {0: self.spending.central}

        def epsilon(count: int) -> float:
            if self.spending.by_client:
                spent = self._mu_squared_after(count)
                return accounting.epsilon_of_mu_squared(spent, delta)
            before = max(known for known in composed if known <= count)
            after = composed[before].with_charges(*charges(before, count))
            composed[count] = after
            return after.epsilon(delta, accountant or self.setup.accountant)

        return epsilon


def is_steady(mechanism: Any) -> bool:
    """Returns whether rounds of equal noise and size are known to release the same.

    Not those of correlated noise, or of a mechanism of somebody's own.
    """
    ours = type(mechanism).round_event.__module__.startswith("tfdp_fl.mechanisms.")
    return ours and not mechanism.min_separation
