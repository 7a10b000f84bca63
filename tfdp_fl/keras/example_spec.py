"""What an example must look like: as declared, or as the model and its loss take it.

This is public. No client's data decides it, and a client that does not fit fails alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import engine, keras_versions
from tfdp_fl.datasets import FederatedDataset, nests
from tfdp_fl.engine import labels, trainer


def conform(
    model: tf.keras.Model,
    training: engine.Training,
    clients: FederatedDataset,
    argument: str = "clients",
) -> FederatedDataset:
    """Conforms clients' examples to a declared spec, or to that of model and loss.

    The spec is public: it does not depend on any client, and a client that does not
    fit fails alone.

    Args:
      model: The Keras model.
      training: The compiled settings.
      clients: Any clients.
      argument: The argument's name, for errors.

    Raises:
      ValueError: No spec is declared, and model and loss do not determine one.
    """
    if clients.is_declared:
        return clients
    x, input_names = _features_of(model)
    if x is None or not all(
        leaf.shape.is_fully_defined() for leaf in tf.nest.flatten(x)
    ):
        raise _missing_spec(argument, "the model does not tell the sizes of its inputs")
    check_features(model, x, argument)
    predicted = model(trainer.zeros_like_batch(x), training=False)
    y, weight = _labels_of(model, training, predicted)
    if y is None:
        raise _missing_spec(argument, "the loss does not tell what its labels are")
    if weight is not None:
        y = nests.Weighted(y, weight)
    names = input_names, getattr(model, "output_names", None) or ()
    return clients.conform((x, y), names)


def conform_all(
    model: tf.keras.Model, training: engine.Training, clients: FederatedDataset
) -> FederatedDataset:
    """Like `conform`, but refuses a dataset in memory in which no client fits."""
    conformed = conform(model, training, clients)
    failed = conformed.failures(np.arange(clients.num_clients))
    if clients.is_streamed or not failed or conformed.client_sizes().any():
        check = labels.IndexCheck(model, conformed.element_spec[0])
        return check.check_clients(conformed)
    position = failed[0].position
    client = clients.take([position])
    x, y = client.element_spec[0], nests.labels_of(client.element_spec[1])
    # A more detailed error, if it cannot quote a name that the client may have chosen.
    if isinstance(x, tf.TensorSpec) and isinstance(y, tf.TensorSpec):
        with locate_features_errors(model, client):
            x, y = map(trainer.zeros_like_batch, (x, y))
            labels.ranges([y], _outputs(model, training, model(x)))
    error, name = failed[0].error, clients.client_ids[position]
    raise type(error)(f"clients (client {name!r}): {error}") from error


def _missing_spec(argument: str, why: str) -> ValueError:
    return ValueError(
        f"{argument} must have an element_spec, because {why}, and what clients hold "
        "must not decide it: declare the tf.TensorSpecs of one example, as in "
        "tfdp_fl.datasets.as_federated(clients, element_spec=(tf.TensorSpec([20], "
        "tf.int64), tf.TensorSpec([], tf.float32)))."
    )


def _features_of(model: tf.keras.Model) -> tuple[nests.Nest, list[str]]:
    """Returns the specs of a model's inputs (None if unknown) and their names."""
    inputs = keras_versions.inputs_of(model)
    if inputs is not None:
        leaves = tf.nest.flatten(inputs)
        specs = [_spec(leaf.shape[1:], tf.as_dtype(leaf.dtype)) for leaf in leaves]
        names = [leaf.name.partition(":")[0] for leaf in leaves]
        return tf.nest.pack_sequence_as(inputs, specs), names
    # A subclassed model knows the shapes that it was built with, but not the dtypes.
    build_config: Any = getattr(model, "get_build_config", dict)() or {}
    shapes: Any = build_config.get("input_shape")
    is_one = isinstance(shapes, tuple) and not any(map(np.iterable, shapes))
    parts: Any = shapes if isinstance(shapes, dict) else {"": is_one and shapes}
    for dtype in tf.float32, tf.int64:
        with contextlib.suppress(TypeError, ValueError):
            spec = {k: tf.TensorSpec(part[1:], dtype) for k, part in parts.items()}
            spec = spec if isinstance(shapes, dict) else spec[""]
            check_features(model, spec, "")
            return spec, []
    return None, []


