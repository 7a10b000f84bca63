"""What one client does in a round: train a replica on its own batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.engine import labels, layers, replicas
from tfdp_fl.mechanisms import noise

UploadHook = Callable[[list[tf.Tensor]], list[tf.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How every client trains, whatever its data.

    Attributes:
      optimizer: A Keras optimizer; each client starts with fresh slots.
      loss: What Keras's `compile` takes as `loss`.
      metrics: What Keras's `compile` takes as `metrics`.
      loss_weights: What Keras's `compile` takes as `loss_weights`.
      proximal_weight: mu of the term (mu/2) ||w - w_received||^2 that is added
        to the loss (NbAFL, FedProx).
      grad_clip: Each step's gradient is scaled down to this L2 norm over all
        variables; not at all if it is 0 or less.
      upload_hook: Called on what the client hands to the mechanism (a list of
        tensors), before the mechanism clips it; or None.
    """

    optimizer: tf.keras.optimizers.Optimizer
    loss: Any
    metrics: Any = None
    loss_weights: Any = None
    proximal_weight: float = 0.0
    grad_clip: float = -1.0
    upload_hook: UploadHook | None = None


def has_rate_schedule(optimizer: Any) -> bool:
    """Returns True if the rate is a function of the optimizer's own steps."""
    return keras_versions.learning_rate(optimizer) is None


def is_plain_sgd(optimizer: Any) -> bool:
    """Returns True for w <- w - lr g with a fixed rate, and nothing else."""
    if type(optimizer) is not tf.keras.optimizers.SGD or has_rate_schedule(
        optimizer
    ):
        return False
    config = optimizer.get_config()
    extras = ("momentum", "nesterov", "weight_decay", "use_ema")
    limits = ("clipnorm", "global_clipnorm", "clipvalue")
    others = ("loss_scale_factor", "gradient_accumulation_steps")
    return not any(config.get(key) for key in extras) and all(
        config.get(key) is None for key in (*limits, *others)
    )


def copy_metric(metric: Any) -> Any:
    """Returns an independent metric, for Keras's `compile`."""
    if isinstance(metric, tf.keras.metrics.Metric):
        return type(metric).from_config(metric.get_config())
    return metric


class ClientOptimizer:
    """A Keras optimizer that starts afresh for every client.

    Only the slots that exist are reset; plain SGD has none, and updates the
    variables in place.
    """

    def __init__(
        self,
        optimizer: tf.keras.optimizers.Optimizer,
        variables: list[Any],
    ):
        """Makes the slots.

        Args:
          optimizer: Its configuration is used.
          variables: The model's own, as Keras has them.
        """
        keras_versions.check_optimizer(optimizer)
        self._owned = list(variables)
        self._variables = keras_versions.tf_variables(variables)
        self._plain_sgd = is_plain_sgd(optimizer) and not any(
            # Keras's optimizers see to it that it holds.
            getattr(variable, "constraint", None) is not None
            for variable in variables
        )
        self._optimizer = type(optimizer).from_config(optimizer.get_config())
        self._has_fixed_rate = not has_rate_schedule(optimizer)
        self._slots: list[tuple[tf.Variable, np.ndarray | None]] = []
        if not self._plain_sgd:
            with tf.init_scope():
                self._build()

    def _build(self) -> None:
        state = keras_versions.build_optimizer(self._optimizer, self._owned)
        rate = self.learning_rate_variable
        for variable in state:
            if variable is rate:
                continue
            value = variable.numpy()
            self._slots.append((variable, value if value.any() else None))

    @property
    def learning_rate_variable(self) -> tf.Variable | None:
        """Returns the variable that holds the rate, None if it has none."""
        rate = keras_versions.learning_rate(self._optimizer)
        return rate if isinstance(rate, tf.Variable) else None

    @property
    def assigned_variables(self) -> list[tf.Variable]:
        """Returns what `start` assigns."""
        slots = [variable for variable, _ in self._slots]
        if self._plain_sgd or not self._has_fixed_rate:
            return slots
        rate = self.learning_rate_variable
        return slots if rate is None else [*slots, rate]

    def start(self, learning_rate: tf.Tensor) -> None:
        """Resets the slots for a new client."""
        for variable, initial in self._slots:
            variable.assign(
                tf.zeros_like(variable)
                if initial is None
                else tf.constant(initial)
            )
        if self._plain_sgd or not self._has_fixed_rate:
            return
        if self.learning_rate_variable is not None:
            self.learning_rate_variable.assign(learning_rate)

    def apply(self, gradients: list[Any], learning_rate: tf.Tensor) -> None:
        """Takes one step on the variables."""
        if not self._plain_sgd:
            given = [
                (gradient, variable)
                for gradient, variable in zip(
                    gradients, self._owned, strict=True
                )
                if gradient is not None
            ]
            if given:
                keras_versions.apply_gradients(
                    self._optimizer, *map(list, zip(*given, strict=True))
                )
            return
        for gradient, variable in zip(gradients, self._variables, strict=True):
            if gradient is None:
                continue
            rate = tf.cast(learning_rate, variable.dtype)
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(
                    tf.IndexedSlices(rate * gradient.values, gradient.indices)
                )
            else:
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=variable.handle, alpha=rate, delta=gradient
                )


