"""From the arguments of `fit` to an engine that runs its rounds.

All checks of the clients against the mechanism, the sampling and the rounds
before are made here, before anything of the run changes.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import engine, sampling
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.keras import features, randomness
from tfdp_fl.keras import run as run_lib
from tfdp_fl.keras.compiled import Compiled
from tfdp_fl.keras.fit_plan import FitPlan
from tfdp_fl.keras.training_setup import TrainingSetup
from tfdp_fl.mechanisms import Deployment, grid, noise

# What a run takes from each call of `fit`; the rest it goes on with.
_OF_THIS_FIT = (
    "plan",
    "sampler",
    "population",
    "deployment",
    "num_records",
    "calibration",
    "mechanism_state",
    "releasing",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedEngine:
    """An engine, and what it was made for.

    Attributes:
      engine: The engine.
      key: Equal keys: the same engine serves.
    """

    engine: engine.CohortEngine
    key: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preparation:
    """What a call of `fit` is prepared from; nothing here changes by it.

    Attributes:
      model: The Keras model.
      setup: What the `DPFederatedModel` was made with.
      compiled: What `compile` was given.
      run: The run up to now; None before the first `fit`.
      clients: The clients.
      plan: The call of `fit`.
      moments: Whether V_c and U_s are asked for.
      attempts: Numbers the draws of the model's rounds.
    """

    model: tf.keras.Model
    setup: TrainingSetup
    compiled: Compiled
    run: run_lib.Run | None
    clients: FederatedDataset
    plan: FitPlan
    moments: bool
    attempts: randomness.Attempts

    def prepare(
        self, before: PreparedEngine | None, calibration: dict[str, int] | None
    ) -> tuple[run_lib.Run, PreparedEngine]:
        """Checks the clients against everything else, and makes the engine.

        Args:
          before: The engine of the call before; it serves again if it can.
          calibration: That of the interrupted run, if one is resumed.

        Returns:
          The run as it will be, and the engine.

        Raises:
          ValueError: An argument does not go with the others.
        """
        setup, clients, plan = self.setup, self.clients, self.plan
        mechanism = setup.mechanism
        population = self._checked_population()
        sampler = self._sampler()
        coming = range(plan.first_round, plan.last_round)
        for round_index in coming:
            noise_multiplier = mechanism.noise_multiplier_at(round_index)
            if setup.noise_generator == noise.EXACT:
                grid.check_noise_multiplier(noise_multiplier)
            sampler.expected_cohort_size(round_index)
        num_records, min_examples = self._records()
        calibrated: dict[str, Any] = self._calibrated_for(sampler, calibration)
        deployment = Deployment(
            clients_per_round=setup.clients_per_round,
            num_clients=clients.num_clients,
            sampling=setup.sampling,
            min_examples=min_examples,
            client_weighting=setup.client_weighting,
            noise_generator=setup.noise_generator,
            **calibrated,
        )
        mechanism.check(deployment)
        prepared = self._engine(deployment, before)
        prepared.engine.check_labels(clients)
        run = run_lib.Run(
            plan=plan,
            sampler=sampler,
            population=population,
            deployment=dataclasses.replace(
                deployment, num_variables=prepared.engine.num_variables
            ),
            spending=spending_lib.Spending(mechanism.guarantee, clients.num_clients),
            num_records=num_records,
            calibration=calibrated,
            mechanism_state=self._mechanism_state(prepared.engine, sampler, population),
            attempts=self.attempts,
        )
        if self.run is not None:
            same_number = self.run.spending.clients.num_clients == clients.num_clients
            run = dataclasses.replace(
                self.run,
                **{name: getattr(run, name) for name in _OF_THIS_FIT},
                windows=self.run.windows if same_number else None,
            )
        if prepared.engine.query.keeps_window:
            run.keep_windows(
                (
                    clients.num_clients,
                    mechanism.window,
                    prepared.engine.num_variables,
                )
            )
        return run, prepared

    def _checked_population(self) -> run_lib.Population:
        """Refuses other clients where spending hangs on who they are."""
        run, clients = self.run, self.clients
        population = (clients.num_clients, clients.clients_digest)
        if run is None or run.populations[-1:] in ([], [population]):
            return population
        if run.spending.by_client:
            why = "what was spent is kept for each client"
        elif not run.sampler.begins_pass(run.rounds):
            why = (
                f"round {run.rounds + 1} goes on with a pass over the "
                "clients, in which each takes part once"
            )
        else:
            return population
        before = run.populations[-1][0]
        got = (
            "other ids, another order or (of clients without names) other data"
            if before == clients.num_clients
            else f"{clients.num_clients}"
        )
        raise ValueError(
            f"clients must be the same {before} clients in the same "
            f"order as in the rounds before, because {why}, got {got}."
        )

    def _sampler(self) -> sampling.CohortSampler:
        num_clients = self.clients.num_clients
        if self.run is not None:
            before = self.run.sampler
            if (before.num_clients, before.seed) == (
                num_clients,
                self.plan.seed,
            ):
                return before
        return sampling.make_sampler(
            self.setup.sampling,
            num_clients,
            self.setup.clients_per_round,
            self.plan.seed,
            self.setup.mechanism.min_separation,
        )

    def _mechanism_state(
        self,
        cohort_engine: engine.CohortEngine,
        sampler: sampling.CohortSampler,
        population: run_lib.Population,
    ) -> Any:
        """Returns the state to begin with.

        Its memory goes on only if the coming rounds keep to what it counts
        on: the same clients in the same groups, and no release since that it
        does not know of.
        """
        run = self.run
        goes_on = (
            run is not None
            and sampler is run.sampler
            and population == run.population
            and not run.releasing
        )
        if goes_on:
            return cohort_engine.state
        return cohort_engine.query.new_segment(cohort_engine.state)

    def _records(self) -> tuple[int | None, int | None]:
        """Returns how many records there are, and the fewest of a client.

        None and None where records are not what is protected. Clients that
        cannot be read count as none: they fail in their rounds as well, and
        one of them is not to end the run.
        """
        mechanism = self.setup.mechanism
        if mechanism.guarantee != spending_lib.RECORD:
            return None, None
        sizes = _sizes(self.clients)
        if not len(sizes):
            raise ValueError(
                f"clients must know their sizes for {mechanism.name}, got "
                f"{self.clients.num_clients} that cannot be read."
            )
        held = sizes[sizes > 0]
        return int(sizes.sum()), int(held.min()) if len(held) else None

    @property
    def _noise_depends_on_rounds(self) -> bool:
        return self.setup.mechanism.guarantee not in (
            spending_lib.CENTRAL,
            spending_lib.NONE,
        )

    def _calibrated_for(
        self, sampler: sampling.CohortSampler, resumed: dict[str, int] | None
    ) -> dict[str, int]:
        """Returns for how many rounds clients set their noise.

        `rounds` and `max_participations` of a `Deployment`: those of the
        target, or else of the first `fit`. They stay, once a round was
        charged: a later `fit` has no fresh budget to calibrate to. A resumed
        one goes on with what the interrupted one had.
        """
        run, plan, setup = self.run, self.plan, self.setup
        if self._noise_depends_on_rounds:
            if resumed is not None:
                return resumed
            if run is not None and run.calibration and run.populations:
                self._warn_of_more_rounds(run.calibration["rounds"])
                return run.calibration
        rounds = plan.last_round - plan.first_round
        if self._noise_depends_on_rounds and setup.target is not None:
            rounds = setup.target.rounds
        participations = sampler.max_participations(rounds, plan.first_round)
        limit = setup.mechanism.max_participations
        if limit is not None:
            participations = min(participations, limit)
        return {"rounds": rounds, "max_participations": participations}

    def _warn_of_more_rounds(self, calibrated: int) -> None:
        """Warns when a run first goes beyond what its noise was set for."""
        mechanism, plan = self.setup.mechanism, self.plan
        if (
            self.setup.target is None
            and mechanism.epsilon is not None
            and plan.last_round > calibrated >= plan.first_round
        ):
            warnings.warn(
                f"rounds={plan.last_round - plan.first_round} goes beyond the "
                f"{calibrated} rounds for which {mechanism.name} set its noise "
                f"to keep epsilon={mechanism.epsilon:g}. The noise stays as it "
                "was, and epsilon will be larger.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _engine(
        self, deployment: Deployment, before: PreparedEngine | None
    ) -> PreparedEngine:
        setup, compiled, bound_to = self.setup, self.compiled, deployment
        if not self._noise_depends_on_rounds:
            bound_to = dataclasses.replace(
                deployment, rounds=None, max_participations=None
            )
        element_spec = self.clients.element_spec
        class_weight = compiled.training.class_weight
        key = repr((bound_to, element_spec, self.moments, class_weight))
        if before is not None and before.key == key:
            return before
        whose = features.whose(self.clients)
        features.check(self.model, element_spec[0], "clients", whose)
        with features.naming(whose):
            made = engine.CohortEngine(
                model=self.model,
                training=compiled.training,
                mechanism=setup.mechanism,
                deployment=deployment,
                element_spec=element_spec,
                server_optimizer=compiled.server_optimizer,
                broadcast_hook=compiled.broadcast_hook,
                aggregate_non_trainable=(setup.non_trainable_state == "aggregate"),
                moments=self.moments,
                collect_records=setup.secure_aggregation is not None,
                num_replicas=setup.num_replicas,
                jit_compile=compiled.jit_compile,
                batch_size=self.plan.batch_size,
            )
        if self.run is not None:
            made.state = self.run.mechanism_state
        return PreparedEngine(engine=made, key=key)


def _sizes(clients: FederatedDataset) -> np.ndarray:
    """Returns the numbers of examples of all clients that can be read."""
    if clients.is_indexed:
        return clients.client_sizes()
    read = clients.read_clients(np.arange(clients.num_clients))
    return np.array(
        [
            nests.common_length(each.x, each.y)
            for each in read
            if not isinstance(each, ClientFailure)
        ],
        np.int64,
    )
