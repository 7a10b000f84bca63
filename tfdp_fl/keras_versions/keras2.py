"""Keras 2.14, and tf_keras, which is Keras 2 on later TensorFlows."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import tensorflow as tf

_OWN_MODULES = ("keras.", "tf_keras.")


def name() -> str:
    """Returns which Keras this is, by the number that checkpoints share."""
    return "Keras 2"


def check_installed() -> None:
    """Raises ImportError for a Keras that cannot be used; this one can."""


def is_of_keras(function: Any) -> bool:
    """Returns True for a function or class that Keras itself defines."""
    module = getattr(function, "__module__", None) or ""
    return module.startswith(_OWN_MODULES)


# Models and layers.


def tf_variable(variable: Any) -> tf.Variable:
    """Returns the `tf.Variable` of one of Keras's variables."""
    return variable


def tf_variables(variables: Any) -> list[tf.Variable]:
    """Returns the `tf.Variable`s of Keras's variables."""
    return list(variables)


def layers_of(model: tf.keras.Model, include_self: bool = False) -> list[Any]:
    """Returns all layers, those inside others as well, in a fixed order."""
    return list(model._flatten_layers(include_self=include_self))


def rebuilt(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a model made anew from the configuration of another."""
    with tf.keras.utils.custom_object_scope(_own_functions(model)):
        if isinstance(model, tf.keras.Sequential) or model._is_graph_network:
            return tf.keras.models.clone_model(model)
        return type(model).from_config(model.get_config())


def _own_functions(model: tf.keras.Model) -> dict[str, Any]:
    """Returns the user's functions in a model, such as activations, by name.

    A layer's configuration knows them by name only.
    """
    functions: dict[str, Any] = {}
    for layer in layers_of(model, include_self=True):
        for value in vars(layer).values():
            module = getattr(value, "__module__", None) or ""
            if not inspect.isfunction(value) or module.startswith(
                (*_OWN_MODULES, "tensorflow.")
            ):
                continue
            if functions.setdefault(value.__name__, value) is not value:
                raise ValueError(
                    f"two functions in it are both named {value.__name__!r}."
                )
    return functions


def copy_adapted(
    original: tf.keras.layers.Layer, copied: tf.keras.layers.Layer
) -> None:
    """Gives a copied layer what the original was adapted to.

    Args:
      original: Any layer.
      copied: A layer made from its configuration, with its weights.
    """
    if hasattr(original, "get_vocabulary"):
        copied.set_vocabulary(original.get_vocabulary())
    elif hasattr(copied, "finalize_state"):
        copied.finalize_state()


def input_rank(layer: tf.keras.layers.Layer) -> int:
    """Returns how many dimensions the layer's input has."""
    return len(layer.input_shape)


def has_adapted_weights(layer: tf.keras.layers.Layer) -> bool:
    """Returns True if a layer computes by more than its plain weights."""
    del layer
    return False


# Randomness.


def own_random_state(model: tf.keras.Model) -> list[tf.Variable]:
    """Gives every random layer (Dropout, noise, ...) a generator of its own.

    Keras's default for such layers is an operation whose stream cannot be
    restarted; with a generator, a client's masks follow from the round's seed.
    Only copies of the user's model are changed.

    Args:
      model: A replica.

    Returns:
      The generators' states, in the order of the layers.
    """
    states = []
    for layer in layers_of(model, include_self=True):
        source = getattr(layer, "_random_generator", None)
        if source is None or not hasattr(source, "_rng_type"):
            continue
        generator = tf.random.Generator.from_state(np.zeros(3, np.int64), alg="philox")
        source._rng_type = source.RNG_STATEFUL
        source._generator = generator
        source._built = True
        states.append(generator.state)
    return states


def random_state(key: tf.Tensor) -> tf.Tensor:
    """Returns the state with which a generator starts.

    Args:
      key: Int64 scalar; the numbers that are drawn follow from it.
    """
    return tf.stack([0, 0, key])


# Losses and metrics.


def call_loss(
    loss: Any, label: tf.Tensor, output: tf.Tensor, weight: Any = None
) -> tf.Tensor:
    """Returns a compiled loss of one output, as Keras calls it.

    Args:
      loss: What Keras made of the loss that was compiled.
      label: [n, ...].
      output: [n, ...].
      weight: What Keras takes as `sample_weight`, or None.
    """
    label, output = _as_keras_calls_a_loss(label, output)
    return loss(label, output, sample_weight=weight)


def losses_of_rows(loss: Any, label: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    """Returns a compiled loss of one output before Keras takes the mean."""
    return loss.call(*_as_keras_calls_a_loss(label, output))


def _as_keras_calls_a_loss(
    label: tf.Tensor, output: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Does what Keras's own container of losses does before it calls one."""
    if label.shape.rank == 1 and output.shape.rank == 2:
        label = tf.expand_dims(label, -1)
    if label.dtype.is_floating and output.dtype.is_floating:
        label = tf.cast(label, output.dtype)
    return label, output


def loss_options(loss: Any) -> dict[str, Any]:
    """Returns what a loss or a metric was made with."""
    return {**loss.get_config(), **getattr(loss, "_fn_kwargs", {})}


class CompiledModel:
    """A replica with a loss and metrics, compiled by Keras.

    Attributes:
      scratch: Variables that computing the loss changes, and nobody reads.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        loss: Any,
        metrics: Any,
        loss_weights: Any,
        weighted_metrics: Any = None,
    ):
        model.compile(
            loss=loss,
            metrics=metrics,
            loss_weights=loss_weights,
            # Keras warns of weights without them, and means the same by [].
            weighted_metrics=weighted_metrics or [],
        )
        self._model = model
        self.scratch: list[tf.Variable] = []

    @property
    def noted(self) -> list[tf.Variable]:
        """Returns what losses note down of themselves, and nobody reads."""
        return [
            variable
            for metric in self._model.compiled_loss.metrics
            for variable in metric.variables
        ]

    def outputs(self, y: Any, predicted: Any) -> list[tuple[Any, Any, Any]]:
        """Returns the label, the output and the loss of each output.

        Args:
          y: Nest of labels; what it holds may be anything.
          predicted: Nest of the model's outputs.

        Raises:
          ValueError: There are more labels than outputs, or fewer.
        """
        container = self._model.compiled_loss
        container.build(predicted)
        labels = tf.nest.flatten(container._conform_to_outputs(predicted, y))
        outputs = tf.nest.flatten(predicted)
        if len(labels) != len(outputs):
            raise ValueError(
                f"labels must have one tensor for each of the {len(outputs)} "
                f"outputs of the model, got {len(labels)}."
            )
        losses = tf.nest.flatten(container._losses)
        return list(zip(labels, outputs, losses, strict=True))

    def build(self, x: Any, y: Any, predicted: Any, weight: Any = None) -> None:
        """Makes the metrics' variables, from one batch."""
        self._model.compute_loss(x, y, predicted, weight)
        self._model.compute_metrics(x, y, predicted, weight)
        self._model.reset_metrics()

    @property
    def metric_variables(self) -> list[tf.Variable]:
        """Returns the metrics' state."""
        return [
            variable
            for metric in self._model.compiled_metrics.metrics
            for variable in metric.variables
        ]

    def compute_loss(
        self, x: Any, y: Any, predicted: Any, weight: Any = None
    ) -> tf.Tensor:
        """Returns the loss of a batch, as the model computes it."""
        return self._model.compute_loss(x, y, predicted, weight)

    def update_metrics(self, y: Any, predicted: Any, weight: Any = None) -> None:
        """Adds a batch to the metrics."""
        self._model.compiled_metrics.update_state(y, predicted, weight)

    def metric_results(self) -> dict[str, tf.Tensor]:
        """Returns what the metrics say of their state."""
        results = {}
        for metric in self._model.compiled_metrics.metrics:
            result = metric.result()
            results.update(
                result if isinstance(result, dict) else {metric.name: result}
            )
        return results


# Optimizers.


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for an optimizer that clients cannot train by."""
    if getattr(optimizer, "use_ema", False):
        raise ValueError(
            "optimizer must not use_ema: a client's average of weights would "
            "be dropped after the round, got use_ema=True."
        )


def learning_rate(optimizer: Any) -> Any:
    """Returns the variable that holds the rate.

    Returns:
      A `tf.Variable`; a number where there is none yet; None if the rate is a
      function of the optimizer's own steps.
    """
    rate = getattr(optimizer, "_learning_rate", None)
    if rate is None:  # tf.keras.optimizers.legacy
        rate = getattr(optimizer, "_hyper", {}).get("learning_rate")
    if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        return None
    return rate


def momentum_and_schedule(optimizer: Any) -> tuple[float, Any]:
    """Returns the momentum of SGD, and a rate's schedule; 0 and None if none.

    Of other optimizers, such as Adam, which divide by what they have seen,
    only the schedule.
    """
    legacy = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
    kinds = (tf.keras.optimizers.SGD, legacy.SGD)
    momentum = 0.0
    if isinstance(optimizer, kinds):
        momentum = float(optimizer.get_config().get("momentum") or 0.0)
    rate = getattr(optimizer, "_learning_rate", None)
    if rate is None:  # tf.keras.optimizers.legacy
        rate = getattr(optimizer, "_hyper", {}).get("learning_rate")
    if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        return momentum, rate
    return momentum, None


def build_optimizer(optimizer: Any, variables: list[Any]) -> list[tf.Variable]:
    """Makes an optimizer's variables; returns them all."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
        state = list(optimizer.variables)
    else:  # tf.keras.optimizers.legacy
        optimizer._create_all_weights(variables)
        state = list(optimizer.weights)
    known = {id(each) for each in state}
    # Nadam, for one, keeps a variable that is none of those it tells of.
    return state + [
        variable
        for each in vars(optimizer).values()
        if isinstance(variable := tf_variable(each), tf.Variable)
        and id(variable) not in known
    ]


def apply_gradients(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    """Takes one step on variables that the optimizer was built for."""
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
