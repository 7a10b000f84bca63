"""Collects the facts for the privacy statement of a training run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from tfdp_fl import accounting, engine
from tfdp_fl.keras import run as run_lib
from tfdp_fl.keras.training_setup import TrainingSetup
from tfdp_fl.terms import Json, NoiseSite, PrivacyUnit, TrustModel


def statement_facts(
    run: run_lib.Run, cohort_engine: engine.CohortEngine
) -> accounting.StatementFacts:
    """Returns the facts about the rounds that ran."""
    account, setup, mechanism = run.account, run.setup, run.setup.mechanism
    sizes = [charge.clients_per_round for charge in account.own.elements()]
    composed: Json = {
        "epsilon_rdp": _epsilon_by(account.central, "rdp"),
        "epsilon_pld": _epsilon_by(account.central, "pld"),
        "epsilon_if_participation_is_known": (
            account.central.epsilon_if_participation_is_known
        ),
    }
    if account.by_client:
        # Lost rounds and other runs are not attributed to single clients.
        is_known = not account.mu_squared_elsewhere
        most = account.per_client.max_participations if is_known else None
        composed = {"epsilon_local": account.epsilon, "max_participations": most}
        if mechanism.privacy_unit == PrivacyUnit.RECORD:
            composed["implied_epsilon"] = mechanism.epsilon
        else:
            composed["central_epsilon"] = account.central.epsilon

    def describe_audits(delta: float) -> str:
        return " ".join(audit.sentence(delta) for audit in run.audits)

    return accounting.StatementFacts(
        **composed,
        trust_model=account.trust_model,
        mechanism=mechanism.name,
        mechanism_description=_describe_release(setup),
        mechanism_parameters=_resolve_parameters(setup, run.rounds),
        privacy_unit=mechanism.privacy_unit,
        sampling=setup.sampling,
        other_samplings=[s for s in account.central.samplings if s != setup.sampling],
        num_clients=account.per_client.num_clients,
        populations=_population_sizes(run),
        num_records=run.num_records,
        clients_per_round=sizes or run.sampler.expected_cohort_size(0),
        cohort_sizes=[*run.cohort_sizes.elements()],
        rounds=account.rounds,
        planned_rounds=_planned_rounds(run),
        epsilon_of_planned_rounds=functools.partial(_epsilon_of_planned_rounds, run),
        rounds_of_others=account.rounds_of_others - account.evaluations,
        evaluated=[cost.num_clients for cost in account.evaluation_costs],
        pld_is_exact=account.central.is_one_gaussian,
        implied_delta=mechanism.implied_delta,
        caveats=_collect_caveats(run, cohort_engine),
        audit=describe_audits if run.audits else None,
    )


def _planned_rounds(run: run_lib.Run) -> int | None:
    """Returns how many rounds might have run; None if that is how many did."""
    planned = max(run.rounds, run.planned_rounds) + run.num_unrun
    return planned if planned > run.rounds else None


def _epsilon_of_planned_rounds(run: run_lib.Run, delta: float) -> float:
    """Returns epsilon as if all planned rounds had run; infinite if that is unknown."""
    try:
        if run.account.by_client:
            return run.epsilon_after(delta)(max(0, run.planned_rounds - run.rounds))
        charges = run.costs_not_run()
    except ValueError:  # A schedule may not suit the clients of a later `fit`.
        return math.inf
    composed = run.account.central.with_charges(*charges.items())
    curves = [_epsilon_by(composed, accountant) for accountant in ("rdp", "pld")]
    return min((curve(delta) for curve in curves if curve), default=math.inf)


def _population_sizes(run: run_lib.Run) -> list[int]:
    """Returns the N of each population; rounds lost in a crash may have had others."""
    sizes = [size for size, _ in dict.fromkeys(run.populations or [run.population])]
    charged = {charge.num_clients for charge in run.account.own}
    return [*sorted(charged - {*sizes}), *sizes]


def _describe_release(setup: TrainingSetup) -> str:
    """Describes what is released, and how clients are weighted in it."""
    sentence = setup.mechanism.describe()
    weighting = setup.client_weighting
    if weighting is None:
        return sentence
    divisor = (
        "the sum of the weights"
        if setup.mechanism.trust_model == TrustModel.NONE
        else f"m times {weighting.mean_weight:g}, which was fixed beforehand"
    )
    return f"{sentence} {weighting.describe()} The sum is divided by {divisor}."


def _resolve_parameters(setup: TrainingSetup, rounds: int) -> Json:
    """Returns the mechanism's parameters, with the range of scheduled noise."""
    parameters = setup.mechanism.parameters()
    noise = parameters.get("noise_multiplier")
    if callable(noise) or isinstance(noise, tuple):
        charged = range(max(1, rounds))
        values = [setup.mechanism.noise_multiplier_at(t) for t in charged]
        noise = f"{min(values):g} to {max(values):g} (scheduled)"
        parameters["noise_multiplier"] = noise
    return {**parameters, "client_weighting": setup.client_weighting}


