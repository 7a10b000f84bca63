"""Computes epsilon from a process's state and the sampling declared by the caller.

TFF gets the clients of a round, but only the caller knows how they were drawn. The
process records in its state what each round released, and `aggregators.with_cohort`
records who could have been in it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any, cast

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdp_fl import _validate, accounting, matrix_factorization, schedules
from tfdp_fl import sampling as sampling_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import planning
from tfdp_fl.accounting.charge import MIN_SEPARATION
from tfdp_fl.accounting.gaussian import epsilon_of_mu_squared
from tfdp_fl.mechanisms import CorrelatedNoise, contribution
from tfdp_fl.mechanisms import mechanism as mechanism_lib
from tfdp_fl.terms import Json, NoiseSite, PrivacyUnit, Sampling, TrustModel
from tfdp_fl.tff import state as state_lib


class Epsilon(float):
    """An epsilon: a number with its privacy statement.

    Attributes:
      facts: A `tfdp_fl.accounting.StatementFacts`; None for the result of arithmetic
        on an epsilon, which has no statement.
      delta: The delta at which it holds, or None.
    """

    facts: accounting.StatementFacts | None = None
    delta: float | None = None

    def to_statement(self, format: str = "text") -> Any:
        """Returns the privacy statement, in a format of `privacy_statement`."""
        facts = cast(accounting.StatementFacts, self.facts)
        return accounting.privacy_statement(facts, cast(float, self.delta), format)

    @property
    def statement(self) -> str:
        """The privacy statement: what is guaranteed, for whom, and what is not."""
        return self.to_statement()


def privacy_charges(
    state: state_lib.ServerState,
    mechanism: mechanism_lib.Mechanism,
    *,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    rounds: int | None = None,
    max_participations: int | None = None,
) -> list[accounting.RoundCharge]:
    """Returns the central cost of each round in a state.

    A round without a recorded cohort (`aggregators.with_cohort`) is charged as if every
    client had been in it; under Poisson sampling, as if its cohort had been drawn as
    declared.

    Args:
      state: The state of a learning process, or an `AggregatorState` (see
        `tfdp_fl.aggregators.accounted_state`).
      mechanism: The mechanism that ran the last round. Earlier rounds may have had
        another noise multiplier, but must have had the same kind of mechanism.
      sampling: How the cohorts were drawn: "poisson", "fixed_size",
        "random_allocation", "shuffled", "cyclic" or "min_separation" (see `epsilon`).
      num_clients: N, the population from which they were drawn.
      clients_per_round: m of the process that ran the last round.
      rounds: The planned number of rounds, if the mechanism splits a budget over
        them.
      max_participations: The largest number of rounds of any client, or None. Charges
        do not depend on it, but a mechanism that assumes fewer refuses it.

    Returns:
      A charge for each round, in order. Each is preceded by the charges of the round's
      abandoned cohorts, if those cost something.

    Raises:
      TypeError: `mechanism` is not a mechanism.
      ValueError: The state has another mechanism, sampling, N or m, or
        it may include releases other than the mechanism's.
    """
    _validate.instance_of(mechanism_lib.Mechanism, mechanism=mechanism)
    accounted = state_lib.accounted_state(state)
    # (Processes other than of models, such as k-means, have no trainable weights.)
    weights = getattr(state, "global_model_weights", None)
    trainable = getattr(weights, "trainable", None)
    context = contribution.PrivacyContext(
        clients_per_round=sampling_lib.expected_sizes(
            sampling, num_clients, clients_per_round
        ),
        num_clients=num_clients,
        sampling=sampling,
        rounds=rounds,
        num_variables=None if trainable is None else len(tf.nest.flatten(trainable)),
        max_participations=max_participations,
    )
    lines = _read_lines(accounted, mechanism, context)
    if lines:
        _check_last_round(lines, mechanism, context)
    draws_by_round, later_draws = accounted.history.cohorts()
    _check_cohorts([*draws_by_round, later_draws], lines, context)
    events = [
        _event_of_round(index, line, answered, mechanism, context)
        for index, (line, answered) in enumerate(
            zip(lines, accounted.history[1], strict=True)
        )
    ]
    if isinstance(mechanism, CorrelatedNoise):
        limit = max_participations
        if sampling == Sampling.CYCLIC:
            events = _apply_group_order(events, draws_by_round, mechanism, limit)
        else:
            limit = min(mechanism.pattern.k, limit or mechanism.pattern.k)
        for start in range(0, len(lines), mechanism.event_period):
            segment = accounted.history[1][start : start + mechanism.event_period]
            if limit is not None:
                _check_participations([*map(float, segment)], limit, num_clients)
    charges = []
    for index, (event, draws) in enumerate(zip(events, draws_by_round, strict=True)):
        size = lines[index]["clients_per_round"]
        participation = _last_participation(draws, sampling, num_clients, size)
        for draw in draws:
            participation = accounting.Participation.from_json(draw["participation"])
            if draw is draws[-1] or participation.is_charged_if_abandoned:
                charges.append(participation.cost(event))
        if not draws:
            charges.append(participation.cost(event))
        elif context.sampling == Sampling.SHUFFLED:
            line = {"clients_per_round": participation.clients_per_round}
            _check_answered(index, accounted.history[1][index], line, context)
    for draw in later_draws:
        participation = accounting.Participation.from_json(draw["participation"])
        if participation.is_charged_if_abandoned:
            charges.append(
                participation.cost(mechanism.round_event(len(lines), context))
            )
    return charges


def _full_participation(
    sampling: str, num_clients: int, size: float
) -> accounting.Participation:
    """Returns the participation in a round without a recorded cohort: every client.

    Under Poisson sampling, the caller's declaration that its cohort was newly drawn is
    trusted, and the statement says so. For cohorts of a fixed size or in passes, that
    would not be enough, as cohorts might have been drawn repeatedly.
    """
    everybody = sampling in (Sampling.FIXED_SIZE, Sampling.RANDOM_ALLOCATION)
    return accounting.Participation(
        sampling=sampling,
        num_clients=num_clients,
        clients_per_round=num_clients if everybody else size,
    )


def _check_cohorts(
    draws_by_round: list[list[Json]],
    lines: list[Json],
    context: contribution.PrivacyContext,
) -> None:
    """Raises ValueError if a cohort's sampling differs from the declared one."""
    for index, draw in (
        (i, draw) for i, draws in enumerate(draws_by_round) for draw in draws
    ):
        participation = accounting.Participation.from_json(draw["participation"])
        size = context.cohort_size(index)
        if index < len(lines):
            size = lines[index]["clients_per_round"]
        same_size = math.isclose(participation.clients_per_round, size, rel_tol=1e-5)
        if context.sampling == Sampling.SHUFFLED:  # The end of a pass is smaller.
            same_size = participation.clients_per_round <= size
        if not same_size or (participation.sampling, participation.num_clients) != (
            context.sampling,
            context.num_clients,
        ):
            raise ValueError(
                "sampling, num_clients and clients_per_round must be those of the "
                f"cohorts that the state was given, got {context.sampling!r}, "
                f"{context.num_clients} and {size:g} for one of {participation!r} "
                f"in round {index + 1}."
            )


