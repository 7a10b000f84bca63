"""Large tables in which a client trains only the rows that its examples look up.

A client's update of an embedding is zero except in the rows that its examples look
up. If that is certain, the client gets only these rows, as a small table, and its
examples' indices are renumbered to match. Its update has the same norm. The zeros are
neither computed nor added, while noise is still added to the whole table.

It is certain under two conditions. The traced forward pass uses the table in a single
gather, whose indices are an unchanged feature of the model that is used nowhere else.
And a step must not move a row with a zero gradient; we trust only plain SGD with that.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.datasets import nests
from tfdp_fl.engine import cohort, layers
from tfdp_fl.mechanisms import bounded_sums, contribution

# Smaller tables are faster whole.
_MIN_ELEMENTS = 2**16
# Operations that leave the numbers in their first input unchanged.
_PRESERVING = {"Cast", "EnsureShape", "ExpandDims", "Identity", "Reshape", "Squeeze"}
_INTEGERS = (tf.int32, tf.int64)


class Lookup(NamedTuple):
    """A weight and the only feature that looks up its rows.

    Attributes:
      weight: The position of the weight, [V, d], among the trainable ones.
      feature: The position of the feature among the leaves of x.
      size: V, the number of rows in the table.
      dtype: The dtype in which the feature's numbers are looked up.
    """

    weight: int
    feature: int
    size: int
    dtype: tf.DType


def plain_gathers(
    model: tf.keras.Model, tables: list[tf.keras.layers.Embedding]
) -> contextlib.AbstractContextManager[None]:
    """Makes embeddings look up rows with a plain gather inside the block.

    Keras also counts negative indices from the table's end; `narrow` does that here.

    Args:
      model: The model traced in the block.
      tables: The embeddings.
    """
    table_ids = set(map(id, tables))
    return layers.replace_calls(
        [
            (layer, _gather_of(layer))
            for layer in _plain_embeddings(model)
            if id(layer.embeddings) in table_ids
        ]
    )


def _plain_embeddings(model: tf.keras.Model) -> list[tf.keras.layers.Embedding]:
    """Returns the embeddings that look up rows of a weight, not of computed values."""
    return [
        layer
        for layer in layers.of_kind(model, tf.keras.layers.Embedding)
        if layer.built and not keras_versions.has_adapted_weights(layer)
    ]


def _gather_of(layer: tf.keras.layers.Layer) -> layers.Call:
    def call(inputs: nests.Nest, original_call: Callable[[], tf.Tensor]) -> tf.Tensor:
        if not isinstance(inputs, tf.Tensor):
            return original_call()
        if inputs.dtype not in _INTEGERS:
            inputs = tf.cast(inputs, tf.int32)
        rows = tf.gather(tf.convert_to_tensor(layer.embeddings), inputs)
        return tf.cast(rows, layer.compute_dtype)

    return call


def find(
    model: tf.keras.Model,
    forward: Callable[[nests.Nest, nests.Nest, list[tf.Tensor]], object],
    specs: nests.Nest,
    weights: list[keras_versions.KerasVariable],
) -> tuple[Lookup, ...]:
    """Returns the lookups of large tables that certainly qualify.

    Args:
      model: The model that holds the embeddings.
      forward: Takes features, labels and the values of the weights, and computes the
        part of a step that precedes the gradients.
      specs: Specs of a batch, (features, labels).
      weights: The trainable weights.
    """
    table_ids = {id(layer.embeddings) for layer in _plain_embeddings(model)}
    tables = {n: v.shape[0] for n, v in enumerate(weights) if id(v) in table_ids}
    large = {n for n in tables if math.prod(weights[n].shape) >= _MIN_ELEMENTS}
    if not large:
        return ()

    # Tables of unknown length, as in the program that uses these lookups.
    values = [
        tf.TensorSpec(
            [None, *weight.shape[1:]] if number in tables else weight.shape,
            weight.dtype,
        )
        for number, weight in enumerate(weights)
    ]
    lookups: list[Lookup] = []

    def step(x: nests.Nest, y: nests.Nest, values: list[tf.Tensor]) -> None:
        with plain_gathers(model, [weights[number] for number in tables]):
            forward(x, y, values)
        lookups.extend(_find_in_features(x, values, tables, large))

    try:
        tf.function(step, autograph=False).get_concrete_function(*specs, values)
    except Exception:  # Tracing the program itself, next, reports what is wrong.
        return ()
    return tuple(lookups)


def _find_in_features(
    x: nests.Nest, values: list[tf.Tensor], tables: dict[int, int], large: set[int]
) -> Iterator[Lookup]:
    for feature_index, feature in enumerate(tf.nest.flatten(x)):
        gathers = _gathers(feature) if feature.dtype in _INTEGERS else None
        weight_indices = [_table_of(gather, values) for gather in gathers or ()]
        if not weight_indices or not all(number in tables for number in weight_indices):
            continue
        # If two tables share a feature, its indices name the same rows in both.
        (dtype, *others) = {gather.inputs[1].dtype for gather in gathers or ()}
        (size, *sizes) = {tables[number] for number in weight_indices}
        if large.intersection(weight_indices) and not (others or sizes):
            for number in weight_indices:
                yield Lookup(number, feature_index, size, dtype)


def _table_of(gather: tf.Operation, values: list[tf.Tensor]) -> int:
    """Returns the index of the weight that only this gather reads; -1: none."""
    for number, value in enumerate(values):
        if gather.inputs[0] is value and value.consumers() == [gather]:
            return number
    return -1


def _gathers(tensor: tf.Tensor) -> list[tf.Operation] | None:
    """Returns the gathers indexed by a tensor's numbers; None: it has other uses."""
    gathers: list[tf.Operation] = []
    for consumer in tensor.consumers():
        if (
            consumer.type == "GatherV2"
            and consumer.inputs[1] is tensor
            and _is_of_rows(consumer)
        ):
            gathers.append(consumer)
        elif consumer.type != "Shape":
            if (
                consumer.type not in _PRESERVING
                or consumer.inputs[0] is not tensor
                or consumer.outputs[0].dtype not in _INTEGERS
            ):
                return None
            nested = _gathers(consumer.outputs[0])
            # Numbers that overflow in a cast are looked up by their wrapped value.
            if nested is None or any(
                gather.inputs[1].dtype != consumer.outputs[0].dtype for gather in nested
            ):
                return None
            gathers += nested
    return gathers


