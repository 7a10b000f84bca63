"""From the arguments of `fit` to an engine that runs its rounds.

All checks of the clients against the mechanism, the sampling and the rounds
before are made here, before anything of the run changes.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdp_fl import engine, sampling
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.keras import randomness, validation
from tfdp_fl.keras.run import FitPlan, Population, Run
from tfdp_fl.mechanisms import Deployment, grid, noise

if TYPE_CHECKING:
    from tfdp_fl.keras.model import DPFederatedModel


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
    """What a call of `fit` is prepared from; nothing of the model changes by it.

    Attributes:
      fed: The model.
      clients: The clients.
      plan: The call of `fit`.
      class_weight: What each class counts in the loss, or None.
      moments: Whether V_c and U_s are asked for.
    """

    fed: DPFederatedModel
    clients: FederatedDataset
    plan: FitPlan
    class_weight: Mapping[int, float] | None
    moments: bool

    def prepare(
        self,
        attempts: randomness.Attempts,
        before: PreparedEngine | None,
        calibration: dict[str, int] | None,
    ) -> tuple[Run, PreparedEngine]:
        """Checks the clients against everything else, and makes the engine.

        Args:
          attempts: Numbers the draws of the model's rounds.
          before: The engine of the call before; it serves again if it can.
          calibration: That of the interrupted run, if one is resumed.

        Returns:
          The run as it will be, and the engine.

        Raises:
          ValueError: An argument does not go with the others.
        """
        setup, mechanism, clients = self.fed.setup, self.fed.mechanism, self.clients
        population = self._checked_population()
        sampler = self._sampler()
        for round_index in range(self.plan.first_round, self.plan.last_round):
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
        cohort_engine, run = prepared.engine, self.fed.run
        cohort_engine.check_labels(clients)
        of_this_fit: dict[str, Any] = {
            "plan": self.plan,
            "sampler": sampler,
            "population": population,
            "deployment": dataclasses.replace(
                deployment, num_variables=cohort_engine.num_variables
            ),
            "num_records": num_records,
            "calibration": calibrated,
            "mechanism_state": self._state(cohort_engine, sampler, population),
            "releasing": False,
        }
        if run is None:
            spending = spending_lib.Spending(mechanism.guarantee, clients.num_clients)
            run = Run(spending=spending, attempts=attempts, **of_this_fit)
        else:
            same_number = run.spending.clients.num_clients == clients.num_clients
            windows = run.windows if same_number else None
            run = dataclasses.replace(run, windows=windows, **of_this_fit)
        if cohort_engine.query.keeps_window and run.windows is None:
            shape = clients.num_clients, mechanism.window, cohort_engine.num_variables
            run.windows = np.full(shape, np.nan, np.float32)
        return run, prepared

    def _checked_population(self) -> Population:
        """Refuses other clients where spending depends on who they are."""
        run, clients = self.fed.run, self.clients
        population = (clients.num_clients, clients.clients_digest)
        if run is None or run.populations[-1:] in ([], [population]):
            return population
        if run.spending.by_client:
            why = "what was spent is kept for each client"
        elif not run.sampler.begins_pass(run.rounds):
            why = (
                f"round {run.rounds + 1} goes on with a pass over the clients, in "
                "which each takes part once"
            )
        else:
            return population
        before, got = run.populations[-1][0], str(clients.num_clients)
        if before == clients.num_clients:
            got = "other ids, another order or (of clients without names) other data"
        raise ValueError(
            f"clients must be the same {before} clients in the same order as in the "
            f"rounds before, because {why}, got {got}."
        )

    def _sampler(self) -> sampling.CohortSampler:
        num_clients, seed = self.clients.num_clients, self.plan.seed
        run = self.fed.run
        if run is not None:
            before = run.sampler
            if (before.num_clients, before.seed) == (num_clients, seed):
                return before
        return sampling.make_sampler(
            self.fed.setup.sampling,
            num_clients,
            self.fed.setup.clients_per_round,
            seed,
            self.fed.mechanism.min_separation,
        )

    def _state(
        self,
        cohort_engine: engine.CohortEngine,
        sampler: sampling.CohortSampler,
        population: Population,
    ) -> Any:
        """Returns the mechanism's state to begin with.

        Its memory goes on only if the coming rounds keep to what it counts
        on: the same clients in the same groups, and no release since that it
        does not know of.
        """
        run = self.fed.run
        if (
            run is not None
            and sampler is run.sampler
            and population == run.population
            and not run.releasing
        ):
            return cohort_engine.state
        return cohort_engine.query.new_segment(cohort_engine.state)

    def _records(self) -> tuple[int | None, int | None]:
        """Returns how many records there are, and the fewest of a client.

        None and None where records are not what is protected. Clients that
        cannot be read count as none: they fail in their rounds as well, and
        one of them is not to end the run.
        """
        clients = self.clients
        if self.fed.mechanism.guarantee != spending_lib.RECORD:
            return None, None
        if clients.is_indexed:
            sizes = clients.client_sizes()
        else:
            read = clients.read_clients(np.arange(clients.num_clients))
            sizes = np.array(
                [
                    nests.common_length(client.x, client.y)
                    for client in read
                    if not isinstance(client, ClientFailure)
                ],
                np.int64,
            )
        if not len(sizes):
            raise ValueError(
                f"clients must know their sizes for {self.fed.mechanism.name}, got "
                f"{clients.num_clients} that cannot be read."
            )
        held = sizes[sizes > 0]
        return int(sizes.sum()), int(held.min()) if len(held) else None

    @property
    def _noise_depends_on_rounds(self) -> bool:
        central = (spending_lib.CENTRAL, spending_lib.NONE)
        return self.fed.mechanism.guarantee not in central

    def _calibrated_for(
        self, sampler: sampling.CohortSampler, resumed: dict[str, int] | None
    ) -> dict[str, int]:
        """Returns for how many rounds clients set their noise.

        `rounds` and `max_participations` of a `Deployment`: those of the
        target, or else of the first `fit`. They stay, once a round was
        charged: a later `fit` has no fresh budget to calibrate to. A resumed
        one goes on with what the interrupted one had.
        """
        run, plan, target = self.fed.run, self.plan, self.fed.setup.target
        rounds = plan.last_round - plan.first_round
        if self._noise_depends_on_rounds:
            if resumed is not None:
                return resumed
            if run is not None and run.calibration and run.populations:
                self._warn_of_more_rounds(run.calibration["rounds"])
                return run.calibration
            if target is not None:
                rounds = target.rounds
        participations = sampler.max_participations(rounds, plan.first_round)
        limit = self.fed.mechanism.max_participations
        if limit is not None:
            participations = min(participations, limit)
        return {"rounds": rounds, "max_participations": participations}

    def _warn_of_more_rounds(self, calibrated: int) -> None:
        """Warns when a run first goes beyond what its noise was set for."""
        mechanism, plan = self.fed.mechanism, self.plan
        if (
            self.fed.setup.target is None
            and mechanism.epsilon is not None
            and plan.last_round > calibrated >= plan.first_round
        ):
            warnings.warn(
                f"rounds={plan.last_round - plan.first_round} goes beyond the "
                f"{calibrated} rounds for which {mechanism.name} set its noise to keep "
                f"epsilon={mechanism.epsilon:g}. The noise stays as it was, and "
                "epsilon will be larger.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _engine(
        self, deployment: Deployment, before: PreparedEngine | None
    ) -> PreparedEngine:
        setup, clients, model = self.fed.setup, self.clients, self.fed.model
        compiled = self.fed.require_compiled("fit")
        bound_to = deployment
        if not self._noise_depends_on_rounds:
            bound_to = dataclasses.replace(
                deployment, rounds=None, max_participations=None
            )
        class_weight = engine.checked_class_weight(self.class_weight)
        key = repr((bound_to, clients.element_spec, self.moments, class_weight))
        if before is not None and before.key == key:
            return before
        with validation.checked_features(model, clients):
            made = engine.CohortEngine(
                model=model,
                training=dataclasses.replace(
                    compiled.training, class_weight=class_weight
                ),
                mechanism=self.fed.mechanism,
                deployment=deployment,
                element_spec=clients.element_spec,
                server_optimizer=compiled.server_optimizer,
                broadcast_hook=compiled.broadcast_hook,
                aggregate_non_trainable=(setup.non_trainable_state == "aggregate"),
                moments=self.moments,
                collect_records=setup.secure_aggregation is not None,
                num_replicas=setup.num_replicas,
                jit_compile=compiled.jit_compile,
                batch_size=self.plan.batch_size,
            )
        if self.fed.run is not None:
            made.state = self.fed.run.mechanism_state
        return PreparedEngine(engine=made, key=key)
