"""Which models can train side by side, when that pays, and the norms of their updates.

Side by side, several clients' examples share one batch. Each client still trains as
if alone only if every loss, metric, activation and layer is a function of single
rows, or a sum of such functions. Those known to qualify are listed here, apart from
Keras's metrics; all other models train client by client. Two kinds of loss do not
qualify: those with `ignore_class`, which rescale by the number of rows that count,
and hinge losses, which look at all labels of a batch to tell 0 from -1.
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
from tfdp_fl.mechanisms import bounded_sums, cohort_query

_activations, _layers = tf.keras.activations, tf.keras.layers
_losses, _metrics = tf.keras.losses, tf.keras.metrics


def _named(module: Any, names: str) -> tuple[Any, ...]:
    """Returns the named objects that exist in this version of Keras."""
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

# The functions that these losses compute; not every Keras version names them all.
LOSS_FUNCTIONS = tuple(loss().fn for loss in LOSSES)

_METRIC_NAMES = ("accuracy", "acc")

# Layers without weights.
LAYERS = _named(_layers, "InputLayer Flatten Activation ReLU LeakyReLU")


def is_mean_over_rows(loss: Any) -> bool:
    """Returns True for a loss that is the mean of a function of single rows.

    Args:
      loss: As in Keras's `compile`.
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

    All of Keras's own do, except for the hinge metrics. (No update depends on one.)
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
    """Returns Keras's object of that name, or None; returns other values unchanged."""
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
    """Returns True for a layer in `LAYERS` or a plain dense layer."""
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
    """Returns whether a layer is Keras's `Dense` and all its weights are trained."""
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


# The possible numbers of local steps of a program; clients with fewer steps idle. They
# are few because tracing and optimising each program takes a second, and small because
# each step adds to the graph and to the examples that are held.
PROGRAM_STEPS = (1, 2, 6, 12)

# Multiply-adds of a forward pass over a cohort that take about a millisecond.
_SMALL = 5e7

# The memory that the factors of one call's clients may take, and how many copies of
# them exist at the peak (the factors themselves, and joined for a product).
_FACTOR_BYTES, _FACTOR_COPIES = 48 * 2**20, 3

# Products of up to this many elements are computed for all clients at once, larger
# ones one after another, so that they stay in the processor's cache.
MAX_BATCHED_ELEMENTS = 2**15

# The numbers that a client computes in a layer that is not narrow.
_NARROW = 64

# From this many rows on, a row's product does not depend on the number of rows.
_FEWEST_ROWS = 32

# The largest fraction of a clip that rounding to integers may take.
LARGEST_SHARE = 0.01


