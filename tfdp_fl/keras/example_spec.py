"""Determines an example's spec: as declared, or as the model and its loss expect it.

The spec is public: it does not depend on any client's data. If a client does not fit,
only that client fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _signals, engine, keras_versions
from tfdp_fl.datasets import FederatedDataset, nests
from tfdp_fl.engine import labels, trainer


def conform(
    model: tf.keras.Model,
    training: engine.Training,
    clients: FederatedDataset,
    argument: str = "clients",
) -> FederatedDataset:
    """Casts clients' examples to the declared spec, or to that of model and loss.

    Args:
      model: The Keras model.
      training: The compiled settings.
      clients: The clients.
      argument: The argument's name, for errors.

    Raises:
      ValueError: No spec is declared, and model and loss do not determine one; or
        the declared features are floats where the model takes integers.
    """
    if clients.is_declared:
        if keras_versions.inputs_of(model) is not None:
            wanted, input_names = _feature_specs(model)
            _check_integers(wanted, input_names, clients.element_spec[0], argument)
        return clients
    x, input_names = _feature_specs(model)
    if x is None or not all(
        leaf.shape.is_fully_defined() for leaf in tf.nest.flatten(x)
    ):
        reason = "the model does not specify the sizes of its inputs"
        raise _missing_spec_error(argument, reason)
    check_features(model, x, argument)
    predicted = model(trainer.zeros_like_batch(x), training=False)
    y, weight = _label_specs(model, training, predicted)
    if y is None:
        reason = "the loss does not specify what its labels are"
        raise _missing_spec_error(argument, reason)
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
    # Raise a more detailed error, unless it could quote names chosen by the client.
    if isinstance(x, tf.TensorSpec) and isinstance(y, tf.TensorSpec):
        with locate_features_errors(model, client):
            x, y = map(trainer.zeros_like_batch, (x, y))
            labels.ranges([y], _losses_and_outputs(model, training, model(x)))
    error, name = failed[0].error, clients.client_ids[position]
    raise type(error)(f"clients (client {name!r}): {error}") from error


def _check_integers(
    wanted: nests.Nest, names: list[str], x: nests.Nest, argument: str
) -> None:
    """Raises ValueError if features are floats where a model takes integers.

    A fraction in one client's row makes a whole column floats, and then float32 rounds
    all others' large ids.

    Args:
      wanted: The specs of the model's inputs.
      names: Their names, in the order of the leaves.
      x: The specs of the features; Keras takes dictionaries by key or by input name.
      argument: The argument's name, for errors.
    """
    by_name = wanted
    if isinstance(x, dict) and not isinstance(wanted, dict):
        by_name = dict(zip(names, tf.nest.flatten(wanted), strict=True))
    if isinstance(x, dict) and set(x) == set(by_name):
        pairs = [(by_name[name], x[name]) for name in x]
    else:
        pairs = [*zip(*map(tf.nest.flatten, (wanted, x)), strict=False)]
    if any(w.dtype.is_integer and not given.dtype.is_integer for w, given in pairs):
        raise ValueError(
            f"{argument} must be integers where the model takes integers "
            f"({nests.describe_spec(wanted)}), got {nests.describe_spec(x)}: round and "
            "cast them (astype('int64')), or declare the input as float32."
        )


def _missing_spec_error(argument: str, why: str) -> ValueError:
    return ValueError(
        f"{argument} must have an element_spec, because {why}, and it must not depend "
        "on the clients' data: declare the tf.TensorSpecs of one example, as in "
        "tfdp_fl.datasets.as_federated(clients, element_spec=(tf.TensorSpec([20], "
        "tf.int64), tf.TensorSpec([], tf.float32)))."
    )


def _feature_specs(model: tf.keras.Model) -> tuple[nests.Nest, list[str]]:
    """Returns the specs of a model's inputs (None if unknown) and their names."""
    inputs = keras_versions.inputs_of(model)
    if inputs is not None:
        leaves = tf.nest.flatten(inputs)
        specs = [_spec(leaf.shape[1:], tf.as_dtype(leaf.dtype)) for leaf in leaves]
        names = [leaf.name.partition(":")[0] for leaf in leaves]
        return tf.nest.pack_sequence_as(inputs, specs), names
    # A subclassed model knows the shapes that it was built with, but no dtypes.
    build_config: Any = getattr(model, "get_build_config", dict)() or {}
    shapes: Any = build_config.get("input_shape")
    is_single = isinstance(shapes, tuple) and not any(map(np.iterable, shapes))
    parts: Any = shapes if isinstance(shapes, dict) else {"": is_single and shapes}
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


@_signals.defer_signals()  # Errors in here are taken for the model's.
def _losses_and_outputs(
    model: tf.keras.Model, training: engine.Training, predicted: nests.Nest
) -> list[tuple[Any, tf.Tensor, tf.keras.losses.Loss]]:
    """Returns, for each loss: the index of its labels, its output, and the loss."""
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


def _label_specs(
    model: tf.keras.Model, training: engine.Training, predicted: nests.Nest
) -> nests.ElementSpec:
    """Returns the specs of labels and of their weights; None if unknown."""
    flat = tf.nest.flatten(predicted)
    if {"crossentropy", "ce"}.intersection(map(str, tf.nest.flatten(training.loss))):
        return None, None  # Keras chooses the loss by the labels themselves.
    outputs = _losses_and_outputs(model, training, predicted)
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


@_signals.defer_signals()
def check_features(
    model: tf.keras.Model, spec: nests.Nest, argument: str, whose: str = ""
) -> None:
    """Raises ValueError if a model cannot take features of a spec."""
    try:
        model(trainer.zeros_like_batch(spec), training=False)
    except Exception as error:  # A layer's own code can raise any error.
        # (The model was called on zeros, so the message cannot quote an example.)
        inputs = getattr(model, "inputs", None) or ()  # A subclassed model has none.
        expected = "".join(
            f", {tf.as_dtype(leaf.dtype).name}{list(leaf.shape[1:])}" for leaf in inputs
        )
        got = nests.describe_spec(spec)
        if expected == f", {got}":  # The features fit, so the model itself fails.
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
    """Checks the features; errors about examples in the block name a client."""
    position = 0
    if not clients.is_streamed:
        position = int(np.argmax(clients.client_sizes() > 0))
    whose = f"client {clients.client_ids[position]!r}"
    check_features(model, clients.element_spec[0], argument, f" of {whose}")
    try:
        yield
    except nests.SAFE_ERRORS as error:
        raise type(error)(f"{argument} ({whose}): {error}") from error
