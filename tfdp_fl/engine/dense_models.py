"""Which models can train side by side, when it is worthwhile, and their norms.

Where clients train side by side, their examples stand in one batch. That is
one client's own training only if every loss, metric, activation and layer is a
function of single rows, or a sum of such functions. What is known to be one is
listed here, but for Keras's metrics; all else trains client by client. Known not to
be: a loss with `ignore_class`, which rescales by the rows that count, and the hinge
losses, which look at all labels of a batch to tell 0 from -1.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.datasets import nests
from tfdp_fl.engine import trainer
from tfdp_fl.mechanisms import cohort_query

_activations, _layers = tf.keras.activations, tf.keras.layers
_losses, _metrics = tf.keras.losses, tf.keras.metrics


def _named(module: Any, names: str) -> tuple[Any, ...]:
    """Returns those of the named objects that this version of Keras has."""
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

_METRIC_NAMES = ("accuracy", "acc")

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
        and loss.reduction == "sum_over_batch_size"
        and _has_usual_options(loss)
    )


def _is_sum_over_rows(metric: tf.keras.metrics.Metric) -> bool:
    """Returns True for a metric that adds up a function of single rows.

    Keras's own all do, but the hinge ones. (A client's update is none of a metric's.)
    """
    if metric is None or metric in _METRIC_NAMES:
        return True
    metric = _by_name(_metrics, metric)
    is_object = isinstance(metric, _metrics.Metric)
    kind = type(metric) if is_object else metric
    return (
        keras_versions.is_of_keras(kind)
        and keras_versions.is_of_keras(getattr(metric, "_fn", kind))
        and kind.__name__ not in ("Hinge", "SquaredHinge", "hinge", "squared_hinge")
        and (not is_object or _has_usual_options(metric))
    )


def _by_name(module: Any, value: Any) -> Any:
    """Returns the object that Keras has by a name, or None; or the value itself."""
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


def _takes_rows_one_by_one(layer: tf.keras.layers.Layer) -> bool:
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


def _is_plain_dense(layer: tf.keras.layers.Layer) -> bool:
    """Returns whether a layer is Keras's dense one, and trains all it has."""
    options = "kernel_regularizer bias_regularizer kernel_constraint bias_constraint"
    return (
        type(layer) is _layers.Dense
        and all(getattr(layer, name) is None for name in options.split())
        and not keras_versions.has_adapted_weights(layer)
        and layer.trainable
        and tf.as_dtype(layer.kernel.dtype) == tf.float32
        and layer.compute_dtype in ("float32", "bfloat16")
        and _is_among(layer.activation, ACTIVATIONS)
        and layer.input_spec.min_ndim == 2
        and len(layer.input.shape) == 2
        and sum(layer.kernel.shape) * ROUNDOFF < _LARGEST_ERROR
    )


# How many local steps a program may have; a client with fewer idles in the rest. Few
# programs, as each is traced and optimised for a second; and no more steps, as each
# holds more of the graph and of the clients' examples.
RUNGS = (1, 2, 6, 12)

# Multiply-adds of a forward pass over a cohort that take about a millisecond.
_SMALL = 5e7

# What the factors of the clients of one call may take, and how many times they
# are held at the peak (as they are, and joined for a product).
_FACTOR_BYTES, _FACTOR_COPIES = 48 * 2**20, 3

# Products of so many elements are made of all clients at once, larger ones one after
# the other: they stay in the processor's cache.
AT_ONCE = 2**16

# Fewest rows of a product by which no row depends on how many others there are.
_FEWEST_ROWS = 32

# The sum of so many clients' whole numbers is below 2^31 (`side_by_side`).
_MOST_CLIENTS = 512

# The most that rounding to whole numbers may take of a clip.
_LARGEST_SHARE = 0.01


