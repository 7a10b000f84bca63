"""Synthetic batches, which show how models and metrics behave.

They are always the same and contain no client's data, so what they show is public.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.datasets import nests

_ROWS, _DRAWS = 7, 4


def batch(
    rng: np.random.Generator,
    nest: nests.Nest,
    probabilities: bool = False,
    classes: Mapping[int, int] | None = None,
) -> nests.Nest:
    """Returns a batch of random numbers with the structure of another batch.

    Args:
      rng: The generator that draws them.
      nest: The other batch, a nest of tensors.
      probabilities: Whether floats are positive and add up to 1 over the last axis.
      classes: By leaf index, the number of different integers; 2 for other leaves.
    """
    tensors = []
    for leaf, tensor in enumerate(tf.nest.flatten(nest)):
        shape = [_ROWS, *tensor.shape[1:]]
        if tensor.dtype == tf.string:
            tensors.append(tf.fill(shape, "0"))
            continue
        if not tensor.dtype.is_floating:
            values = rng.integers(0, (classes or {}).get(leaf, 2), shape)
        elif probabilities:
            values = rng.uniform(0.01, 0.99, shape)
            if len(shape) > 1 and shape[-1] > 1:
                values /= values.sum(axis=-1, keepdims=True)
        else:
            values = 3 * rng.normal(size=shape)
        tensors.append(tf.cast(values, tensor.dtype))
    return tf.nest.pack_sequence_as(nest, tensors)


def non_negative_variables(
    model: tf.keras.Model, variables: list[tf.Variable], x: nests.Nest
) -> list[tf.Variable]:
    """Returns the model's state variables that training never makes negative.

    These are variances, whatever their name, and means of non-negative values. To find
    them, each variable starts at zero, and the model is called on synthetic batches
    with synthetic weights of both signs.

    Args:
      model: The model, which is read and never changed.
      variables: Variables that the model assigns during training.
      x: Nest of features of a batch.
    """
    rng = np.random.default_rng(0)
    initial = [(v, tf.zeros(v.shape, v.dtype)) for v in variables]
    weights, candidates, usable = model.trainable_weights, list(variables), 0
    assigned: set[int] = set()
    for _ in range(_DRAWS if variables else 0):
        features = batch(rng, x)
        draws = [rng.normal(size=v.shape) for v in weights]
        for sign in (1.0, -1.0):
            values = [sign * value for value in draws]
            mapping = [*initial, *zip(weights, values, strict=True)]
            try:
                with keras_versions.stateless(mapping) as scope:
                    model(features, training=True)
                values = [scope.get_current_value(v) for v in candidates]
                updated = [value.numpy() for value in values]
            except Exception:  # Some models cannot handle synthetic numbers.
                continue
            assigned |= {
                id(v)
                for v, value in zip(candidates, values, strict=True)
                if all(value is not zeros for _, zeros in initial)
            }
            usable += all(np.isfinite(value).all() for value in updated)
            pairs = zip(candidates, updated, strict=True)
            candidates = [v for v, value in pairs if not np.any(value < 0)]
    result = [v for v in candidates if id(v) in assigned]
    return result if usable > _DRAWS else []


def non_negative_positions(model: tf.keras.Model) -> list[int]:
    """Returns the indices of `non_negative_variables` in a model's `get_weights()`.

    Raises:
      ValueError: The model's inputs are unknown.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise ValueError(
            "non_negative must be a built model that knows its inputs (sequential or "
            f"functional), or places in get_weights(), got {model!r}."
        )
    shapes = [[1, *(size or 8 for size in tensor.shape[1:])] for tensor in inputs]
    tensors = [
        tf.zeros(s, tf.as_dtype(i.dtype)) for s, i in zip(shapes, inputs, strict=True)
    ]
    state = [
        variable
        for variable in model.non_trainable_weights
        if tf.as_dtype(variable.dtype).is_floating
    ]
    x = tensors[0] if len(tensors) == 1 else tensors
    non_negative = set(map(id, non_negative_variables(model, state, x)))
    return [k for k, tensor in enumerate(model.weights) if id(tensor) in non_negative]
