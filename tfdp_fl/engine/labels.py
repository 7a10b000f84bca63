"""Whether labels can belong to a model's outputs, before anything trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.datasets import FederatedDataset, nests


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

    def rows_outside(self, values: Any) -> np.ndarray:
        """Returns which rows (bool [n]) have a label that is not allowed."""
        values = np.asarray(values)
        inside = (values >= 0) & (values < self.num_classes)  # Not for a NaN.
        if self.ignored is not None:
            inside |= values == self.ignored
        return ~inside.all(axis=tuple(range(1, inside.ndim)))

    def holds(self, values: Any) -> bool:
        """Returns whether all labels are allowed."""
        values = np.asarray(values)
        if self.ignored is None and values.dtype.kind in "iu" and values.size:
            # Two passes, and nothing is made of every label.
            smallest = np.minimum.reduce(values, axis=None)
            largest = np.maximum.reduce(values, axis=None)
            return bool(smallest >= 0 and largest < self.num_classes)
        return not self.rows_outside(values).any()

    def problem(self) -> str:
        """Returns what to tell whoever has such a label."""
        other = "" if self.ignored is None else f" (or {self.ignored})"
        return (
            f"labels must be integers from 0 to {self.num_classes - 1}{other}, "
            "to fit the model's output, got one outside of that"
        )


def ranges(outputs: list[tuple[Any, Any, Any]]) -> list[LabelRange]:
    """Returns the ranges of the labels that are numbers of classes.

    Args:
      outputs: Of each output the number of its label among the flattened ones,
        its values for a batch, and its loss.
    """
    found = []
    for leaf, output, loss in outputs:
        if leaf is None or loss is None:
            continue
        options = getattr(loss, "_fn_kwargs", {})
        if (
            getattr(loss, "fn", None)
            is not tf.keras.losses.sparse_categorical_crossentropy
            or options.get("axis", -1) != -1
        ):
            continue
        ignored = options.get("ignore_class")
        found.append(LabelRange(leaf, output.shape[-1], ignored))
    return found


def problem_of_client(
    leaves: Sequence[Any], allowed: list[LabelRange]
) -> ValueError | None:
    """Returns the error of a client whose labels are not allowed, or None.

    Args:
      leaves: The client's label tensors, flattened.
      allowed: See `ranges`.
    """
    for each in allowed:
        if not each.holds(leaves[each.leaf]):
            return nests.ExamplesValueError(f"{each.problem()}.")
    return None


def check_clients(dataset: FederatedDataset, allowed: list[LabelRange]) -> None:
    """Raises ValueError if a client has labels that are not allowed.

    Of a dataset that is read client by client nothing is known before; its
    clients are checked when they are read.
    """
    if not dataset.is_indexed:
        return
    leaves = tf.nest.flatten(dataset.flat()[1])
    for each in allowed:
        outside = each.rows_outside(leaves[each.leaf])
        if not outside.any():
            continue
        rows, lengths = dataset.client_rows(np.arange(dataset.num_clients))
        places = np.flatnonzero(outside[rows])
        if len(places):
            position = int(np.searchsorted(np.cumsum(lengths), places[0], side="right"))
            raise ValueError(
                f"clients: {each.problem()} for client "
                f"{dataset.client_ids[position]!r}."
            )


def check(outputs: list[tuple[Any, Any, Any]]) -> None:
    """Raises ValueError if labels cannot belong to the model's output.

    A loss of the user's own may take labels of any shape.

    Args:
      outputs: The label tensor, the values and the loss of each output, for a
        batch.
    """
    for label, output, loss in outputs:
        function: Any = getattr(loss, "fn", None)
        if label is None or not keras_versions.is_of_keras(function):
            continue
        if label.dtype == tf.string:
            raise nests.ExamplesValueError(
                f"labels must be numbers for the loss {loss.name!r}, got "
                "strings; a tf.keras.layers.StringLookup of the classes makes "
                "integers of them."
            )
        shape, expected = label.shape[1:], output.shape[1:]
        allowed: tuple[Any, ...] = (expected,)
        if function.__name__ == "sparse_categorical_crossentropy":
            allowed = (expected[:-1], [*expected[:-1], 1])
        elif expected.rank and expected[-1] == 1:
            allowed = (expected, expected[:-1])
        if not any(shape.is_compatible_with(each) for each in allowed):
            raise nests.ExamplesValueError(
                f"labels must have the shape {tuple(allowed[0])} for each "
                f"example, to fit the model's output {tuple(expected)} and "
                f"the loss {loss.name!r}, got {tuple(shape)}."
            )