class ClientTrainer:
    """Trains one client after the other in a replica of the model.

    Attributes:
      variables: The replica's variables that a client's record is about: the
        trainable ones, then the aggregated non-trainable ones (such as the
        moving statistics of batch normalization). The mechanism treats them
        alike: clipped together, noised together.
      metric_variables: The state of the compiled metrics.
      label_ranges: What class labels may be (see `labels.ranges`).
    """

    def __init__(
        self,
        model: tf.keras.Model,
        training: LocalTraining,
        element_spec: tuple[Any, Any],
        aggregate_non_trainable: bool,
    ):
        """Prepares a replica for training.

        Args:
          model: A replica, whose variables may be overwritten.
          training: How to train.
          element_spec: `(features, labels)`, nests of `tf.TensorSpec` of one
            example.
          aggregate_non_trainable: Whether non-trainable state that training
            changes leaves the client, in the same record as the weights.
        """
        if type(model).train_step is not tf.keras.Model.train_step:
            raise ValueError(
                "model must not have a train_step of its own, which the "
                "compiled client training would not call, got "
                f"{type(model).__name__}.train_step."
            )
        self._model = model
        self._training = training
        self._random_state = keras_versions.own_random_state(model)
        layers.use_fast_layers(model)
        self._trainable = keras_versions.tf_variables(model.trainable_weights)
        self._aggregated = []
        if aggregate_non_trainable:
            self._aggregated = replicas.changed_by_training(
                model, element_spec[0]
            )
        # Frozen weights and adapted constants are the server's, too.
        heard = {id(variable) for variable in self._aggregated}
        self._restored = [
            variable
            for variable in keras_versions.tf_variables(
                model.non_trainable_weights
            )
            if id(variable) not in heard
        ]
        self.variables = self._trainable + self._aggregated
        self._optimizer = ClientOptimizer(
            training.optimizer, model.trainable_weights
        )
        self._build_loss(element_spec)

    def _build_loss(self, element_spec: tuple[Any, Any]) -> None:
        training, model = self._training, self._model
        self._compiled = compiled = keras_versions.CompiledModel(
            model,
            training.loss,
            tf.nest.map_structure(copy_metric, training.metrics),
            training.loss_weights,
        )
        x, y = (replicas.zeros_like_batch(spec) for spec in element_spec)
        predicted = model(x, training=False)
        labels.check(y, predicted, compiled)
        self.label_ranges = labels.ranges(y, predicted, compiled)
        compiled.build(x, y, predicted)
        losses = [loss for *_, loss in compiled.outputs(y, predicted)]
        self._single_loss = None
        if (
            len(losses) == 1
            and training.loss_weights is None
            and type(model).compute_loss is tf.keras.Model.compute_loss
        ):
            self._single_loss = losses[0]
        self.metric_variables = compiled.metric_variables

    def start_metrics(self) -> None:
        """Empties the metrics."""
        for variable in (*self.metric_variables, *self._compiled.scratch):
            variable.assign(tf.zeros_like(variable))

    def metric_values(self) -> list[tf.Tensor]:
        """Returns the values of `metric_variables`."""
        return [variable.read_value() for variable in self.metric_variables]

    def update_metrics(
        self, y: Any, predicted: Any, numbers_only: bool = True
    ) -> None:
        """Adds a batch to the metrics.

        Args:
          y: Nest of labels.
          predicted: Nest of the model's outputs.
          numbers_only: Whether a NaN among them counts as 0, as it would make
            a NaN of the metrics.
        """
        if not self.metric_variables:
            return
        if numbers_only:
            y, predicted = tf.nest.map_structure(
                _with_numbers_only, (y, predicted)
            )
        self._compiled.update_metrics(y, predicted)

    def metric_results(self, values: list[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns what the compiled metrics say of a summed state.

        Args:
          values: Values for `metric_variables`, summed over replicas.
        """
        for variable, value in zip(self.metric_variables, values, strict=True):
            variable.assign(value)
        return self._compiled.metric_results()

    @property
    def has_generators(self) -> bool:
        """Returns True if local training draws random numbers."""
        return bool(self._random_state)

    @property
    def replica_state(self) -> list[tf.Variable]:
        """Returns the non-trainable variables in which no client is heard."""
        return self._restored

    @property
    def assigned_variables(self) -> list[tf.Variable]:
        """Returns what is assigned for every client before it is read."""
        return [
            *self.variables,
            *self._restored,
            *self.metric_variables,
            *self._compiled.scratch,
            *self._optimizer.assigned_variables,
            *self._random_state,
        ]

    @property
    def noted_variables(self) -> list[tf.Variable]:
        """Returns what is written while training, and never read."""
        return list(self._compiled.noted)

    def start(
        self,
        weights: list[tf.Tensor],
        unheard: list[tf.Tensor],
        learning_rate: tf.Tensor,
        seed: tf.Tensor,
    ) -> None:
        """Puts the replica in the state in which a client receives it.

        Args:
          weights: The server's values of `variables`.
          unheard: The server's values of `replica_state`.
          learning_rate: Float32 scalar.
          seed: Int64 [2], new for every client of every round.
        """
        for variable, value in zip(self.variables, weights, strict=True):
            variable.assign(value)
        for variable, value in zip(self._restored, unheard, strict=True):
            variable.assign(value)
        self._optimizer.start(learning_rate)
        for number, state in enumerate(self._random_state):
            # A fold_in mixes its data in with the next one only.
            key = noise.fold_in(noise.fold_in(seed, 1 + number), 0)[0]
            state.assign(keras_versions.random_state(key))

    def step(
        self,
        x: Any,
        y: Any,
        weights: list[tf.Tensor],
        learning_rate: tf.Tensor,
    ) -> tf.Tensor:
        """Takes one step on one batch; returns its loss (float32 scalar)."""
        training = self._training
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._trainable)
            predicted = self._model(x, training=True)
            loss = self._loss(x, y, predicted)
        gradients = tape.gradient(loss, self._trainable)
        if training.proximal_weight:
            gradients = [
                _plus(
                    gradient,
                    training.proximal_weight * (variable - start),
                )
                for gradient, variable, start in zip(
                    gradients, self._trainable, weights, strict=False
                )
            ]
        if training.grad_clip > 0:
            gradients, _ = tf.clip_by_global_norm(
                [_dense(gradient) for gradient in gradients],
                training.grad_clip,
            )
        self._optimizer.apply(gradients, learning_rate)
        self.update_metrics(y, predicted)
        if loss.shape.rank:  # A loss without reduction: Keras sums gradients.
            loss = tf.reduce_mean(loss)
        return tf.cast(loss, tf.float32)

    def _loss(self, x: Any, y: Any, predicted: Any) -> tf.Tensor:
        masked = any(
            getattr(output, "_keras_mask", None) is not None
            for output in tf.nest.flatten(predicted)
        )
        if self._single_loss is None or masked:
            return self._compiled.compute_loss(x, y, predicted)
        (label,), (output,) = tf.nest.flatten(y), tf.nest.flatten(predicted)
        loss = self.loss_of_outputs(label, output)
        for extra in self._model.losses:
            loss += tf.reduce_sum(tf.cast(extra, loss.dtype))
        return loss

    def loss_of_outputs(self, label: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
        """Returns the loss of a model with one output, without extra terms."""
        return keras_versions.call_loss(self._single_loss, label, output)

    def losses_of_rows(self, label: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
        """Returns each row's loss, float32 [n], of which the loss is the mean.

        Only for losses of which `separable` says so.

        Args:
          label: [n, ...].
          output: [n, c], of a model with one output.
        """
        return keras_versions.losses_of_rows(self._single_loss, label, output)

    def update(self, weights: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns Delta = w - w_received, what the client's training did."""
        return self._hooked(
            [
                for_record(variable) - for_record(value)
                for variable, value in zip(self.variables, weights, strict=True)
            ]
        )

    def weights(self) -> list[tf.Tensor]:
        """Returns the client's weights, for mechanisms that release them."""
        return self._hooked([for_record(each) for each in self.variables])

    def _hooked(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if self._training.upload_hook is None:
            return tensors
        return list(self._training.upload_hook(tensors))


def for_record(value: tf.Tensor | tf.Variable) -> tf.Tensor:
    """Returns a weight's value as a client hands it in: float32 or float64.

    Clipped, added up or noised with fewer bits, it would be rounded by more
    than a clip may be.
    """
    value = tf.convert_to_tensor(value)
    return value if value.dtype.size >= 4 else tf.cast(value, tf.float32)


def _with_numbers_only(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with 0 for NaN and Inf, and the mask that it had."""
    if not tensor.dtype.is_floating:
        return tensor
    numbers = tf.where(
        tf.math.is_finite(tensor), tensor, tf.zeros([], tensor.dtype)
    )
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        numbers._keras_mask = mask
    return numbers


def _dense(gradient: Any) -> tf.Tensor | None:
    """Adds up repeated rows, without which a norm would not be the norm."""
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _plus(gradient: Any, extra: tf.Tensor) -> tf.Tensor:
    return extra if gradient is None else _dense(gradient) + extra
