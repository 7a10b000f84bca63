"""Large tables of which a client trains only the rows that its examples look up.

A client's update of an embedding is zero but in the rows that its examples name.
Where that is certain, the client is given these rows alone, as a small table, and
its examples name their places in it. Its update has the same norm. The zeros are
neither computed nor added, and the noise falls on the whole table as ever.

It is certain where the traced forward pass uses the table in a single gather, whose
indices are a feature of the model as it came, and that feature nowhere else; and
where a step moves no row whose gradient is zero. Of optimizers, plain SGD alone is
trusted with that.
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
from tfdp_fl.mechanisms import contribution, records

# Smaller ones are faster as they are.
_LEAST_ELEMENTS = 2**16
# What leaves every number of a feature as it is, with all its inputs but the first.
_PRESERVING = {"Cast", "EnsureShape", "ExpandDims", "Identity", "Reshape", "Squeeze"}
_INTEGERS = (tf.int32, tf.int64)


class Lookup(NamedTuple):
    """A weight, and the feature that alone looks up its rows.

    Attributes:
      weight: The place of the weight, [V, d], among the trainable ones.
      feature: The place of the feature among the leaves of x.
      size: The rows of the table, V.
      dtype: As what the feature's numbers are looked up.
    """

    weight: int
    feature: int
    size: int
    dtype: tf.DType


def plain_gathers(
    model: tf.keras.Model, tables: list[tf.keras.layers.Embedding]
) -> contextlib.AbstractContextManager[None]:
    """Has embeddings look up rows by a gather, and nothing else, in a block.

    Keras's own also counts a negative place from the table's end; `narrow` does that.

    Args:
      model: What is traced in the block.
      tables: The embeddings' weights.
    """
    own = set(map(id, tables))
    return layers.replace_calls(
        [(one, _gather_of(one)) for one in _plain(model) if id(one.embeddings) in own]
    )


def _plain(model: tf.keras.Model) -> list[tf.keras.layers.Embedding]:
    """Returns the embeddings that look up rows of a weight, and of nothing computed."""
    return [
        layer
        for layer in layers.of_kind(model, tf.keras.layers.Embedding)
        if layer.built and not keras_versions.has_adapted_weights(layer)
    ]


def _gather_of(layer: tf.keras.layers.Layer) -> layers.Call:
    def call(inputs: nests.Nest, by_keras: Callable[[], tf.Tensor]) -> tf.Tensor:
        if not isinstance(inputs, tf.Tensor):
            return by_keras()
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
    """Returns the lookups of which it is certain, of tables that are large.

    Args:
      model: The embeddings are its.
      forward: Takes features, labels, and the values of the weights, and computes
        what a step does before the gradients.
      specs: Specs of a batch, (features, labels).
      weights: The trainable weights.
    """
    own = {id(layer.embeddings) for layer in _plain(model)}
    tables = {n: v.shape[0] for n, v in enumerate(weights) if id(v) in own}
    large = {n for n in tables if math.prod(weights[n].shape) >= _LEAST_ELEMENTS}
    if not large:
        return ()

    # Tables of any length, as in the program that is made of what is found.
    values = [
        tf.TensorSpec(
            [None, *weight.shape[1:]] if number in tables else weight.shape,
            weight.dtype,
        )
        for number, weight in enumerate(weights)
    ]
    found: list[Lookup] = []

    def step(x: nests.Nest, y: nests.Nest, values: list[tf.Tensor]) -> None:
        with plain_gathers(model, [weights[number] for number in tables]):
            forward(x, y, values)
        found.extend(_of_features(x, values, tables, large))

    try:
        tf.function(step, autograph=False).get_concrete_function(*specs, values)
    except Exception:  # The program itself, traced next, says what is wrong.
        return ()
    return tuple(found)


def _of_features(
    x: nests.Nest, values: list[tf.Tensor], tables: dict[int, int], large: set[int]
) -> Iterator[Lookup]:
    for place, feature in enumerate(tf.nest.flatten(x)):
        gathers = _gathers(feature) if feature.dtype in _INTEGERS else None
        read = [_table_of(gather, values) for gather in gathers or ()]
        if not read or not all(number in tables for number in read):
            continue
        # Of two tables that share a feature, its places are the same rows.
        (dtype, *others) = {gather.inputs[1].dtype for gather in gathers or ()}
        (size, *sizes) = {tables[number] for number in read}
        if large.intersection(read) and not (others or sizes):
            for number in read:
                yield Lookup(number, place, size, dtype)


def _table_of(gather: tf.Operation, values: list[tf.Tensor]) -> int:
    """Returns which weight a gather reads, if nothing else does; -1: none."""
    for number, value in enumerate(values):
        if gather.inputs[0] is value and value.consumers() == [gather]:
            return number
    return -1


def _gathers(tensor: tf.Tensor) -> list[tf.Operation] | None:
    """Returns the gathers whose indices are a tensor's numbers; None: other uses."""
    found: list[tf.Operation] = []
    for use in tensor.consumers():
        if use.type == "GatherV2" and use.inputs[1] is tensor and _is_of_rows(use):
            found.append(use)
        elif use.type != "Shape":
            if (
                use.type not in _PRESERVING
                or use.inputs[0] is not tensor
                or use.outputs[0].dtype not in _INTEGERS
            ):
                return None
            further = _gathers(use.outputs[0])
            # Numbers that wrap in a cast are looked up as what they wrap to.
            if further is None or any(
                gather.inputs[1].dtype != use.outputs[0].dtype for gather in further
            ):
                return None
            found += further
    return found


