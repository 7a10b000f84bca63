"""Checks that labels, example weights and embedding indices fit a model.

Example weights affect a client's training but not the privacy guarantee: its update is
clipped whatever they are, and counts as zero if they make it NaN or infinite.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl import _signals, keras_versions, losses
from tfdp_fl.datasets import FederatedDataset, nests
from tfdp_fl.engine.program import CLIENT_ERRORS, Program

# Keras losses that take one number per example, whatever the output.
_ONE_NUMBER_LOSSES = (
    "categorical_generalized_cross_entropy",
    "circle",
    "sparse_categorical_crossentropy",
)


class LabelRange(NamedTuple):
    """The allowed class labels of one output.

    Attributes:
      leaf: The index of its tensor among the flattened labels.
      num_classes: Labels are in [0, num_classes).
      ignored: A further allowed value (Keras's `ignore_class`), or None.
    """

    leaf: int
    num_classes: int
    ignored: int | None


def spec_for(
    loss: keras_versions.CompileArgument, output: tf.Tensor
) -> tf.TensorSpec | None:
    """Returns the spec of one label for one of Keras's losses; None for other losses.

    Args:
      loss: The loss of an output.
      output: The output's values for a batch.
    """
    function: Any = getattr(loss, "fn", loss)
    if isinstance(loss, losses.BalancedSoftmaxCrossentropy):
        return tf.TensorSpec(output.shape[1:-1], tf.int64)
    if not (keras_versions.is_of_keras(function) and hasattr(function, "__name__")):
        return None  # It may take any labels.
    if function.__name__ in _ONE_NUMBER_LOSSES:
        return tf.TensorSpec(output.shape[1:-1], tf.int64)
    return tf.TensorSpec(output.shape[1:], tf.float32)


def ranges(
    labels: Sequence[tf.Tensor],
    outputs: list[tuple[Any, tf.Tensor, tf.keras.losses.Loss]],
) -> list[LabelRange]:
    """Returns the ranges of the labels that are class indices.

    Args:
      labels: Label tensors for a batch, flattened.
      outputs: For each loss: the index of its label among `labels`, the output's values
        for the batch, and the loss.

    Raises:
      ValueError: Labels do not fit the output and its loss. A user-defined loss may
        take labels of any shape.
    """
    result = []
    for leaf, output, loss in outputs:
        function: Any = getattr(loss, "fn", None)
        if not keras_versions.is_of_keras(function):
            continue
        if labels[leaf].dtype == tf.string:
            raise nests.ExamplesValueError(
                f"labels must be numbers for the loss {loss.name!r}, got "
                "strings; a tf.keras.layers.StringLookup of the classes converts "
                "them."
            )
        if function.__name__ == "ctc":  # Its labels are as long as they like.
            continue
        shape, expected = labels[leaf].shape[1:], output.shape[1:]
        allowed: tuple[Sequence[int], ...] = (expected,)
        if function.__name__ in _ONE_NUMBER_LOSSES:
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
            result.append(LabelRange(leaf, output.shape[-1], ignored))
    return result


def describe_problem(leaves: Sequence[tf.Tensor], allowed: list[LabelRange]) -> str:
    """Describes what is wrong with labels; "" if they are allowed.

    Args:
      leaves: Label tensors, flattened.
      allowed: See `ranges`.
    """
    for leaf, num_classes, ignored in allowed:
        values = np.asarray(leaves[leaf])
        in_range = (values >= 0) & (values < num_classes)  # False for NaN.
        if ignored is not None:
            in_range |= values == ignored
        if not in_range.all():
            other = f" (or {ignored})"
            if ignored is None:
                other = " (or what the loss is told to ignore, by ignore_class=-1)"
            return (
                f"labels must be integers from 0 to {num_classes - 1}{other}, "
                "to fit the model's output, got another value"
            )
    return ""


def check_clients(
    dataset: FederatedDataset, allowed: list[LabelRange], argument: str = "clients"
) -> FederatedDataset:
    """Returns a dataset that checks labels when clients are read.

    Raises:
      ValueError: A client in memory has labels that are not allowed.
    """
    if not dataset.is_indexed:

        def check(x: nests.Nest, y: nests.Nest) -> None:
            del x
            leaves = tf.nest.flatten(nests.labels_of(y))
            if problem := describe_problem(leaves, allowed):
                raise nests.ExamplesValueError(f"{problem}.")

        return dataset.with_check(check)
    leaves = _stored_labels(dataset)
    if not describe_problem(leaves, allowed):
        return dataset
    rows, lengths = dataset.client_rows(np.arange(dataset.num_clients))
    if not describe_problem([leaf[rows] for leaf in leaves], allowed):
        return dataset  # No client has such a row.
    for position, client_rows in enumerate(np.split(rows, np.cumsum(lengths))[:-1]):
        problem = describe_problem([leaf[client_rows] for leaf in leaves], allowed)
        if problem:
            name = dataset.client_ids[position]
            raise ValueError(f"{argument}: {problem} for client {name!r}.")
    return dataset


def warn_of_missing(dataset: FederatedDataset) -> None:
    """Warns if clients in memory have labels that are NaN."""
    if not dataset.is_indexed:
        return
    leaves = _stored_labels(dataset)
    if any(np.isnan(leaf).any() for leaf in leaves if leaf.dtype.kind == "f"):
        # Only a warning, as a Keras loss may leave them out.
        warnings.warn(
            "Some labels are NaN. Unless your loss ignores them, the loss of such a "
            "client is NaN, and its update counts as zero. Drop those rows, or mark "
            "them with a number that the loss ignores, as "
            "SparseCategoricalCrossentropy(ignore_class=-1) does with -1. (Keep this "
            "warning secret, as no epsilon covers it.)",
            RuntimeWarning,
            stacklevel=2,
        )


def _stored_labels(dataset: FederatedDataset) -> list[np.ndarray]:
    y = nests.labels_of(dataset.flat()[1])
    return list(map(np.asarray, tf.nest.flatten(y)))


# Rows that are checked together.
_ROWS = 8192


class IndexCheck:
    """Checks that a model's embeddings can look up the features' indices.

    An index outside the table raises an error on a CPU, whose message may quote it. On
    a GPU, it looks up zeros.
    """

    @_signals.defer_signals()  # Errors in here are taken for the model's.
    def __init__(self, model: tf.keras.Model, features: nests.ElementSpec):
        """Finds the embeddings of a functional or sequential model.

        The layers before them are called on all clients, drawn or not, without being
        charged. So they run as a `Program`, in which no layer can store what it sees
        in a weight. Nor can it read one, so indexes that depend on weights are not
        checked: a silo gets its weights from a server, which would learn from errors
        how a client's features compare with them.

        Args:
          model: The model, which is read and never changed.
          features: The specs of one example's features.
        """
        embeddings = keras_versions.embedding_inputs(model)
        self._layers = [layer for layer, _ in embeddings]
        self._index_program: Program | None = None
        if not embeddings:
            return
        # An embedding within a nested model has inputs that are not this model's. A
        # model that cannot become a `Program` is refused later, before it trains.
        with contextlib.suppress(Exception):
            lookup_model = tf.keras.Model(
                keras_versions.inputs_of(model), [tensor for _, tensor in embeddings]
            )

            def look_up(x: nests.Nest) -> list[tf.Tensor]:
                with keras_versions.stateless([]):
                    return list(map(tf.identity, tf.nest.flatten(lookup_model(x))))

            rows = tf.nest.map_structure(
                lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), features
            )
            self._index_program = Program(look_up, rows, model=model)

    def describe_problem(self, x: nests.Nest) -> tuple[int, str] | None:
        """Returns the first row with an index outside its table, and the error text."""
        num_rows = len(tf.nest.flatten(x)[0])
        if self._index_program is None:
            return None
        for start in range(0, num_rows, _ROWS):
            rows = slice(start, start + _ROWS)
            part = tf.nest.map_structure(
                lambda leaf, rows=rows: tf.convert_to_tensor(leaf[rows]), x
            )
            try:
                looked_up = self._index_program(part)
            except CLIENT_ERRORS:
                continue  # A client whose rows raise it fails when it trains.
            for layer, tensor in zip(self._layers, looked_up, strict=True):
                values = np.asarray(tensor).reshape(len(tensor), -1)
                # Keras counts negative indices from the end.
                in_range = (values >= -layer.input_dim) & (values < layer.input_dim)
                if not in_range.all():
                    row, column = np.argwhere(~in_range)[0]
                    return start + int(row), (
                        f"features must be indexes from 0 to {layer.input_dim - 1} for "
                        f"the embedding {layer.name!r}, got another value in "
                        f"column {column}: make input_dim larger, or give unknown "
                        "values an index of their own"
                    )
        return None

    def check_clients(
        self, dataset: FederatedDataset, argument: str = "clients"
    ) -> FederatedDataset:
        """Returns a dataset that checks clients when they are read.

        Raises:
          ValueError: A client in memory has an index outside its table.
        """
        if self._index_program is None:
            return dataset
        if not dataset.is_indexed:
            return dataset.with_check(self._check)
        rows, lengths = dataset.client_rows(np.arange(dataset.num_clients))
        x = tf.nest.map_structure(lambda leaf: tf.gather(leaf, rows), dataset.flat()[0])
        if problem := self.describe_problem(x):
            position = np.searchsorted(np.cumsum(lengths), problem[0], side="right")
            name = dataset.client_ids[int(position)]
            raise ValueError(f"{argument}: {problem[1]}, for client {name!r}.")
        return dataset

    def _check(self, x: nests.Nest, y: nests.Nest) -> None:
        del y
        if problem := self.describe_problem(x):
            raise nests.ExamplesValueError(f"{problem[1]}.")
