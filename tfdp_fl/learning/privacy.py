"""Epsilon from a process's state and the sampling that the caller declares.

TFF is handed the cohort of a round; how it was drawn only the caller knows.
The state knows how many rounds there were, the mechanism what each released.
"""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import tensorflow as tf

from tfdp_fl import accounting, schedules
from tfdp_fl.accounting import pass_plan
from tfdp_fl.accounting.local import epsilon_of_mu_squared
from tfdp_fl.aggregators import state as state_lib
from tfdp_fl.mechanisms import mechanism as mechanism_lib


def privacy_charges(
    state: Any,
    mechanism: mechanism_lib.Mechanism,
    *,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    rounds: int | None = None,
) -> list[accounting.RoundCharge]:
    """Returns what each round that is in a state cost centrally.

    Args:
      state: The state of a learning process, or an `AggregatorState`.
      mechanism: The mechanism that the process was built with.
      sampling: How the cohorts were drawn: "poisson", "fixed_size" or
        "shuffled".
      num_clients: N, the population they were drawn from.
      clients_per_round: m, as the process was built with.
      rounds: The number of rounds that were planned, where the mechanism
        splits a budget over them.

    Returns:
      A charge for each round, in order.

    Raises:
      ValueError: The state tells of another mechanism or another m.
    """
    found = state_lib.find_aggregator_state(state)
    deployment = mechanism_lib.Deployment(
        clients_per_round=clients_per_round,
        num_clients=num_clients,
        sampling=sampling,
        rounds=rounds,
        num_variables=_num_variables(state),
    )
    done = int(found.rounds)
    events = [mechanism.round_event(index, deployment) for index in range(done)]
    if done:
        _check_state(found, mechanism, events[-1], deployment)
    plan = None
    if sampling == "shuffled":
        plan = pass_plan.PassPlan(num_clients, clients_per_round)
    charges = []
    for index, event in enumerate(events):
        size, place = deployment.cohort_size(index), {}
        if plan is not None:
            pass_index, start, stop = plan.cohort(index)
            size = stop - start
            place = {"pass_index": pass_index, "pass_offset": start}
        charges.append(
            accounting.RoundCharge(
                sampling=sampling,
                num_clients=num_clients,
                clients_per_round=size,
                event=event,
                **place,
            )
        )
    return charges


def epsilon(
    state: Any,
    mechanism: mechanism_lib.Mechanism,
    *,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    delta: float,
    accountant: str = "rdp",
    rounds: int | None = None,
    max_participations: int | None = None,
) -> float:
    """Returns the epsilon of the mechanism's own guarantee after a state.

    A central guarantee is composed over the rounds, under the sampling that is
    declared. A local one, or one per record, is composed over the rounds of
    the one client that took part most often; sampling makes no difference.

    The number is as good as the declaration: cohorts have to be drawn that
    way, from the whole population, in secret. (`tfdp_fl.sampling` does.)

    Args:
      state: The state of a learning process, or an `AggregatorState`.
      mechanism: The mechanism that the process was built with.
      sampling: "poisson", "fixed_size" or "shuffled".
      num_clients: N.
      clients_per_round: m, as the process was built with.
      delta: In (0, 1).
      accountant: "rdp" or "pld".
      rounds: The number of rounds that were planned, for a mechanism that
        splits a budget over them, as the process was built with.
      max_participations: The most rounds that any one client took part in;
        None: it may have been in all of them. For a local mechanism with a
        budget also what it was calibrated to.

    Raises:
      ValueError: The state tells of another mechanism or another m.
    """
    if mechanism.guarantee in ("local", "record"):
        done = int(state_lib.find_aggregator_state(state).rounds)
        deployment = mechanism_lib.Deployment(
            clients_per_round=clients_per_round,
            num_clients=num_clients,
            rounds=rounds,
            max_participations=max_participations,
            num_variables=_num_variables(state),
        )
        times = min(done, max_participations or done)
        if not times:
            return epsilon_of_mu_squared(0.0, delta)
        return epsilon_of_mu_squared(
            times * mechanism.mu_squared(deployment), delta
        )
    history = accounting.PrivacyAccountant()
    for charge in privacy_charges(
        state,
        mechanism,
        sampling=sampling,
        num_clients=num_clients,
        clients_per_round=clients_per_round,
        rounds=rounds,
    ):
        history.add(charge)
    return history.epsilon(delta, accountant)


def _num_variables(state: Any) -> int | None:
    weights = getattr(state, "global_model_weights", None)
    return None if weights is None else len(tf.nest.flatten(weights.trainable))


def _check_state(
    found: state_lib.AggregatorState,
    mechanism: mechanism_lib.Mechanism,
    event: dp_accounting.DpEvent,
    deployment: mechanism_lib.Deployment,
) -> None:
    """Raises ValueError if a state cannot come from what is declared."""
    last = int(found.rounds) - 1
    size = deployment.cohort_size(last)
    known = float(found.query_state.clients_per_round)
    if not math.isclose(size, known, rel_tol=1e-5):
        raise ValueError(
            f"clients_per_round must be what the state was made with, {known} "
            f"in its last round, got {size}."
        )
    if mechanism.guarantee != "central":
        return
    recorded = accounting.RoundCharge(
        sampling="poisson",
        num_clients=1,
        clients_per_round=1,
        event=state_lib.extract_dp_event(found),
    ).noise_multiplier
    declared = accounting.RoundCharge(
        sampling="poisson", num_clients=1, clients_per_round=1, event=event
    ).noise_multiplier
    if recorded is None or declared is None:
        matches = recorded is declared
    else:
        matches = math.isclose(recorded, declared, rel_tol=1e-5)
    if not matches:
        raise ValueError(
            "mechanism must be what the state was made with, whose last round "
            f"had a noise multiplier of {recorded}, got {mechanism!r} with "
            f"{declared}."
        )
