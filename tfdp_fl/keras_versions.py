"""The only module that depends on Keras's internals and on its version.

All other modules use the public `tf.keras`. `tfdp_fl.keras` is for Keras 3. In TFF's
environment, `tf.keras` is Keras 2, of which only what
`engine.tff_models` needs is supported here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdp_fl.terms import Json

if TYPE_CHECKING:
    from tfdp_fl.datasets.nests import Nest

IS_KERAS_3 = hasattr(tf.keras, "ops")

# Keras has no types. A `keras.Variable` of Keras 3, a `tf.Variable` of Keras 2.
KerasVariable: TypeAlias = Any
# What `compile` takes as loss, metrics or weights: a name, a function, an object of
# Keras's, or a nest of these, one for each output.
CompileArgument: TypeAlias = Any
# What Keras makes of the losses, its private `CompileLoss`.
CompiledLoss: TypeAlias = Any

# Earlier ones keep a compiled model's losses in another way.
_MIN_VERSION = (3, 8)


def name() -> str:
    """Returns Keras's major version, which checkpoints must share."""
    return "Keras 3" if IS_KERAS_3 else "Keras 2"


def check_installed() -> None:
    """Raises ImportError unless Keras is new enough, and on TensorFlow."""
    if not IS_KERAS_3:
        with contextlib.suppress(ImportError):
            import tensorflow_federated  # noqa: F401

            return
        raise ImportError(
            "keras must be Keras 3 on TensorFlow 2.16 or later: pip install "
            "--upgrade tensorflow keras. Keras 2 is for environments with "
            "tensorflow_federated, whose functional models are used there."
        )
    version = tf.keras.version()
    if tuple(map(int, version.split(".")[:2])) < _MIN_VERSION:
        raise ImportError(
            f"keras must be {'.'.join(map(str, _MIN_VERSION))} or later, whatever "
            f"the TensorFlow, got {version}: pip install --upgrade keras"
        )
    backend = tf.keras.config.backend()
    if backend != "tensorflow":
        raise ImportError(
            "KERAS_BACKEND must be 'tensorflow' to train with tfdp_fl, whose "
            f"engine is made of TensorFlow functions, got {backend!r}. Set it "
            "before Keras is imported."
        )


def is_of_keras(function: object) -> bool:
    """Returns True for a function or class that Keras itself defines."""
    return (getattr(function, "__module__", None) or "").startswith("keras.")


# Models and layers.


def tf_variable(variable: KerasVariable) -> tf.Variable:
    """Returns the `tf.Variable` of one of Keras's variables."""
    # `value` is a cast of it where Keras computes in another dtype.
    return getattr(variable, "_value", variable) if IS_KERAS_3 else variable


def tf_variables(variables: Iterable[KerasVariable]) -> list[tf.Variable]:
    """Returns the `tf.Variable`s of Keras's variables."""
    return [tf_variable(variable) for variable in variables]


def values_of(variables: Iterable[KerasVariable]) -> list[np.ndarray]:
    """Returns the values of Keras's variables."""
    return [variable.numpy() for variable in tf_variables(variables)]


def layers_of(
    model: tf.keras.Model, include_self: bool = False
) -> list[tf.keras.layers.Layer]:
    """Returns all layers, those inside others as well, in a fixed order."""
    return list(model._flatten_layers(include_self=include_self))


def restore_classes(model: tf.keras.Model) -> None:
    """Undoes what Keras 2 does to its classes when a model is made in a graph.

    It replaces the base classes of models and layers, for the whole process, until
    another model is made outside a graph.
    """
    tf.keras.models.clone_model(model)


def has_adapted_weights(layer: tf.keras.layers.Layer) -> bool:
    """Returns True if a layer computes by more than its plain weights."""
    return bool(
        getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None) is not None
    )


def inputs_of(model: tf.keras.Model) -> Nest:
    """Returns the nest of a model's symbolic inputs; None if it does not know them."""
    name = "_inputs_struct" if IS_KERAS_3 else "_nested_inputs"
    nest = getattr(model, name, None)
    if nest is None:  # A `Sequential` has one.
        nest = getattr(model, "inputs", None) or None
    return nest[0] if isinstance(nest, list | tuple) and len(nest) == 1 else nest


def embedding_inputs(
    model: tf.keras.Model,
) -> list[tuple[tf.keras.layers.Embedding, tf.Tensor]]:
    """Returns a model's embeddings, and the symbolic tensor that each looks up."""
    inputs = []
    for layer in layers_of(model) if IS_KERAS_3 else ():
        if type(layer) is tf.keras.layers.Embedding:
            # One that is called twice, or in a model of its own class, has none.
            with contextlib.suppress(AttributeError, ValueError):
                inputs.append((layer, layer.input))
    return inputs