def _apply_group_order(
    events: list[dp_accounting.DpEvent],
    draws_by_round: list[list[Json]],
    mechanism: CorrelatedNoise,
    max_participations: int | None,
) -> list[dp_accounting.DpEvent]:
    """Returns the rounds' events for the order in which groups actually took part.

    If clients were regrouped, or groups took part too soon or are unknown, a client may
    be in more rounds than the noise of a segment allows for.
    """
    groups: list[tuple[str | None, int | None] | None] = []
    for draws in draws_by_round:
        participation = draws and accounting.Participation.from_json(
            draws[-1]["participation"]
        )
        groups.append(
            (participation.partition, participation.group) if participation else None
        )
    new_events, period = list(events), mechanism.event_period
    for start in range(0, len(events), period):
        segment = slice(start, start + period)
        times = matrix_factorization.fold(
            mechanism.pattern, groups[segment], max_participations
        )
        for index, event in enumerate(events[segment], start):
            if times > 1 and isinstance(event, dp_accounting.GaussianDpEvent):
                z = event.noise_multiplier / times
                new_events[index] = dp_accounting.GaussianDpEvent(z)
    return new_events


def epsilon(
    state: state_lib.ServerState,
    mechanism: mechanism_lib.Mechanism,
    *,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    delta: float,
    accountant: str = "rdp",
    rounds: int | None = None,
    max_participations: int | None = None,
) -> Epsilon:
    """Returns the epsilon of the mechanism's own guarantee for a state's rounds.

    A central guarantee is composed over the rounds under the declared sampling. A local
    one, or one per record, is composed over the rounds of the client that took part
    most often (the most costly rounds, if they differ); sampling makes no difference.

    The number is only valid if the declaration is true: cohorts must be drawn in that
    way, from the whole population, in secret. (`tfdp_fl.sampling` does this.) Its
    `statement` says so, and lists what else it does not cover.

    Args:
      state: The state of a learning process, or an `AggregatorState` (see
        `tfdp_fl.aggregators.accounted_state`).
      mechanism: The mechanism that ran the last round. The cost of earlier rounds is in
        the state; a state of another kind of mechanism is refused.
      sampling: "poisson", "fixed_size", "random_allocation", "shuffled", "cyclic" or
        "min_separation" (clients take part when they like, but with correlated noise at
        least its min_separation apart; no amplification is claimed).
      num_clients: The number of clients, N.
      clients_per_round: m of the process that ran the last round.
      delta: In (0, 1).
      accountant: "rdp" or "pld".
      rounds: The planned number of rounds with which the process was built, for a
        mechanism whose schedules or budget depend on it.
      max_participations: The largest number of rounds of any client; None: a client
        may have been in all of them.

    Raises:
      TypeError: `mechanism` is not a mechanism.
      ValueError: The state has another mechanism, sampling, N or m, or
        it may include releases other than the mechanism's; or more clients answered,
        in total, than `max_participations` rounds of each allow.
    """
    _validate.instance_of(mechanism_lib.Mechanism, mechanism=mechanism)
    _validate.positive_integer(num_clients=num_clients)
    if max_participations is not None:
        _validate.positive_integer(max_participations=max_participations)
    declared: Json = {
        "sampling": sampling,
        "num_clients": num_clients,
        "clients_per_round": clients_per_round,
    }
    participations, is_declared = None, False
    noise_multipliers: set[float | None] = set()
    if mechanism.trust_model == TrustModel.LOCAL:
        accounted = state_lib.accounted_state(state)
        sizes = sampling_lib.expected_sizes(sampling, num_clients, clients_per_round)
        context = contribution.PrivacyContext(
            **{**declared, "clients_per_round": sizes},
            rounds=rounds,
            max_participations=max_participations,
        )
        lines = _read_lines(accounted, mechanism, context)
        sizes = [line["clients_per_round"] for line in lines]
        mu_squared = _mu_squared_of_cohorts(accounted, lines, mechanism, context)
        participations = min(len(mu_squared), max_participations or len(mu_squared))
        answered = _answers(accounted.history)
        _check_participations(answered, participations, num_clients)
        is_declared = participations < len(mu_squared)
        value = epsilon_of_mu_squared(math.fsum(mu_squared[:participations]), delta)
        composed: Json = {"epsilon_local": value}
    else:
        accounted = state_lib.accounted_state(state)
        charges = privacy_charges(
            state,
            mechanism,
            rounds=rounds,
            max_participations=max_participations,
            **declared,
        )
        composition = accounting.PrivacyAccountant(charges)
        value = composition.epsilon(delta, accountant)
        epsilon_if_known = composition.epsilon_if_participation_is_known(delta)
        num_ahead = 0 if rounds is None else rounds - len(accounted.history.lines)
        planned = _compose_plan(
            composition, charges, mechanism, num_ahead, accounted, declared
        )
        composed = {
            f"epsilon_{accountant}": value,
            "epsilon_if_participation_is_known": epsilon_if_known,
            "pld_is_exact": composition.is_one_gaussian,
            "other_samplings": [s for s in composition.samplings if s != sampling],
            "planned_rounds": planned and rounds,
            "epsilon_of_planned_rounds": planned
            and functools.partial(planned.epsilon, accountant=accountant),
        }
        sizes = [
            float(json.loads(line)["clients_per_round"])
            for line in np.asarray(accounted.history.lines)
        ]
        noise_multipliers = {charge.noise_multiplier for charge in charges}
    parameters = mechanism.parameters()
    multipliers = [z for z in noise_multipliers if z is not None]
    if len(noise_multipliers) > 1 and len(multipliers) == len(noise_multipliers):
        parameters["noise_multiplier"] = (
            f"{min(multipliers):g} to {max(multipliers):g} "
            "(by round, for all of its releases)"
        )
    result = Epsilon(value)
    result.delta = delta
    per_record = mechanism.privacy_unit == PrivacyUnit.RECORD
    result.facts = accounting.StatementFacts(
        trust_model=mechanism.trust_model,
        mechanism=mechanism.name,
        mechanism_description=mechanism.describe(),
        mechanism_parameters=parameters,
        privacy_unit=mechanism.privacy_unit,
        sampling=sampling,
        num_clients=num_clients,
        clients_per_round=sizes
        or float(schedules.value_at(clients_per_round, 0, "clients_per_round")),
        rounds=len(sizes),
        max_participations=participations,
        implied_epsilon=mechanism.epsilon if per_record else None,
        implied_delta=mechanism.implied_delta,
        caveats=_caveats(mechanism, sampling, state, is_declared),
        **composed,
    )
    return result


