"""A Keras model with the smallest noise that keeps a target."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp_fl import _validate, accounting, mechanisms, schedules
from tfdp_fl import sampling as sampling_lib
from tfdp_fl.keras import model as model_lib

_MECHANISMS = {
    "adaptive": mechanisms.AdaptiveClipping,
    "fixed": mechanisms.FixedClipping,
    "median": mechanisms.MedianClipping,
    "local": mechanisms.LocalDP,
    "adaptive_local": mechanisms.AdaptiveLocalDP,
}
_LOCAL = ("local", "adaptive_local")


def make_private(
    model: tf.keras.Model,
    target_epsilon: float,
    target_delta: float,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    rounds: int,
    mechanism: str | mechanisms.Mechanism = "adaptive",
    sampling: str = "poisson",
    accountant: str = "rdp",
    **options: Any,
) -> model_lib.DPFederatedModel:
    """Returns a `DPFederatedModel` with the smallest noise for a target.

    The noise multiplier is calibrated for the rounds, the population and the
    sampling that are given here; `epsilon` of the returned model is computed
    from the rounds that really ran.

    Args:
      model: A built Keras model.
      target_epsilon: The most that `rounds` rounds may cost.
      target_delta: At this delta.
      num_clients: The population N.
      clients_per_round: The expected cohort size m, constant or a schedule.
      rounds: T.
      mechanism: "adaptive", "fixed", "median", "local" or "adaptive_local"; or
        a mechanism whose `noise_multiplier` is replaced.
      sampling: "poisson", "fixed_size" or "shuffled".
      accountant: "rdp" or "pld".
      **options: Further arguments of the mechanism (such as `clip_norm`) and
        of `DPFederatedModel`. "median" is private here: its
        `median_noise_multiplier` is five times the noise multiplier unless
        given.

    Raises:
      ValueError: The target cannot be kept, or an argument is not allowed.
    """
    epsilon = _validate.positive(target_epsilon=target_epsilon)
    delta = _validate.inside_unit_interval(target_delta=target_delta)
    _validate.positive_integer(num_clients=num_clients)
    _validate.positive_integer(rounds=rounds)
    model_options = {
        name: options.pop(name)
        for name in (
            "on_client_failure",
            "non_trainable_state",
            "secure_aggregation",
            "num_replicas",
        )
        if name in options
    }

    def wrap(made: mechanisms.Mechanism) -> model_lib.DPFederatedModel:
        return model_lib.DPFederatedModel(
            model,
            made,
            clients_per_round,
            sampling,
            delta=delta,
            **model_options,
        )

    if mechanism in _LOCAL:
        return wrap(
            _MECHANISMS[mechanism](epsilon=epsilon, delta=delta, **options)
        )
    make = _maker(mechanism, options)
    sampler = sampling_lib.make_sampler(
        sampling, num_clients, clients_per_round
    )
    deployment = mechanisms.Deployment(
        clients_per_round=clients_per_round,
        num_clients=num_clients,
        sampling=sampling,
        rounds=rounds,
    )

    def charges(noise_multiplier: float):
        trial = make(noise_multiplier)
        trial.check(deployment)
        return [
            (sampler.charge(t, trial.round_event(t, deployment)), 1)
            for t in range(rounds)
        ]

    return wrap(make(accounting.calibrate(charges, epsilon, delta, accountant)))


def _maker(mechanism: str | mechanisms.Mechanism, options: dict[str, Any]):
    """Returns a function from a noise multiplier to a mechanism."""
    if isinstance(mechanism, mechanisms.Mechanism):
        if options:
            raise TypeError(
                f"{sorted(options)} cannot be given with a mechanism that is "
                "already made."
            )
        return mechanism.with_noise_multiplier
    _validate.one_of(_MECHANISMS, mechanism=mechanism)
    kind = _MECHANISMS[mechanism]
    if mechanism != "median":
        return lambda z: kind(noise_multiplier=z, **options)
    given = options.pop("median_noise_multiplier", None)
    return lambda z: kind(
        noise_multiplier=z,
        median_noise_multiplier=5 * z if given is None else given,
        **options,
    )
