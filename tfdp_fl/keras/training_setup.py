"""The settings of a `DPFederatedModel`, and checks of the arguments of `compile`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdp_fl import _validate, keras_versions, schedules
from tfdp_fl.accounting.charge import ACCOUNTANTS, SAMPLINGS
from tfdp_fl.engine import trainer
from tfdp_fl.mechanisms import (
    ClientWeighting,
    FixedClipping,
    Mechanism,
    PrivacyContext,
    noise,
)
from tfdp_fl.secure_aggregation import AdditiveSecretSharing
from tfdp_fl.terms import NoiseSite

# Names whose meaning in Keras depends on the shape of the output.
_AMBIGUOUS_METRICS, _AMBIGUOUS_LOSSES = ("accuracy", "acc"), ("crossentropy", "ce")
# Functions that make an object from a name, with examples of names.
_RESOLVERS = {
    "optimizer": (tf.keras.optimizers.get, "'sgd', 'adam'"),
    "loss": (tf.keras.losses.get, "'sparse_categorical_crossentropy'"),
    "metrics": (tf.keras.metrics.get, "'accuracy', 'mean_squared_error'"),
}

_RUNTIME = "runtime (which says where clients are trained)"
_COMPILED = "nothing: TensorFlow compiles the training of a whole cohort"
_MODEL = "it to DPFederatedModel(model, mechanism, clients_per_round, sampling=...)"
_PRIVATE = "it to make_private(model, target_epsilon=..., target_delta=...) before fit"
# Arguments of Keras's `fit` and `compile`, or that users expect there, and what to give
# instead.
_REPLACEMENTS = {
    "epochs": (
        "rounds (in each, a cohort of clients trains; local_epochs is the number of a "
        "client's passes over its examples in one round)"
    ),
    "initial_epoch": "resume_from (a directory that RoundCheckpoint wrote)",
    "steps_per_epoch": "rounds, and clients_per_round of the model",
    "validation_steps": "validation_data with as many batches",
    "class_weight": "sample_weight, with the weight of each example's class",
    "auto_scale_loss": "nothing: use mixed_bfloat16, which needs no loss scale",
    **dict.fromkeys(["max_queue_size", "use_multiprocessing", "workers"], _RUNTIME),
    **dict.fromkeys(["run_eagerly", "steps_per_execution"], _COMPILED),
    **dict.fromkeys(["target_epsilon", "target_delta"], _PRIVATE),
    **dict.fromkeys(["mechanism", "clients_per_round", "sampling"], _MODEL),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyTarget:
    """The plan that a model's noise was calibrated for.

    Attributes:
      epsilon: The largest epsilon that all rounds together may cost.
      delta: The delta at which epsilon is computed.
      accountant: "rdp" or "pld", with which the noise was calibrated.
      num_clients: The planned population, N.
      rounds: The planned number of rounds, T.
    """

    epsilon: float
    delta: float
    accountant: str
    num_clients: int
    rounds: int

    def __post_init__(self):
        _validate.positive(target_epsilon=self.epsilon)
        _validate.inside_unit_interval(target_delta=self.delta)
        _validate.one_of(ACCOUNTANTS, accountant=self.accountant)
        _validate.positive_integer(num_clients=self.num_clients)
        _validate.positive_integer(rounds=self.rounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How cohorts are drawn, what is released about them, and what is reported.

    The attributes are the checked arguments of `DPFederatedModel`. A callable schedule
    is called once per round, and the value that it returned is used and charged.
    """

    mechanism: Mechanism
    clients_per_round: schedules.Schedule
    sampling: str = "poisson"
    delta: float | None = None
    accountant: str = "rdp"
    on_client_failure: str | None = None
    non_trainable_state: str = "aggregate"
    secure_aggregation: AdditiveSecretSharing | None = None
    max_parallel_clients: int | None = None
    noise_generator: str = noise.PHILOX
    target: PrivacyTarget | None = None
    client_weighting: ClientWeighting | None = None

    def __post_init__(self) -> None:
        _validate.instance_of(Mechanism, mechanism=self.mechanism)
        _validate.one_of(SAMPLINGS, sampling=self.sampling)
        _validate.one_of(ACCOUNTANTS, accountant=self.accountant)
        _validate.one_of(
            ("aggregate", "keep"), non_trainable_state=self.non_trainable_state
        )
        if self.delta is not None:
            _validate.inside_unit_interval(delta=self.delta)
        if self.max_parallel_clients is not None:
            _validate.positive_integer(max_parallel_clients=self.max_parallel_clients)
        if self.target is not None:
            _validate.instance_of(PrivacyTarget, target=self.target)
        mechanism = self.mechanism
        self._check_generator()
        self._check_protocol()
        sizes = schedules.check_schedule(
            self.clients_per_round, _validate.positive, "clients_per_round"
        )
        object.__setattr__(self, "clients_per_round", sizes)
        object.__setattr__(self, "on_client_failure", self._failure_rule())
        mechanism.check_weighting(self.client_weighting)
        mechanism.check(
            PrivacyContext(
                clients_per_round=self.clients_per_round, sampling=self.sampling
            )
        )

    def _check_generator(self) -> None:
        generator, mechanism = self.noise_generator, self.mechanism
        _validate.one_of(noise.GENERATORS, noise_generator=generator)
        if generator == noise.EXACT and (
            type(mechanism) is not FixedClipping
            or mechanism.noise_site != NoiseSite.SERVER
        ):
            raise ValueError(
                "noise_generator='exact' needs FixedClipping with noise_site='server', "
                f"got {mechanism.name} with noise_site={mechanism.noise_site!r}."
            )
        if generator == noise.EXACT and self.secure_aggregation is not None:
            raise ValueError(
                "secure_aggregation must be None with noise_generator='exact', which "
                f"has its own grid, got {self.secure_aggregation!r}."
            )

    def _check_protocol(self) -> None:
        protocol = self.secure_aggregation
        if protocol is None:
            return
        _validate.exactly(AdditiveSecretSharing, secure_aggregation=protocol)
        if protocol.max_share_value < 1:
            raise ValueError(
                "secure_aggregation must have a max_share_value of at least 1, because "
                "each client also sends its weight of 1, got "
                f"{protocol.max_share_value:g}."
            )
        if self.client_weighting is not None:
            raise ValueError(
                "client_weighting must be None with secure_aggregation, whose members "
                f"all have the same weight, got {self.client_weighting!r}."
            )

    def _failure_rule(self) -> str:
        rule, exact = self.on_client_failure, self.mechanism.needs_exact_cohort
        if rule is None:
            return "abort" if exact else "exclude"
        _validate.one_of(("abort", "exclude"), on_client_failure=rule)
        if rule == "exclude" and exact:
            raise ValueError(
                "on_client_failure must be 'abort' with noise_site='client', because "
                "the noise needs every client's share, got 'exclude'."
            )
        return rule

    @property
    def abandons_on_failure(self) -> bool:
        """Whether a round is abandoned if a client's data fails."""
        return self.on_client_failure == "abort"

    @property
    def failures_spread(self) -> bool:
        """See the function `failures_spread`."""
        return failures_spread(
            self.mechanism, self.on_client_failure, self.secure_aggregation
        )


