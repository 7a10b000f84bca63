"""Wraps a Keras model with the smallest noise that meets a privacy target."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp_fl import _validate, accounting, mechanisms, schedules
from tfdp_fl import sampling as sampling_lib
from tfdp_fl.keras import model as model_lib
from tfdp_fl.keras import run as run_lib
from tfdp_fl.keras import training_setup
from tfdp_fl.terms import Json, PrivacyUnit, TrustModel

_MODEL_OPTIONS = {
    field.name for field in dataclasses.fields(training_setup.TrainingSetup)
} - {"mechanism", "clients_per_round", "sampling", "delta", "accountant", "target"}
# The mechanism parameters that `make_private` calibrates.
_CALIBRATED = {"noise_multiplier", "epsilon", "delta"}
# Noise multipliers outside those of any real run, to probe what a mechanism allows.
_TINY, _HUGE = 1e-6, 1e6


def make_private(
    model: tf.keras.Model,
    *,
    target_epsilon: float,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    rounds: int,
    target_delta: float | None = None,
    mechanism: str | mechanisms.Mechanism = "adaptive",
    sampling: str = "poisson",
    accountant: str | None = None,
    **options: Any,
) -> model_lib.DPFederatedModel:
    """Returns a `DPFederatedModel` with the smallest noise that meets a target.

    The noise multiplier is calibrated for the given rounds, population and sampling.
    The returned model computes `epsilon` from the rounds that actually ran, and
    enforces the target over all calls of `fit`, however many rounds they ask for. (If
    clients add their own noise, that noise is set for the `rounds` given here.)

    Args:
      model: A built Keras model.
      target_epsilon: The largest epsilon that `rounds` rounds may cost.
      num_clients: The number of clients, N.
      clients_per_round: The expected number of clients per round, m; constant or a
        schedule.
      rounds: The number of rounds, T.
      target_delta: The delta of the target; None: 0.1 / num_clients.
      mechanism: A mechanism, whose `noise_multiplier` is replaced (a schedule is
        scaled as a whole), or a registered name: "adaptive", "fixed", "per_layer",
        "median", "local", "adaptive_local"; "correlated", for cyclic sampling (its
        `rounds` are those given here, and its `min_separation` is N / m unless given);
        "none", the baseline without privacy, which ignores the target; or one of your
        own (`mechanisms.register`).
      sampling: "poisson", "fixed_size", "random_allocation", "shuffled" or "cyclic".
      accountant: "rdp" or "pld", for the calibration and for `epsilon` of the
        returned model; None: PLD, the tighter one, if it is tight and fast
        (`accounting.select_accountant`), and otherwise RDP.
      **options: Further arguments of the mechanism (such as `clip_norm`) and of
        `DPFederatedModel`. Here "median" is private: `median_noise_multiplier`
        defaults to `mechanisms.default_median_noise_multiplier`.

    Raises:
      ValueError: The target cannot be met, or an argument is not allowed.
    """
    training_setup.check_model(model)
    if target_delta is None:
        _validate.positive_integer(num_clients=num_clients)
        target_delta = 0.1 / num_clients
    model_options = {
        name: options.pop(name) for name in _MODEL_OPTIONS if name in options
    }
    _check_mechanism(mechanism, options)
    target = training_setup.PrivacyTarget(
        epsilon=target_epsilon,
        delta=target_delta,
        accountant="rdp" if accountant is None else accountant,
        num_clients=num_clients,
        rounds=rounds,
    )
    if target_delta * num_clients >= 1:
        warnings.warn(
            f"target_delta should be below 1 / num_clients = {1 / num_clients:.3g}, "
            f"got {accounting.format_up(target_delta)}: a mechanism that publishes one "
            f"of the {num_clients} clients outright could have that delta.",
            RuntimeWarning,
            stacklevel=2,
        )
    # Calibrate for exactly the cohort sizes that will be used.
    clients_per_round = schedules.fix(clients_per_round)
    sizes = sampling_lib.expected_sizes(sampling, num_clients, clients_per_round)
    rounds_to_check = range(1 if schedules.is_constant(sizes) else rounds)
    smallest = min(
        schedules.value_at(sizes, t, "clients_per_round") for t in rounds_to_check
    )
    _validate.positive(clients_per_round=smallest)
    make_mechanism: Callable[[float], mechanisms.Mechanism]
    if isinstance(mechanism, mechanisms.Mechanism):
        make_mechanism = noise_scaler(mechanism)
    else:
        kind = mechanisms.by_name(mechanism)
        options = plan_parameters(kind, rounds, num_clients, smallest) | options

        def make_mechanism(noise: float) -> mechanisms.Mechanism:
            target_of_mechanism = mechanisms.CalibrationTarget(
                noise, target.epsilon, target.delta, smallest
            )
            return kind.from_budget(target_of_mechanism, **options)

    probe = make_mechanism(_TINY)
    sampler = sampling_lib.make_sampler(
        sampling,
        num_clients,
        clients_per_round,
        num_groups=probe.min_separation,
        may_abandon=training_setup.failures_spread(
            probe,
            model_options.get("on_client_failure"),
            model_options.get("secure_aggregation"),
        ),
    )
    calibrated = probe  # Local noise follows from the target itself.
    if probe.trust_model == TrustModel.CENTRAL:
        context = mechanisms.PrivacyContext(
            clients_per_round=sizes,
            num_clients=num_clients,
            sampling=sampling,
            rounds=rounds,
        )

        def charges(noise: float) -> Any:
            return charge_plan(make_mechanism(noise), sampler, context).items()

        limit = largest_noise(make_mechanism, context)
        if accountant is None:
            costs = charges(1.0 if limit is None else min(1.0, limit))
            best_accountant = accounting.select_accountant(
                charge for charge, _ in costs
            )
            target = dataclasses.replace(target, accountant=best_accountant)
        reason = "" if limit is None else f" {probe.noise_multiplier_limit_reason}"
        try:
            noise = accounting.calibrate(
                charges, target.epsilon, target.delta, target.accountant, upper=limit
            )
        except ValueError as error:
            raise ValueError(f"{error}{reason}") from error
        calibrated = make_mechanism(noise)
    return model_lib.DPFederatedModel(
        model,
        calibrated,
        clients_per_round,
        sampling,
        delta=target.delta,
        accountant=target.accountant,
        target=None if calibrated.trust_model == TrustModel.NONE else target,
        **model_options,
    )


def plan_parameters(
    kind: type[mechanisms.Mechanism],
    rounds: int,
    num_clients: int,
    clients_per_round: float,
) -> dict[str, int]:
    """Returns the mechanism's parameters that follow from the planned run."""
    parameters = {
        "rounds": rounds,
        # The number of groups if each has m clients.
        "min_separation": max(
            1, int(min(num_clients, num_clients // clients_per_round))
        ),
    }
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: parameters[name] for name in parameters.keys() & names}


def noise_scaler(
    mechanism: mechanisms.Mechanism,
) -> Callable[[float], mechanisms.Mechanism]:
    """Returns a function that makes the mechanism with a given noise multiplier.

    For scheduled noise, the argument is a factor that scales the schedule.
    """
    schedule = schedules.fix(mechanism.noise_multiplier)

    def make(factor: float) -> mechanisms.Mechanism:
        scaled: Any = factor
        if callable(schedule):
            scaled = lambda t: factor * schedule(t)  # noqa: E731
        elif isinstance(schedule, Sequence):
            scaled = tuple(factor * value for value in schedule)
        return mechanism.with_noise_multiplier(scaled)

    return make


def charge_plan(
    mechanism: mechanisms.Mechanism,
    sampler: sampling_lib.CohortSampler,
    context: mechanisms.PrivacyContext,
) -> run_lib.Charges:
    """Returns the costs of the planned rounds and how often each occurs."""
    mechanism.check(context)

    def cost(round_index: int) -> accounting.RoundCharge:
        event = mechanism.round_event(round_index, context)
        return sampler.charge(round_index, event)

    count = run_lib.cost_counter(mechanism, sampler, context, cost)
    return count(range(context.rounds or 0))


def largest_noise(
    make: Callable[[float], mechanisms.Mechanism], context: mechanisms.PrivacyContext
) -> float | None:
    """Returns the largest noise multiplier that a mechanism allows; None: no limit."""
    with contextlib.suppress(ValueError):
        make(_HUGE).check(context)
        return None
    smallest = make(_TINY)
    limits = [
        smallest.noise_multiplier_limit(t, context) * _TINY / noise
        for t in range(context.rounds or 0)
        if (noise := smallest.noise_multiplier_at(t)) > 0
    ]
    limit = min(limits, default=1.0)
    return None if math.isinf(limit) else limit * (1 - 1e-9)


def _check_mechanism(mechanism: str | mechanisms.Mechanism, options: Json) -> None:
    """Raises an error unless a mechanism's noise can be calibrated."""
    if isinstance(mechanism, mechanisms.Mechanism):
        if options:
            raise TypeError(
                f"{sorted(options)} cannot be given if mechanism is an object; give "
                "them to the mechanism itself."
            )
        has_noise = "noise_multiplier" in mechanism.parameters()
        if mechanism.trust_model != TrustModel.CENTRAL or not has_noise:
            raise ValueError(
                "mechanism must be one whose noise_multiplier can be calibrated (such "
                f"as FixedClipping), or a name, got {mechanism!r}."
            )
        return
    names = [
        n
        for n in mechanisms.names()
        if mechanisms.by_name(n).privacy_unit != PrivacyUnit.RECORD
    ]
    kind = mechanisms.by_name(_validate.one_of(names, mechanism=mechanism))
    allowed = {field.name for field in dataclasses.fields(kind)} - _CALIBRATED
    for option in options.keys() - allowed:
        raise TypeError(
            f"{option} is not an argument of make_private or of {kind.__name__}; "
            f"together they take {', '.join(sorted({*allowed, *_MODEL_OPTIONS}))}."
        )
