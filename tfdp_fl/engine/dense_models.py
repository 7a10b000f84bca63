"""Which models' clients train side by side, and when it is worthwhile."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.engine import (
    example_weights,
    gram_norms,
    separable,
    tables,
    trainer,
)
from tfdp_fl.mechanisms import cohort_query

# Above this many local steps the unrolled graph is no longer worth it.
_MOST_STEPS = 12

# Multiply-adds of a forward pass over a cohort that take about a millisecond.
_SMALL = 5e7

# What the factors of the clients of one call may take, and how many times they
# are held at the peak (as they are, and joined for a product).
_FACTOR_BYTES, _FACTOR_COPIES = 32 * 2**20, 3

# Clients with fewer steps than others idle; this much of the work at most.
_MOST_IDLE = 1.25


def chain_of(model: tf.keras.Model) -> list[Any] | None:
    """Returns the model's layers if each feeds the next and nothing else."""
    if type(model) is tf.keras.Sequential:
        return list(model.layers)
    return None


def _is_plain_dense(layer: Any) -> bool:
    """Returns whether a layer is Keras's dense one, and trains all it has."""
    plain = all(
        getattr(layer, name, None) is None
        for name in (
            "kernel_regularizer",
            "bias_regularizer",
            "activity_regularizer",
            "kernel_constraint",
            "bias_constraint",
        )
    )
    return (
        type(layer) is tf.keras.layers.Dense
        and plain
        and not keras_versions.has_adapted_weights(layer)
        and layer.trainable
        and tf.as_dtype(layer.kernel.dtype) == tf.float32
        and layer.compute_dtype in ("float32", "bfloat16")
        and separable.is_activation(layer.activation)
    )


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
    chain = chain_of(model)
    if (
        chain is None
        or not separable.is_mean_over_rows(training.loss)
        or not separable.are_sums_over_rows(training.metrics)
        or not separable.are_sums_over_rows(training.weighted_metrics)
        or not example_weights.are_numbers_of_rows(label_spec)
        or model.losses
        or not query.only_scales
        or query.two_phase
        or query.mechanism.releases_weights
        or not trainer.is_plain_sgd(training.optimizer)
        or training.proximal_weight
        or training.grad_clip > 0
        or training.upload_hook is not None
        or training.loss_weights is not None
        or type(model).compute_loss is not tf.keras.Model.compute_loss
        or len(tf.nest.flatten(model.outputs)) != 1
    ):
        return False
    layers = tf.keras.layers
    dense = [layer for layer in chain if isinstance(layer, layers.Dense)]
    others = [layer for layer in chain if not isinstance(layer, layers.Dense)]
    return bool(
        dense
        and all(_is_plain_dense(layer) for layer in dense)
        and all(layer.input_spec.min_ndim == 2 for layer in dense)
        and all(len(layer.input.shape) == 2 for layer in dense)
        and all(gram_norms.is_within_bound(*layer.kernel.shape) for layer in dense)
        and all(separable.is_layer(layer) for layer in others)
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
    steps = tables.steps_per_client(lengths, batch_size, local_epochs)
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
    32 MB where the model is much smaller than that.

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
