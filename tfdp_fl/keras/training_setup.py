"""What a `DPFederatedModel` is made with: nothing of it ever changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdp_fl import _validate, keras_versions, schedules
from tfdp_fl.accounting.charge import ACCOUNTANTS, SAMPLINGS
from tfdp_fl.engine import trainer
from tfdp_fl.keras.privacy_target import PrivacyTarget
from tfdp_fl.mechanisms import (
    ClientWeighting,
    Deployment,
    FixedClipping,
    Mechanism,
    client_weighting,
    noise,
)
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

FAILURE_RULES = ("abort", "exclude")
NON_TRAINABLE_STATES = ("aggregate", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How cohorts are drawn, what is released of them, and what is reported.

    The attributes are the arguments of `DPFederatedModel`, checked; schedules
    that are callables are fixed, so that what was charged is what they said.
    """

    mechanism: Mechanism
    clients_per_round: schedules.Schedule
    sampling: str = "poisson"
    delta: float | None = None
    accountant: str = "rdp"
    on_client_failure: str | None = None
    non_trainable_state: str = "aggregate"
    secure_aggregation: Any = None
    num_replicas: int | None = None
    noise_generator: str = noise.PHILOX
    target: PrivacyTarget | None = None
    client_weighting: ClientWeighting | None = None

    def __post_init__(self) -> None:
        _validate.instance_of(Mechanism, mechanism=self.mechanism)
        _validate.one_of(SAMPLINGS, sampling=self.sampling)
        _validate.one_of(ACCOUNTANTS, accountant=self.accountant)
        _validate.one_of(
            NON_TRAINABLE_STATES, non_trainable_state=self.non_trainable_state
        )
        _check_generator(self.noise_generator, self.mechanism, self.secure_aggregation)
        if self.num_replicas is not None:
            _validate.positive_integer(num_replicas=self.num_replicas)
        if self.target is not None:
            _validate.instance_of(PrivacyTarget, target=self.target)
        _check_protocol(self.secure_aggregation)
        mechanism = self.mechanism
        if callable(mechanism.noise_multiplier):
            mechanism = mechanism.with_noise_multiplier(
                schedules.fixed(mechanism.noise_multiplier)
            )
        checked = {
            "mechanism": mechanism,
            "clients_per_round": schedules.checked(
                schedules.fixed(self.clients_per_round),
                _validate.positive,
                "clients_per_round",
            ),
            "delta": None
            if self.delta is None
            else _validate.inside_unit_interval(delta=self.delta),
            "on_client_failure": _failure_rule(self.on_client_failure, mechanism),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        client_weighting.check(self.client_weighting, mechanism)
        if None not in (self.client_weighting, self.secure_aggregation):
            raise ValueError(
                "client_weighting must be None with secure_aggregation, whose "
                "members all count the same, got "
                f"{self.client_weighting!r}."
            )
        mechanism.check(
            Deployment(clients_per_round=self.clients_per_round, sampling=self.sampling)
        )

    def for_server(self, mechanism: Mechanism, optimizer: Any) -> TrainingSetup:
        """Returns the setup with a mechanism that suits the server's optimizer.

        Args:
          mechanism: The one that was given.
          optimizer: A Keras optimizer; None where the mean is added.
        """
        momentum = 0.0
        if optimizer is not None:
            momentum = keras_versions.momentum(optimizer)
        charged = None if self.target is None else self.target.rounds
        return dataclasses.replace(
            self, mechanism=mechanism.for_server(momentum, charged)
        )

    def check_seed(self, seed: int) -> None:
        """Raises ValueError if no seed may be given."""
        if self.noise_generator != noise.PHILOX:
            raise ValueError(
                "seed must be None with noise_generator="
                f"{self.noise_generator!r}, whose keys are the operating "
                f"system's and nobody else's, got {seed!r}."
            )

    @property
    def aborts_on_failure(self) -> bool:
        """Whether a round in which somebody's data fails is abandoned."""
        return self.on_client_failure == "abort"


def _check_generator(
    generator: str, mechanism: Mechanism, secure_aggregation: Any
) -> None:
    _validate.one_of(noise.GENERATORS, noise_generator=generator)
    if generator == noise.EXACT:
        if type(mechanism) is not FixedClipping or mechanism.noise_site != "server":
            raise ValueError(
                "noise_generator='exact' needs FixedClipping with noise_site="
                f"'server', got {mechanism.name} with noise_site="
                f"{mechanism.noise_site!r}."
            )
        if secure_aggregation is not None:
            raise ValueError(
                "secure_aggregation must be None with noise_generator='exact', "
                f"whose grid is its own, got {secure_aggregation!r}."
            )
    if generator != noise.PHILOX and mechanism.draws_noise_itself:
        raise ValueError(
            f"noise_generator must be {noise.PHILOX!r} with {mechanism.name}, "
            "whose query draws the noise from TensorFlow's own random numbers, "
            f"got {generator!r}."
        )


def _check_protocol(protocol: Any) -> None:
    if protocol is None:
        return
    _validate.instance_of(AdditiveSecretSharing, secure_aggregation=protocol)
    if protocol.max_share_value < 1:
        raise ValueError(
            "secure_aggregation must have a max_share_value of at least 1, "
            "which is what a client counts and hands in as well, got "
            f"{protocol.max_share_value:g}."
        )


def _failure_rule(rule: str | None, mechanism: Mechanism) -> str:
    if rule is None:
        return "abort" if mechanism.needs_exact_cohort else "exclude"
    _validate.one_of(FAILURE_RULES, on_client_failure=rule)
    if rule == "exclude" and mechanism.needs_exact_cohort:
        raise ValueError(
            "on_client_failure must be 'abort' with noise_site='client', "
            "because without one client's share the noise falls short, "
            "got 'exclude'."
        )
    return rule


def check_model(model: Any) -> None:
    """Raises unless a model can be trained as it is."""
    keras_versions.check_installed()
    _validate.instance_of(tf.keras.Model, model=model)
    trainer.check_model(model)
    if not model.built:
        raise ValueError(
            "model must be built: give its first layer an input shape or "
            f"call it on a batch, got {model.name!r} without weights."
        )
    if not model.trainable_variables:
        raise ValueError(
            f"model must have trainable variables, got {model.name!r} with none."
        )