def _mu_squared_of_cohorts(
    accounted: state_lib.AggregatorState,
    lines: list[Json],
    mechanism: mechanism_lib.Mechanism,
    context: contribution.PrivacyContext,
) -> list[float]:
    """Returns each cohort's local cost (mu^2 per client), the largest first.

    What clients sent in an abandoned round is charged, too. Which process they sent it
    to is not recorded, so it costs as much as the most expensive one.
    """
    draws_by_round, later_draws = accounted.history.cohorts()
    _check_cohorts([*draws_by_round, later_draws], lines, context)
    spent = [line["mu_squared"] for line in lines]
    if abandoned := accounted.history.abandoned():
        # A process calibrates its noise to the mechanism's limit or to its own.
        limits = {mechanism.max_participations, context.max_participations}
        possible = (
            dataclasses.replace(context, max_participations=limit) for limit in limits
        )
        dearest = max(*map(float, map(mechanism.mu_squared, possible)), *spent, 0.0)
        spent += [dearest] * len(abandoned)
    return sorted(spent, reverse=True)


def _compose_plan(
    composition: accounting.PrivacyAccountant,
    charges: list[accounting.RoundCharge],
    mechanism: mechanism_lib.Mechanism,
    num_ahead: int,
    accounted: state_lib.AggregatorState,
    declared: Json,
) -> accounting.PrivacyAccountant | None:
    """Returns the cost with `num_ahead` more rounds like the last; None without any.

    It is also None if their cost may differ from the last round's.
    """
    draws_by_round, _ = accounted.history.cohorts()
    if not draws_by_round or num_ahead <= 0:
        return None
    noise_multiplier = charges[-1].noise_multiplier
    sampling, sizes = declared["sampling"], declared["clients_per_round"]
    is_constant = all(map(schedules.is_constant, (mechanism.noise_multiplier, sizes)))
    is_constant &= not mechanism.overrides("round_event")
    if noise_multiplier is None or not is_constant or mechanism.min_separation:
        return None
    population, size = declared["num_clients"], schedules.value_at(sizes, 0, "m")
    if draws_by_round[-1] and sampling in charge_lib.TAKING_TURNS:
        plan = sampling, population, size, num_ahead
        return composition.with_charges(*planning.plan_charges(noise_multiplier, *plan))
    participation = _last_participation(
        draws_by_round[-1], sampling, population, float(size)
    )
    one = participation.cost(dp_accounting.GaussianDpEvent(noise_multiplier))
    return composition.with_charges((one, num_ahead))