def failures_spread(
    mechanism: Mechanism,
    on_client_failure: str | None,
    secure_aggregation: AdditiveSecretSharing | None,
) -> bool:
    """Returns whether a client's update may be dropped because another client failed.

    An abandoned round loses its whole cohort. In secure aggregation, a failed client
    takes its group with it.
    """
    aborts = mechanism.needs_exact_cohort or on_client_failure == "abort"
    return aborts or secure_aggregation is not None


def refuse_arguments(method: str, names: Iterable[str]) -> None:
    """Raises TypeError for arguments that `fit` or `compile` does not accept."""
    for name in names:
        hint = f"; give {_REPLACEMENTS[name]}" if name in _REPLACEMENTS else ""
        raise TypeError(f"{method} takes no {name}{hint}.")


def resolve_argument(**given: Any) -> Any:
    """Resolves an argument as Keras's `compile` does, or raises ValueError."""
    ((argument, value),) = given.items()
    get, examples = _RESOLVERS[
        argument.removeprefix("server_").removeprefix("weighted_")
    ]
    resolved = None
    if value is not None:  # For None, Keras uses RMSprop, or nothing at all.
        with contextlib.suppress(TypeError, ValueError, KeyError):
            resolved = get(value)
    if resolved is None or isinstance(resolved, str):  # Keras 2 returns it unchanged.
        raise ValueError(
            f"{argument} must be one of Keras's own names (such as {examples}) or a "
            f"Keras object, got {value!r}."
        )
    return resolved


def check_names(**given: Any) -> None:
    """Raises ValueError for names for which Keras has no loss or metric."""
    for argument, nest in given.items():
        for name in tf.nest.flatten(nest):
            is_loss = argument == "loss"
            ambiguous = _AMBIGUOUS_LOSSES if is_loss else _AMBIGUOUS_METRICS
            if isinstance(name, str) and name.lower() not in ambiguous:
                resolve_argument(**{argument: name})


def check_model(model: tf.keras.Model) -> None:
    """Raises an error unless a model can be trained."""
    keras_versions.check_installed()
    _validate.instance_of(tf.keras.Model, model=model)
    trainer.check_model(model)
    if not model.built:
        raise ValueError(
            "model must be built: give its first layer an input shape, or call it on a "
            f"batch, got {model.name!r} without weights."
        )
    variables = keras_versions.tf_variables(model.variables)
    if any(isinstance(v, tf.distribute.DistributedValues) for v in variables):
        raise ValueError(
            "model must be built outside the scope of a tf.distribute.Strategy, got "
            f"{model.name!r}, whose weights are on several devices: threads, a GPU or "
            "Ray workers train its clients in parallel."
        )
    if not model.trainable_variables:
        raise ValueError(
            f"model must have trainable variables, got {model.name!r} with none."
        )


def validate(model: tf.keras.Model, *, strict: bool = False) -> list[str]:
    """Returns the reason why a model cannot be trained or protected, if any.

    It resembles Opacus's `ModuleValidator.validate`. `fit` finds problems that depend
    on the clients or the loss, before its first round.

    Args:
      model: A Keras model.
      strict: Whether to raise an error instead of returning the problem.

    Returns:
      The first problem, as a sentence; empty if none was found.

    Raises:
      ValueError: `strict`, and there is a problem.
    """
    try:
        check_model(model)
    except Exception as error:  # A layer's own code can raise any error.
        problem = f"{type(error).__name__}: {error}"
        if strict:
            raise ValueError(f"model cannot be trained: {problem}") from error
        return [problem]
    return []