def supports(
    model: tf.keras.Model,
    training: trainer.Training,
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
    weights = tf.nest.flatten(nests.weights_of(label_spec) or ())
    return (
        type(model) is tf.keras.Sequential
        and any(isinstance(layer, _layers.Dense) for layer in model.layers)
        and all(map(_takes_rows_one_by_one, model.layers))
        and len(tf.nest.flatten(model.outputs)) == 1
        and not model.losses
        and is_mean_over_rows(training.loss)
        and all(map(_is_sum_over_rows, metrics))
        and [leaf.shape.as_list() for leaf in weights] in ([], [[]], [[1]])
        and query.only_scales
        and not query.mechanism.releases_weights
        and trainer.is_plain_sgd(training.optimizer)
        and not training.proximal_weight
        and training.grad_clip <= 0
        and training.upload_hook is None
        and training.loss_weights is None
    )


# The shapes of a model's dense kernels, [rows, columns] each.
Kernels = tuple[tuple[int, int], ...]


def kernels_of(model: tf.keras.Model) -> Kernels:
    """Returns the kernels of a supported model."""
    return tuple(tuple(v.shape) for v in model.trainable_weights if len(v.shape) == 2)


def worthwhile_rungs(kernels: Kernels, batch: int) -> list[int]:
    """Returns the rungs whose programs pay.

    With n examples a client, the corrections and Gram matrices of a kernel of
    P = a b elements cost about 3 n^2 (a + b) multiply-adds, and save a kernel for
    each client: its gradients (n P) and the passes over its memory.

    Args:
      kernels: Those of a model that is supported.
      batch: B, the examples of a step.
    """
    if rounding_share(kernels) > _LARGEST_SHARE:
        return []
    largest = max(kernels, key=math.prod)
    most = 2 * math.prod(largest)
    return [rung for rung in RUNGS if 3 * rung * batch * sum(largest) <= most]


def rungs_of(kernels: Kernels, steps: np.ndarray, batch: int) -> np.ndarray:
    """Returns how many steps of a side-by-side program clients take, int [K].

    The lowest rung that has a client's own number of steps; 0, one by one, where
    there is none, the client has no examples, or it would not pay.

    Args:
      kernels: Those of a model that is supported.
      steps: Int [K], the clients' numbers of local steps.
      batch: B, the examples of a step.
    """
    worthwhile = worthwhile_rungs(kernels, batch)
    rungs = np.array([*worthwhile, 0], np.int64)
    found = rungs[np.searchsorted(np.array(worthwhile, np.int64), steps)]
    return np.where(steps > 0, found, 0)


def rounding_share(kernels: Kernels) -> float:
    """Returns the part of a clip that rounding to whole numbers may take.

    Each of D coordinates is moved by half a step at most, and a step is at most
    S 2^-20 (see `side_by_side`): by sqrt(D) 2^-21 S in L2 norm.
    """
    return math.sqrt(sum(a * b + b for a, b in kernels)) * 2.0**-21


@functools.cache
def widths(kernels: Kernels, rung: int, batch: int) -> list[int]:
    """Returns how many clients one call may train, in rising order; none: no call.

    Numbers of five binary digits, as each is checked once: so a call has at most
    a sixteenth of padding. Memory bounds them: a copy of the model, or 48 MB where
    the model is much smaller than that. TensorFlow makes a product of few rows, and a
    single one of several, in another way than others.

    Args:
      kernels: Those of a model that is supported.
      rung: One of `RUNGS`.
      batch: B, the examples of a step.
    """
    model_bytes = 4 * sum(map(math.prod, kernels))
    budget = model_bytes if model_bytes > _FACTOR_BYTES / 4 else _FACTOR_BYTES
    factors = 4 * sum(map(sum, kernels)) * rung * batch
    sizes = map(math.prod, kernels)
    products = 4 * max((size for size in sizes if size <= AT_ONCE), default=0)
    one = max(_FACTOR_COPIES * factors, factors + products)
    most = min(_MOST_CLIENTS, int(budget // one))
    found, width = [], max(2, -(-_FEWEST_ROWS // batch))
    while width <= most:
        found.append(width)
        width += 2 ** max(0, width.bit_length() - 5)
    return found


def is_small(kernels: Kernels, examples: int) -> bool:
    """Returns True if a cohort of so many examples is not worth a second thread."""
    return float(examples) * sum(map(math.prod, kernels)) < _SMALL


# Float32's unit roundoff, and the most that it may come to in a sum of which
# the bound of a norm is made: n terms are off by n times as much.
ROUNDOFF = 2.0**-24
_LARGEST_ERROR = 0.01


def norm_bound(
    grams_x: list[tf.Tensor],
    grams_d: list[tf.Tensor],
    columns: int,
    rows: int | tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the joint norms of L products X^T D, and what bounds them.

    A dense kernel's update is such a product over a client's examples. Its norm
    is known without it (the "ghost norm" of per-example clipping, Goodfellow 2015,
    "Efficient per-example gradient computations"):
    ||X^T D||^2 = sum_ij (X X^T)_ij (D D^T)_ij, of Gram matrices that were
    rounded to float32. A client may choose rows that are large and cancel, so
    that the sum is little more than rounding; hence a bound by proof. A float32
    product of n terms, added up in whatever order, is off by at most gamma_n
    sum |terms|, gamma_n = n u / (1 - n u) (Higham 2002, "Accuracy and Stability
    of Numerical Algorithms", section 3.1), plus n 2^-126 where terms underflow.
    With Cauchy and Schwarz, for rows x_i of a columns,

        |fl(X X^T)_ij - (X X^T)_ij| <= gamma_a ||x_i|| ||x_j|| + a 2^-126,

    and likewise for D. Summed over i and j, with q = sum_i ||x_i|| ||d_i||,

        ||X^T D||^2 <= sum_ij fl(X X^T)_ij fl(D D^T)_ij
            + (gamma_a + gamma_b) q^2
            + a 2^-126 (sum_i ||d_i||)^2 + b 2^-126 (sum_i ||x_i||)^2

    and terms of second order. Here ||x_i||^2 counts for 2^-102 more than the
    diagonal says, and so for ||d_i||: then gamma_a q^2 is at least each of the
    terms of underflow, and they are in twice the first. What is of second
    order is less than a tenth of that, as (a + b) u is below `_LARGEST_ERROR`.

    q also bounds what rounding does to the products themselves: computed over
    N rows they are off by at most gamma_N q in Frobenius norm.

    Args:
      grams_x: L float32 [K, n, n], each X X^T.
      grams_d: L float32 [K, n, n], each D D^T.
      columns: The largest a + b of them all.
      rows: N, of the products: one client's, as each is computed by itself.

    Returns:
      `(norm, bound)`, float64 [K]: the norm as computed, and an upper bound of
      the norm of the products as they will be computed. The bound is not finite
      where an element is not.
    """
    # In one piece, as every operation costs a small model more than its sums.
    gram_x = tf.cast(tf.stack(grams_x), tf.float64)
    gram_d = tf.cast(tf.stack(grams_d), tf.float64)
    of_x, of_d = (
        # Squares cannot cancel: these are the lengths, but for gamma.
        tf.sqrt(tf.linalg.diag_part(gram) + 2.0**-102)
        for gram in (gram_x, gram_d)
    )
    q = tf.reduce_sum(of_x * of_d, axis=2)
    q_squared = tf.reduce_sum(q * q, axis=0)
    square = tf.maximum(tf.reduce_sum(gram_x * gram_d, axis=[0, 2, 3]), 0.0)
    of_norm = 2.2 * ROUNDOFF * columns
    share = ROUNDOFF * tf.cast(rows, tf.float64)
    of_product = 1.05 * share / (1 - share)
    bound = tf.sqrt(square + of_norm * q_squared) + of_product * tf.sqrt(q_squared)
    return tf.sqrt(square), bound