def own_random_state(model: tf.keras.Model) -> list[KerasVariable]:
    """Returns the states of the generators of random layers, Keras's variables."""
    states: dict[int, KerasVariable] = {}
    for layer in layers_of(model, include_self=True):
        for generator in layer._seed_generators:
            states.setdefault(id(generator.state), generator.state)
    return list(states.values())


def stateless(
    mapping: list[tuple[KerasVariable, tf.Tensor]],
) -> tf.keras.StatelessScope:
    """Returns a scope in which Keras's variables have the values given.

    What is assigned there stays in the scope (`get_current_value`).

    Args:
      mapping: Variables and their values; of a table perhaps only some rows.
    """
    scope = tf.keras.StatelessScope(collect_losses=True)
    for variable, value in mapping:
        scope.add_update((variable, tf.convert_to_tensor(value, variable.dtype)))
    return scope


# Held while a model's weights move: by a release, or until they are put back. Without
# it, an evaluation in another thread would undo the rounds released in the meantime.
# (One for all models, because they may share layers.)
moving_weights = threading.RLock()


def settled_values(variables: Iterable[KerasVariable]) -> list[tf.Tensor]:
    """Returns a model's weights, without a copy, when nothing moves them."""
    with moving_weights:
        return [variable.value() for variable in tf_variables(variables)]


@contextlib.contextmanager
def weights_kept(model: tf.keras.Model, training: bool = False) -> Iterator[None]:
    """Puts a model's weights back, which layers may have changed when called.

    Keras's own layers change them only while `training`.
    """
    kinds = map(type, layers_of(model, include_self=True))
    is_pure = all(
        is_of_keras(kind) and kind is not tf.keras.layers.Lambda for kind in kinds
    )
    if is_pure and not training:
        yield
        return
    with moving_weights:
        variables = tf_variables(model.variables)
        values = [tf.identity(variable) for variable in variables]
        try:
            yield
        finally:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)


# Losses and metrics.


def compiled_loss_and_metrics(
    model: tf.keras.Model,
    loss: CompileArgument,
    metrics: CompileArgument,
    loss_weights: CompileArgument,
    weighted_metrics: CompileArgument,
) -> tuple[CompiledLoss | None, tf.keras.metrics.Metric]:
    """Returns what Keras's `compile` makes of its arguments."""
    from keras.src.trainers import compile_utils

    names = getattr(model, "output_names", None)
    return (
        None
        if loss is None
        else compile_utils.CompileLoss(loss, loss_weights, output_names=names),
        compile_utils.CompileMetrics(metrics, weighted_metrics, output_names=names),
    )


def own_metrics(model: tf.keras.Model) -> list[tf.keras.metrics.Metric]:
    """Returns the metrics that a model and its layers hold, and not `compile`."""
    metrics: dict[int, tf.keras.metrics.Metric] = {}
    for layer in layers_of(model, include_self=True):
        for metric in layer._metrics:
            metrics.setdefault(id(metric), metric)
    return list(metrics.values())


@contextlib.contextmanager
def losses_of(model: tf.keras.Model, compiled_loss: CompiledLoss) -> Iterator[None]:
    """Within the block, the model's `compute_loss` uses a compiled loss."""
    previous = vars(model).get("_compile_loss")
    vars(model)["_compile_loss"] = compiled_loss
    try:
        yield
    finally:
        vars(model)["_compile_loss"] = previous


def losses_of_rows(
    loss: CompiledLoss, label: tf.Tensor, output: tf.Tensor
) -> tf.Tensor:
    """Returns a compiled loss of one output before Keras takes the mean."""
    convert = tf.keras.ops.convert_to_tensor
    return loss.call(convert(label, loss.dtype), convert(output, loss.dtype))


def loss_options(loss: tf.keras.losses.Loss | tf.keras.metrics.Metric) -> Json:
    """Returns the arguments that a loss or a metric was made with."""
    return {**loss.get_config(), **getattr(loss, "_fn_kwargs", {})}


class LabelIndex(int):
    """The index of a label among all of them; Keras sees the label's shape."""

    shape: tf.TensorShape | None = None

    @classmethod
    def of(cls, index: int, label: tf.Tensor) -> LabelIndex:
        """Returns the index of a label."""
        result = cls(index)
        result.shape = label.shape
        return result