def _epsilon_by(
    composed: accounting.PrivacyAccountant, accountant: str
) -> Callable[[float], float] | None:
    """Returns a function from delta to epsilon; None without a (quick) bound."""
    is_slow = accountant == "pld" and not composed.has_few_kinds
    if not composed.has_bound_by(accountant) or (
        is_slow and composed.has_bound_by("rdp")
    ):
        return None
    return lambda delta: composed.epsilon(delta, accountant)


# The recorded caveats that apply even without a guarantee.
_CAVEATS_OF_ANY_RUN = {
    *("local_clients_excluded", "rounds_charged_twice"),
    *("rounds_abandoned", "rounds_abandoned_charged", "rounds_interrupted"),
}


# Those that may differ from `fit` to `fit`.
_BY_ROUND = ("non_trainable_released", "non_trainable_kept")


def caveats_of_setup(
    setup: TrainingSetup, cohort_engine: engine.CohortEngine
) -> dict[str, bool]:
    """Returns the caveats that follow from a training's settings, run or not."""
    mechanism = setup.mechanism
    is_private = mechanism.trust_model != TrustModel.NONE
    by_client = mechanism.trust_model == TrustModel.LOCAL
    at_clients = mechanism.noise_site == NoiseSite.CLIENT
    is_secure = setup.secure_aggregation is not None
    releases_state = is_private and cohort_engine.server.has_non_trainable
    keeps_state = cohort_engine.keeps_non_trainable
    return {
        "client_noise_needs_honest_clients": at_clients,
        "secure_aggregation": is_secure,
        "secure_aggregation_group_noise": is_secure and at_clients,
        "secure_aggregation_unnoised_groups": is_secure
        and not at_clients
        and not by_client
        and is_private,
        "secure_aggregation_norms_seen": is_secure and cohort_engine.query.two_phase,
        "non_trainable_released": releases_state,
        "non_trainable_kept": keeps_state,
        "client_weighting_given": is_private and setup.client_weighting is not None,
        # Whether a client failed must not show in what may be published.
        "clients_excluded": mechanism.trust_model == TrustModel.CENTRAL
        and not setup.abandons_on_failure,
    }


def record_round(run: run_lib.Run, cohort_engine: engine.CohortEngine) -> None:
    """Records caveats that may not apply to later rounds, as if a layer is frozen."""
    applies = caveats_of_setup(run.setup, cohort_engine)
    run.caveats |= {key for key in _BY_ROUND if applies[key]}


def _collect_caveats(
    run: run_lib.Run, cohort_engine: engine.CohortEngine
) -> tuple[str, ...]:
    account = run.account
    is_private = account.trust_model != TrustModel.NONE
    other_runs = len(account.others) > account.evaluations
    applies = {
        **caveats_of_setup(run.setup, cohort_engine),
        "rounds_may_be_abandoned": account.trust_model == TrustModel.CENTRAL
        and any(charge.is_charged_if_abandoned for charge in account.own),
        "unnoised_metrics": is_private,
        "validation_clients_held_out": bool(run.held_out),
        "hyperparameter_search_not_counted": is_private and not other_runs,
        "only_runs_in_ledgers_counted": is_private and other_runs,
        "evaluations_counted": is_private and account.evaluations > 0,
    }
    recorded = run.caveats if is_private else run.caveats & _CAVEATS_OF_ANY_RUN
    keys = [key for key in accounting.CAVEATS if applies.get(key) or key in recorded]
    return tuple(dict.fromkeys([*run.setup.mechanism.all_caveats(), *keys]))
