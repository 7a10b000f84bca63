"""Which models can train side by side, and when it is worthwhile.

Where clients train side by side, their examples stand in one batch. That is
one client's own training only if every loss, metric, activation and layer is a
function of single rows, or a sum of such functions. What is known to be one is
listed here; whatever is not listed trains client by client. Known not to be:
a loss with `ignore_class`, which rescales by the rows that count, and the hinge
losses, which look at all labels of a batch to tell 0 from -1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.engine import gram_norms, labels, trainer
from tfdp_fl.mechanisms import cohort_query

_activations, _layers = tf.keras.activations, tf.keras.layers
_losses, _metrics = tf.keras.losses, tf.keras.metrics


def _named(module: Any, names: str) -> tuple[Any, ...]:
    """Returns what this version of Keras has of these names."""
    return tuple(getattr(module, n) for n in names.split() if hasattr(module, n))


ACTIVATIONS = _named(
    _activations,
    """
    elu exponential gelu hard_sigmoid leaky_relu linear mish relu relu6 selu sigmoid
    silu softmax softplus softsign swish tanh
    """,
)

LOSSES = _named(
    _losses,
    """
    BinaryCrossentropy BinaryFocalCrossentropy CategoricalCrossentropy
    CategoricalFocalCrossentropy CategoricalHinge CosineSimilarity Huber KLDivergence
    LogCosh MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError
    MeanSquaredLogarithmicError Poisson SparseCategoricalCrossentropy
    """,
)

# What those compute; not every Keras has a name for each.
LOSS_FUNCTIONS = tuple(loss().fn for loss in LOSSES)

_METRIC_FUNCTIONS = _named(
    _metrics,
    """
    binary_accuracy categorical_accuracy sparse_categorical_accuracy
    sparse_top_k_categorical_accuracy top_k_categorical_accuracy
    """,
)

METRICS = _named(
    _metrics,
    """
    AUC Accuracy BinaryAccuracy BinaryCrossentropy CategoricalAccuracy
    CategoricalCrossentropy CategoricalHinge CosineSimilarity FalseNegatives
    FalsePositives KLDivergence LogCoshError MeanAbsoluteError
    MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError Poisson
    Precision Recall RootMeanSquaredError SparseCategoricalAccuracy
    SparseCategoricalCrossentropy SparseTopKCategoricalAccuracy TopKCategoricalAccuracy
    TrueNegatives TruePositives
    """,
)

_METRIC_NAMES = ("accuracy", "acc", "crossentropy", "ce")

# Without weights of their own.
LAYERS = _named(_layers, "InputLayer Flatten Activation ReLU LeakyReLU")


def is_mean_over_rows(loss: Any) -> bool:
    """Returns True for a loss that is the mean of a function of single rows.

    Args:
      loss: What Keras's `compile` takes.
    """
    loss = _by_name(_losses, loss)
    if not isinstance(loss, _losses.Loss):
        return _is_among(loss, LOSS_FUNCTIONS)
    return (
        type(loss) in LOSSES
        and _is_among(getattr(loss, "fn", None), LOSS_FUNCTIONS)
        and "call" not in vars(loss)
        and loss.reduction in ("auto", "sum_over_batch_size")
        and _has_usual_options(loss)
    )


def _is_sum_over_rows(metric: Any) -> bool:
    """Returns True for a metric that adds up a function of single rows."""
    if metric is None or metric in _METRIC_NAMES:
        return True
    metric = _by_name(_metrics, metric)
    if isinstance(metric, _metrics.Metric):
        return type(metric) in METRICS and _has_usual_options(metric)
    return _is_among(metric, (*LOSS_FUNCTIONS, *_METRIC_FUNCTIONS))


def _by_name(module: Any, value: Any) -> Any:
    """Returns what Keras has of a name, None if nothing; or the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return module.get(value)
    except ValueError:
        return None


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(value is other for other in allowed)


def _has_usual_options(loss_or_metric: Any) -> bool:
    options = keras_versions.loss_options(loss_or_metric)
    return (
        options.get("ignore_class") is None
        and options.get("axis", -1) == -1
        and options.get("dtype") in (None, "float32")
    )


def _takes_rows_one_by_one(layer: Any) -> bool:
    """Returns True for a layer that is listed, or a plain dense one."""
    if getattr(layer, "activity_regularizer", None) is not None:
        return False
    if type(layer) is _layers.Rescaling:
        return not getattr(layer.scale, "shape", ()) and not getattr(
            layer.offset, "shape", ()
        )
    if isinstance(layer, _layers.Activation):
        return type(layer) in LAYERS and _is_among(layer.activation, ACTIVATIONS)
    return type(layer) in LAYERS or _is_plain_dense(layer)


