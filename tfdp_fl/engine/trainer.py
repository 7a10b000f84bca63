"""A client's training as a pure function of tensors, for models of Keras 3.

Weights, optimizer slots, seeds and metrics go in and come out as tensors: inside a
`keras.StatelessScope`, Keras reads and assigns these instead of its variables. The
user's own model is traced, and is left unchanged.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.datasets import nests
from tfdp_fl.engine import cohort, labels, layers, lookups, synthetic
from tfdp_fl.engine import metrics as metrics_lib
from tfdp_fl.mechanisms import noise

UploadHook = Callable[[list[tf.Tensor]], list[tf.Tensor]]
BroadcastHook = Callable[[list[tf.Tensor], tf.Tensor], list[tf.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """How every client trains, whatever its data, and how the server updates the model.

    Attributes:
      optimizer: A Keras optimizer; each client starts with fresh slots.
      loss: As in Keras's `compile`; None: only the losses that the model adds itself.
      metrics: As in Keras's `compile`.
      weighted_metrics: As in Keras's `compile`.
      loss_weights: As in Keras's `compile`.
      proximal_weight: mu; mu / 2 ||w - w_received||^2 is added to the loss (NbAFL,
        FedProx).
      grad_clip: Each step's gradient is scaled down to this L2 norm over all
        variables; 0 or less: no gradient clipping.
      upload_hook: Called on the client's upload (a list of tensors) before the
        mechanism clips it; or None.
      server_optimizer: A Keras optimizer; None for w <- w + mean.
      broadcast_hook: Called on the weights (a list of tensors) and the
        round's seed before they go to the clients; or None.
      jit_compile: Whether XLA compiles local training; None: no.
    """

    optimizer: tf.keras.optimizers.Optimizer
    loss: keras_versions.CompileArgument
    metrics: keras_versions.CompileArgument = None
    weighted_metrics: keras_versions.CompileArgument = None
    loss_weights: keras_versions.CompileArgument = None
    proximal_weight: float = 0.0
    grad_clip: float = -1.0
    upload_hook: UploadHook | None = None
    server_optimizer: tf.keras.optimizers.Optimizer | None = None
    broadcast_hook: BroadcastHook | None = None
    jit_compile: bool | None = None

    def __post_init__(self) -> None:
        """Records the metrics' initial values."""
        metrics_lib.record_initial_values((self.metrics, self.weighted_metrics))

    @property
    def learning_rate(self) -> float:
        """The clients' learning rate; 0 if the optimizer has a schedule."""
        rate = keras_versions.learning_rate(self.optimizer)
        return 0.0 if rate is None else float(rate)

    def set_learning_rate(self, value: float) -> None:
        """Sets the clients' learning rate, unless the optimizer has a schedule."""
        if keras_versions.learning_rate(self.optimizer) is not None:
            self.optimizer.learning_rate = value


class ClientState(NamedTuple):
    """Everything that changes while one client trains, as tensors.

    Attributes:
      values: Values of the variables in an update, of the model's other variables,
        and of its random generators' states.
      slots: Values of the optimizer's variables.
    """

    values: list[tf.Tensor]
    slots: list[tf.Tensor]


