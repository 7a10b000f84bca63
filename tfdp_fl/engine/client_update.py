"""What one client does in a round: train a replica on its own batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.engine import (
    client_optimizer,
    cohort,
    example_weights,
    labels,
    layers,
    replicas,
)
from tfdp_fl.mechanisms import noise

UploadHook = Callable[[list[tf.Tensor]], list[tf.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How every client trains, whatever its data.

    Attributes:
      optimizer: A Keras optimizer; each client starts with fresh slots.
      loss: What Keras's `compile` takes as `loss`.
      metrics: What Keras's `compile` takes as `metrics`.
      weighted_metrics: What Keras's `compile` takes as `weighted_metrics`.
      loss_weights: What Keras's `compile` takes as `loss_weights`.
      class_weight: What each class counts in the loss, by its number, as
        Keras's `fit` takes it; those not named count 1.
      proximal_weight: Half of it times ||w - w_received||^2 is added to the
        loss (NbAFL, FedProx).
      grad_clip: Each step's gradient is scaled down to this L2 norm over all
        variables; not at all if it is 0 or less.
      upload_hook: Called on what the client hands to the mechanism (a list of
        tensors), before the mechanism clips it; or None.
    """

    optimizer: tf.keras.optimizers.Optimizer
    loss: Any
    metrics: Any = None
    weighted_metrics: Any = None
    loss_weights: Any = None
    class_weight: Mapping[int, float] | None = None
    proximal_weight: float = 0.0
    grad_clip: float = -1.0
    upload_hook: UploadHook | None = None


def _copied(metric: Any) -> Any:
    """Returns an independent metric, for Keras's `compile`."""
    if isinstance(metric, tf.keras.metrics.Metric):
        return type(metric).from_config(metric.get_config())
    return metric


def check_metrics(results: Mapping[str, Any]) -> None:
    """Raises ValueError, naming it, for a metric that is not one number."""
    for name, value in results.items():
        shape = tf.convert_to_tensor(value).shape
        if shape.rank != 0:
            raise ValueError(
                f"metrics must give one number each, got {name!r} of shape {shape}. "
                "Take an average (as F1Score does with average='macro'), or compute "
                "it after the training, by fed.model."
            )