def labels_and_outputs(
    loss: CompileArgument, compiled_loss: CompiledLoss, y: Nest, predicted: Nest
) -> list[tuple[Any, tf.Tensor, tf.keras.losses.Loss]]:
    """Returns what Keras gives to each loss: labels, an output, and the loss itself.

    Args:
      loss: What Keras's `compile` takes as `loss`.
      compiled_loss: What it makes of it.
      y: Nest of labels, or of `LabelIndex`es.
      predicted: Nest of outputs.
    """
    records: list[tuple[Any, tf.Tensor, tf.keras.losses.Loss]] = []
    if compiled_loss is None:
        return records

    class Recording(type(compiled_loss)):  # type: ignore[misc]
        def build(self, y_true: Nest, y_pred: Nest) -> None:
            super().build(y_true, y_pred)
            self._flat_losses[:] = [
                entry._replace(loss=functools.partial(record, entry.loss))
                for entry in self._flat_losses
            ]

    def record(
        loss: tf.keras.losses.Loss, label: tf.Tensor, output: tf.Tensor, *_: object
    ) -> tf.Tensor:
        records.append((label, output, loss))
        return tf.zeros([])

    # Another one, because a built loss stays tied to its first structure.
    names = compiled_loss.output_names
    is_named = names and isinstance(y, dict) and isinstance(predicted, list | tuple)
    if is_named and not y.keys() <= set(names):
        raise ValueError(
            "labels must be named as the model's outputs are, "
            f"{names}, got {sorted(y)}."
        )
    try:
        Recording(loss, output_names=names)(y, predicted)
    except Exception as error:  # Keras's own, of several kinds.
        raise ValueError(
            "labels and loss must be one for each output of the model, named as these "
            f"are ({names}), or in their order: {error}"
        ) from error
    return records


# Optimizers.


def check_optimizer(optimizer: tf.keras.optimizers.Optimizer) -> None:
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
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "optimizer must not have gradient_accumulation_steps, whose sums would "
            f"wait for steps that a client never takes, got {optimizer!r}: take "
            "larger batches."
        )
    if isinstance(optimizer, tf.keras.optimizers.Nadam):
        raise ValueError(
            "optimizer must not be Nadam for clients: it keeps a product of its "
            "momentum outside of its variables, where it would pass from one client "
            "to the next. Take Adam, or Nadam as the server_optimizer."
        )


def learning_rate(optimizer: tf.keras.optimizers.Optimizer) -> tf.Variable | None:
    """Returns the variable that holds the rate; None if it follows a schedule."""
    rate = tf_variable(optimizer._learning_rate)
    return None if callable(rate) else rate  # A schedule is.


def stateless_optimizer(
    optimizer: tf.keras.optimizers.Optimizer, variables: list[tf.Variable]
) -> tf.keras.optimizers.Optimizer:
    """Returns a copy of an optimizer of Keras 3 with a `stateless_apply`.

    Keras refuses that on TensorFlow, where its optimizers assign by TensorFlow's
    own functions. The copy takes back what these replaced.
    """
    kinds = {kind.__name__: vars(kind) for kind in type(optimizer).__mro__}
    base = kinds["BaseOptimizer"]
    original = {
        method: base[method]
        for method, function in kinds["TFOptimizer"].items()
        if callable(function) and method in base and method != "__init__"
    }
    kind: type[tf.keras.optimizers.Optimizer] = type(
        f"Stateless{type(optimizer).__name__}", (type(optimizer),), original
    )
    probe = kind.from_config(optimizer.get_config())
    probe.build([tf.keras.Variable([[1.0, 2.0]])])
    if any(np.ptp(variable.numpy()) for variable in tf_variables(probe.variables)):
        raise ValueError(
            "optimizer must start clients from slots that are constants, got "
            f"{type(optimizer).__name__}: its own start as the weights of the moment."
        )
    copy = kind.from_config(optimizer.get_config())
    copy.build(variables)
    return copy


def build_optimizer(
    optimizer: tf.keras.optimizers.Optimizer, variables: list[tf.Variable]
) -> list[tf.Variable]:
    """Makes an optimizer's variables; returns them all.

    Raises:
      ValueError: It was built for other variables.
    """
    if not IS_KERAS_3:
        optimizer.build(variables)
        return list(optimizer.variables)
    if not optimizer.built:
        optimizer.build(variables)
    built_for = getattr(optimizer, "_trainable_variables", variables)
    if [*map(id, built_for)] != [*map(id, variables)]:
        raise ValueError(
            f"server_optimizer must be a new one, got {optimizer!r}, which has the "
            "state of another model, or of this one with other trainable layers: "
            f"compile with a new {type(optimizer).__name__}."
        )
    state = tf_variables(optimizer.variables)
    listed = {id(variable) for variable in state}
    # Nadam, for one, keeps a variable that it does not list.
    return state + [
        variable
        for value in vars(optimizer).values()
        if isinstance(variable := tf_variable(value), tf.Variable)
        and id(variable) not in listed
    ]
