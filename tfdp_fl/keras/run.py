"""A training run: everything that later rounds depend on, but the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import sampling
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.keras import randomness
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
      exact: Whether noise was drawn exactly, on a grid.
      validated: Whether any was given validation data.
      metrics_shown: Whether clients' metrics were shown without noise.
      held_out: The digest of the clients that each `fit` so far held out for
        validation; empty if one held out none, or others.
      rounds_abandoned: Rounds of which nothing was released.
      clients_excluded: Clients without whom a round went on.
      rounds_charged_twice: Rounds that a crash cut off from their checkpoint,
        and that were run and charged again.
    """

    seed_given: bool = False
    philox: bool = False
    exact: bool = False
    validated: bool = False
    metrics_shown: bool = False
    rounds_abandoned: int = 0
    clients_excluded: int = 0
    rounds_charged_twice: int = 0
    held_out: str | None = None

    def note_generator(self, generator: str) -> None:
        """Notes what the rounds to come draw their noise from."""
        self.philox |= generator == noise.PHILOX
        self.exact |= generator == noise.EXACT

    def note_held_out(self, clients: str, rounds: int) -> None:
        """Notes whom a call of `fit` holds out, after so many rounds."""
        before = clients if not rounds else self.held_out
        self.held_out = clients if before == clients else ""


@dataclasses.dataclass(kw_only=True)
class Run:
    """What a training is between two rounds, from its first `fit` on.

    The randomness of a round follows from the seed and `attempts`. The weights
    and the server optimizer's variables are the model's and the engine's.

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
      releasing: Whether one may be in the model that the run does not know of.
      known_ledgers: The hash of the last line that this run knows of each
        ledger, by the ledger's path.
      ledgers_ahead: Those which may hold rounds that came after the checkpoint
        from which this run was resumed.
      attempts: Numbers the draws of all rounds; no checkpoint keeps it.
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
    releasing: bool = False
    known_ledgers: dict[str, str] = dataclasses.field(default_factory=dict)
    ledgers_ahead: set[str] = dataclasses.field(default_factory=set)
    attempts: randomness.Attempts = dataclasses.field(
        default_factory=randomness.Attempts
    )

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
            # Others may hold rounds that were charged after the checkpoint.
            known_ledgers={**prepared.known_ledgers, **metadata["ledgers"]},
            ledgers_ahead=prepared.ledgers_ahead | set(metadata["ledgers"]),
        )
