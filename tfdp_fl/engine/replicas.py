"""Copies of the user's model that clients are trained in.

Each replica has variables of its own, so several clients train at once, and
the user's model holds the server's weights, untouched until a round is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.engine import calls, isolation


def check_train_step(model: tf.keras.Model) -> None:
    """Raises ValueError for a model that takes its steps in its own way."""
    if type(model).train_step is not tf.keras.Model.train_step:
        raise ValueError(
            "model must not have a train_step of its own, which the compiled "
            f"client training would not call, got {type(model).__name__}."
            "train_step: say what is trained by a loss, a layer's add_loss, an "
            "optimizer or compile(upload_hook=...)."
        )


def check_layers(model: tf.keras.Model) -> None:
    """Raises ValueError for layers that keep state from batch to batch."""
    for layer in keras_versions.layers_of(model):
        if getattr(layer, "stateful", False) and hasattr(layer, "states"):
            raise ValueError(
                "model must not have stateful layers, whose state would pass "
                f"from one client to the next, got {layer.name!r} with "
                "stateful=True."
            )


def clone(model: tf.keras.Model, element_spec: Any) -> tf.keras.Model:
    """Returns the same model with variables of its own.

    Args:
      model: A built Keras model.
      element_spec: A nest of `tf.TensorSpec`, one example's features; builds
        the copy of a subclassed model.

    Raises:
      ValueError: The model cannot be copied.
    """
    try:
        copy = keras_versions.rebuilt(model)
        if not copy.built or (not copy.weights and model.weights):
            copy(zeros_like_batch(element_spec))
    except Exception as error:
        raise ValueError(
            f"model cannot be copied for training clients side by side: {error}"
        ) from error
    layers = list(
        zip(
            *(
                keras_versions.layers_of(each, include_self=True)
                for each in (model, copy)
            ),
            strict=True,
        )
    )
    for original, copied in layers:
        copied.trainable = original.trainable
        # Not every layer's configuration has it. A wrapper (Bidirectional)
        # only reads it off the layer inside, which has its own turn.
        with contextlib.suppress(AttributeError):
            copied.activity_regularizer = original.activity_regularizer
    if _shapes(copy) != _shapes(model):
        raise ValueError(
            "model cannot be copied: its configuration does not rebuild the "
            "same weights."
        )
    copy.set_weights(model.get_weights())
    for original, copied in layers:
        keras_versions.copy_adapted(original, copied)
    return copy


def counterparts(
    model: tf.keras.Model, replica: tf.keras.Model
) -> dict[int, tf.Variable]:
    """Returns the model's non-trainable variables by their copies' `id`."""
    ours, theirs = (
        keras_versions.tf_variables(each.non_trainable_weights)
        for each in (model, replica)
    )
    return {id(copy): own for copy, own in zip(theirs, ours, strict=True)}


def _shapes(model: tf.keras.Model) -> list[tf.TensorShape | None]:
    # A vocabulary is among the weights, too, and has no shape.
    return [getattr(weight, "shape", None) for weight in model.weights]


def zeros_like_batch(element_spec: Any, batch_size: int = 1) -> Any:
    """Returns a nest of zeros in the shape of a batch of examples."""
    return tf.nest.map_structure(
        lambda spec: tf.zeros(
            [batch_size, *[size or 1 for size in spec.shape]], spec.dtype
        ),
        element_spec,
    )


def changed_by_training(model: tf.keras.Model, element_spec: Any) -> list[tf.Variable]:
    """Returns the non-trainable float variables that a forward pass assigns.

    Such as the moving statistics of batch normalization; not the constants of
    a normalization layer that was adapted before.

    Args:
      model: A replica; its variables are read, not changed.
      element_spec: A nest of `tf.TensorSpec`, one example's features.
    """
    candidates = [
        variable
        for variable in keras_versions.tf_variables(model.non_trainable_weights)
        if variable.dtype.is_floating
    ]
    if not candidates:
        return []
    assigned = isolation.assigned(_traced_forward_pass(model, element_spec))
    return [variable for variable in candidates if id(variable.handle) in assigned]


def check_state(
    client_step: Callable[..., Any],
    specs: Any,
    model: tf.keras.Model,
    own: list[tf.Variable],
) -> Any:
    """Raises ValueError if local training keeps what no client's start resets.

    What one client leaves behind (in a memory of a layer, a loss, a regulariser,
    an optimizer or a hook) would go on to the next.

    Args:
      client_step: All that a client does: start, train on a batch, hand in.
      specs: Of its arguments.
      model: The replica.
      own: What is assigned for every client before it is read, and what nobody
        reads.

    Returns:
      What the client does, a `ConcreteFunction`.
    """
    traced = calls.traced(tf.function(client_step, autograph=False), *specs)
    isolation.check(traced, model)
    allowed = {id(variable.handle) for variable in own}
    names = {id(each.handle): each.name for each in traced.graph.variables}
    for handle in isolation.assigned(traced).keys() - allowed:
        name = names.get(handle, "of no name")
        if "seed_generator" in name:
            raise ValueError(
                "model must draw its random numbers by a "
                "keras.random.SeedGenerator that a layer holds and gives "
                "as seed=, so that they follow from the seed of the round; "
                "it draws from Keras's global one, which all clients would "
                "share."
            )
        raise ValueError(
            "model, loss, optimizer and hooks must keep what training "
            "changes in the model's weights or the optimizer's slots, "
            "where every client starts afresh; training also assigns the "
            f"variable {name!r}, whose value would pass from one "
            "client to the next."
        )
    return traced


def check_not_used(
    training: Callable[..., Any], specs: Any, metric_variables: list[tf.Variable]
) -> None:
    """Raises ValueError if training reads metrics, which add up over clients.

    Args:
      training: What a client does, but for its metrics.
      specs: Of its arguments.
      metric_variables: The metrics' state.
    """
    traced = calls.traced(tf.function(training, autograph=False), *specs)
    used = {id(handle) for handle, _ in traced.graph.captures}
    for variable in metric_variables:
        if id(variable.handle) in used:
            raise ValueError(
                "model, loss, optimizer and hooks must not use the state of compiled "
                f"metrics, which goes on from client to client, got {variable.name!r}."
            )


def _traced_forward_pass(model: tf.keras.Model, element_spec: Any) -> Any:
    def forward_pass() -> Any:
        # Keras 3 names a scope after the model, which may not be a name that
        # a function can begin with.
        with tf.name_scope("forward_pass"):
            return model(zeros_like_batch(element_spec, 2), training=True)

    return calls.traced(tf.function(forward_pass, autograph=False))
