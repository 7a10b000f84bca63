"""Keras 3, on TensorFlow. The functions are those of `keras2`, which see."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

import tensorflow as tf

# Earlier ones keep a compiled model's losses in another way.
_OLDEST = (3, 8)


def name() -> str:
    """Returns which Keras this is, by the number that checkpoints share."""
    return "Keras 3"


def check_installed() -> None:
    """Raises ImportError unless Keras is new enough, and on TensorFlow."""
    version = tf.keras.version()
    if tuple(map(int, version.split(".")[:2])) < _OLDEST:
        raise ImportError(
            f"keras must be {'.'.join(map(str, _OLDEST))} or later, whatever "
            f"the TensorFlow, got {version}: pip install --upgrade keras"
        )
    backend = tf.keras.config.backend()
    if backend != "tensorflow":
        raise ImportError(
            "KERAS_BACKEND must be 'tensorflow' to train with tfdp_fl, whose "
            f"engine is made of TensorFlow functions, got {backend!r}. Set it "
            "before Keras is imported."
        )


def is_of_keras(function: Any) -> bool:
    """Returns True for a function or class that Keras itself defines."""
    return (getattr(function, "__module__", None) or "").startswith("keras.")


# Models and layers.


def tf_variable(variable: Any) -> tf.Variable:
    """Returns the `tf.Variable` of one of Keras's variables."""
    # `value` is a cast of it where Keras computes in another dtype.
    return getattr(variable, "_value", variable)


def tf_variables(variables: Any) -> list[tf.Variable]:
    """Returns the `tf.Variable`s of Keras's variables."""
    return [tf_variable(variable) for variable in variables]


def layers_of(model: tf.keras.Model, include_self: bool = False) -> list[Any]:
    """Returns all layers, those inside others as well, in a fixed order."""
    return list(model._flatten_layers(include_self=include_self))