class Trainer:
    """A client's training as functions of tensors, without any state of its own.

    Attributes:
      model: The user's model.
      element_spec: `(features, labels)` specs of one example.
      aggregated: The model's variables that clients update: the trainable ones, then
        the non-trainable ones that training changes and clients upload (such as the
        moving statistics of batch normalization). The mechanism clips them together
        and adds noise to all of them.
      unaggregated: The model's other variables: frozen weights, adapted constants,
        and moving statistics if these stay at the server.
      non_negative_variables: Members of `aggregated` that training keeps at 0 or above.
      label_ranges: The allowed class labels (see `labels.ranges`).
      single_loss: The compiled loss of a model with one output, else None.
      metric_specs: Specs of the metrics' `MetricState`.
      lookups: The tables in which a client trains only the rows that it looks up.
    """

    metric_specs: cohort.MetricState
    lookups: tuple[lookups.Lookup, ...] = ()
    non_negative_variables: list[keras_versions.KerasVariable] = []  # noqa: RUF012

    def __init__(
        self,
        model: tf.keras.Model,
        training: Training,
        element_spec: nests.ElementSpec,
        aggregate_non_trainable: bool = True,
    ):
        """Checks that the model, the training and the examples are compatible.

        Args:
          model: A built Keras model, which is read and never changed.
          training: How to train.
          element_spec: `(features, labels)`, nests of `tf.TensorSpec` of one
            example.
          aggregate_non_trainable: Whether clients upload the non-trainable state that
            training changes, in the same update as the weights.

        Raises:
          ValueError: They are incompatible, or information could pass from one client
            to the next.
        """
        self.model = model
        self._training = training
        self.element_spec = element_spec
        self._trainable = list(model.trainable_weights)
        self._random_state = keras_versions.own_random_state(model)
        non_trainable = list(model.non_trainable_weights)
        every = (*self._trainable, *non_trainable, *self._random_state)
        own = [(variable, variable) for variable in every]
        x, y = map(zeros_like_batch, element_spec)
        with keras_versions.stateless(own) as scope:
            before = list(map(scope.get_current_value, non_trainable))
            predicted = model(x, training=True)
            after = map(scope.get_current_value, non_trainable)
            leave = [
                variable
                for variable, old, new in zip(non_trainable, before, after, strict=True)
                if new is not old
                and aggregate_non_trainable
                and tf.as_dtype(variable.dtype).is_floating
            ]
        leaving = {id(variable) for variable in leave}
        self.aggregated = self._trainable + leave
        self.non_negative_variables = synthetic.non_negative_variables(model, leave, x)
        self.unaggregated = [v for v in non_trainable if id(v) not in leaving]
        # In the order of a `ClientState`.
        self._variables = [*self.aggregated, *self.unaggregated, *self._random_state]
        self._optimizer = ClientOptimizer(training.optimizer, self._trainable)
        self._loss, compiled_metrics = keras_versions.compiled_loss_and_metrics(
            model,
            training.loss,
            training.metrics,
            training.loss_weights,
            training.weighted_metrics,
        )
        y, weight = nests.labels_and_weights(y)
        flat = tf.nest.flatten(y)
        places = tf.nest.pack_sequence_as(
            y, [keras_versions.LabelIndex.of(k, leaf) for k, leaf in enumerate(flat)]
        )
        outputs = keras_versions.labels_and_outputs(
            training.loss, self._loss, places, predicted
        )
        self.label_ranges = labels.ranges(flat, outputs)
        self.single_loss = outputs[0][2] if len(outputs) == 1 else None
        with keras_versions.stateless(own), keras_versions.losses_of(model, self._loss):
            try:
                if training.loss is None:  # The model's own losses are needed.
                    predicted = model(x, training=True)
                model._compute_loss(x, y, predicted, weight, training=True)
            except ValueError as error:
                if training.loss is not None:
                    raise
                raise ValueError(
                    "loss must be given for a model that has none of its own (by a "
                    f"layer's add_loss, or by compute_loss), got None: {error}"
                ) from error
        dtypes = {layer.compute_dtype for layer in keras_versions.layers_of(model)}
        if "float16" in dtypes:
            warnings.warn(
                "float16 trains here without loss scaling, so small gradients become "
                "zero: use mixed_bfloat16, which needs none.",
                RuntimeWarning,
                stacklevel=2,
            )
        kept = keras_versions.own_metrics(model)
        self._metrics = metrics_lib.Metrics(compiled_metrics, kept, y, predicted)
        self._metrics.find_merges(self._own_after, x, y, predicted, self.label_ranges)
        self.metric_specs = specs_of(self.no_metrics())
        metrics_lib.check(self.metric_results(self.no_metrics()))
        # Other optimizers may move a row with a zero gradient; a hook may move any row.
        if self._optimizer.is_plain and training.upload_hook is None:
            self.lookups = lookups.find(
                model,
                self._forward_and_loss,
                batch_specs(element_spec),
                self._trainable,
            )

    def _forward_and_loss(
        self, x: nests.Nest, y: nests.Nest, weights: list[tf.Tensor]
    ) -> None:
        """Computes the part of a step that precedes the gradients."""
        broadcast = self.current_broadcast()
        broadcast.weights[: len(weights)] = weights
        self.evaluate(broadcast, x, y, self.no_metrics(), training=True)

    def current_broadcast(self) -> cohort.Broadcast:
        """Returns the model as it is, as a broadcast outside any round."""
        return cohort.Broadcast(
            weights=keras_versions.tf_variables(self.aggregated),
            unaggregated=keras_versions.tf_variables(self.unaggregated),
            params=(),
            learning_rate=tf.zeros([]),
            seed=tf.zeros([2], tf.uint64),
            returns_bits=tf.constant(False),
        )

    def no_metrics(self) -> cohort.MetricState:
        """Returns the metrics' initial state."""
        return self._metrics.initial_state()

    def metric_results(self, values: cohort.MetricState) -> dict[str, tf.Tensor]:
        """Returns the metrics' results by name, computed from their state."""
        return self._metrics.results(values)

    def _own_after(
        self, own: list[tf.Tensor], x: nests.Nest, y: nests.Nest
    ) -> list[tf.Tensor]:
        """Returns the values of the model's own metrics after a batch."""
        broadcast = self.current_broadcast()
        state = self.start(broadcast, broadcast.seed)
        return self._forward(state, x, y, None, own=own)[3]

    def start(self, broadcast: cohort.Broadcast, seed: tf.Tensor) -> ClientState:
        """Returns the state in which every client of a round starts.

        Args:
          broadcast: What the server sends.
          seed: A seed as in `mechanisms.noise`, new for each client and round.
        """
        # The initial states of the model's random generators.
        seeds = [
            tf.cast(tf.stack([noise.integer(seed, 1 + number), 0]), variable.dtype)
            for number, variable in enumerate(self._random_state)
        ]
        return ClientState(
            [*broadcast.weights, *broadcast.unaggregated, *seeds],
            self._optimizer.start(broadcast.learning_rate),
        )

    def step(
        self,
        state: ClientState,
        x: nests.Nest,
        y: nests.Nest,
        broadcast: cohort.Broadcast,
        metrics: cohort.MetricState,
    ) -> tuple[ClientState, tf.Tensor, cohort.MetricState]:
        """Takes one step on one batch.

        Args:
          state: The client's state.
          x: Nest of features.
          y: Nest of labels, perhaps with weights beside them.
          broadcast: The broadcast that the client started from.
          metrics: The metrics' state.

        Returns:
          The client's next state, the batch's loss (float32 scalar), and the
          metrics' next state.
        """
        training, count = self._training, len(self.model.trainable_weights)
        y, weight = nests.labels_and_weights(y)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            trainable = state.values[:count]
            tape.watch(trainable)
            loss, predicted, after, own = self._forward(state, x, y, weight)
        for variable, old, new in zip(self.aggregated, trainable, after, strict=False):
            if new is not old:
                raise ValueError(
                    "model must not have a layer that assigns a weight that it trains "
                    f"(as SpectralNormalization does), got {variable.path!r} assigned."
                )
        gradients = tape.gradient(loss, trainable)
        if training.proximal_weight:
            gradients = [
                _plus(gradient, training.proximal_weight * (value - start))
                for gradient, value, start in zip(
                    gradients, trainable, broadcast.weights, strict=False
                )
            ]
        if training.grad_clip > 0:
            gradients, _ = tf.clip_by_global_norm(
                [_dense(gradient) for gradient in gradients], training.grad_clip
            )
        trainable, slots = self._optimizer.apply(
            gradients, trainable, state.slots, broadcast.learning_rate
        )
        state = ClientState([*trainable, *after[count:]], slots)
        metrics = self.with_batch(metrics, y, predicted, weight, own)
        if loss.shape.rank:  # A loss without reduction: Keras sums the gradients.
            loss = tf.reduce_mean(loss)
        return state, tf.cast(loss, tf.float32), metrics

    def evaluate(
        self,
        broadcast: cohort.Broadcast,
        x: nests.Nest,
        y: nests.Nest,
        metrics: cohort.MetricState,
        training: bool = False,
    ) -> tuple[tf.Tensor, cohort.MetricState]:
        """Returns the loss on a batch and the metrics' next state.

        Args:
          broadcast: The weights to evaluate.
          x: Nest of features.
          y: Nest of labels, perhaps with weights beside them.
          metrics: The metrics' state.
          training: Whether layers behave as in training.
        """
        y, weight = nests.labels_and_weights(y)
        state = self.start(broadcast, broadcast.seed)
        loss, predicted, _, own = self._forward(state, x, y, weight, training)
        metrics = self.with_batch(metrics, y, predicted, weight, own)
        return tf.cast(tf.reduce_mean(loss), tf.float32), metrics

    def _forward(
        self,
        state: ClientState,
        x: nests.Nest,
        y: nests.Nest,
        weight: tf.Tensor | None,
        training: bool = True,
        own: list[tf.Tensor] | None = None,
    ) -> tuple[tf.Tensor, nests.Nest, list[tf.Tensor], list[tf.Tensor]]:
        """Returns the loss, the outputs, and the values left in the variables.

        The last of these, the model's own metrics, start from their initial values in
        every call. So a layer that reads one learns nothing about other clients.
        """
        mapping = list(zip(self._variables, state.values, strict=True))
        # Keras keeps means of the losses in order to show them.
        means = [] if self._loss is None else self._loss.variables
        mapping += [(v, tf.zeros(v.shape, v.dtype)) for v in means]
        kept = self._metrics.own_variables
        begin = self._metrics.own_initial_values() if own is None else own
        mapping += zip(kept, begin, strict=True)
        with (
            layers.fast(self.model),
            keras_versions.losses_of(self.model, self._loss),
            keras_versions.stateless(mapping) as scope,
        ):
            predicted = self.model(x, training=training)
            loss = self.model._compute_loss(x, y, predicted, weight, training=training)
        after = [scope.get_current_value(variable) for variable in self._variables]
        own = [tf.convert_to_tensor(scope.get_current_value(v)) for v in kept]
        return loss, predicted, after, own

    def with_batch(
        self,
        metrics: cohort.MetricState,
        y: nests.Nest,
        predicted: nests.Nest,
        weight: tf.Tensor | None = None,
        own: list[tf.Tensor] | None = None,
    ) -> cohort.MetricState:
        """Returns the metrics' state updated with a batch; a NaN counts as 0.

        Args:
          metrics: The metrics' state.
          y: Nest of labels.
          predicted: Nest of the model's outputs.
          weight: The examples' weights in the weighted metrics; None: all equal.
          own: Values of the variables of the model's own metrics after the batch.
        """
        metrics = self._metrics.with_batch(metrics, y, predicted, weight)
        return metrics if own is None else self._metrics.with_own(metrics, own)

    def update(
        self,
        state: ClientState,
        start: list[tf.Tensor] | None,
        seed: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the client's upload, before the mechanism clips it.

        Args:
          state: The client's state after its last step.
          start: The weights that it started from; it then uploads its update,
            Delta = w - w_received. None: it uploads its weights w.
          seed: The client's seed, as in `start`.
        """

        def to_upload_dtype(value: tf.Tensor) -> tf.Tensor:
            return tf.cast(value, cohort.upload_dtype(value.dtype))

        tensors = list(map(to_upload_dtype, state.values[: len(self.aggregated)]))
        if start is not None:
            tensors = [
                tensor - to_upload_dtype(weights)
                for tensor, weights in zip(tensors, start, strict=True)
            ]
        hook = self._training.upload_hook
        if hook is None:
            return tensors
        with noise.use_seed(noise.fold_in(seed, -1)):
            return list(hook(tensors))


class ClientOptimizer:
    """A Keras optimizer as functions of tensors, new for every client."""

    def __init__(
        self, optimizer: tf.keras.optimizers.Optimizer, variables: list[tf.Variable]
    ):
        """Makes a copy that returns its updates instead of assigning them.

        Args:
          optimizer: The Keras optimizer, whose configuration is copied.
          variables: The Keras variables that it trains.
        """
        keras_versions.check_optimizer(optimizer)
        self._optimizer: tf.keras.optimizers.Optimizer | None = None
        constrained = any(
            getattr(variable, "constraint", None) is not None for variable in variables
        )
        if is_plain_sgd(optimizer) and not constrained:
            return
        self._optimizer = keras_versions.stateless_optimizer(optimizer, variables)
        rate = keras_versions.learning_rate(self._optimizer)
        self._initial: list[np.ndarray | None] = [
            None if variable is rate else variable.numpy()
            for variable in keras_versions.tf_variables(self._optimizer.variables)
        ]

    @property
    def is_plain(self) -> bool:
        """Whether a step is w - lr g, and nothing else."""
        return self._optimizer is None

    def start(self, learning_rate: tf.Tensor) -> list[tf.Tensor]:
        """Returns the slots of a new client."""
        if self._optimizer is None:
            return []
        # Depends on an argument, as a constant would be stored in the function's graph.
        zero = learning_rate * 0.0
        return [
            learning_rate
            if value is None
            else tf.constant(value)
            if value.any() or value.size < 2
            else tf.fill(value.shape, tf.cast(zero, value.dtype))
            for value in self._initial
        ]

    def apply(
        self,
        gradients: list[tf.Tensor],
        weights: list[tf.Tensor],
        slots: list[tf.Tensor],
        learning_rate: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Takes one step on the weights whose gradient is not None.

        Returns:
          The weights and the slots after the step.
        """
        if all(gradient is None for gradient in gradients):
            return weights, slots
        if self._optimizer is not None:
            return self._optimizer.stateless_apply(
                slots, list(map(_dense, gradients)), weights
            )
        after = []
        for gradient, value in zip(gradients, weights, strict=True):
            rate = tf.cast(learning_rate, value.dtype)
            if isinstance(gradient, tf.IndexedSlices):
                value = tf.tensor_scatter_nd_sub(
                    value, gradient.indices[:, None], rate * gradient.values
                )
            elif gradient is not None:
                value = value - rate * gradient
            after.append(value)
        return after, slots


def is_plain_sgd(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    """Returns True if a step is w <- w - lr g at a fixed rate, and nothing else."""
    if (
        type(optimizer) is not tf.keras.optimizers.SGD
        or keras_versions.learning_rate(optimizer) is None
    ):
        return False
    config = optimizer.get_config()
    extras = ("momentum", "nesterov", "weight_decay", "use_ema")
    limits = ("clipnorm", "global_clipnorm", "clipvalue")
    return not any(config.get(key) for key in (*extras, *limits))


def check_model(model: tf.keras.Model) -> None:
    """Raises ValueError for a model with a custom train_step or stateful layers."""
    if type(model).train_step is not tf.keras.Model.train_step:
        raise ValueError(
            "model must not have a train_step of its own, which the compiled "
            f"client training would not call, got {type(model).__name__}."
            "train_step: say what is trained by a loss, a layer's add_loss, an "
            "optimizer or compile(upload_hook=...)."
        )
    for layer in keras_versions.layers_of(model):
        if getattr(layer, "stateful", False) and hasattr(layer, "states"):
            raise ValueError(
                "model must not have stateful layers, whose state would pass "
                f"from one client to the next, got {layer.name!r} with "
                "stateful=True."
            )


def zeros_like_batch(element_spec: nests.Nest, batch_size: int = 1) -> nests.Nest:
    """Returns a nest of zeros with the shapes of a batch of examples."""
    return tf.nest.map_structure(
        lambda spec: tf.zeros([batch_size, *spec.shape], spec.dtype), element_spec
    )


def specs_of(nest: nests.Nest) -> nests.Nest:
    """Returns the specs of a nest of tensors or variables."""
    return tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), nest
    )


def batch_specs(element_spec: nests.Nest) -> nests.Nest:
    """Returns the specs of a batch with any number of examples."""
    return tf.nest.map_structure(
        lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), element_spec
    )


def _dense(gradient: tf.Tensor) -> tf.Tensor | None:
    """Adds up repeated rows; otherwise the norm would be wrong."""
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _plus(gradient: tf.Tensor, extra: tf.Tensor) -> tf.Tensor:
    return extra if gradient is None else _dense(gradient) + extra
