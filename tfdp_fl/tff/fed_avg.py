"""Federated averaging with a mechanism, as a TFF learning process.

NbAFL (Wei et al. 2020, Algorithm 1) is different: the server sends noisy weights, the
clients send noisy weights, and the server averages them. `NbAFLFactory` adds both kinds
of noise. The noise before broadcast is drawn when the weights are made, so that anyone
who sees the weights sees the same ones.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdp_fl import _validate, sampling, schedules
from tfdp_fl.engine import allowed_operations
from tfdp_fl.mechanisms import contribution
from tfdp_fl.mechanisms import mechanism as mechanism_lib
from tfdp_fl.mechanisms.nbafl import NbAFL
from tfdp_fl.terms import Json
from tfdp_fl.tff import mechanism_factory, privacy
from tfdp_fl.tff import state as state_lib

if TYPE_CHECKING:
    from tfdp_fl.datasets.nests import Nest

# A function that builds a new `VariableModel`, or a `FunctionalModel`.
ModelFn: TypeAlias = (
    Callable[[], tff.learning.models.VariableModel]
    | tff.learning.models.FunctionalModel
)


class DPLearningProcess(tff.learning.templates.LearningProcess):
    """A `tff.learning.templates.LearningProcess` with a privacy guarantee.

    Attributes:
      mechanism: The mechanism, which defines each round's release and cost.
      context: What the mechanism may know about the run, as far as it was given.
    """

    def __init__(
        self,
        process: tff.learning.templates.LearningProcess,
        mechanism: mechanism_lib.Mechanism,
        context: contribution.PrivacyContext,
    ):
        """Extends a process, with the same computations.

        Args:
          process: The learning process to extend.
          mechanism: The mechanism that aggregates in it.
          context: What the mechanism may know about the run.
        """
        super().__init__(
            process.initialize,
            process.next,
            process.get_model_weights,
            process.set_model_weights,
            get_hparams_fn=process.get_hparams,
            set_hparams_fn=process.set_hparams,
        )
        self.mechanism = mechanism
        self.context = context

    def with_cohort(
        self, state: state_lib.ServerState, cohort: sampling.Cohort
    ) -> state_lib.ServerState:
        """Returns a state that records the cohort of its next round.

        See `tfdp_fl.aggregators.with_cohort`.

        Args:
          state: A state of this process.
          cohort: A cohort drawn by a sampler of `tfdp_fl.sampling`.

        Raises:
          ValueError: The sampling differs from that for which the process was built.
          RuntimeError: It cannot be this state's next cohort.
        """
        _validate.instance_of(sampling.Cohort, cohort=cohort)
        for name in ("sampling", "num_clients"):
            built_with = getattr(self.context, name)
            drawn_with = getattr(cohort.participation, name)
            if built_with not in (None, drawn_with):
                raise ValueError(
                    f"cohort must be drawn with the {name} that the process was built "
                    f"with, {built_with!r}, got {drawn_with!r}."
                )
        return state_lib.with_cohort(state, cohort)

    def epsilon(
        self,
        state: state_lib.ServerState,
        *,
        delta: float,
        accountant: str = "rdp",
        **declared: Any,
    ) -> privacy.Epsilon:
        """Returns the epsilon of a state's rounds (see `tfdp_fl.learning.epsilon`).

        Args:
          state: A state of this process.
          delta: In (0, 1).
          accountant: "rdp" or "pld".
          **declared: `sampling`, `num_clients` and `max_participations`, unless the
            process was built with them.
        """
        for name in ("sampling", "num_clients", "max_participations"):
            built_with = getattr(self.context, name)
            if declared.setdefault(name, built_with) is None:
                declared[name] = built_with
            if built_with not in (None, declared[name]):
                raise ValueError(
                    f"{name} must be what the process was built with, "
                    f"{built_with!r}, got {declared[name]!r}."
                )
            if declared[name] is None and name != "max_participations":
                raise ValueError(
                    f"{name} must be given here or to build_dp_fed_avg: "
                    "epsilon depends on it, and TFF does not know it."
                )
        return privacy.epsilon(
            state,
            self.mechanism,
            clients_per_round=self.context.clients_per_round,
            delta=delta,
            accountant=accountant,
            rounds=self.context.rounds,
            **declared,
        )

    def privacy_statement(
        self,
        state: state_lib.ServerState,
        *,
        delta: float,
        format: str = "text",
        **declared: Any,
    ) -> str | Json:
        """Returns the privacy statement for a state's rounds.

        Args:
          state: A state of this process.
          delta: In (0, 1).
          format: "text" or "dict".
          **declared: The other arguments of `epsilon`.
        """
        return self.epsilon(state, delta=delta, **declared).to_statement(format)


def build_dp_fed_avg(
    model_fn: ModelFn,
    mechanism: mechanism_lib.Mechanism,
    clients_per_round: schedules.Schedule,
    client_optimizer_fn: tff.learning.optimizers.Optimizer,
    server_optimizer_fn: tff.learning.optimizers.Optimizer | None = None,
    *,
    local_epochs: int = 1,
    inner_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    scalars_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    sampling: str | None = None,
    num_clients: int | None = None,
    rounds: int | None = None,
    max_participations: int | None = None,
    min_examples: int | None = None,
) -> DPLearningProcess:
    """Returns a federated averaging process that aggregates with a mechanism.

    Every client has the same weight. With `NoPrivacy`, or with a clip that no update
    reaches and no noise, it equals `tff.learning.algorithms.
    build_unweighted_fed_avg`.

    With `NbAFL`, clients send their weights: the proximal term is in the local
    training, the noise before broadcast is in the aggregation, and there is no server
    optimizer. A data set must contain each of its examples once (use `local_epochs`,
    not `repeat`), because the noise depends on the number of examples.

    The training metrics are sums over the cohort without noise, which the guarantee
    does not cover. It also does not cover the measurements of the aggregation (see
    `MechanismFactory`), or the parts of the state other than the model.

    Args:
      model_fn: A function without arguments that returns a new
        `tff.learning.models.VariableModel` (such as
        `tff.learning.models.from_keras_model`), or a `FunctionalModel`.
      mechanism: Any mechanism. `AdaptiveLocalDP` runs with empty windows,
        because TFF's clients have no memory.
      clients_per_round: m, the expected cohort size: a number, a sequence with
        one value per round, or (with `rounds`) a callable of the round.
      client_optimizer_fn: A `tff.learning.optimizers.Optimizer`.
      server_optimizer_fn: The same for the server; None: SGD with learning
        rate 1, which adds the mean update.
      local_epochs: How often each client goes through its data set.
      inner_factory: Sums the updates (see `MechanismFactory`).
      scalars_factory: Sums the other numbers (see `MechanismFactory`).
      sampling: How the cohorts are drawn ("poisson", "fixed_size",
        "random_allocation" or "shuffled"), if already known; `epsilon` needs it.
      num_clients: The population N, if already known; `epsilon` needs it.
      rounds: The planned number of rounds. Local mechanisms with a budget, NbAFL and
        callable schedules need it.
      max_participations: The maximum number of rounds of any client.
      min_examples: The smallest number of examples of any client (NbAFL).

    Returns:
      A process whose `epsilon(state, delta=...)` gives the guarantee so far.

    Raises:
      TypeError: An argument is of a wrong type.
      ValueError: The mechanism's guarantee does not hold in this setting, or it needs a
        fact that is not given; or a client's data could affect another client's
        update, for example through random numbers that follow from a seed.
    """
    optimizer = tff.learning.optimizers.Optimizer
    _validate.instance_of(mechanism_lib.Mechanism, mechanism=mechanism)
    _validate.instance_of(optimizer, client_optimizer_fn=client_optimizer_fn)
    if server_optimizer_fn is not None:
        _validate.instance_of(optimizer, server_optimizer_fn=server_optimizer_fn)
    local_epochs = _validate.positive_integer(local_epochs=local_epochs)
    options: Json = {
        "inner_factory": inner_factory,
        "scalars_factory": scalars_factory,
        "sampling": sampling,
        "num_clients": num_clients,
        "rounds": rounds,
        "max_participations": max_participations,
        "min_examples": min_examples,
    }
    initial_weights = _initial_weights(model_fn)
    _check_local_training(model_fn, client_optimizer_fn)
    weights_type = initial_weights.type_signature.result
    if isinstance(mechanism, NbAFL):
        if server_optimizer_fn is not None:
            raise ValueError(
                "server_optimizer_fn must be None with NbAFL, which replaces the "
                f"model, got {server_optimizer_fn!r}."
            )
        factory = mechanism_factory.WeightsFactory(
            mechanism, clients_per_round, **options
        )
        weighted = factory
        server_optimizer_fn = ReplacingOptimizer()
        if mechanism.proximal_weight > 0:
            client_optimizer_fn = ProximalOptimizer(
                client_optimizer_fn, mechanism.proximal_weight
            )
    else:
        factory = mechanism_factory.from_mechanism(
            mechanism, clients_per_round, **options
        )
        weighted = tff.aggregators.as_weighted_aggregator(factory)
    work = build_local_training(
        model_fn,
        client_optimizer_fn,
        as_weights=mechanism.releases_weights,
        local_epochs=local_epochs,
    )
    result_type = work.next.type_signature.result.result.member
    composed = tff.learning.templates.compose_learning_process(
        initial_weights,
        tff.learning.templates.build_broadcast_process(weights_type),
        work,
        weighted.create(result_type.update, result_type.update_weight),
        tff.learning.templates.build_apply_optimizer_finalizer(
            server_optimizer_fn or tff.learning.optimizers.build_sgdm(1.0), weights_type
        ),
    )
    return DPLearningProcess(composed, mechanism, factory.context)


def _initial_weights(model_fn: ModelFn) -> tff.Computation:
    """Returns a computation of the weights before the first round."""
    functional = isinstance(model_fn, tff.learning.models.FunctionalModel)
    if not functional and not callable(model_fn):
        raise TypeError(
            "model_fn must be a function without arguments, or a "
            f"tff.learning.models.FunctionalModel, got {model_fn!r}."
        )

    @tff.tensorflow.computation
    def initial_weights():
        if functional:
            return tff.learning.models.ModelWeights(
                *(
                    tuple(tf.convert_to_tensor(value) for value in values)
                    for values in model_fn.initial_weights
                )
            )
        model = model_fn()
        if not isinstance(model, tff.learning.models.VariableModel):
            raise TypeError(
                "model_fn must return a tff.learning.models.VariableModel "
                f"(wrap a Keras model with from_keras_model), got {type(model)}."
            )
        return tff.learning.models.ModelWeights.from_model(model)

    return initial_weights


def _check_local_training(
    model_fn: ModelFn, optimizer: tff.learning.optimizers.Optimizer
) -> None:
    """Raises ValueError if a client's data could affect another client's update.

    Training must consist of operations that keep no state for the next client
    (`engine.allowed_operations`).
    """
    models = tff.learning.models
    with tf.Graph().as_default():
        if isinstance(model_fn, models.FunctionalModel):
            model = models.model_from_functional(model_fn)
        else:
            model = model_fn()

        def take_step(batch):
            weights = tuple(model.trainable_variables)
            with tf.GradientTape() as tape:
                loss = model.forward_pass(batch, training=True).loss
            gradients = tape.gradient(loss, weights, unconnected_gradients="zero")
            values = tuple(map(tf.convert_to_tensor, weights))
            specs = tuple(map(tf.TensorSpec.from_tensor, values))
            return optimizer.next(optimizer.initialize(specs), values, gradients)

        traced = tf.function(take_step, autograph=False).get_concrete_function(
            model.input_spec
        )
    definition = traced.graph.as_graph_def()
    allowed_operations.check(definition, allow_list=allowed_operations.IN_TFF)


def build_local_training(
    model_fn: ModelFn,
    optimizer: tff.learning.optimizers.Optimizer,
    *,
    as_weights: bool,
    local_epochs: int,
) -> tff.learning.templates.ClientWorkProcess:
    """Returns TFF's local training, but with NaN as the result if training fails.

    TFF replaces an update with a NaN or an Inf by zero, and indicates this only by a
    weight of zero. As NaN, the mechanism discards, counts and reports it like any
    other failed update.

    Args:
      model_fn: A callable that returns a `VariableModel`, or a
        `FunctionalModel`.
      optimizer: The clients' optimizer.
      as_weights: Whether clients send the weights after training, with their number of
        examples, instead of the update.
      local_epochs: How often each client goes through its data set. The number of
        examples counts each example once.
    """
    templates, weighting = tff.learning.templates, tff.learning.ClientWeighting
    build, name = templates.build_model_delta_client_work, "model_fn"
    if isinstance(model_fn, tff.learning.models.FunctionalModel):
        build, name = templates.build_functional_model_delta_client_work, "model"
    work = build(
        **{name: model_fn},
        optimizer=optimizer,
        client_weighting=weighting.NUM_EXAMPLES if as_weights else weighting.UNIFORM,
        # This loop is faster on CPUs.
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
    )
    state_type, weights_type, data_type = work.next.type_signature.parameter
    result_type = work.next.type_signature.result.result.member

    @tff.tensorflow.computation(data_type.member)
    def repeat(dataset):
        return dataset.repeat(local_epochs)

    @tff.tensorflow.computation(weights_type.member, result_type)
    def finish(received, result):
        value, weight = result.update, result.update_weight  # w_received - w.
        if as_weights:
            start = tf.nest.flatten(received.trainable)
            value = tf.nest.map_structure(
                tf.subtract, tf.nest.pack_sequence_as(value, start), value
            )
            # TFF's weight counts the examples of every epoch.
            weight = tf.round(weight / local_epochs)
        usable = result.update_weight > 0
        return templates.ClientResult(
            update=tf.nest.map_structure(
                lambda part: tf.where(usable, part, np.nan * tf.ones_like(part)), value
            ),
            update_weight=weight,
        )

    @tff.federated_computation(state_type, weights_type, data_type)
    def next_fn(state, weights, client_data):
        if local_epochs > 1:
            client_data = tff.federated_map(repeat, client_data)
        output = work.next(state, weights, client_data)
        return tff.templates.MeasuredProcessOutput(
            state=output.state,
            result=tff.federated_map(finish, (weights, output.result)),
            measurements=output.measurements,
        )

    return templates.ClientWorkProcess(
        work.initialize,
        next_fn,
        get_hparams_fn=work.get_hparams,
        set_hparams_fn=work.set_hparams,
    )


class ReplacingOptimizer(tff.learning.optimizers.Optimizer):
    """Uses the aggregated weights (its "gradients") as the new weights."""

    def initialize(self, specs: Nest) -> tuple[()]:
        """Implements `Optimizer.initialize`."""
        del specs
        return ()

    def next(self, state: Nest, weights: Nest, gradients: Nest) -> tuple[Nest, Nest]:
        """Implements `Optimizer.next`."""
        del weights
        return state, gradients


class ProximalOptimizer(tff.learning.optimizers.Optimizer):
    """Adds the gradient of (mu/2) ||w - w_received||^2 before each step.

    Li et al. (2020), "Federated Optimization in Heterogeneous Networks",
    eq. (2); Wei et al. (2020), eq. (4). A client starts from what it received,
    so the weights of the first step are w_received.
    """

    def __init__(self, optimizer: tff.learning.optimizers.Optimizer, mu: float):
        """Wraps an optimizer; `mu` is the weight of the term, at least 0."""
        self._optimizer = optimizer
        self._mu = mu

    def initialize(self, specs: Nest) -> Nest:
        """Implements `Optimizer.initialize`."""
        return collections.OrderedDict(
            inner=self._optimizer.initialize(specs),
            started=tf.constant(False),
            received=tf.nest.map_structure(
                lambda spec: tf.zeros(spec.shape, spec.dtype), specs
            ),
        )

    def next(self, state: Nest, weights: Nest, gradients: Nest) -> tuple[Nest, Nest]:
        """Implements `Optimizer.next`."""
        received = tf.nest.map_structure(
            lambda initial, current: tf.where(state["started"], initial, current),
            state["received"],
            weights,
        )
        proximal_gradients = tf.nest.map_structure(
            lambda gradient, current, initial: (
                tf.convert_to_tensor(gradient)
                + tf.cast(self._mu, current.dtype) * (current - initial)
            ),
            gradients,
            weights,
            received,
        )
        inner, updated = self._optimizer.next(
            state["inner"], weights, proximal_gradients
        )
        new_state = collections.OrderedDict(
            inner=inner, started=tf.constant(True), received=received
        )
        return new_state, updated

    def get_hparams(self, state: Nest) -> Nest:
        """Implements `Optimizer.get_hparams`."""
        return self._optimizer.get_hparams(state["inner"])

    def set_hparams(self, state: Nest, hparams: Nest) -> Nest:
        """Implements `Optimizer.set_hparams`."""
        new_state = collections.OrderedDict(state)
        new_state["inner"] = self._optimizer.set_hparams(state["inner"], hparams)
        return new_state
