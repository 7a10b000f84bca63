"""Turns the arguments of `fit` into an engine that runs its rounds.

Here, the clients are checked against the mechanism, the sampling and the earlier rounds
before the run changes.
"""

from __future__ import annotations

import dataclasses
import secrets
import warnings
from collections.abc import Sequence
from typing import cast

import numpy as np
import tensorflow as tf

from tfdp_fl import engine, keras_versions, sampling, schedules
from tfdp_fl.accounting import account as account_lib
from tfdp_fl.accounting import format_up, ledger
from tfdp_fl.accounting.charge import require_constant_noise
from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.engine import labels, secure_sum
from tfdp_fl.keras import example_spec
from tfdp_fl.keras.federated_training import FederatedTraining
from tfdp_fl.keras.run import FitPlan, Population, Run
from tfdp_fl.mechanisms import Mechanism, PrivacyContext, grid, noise
from tfdp_fl.terms import Json, PrivacyUnit, Sampling, TrustModel


def prepare(
    fed: FederatedTraining,
    clients: FederatedDataset,
    plan: FitPlan,
    calibration: Sequence[int] | None = None,
    between_client_variance: bool = False,
) -> tuple[Run, engine.CohortEngine]:
    """Checks the clients and the plan; returns the run and its engine.

    The model does not change.

    Args:
      fed: The model.
      clients: The clients of this `fit`.
      plan: The rounds of this `fit`.
      calibration: For a resumed run, the result of `_choose_calibration`.
      between_client_variance: Whether to compute Geyer's V_c and U_s.
    """
    setup, mechanism, run = fed.setup, fed.mechanism, fed.run
    population = _check_population(fed, clients)
    num_records, min_examples = _count_records(mechanism, clients)
    sampler = _make_sampler(fed, population, plan)
    sizes = sampling.expected_sizes(
        setup.sampling, clients.num_clients, setup.clients_per_round
    )
    _check_rounds(fed, plan, sampler)
    rounds, participations = _choose_calibration(fed, plan, sampler, calibration)
    context = PrivacyContext(
        clients_per_round=sizes,
        num_clients=clients.num_clients,
        sampling=setup.sampling,
        min_examples=min_examples,
        client_weighting=setup.client_weighting,
        noise_generator=setup.noise_generator,
        rounds=rounds,
        max_participations=participations,
    )
    mechanism.check(context)
    if mechanism.trust_model != TrustModel.LOCAL:
        # Schedules continue over all calls of `fit`.
        mechanism.check(dataclasses.replace(context, rounds=plan.last_round))
    cohort_engine = _make_engine(fed, clients, plan, context, between_client_variance)
    labels.warn_of_missing(clients)
    query = cohort_engine.query
    if setup.secure_aggregation and mechanism.trust_model == TrustModel.CENTRAL:
        # (It is checked again in every round, as the clip may change.)
        first = query.begin_round(
            query.initial_global_state() if run is None else run.mechanism_state,
            mechanism.noise_multiplier_at(plan.first_round),
            sampler.expected_cohort_size(plan.first_round),
        )
        num_values = cohort_engine.update_spec.size + query.num_scalars
        secure_sum.check_resolution(setup.secure_aggregation, query, first, num_values)
    if run is None:
        state = query.initial_global_state()
    else:
        state = query.restart_noise(run.mechanism_state)
        # Correlated noise continues only with the same clients in the same groups, if
        # its noise state covers every release, and with variables of the same shapes (a
        # layer may have been frozen).
        is_same = sampler is run.sampler and population == run.population
        fits = _shapes(state.noise_state) == _shapes(run.mechanism_state.noise_state)
        if is_same and fits and not run.releasing:
            state = run.mechanism_state
    shape = clients.num_clients, mechanism.window, cohort_engine.num_variables
    windows = None if run is None else run.windows
    if (
        run is None
        or population != run.population
        or clients.source_identity != run.source_identity
        or windows is None
        or windows.shape != shape
    ):
        # Windows are by position, and would belong to other clients.
        windows = np.full(shape, np.nan, np.float32) if query.keeps_window else None
    fit_state: Json = {
        "plan": plan,
        "sampler": sampler,
        "population": population,
        "source_identity": clients.source_identity,
        "context": dataclasses.replace(
            context, num_variables=cohort_engine.num_variables
        ),
        "num_records": num_records,
        "mechanism_state": state,
        "releasing": False,
        "windows": windows,
    }
    if run is None:
        account = account_lib.PrivacyAccount(mechanism.trust_model, clients.num_clients)
        run = Run(setup=setup, account=account, **fit_state)
    else:
        if state is not run.mechanism_state:
            fit_state["segment"] = ledger.new_id()
        if not run.account.by_client and (
            mechanism.overrides("noise_stddevs") or sampler is not run.sampler
        ):  # The old plan's rounds have other costs.
            fit_state |= {
                "unrun": run.costs_not_run(),
                "num_unrun": run.num_unrun + max(0, run.planned_rounds - run.rounds),
                "planned_rounds": 0,
            }
        run = dataclasses.replace(run, **fit_state)
    return run, cohort_engine


