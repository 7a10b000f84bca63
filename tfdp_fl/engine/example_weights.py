"""What each example counts in a client's loss: Keras's weights.

They change what a client trains, and nothing that is promised about it: its
update is clipped whatever they are, and is zero if they make no number of it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdp_fl.datasets import nests
from tfdp_fl.mechanisms import ClientWeighting, client_weighting

ClassWeight = Mapping[int, float]


def checked_class_weight(class_weight: Any) -> ClassWeight | None:
    """Returns what each class counts, or raises.

    Raises:
      TypeError: It is no mapping from integers to numbers.
      ValueError: It is empty, or has a number of a class below 0, or what
        counts is no finite number.
    """
    if class_weight is None:
        return None
    allowed = "class_weight must map numbers of classes, from 0, to finite numbers"
    if not isinstance(class_weight, Mapping):
        raise TypeError(f"{allowed}, got a {type(class_weight).__name__}.")
    if not class_weight:
        raise ValueError(f"{allowed}, got none.")
    for number, weight in class_weight.items():
        if (
            isinstance(number, bool)
            or not isinstance(number, numbers.Integral)
            or isinstance(weight, bool)
            or not isinstance(weight, numbers.Real)
        ):
            raise TypeError(f"{allowed}, got {number!r}: {weight!r}.")
        if number < 0 or not math.isfinite(weight):
            raise ValueError(f"{allowed}, got {number!r}: {weight!r}.")
    return {int(k): float(v) for k, v in class_weight.items()}


def check(label_spec: Any, predicted: Any, class_weight: ClassWeight | None) -> None:
    """Raises ValueError if weights cannot belong to a model.

    Args:
      label_spec: Specs of the labels of one example, perhaps with weights.
      predicted: Nest of the model's outputs.
      class_weight: What each class counts.
    """
    if class_weight is None:
        return
    outputs = tf.nest.flatten(predicted)
    leaves = tf.nest.flatten(nests.labels_of(label_spec))
    if len(outputs) != 1 or len(leaves) != 1:
        raise ValueError(
            "class_weight must be None for a model with several outputs, as "
            f"in Keras, got it for {len(outputs)}; sample_weight may say what "
            "each example counts for each output."
        )
    if leaves[0].dtype == tf.string or leaves[0].shape.rank > 1:
        raise ValueError(
            "class_weight must go with labels that are numbers of classes, or "
            f"one-hot, got {leaves[0].dtype.name}{leaves[0].shape} for each "
            "example."
        )
    classes = outputs[0].shape[-1]
    too_large = [number for number in class_weight if number >= max(2, classes)]
    if too_large:
        raise ValueError(
            "class_weight must name classes of the model, from 0 to "
            f"{max(2, classes) - 1}, got {too_large[0]}."
        )


def check_weighting(label_spec: Any, weighting: ClientWeighting | None) -> None:
    """Raises ValueError if clients cannot count by their examples' weights."""
    if weighting is None or weighting.measure != client_weighting.SAMPLE_WEIGHT:
        return
    if nests.weights_of(label_spec) is None or not are_numbers_of_rows(label_spec):
        raise ValueError(
            "client_weighting must be ClientWeighting.num_examples(cap), or "
            "clients must be (x, y, sample_weight) with one number for each "
            f"example, got {weighting!r} and labels {label_spec}."
        )


def split(y: Any, class_weight: ClassWeight | None) -> tuple[Any, Any]:
    """Returns labels, and the weights of their examples (None: all alike).

    As in Keras, what a class counts is a factor of what an example does.

    Args:
      y: Nest of labels, perhaps with weights beside them.
      class_weight: What each class counts.
    """
    labels, weight = nests.labels_of(y), nests.weights_of(y)
    if class_weight is None:
        return labels, weight
    (label,) = tf.nest.flatten(labels)
    by_class = _of_classes(label, class_weight)
    if weight is None:
        return labels, by_class
    (own,) = tf.nest.flatten(weight)
    if own.shape.rank > 1:
        shape = [-1] + [1] * (own.shape.rank - 1)
        by_class = tf.reshape(by_class, shape)
    return labels, own * by_class


def _of_classes(label: tf.Tensor, class_weight: ClassWeight) -> tf.Tensor:
    """Returns what each example's class counts, float32 [n]."""
    if label.shape.rank > 1 and label.shape[-1] != 1:
        label = tf.argmax(label, axis=-1)
    label = tf.cast(tf.reshape(label, [-1]), tf.int64)
    known = max(class_weight) + 1
    table = tf.constant(
        [class_weight.get(number, 1.0) for number in range(known)] + [1.0]
    )
    # A label that no class has, as padding, counts 1.
    inside = (label >= 0) & (label < known)
    return tf.gather(table, tf.where(inside, label, known))


def are_numbers_of_rows(label_spec: Any) -> bool:
    """Returns True if there are no weights, or one number for each example."""
    weight = nests.weights_of(label_spec)
    if weight is None:
        return True
    leaves = tf.nest.flatten(weight)
    return len(leaves) == 1 and leaves[0].shape.as_list() in ([], [1])


def numbers_only(weight: Any) -> Any:
    """Returns weights with 0 for NaN and Inf."""
    if weight is None:
        return None
    return tf.nest.map_structure(
        lambda each: tf.where(tf.math.is_finite(each), each, 0.0), weight
    )