def _is_of_rows(gather: tf.Operation) -> bool:
    axis = tf.get_static_value(gather.inputs[2])
    return axis == 0 and not gather.get_attr("batch_dims")


def narrow(
    lookups: tuple[Lookup, ...],
    received: cohort.Broadcast,
    x: nests.Nest,
    rows: tf.Tensor,
) -> tuple[cohort.Broadcast, list[tf.Tensor]]:
    """Returns the part of the tables that a client is sent: the rows that it looks up.

    Args:
      lookups: Of which it is certain.
      received: What the server sends.
      x: Nest of feature tensors, leading dimension over stored examples.
      rows: Int32 [n], which examples are the client's.

    Returns:
      What is sent; and for each lookup the rows of the table, int64 [u], sorted.
    """
    weights, taken = list(received.weights), []
    leaves = tf.nest.flatten(x)
    for weight, feature, size, dtype in lookups:
        named = tf.gather(leaves[feature], rows)
        places = tf.sort(tf.unique(_places(named, size, dtype))[0])
        weights[weight] = tf.gather(weights[weight], places)
        taken.append(places)
    return received._replace(weights=weights), taken


def rename(
    lookups: tuple[Lookup, ...], taken: list[tf.Tensor], x: nests.Nest
) -> nests.Nest:
    """Returns a batch of features that name the places of rows among those taken.

    Args:
      lookups: Of which it is certain.
      taken: As `narrow` returns them.
      x: The batch.
    """
    leaves = tf.nest.flatten(x)
    # Tables that share a feature have the same places in it.
    by_feature = {
        lookup.feature: (lookup, places)
        for lookup, places in zip(lookups, taken, strict=True)
    }
    for feature, (lookup, places) in by_feature.items():
        leaf = leaves[feature]
        named = _places(leaf, lookup.size, lookup.dtype)
        found = tf.searchsorted(places, named)
        found = tf.cast(tf.reshape(found, tf.shape(leaf)), leaf.dtype)
        leaves[feature] = tf.ensure_shape(found, leaf.shape)
    return tf.nest.pack_sequence_as(x, leaves)


def _places(named: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
    """Returns flat places in a table; in Keras a negative one counts from the end."""
    flat = tf.cast(tf.cast(tf.reshape(named, [-1]), dtype), tf.int64)
    return tf.where(flat < 0, flat + size, flat)


def accumulate(
    lookups: tuple[Lookup, ...],
    taken: list[tf.Tensor],
    total: contribution.Contribution,
    one: contribution.Contribution,
) -> contribution.Contribution:
    """Returns a sum of contributions with a client's added, whose tables are narrow."""
    if not lookups:
        return records.add(total, one)
    places = {lookup.weight: rows for lookup, rows in zip(lookups, taken, strict=True)}
    whole = [k for k in range(len(total.update)) if k not in places]
    added = records.add(
        *(
            each._replace(update=[each.update[k] for k in whole])
            for each in (total, one)
        )
    )
    update = dict(zip(whole, added.update, strict=True))
    for k, rows in places.items():
        table, part = total.update[k], one.update[k]
        update[k] = tf.tensor_scatter_nd_add(
            table, rows[:, None], tf.cast(part, table.dtype)
        )
    return added._replace(update=[update[k] for k in range(len(update))])