def _is_plain_dense(layer: Any) -> bool:
    """Returns whether a layer is Keras's dense one, and trains all it has."""
    options = (
        *("kernel_regularizer", "bias_regularizer"),
        *("kernel_constraint", "bias_constraint"),
    )
    return (
        type(layer) is _layers.Dense
        and all(getattr(layer, name) is None for name in options)
        and not keras_versions.has_adapted_weights(layer)
        and layer.trainable
        and tf.as_dtype(layer.kernel.dtype) == tf.float32
        and layer.compute_dtype in ("float32", "bfloat16")
        and _is_among(layer.activation, ACTIVATIONS)
        and layer.input_spec.min_ndim == 2
        and len(layer.input.shape) == 2
        and gram_norms.is_within_bound(*layer.kernel.shape)
    )


# Above this many local steps the unrolled graph is no longer worth it.
_MOST_STEPS = 12

# Multiply-adds of a forward pass over a cohort that take about a millisecond.
_SMALL = 5e7

# What the factors of the clients of one call may take, and how many times they
# are held at the peak (as they are, and joined for a product).
_FACTOR_BYTES, _FACTOR_COPIES = 48 * 2**20, 3

# Clients with fewer steps than others idle; this much of the work at most.
_MOST_IDLE = 1.25


def supports(
    model: tf.keras.Model,
    training: trainer.LocalTraining,
    query: cohort_query.CohortQuery,
    label_spec: Any = None,
) -> bool:
    """Returns True if a cohort of this model can be trained in this way.

    The model is a chain of dense layers (with flattening and activations in
    between), trained by plain SGD with a Keras loss that is a mean over
    examples, under a mechanism that only scales updates. Weights of examples,
    which `label_spec` tells of, are one number for each.
    """
    metrics = tf.nest.flatten((training.metrics, training.weighted_metrics))
    return (
        type(model) is tf.keras.Sequential
        and any(isinstance(layer, _layers.Dense) for layer in model.layers)
        and all(map(_takes_rows_one_by_one, model.layers))
        and len(tf.nest.flatten(model.outputs)) == 1
        and not model.losses
        and is_mean_over_rows(training.loss)
        and all(map(_is_sum_over_rows, metrics))
        and labels.are_numbers_of_rows(label_spec)
        and query.only_scales
        and not query.two_phase
        and not query.mechanism.releases_weights
        and trainer.is_plain_sgd(training.optimizer)
        and not training.proximal_weight
        and training.grad_clip <= 0
        and training.upload_hook is None
        and training.loss_weights is None
    )


class Kernels(NamedTuple):
    """What the decisions below need to know of a model's dense kernels.

    Attributes:
      parameters: All elements of the model's variables.
      largest: Elements of the largest kernel.
      sides: Rows plus columns of that kernel.
      widths: Rows plus columns, summed over all kernels.
    """

    parameters: int
    largest: int
    sides: int
    widths: int


def kernels_of(model: tf.keras.Model) -> Kernels:
    """Returns the sizes of a supported model's kernels."""
    shapes = [
        list(layer.kernel.shape) for layer in model.layers if hasattr(layer, "kernel")
    ]
    largest = max(shapes, key=math.prod)
    return Kernels(
        parameters=model.count_params(),
        largest=math.prod(largest),
        sides=sum(largest),
        widths=sum(map(sum, shapes)),
    )


def is_worthwhile(
    kernels: Kernels, lengths: np.ndarray, batch_size: int, local_epochs: int
) -> bool:
    """Returns True if these clients' examples are few and their steps alike.

    With n examples a client, the corrections and Gram matrices of a kernel of
    P = a b elements cost about 3 n^2 (a + b) multiply-adds, and save a kernel
    for each client: its gradients (n P) and the passes over its memory.

    Args:
      kernels: Those of a model that is supported.
      lengths: Int [K], the clients' numbers of examples.
      batch_size: B.
      local_epochs: Passes over a client's examples.
    """
    steps = -(-lengths // batch_size) * local_epochs
    most = int(steps.max(initial=0))
    if not 0 < most <= _MOST_STEPS:
        return False
    if most * len(steps) > _MOST_IDLE * int(steps.sum()):
        return False
    seen = float(lengths.max()) * local_epochs
    return 3 * seen * kernels.sides <= 2 * kernels.largest


def clients_at_once(kernels: Kernels, examples: int) -> int:
    """Returns how many clients' factors one call should hold.

    Their memory is bounded whatever the cohort: by a copy of the model, or by
    48 MB where the model is much smaller than that.

    Args:
      kernels: Those of a model that is supported.
      examples: The most examples that a client trains on in a round.
    """
    model_bytes = 4 * kernels.parameters
    budget = model_bytes if model_bytes > _FACTOR_BYTES / 4 else _FACTOR_BYTES
    one = _FACTOR_COPIES * 4 * kernels.widths * examples
    return max(1, int(budget // one))


def is_small(kernels: Kernels, lengths: np.ndarray, local_epochs: int) -> bool:
    """Returns True if a cohort is not worth a second thread."""
    products = float(lengths.sum()) * local_epochs * kernels.parameters
    return products < _SMALL
