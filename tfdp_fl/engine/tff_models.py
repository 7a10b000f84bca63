"""Keras 2 in TFF's environment: TFF's functional wrappers in place of Keras 3.

TensorFlow 2.14 has a Keras without stateless calls. There, a client's training uses
`tff.learning.models.functional_model_from_keras`,
`tff.learning.optimizers.build_*` and
`tff.learning.metrics.create_functional_metric_fns`. Whatever these do not support is
refused, and the error says so.
"""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _signals, keras_versions
from tfdp_fl.datasets import nests
from tfdp_fl.engine import cohort, labels, trainer
from tfdp_fl.engine import metrics as metrics_lib

_METRIC_OF_LOSS = {
    "SparseCategoricalCrossentropy": tf.keras.metrics.SparseCategoricalAccuracy,
    "CategoricalCrossentropy": tf.keras.metrics.CategoricalAccuracy,
    "BinaryCrossentropy": tf.keras.metrics.BinaryAccuracy,
}


class FunctionalTrainer(trainer.Trainer):
    """A `trainer.Trainer` that uses TFF."""

    def __init__(
        self,
        model: tf.keras.Model,
        training: trainer.Training,
        element_spec: nests.ElementSpec,
    ):
        """Makes a functional model from a Keras model.

        Args:
          model: A built Keras model, which is read and never changed.
          training: How to train.
          element_spec: `(features, labels)` specs of one example.

        Raises:
          ValueError: TFF cannot convert the model, or cannot train it in this way.
        """
        import tensorflow_federated as tff

        self.model = model
        self._training = training
        self.element_spec = element_spec
        if (
            training.weighted_metrics is not None
            or training.loss_weights is not None
            or nests.weights_of(element_spec[1]) is not None
        ):
            raise _refusal("weights of examples or outputs")
        if what := _unsupported_part(model):
            raise _refusal(what)
        loss = _loss_object(training.loss)
        metrics = collections.OrderedDict(
            _metric_by_name(metric, loss)
            for metric in tf.nest.flatten(training.metrics)
            if metric is not None
        )
        specs = trainer.batch_specs(element_spec)
        try:
            self._functional = tff.learning.models.functional_model_from_keras(
                model, loss, specs, metrics or None
            )
            with tf.Graph().as_default():  # Layers that assign fail here.
                x = trainer.zeros_like_batch(element_spec[0])
                self._functional.predict_on_batch(self._functional.initial_weights, x)
        except Exception as error:
            raise ValueError(
                "model cannot be a functional model of TensorFlow Federated, as it "
                f"must be with TensorFlow {tf.__version__} (Keras 3, on TensorFlow "
                f"2.16 and later, has no such limit): {error}"
            ) from error
        finally:
            keras_versions.restore_classes(model)
        self.aggregated = list(model.trainable_weights)
        self.unaggregated = list(model.non_trainable_weights)
        keras_weights = [v.numpy() for v in (*self.aggregated, *self.unaggregated)]
        tff_weights = tf.nest.flatten(self._functional.initial_weights)
        if len(keras_weights) != len(tff_weights) or not all(
            map(np.array_equal, keras_weights, tff_weights)
        ):
            raise _refusal("a model that makes its weights in another order")
        self._random_state = []  # `Program` refuses random layers.
        self._optimizer = _optimizer(training.optimizer, self.aggregated)
        predicted = model(trainer.zeros_like_batch(element_spec[0]), training=False)
        y = trainer.zeros_like_batch(element_spec[1])
        if len(tf.nest.flatten(predicted)) != 1 or len(tf.nest.flatten(y)) != 1:
            raise _refusal("models with several outputs")
        (predicted,) = tf.nest.flatten(predicted)
        self.label_ranges = labels.ranges(tf.nest.flatten(y), [(0, predicted, loss)])
        with tf.Graph().as_default():
            state = self._functional.initialize_metrics_state() if metrics else ()
            self._metric_state = tf.nest.map_structure(lambda _: None, state)
            specs = trainer.specs_of(tf.nest.flatten(state))
            self.metric_specs = cohort.MetricState(specs, [])
            metrics_lib.check(self.metric_results(self.no_metrics()))
        keras_versions.restore_classes(model)

    def no_metrics(self) -> cohort.MetricState:
        """Returns the metrics' initial state."""
        return tf.nest.map_structure(
            lambda spec: tf.zeros(spec.shape, spec.dtype), self.metric_specs
        )

    def metric_results(self, values: cohort.MetricState) -> dict[str, tf.Tensor]:
        """Returns the compiled metrics' results by name, computed from their state."""
        if not values.sums:
            return {}
        state = tf.nest.pack_sequence_as(self._metric_state, values.sums)
        return dict(self._functional.finalize_metrics(state))

    def with_batch(
        self,
        metrics: cohort.MetricState,
        y: nests.Nest,
        predicted: nests.Nest,
        weight: tf.Tensor | None = None,
        own: list[tf.Tensor] | None = None,
    ) -> cohort.MetricState:
        """Returns the metrics' state updated with a batch; a NaN counts as 0."""
        del weight, own
        if not metrics.sums:
            return metrics
        import tensorflow_federated as tff

        y, predicted = tf.nest.map_structure(
            metrics_lib.with_numbers_only, (y, predicted)
        )
        state = tf.nest.pack_sequence_as(self._metric_state, metrics.sums)
        output = tff.learning.models.BatchOutput(predictions=predicted)
        updated = self._functional.update_metrics_state(state, y, output, None)
        return cohort.MetricState(tf.nest.flatten(updated), [])

    def _forward(
        self,
        state: trainer.ClientState,
        x: nests.Nest,
        y: nests.Nest,
        weight: tf.Tensor | None,
        training: bool = True,
        own: list[tf.Tensor] | None = None,
    ) -> tuple[tf.Tensor, nests.Nest, list[tf.Tensor], list[tf.Tensor]]:
        count = len(self.aggregated)
        weights = tuple(state.values[:count]), tuple(state.values[count:])
        predicted = self._functional.predict_on_batch(weights, x, training)
        return self._functional.loss(predicted, y), predicted, state.values, []


