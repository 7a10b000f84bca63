"""Collects what a privacy statement has to say about a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp_fl import accounting, mechanisms
from tfdp_fl.accounting import spending as spending_lib

# PLD takes about a second for each kind of round, and a schedule has many.
_MOST_KINDS_FOR_PLD = 5


def facts(federated_model: Any) -> accounting.StatementFacts:
    """Returns what ran.

    Args:
      federated_model: A `DPFederatedModel` that `fit` was called of.
    """
    fed = federated_model
    spending, mechanism = fed._spending, fed.mechanism
    sizes = [
        charge.clients_per_round
        for charge, count in spending.charges
        for _ in range(count)
    ] or fed._sampler.expected_cohort_size(0)
    by_client = spending.by_client
    return accounting.StatementFacts(
        guarantee=spending.guarantee,
        mechanism=mechanism.name,
        mechanism_description=mechanism.describe(),
        mechanism_parameters=_parameters(fed),
        unit="record"
        if spending.guarantee == spending_lib.RECORD
        else "client",
        sampling=fed._sampling,
        num_clients=spending.clients.num_clients,
        populations=[
            size
            for size, _ in dict.fromkeys(fed._populations or [fed._population])
        ],
        num_records=fed._num_records,
        clients_per_round=sizes,
        cohort_sizes=fed._cohort_sizes,
        rounds=spending.rounds,
        rounds_of_others=spending.rounds_of_others,
        epsilon_rdp=None if by_client else _epsilon(spending, "rdp"),
        epsilon_pld=None if by_client else _epsilon(spending, "pld"),
        rdp_computed_by=spending.central.computed_by("rdp"),
        pld_computed_by=spending.central.computed_by("pld"),
        epsilon_local=spending.epsilon if by_client else None,
        max_participations=spending.clients.max_participations
        if by_client
        else None,
        central_epsilon=spending.central_epsilon
        if spending.guarantee == spending_lib.LOCAL
        else None,
        implied_epsilon=mechanism.epsilon
        if spending.guarantee == spending_lib.RECORD
        else None,
        implied_delta=mechanism.implied_delta,
        caveats=_caveats(fed),
    )


def unit(mechanism: mechanisms.Mechanism) -> str:
    """Returns what the mechanism protects as a whole."""
    return "record" if mechanism.guarantee == spending_lib.RECORD else "client"


def _parameters(fed: Any) -> dict[str, Any]:
    """Returns the mechanism's parameters; of a schedule, its range."""
    charged = range(max(1, fed.rounds))
    parameters = {}
    for name, value in fed.mechanism.parameters().items():
        if value is None:
            continue
        if name == "noise_multiplier" and (
            callable(value) or isinstance(value, tuple)
        ):
            values = [fed.mechanism.noise_multiplier_at(t) for t in charged]
            value = f"{min(values):g} to {max(values):g} (scheduled)"
        elif not isinstance(value, (bool, int, float, str)):
            value = type(value).__name__ if name == "query" else repr(value)
        parameters[name] = value
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


def _caveats(fed: Any) -> tuple[str, ...]:
    mechanism, seen = fed.mechanism, fed._facts
    caveats = dict.fromkeys(mechanism.caveats())
    private = fed._spending.guarantee != spending_lib.NONE
    at_clients = mechanism.noise_site == "client"
    local = fed._spending.guarantee in (spending_lib.LOCAL, spending_lib.RECORD)
    server = fed._engine.server
    holds = {
        "unnoised_metrics": private,
        "client_noise_needs_honest_clients": at_clients,
        "secure_aggregation": fed._secure_aggregation is not None,
        "secure_aggregation_group_noise": fed._secure_aggregation is not None
        and at_clients,
        "secure_aggregation_unnoised_groups": fed._secure_aggregation
        is not None
        and not at_clients
        and not local
        and private,
        "secure_aggregation_norms_seen": fed._secure_aggregation is not None
        and fed._engine.query.two_phase,
        "non_trainable_released": private and server.has_non_trainable,
        "non_trainable_kept": fed._engine.keeps_non_trainable,
        "clients_excluded": seen["clients_excluded"] > 0,
        "rounds_abandoned": seen["rounds_abandoned"] > 0,
        "rounds_charged_twice": seen["rounds_charged_twice"] > 0,
        "validation_data_not_covered": private and seen["validated"],
        "hyperparameter_search_not_counted": private
        and not fed._spending.others,
        "only_runs_in_ledgers_counted": private and bool(fed._spending.others),
        "floating_point_noise": private,
        "pseudorandom_noise": private,
        "seed_given": private and seen["seed_given"],
    }
    caveats.update(dict.fromkeys(key for key, true in holds.items() if true))
    return tuple(caveats)