def _last_participation(
    draws: list[Json], sampling: str, num_clients: int, size: float
) -> accounting.Participation:
    """Returns who could have been in a round, by its last draw if one is recorded."""
    if draws:
        return accounting.Participation.from_json(draws[-1]["participation"])
    return _full_participation(sampling, num_clients, size)


def _answers(history: state_lib.RoundHistory) -> list[float]:
    """Returns how many clients sent something in each cohort, at least.

    An abandoned cohort's clients may all have sent something; a cohort of random size,
    which is not recorded, may have been empty.
    """
    drawn = [draw["participation"] for draw in history.abandoned()]
    return [float(size) for size in np.asarray(history.answered)] + [
        each["clients_per_round"]
        for each in drawn
        if each["sampling"] not in charge_lib.OF_RANDOM_SIZE
    ]


def _check_participations(
    answered: Sequence[float], participations: int, num_clients: int
) -> None:
    """Raises ValueError if some client must have taken part more often than declared.

    Of N clients that answered k N times or more in all, one answered k times or more.

    Args:
      answered: How many answered in each of some rounds.
      participations: The most rounds of a client, as declared.
      num_clients: N, as declared.
    """
    if max(answered, default=0.0) > num_clients:
        raise ValueError(
            f"num_clients must be at least {max(answered):g}, the number of clients "
            f"that answered in one round of the state, got {num_clients}."
        )
    least = -(-math.floor(math.fsum(answered)) // num_clients)
    if participations < least:
        raise ValueError(
            f"max_participations must be at least {least}, because the {num_clients} "
            f"clients answered {math.fsum(answered):g} times in this state, got "
            f"{participations}: pass max_participations={least} or more to "
            "tfdp_fl.learning.epsilon, or None if a client may have been in all rounds."
        )


def _read_lines(
    accounted: state_lib.AggregatorState,
    mechanism: mechanism_lib.Mechanism,
    context: contribution.PrivacyContext,
) -> list[Json]:
    """Returns the recorded rounds; raises ValueError if they do not match."""
    # The process may not have known the sampling. If, say, it accepted only cohorts of
    # size m, the accepted cohorts of a Poisson sampler are not Poisson cohorts.
    mechanism.check(context)
    recorded, answered = map(np.asarray, accounted.history[:2])
    num_rounds = int(accounted.rounds)
    num_ended = len(accounted.history.attempted) or num_rounds
    if not len(recorded) == len(answered) == num_ended == num_rounds:
        raise ValueError(
            f"state must have a history of each of its {num_rounds} rounds, got one "
            f"of {len(recorded)}."
        )
    lines = [json.loads(line) for line in recorded]
    kind = state_lib.history_kind(mechanism)
    for index, line in enumerate(lines):
        # A process that does not know the sampling records none.
        if line["sampling"] not in (None, context.sampling) or any(
            line[name] != value for name, value in kind.items()
        ):
            raise ValueError(
                "state must come from processes of this mechanism and sampling, "
                f"{mechanism.name} and {context.sampling!r}, got one whose "
                f"round {index + 1} of {num_rounds} was run by a process of another "
                "kind, whose guarantee cannot be computed here."
            )
        if line["num_clients"] not in (None, context.num_clients):
            raise ValueError(
                f"num_clients must be the {line['num_clients']} that "
                f"round {index + 1} of the state was run with, got "
                f"{context.num_clients!r}."
            )
        if mechanism.trust_model == TrustModel.CENTRAL:
            _check_answered(index, answered[index], line, context)
    return lines


def _event_of_round(
    index: int,
    line: Json,
    answered: float,
    mechanism: mechanism_lib.Mechanism,
    context: contribution.PrivacyContext,
) -> dp_accounting.DpEvent:
    """Returns the event of a round; for local noise, the central event.

    The central event depends on the sampling. It is non-private unless m clients
    answered with the recorded noise, and the sum did not change the noise.
    """
    if "event" in line:
        recorded = charge_lib.event_from_json(line["event"])
        if (factor := line.get("enlarged", 1.0)) == 1:
            return recorded
        z = charge_lib.noise_multiplier_of(recorded)
        return dp_accounting.GaussianDpEvent((z or 0.0) / factor)
    event = mechanism.round_event(index, context)
    if isinstance(event, dp_accounting.GaussianDpEvent) and not (
        answered == line["clients_per_round"]
        and math.isclose(mechanism.mu_squared(context), line["mu_squared"])
        and not line.get("sum_changed")
    ):
        return dp_accounting.NonPrivateDpEvent()
    return event


def _check_answered(
    index: int, answered: float, line: Json, context: contribution.PrivacyContext
) -> None:
    """Raises ValueError if more clients answered than the sampling draws."""
    population = cast(int, context.num_clients)
    largest = planned = line["clients_per_round"]
    if context.sampling in charge_lib.OF_RANDOM_SIZE:
        largest = state_lib.largest_poisson_cohort(population, min(planned, population))
    if answered > largest:
        raise ValueError(
            f"sampling={context.sampling!r} gives cohorts of at most {largest:g} "
            f"of {population} clients where {planned:g} are expected (or are left of a "
            f"pass), got a state in which {answered:g} answered in round {index + 1}."
        )


def _check_last_round(
    lines: list[Json],
    mechanism: mechanism_lib.Mechanism,
    context: contribution.PrivacyContext,
) -> None:
    """Raises ValueError if the last round does not match the declaration."""
    index, size = len(lines) - 1, lines[-1]["clients_per_round"]
    declared_size = context.cohort_size(index)
    if not math.isclose(declared_size, size, rel_tol=1e-5):
        raise ValueError(
            f"clients_per_round must be as in the state, {size} in its last round, "
            f"got {declared_size}."
        )
    if "event" not in lines[-1]:
        return
    recorded = charge_lib.event_from_json(lines[-1]["event"])
    declared = charge_lib.normalise(mechanism.round_event(index, context))
    z, declared_z = map(charge_lib.noise_multiplier_of, (recorded, declared))
    if recorded != declared and (
        z is None or declared_z is None or not math.isclose(z, declared_z, rel_tol=1e-5)
    ):
        raise ValueError(
            "mechanism must be as in the state, whose last round had a noise "
            f"multiplier of {z}, got {mechanism!r} with {declared_z}."
        )


def _caveats(
    mechanism: mechanism_lib.Mechanism,
    sampling: str,
    state: state_lib.ServerState,
    participations_declared: bool,
) -> tuple[str, ...]:
    if mechanism.trust_model == TrustModel.NONE:
        return mechanism.all_caveats()
    at_clients = mechanism.noise_site == NoiseSite.CLIENT
    is_separated = sampling == MIN_SEPARATION and isinstance(mechanism, CorrelatedNoise)
    draws_by_round, later_draws = state_lib.accounted_state(state).history.cohorts()
    draws = [draw for part in (*draws_by_round, later_draws) for draw in part]
    applies = {
        # Cohorts are irrelevant for a local guarantee, or if they are not drawn.
        "tff_cohorts_not_said": mechanism.trust_model == TrustModel.CENTRAL
        and sampling != MIN_SEPARATION
        and not all(draws_by_round),
        "tff_rounds_may_be_abandoned": any(
            draw["participation"].get("known_selection") for draw in draws
        ),
        "plan_assumes_none_abandoned": sampling in charge_lib.IN_PASSES,
        "tff_cohorts_from_seed": any("round_from_seed" in draw for draw in draws),
        "client_noise_needs_honest_clients": at_clients,
        "participations_declared": is_separated or participations_declared,
    }
    return (
        *mechanism.all_caveats(),
        *(key for key in applies if applies[key]),
        "tff_cohorts_declared",
        "tff_other_releases",
        "unnoised_metrics",
        "hyperparameter_search_not_counted",
        "floating_point_noise",
        "pseudorandom_noise",
    )