def _spec(shape: tf.TensorShape, dtype: tf.DType) -> tf.TensorSpec:
    """Returns a spec with floats widened to 32 bits and integers to 64 bits."""
    if dtype.is_floating:
        return tf.TensorSpec(shape, tf.float32)
    return tf.TensorSpec(shape, tf.int64 if dtype.is_integer else dtype)


def _outputs(
    model: tf.keras.Model, training: engine.Training, predicted: nests.Nest
) -> list[tuple[tf.keras.losses.Loss, tf.Tensor, tf.Tensor]]:
    """Returns each loss, its output, and the index of its labels."""
    flat = tf.nest.flatten(predicted)
    if not keras_versions.IS_KERAS_3:
        return [(0, flat[0], tf.keras.losses.get(training.loss))]
    compiled, _ = keras_versions.compiled_loss_and_metrics(
        model, training.loss, None, training.loss_weights, None
    )
    indices = tf.nest.pack_sequence_as(predicted, range(len(flat)))
    return keras_versions.labels_and_outputs(
        training.loss, compiled, indices, predicted
    )


def _labels_of(
    model: tf.keras.Model, training: engine.Training, predicted: nests.Nest
) -> nests.ElementSpec:
    """Returns the specs of labels and of their weights; None if unknown."""
    flat = tf.nest.flatten(predicted)
    if {"crossentropy", "ce"}.intersection(map(str, tf.nest.flatten(training.loss))):
        return None, None  # Keras decides by the labels themselves.
    outputs = _outputs(model, training, predicted)
    by_index = {index: labels.spec_for(loss, output) for index, output, loss in outputs}
    specs = [by_index.get(index) for index in range(len(flat))]
    if not all(spec is not None and spec.shape.is_fully_defined() for spec in specs):
        return None, None
    weight = None
    if keras_versions.IS_KERAS_3:
        # One weight per example, whatever the rank of its losses.
        shapes = ([1] * max(0, output.shape.rank - 2) for output in flat)
        weight = tf.nest.pack_sequence_as(predicted, list(map(tf.TensorSpec, shapes)))
    return tf.nest.pack_sequence_as(predicted, specs), weight


def check_features(
    model: tf.keras.Model, spec: nests.Nest, argument: str, whose: str = ""
) -> None:
    """Raises ValueError if a model cannot take features."""
    try:
        model(trainer.zeros_like_batch(spec), training=False)
    except Exception as error:  # A layer's own code can raise any error.
        # (It was called on zeros, so the message cannot quote a client's example.)
        inputs = getattr(model, "inputs", None) or ()  # A subclassed model has none.
        expected = "".join(
            f", {tf.as_dtype(leaf.dtype).name}{list(leaf.shape[1:])}" for leaf in inputs
        )
        got = nests.describe_spec(spec)
        if expected == f", {got}":  # The features fit, so the model itself is at fault.
            raise nests.ExamplesValueError(
                f"model must be callable on {argument}, of {got} for each example"
                f"{whose}, got a {type(error).__name__} on zeros: "
                f"{' '.join(str(error).split())}"
            ) from error
        raise nests.ExamplesValueError(
            f"{argument} must have features that the model takes{expected}, got "
            f"{got} for each example{whose}."
        ) from error


@contextlib.contextmanager
def locate_features_errors(
    model: tf.keras.Model, clients: FederatedDataset, argument: str = "clients"
) -> Iterator[None]:
    """Checks the features; inside the block, errors about examples name a client."""
    position = 0
    if not clients.is_streamed:
        position = int(np.argmax(clients.client_sizes() > 0))
    whose = f"client {clients.client_ids[position]!r}"
    check_features(model, clients.element_spec[0], argument, f" of {whose}")
    try:
        yield
    except nests.SAFE_ERRORS as error:
        raise type(error)(f"{argument} ({whose}): {error}") from error