def rebuilt(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a model made anew from the configuration of another."""
    from keras.src.models import functional
    from keras.src.saving import serialization_lib

    # The model is the user's own, in the same process: its code may run.
    with serialization_lib.SafeModeScope(safe_mode=False):
        if isinstance(model, tf.keras.Sequential) or (
            isinstance(model, functional.Functional)
            and type(model).get_config is functional.Functional.get_config
        ):
            with _as_if_not_compiled(model):
                return tf.keras.models.clone_model(
                    model, clone_function=_copied_layer, recursive=True
                )
        return type(model).from_config(model.get_config())


@contextlib.contextmanager
def _as_if_not_compiled(model: tf.keras.Model) -> Iterator[None]:
    """Keeps Keras from compiling a copy, by names of the user's functions."""
    compiled = [
        each
        for each in layers_of(model, include_self=True)
        if getattr(each, "compiled", False)
    ]
    for each in compiled:
        each.compiled = False
    try:
        yield
    finally:
        for each in compiled:
            each.compiled = True


def _copied_layer(layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
    """Returns a layer of the same configuration.

    The user's functions are handed on as they are; a configuration knows them
    by name only.
    """
    config = layer.get_config()
    own = {
        key: getattr(layer, key, None)
        for key in config
        if _is_own_function(getattr(layer, key, None))
    }
    if own:
        try:
            return type(layer).from_config({**config, **own})
        except (TypeError, ValueError):
            pass  # A layer that takes no functions, only what names them.
    return type(layer).from_config(config)


def _is_own_function(value: Any) -> bool:
    return inspect.isfunction(value) and not is_of_keras(value)


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
    elif hasattr(original, "bin_boundaries"):  # These are no weights.
        copied.bin_boundaries = original.bin_boundaries
    elif hasattr(copied, "finalize_state"):
        copied.finalize_state()


def input_rank(layer: tf.keras.layers.Layer) -> int:
    """Returns how many dimensions the layer's input has."""
    return len(layer.input.shape)


def has_adapted_weights(layer: tf.keras.layers.Layer) -> bool:
    """Returns True if a layer computes by more than its plain weights."""
    return bool(
        getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None) is not None
    )


# Randomness.


def own_random_state(model: tf.keras.Model) -> list[tf.Variable]:
    """Returns the states of the generators of random layers."""
    found: dict[int, tf.Variable] = {}
    for layer in layers_of(model, include_self=True):
        for generator in layer._seed_generators:
            state = tf_variable(generator.state)
            found.setdefault(id(state), state)
    return list(found.values())


def random_state(key: tf.Tensor) -> tf.Tensor:
    """Returns the state with which a generator starts."""
    return tf.stack([key, 0])


# Losses and metrics.


def call_loss(
    loss: Any, label: tf.Tensor, output: tf.Tensor, weight: Any = None
) -> tf.Tensor:
    """Returns a compiled loss of one output, as Keras calls it."""
    return loss(label, output, sample_weight=weight)


def losses_of_rows(loss: Any, label: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    """Returns a compiled loss of one output before Keras takes the mean."""
    convert = tf.keras.ops.convert_to_tensor
    return loss.call(convert(label, loss.dtype), convert(output, loss.dtype))


def loss_options(loss: Any) -> dict[str, Any]:
    """Returns what a loss or a metric was made with."""
    return {**loss.get_config(), **getattr(loss, "_fn_kwargs", {})}


class CompiledModel:
    """A replica with a loss and metrics, compiled by Keras.

    Attributes:
      scratch: Variables that computing the loss changes, and nobody reads.
      noted: None of Keras 3's, as `scratch` has all.
    """

    noted: ClassVar[tuple[tf.Variable, ...]] = ()

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
            weighted_metrics=weighted_metrics,
        )
        self._model = model
        self._loss = loss
        self.scratch: list[tf.Variable] = []

    def outputs(self, y: Any, predicted: Any) -> list[tuple[Any, Any, Any]]:
        """Returns the label, the output and the loss of each output."""
        compiled = self._model._compile_loss
        names = compiled.output_names
        outputs = tf.nest.flatten(predicted)
        labels = self._labels(y, predicted, names)
        if len(labels) != len(outputs):
            raise ValueError(
                f"labels must have one tensor for each of the {len(outputs)} "
                f"outputs of the model, got {len(labels)}."
            )
        # Another one, because what it is built with it expects for ever.
        trial = type(compiled)(
            self._loss, compiled._user_loss_weights, output_names=names
        )
        trial.build(tf.nest.pack_sequence_as(predicted, labels), predicted)
        places = tf.nest.pack_sequence_as(predicted, range(len(outputs)))
        losses = [None] * len(outputs)
        for each in trial._flat_losses:
            losses[_place(each.path, places, names)] = each.loss
        return list(zip(labels, outputs, losses, strict=True))

    def _labels(self, y: Any, predicted: Any, names: Any) -> list[Any]:
        """Returns the label of each output, None where there is no loss."""
        if isinstance(y, dict) and isinstance(predicted, (list, tuple)):
            if set(y) != set(names or ()):
                raise ValueError(
                    "labels must be named as the model's outputs are, "
                    f"{names}, got {sorted(y)}."
                )
            return [y[each] for each in names]
        labels = tf.nest.flatten(y)
        losses = tf.nest.flatten(self._loss)
        if len(labels) < len(losses) and None in losses:
            rest = iter(labels)
            labels = [None if each is None else next(rest, None) for each in losses]
        return labels

    def build(self, x: Any, y: Any, predicted: Any, weight: Any = None) -> None:
        """Makes the metrics' variables, from one batch."""
        model = self._model
        model._compute_loss(x, y, predicted, weight, training=True)
        model.compute_metrics(x, y, predicted, weight)
        model.reset_metrics()
        self.scratch = tf_variables(model._compile_loss.variables)

    @property
    def metric_variables(self) -> list[tf.Variable]:
        """Returns the metrics' state."""
        metrics = self._model._compile_metrics
        return [] if metrics is None else tf_variables(metrics.variables)

    def compute_loss(
        self, x: Any, y: Any, predicted: Any, weight: Any = None
    ) -> tf.Tensor:
        """Returns the loss of a batch, as the model computes it."""
        return self._model._compute_loss(x, y, predicted, weight, training=True)

    def update_metrics(self, y: Any, predicted: Any, weight: Any = None) -> None:
        """Adds a batch to the metrics."""
        self._model._compile_metrics.update_state(y, predicted, weight)

    def metric_results(self) -> dict[str, tf.Tensor]:
        """Returns what the metrics say of their state."""
        results: dict[str, tf.Tensor] = {}
        metrics = self._model._compile_metrics
        if metrics is not None:
            for key, value in metrics.result().items():
                results.update(value if isinstance(value, dict) else {key: value})
        return results


def _place(path: tuple[Any, ...], places: Any, names: Any) -> int:
    """Returns which output a compiled loss belongs to."""
    for step in path:
        if isinstance(step, str) and not isinstance(places, dict):
            places = list(names).index(step)
            break
        places = places[step]
    return places


# Optimizers.


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for an optimizer that clients cannot train by."""
    if getattr(optimizer, "use_ema", False):
        raise ValueError(
            "optimizer must not use_ema: a client's average of weights would "
            "be dropped after the round, got use_ema=True."
        )
    if (
        getattr(optimizer, "inner_optimizer", None) is not None
        or getattr(optimizer, "loss_scale_factor", None) is not None
    ):
        raise ValueError(
            "optimizer must not scale the loss, which is for float16: take "
            f"mixed_bfloat16, which needs no scale, got {optimizer!r}."
        )


def learning_rate(optimizer: Any) -> Any:
    """Returns the variable that holds the rate."""
    rate = optimizer._learning_rate
    if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        return None
    rate = tf_variable(rate)
    return None if callable(rate) else rate


def momentum_and_schedule(optimizer: Any) -> tuple[float, Any]:
    """Returns the momentum of SGD, and a rate's schedule; 0 and None if none.

    Of other optimizers, such as Adam, which divide by what they have seen,
    only the schedule.
    """
    momentum = 0.0
    if isinstance(optimizer, tf.keras.optimizers.SGD):
        momentum = float(optimizer.get_config().get("momentum") or 0.0)
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        return momentum, rate
    return momentum, None


def build_optimizer(optimizer: Any, variables: list[Any]) -> list[tf.Variable]:
    """Makes an optimizer's variables; returns them all."""
    if not optimizer.built:
        optimizer.build(variables)
    state = tf_variables(optimizer.variables)
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
    optimizer.apply(gradients, variables)
