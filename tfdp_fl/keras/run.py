"""A training run: everything that later rounds depend on, but the model."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl import sampling
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.keras.fit_plan import FitPlan
from tfdp_fl.mechanisms import Deployment, noise

# How many clients there are, and a digest of who they are in which order.
Population = tuple[int, str]

_SPENDING_ARRAYS = ("mu_squared", "participations")


@dataclasses.dataclass
class Facts:
    """What the statement has to tell beside what was spent.

    Attributes:
      seed_given: Whether any `fit` was given a seed.
      philox: Whether Philox drew noise.
      cryptographic: Whether a cryptographic generator did.
      exact: Whether noise was drawn exactly, on a grid.
      validated: Whether any was given validation data.
      held_out: The digest of the clients that each `fit` so far held out for
        validation; empty if one held out none, or others.
      rounds_abandoned: Rounds of which nothing was released.
      clients_excluded: Clients without whom a round went on.
      rounds_charged_twice: Rounds that a crash cut off from their checkpoint,
        and that were run and charged again.
    """

    seed_given: bool = False
    philox: bool = False
    cryptographic: bool = False
    exact: bool = False
    validated: bool = False
    rounds_abandoned: int = 0
    clients_excluded: int = 0
    rounds_charged_twice: int = 0
    held_out: str | None = None

    def note_generator(self, generator: str) -> None:
        """Notes what the rounds to come draw their noise from."""
        self.cryptographic |= generator == noise.CRYPTOGRAPHIC
        self.philox |= generator == noise.PHILOX
        self.exact |= generator == noise.EXACT

    def note_held_out(self, clients: str, rounds: int) -> None:
        """Notes whom a call of `fit` holds out, after so many rounds."""
        before = clients if not rounds else self.held_out
        self.held_out = clients if before == clients else ""


class LostRound(NamedTuple):
    """A charged round of which no checkpoint knows.

    Attributes:
      repeated_rounds: The run's, when it was drawn; None: not known.
      fingerprint: What its sum followed from; None: not known.
    """

    repeated_rounds: int | None
    fingerprint: str | None


@dataclasses.dataclass(kw_only=True)
class Run:
    """What a training is between two rounds, from its first `fit` on.

    The randomness of a round follows from the seed and the round, so it needs
    no state. The weights and the server optimizer's variables are the model's
    and the engine's.

    Attributes:
      plan: The present or last call of `fit`.
      sampler: Draws the cohorts.
      deployment: Where the mechanism is used.
      spending: What the rounds have cost.
      population: The clients of the present `fit`.
      run_id: Names the run in ledgers; a resumed one has the same.
      rounds: How many rounds were run, abandoned ones included.
      populations: Those of all that were charged, each where it began.
      num_records: The clients' examples, where those are protected.
      calibration: `rounds` and `max_participations`, for which the clients'
        own noise was calibrated.
      mechanism_state: The state of the mechanism's query before the coming
        round: its clip, and its memory if it has any.
      windows: Float32 [N, W, L], each client's window of norms; None if the
        mechanism keeps none.
      cohort_sizes: How many clients each released round had.
      log_names: The values that a round reports.
      facts: What else the statement tells.
      budget_delta: The delta of the last `PrivacyBudget`.
      audit: The last `CanaryAudit`; no checkpoint keeps it.
      interrupted_releases: Releases that were broken off before their round
        was counted.
      releasing: Whether one may be in the model that the run does not know of.
      known_ledgers: The hash of the last line that this run knows of each
        ledger, by the ledger's path.
      ledgers_ahead: Those which may hold rounds that came after the checkpoint
        from which this run was resumed.
      fingerprint_key: A secret, for `fingerprint.of_round`.
      work: What `fingerprint.of_work` said of the present `fit`; None without
        a seed.
      rounds_drawn_anew: How often a lost round was, or may have been, another
        one than that which is run in its place.
      lost_rounds: By round, those charges of which the checkpoint does not
        know, from which this run was resumed.
    """

    plan: FitPlan
    sampler: sampling.CohortSampler
    deployment: Deployment
    spending: spending_lib.Spending
    population: Population
    run_id: str = dataclasses.field(default_factory=ledger_lib.new_run)
    rounds: int = 0
    populations: list[Population] = dataclasses.field(default_factory=list)
    num_records: int | None = None
    calibration: dict[str, int] | None = None
    mechanism_state: Any = None
    windows: np.ndarray | None = None
    cohort_sizes: list[int] = dataclasses.field(default_factory=list)
    log_names: list[str] = dataclasses.field(default_factory=lambda: ["loss"])
    facts: Facts = dataclasses.field(default_factory=Facts)
    budget_delta: float | None = None
    audit: Any = None
    interrupted_releases: int = 0
    releasing: bool = False
    known_ledgers: dict[str, str] = dataclasses.field(default_factory=dict)
    ledgers_ahead: set[str] = dataclasses.field(default_factory=set)
    fingerprint_key: str = dataclasses.field(
        default_factory=lambda: secrets.token_hex(32)
    )
    work: str | None = None
    rounds_drawn_anew: int = 0
    lost_rounds: dict[int, list[LostRound]] = dataclasses.field(default_factory=dict)

    @property
    def repeated_rounds(self) -> int:
        """How many releases there may be of rounds that are run again.

        With a seed, a round that is run again must not have the noise it had
        before, where later noise hangs on it, or where it may be another one.
        """
        repeated = self.interrupted_releases + self.rounds_drawn_anew
        if self.mechanism_state.memory == ():
            return repeated
        return repeated + self.facts.rounds_charged_twice

    def draw_anew_unless_same(self, round_index: int, fingerprint: str | None) -> None:
        """Has a round drawn anew if a lost one may have been another.

        Args:
          round_index: The round.
          fingerprint: What `fingerprint.of_round` says of it.
        """

        def may_differ(one: LostRound) -> bool:
            same_noise = one.repeated_rounds in (None, self.repeated_rounds)
            same = fingerprint is not None and one.fingerprint == fingerprint
            return same_noise and not same

        if any(map(may_differ, self.lost_rounds.get(round_index, ()))):
            known = [
                one.repeated_rounds or 0
                for lost in self.lost_rounds.values()
                for one in lost
            ]
            # An earlier version did not write it; no more than there are lines.
            last = max(*known, self.spending.rounds, self.repeated_rounds)
            self.rounds_drawn_anew += last + 1 - self.repeated_rounds

    def keep_windows(self, shape: tuple[int, int, int] | None) -> None:
        """Makes empty windows, unless they are there or None is asked for."""
        if shape is not None and self.windows is None:
            self.windows = np.full(shape, np.nan, np.float32)

    def remember_norms(self, positions: np.ndarray, norms: np.ndarray | None) -> None:
        """Moves clients' windows on by one round.

        Args:
          positions: Int64 [K], the clients.
          norms: Float32 [K, L]; NaN for those that did not answer; or None.
        """
        if norms is None or self.windows is None:
            return
        usable = np.isfinite(norms).all(axis=1)
        positions, norms = positions[usable], norms[usable]
        self.windows[positions] = np.concatenate(
            [self.windows[positions, 1:], norms[:, None]], axis=1
        )

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns what a checkpoint keeps: JSON values, and arrays by name."""
        arrays = {
            f"query/{index}": tf.convert_to_tensor(value).numpy()
            for index, value in enumerate(tf.nest.flatten(self.mechanism_state))
        }
        if self.windows is not None:
            arrays["windows"] = self.windows
        spending = self.spending.state()
        for name in _SPENDING_ARRAYS:
            arrays[f"spending/{name}"] = spending.pop(name)
        arrays["cohort_sizes"] = np.asarray(self.cohort_sizes, np.int64)
        return {
            "plan": dataclasses.asdict(self.plan),
            "run": self.run_id,
            "populations": [list(each) for each in self.populations],
            "calibration": self.calibration,
            "sampler": self.sampler.state(),
            "spending": spending,
            "facts": dataclasses.asdict(self.facts),
            "interrupted_releases": self.interrupted_releases,
            "rounds_drawn_anew": self.rounds_drawn_anew,
            "fingerprint_key": self.fingerprint_key,
            "ledgers": dict(self.known_ledgers),
            "log_names": list(self.log_names),
        }, arrays

    @classmethod
    def from_state(
        cls,
        rounds: int,
        metadata: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        prepared: Run,
    ) -> Run:
        """Returns the run that a state was taken of.

        Args:
          rounds: How many rounds it had.
          metadata: The JSON values of `state`.
          arrays: The arrays.
          prepared: A run that is about to begin with the same arguments. Its
            sampler is put where the state was; the mechanism's state has to
            have the structure of its.

        Raises:
          ValueError: The sampler or the mechanism's state is another.
        """
        values: list[tf.Tensor] = []
        while f"query/{len(values)}" in arrays:
            values.append(tf.constant(arrays[f"query/{len(values)}"]))
        if len(values) != len(tf.nest.flatten(prepared.mechanism_state)):
            raise ValueError("mechanism must have the state of the interrupted run.")
        prepared.sampler.restore(metadata["sampler"])
        spending = spending_lib.Spending.from_state(
            {
                **metadata["spending"],
                **{each: arrays[f"spending/{each}"] for each in _SPENDING_ARRAYS},
            }
        )
        populations = [
            (num_clients, digest)
            for num_clients, digest in metadata.get("populations", ())
        ]
        if not populations and spending.rounds:
            # An earlier version kept none; then they were all the same.
            populations = [prepared.population]
        return dataclasses.replace(
            prepared,
            run_id=metadata.get("run") or prepared.run_id,
            rounds=rounds,
            plan=FitPlan(**metadata["plan"]),
            spending=spending,
            populations=populations,
            calibration=metadata.get("calibration") or prepared.calibration,
            mechanism_state=tf.nest.pack_sequence_as(prepared.mechanism_state, values),
            windows=arrays["windows"].copy()
            if "windows" in arrays
            else prepared.windows,
            cohort_sizes=arrays["cohort_sizes"].tolist(),
            log_names=list(metadata["log_names"]),
            # An earlier version knew of no other generator.
            facts=Facts(**{"philox": True, **metadata["facts"]}),
            # With a seed, as many noises of the coming round are used up.
            interrupted_releases=max(
                prepared.interrupted_releases,
                metadata.get("interrupted_releases", 0),
            ),
            rounds_drawn_anew=max(
                prepared.rounds_drawn_anew, metadata.get("rounds_drawn_anew", 0)
            ),
            fingerprint_key=metadata.get("fingerprint_key") or prepared.fingerprint_key,
            # Others may hold rounds that were charged after the checkpoint.
            known_ledgers={**prepared.known_ledgers, **metadata["ledgers"]},
            ledgers_ahead=prepared.ledgers_ahead | set(metadata["ledgers"]),
        )