def supports(
    model: tf.keras.Model,
    training: trainer.Training,
    query: cohort_query.CohortQuery,
    label_spec: Any = None,
) -> bool:
    """Returns True if clients of this model can be trained side by side.

    The model must be a chain of dense layers (with flattening and activations in
    between), trained by plain SGD with a Keras loss that is a mean over examples,
    under a mechanism that only scales updates. If `label_spec` includes example
    weights, there must be one number per example.
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


# The shapes of a model's dense kernels, each [rows, columns].
Kernels = tuple[tuple[int, int], ...]


def kernels_of(model: tf.keras.Model) -> Kernels:
    """Returns the kernels of a supported model."""
    return tuple(tuple(v.shape) for v in model.trainable_weights if len(v.shape) == 2)


def worthwhile_steps(kernels: Kernels, batch: int) -> list[int]:
    """Returns the numbers of steps for which training side by side pays.

    With n examples per client, the corrections and Gram matrices of a kernel of
    P = a b elements cost about 3 n^2 (a + b) multiply-adds. They save a kernel per
    client: its gradients (n P) and the passes over its memory.

    Args:
      kernels: The kernels of a supported model.
      batch: B, the examples in a step.
    """
    if rounding_share(num_weights(kernels)) > LARGEST_SHARE:
        return []
    largest = max(kernels, key=math.prod)
    max_numbers = 2 * math.prod(largest)
    return [
        steps
        for steps in PROGRAM_STEPS
        if 3 * steps * batch * sum(largest) <= max_numbers
    ]


def program_steps(kernels: Kernels, steps: np.ndarray, batch: int) -> np.ndarray:
    """Returns the number of steps of each client's side-by-side program, int [K].

    It is the smallest that holds the client's own steps. It is 0 (train one by one) if
    there is none, the client has no examples, or it would not pay.

    Args:
      kernels: The kernels of a supported model.
      steps: Int [K], the clients' numbers of local steps.
      batch: B, the examples in a step.
    """
    worthwhile = worthwhile_steps(kernels, batch)
    step_counts = np.array([*worthwhile, 0], np.int64)
    found = step_counts[np.searchsorted(np.array(worthwhile, np.int64), steps)]
    return np.where(steps > 0, found, 0)


def num_weights(kernels: Kernels) -> int:
    """Returns the most weights that a model with these kernels has."""
    return sum(a * b + b for a, b in kernels)


def rounding_share(num_weights: int) -> float:
    """Returns the fraction of a clip that rounding to whole steps may take.

    Rounding to the nearest moves each of D coordinates by at most half a step, and a
    step is at most S 2^-20 (`bounded_sums`). In L2 norm, that is at most sqrt(D) 2^-21
    S.
    """
    return math.sqrt(num_weights) * 2.0**-21


@functools.cache
def widths(kernels: Kernels, steps: int, batch: int) -> list[int]:
    """Returns the numbers of clients that one call may train, ascending; may be empty.

    Each must be checked once, so they have only five significant binary digits, and at
    most a sixteenth of a call is padding. (Narrow layers take many checks; then they
    have three, and up to a quarter is padding.) Memory limits them to a copy of the
    model, or to 48 MB for a much smaller model; the smallest may take twice as much.
    The smallest widths are left out, as TensorFlow computes products of few rows, and
    single products, differently.

    Args:
      kernels: The kernels of a supported model.
      steps: One of `PROGRAM_STEPS`.
      batch: B, the examples in a step.
    """
    model_bytes = 4 * sum(map(math.prod, kernels))
    budget = model_bytes if model_bytes > _FACTOR_BYTES / 4 else _FACTOR_BYTES
    factors = 4 * sum(map(sum, kernels)) * steps * batch
    sizes = map(math.prod, kernels)
    products = 4 * max(
        (size for size in sizes if size <= MAX_BATCHED_ELEMENTS), default=0
    )
    one = max(_FACTOR_COPIES * factors, factors + products)
    max_width = min(bounded_sums.MAX_INT32_CLIENTS, int(budget // one))
    found: list[int] = []
    width = max(2, -(-_FEWEST_ROWS // batch))
    if width * one <= 2 * budget:
        max_width = max(max_width, min(width, bounded_sums.MAX_INT32_CLIENTS))
    is_narrow = steps * batch * min(columns for _, columns in kernels) < _NARROW
    while True:
        unit = 2 ** max(0, width.bit_length() - (3 if is_narrow else 5))
        width = -(-width // unit) * unit
        if width > max_width:
            return found
        found.append(width)
        width += 1


def is_small(kernels: Kernels, examples: int) -> bool:
    """Returns True if this many examples are not worth a second thread."""
    return float(examples) * sum(map(math.prod, kernels)) < _SMALL


# From this many weights on, a product for one client keeps all cores busy.
_LARGE = 2**24


def is_large(kernels: Kernels) -> bool:
    """Returns True if a second thread would cost memory and save no time."""
    return sum(map(math.prod, kernels)) >= _LARGE


# Float32's unit roundoff, and the largest rounding error allowed in a sum used for the
# bound on a norm: with n terms, the error is n times the unit roundoff.
ROUNDOFF = 2.0**-24
_LARGEST_ERROR = 0.01


def norm_and_upper_bound(
    grams_x: list[tf.Tensor],
    grams_d: list[tf.Tensor],
    columns: int,
    rows: int | tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the joint norms of L products X^T D and upper bounds on them.

    A dense kernel's update is such a product over a client's examples. Its norm can be
    computed without forming it (the "ghost norm" of per-example clipping, Goodfellow
    2015, "Efficient per-example gradient computations"):
    ||X^T D||^2 = sum_ij (X X^T)_ij (D D^T)_ij. The Gram matrices are rounded to
    float32. A client could choose large rows that cancel, leaving little but rounding
    error in the sum, so we need a proven bound. A float32 sum of n products, in any
    order, is off by at most gamma_n sum |terms| with gamma_n = n u / (1 - n u)
    (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1), plus
    n 2^-126 if terms underflow. By Cauchy-Schwarz, for rows x_i with a columns,

        |fl(X X^T)_ij - (X X^T)_ij| <= gamma_a ||x_i|| ||x_j|| + a 2^-126,

    and likewise for D. Summed over i and j, with q = sum_i ||x_i|| ||d_i||,

        ||X^T D||^2 <= sum_ij fl(X X^T)_ij fl(D D^T)_ij
            + (gamma_a + gamma_b) q^2
            + a 2^-126 (sum_i ||d_i||)^2 + b 2^-126 (sum_i ||x_i||)^2

    plus second-order terms. We take ||x_i||^2 to be 2^-102 more than the diagonal
    says, and likewise ||d_i||^2. Then gamma_a q^2 is at least as large as each
    underflow term, so doubling the first-order terms covers these. The second-order
    terms are less than a tenth of that, as (a + b) u is below `_LARGEST_ERROR`.

    All this assumes that nothing overflows. An element of a Gram matrix that overflows
    is not finite, even if its row's length is; neither is the float64 sum of the terms,
    where finite terms cannot overflow. So the bound is infinite.

    q also bounds the rounding error of the products themselves: computed over N rows,
    they are off by at most gamma_N q in Frobenius norm.

    Args:
      grams_x: L float32 [K, n, n], each X X^T.
      grams_d: L float32 [K, n, n], each D D^T.
      columns: The largest a + b among the L products.
      rows: N, one client's rows in a product, as each is computed separately.

    Returns:
      `(norm, bound)`, float64 [K]: the computed norm, and an upper bound on the norm
      of the products as they will be computed. The bound is not finite if an element
      is not.
    """
    # All layers in one stack, as a small model's time goes into operation overhead.
    gram_x = tf.cast(tf.stack(grams_x), tf.float64)
    gram_d = tf.cast(tf.stack(grams_d), tf.float64)
    of_x, of_d = (
        # Squares cannot cancel, so these lengths are accurate up to gamma.
        tf.sqrt(tf.linalg.diag_part(gram) + 2.0**-102)
        for gram in (gram_x, gram_d)
    )
    q = tf.reduce_sum(of_x * of_d, axis=2)
    q_squared = tf.reduce_sum(q * q, axis=0)
    # (Rows that are stored together are added up several times as fast.)
    products = tf.reshape(gram_x * gram_d, [*tf.unstack(tf.shape(gram_x)[:2]), -1])
    square = tf.reduce_sum(tf.reduce_sum(products, axis=2), axis=0)
    # Before the maximum, which would turn an overflow to minus infinity into 0.
    infinite = tf.constant(np.inf, tf.float64)
    square = tf.where(tf.math.is_finite(square), tf.maximum(square, 0.0), infinite)
    of_norm = 2.2 * ROUNDOFF * columns
    share = ROUNDOFF * tf.cast(rows, tf.float64)
    of_product = 1.05 * share / (1 - share)
    bound = tf.sqrt(square + of_norm * q_squared) + of_product * tf.sqrt(q_squared)
    return tf.sqrt(square), bound