class _TffOptimizer:
    """A TFF optimizer with the interface of `trainer.ClientOptimizer`."""

    def __init__(
        self, optimizer: tf.keras.optimizers.Optimizer, variables: list[tf.Variable]
    ):
        self._optimizer = optimizer
        self._specs = tuple(trainer.specs_of(variables))

    def start(self, learning_rate: tf.Tensor) -> list[tf.Tensor]:
        """Returns the slots of a new client."""
        state = self._optimizer.initialize(self._specs)
        rates = {**self._optimizer.get_hparams(state), "learning_rate": learning_rate}
        state = self._optimizer.set_hparams(state, rates)
        self._structure = tf.nest.map_structure(lambda _: None, state)
        return [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(state)]

    def apply(
        self,
        gradients: list[tf.Tensor],
        weights: list[tf.Tensor],
        slots: list[tf.Tensor],
        learning_rate: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Takes one step."""
        del learning_rate  # It is one of the slots.
        state = tf.nest.pack_sequence_as(self._structure, slots)
        state, weights = self._optimizer.next(state, tuple(weights), tuple(gradients))
        return list(weights), tf.nest.flatten(state)


def _optimizer(
    optimizer: tf.keras.optimizers.Optimizer, variables: list[tf.Variable]
) -> Any:
    """Returns TFF's equivalent of a Keras optimizer."""
    if trainer.is_plain_sgd(optimizer):
        return trainer.ClientOptimizer(optimizer, variables)
    import tensorflow_federated as tff

    build = tff.learning.optimizers
    optimizers = tf.keras.optimizers
    config = optimizer.get_config()
    kinds = {
        optimizers.SGD: (build.build_sgdm, "momentum"),
        optimizers.Adam: (build.build_adam, "beta_1 beta_2 epsilon"),
        optimizers.Adagrad: (build.build_adagrad, "initial_accumulator_value epsilon"),
    }
    options = ("nesterov", "weight_decay", "clipnorm", "global_clipnorm", "clipvalue")
    if (
        type(optimizer) not in kinds
        or any(config.get(name) for name in (*options, "use_ema", "amsgrad"))
        or keras_versions.learning_rate(optimizer) is None
    ):
        raise _refusal(
            f"the optimizer {optimizer!r}; SGD (with momentum), Adam and Adagrad with "
            "a fixed rate and no further options are what it has"
        )
    make, names = kinds[type(optimizer)]
    tff_optimizer = make(0.0, *(config[name] for name in names.split()))
    return _TffOptimizer(tff_optimizer, variables)


def _loss_object(loss: keras_versions.CompileArgument) -> tf.keras.losses.Loss:
    if isinstance(loss, tf.keras.losses.Loss):
        return loss
    name = getattr(tf.keras.losses.get(loss), "__name__", "")  # "mse" is an alias.
    class_name = "".join(word.capitalize() for word in name.split("_"))
    loss_class = getattr(tf.keras.losses, class_name, None)
    if not inspect.isclass(loss_class):
        raise _refusal(f"the loss {loss!r}: give a tf.keras.losses.Loss")
    return loss_class()


def _metric_by_name(
    metric: tf.keras.metrics.Metric, loss: tf.keras.losses.Loss
) -> tuple[str, Callable[[], tf.keras.metrics.Metric]]:
    """Returns a metric's name and a function that makes it."""
    if metric in ("accuracy", "acc") and type(loss).__name__ in _METRIC_OF_LOSS:
        kind = _METRIC_OF_LOSS[type(loss).__name__]
        return metric, functools.partial(kind, name=metric)
    if not isinstance(metric, tf.keras.metrics.Metric):
        raise _refusal(f"the metric {metric!r}: give a tf.keras.metrics.Metric")
    config = metric.get_config()
    return metric.name, functools.partial(type(metric).from_config, config)


def _unsupported_part(model: tf.keras.Model) -> str:
    """Names a part of the model that a functional model would ignore or cannot run."""
    if model.losses:
        return "losses that layers add, as regularizers do"
    if any(variable.trainable for variable in model.non_trainable_weights):
        return "layers with trainable=False"
    if any(getattr(v, "constraint", None) for v in model.trainable_weights):
        return "constraints of weights"
    return ""


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"In TensorFlow Federated's environment (TensorFlow {tf.__version__}) its "
        f"functional models cannot take {what}. Keras 3, on TensorFlow 2.16 and "
        "later, can."
    )


@_signals.defer_signals()  # Errors in here are taken for the model's.
def make_trainer(
    model: tf.keras.Model,
    training: trainer.Training,
    element_spec: nests.ElementSpec,
    aggregate_non_trainable: bool = True,
) -> trainer.Trainer:
    """Returns a `Trainer` (see there) for the Keras that is installed."""
    trainer.check_model(model)
    if keras_versions.IS_KERAS_3:
        return trainer.Trainer(model, training, element_spec, aggregate_non_trainable)
    # TFF's functional models never change non-trainable state.
    return FunctionalTrainer(model, training, element_spec)
