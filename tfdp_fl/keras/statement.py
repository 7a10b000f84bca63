"""Collects what a privacy statement has to say about a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp_fl import accounting, engine, mechanisms
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.keras import run as run_lib
from tfdp_fl.keras.training_setup import TrainingSetup

# PLD takes about a second for each kind of round, and a schedule has many.
_MOST_KINDS_FOR_PLD = 5


def facts(
    setup: TrainingSetup, run: run_lib.Run, cohort_engine: engine.CohortEngine
) -> accounting.StatementFacts:
    """Returns what ran.

    Args:
      setup: What the `DPFederatedModel` was made with.
      run: The run; `fit` was called.
      cohort_engine: What ran it.
    """
    spending, mechanism = run.spending, setup.mechanism
    sizes = [
        charge.clients_per_round
        for charge, count in spending.charges
        for _ in range(count)
    ] or run.sampler.expected_cohort_size(0)
    composed: dict[str, Any] = {
        "epsilon_rdp": _epsilon(spending, "rdp"),
        "epsilon_pld": _epsilon(spending, "pld"),
        "epsilon_if_participation_is_known": (
            spending.central.epsilon_if_participation_is_known
        ),
    }
    if spending.by_client:
        composed = {
            "epsilon_local": spending.epsilon,
            "max_participations": spending.clients.max_participations,
        }
    if spending.guarantee == spending_lib.LOCAL:
        composed["central_epsilon"] = spending.central.epsilon
    if spending.guarantee == spending_lib.RECORD:
        composed["implied_epsilon"] = mechanism.epsilon
    return accounting.StatementFacts(
        **composed,
        guarantee=spending.guarantee,
        mechanism=mechanism.name,
        mechanism_description=_description(setup),
        mechanism_parameters=_parameters(setup, run.rounds),
        unit=unit(mechanism),
        sampling=setup.sampling,
        num_clients=spending.clients.num_clients,
        populations=[
            size for size, _ in dict.fromkeys(run.populations or [run.population])
        ],
        num_records=run.num_records,
        clients_per_round=sizes,
        cohort_sizes=run.cohort_sizes,
        rounds=spending.rounds,
        rounds_of_others=spending.rounds_of_others,
        pld_is_exact=spending.central.is_one_gaussian,
        implied_delta=mechanism.implied_delta,
        caveats=_caveats(setup, run, cohort_engine),
        audit=None if run.audit is None else run.audit.sentence,
    )


def unit(mechanism: mechanisms.Mechanism) -> str:
    """Returns what the mechanism protects as a whole."""
    return "record" if mechanism.guarantee == spending_lib.RECORD else "client"


def _description(setup: TrainingSetup) -> str:
    """Returns what is released, and what clients count in it."""
    sentence = setup.mechanism.describe()
    weighting = setup.client_weighting
    if weighting is None:
        return sentence
    divisor = (
        "the sum of the weights"
        if setup.mechanism.guarantee == spending_lib.NONE
        else f"m times {weighting.mean_weight:g}, which was given beforehand"
    )
    return f"{sentence} {weighting.describe()} The sum is divided by {divisor}."


def _parameters(setup: TrainingSetup, rounds: int) -> dict[str, Any]:
    """Returns the mechanism's parameters; of a schedule, its range."""
    mechanism = setup.mechanism
    charged = range(max(1, rounds))
    parameters = {}
    for name, value in mechanism.parameters().items():
        if value is None:
            continue
        if name == "noise_multiplier" and (callable(value) or isinstance(value, tuple)):
            values = [mechanism.noise_multiplier_at(t) for t in charged]
            value = f"{min(values):g} to {max(values):g} (scheduled)"
        elif not isinstance(value, (bool, int, float, str)):
            value = type(value).__name__ if name == "query" else repr(value)
        parameters[name] = value
    if setup.client_weighting is not None:
        parameters["client_weighting"] = repr(setup.client_weighting)
    return parameters


def _epsilon(
    spending: spending_lib.Spending, accountant: str
) -> Callable[[float], float | None]:
    def epsilon(delta: float) -> float | None:
        kinds = {
            (charge.sampling_probability, charge.event)
            for charge, _ in spending.central.charges
            if charge.is_amplified
        }
        if accountant == "pld" and len(kinds) > _MOST_KINDS_FOR_PLD:
            return None
        try:
            return spending.central.epsilon(delta, accountant)
        except (NotImplementedError, ValueError):
            if accountant == "pld":  # Not for every event; RDP is stated.
                return None
            raise

    return epsilon


def _caveats(
    setup: TrainingSetup, run: run_lib.Run, cohort_engine: engine.CohortEngine
) -> tuple[str, ...]:
    mechanism, spending, seen = setup.mechanism, run.spending, run.facts
    caveats = dict.fromkeys(mechanism.caveats())
    private = spending.guarantee != spending_lib.NONE
    at_clients = mechanism.noise_site == "client"
    local = spending.guarantee in (spending_lib.LOCAL, spending_lib.RECORD)
    securely = setup.secure_aggregation is not None
    other_runs = len(spending.others) > spending.evaluations
    holds = {
        "unnoised_metrics": private,
        "client_noise_needs_honest_clients": at_clients,
        "secure_aggregation": securely,
        "secure_aggregation_group_noise": securely and at_clients,
        "secure_aggregation_unnoised_groups": securely
        and not at_clients
        and not local
        and private,
        "secure_aggregation_norms_seen": securely and cohort_engine.query.two_phase,
        "non_trainable_released": private and cohort_engine.server.has_non_trainable,
        "non_trainable_kept": cohort_engine.keeps_non_trainable,
        "client_weighting_given": private and setup.client_weighting is not None,
        "clients_excluded": seen.clients_excluded > 0,
        "rounds_abandoned": seen.rounds_abandoned > 0 and not local,
        "rounds_abandoned_charged": seen.rounds_abandoned > 0 and local,
        "rounds_charged_twice": seen.rounds_charged_twice > 0,
        "validation_data_not_covered": private and seen.validated,
        "validation_clients_held_out": bool(seen.held_out),
        "client_metrics_shown": private and seen.metrics_shown,
        "hyperparameter_search_not_counted": private and not other_runs,
        "only_runs_in_ledgers_counted": private and other_runs,
        "evaluations_counted": private and spending.evaluations > 0,
        "floating_point_noise": private and seen.philox,
        "exact_noise": private and seen.exact,
        "pseudorandom_noise": private and seen.philox,
        "seed_given": private and seen.seed_given,
    }
    caveats.update(dict.fromkeys(key for key, true in holds.items() if true))
    return tuple(caveats)