def _shapes(noise_state: nests.Nest) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tf.nest.flatten(noise_state)]


def require_names(fed: FederatedTraining, clients: FederatedDataset) -> None:
    """Refuses checkpoints of a run that another process could not continue.

    It could not tell whether streamed clients without names have another order. Where
    order matters, a client could take part twice in a pass, or spend twice.
    """
    is_local = fed.mechanism.trust_model == TrustModel.LOCAL
    if is_local:
        reason = f"{fed.mechanism.name} counts what each of them spends"
    elif fed.setup.sampling in (Sampling.SHUFFLED, Sampling.CYCLIC):
        reason = f"{fed.setup.sampling} sampling relies on who took part before"
    else:
        return
    if clients.source_identity is not None:
        raise ValueError(
            "clients must have names with RoundCheckpoint or resume_from, because "
            f"{reason}, got {clients.num_clients} streamed clients without names, "
            "whose order may change: give a mapping, or names to from_client_fn."
        )


def _check_population(fed: FederatedTraining, clients: FederatedDataset) -> Population:
    """Refuses far fewer clients than planned, and forbidden changes of the clients."""
    run, target, size = fed.run, fed.setup.target, clients.num_clients
    if target is not None and 2 * size < target.num_clients:
        raise ValueError(
            f"clients must be about the num_clients={target.num_clients} that "
            f"make_private was given, got {size}: with so few, each round draws a "
            "larger fraction and costs more than planned, and the target would be "
            f"spent after a few rounds. Call make_private with num_clients={size}."
        )
    population = (size, clients.clients_digest)
    unsettled = None if run is None else run.sampler.unsettled
    if run is not None and clients.source_identity is not None:
        if clients.source_identity == run.source_identity:
            population = run.population
        elif (
            unsettled is not None
            or run.account.by_client
            or fed.setup.sampling
            in (Sampling.SHUFFLED, Sampling.CYCLIC, Sampling.RANDOM_ALLOCATION)
        ):
            # The clients' earlier positions are unknown, so no two populations match.
            population = (size, secrets.token_hex())
    if run is None:
        return population
    earlier = run.populations[-1:] if unsettled is None else [run.population]
    if earlier in ([], [population]):
        return population
    if run.account.by_client:
        reason = "spending is tracked for each client"
    elif not run.sampler.begins_pass(run.rounds):
        reason = (
            f"round {run.rounds + 1} continues a pass over the clients, in which each "
            "takes part once"
        )
    elif unsettled is not None:
        reason = (
            f"round {run.rounds + 1} was interrupted, and its fixed-size cohort "
            "reveals who was in the others, so it must be released first"
        )
    else:
        return population
    previous, got = earlier[0][0], str(size)
    if previous == size:
        got = (
            "other ids, another order, other data (of clients without names), or a "
            "list that was read again (use a mapping, whose clients have names)"
        )
    raise ValueError(
        f"clients must be the same {previous} clients in the same order as in the "
        f"earlier rounds, because {reason}, got {got}."
    )


def _make_sampler(
    fed: FederatedTraining, population: Population, plan: FitPlan
) -> sampling.CohortSampler:
    """Returns the run's sampler; a new one, with passes of its own, for new clients."""
    num_clients, _ = population
    if fed.run is not None and fed.run.population == population:
        previous = fed.run.sampler
        if (previous.num_clients, previous.seed) == (num_clients, plan.seed):
            return previous
    sampler = sampling.make_sampler(
        fed.setup.sampling,
        num_clients,
        fed.setup.clients_per_round,
        plan.seed,
        fed.mechanism.min_separation,
        may_abandon=fed.setup.failures_spread,
    )
    sampler.next_round = plan.first_round
    if fed.run is not None and (unsettled := fed.run.sampler.unsettled) is not None:
        # The same clients (`_check_population`) have another seed. Another cohort would
        # reveal who was in the interrupted one.
        sampler.unsettled = dataclasses.replace(
            unsettled, round_index=sampler.next_round
        )
    return sampler


