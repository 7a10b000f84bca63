"""A whole cohort of dense models at once, without a model for each client.

Plain SGD changes a dense kernel by a sum of outer products, one for each
example that a client has seen:

    W_k = W - eta X_k^T D_k,    D_k = dLoss / d(pre-activations).

So a client's kernel need not exist. Its product with a batch x is
x W - eta (x X_k^T) D_k, where x W is one matrix product for all clients
together; the norm of its update follows from Gram matrices,
||X_k^T D_k||^2 = sum((X_k X_k^T) * (D_k D_k^T)) (Goodfellow 2015, "Efficient
per-example gradient computations"); and the sum of the clipped updates is one
product over the examples of all clients, each weighted by its client's factor.

It is the same local SGD, step by step, as the general `CohortFunction`; it
pays where clients hold few examples for the size of the kernels.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.engine import batching, client_update, cohort, separable
from tfdp_fl.mechanisms import cohort_query, contribution

# Float32's unit roundoff, and the most that it may come to in a sum of which
# the bound of a norm is made: n terms are off by n times as much.
_ROUNDOFF = 2.0**-24
_LARGEST_ERROR = 0.01

# Above this many local steps the unrolled graph is no longer worth it.
_MOST_STEPS = 12

# Multiply-adds of a forward pass over a cohort that take about a millisecond.
_SMALL = 5e7

# What the factors of the clients of one call may take, and how many times they
# are held at the peak (as they are, and joined for a product).
_FACTOR_BYTES, _FACTOR_COPIES = 32 * 2**20, 3

# Clients with fewer steps than others idle; this much of the work at most.
_MOST_IDLE = 1.25


class LockstepTable(NamedTuple):
    """The batches of K clients that take their steps together.

    Attributes:
      rows: Int32 [S, K, B], the row numbers of each step's batch.
      sizes: Int32 [S, K], how many of the B rows count; 0 for a client that
        has no such step.
    """

    rows: Any
    sizes: Any


def lockstep(
    plan: batching.BatchPlan, num_steps: int | None = None
) -> LockstepTable:
    """Lays out a plan's clients side by side.

    Args:
      plan: The clients.
      num_steps: S, at least the most that a client takes; None: just that.
    """
    steps = np.diff(plan.first_step)
    most = int(steps.max(initial=0)) if num_steps is None else num_steps
    if plan.num_clients and most and (steps == most).all():  # As it lies.
        shape = [plan.num_clients, most, plan.rows.shape[1]]
        return LockstepTable(
            np.ascontiguousarray(plan.rows.reshape(shape).swapaxes(0, 1)),
            np.ascontiguousarray(plan.batch_sizes.reshape(shape[:2]).T),
        )
    step = np.arange(most)[:, None]
    active = step < steps[None, :]
    index = np.where(active, plan.first_step[None, :-1] + step, 0)
    if not len(plan.rows):
        shape = [most, plan.num_clients]
        return LockstepTable(
            np.zeros([*shape, plan.rows.shape[1]], np.int32),
            np.zeros(shape, np.int32),
        )
    return LockstepTable(
        plan.rows[index], np.where(active, plan.batch_sizes[index], 0)
    )


class _DenseLayer(NamedTuple):
    """One dense layer: where its kernel and bias stand among the weights."""

    layer: tf.keras.layers.Dense
    kernel: int
    bias: int | None


def _chain(model: tf.keras.Model) -> list[Any] | None:
    """Returns the model's layers if each feeds the next and nothing else."""
    if type(model) is tf.keras.Sequential:
        return list(model.layers)
    return None


def _is_plain_dense(layer: Any) -> bool:
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
        and separable.is_activation(layer.activation)
        and layer.trainable
        and tf.as_dtype(layer.kernel.dtype) == tf.float32
        and layer.compute_dtype == "float32"
    )


def _products_are_float32() -> bool:
    """Returns True if a float32 product is computed as one.

    The bound of an update's norm rests on it. oneDNN and GPUs can be told to
    round the factors to fewer bits.
    """
    modes = ("ONEDNN_DEFAULT_FPMATH_MODE", "TF_SET_ONEDNN_FPMATH_MODE")
    if any(
        os.environ.get(name, "STRICT") not in ("", "STRICT") for name in modes
    ):
        return False
    return not tf.config.list_logical_devices("GPU") or not (
        tf.config.experimental.tensor_float_32_execution_enabled()
    )


