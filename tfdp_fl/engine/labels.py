"""Labels, and what their examples count: whether they can belong to a model.

Weights change what a client trains, and nothing that is promised about it: its
update is clipped whatever they are, and is zero if they make no number of it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions, losses
from tfdp_fl.datasets import FederatedDataset, nests
from tfdp_fl.engine.program import Program

# Losses of Keras that take a number for each example, whatever the output is.
_OF_NUMBERS = (
    "categorical_generalized_cross_entropy",
    "circle",
    "sparse_categorical_crossentropy",
)


class LabelRange(NamedTuple):
    """What the class labels of one output may be.

    Attributes:
      leaf: Which tensor of the flattened labels it is about.
      num_classes: Labels are from 0 up to, but not including, this.
      ignored: Another value that is allowed (Keras's `ignore_class`), or None.
    """

    leaf: int
    num_classes: int
    ignored: int | None


def spec_for(
    loss: keras_versions.CompileArgument, output: tf.Tensor
) -> tf.TensorSpec | None:
    """Returns the spec of one label for a known loss; None for others.

    Args:
      loss: The loss of an output.
      output: The output's values for a batch.
    """
    function: Any = getattr(loss, "fn", loss)
    if isinstance(loss, losses.BalancedSoftmaxCrossentropy):
        return tf.TensorSpec(output.shape[1:-1], tf.int64)
    if not (keras_versions.is_of_keras(function) and hasattr(function, "__name__")):
        return None  # It may take labels of any kind.
    if function.__name__ in _OF_NUMBERS:
        return tf.TensorSpec(output.shape[1:-1], tf.int64)
    return tf.TensorSpec(output.shape[1:], tf.float32)


def ranges(
    labels: Sequence[tf.Tensor],
    outputs: list[tuple[tf.keras.losses.Loss, tf.Tensor, tf.Tensor]],
) -> list[LabelRange]:
    """Returns the ranges of the labels that are numbers of classes.

    Args:
      labels: Label tensors for a batch, flattened.
      outputs: For each loss the number of its label among these, the output's
        values for the batch, and the loss itself.

    Raises:
      ValueError: Labels cannot belong to the output and its loss. A loss of the
        user's own may take labels of any shape.
    """
    found = []
    for leaf, output, loss in outputs:
        function: Any = getattr(loss, "fn", None)
        if not keras_versions.is_of_keras(function):
            continue
        if labels[leaf].dtype == tf.string:
            raise nests.ExamplesValueError(
                f"labels must be numbers for the loss {loss.name!r}, got "
                "strings; a tf.keras.layers.StringLookup of the classes makes "
                "integers of them."
            )
        shape, expected = labels[leaf].shape[1:], output.shape[1:]
        allowed: tuple[Sequence[int], ...] = (expected,)
        if function.__name__ in _OF_NUMBERS:
            allowed = (expected[:-1], [*expected[:-1], 1])
        elif expected.rank and expected[-1] == 1:
            allowed = (expected, expected[:-1])
        if not any(shape.is_compatible_with(other) for other in allowed):
            raise nests.ExamplesValueError(
                f"labels must have the shape {tuple(allowed[0])} for each "
                f"example, to fit the model's output {tuple(expected)} and "
                f"the loss {loss.name!r}, got {tuple(shape)}."
            )
        sparse = function.__name__ == "sparse_categorical_crossentropy"
        options = getattr(loss, "_fn_kwargs", {})
        if sparse and options.get("axis", -1) == -1:
            ignored = options.get("ignore_class")
            found.append(LabelRange(leaf, output.shape[-1], ignored))
    return found


def describe_problem(leaves: Sequence[tf.Tensor], allowed: list[LabelRange]) -> str:
    """Returns what is wrong with labels; "" if they are allowed.

    Args:
      leaves: Label tensors, flattened.
      allowed: See `ranges`.
    """
    for leaf, num_classes, ignored in allowed:
        values = np.asarray(leaves[leaf])
        inside = (values >= 0) & (values < num_classes)  # Not for a NaN.
        if ignored is not None:
            inside |= values == ignored
        if not inside.all():
            other = f" (or {ignored})"
            if ignored is None:
                other = " (or what the loss is told to leave out, by ignore_class=-1)"
            return (
                f"labels must be integers from 0 to {num_classes - 1}{other}, "
                "to fit the model's output, got one outside of that"
            )
    return ""


def check_clients(dataset: FederatedDataset, allowed: list[LabelRange]) -> None:
    """Raises ValueError if a client has labels that are not allowed; warns of NaN.

    If a dataset is read client by client, its clients are checked when they are
    read.
    """
    if not dataset.is_indexed:
        return
    leaves = list(map(np.asarray, tf.nest.flatten(nests.labels_of(dataset.flat()[1]))))
    if not describe_problem(leaves, allowed):
        missing = sum(
            int(np.isnan(leaf).sum()) for leaf in leaves if leaf.dtype.kind == "f"
        )
        if missing:  # As Keras, whose loss may leave them out.
            warnings.warn(
                f"Labels have {missing} NaN. Unless your loss leaves them out, the "
                "loss of such a client is NaN, and its update counts as zero. Leave "
                "those rows out; or mark them by a number that the loss leaves out, "
                "as SparseCategoricalCrossentropy(ignore_class=-1) does with -1.",
                RuntimeWarning,
                stacklevel=2,
            )
        return
    rows, lengths = dataset.client_rows(np.arange(dataset.num_clients))
    if not describe_problem([leaf[rows] for leaf in leaves], allowed):
        return  # Nobody has such a row.
    for position, own in enumerate(np.split(rows, np.cumsum(lengths))[:-1]):
        wrong = describe_problem([leaf[own] for leaf in leaves], allowed)
        if wrong:
            name = dataset.client_ids[position]
            raise ValueError(f"clients: {wrong} for client {name!r}.")


# Rows that are looked at together.
_ROWS = 8192


class IndexCheck:
    """Checks that features are indices that a model's embeddings can look up.

    On a CPU, an index outside its table raises an error, whose message may quote it;
    on a GPU it looks up zeros.
    """

    def __init__(self, model: tf.keras.Model, features: nests.ElementSpec):
        """Finds the embeddings of a functional or sequential model.

        The layers before them are called on all clients, drawn or not, and nothing of
        that is charged. So they are a `Program`, in which no layer can keep what it
        sees in a weight.

        Args:
          model: It is read, and never changed.
          features: The specs of one example's features.
        """
        found = keras_versions.embedding_inputs(model)
        self._layers = [layer for layer, _ in found]
        self._looked_up: Program | None = None
        if not found:
            return
        # Of one within another model the inputs are not this one's; and a model that
        # is no program is refused before it trains.
        with contextlib.suppress(Exception):
            before = tf.keras.Model(
                keras_versions.inputs_of(model), [tensor for _, tensor in found]
            )
            self._weights = keras_versions.tf_variables(before.weights)

            def look_up(values: list[tf.Tensor], x: nests.Nest) -> list[tf.Tensor]:
                mapping = list(zip(before.weights, values, strict=True))
                with keras_versions.stateless(mapping):
                    return list(map(tf.identity, tf.nest.flatten(before(x))))

            values = [tf.TensorSpec(v.shape, v.dtype) for v in self._weights]
            rows = tf.nest.map_structure(
                lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), features
            )
            self._looked_up = Program(look_up, values, rows, model=model)

    def describe_problem(self, x: nests.Nest) -> tuple[int, str] | None:
        """Returns the first row [0, n) of features that has none, and what is wrong."""
        number = len(tf.nest.flatten(x)[0])
        if self._looked_up is None:
            return None
        for start in range(0, number, _ROWS):
            rows = slice(start, start + _ROWS)
            part = tf.nest.map_structure(
                lambda leaf, rows=rows: tf.convert_to_tensor(leaf[rows]), x
            )
            found = self._looked_up([v.value() for v in self._weights], part)
            for layer, tensor in zip(self._layers, found, strict=True):
                values = np.asarray(tensor).reshape(len(tensor), -1)
                # Keras counts negative ones from the end.
                inside = (values >= -layer.input_dim) & (values < layer.input_dim)
                if not inside.all():
                    row, column = np.argwhere(~inside)[0]
                    return start + int(row), (
                        f"features must be indexes from 0 to {layer.input_dim - 1} for "
                        f"the embedding {layer.name!r}, got one outside of that in "
                        f"column {column}: make input_dim larger, or give values that "
                        "it does not know an index of their own"
                    )
        return None

    def check_clients(self, dataset: FederatedDataset) -> FederatedDataset:
        """Returns clients who are checked when they are read.

        Raises:
          ValueError: Somebody's in memory have such a row.
        """
        if self._looked_up is None:
            return dataset
        if not dataset.is_indexed:
            return dataset.with_check(self._check)
        rows, lengths = dataset.client_rows(np.arange(dataset.num_clients))
        x = tf.nest.map_structure(lambda leaf: tf.gather(leaf, rows), dataset.flat()[0])
        if wrong := self.describe_problem(x):
            position = np.searchsorted(np.cumsum(lengths), wrong[0], side="right")
            name = dataset.client_ids[int(position)]
            raise ValueError(f"clients: {wrong[1]}, for client {name!r}.")
        return dataset

    def _check(self, x: nests.Nest) -> None:
        if wrong := self.describe_problem(x):
            raise nests.ExamplesValueError(f"{wrong[1]}.")