def _check_rounds(
    fed: FederatedTraining, plan: FitPlan, sampler: sampling.CohortSampler
) -> None:
    """Raises ValueError if a planned round has impossible noise or cohort sizes."""
    setup, mechanism = fed.setup, fed.mechanism
    rounds = range(plan.first_round, plan.last_round)
    is_constant = schedules.is_constant(mechanism.noise_multiplier) and (
        schedules.is_constant(setup.clients_per_round)
    )
    if is_constant and not (
        setup.secure_aggregation or setup.noise_generator == noise.EXACT
    ):
        rounds = rounds[:1]
    for round_index in rounds:
        noise_multiplier = mechanism.noise_multiplier_at(round_index)
        if setup.noise_generator == noise.EXACT:
            grid.check_noise_multiplier(noise_multiplier)
        size = sampler.expected_cohort_size(round_index)
        if isinstance(sampler, sampling.RandomAllocationSampler):
            pass_start = cast(int, sampler.participation(round_index).pass_index)
            z_of_pass = mechanism.noise_multiplier_at(pass_start)
            require_constant_noise(round_index, noise_multiplier, pass_start, z_of_pass)
        if (
            setup.secure_aggregation is not None
            and mechanism.trust_model == TrustModel.CENTRAL
        ):
            secure_sum.check_cohort_sizes(
                *(setup.secure_aggregation, setup.sampling, sampler.num_clients, size),
                max_participations=mechanism.max_participations,
            )


def _count_records(
    mechanism: Mechanism, clients: FederatedDataset
) -> tuple[int | None, int | None]:
    """Returns the total number of records and the smallest number of any client.

    Both are None if records are not the unit of protection. Clients that cannot be read
    are left out: they will fail in their rounds, too, and must not end the run.
    """
    if mechanism.privacy_unit != PrivacyUnit.RECORD:
        return None, None
    if clients.is_indexed:
        sizes = clients.client_sizes().tolist()
        if clients.has_repeated_rows:
            raise ValueError(
                f"clients must hold each row once with {mechanism.name}, which "
                "protects a row as one record of one client, got repeated rows."
            )
    else:
        sizes = [
            nests.common_length(client.x, client.y)
            for client in clients.read_clients(np.arange(clients.num_clients))
            if not isinstance(client, ClientFailure)
        ]
    if not sizes:
        raise ValueError(
            f"clients must have known sizes for {mechanism.name}, got "
            f"{clients.num_clients} that cannot be read."
        )
    return sum(sizes), min(filter(None, sizes), default=None)


def _choose_calibration(
    fed: FederatedTraining,
    plan: FitPlan,
    sampler: sampling.CohortSampler,
    resumed: Sequence[int] | None,
) -> Sequence[int | None]:
    """Returns the rounds for which clients calibrate their noise.

    These are `rounds` and `max_participations` of a `PrivacyContext`: those of the
    target, or else of the first `fit`. Once a round is charged, they never change, as a
    later `fit` has no new budget to calibrate for. A resumed run keeps those of the
    interrupted one.
    """
    run, mechanism, target = fed.run, fed.mechanism, fed.setup.target
    rounds = plan.last_round - plan.first_round
    if mechanism.trust_model == TrustModel.LOCAL:
        if resumed is not None:
            return resumed
        if run is not None and run.populations:
            calibrated = run.context.rounds or 0
            is_first_beyond = plan.last_round > calibrated >= plan.first_round
            if target is None and mechanism.epsilon is not None and is_first_beyond:
                warnings.warn(
                    f"rounds={rounds} goes beyond the {calibrated} rounds for which "
                    f"{mechanism.name} calibrated its noise to "
                    f"epsilon={format_up(mechanism.epsilon)}. The noise does not "
                    "change, so epsilon will be larger.",
                    RuntimeWarning,
                    stacklevel=5,
                )
            return calibrated, run.context.max_participations
        if target is not None:
            rounds = target.rounds
    participations = sampler.max_participations(rounds, plan.first_round)
    limit = mechanism.max_participations
    return rounds, participations if limit is None else min(participations, limit)


def _make_engine(
    fed: FederatedTraining,
    clients: FederatedDataset,
    plan: FitPlan,
    context: PrivacyContext,
    between_client_variance: bool,
) -> engine.CohortEngine:
    setup, training = fed.setup, fed.require_compiled("fit")
    key_context = context
    # (The noise of a user's own mechanism may depend on the planned rounds.)
    mechanism = fed.mechanism
    if not (
        mechanism.trust_model == TrustModel.LOCAL
        or mechanism.overrides("noise_stddevs")
    ):
        key_context = dataclasses.replace(context, rounds=None, max_participations=None)
    # (Layers may have been added, and `quantize` or `enable_lora` replace variables.)
    variables = keras_versions.tf_variables(fed.model.weights)
    cache_key = (
        *(training, key_context, clients.element_spec, between_client_variance),
        tuple(variable.ref() for variable in variables),
    )
    if fed.engine is not None and fed.engine.cache_key == cache_key:
        return fed.engine
    with example_spec.locate_features_errors(fed.model, clients):
        cohort_engine = engine.CohortEngine(
            model=fed.model,
            training=training,
            mechanism=fed.mechanism,
            context=context,
            element_spec=clients.element_spec,
            aggregate_non_trainable=setup.non_trainable_state == "aggregate",
            between_client_variance=between_client_variance,
            collect_contributions=setup.secure_aggregation is not None,
            max_parallel_clients=setup.max_parallel_clients,
            batch_size=plan.batch_size,
        )
    cohort_engine.cache_key = cache_key
    return cohort_engine