class ClientTrainer:
    """Trains one client after the other in a replica of the model.

    Attributes:
      model: The replica.
      variables: The replica's variables that a client's update is about: the
        trainable ones, then the aggregated non-trainable ones (such as the
        moving statistics of batch normalization). The mechanism treats them
        alike: clipped together, noised together.
      unaggregated: Its other variables: frozen weights, adapted constants, and
        what the moving statistics are where they stay at the server.
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
            changes leaves the client, in the same update as the weights.
        """
        replicas.check_train_step(model)
        self.model = model
        self._training = training
        self._element_spec = element_spec
        self._random_state = keras_versions.own_random_state(model)
        layers.use_fast_layers(model)
        self._trainable = keras_versions.tf_variables(model.trainable_weights)
        aggregated = []
        if aggregate_non_trainable:
            aggregated = replicas.changed_by_training(model, element_spec[0])
        self.variables = self._trainable + aggregated
        ids = {id(variable) for variable in aggregated}
        self.unaggregated = [
            variable
            for variable in keras_versions.tf_variables(model.non_trainable_weights)
            if id(variable) not in ids
        ]
        self._optimizer = client_optimizer.ClientOptimizer(
            training.optimizer, model.trainable_weights
        )
        self._build_loss(element_spec)

    def _build_loss(self, element_spec: tuple[Any, Any]) -> None:
        training, model = self._training, self.model
        self._compiled = compiled = keras_versions.CompiledModel(
            model,
            training.loss,
            tf.nest.map_structure(_copied, training.metrics),
            training.loss_weights,
            tf.nest.map_structure(_copied, training.weighted_metrics),
        )
        x, y = (replicas.zeros_like_batch(spec) for spec in element_spec)
        predicted = model(x, training=False)
        example_weights.check(element_spec[1], predicted, training.class_weight)
        y, weight = self.labels_and_weights(y)
        labels.check(y, predicted, compiled)
        self.label_ranges = labels.ranges(y, predicted, compiled)
        compiled.build(x, y, predicted, weight)
        check_metrics(compiled.metric_results())
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
        for variable in self.metric_variables:
            variable.assign(tf.zeros_like(variable))

    def metric_values(self) -> list[tf.Tensor]:
        """Returns the values of `metric_variables`."""
        return [variable.read_value() for variable in self.metric_variables]

    def labels_and_weights(self, y: Any) -> tuple[Any, Any]:
        """Returns labels, and what the examples count: None, all the same.

        Args:
          y: Nest of labels, perhaps with weights beside them.
        """
        return example_weights.split(y, self._training.class_weight)

    def update_metrics(
        self,
        y: Any,
        predicted: Any,
        weight: Any = None,
    ) -> None:
        """Adds a batch to the metrics; a NaN counts as 0.

        Args:
          y: Nest of labels.
          predicted: Nest of the model's outputs.
          weight: What the examples count in those metrics that are weighted;
            None: all the same.
        """
        if not self.metric_variables:
            return
        y, predicted = tf.nest.map_structure(_with_numbers_only, (y, predicted))
        weight = example_weights.numbers_only(weight)
        self._compiled.update_metrics(y, predicted, weight)

    def metric_results(self, values: list[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns what the compiled metrics say of a summed state.

        Args:
          values: Values for `metric_variables`, summed over replicas.
        """
        for variable, value in zip(self.metric_variables, values, strict=True):
            variable.assign(value)
        return self._compiled.metric_results()

    @property
    def assigned_variables(self) -> list[tf.Variable]:
        """Returns what is assigned for every client before it is read."""
        return [
            *self.variables,
            *self.unaggregated,
            *self.metric_variables,
            *self._compiled.scratch,
            *self._optimizer.assigned_variables,
            *self._random_state,
        ]

    @property
    def own_variables(self) -> list[tf.Variable]:
        """Returns all that training may change: no other replica's."""
        return [
            *self.assigned_variables,
            *self._compiled.noted,  # Written while training, and never read.
        ]

    def check_state(self) -> Any:
        """Raises ValueError if something would pass from client to client.

        Returns:
          What a client with one batch does, a `ConcreteFunction`.
        """

        def client(x: Any, y: Any, with_metrics: bool = True) -> Any:
            received = cohort.Received(
                weights=[each.read_value() for each in self.variables],
                unaggregated=[each.read_value() for each in self.unaggregated],
                params=(),
                learning_rate=tf.constant(0.0),
                seed=tf.zeros([2], tf.int64),
            )
            step = self.step if with_metrics else self._train_on
            if with_metrics:
                self.start_metrics()
            self.start(received, received.seed)
            # Keras names things in ways that are no names by themselves.
            with tf.name_scope("client"):
                step(x, y, received.weights, received.learning_rate)
            return self.handed_in(received.weights, received.seed)

        specs = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype),
            self._element_spec,
        )
        if self.metric_variables:  # They go on from client to client.
            replicas.check_not_used(
                functools.partial(client, with_metrics=False),
                specs,
                self.metric_variables,
            )
        return replicas.check_state(client, specs, self.model, self.own_variables)

    def start(self, received: cohort.Received, seed: tf.Tensor) -> None:
        """Puts the replica in the state in which a client receives it.

        Args:
          received: What the server sends.
          seed: Of a kind of `mechanisms.noise`, new for every client of every
            round.
        """
        for variable, value in zip(self.variables, received.weights, strict=True):
            variable.assign(value)
        for variable in self._compiled.scratch:
            variable.assign(tf.zeros_like(variable))
        for variable, value in zip(
            self.unaggregated, received.unaggregated, strict=True
        ):
            variable.assign(value)
        self._optimizer.start(received.learning_rate)
        for number, state in enumerate(self._random_state):
            key = noise.integer(seed, 1 + number)
            state.assign(keras_versions.random_state(key))

    def step(
        self,
        x: Any,
        y: Any,
        weights: list[tf.Tensor],
        learning_rate: tf.Tensor,
    ) -> tf.Tensor:
        """Takes one step on one batch.

        Args:
          x: Nest of features.
          y: Nest of labels, perhaps with weights beside them.
          weights: What the client received.
          learning_rate: Float32 scalar.

        Returns:
          The batch's loss (float32 scalar).
        """
        loss, *seen = self._train_on(x, y, weights, learning_rate)
        self.update_metrics(*seen)
        if loss.shape.rank:  # A loss without reduction: Keras sums gradients.
            loss = tf.reduce_mean(loss)
        return tf.cast(loss, tf.float32)

    def _train_on(
        self, x: Any, y: Any, weights: list[tf.Tensor], learning_rate: tf.Tensor
    ) -> tuple[tf.Tensor, Any, Any, Any]:
        """Takes one step; returns the loss, labels, outputs and weights."""
        training = self._training
        y, weight = self.labels_and_weights(y)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._trainable)
            predicted = self.model(x, training=True)
            loss = self._loss(x, y, predicted, weight)
        gradients = tape.gradient(loss, self._trainable)
        if training.proximal_weight:
            gradients = [
                _plus(gradient, training.proximal_weight * (variable - start))
                for gradient, variable, start in zip(
                    gradients, self._trainable, weights, strict=False
                )
            ]
        if training.grad_clip > 0:
            gradients, _ = tf.clip_by_global_norm(
                [_dense(gradient) for gradient in gradients], training.grad_clip
            )
        self._optimizer.apply(gradients, learning_rate)
        return loss, y, predicted, weight

    def _loss(self, x: Any, y: Any, predicted: Any, weight: Any) -> tf.Tensor:
        masked = any(
            getattr(output, "_keras_mask", None) is not None
            for output in tf.nest.flatten(predicted)
        )
        if self._single_loss is None or masked:
            return self._compiled.compute_loss(x, y, predicted, weight)
        (label,), (output,) = tf.nest.flatten(y), tf.nest.flatten(predicted)
        if weight is not None:
            (weight,) = tf.nest.flatten(weight)
        loss = keras_versions.call_loss(self._single_loss, label, output, weight)
        for extra in self.model.losses:
            loss += tf.reduce_sum(tf.cast(extra, loss.dtype))
        return loss

    def losses_of_rows(self, label: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
        """Returns each row's loss, float32 [n], of which the loss is the mean.

        Only for losses of which `separable` says so.

        Args:
          label: [n, ...].
          output: [n, c], of a model with one output.
        """
        return keras_versions.losses_of_rows(self._single_loss, label, output)

    def handed_in(
        self, received: list[tf.Tensor] | None, seed: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns what the client hands to the mechanism.

        Args:
          received: The weights that it started from: it hands in its update,
            Delta = w - w_received. None: it hands in its weights w.
          seed: The client's, as in `start`.
        """
        tensors = list(map(cohort.as_handed_in, self.variables))
        if received is not None:
            tensors = [
                tensor - cohort.as_handed_in(start)
                for tensor, start in zip(tensors, received, strict=True)
            ]
        hook = self._training.upload_hook
        if hook is None:
            return tensors
        with noise.seeded(noise.fold_in(seed, -1)):
            return list(hook(tensors))


def _with_numbers_only(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with 0 for NaN and Inf, and the mask that it had."""
    if not tensor.dtype.is_floating:
        return tensor
    numbers = tf.where(tf.math.is_finite(tensor), tensor, tf.zeros([], tensor.dtype))
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        numbers._keras_mask = mask
    return numbers


def _dense(gradient: Any) -> tf.Tensor | None:
    """Adds up repeated rows, without which a norm would not be the norm."""
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _plus(gradient: Any, extra: tf.Tensor) -> tf.Tensor:
    return extra if gradient is None else _dense(gradient) + extra
