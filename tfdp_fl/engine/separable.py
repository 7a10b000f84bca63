"""Which parts of Keras treat the rows of a batch one by one.

Where clients train side by side, their examples stand in one batch. That is
one client's own training only if every loss, metric, activation and layer is a
function of single rows, or a sum of such functions. What is known to be one is
listed here; whatever is not listed trains client by client. Known not to be:
a loss with `ignore_class`, which rescales by the rows that count, and the hinge
losses, which look at all labels of a batch to tell 0 from -1.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp_fl import keras_versions

_activations, _layers = tf.keras.activations, tf.keras.layers
_losses, _metrics = tf.keras.losses, tf.keras.metrics


def _named(room: Any, *names: str) -> tuple[Any, ...]:
    """Returns what this version of Keras has of these names."""
    return tuple(getattr(room, name) for name in names if hasattr(room, name))


ACTIVATIONS = _named(
    _activations,
    *("elu", "exponential", "gelu", "hard_sigmoid", "leaky_relu", "linear"),
    *("mish", "relu", "relu6", "selu", "sigmoid", "silu", "softmax"),
    *("softplus", "softsign", "swish", "tanh"),
)

LOSSES = _named(
    _losses,
    *("BinaryCrossentropy", "BinaryFocalCrossentropy"),
    *("CategoricalCrossentropy", "CategoricalFocalCrossentropy"),
    *("CategoricalHinge", "CosineSimilarity", "Huber", "KLDivergence"),
    *("LogCosh", "MeanAbsoluteError", "MeanAbsolutePercentageError"),
    *("MeanSquaredError", "MeanSquaredLogarithmicError", "Poisson"),
    "SparseCategoricalCrossentropy",
)

# What those compute; not every Keras has a name for each.
LOSS_FUNCTIONS = tuple(loss().fn for loss in LOSSES)

_METRIC_FUNCTIONS = _named(
    _metrics,
    *("binary_accuracy", "categorical_accuracy"),
    *("sparse_categorical_accuracy", "sparse_top_k_categorical_accuracy"),
    "top_k_categorical_accuracy",
)

METRICS = _named(
    _metrics,
    *("AUC", "Accuracy", "BinaryAccuracy", "BinaryCrossentropy"),
    *("CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge"),
    *("CosineSimilarity", "FalseNegatives", "FalsePositives"),
    *("KLDivergence", "LogCoshError", "MeanAbsoluteError"),
    *("MeanAbsolutePercentageError", "MeanSquaredError"),
    *("MeanSquaredLogarithmicError", "Poisson", "Precision", "Recall"),
    *("RootMeanSquaredError", "SparseCategoricalAccuracy"),
    *("SparseCategoricalCrossentropy", "SparseTopKCategoricalAccuracy"),
    *("TopKCategoricalAccuracy", "TrueNegatives", "TruePositives"),
)

_METRIC_NAMES = ("accuracy", "acc", "crossentropy", "ce")

# Without weights of their own.
LAYERS = _named(_layers, "InputLayer", "Flatten", "Activation", "ReLU", "LeakyReLU")


def is_activation(function: Any) -> bool:
    """Returns True for an activation that takes rows one by one."""
    return any(function is each for each in ACTIVATIONS)


def is_mean_over_rows(loss: Any) -> bool:
    """Returns True for a loss that is the mean of a function of single rows.

    Args:
      loss: What Keras's `compile` takes.
    """
    if isinstance(loss, str):
        try:
            loss = _losses.get(loss)
        except ValueError:
            return False
    if not isinstance(loss, _losses.Loss):
        return any(loss is each for each in LOSS_FUNCTIONS)
    return (
        type(loss) in LOSSES
        and any(getattr(loss, "fn", None) is each for each in LOSS_FUNCTIONS)
        and "call" not in vars(loss)
        and loss.reduction in ("auto", "sum_over_batch_size")
        and _has_usual_options(loss)
    )


def are_sums_over_rows(metrics: Any) -> bool:
    """Returns True if each metric adds up a function of single rows.

    Args:
      metrics: What Keras's `compile` takes.
    """
    return all(_is_sum_over_rows(each) for each in tf.nest.flatten(metrics))


def _is_sum_over_rows(metric: Any) -> bool:
    if metric is None or metric in _METRIC_NAMES:
        return True
    if isinstance(metric, str):
        try:
            metric = _metrics.get(metric)
        except ValueError:
            return False
    if isinstance(metric, _metrics.Metric):
        return type(metric) in METRICS and _has_usual_options(metric)
    allowed = (*LOSS_FUNCTIONS, *_METRIC_FUNCTIONS)
    return any(metric is each for each in allowed)


def _has_usual_options(loss_or_metric: Any) -> bool:
    options = keras_versions.loss_options(loss_or_metric)
    return (
        options.get("ignore_class") is None
        and options.get("axis", -1) == -1
        and options.get("dtype") in (None, "float32")
    )


def is_layer(layer: Any) -> bool:
    """Returns True for a layer without weights that takes rows one by one."""
    if getattr(layer, "activity_regularizer", None) is not None:
        return False
    if type(layer) is _layers.Rescaling:
        return not getattr(layer.scale, "shape", ()) and not getattr(
            layer.offset, "shape", ()
        )
    if type(layer) is _layers.Activation:
        return is_activation(layer.activation)
    return type(layer) in LAYERS