def supports(
    model: tf.keras.Model,
    training: client_update.LocalTraining,
    query: cohort_query.CohortQuery,
) -> bool:
    """Returns True if a cohort of this model can be trained in this way.

    The model is a chain of dense layers (with flattening and activations in
    between), trained by plain SGD with a Keras loss that is a mean over
    examples, under a mechanism that only scales updates.
    """
    chain = _chain(model)
    if (
        chain is None
        or not separable.is_mean_over_rows(training.loss)
        or not separable.are_sums_over_rows(training.metrics)
        or not _products_are_float32()
        or model.losses
        or not query.only_scales
        or query.two_phase
        or query.mechanism.releases_weights
        or not client_update.is_plain_sgd(training.optimizer)
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
        and all(keras_versions.input_rank(layer) == 2 for layer in dense)
        and all(
            sum(layer.kernel.shape) * _ROUNDOFF < _LARGEST_ERROR
            for layer in dense
        )
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
        list(layer.kernel.shape)
        for layer in model.layers
        if hasattr(layer, "kernel")
    ]
    largest = max(shapes, key=math.prod)
    return Kernels(
        parameters=model.count_params(),
        largest=math.prod(largest),
        sides=sum(largest),
        widths=sum(map(sum, shapes)),
    )


def pays(
    kernels: Kernels,
    lengths: np.ndarray,
    batch_size: int,
    local_epochs: int,
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
    steps = batching.steps_per_client(lengths, batch_size, local_epochs)
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


class _Memory:
    """What one dense layer remembers of its clients' steps.

    Attributes:
      inputs: Its inputs at each step, [K, B, in].
      gradients: The loss's gradients at its pre-activations, [K, B, out].
      known: The inputs of all steps, [K, S B, in], where they are known before
        training (the first layer's); else None.
      gram: Then also their Gram matrices, [K, S B, S B].
      products: And their products with the server's kernel, [K, B, out] each.
    """

    def __init__(self):
        self.inputs: list[tf.Tensor] = []
        self.gradients: list[tf.Tensor] = []
        self.known: tf.Tensor | None = None
        self.gram: tf.Tensor | None = None
        self.products: list[tf.Tensor] = []


class DenseCohortFunction:
    """Trains clients of a dense model side by side, and adds them up."""

    def __init__(
        self,
        model: tf.keras.Model,
        trainer: client_update.ClientTrainer,
        query: cohort_query.CohortQuery,
        steps: int,
        full_batches: bool,
        all_usable: bool = False,
    ):
        """Prepares the function for a number of local steps.

        Args:
          model: The replica that the trainer trains.
          trainer: Has the loss and the metrics.
          query: The mechanism's query; it only scales.
          steps: S.
          full_batches: Every client takes S steps of exactly B examples.
          all_usable: Take for granted that there is no NaN and no Inf. A
            result with `discarded` clients, or with a loss that is no number,
            is then of no use.
        """
        self._all_usable = all_usable
        self._trainer = trainer
        self._query = query
        self._steps = steps
        self._full_batches = full_batches
        places = {
            id(variable): index
            for index, variable in enumerate(trainer.variables)
        }
        self._layers = [
            _DenseLayer(
                layer,
                places[id(keras_versions.tf_variable(layer.kernel))],
                places[id(keras_versions.tf_variable(layer.bias))]
                if layer.use_bias
                else None,
            )
            if isinstance(layer, tf.keras.layers.Dense)
            else layer
            for layer in _chain(model)
            if not isinstance(layer, tf.keras.layers.InputLayer)
        ]

    def __call__(
        self,
        weights: list[tf.Tensor],
        params: Any,
        x: Any,
        y: Any,
        table: LockstepTable,
        learning_rate: tf.Tensor,
    ) -> tuple[cohort.CohortSum, list[tf.Tensor]]:
        """Runs K clients.

        Args:
          weights: The server's values of the trainer's variables.
          params: The query's sample params.
          x: The features, one tensor, leading dimension over stored examples.
          y: The labels, likewise.
          table: A `LockstepTable`.
          learning_rate: Float32 scalar.

        Returns:
          A `CohortSum`, and the values of the trainer's metric variables.
        """
        self._trainer.start_metrics()
        shape = tf.shape(table.rows)
        clients, batch = shape[1], shape[2]
        labels = self._own(tf.gather(y, table.rows), table.sizes)
        memory = self._first_memory(weights, x, table, clients)
        loss, examples = tf.zeros([]), tf.zeros([])
        for step in range(self._steps):
            mean, valid = self._row_weights(table.sizes[step], batch)
            summed, counted = self._step(
                weights,
                _rows(labels[step], keep=labels.shape.rank - 3),
                mean,
                valid,
                memory,
                learning_rate,
                (clients, batch),
            )
            loss += summed
            examples += counted
        record = self._sum(weights, params, memory, clients, learning_rate)
        return (
            cohort.CohortSum(record, loss, examples, ()),
            self._trainer.metric_values(),
        )

    def in_groups(
        self,
        weights: list[tf.Tensor],
        params: Any,
        x: Any,
        y: Any,
        table: LockstepTable,
        learning_rate: tf.Tensor,
        at_once: tf.Tensor,
    ) -> tuple[cohort.CohortSum, list[tf.Tensor]]:
        """Runs K clients, so many at once (an int32 scalar); see `__call__`.

        The replica's own variables, which no client needs here, hold the sum.
        """
        sums = self._trainer.variables
        zeros = [tf.zeros(each.shape, each.dtype) for each in sums]
        for each, zero in zip(
            sums, cohort.made_by_each_run(zeros, at_once), strict=True
        ):
            each.assign(zero)

        def some(start: tf.Tensor) -> tuple[cohort.CohortSum, list[tf.Tensor]]:
            end = start + at_once
            total, metrics = self(
                weights,
                params,
                x,
                y,
                LockstepTable(
                    table.rows[:, start:end], table.sizes[:, start:end]
                ),
                learning_rate,
            )
            for each, part in zip(sums, total.record.update, strict=True):
                each.assign_add(part)
            return _with_update(total, ()), metrics

        def add(start: tf.Tensor, total: Any) -> tuple[tf.Tensor, Any]:
            total = tf.nest.map_structure(tf.add, total, some(start))
            return start + at_once, total

        record = self._query.initial_sample_state(zeros)
        nobody = cohort.CohortSum(
            record._replace(update=()), tf.zeros([]), tf.zeros([]), ()
        )
        metrics = [
            tf.zeros_like(variable)
            for variable in self._trainer.metric_variables
        ]
        _, (total, metrics) = tf.while_loop(
            lambda start, _: start < tf.shape(table.rows)[1],
            add,
            (tf.constant(0), (nobody, metrics)),
            parallel_iterations=1,
        )
        return _with_update(total, [each.read_value() for each in sums]), (
            metrics
        )

    def _first_memory(
        self,
        weights: list[tf.Tensor],
        x: tf.Tensor,
        table: LockstepTable,
        clients: tf.Tensor,
    ) -> list[_Memory]:
        """Prepares what each dense layer remembers of its clients' steps.

        The first layer's inputs do not depend on the weights: its products
        with the server's kernel, and its Gram matrices, are made for all steps
        at once.
        """
        memory = [_Memory() for layer in self._layers if _is_dense(layer)]
        h = self._own(
            tf.gather(x, tf.transpose(table.rows, [1, 0, 2])),
            tf.transpose(table.sizes),
        )
        h = _rows(h, keep=h.shape.rank - 3)
        for layer in self._layers:
            if not _is_dense(layer):
                h = layer(h)
                continue
            kernel = weights[layer.kernel]
            first = memory[0]
            products = self._server_product(layer, weights, h)
            first.known = tf.reshape(h, [clients, -1, kernel.shape[0]])
            first.gram = self._gram(layer, first.known, first.known)
            first.products = tf.split(
                tf.reshape(products, [clients, -1, kernel.shape[1]]),
                self._steps,
                axis=1,
            )
            return memory
        raise AssertionError("A dense model has a dense layer.")

    def _own(self, values: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        """Returns gathered values with zeros where there is no example.

        A client that idles has rows in the table that are somebody else's:
        what stands in them, such as a NaN, is none of its business.

        Args:
          values: [n, m, B, ...].
          sizes: Int32 [n, m], how many of the B are examples.
        """
        if self._full_batches:
            return values
        valid = tf.sequence_mask(sizes, tf.shape(values)[2])
        for _ in range(values.shape.rank - 3):
            valid = valid[..., tf.newaxis]
        return tf.where(valid, values, tf.zeros([], values.dtype))

    def _server_product(
        self, layer: _DenseLayer, weights: list[tf.Tensor], h: tf.Tensor
    ) -> tf.Tensor:
        z = tf.matmul(h, weights[layer.kernel])
        if layer.bias is None:
            return z
        return tf.nn.bias_add(z, weights[layer.bias])

    @staticmethod
    def _gram(layer: _DenseLayer, one: tf.Tensor, other: tf.Tensor):
        products = tf.matmul(one, other, transpose_b=True)
        # A bias is one more kernel row, for an input that is always 1.
        return products if layer.bias is None else products + 1.0

    def _row_weights(
        self, sizes: tf.Tensor, batch: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns weights [K B] of the rows of a step, or one for all of them.

        The first weight sums to each client's own mean, the second is True for
        rows that count (None: all of them do).
        """
        if self._full_batches:
            return 1 / tf.cast(batch, tf.float32), None
        valid = tf.sequence_mask(sizes, batch)
        sizes = tf.cast(sizes, tf.float32)
        mean = tf.math.divide_no_nan(tf.cast(valid, tf.float32), sizes[:, None])
        return tf.reshape(mean, [-1]), tf.reshape(valid, [-1])

    def _step(
        self,
        weights: list[tf.Tensor],
        y: tf.Tensor,
        mean_weights: tf.Tensor,
        valid: tf.Tensor | None,
        memory: list[_Memory],
        learning_rate: tf.Tensor,
        shape: tuple[tf.Tensor, tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes one step of every client.

        Returns:
          The loss summed over examples, and how many they are: those whose
          loss is a number.
        """
        outputs: list[tf.Tensor] = []
        h = None
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for layer in self._layers:
                if not _is_dense(layer):
                    if h is not None:
                        h = layer(h)
                    continue
                own = memory[len(outputs)]
                z = self._affine(layer, weights, h, own, learning_rate, shape)
                if h is None:
                    tape.watch(z)
                outputs.append(z)
                h = layer.layer.activation(z)
            losses = self._trainer.losses_of_rows(y, h)
            loss = tf.reduce_sum(losses * mean_weights)
        for own, gradient in zip(
            memory, tape.gradient(loss, outputs), strict=True
        ):
            own.gradients.append(
                tf.reshape(gradient, [*shape, gradient.shape[-1]])
            )
        if valid is not None:
            y, h = tf.boolean_mask(y, valid), tf.boolean_mask(h, valid)
        self._trainer.update_metrics(y, h, numbers_only=not self._all_usable)
        if self._all_usable and valid is None:
            rows = tf.cast(tf.size(losses), tf.float32)
            return tf.reduce_sum(losses), rows
        counts = tf.math.is_finite(losses)
        if valid is not None:
            counts &= valid
        return (
            tf.reduce_sum(tf.where(counts, cohort.bounded_loss(losses), 0.0)),
            tf.reduce_sum(tf.cast(counts, tf.float32)),
        )

    def _affine(
        self,
        layer: _DenseLayer,
        weights: list[tf.Tensor],
        h: tf.Tensor | None,
        own: _Memory,
        learning_rate: tf.Tensor,
        shape: tuple[tf.Tensor, tf.Tensor],
    ) -> tf.Tensor:
        """Returns every client's own h W_k + b_k, as [K B, width]."""
        step = len(own.gradients)
        until = step * shape[1]
        products = None
        if h is None:
            z = _rows(own.products[step])
            if step:
                products = own.gram[:, until : until + shape[1], :until]
        else:
            z = self._server_product(layer, weights, h)
            here = tf.reshape(h, [*shape, h.shape[-1]])
            if step:
                earlier = tf.concat(own.inputs, axis=1)
                products = self._gram(layer, here, earlier)
            own.inputs.append(here)
        if step:
            change = tf.matmul(products, tf.concat(own.gradients, axis=1))
            z -= learning_rate * _rows(change)
        return z

    def _sum(
        self,
        weights: list[tf.Tensor],
        params: Any,
        memory: list[_Memory],
        clients: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> contribution.Contribution:
        """Scales each client's update as the mechanism says, and adds up."""
        dense = [layer for layer in self._layers if _is_dense(layer)]
        grams, factors = [], []
        for layer, own in zip(dense, memory, strict=True):
            d = tf.concat(own.gradients, axis=1)
            x, gram = own.known, own.gram
            if x is None:
                x = tf.concat(own.inputs, axis=1)
                gram = self._gram(layer, x, x)
            grams.append((gram, tf.matmul(d, d, transpose_b=True)))
            factors.append((x, d))
        length, bound = norm_bound(
            [gram for gram, _ in grams],
            [gram for _, gram in grams],
            [
                x.shape[-1] + (layer.bias is not None)
                for layer, (x, _) in zip(dense, factors, strict=True)
            ],
            [d.shape[-1] for _, d in factors],
            # Of the product below, over all clients of this call.
            rows=tf.size(factors[0][1][..., 0]),
        )
        rate = tf.abs(tf.cast(learning_rate, tf.float64))
        # The scale, and each factor times it, are rounded as well.
        norm = tf.cast(rate * (1 + 16 * _ROUNDOFF) * bound, tf.float32)
        usable = tf.math.is_finite(norm)
        each = self._query.mechanism.contribution_of_norm(
            tf.where(usable, norm, 0.0), usable, params
        )
        seen = tf.cast(rate * length, tf.float32)
        each = each._replace(norm=tf.where(usable, seen, 0.0))
        # A rate that is no number makes nobody usable, and zero of everybody.
        scale = tf.where(usable, -learning_rate * each.update, 0.0)
        scale = scale[:, None, None]
        update: list[Any] = [None] * len(weights)
        for layer, (x, d) in zip(dense, factors, strict=True):
            d = _rows(tf.math.multiply_no_nan(d, scale))
            if not self._all_usable:
                x = tf.cond(
                    tf.reduce_all(usable),
                    lambda x=x: x,
                    lambda x=x: tf.where(tf.math.is_finite(x), x, 0.0),
                )
            update[layer.kernel] = tf.matmul(_rows(x), d, transpose_a=True)
            if layer.bias is not None:
                update[layer.bias] = tf.reduce_sum(d, axis=0)
        return each.with_scalars(
            update, [tf.reduce_sum(value) for value in each.scalars()]
        )


def norm_bound(
    grams_x: list[tf.Tensor],
    grams_d: list[tf.Tensor],
    columns_x: list[int],
    columns_d: list[int],
    rows: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the joint norms of L products X^T D, and what bounds them.

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
      columns_x: The a of each X, one more where there is a bias.
      columns_d: The b of each D.
      rows: N, integer scalar.

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
    columns = max(a + b for a, b in zip(columns_x, columns_d, strict=True))
    of_norm = 2.2 * _ROUNDOFF * columns
    share = _ROUNDOFF * tf.cast(rows, tf.float64)
    of_product = 1.05 * share / (1 - share)
    bound = tf.sqrt(square + of_norm * q_squared) + of_product * tf.sqrt(
        q_squared
    )
    return tf.sqrt(square), bound


def _with_update(total: cohort.CohortSum, update: Any) -> cohort.CohortSum:
    return total._replace(record=total.record._replace(update=update))


def _is_dense(layer: Any) -> bool:
    return isinstance(layer, _DenseLayer)


def _rows(tensor: tf.Tensor, keep: int = 1) -> tf.Tensor:
    """Returns [K, B, ...] as [K B, ...], where `keep` dimensions follow."""
    inner = tensor.shape[tensor.shape.rank - keep :] if keep else []
    return tf.reshape(tensor, [-1, *inner])