def _is_of_rows(gather: tf.Operation) -> bool:
    axis = tf.get_static_value(gather.inputs[2])
    return axis == 0 and not gather.get_attr("batch_dims")


def narrow(
    lookups: tuple[Lookup, ...],
    broadcast: cohort.Broadcast,
    x: nests.Nest,
    rows: tf.Tensor,
) -> tuple[cohort.Broadcast, list[tf.Tensor]]:
    """Reduces the tables that a client is sent to the rows that it looks up.

    Args:
      lookups: The lookups that qualify.
      broadcast: What the server sends.
      x: Nest of feature tensors; the leading dimension is over stored examples.
      rows: Int32 [n], the client's examples.

    Returns:
      The broadcast with small tables; and each lookup's table rows, int64 [u], sorted.
    """
    weights, table_rows = list(broadcast.weights), []
    leaves = tf.nest.flatten(x)
    for weight, feature, size, dtype in lookups:
        indices = tf.gather(leaves[feature], rows)
        unique_rows = tf.sort(tf.unique(_row_indices(indices, size, dtype))[0])
        weights[weight] = tf.gather(weights[weight], unique_rows)
        table_rows.append(unique_rows)
    return broadcast._replace(weights=weights), table_rows


def rename(
    lookups: tuple[Lookup, ...], table_rows: list[tf.Tensor], x: nests.Nest
) -> nests.Nest:
    """Renumbers the features in a batch to index the rows that were taken.

    Args:
      lookups: The lookups that qualify.
      table_rows: The table rows from `narrow`.
      x: The batch.
    """
    leaves = tf.nest.flatten(x)
    # Tables that share a feature have the same rows taken.
    by_feature = {
        lookup.feature: (lookup, unique_rows)
        for lookup, unique_rows in zip(lookups, table_rows, strict=True)
    }
    for feature, (lookup, unique_rows) in by_feature.items():
        leaf = leaves[feature]
        indices = _row_indices(leaf, lookup.size, lookup.dtype)
        new_indices = tf.searchsorted(unique_rows, indices)
        new_indices = tf.cast(tf.reshape(new_indices, tf.shape(leaf)), leaf.dtype)
        leaves[feature] = tf.ensure_shape(new_indices, leaf.shape)
    return tf.nest.pack_sequence_as(x, leaves)


def _row_indices(indices: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
    """Returns flat row indices; negative ones count from the end, as in Keras."""
    flat = tf.cast(tf.cast(tf.reshape(indices, [-1]), dtype), tf.int64)
    return tf.where(flat < 0, flat + size, flat)


def accumulate(
    lookups: tuple[Lookup, ...],
    table_rows: list[tf.Tensor],
    total: contribution.Contribution,
    own: contribution.Contribution,
) -> contribution.Contribution:
    """Adds a client's contribution, with its small tables, to a sum."""
    if not lookups:
        return bounded_sums.add(total, own)
    rows_by_weight = {
        lookup.weight: rows for lookup, rows in zip(lookups, table_rows, strict=True)
    }
    whole_tables = [k for k in range(len(total.update)) if k not in rows_by_weight]
    added = bounded_sums.add(
        *(
            nest._replace(update=[nest.update[k] for k in whole_tables])
            for nest in (total, own)
        )
    )
    update = dict(zip(whole_tables, added.update, strict=True))
    for k, rows in rows_by_weight.items():
        table, part = total.update[k], own.update[k]
        update[k] = tf.tensor_scatter_nd_add(
            table, rows[:, None], tf.cast(part, table.dtype)
        )
    return added._replace(update=[update[k] for k in range(len(update))])
