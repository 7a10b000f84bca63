"""Trains clients of a dense model side by side, without a model for each client.

Plain SGD changes a dense kernel by a sum of outer products, one for each example
that a client has seen:

    W_k = W - eta X_k^T D_k,    D_k = dLoss / d(pre-activations).

So a client's kernel is never formed. Its product with a batch x is
x W - eta (x X_k^T) D_k, in which x W is one matrix product for all clients. The norm
of its update follows from Gram matrices (`norm_and_upper_bound`). The clipped update
is formed last, from the factors, and rounded to a grid whose sums are exact
(`_sum_of`).

What a client adds therefore depends on its own rows alone: a call trains a number of
clients for which no row's product depends on the others (`dense_models.widths`),
everything else is computed row by row (`_apply_rowwise`), and the number of steps in a
call is determined by each client's own.

The result is the same local SGD as in `CohortPrograms`, step by step. It is faster if
clients have few examples relative to the size of the kernels (`dense_models`).

Under Keras's mixed_bfloat16 policy, products with the server's weights and those of
the backward pass are in bfloat16. The factors of an update, X_k and D_k, are kept in
float32, so corrections, Gram matrices, norms and sums are as without that policy.

Shapes: K clients, S steps, B rows per batch, R = K B rows for all clients.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.datasets import nests
from tfdp_fl.engine import cohort, dense_models, layout
from tfdp_fl.engine import trainer as trainer_lib
from tfdp_fl.mechanisms import bounded_sums, cohort_query, contribution
from tfdp_fl.mechanisms.contribution import RoundState

# TensorFlow computes a tensor's last elements differently if they do not fill a
# vector. This many rows always do, whatever the length of a row.
_FILLED = 32

# For rows at least this long, one product per Gram matrix takes half the time.
_LONG = 512

# At most one rounded operation per element, so every way of computing it agrees.
_ROW_INDEPENDENT = ("linear", "relu", "relu6", "leaky_relu")


class _Rows:
    """The rows of K clients, equally many for each, stored consecutively: R in all."""

    def __init__(self, clients: tf.Tensor):
        """Takes K, an int32 scalar."""
        self._clients = clients
        # Shapes cached by row length, as making one takes several operations.
        self._shapes: dict[int, tf.Tensor] = {}

    def split(self, rows: tf.Tensor) -> tf.Tensor:
        """Reshapes rows [R, m] to [K, R / K, m], a block for each client."""
        length = rows.shape[-1]
        if length not in self._shapes:
            self._shapes[length] = tf.stack([self._clients, -1, length])
        return tf.reshape(rows, self._shapes[length])


def _join(clients: tf.Tensor) -> tf.Tensor:
    """Reshapes the clients' rows [K, n, m] to [K n, m]."""
    return tf.reshape(clients, [-1, clients.shape[-1]])


def _gram(rows: tf.Tensor) -> tf.Tensor:
    """Returns the inner products of each client's rows, [K, n, n], of [K, n, m]."""
    product = functools.partial(tf.matmul, transpose_b=True)
    if rows.shape[-1] < _LONG:
        return product(rows, rows)
    return tf.map_fn(lambda own: product(own, own), rows, parallel_iterations=1)


def _apply_rowwise(
    function: Callable[..., tf.Tensor], *rows: tf.Tensor, exact: bool = False
) -> tf.Tensor:
    """Calls a rowwise function on [R, ...] such that no row's result depends on R.

    Args:
      function: Takes and returns tensors of rows.
      *rows: Its arguments.
      exact: Whether its results never depend on R anyway (`_ROW_INDEPENDENT`).
    """
    if exact:
        return function(*rows)
    count = tf.shape(rows[0])[0]
    filled = [
        tf.pad(each, [[0, -count % _FILLED]] + [[0, 0]] * (each.shape.rank - 1))
        for each in rows
    ]
    return function(*filled)[:count]


def _is_row_independent(activation: Any) -> bool:
    """Returns whether an activation (or a layer's) is in `_ROW_INDEPENDENT`."""
    layers = tf.keras.layers
    if isinstance(activation, (layers.InputLayer, layers.Flatten, layers.ReLU)):
        return True
    activation = getattr(activation, "activation", activation)
    return any(
        activation is getattr(tf.keras.activations, n, 0) for n in _ROW_INDEPENDENT
    )


class _DenseLayer:
    """A dense layer with the server's weights and its clients' steps so far.

    Attributes:
      layer: The Keras layer.
      after: The Keras layers between this dense layer and the next.
      shape: The shape of its kernel.
      gradients: The loss's gradients with respect to its pre-activations, float32
        [K, B, out] for each step.
    """

    def __init__(
        self,
        rows: _Rows,
        layer: tf.keras.layers.Layer,
        kernel: tf.Tensor,
        bias: tf.Tensor | None = None,
    ):
        """Takes the rows of a step, the Keras layer, and its weights."""
        self.layer = layer
        self.after: list[tf.keras.layers.Layer] = []
        self.shape: tuple[int, int] = tuple(layer.kernel.shape)
        self.gradients: list[tf.Tensor] = []
        self._rows = rows
        self._kernel = tf.cast(kernel, layer.compute_dtype)
        self._bias = None if bias is None else tf.cast(bias, layer.compute_dtype)
        self._inputs: list[tf.Tensor] = []

    def server_product(self, h: tf.Tensor) -> tf.Tensor:
        """Returns h W + b with the weights that all clients received."""
        z = tf.matmul(tf.cast(h, self._kernel.dtype), self._kernel)
        return z if self._bias is None else tf.nn.bias_add(z, self._bias)

    def with_bias(self, products: tf.Tensor) -> tf.Tensor:
        """Returns inner products of inputs, including the bias's."""
        # A bias is a further kernel row, whose input is always 1.
        return products if self._bias is None else products + 1.0

    def changed(self, z: tf.Tensor, products: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Returns z, the product with the received kernel, less the clients' own steps.

        Args:
          z: [R, out].
          products: Float32 [K, B, s B], products of these inputs with those of the
            earlier steps.
          rate: The learning rate, eta.
        """
        change = tf.matmul(rate * products, tf.concat(self.gradients, axis=1))
        return tf.cast(tf.cast(z, tf.float32) - _join(change), z.dtype)

    def __call__(self, h: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Returns h W_k + b_k with each client's own weights, [R, out], for a new step.

        Args:
          h: [R, in].
          rate: The learning rate, eta.
        """
        z = self.server_product(h)
        h = tf.cast(self._rows.split(tf.cast(h, z.dtype)), tf.float32)
        if self.gradients:
            earlier = tf.concat(self._inputs, axis=1)
            products = self.with_bias(tf.matmul(h, earlier, transpose_b=True))
            z = self.changed(z, products, rate)
        self._inputs.append(h)
        return z

    def activate(self, z: tf.Tensor) -> tf.Tensor:
        """Returns the next dense layer's input, or the model's outputs."""
        h = z
        for function in (self.layer.activation, *self.after):
            h = _apply_rowwise(function, h, exact=_is_row_independent(function))
        return h

    def back(self, gradient: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Takes the loss's gradient at z, [R, out]; returns that at h, [R, in].

        It is g W_k^T = g W^T - eta (g D_k^T) X_k, summed over the earlier steps.
        """
        own = tf.cast(self._rows.split(gradient), tf.float32)
        back = tf.matmul(gradient, self._kernel, transpose_b=True)
        if self.gradients:
            d, x = tf.concat(self.gradients, axis=1), self._inputs[:-1]
            products = rate * tf.matmul(own, d, transpose_b=True)
            change = _join(tf.matmul(products, tf.concat(x, axis=1)))
            back = tf.cast(tf.cast(back, tf.float32) - change, back.dtype)
        self.gradients.append(own)
        return back

    def factors(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns X [K, S B, in], D [K, S B, out] and X X^T, over all steps."""
        x = tf.concat(self._inputs, axis=1)
        return x, tf.concat(self.gradients, axis=1), self.with_bias(_gram(x))


class _FirstLayer(_DenseLayer):
    """The first dense layer, whose inputs in all steps are known before training.

    So its products with the server's kernel and its Gram matrices are computed for
    all steps at once.
    """

    def __init__(self, h: tf.Tensor, steps: int, rows: _Rows, *own: Any):
        """Takes the inputs [K S B, in] of all S steps, then any layer's arguments."""
        super().__init__(rows, *own)
        z = self.server_product(h)
        self._x = rows.split(tf.cast(tf.cast(h, z.dtype), tf.float32))
        self._gram = self.with_bias(_gram(self._x))
        self._grams = tf.split(self._gram, steps, axis=1)
        self._products = tf.split(rows.split(z), steps, axis=1)

    def __call__(self, h: tf.Tensor | None, rate: tf.Tensor) -> tf.Tensor:
        """As for every layer; h is ignored."""
        del h
        step = len(self.gradients)
        z = _join(self._products[step])
        if not step:
            return z
        until = tf.shape(self.gradients[0])[1] * step
        return self.changed(z, self._grams[step][..., :until], rate)

    def back(self, gradient: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Takes the loss's gradient at z; that at h is never needed."""
        self.gradients.append(tf.cast(self._rows.split(gradient), tf.float32))
        return gradient

    def factors(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """As for every layer."""
        return self._x, tf.concat(self.gradients, axis=1), self._gram


@dataclasses.dataclass(frozen=True, eq=False)
class GhostClipping:
    """Trains clients of a dense model side by side and adds up their updates.

    Attributes:
      trainer: Holds the model, the loss and the metrics.
      query: The mechanism's query, which only scales updates.
      steps: S; clients with fewer steps idle at the end.
      fine: Whether contributions are rounded to the fine grid of float64 sums
        (`bounded_sums`). Otherwise, it is that of int32 sums, which takes half the
        time.
    """

    trainer: trainer_lib.Trainer
    query: cohort_query.CohortQuery
    steps: int
    fine: bool

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        """The position of each variable in an update, by the variable's id."""
        return {id(v): place for place, v in enumerate(self.trainer.aggregated)}

    def __call__(
        self, broadcast: cohort.Broadcast, chunk: layout.Chunk
    ) -> cohort.Trained:
        """Trains K clients for all their steps, then clips and adds up their updates.

        Args:
          broadcast: What the server sends to each of them.
          chunk: The clients.
        """

        def by_step(part: tf.Tensor) -> tf.Tensor:
            return tf.reshape(part, [self.steps, -1])

        (x,), table = tf.nest.flatten(chunk.x), chunk.table
        places, sizes = self._batches(table)
        h = tf.gather(x, tf.reshape(tf.transpose(places, [1, 0, 2]), [-1]))
        layers = self._layers(broadcast.weights, h, _Rows(tf.size(table.num_examples)))
        y, weight = nests.labels_and_weights(
            tf.nest.map_structure(
                lambda leaf: tf.gather(leaf, by_step(places)), _of_one_output(chunk.y)
            )
        )
        valid = tf.sequence_mask(sizes, tf.size(table.batch))
        # A client's loss is the mean over its own rows.
        mean = tf.cast(valid, tf.float32) / tf.cast(sizes, tf.float32)[..., None]
        valid, mean = by_step(valid), by_step(tf.where(valid, mean, 0.0))
        if weight is not None:
            mean *= weight
        steps = zip(
            tf.unstack(y, self.steps), tf.unstack(mean, self.steps), strict=True
        )
        taken = [
            self._take_step(layers, labels, share, broadcast.learning_rate)
            for labels, share in steps
        ]
        outputs, losses = (tf.concat(each, axis=0) for each in zip(*taken, strict=True))
        total = self._sum_statistics(outputs, losses, y, weight, valid)
        clipped, norms = self._clip_and_sum(broadcast, layers, table)
        total = total._replace(contribution=clipped)
        bits = _bits_of(norms, layers, broadcast.returns_bits)
        grid_step = () if self.fine else self.query.coarse_grid_step(broadcast.params)
        return cohort.Trained(total, cohort.PerClient(), grid_step, bits)

    def _sum_statistics(
        self,
        outputs: tf.Tensor,
        losses: tf.Tensor,
        y: tf.Tensor,
        weight: tf.Tensor | None,
        valid: tf.Tensor,
    ) -> cohort.CohortSum:
        """Returns the sum of losses, examples and metrics.

        Args:
          outputs: [S R, out].
          losses: Float32 [S R].
          y: [S, R, ...], the labels.
          weight: Float32 [S, R] or None, the rows' weights in the loss.
          valid: Bool [S, R], which rows are examples.
        """

        def present(part: tf.Tensor) -> tf.Tensor:
            return tf.boolean_mask(part, tf.reshape(valid, [-1]))

        y = present(tf.reshape(y, tf.concat([[-1], tf.shape(y)[2:]], axis=0)))
        outputs, losses = present(outputs), present(losses)
        if weight is not None:
            weight = present(tf.reshape(weight, [-1]))
            losses *= weight
        counts = tf.math.is_finite(losses)
        losses = tf.where(counts, cohort.bound_loss(losses), 0.0)
        nothing = cohort.CohortSum.zeros(self.trainer.no_metrics())
        return nothing._replace(
            loss=tf.reduce_sum(losses),
            examples=tf.reduce_sum(tf.cast(counts, tf.float32)),
            metrics=self.trainer.with_batch(nothing.metrics, y, outputs, weight),
        )

    def _batches(self, table: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows of all batches, int32 [S, K, B], and their sizes [S, K].

        Missing steps and rows are filled with the client's own first row. It trains on
        that row anyway, so a NaN there is its own; the filler's loss is not counted.
        (A padding client gets the very first row, and adds nothing.)
        """
        num_examples, batch = table.num_examples, tf.size(table.batch)
        per_pass = tf.maximum(-(-num_examples // batch), 1)
        step = tf.range(self.steps)[:, tf.newaxis]
        done, start = step // per_pass, step % per_pass * batch
        left = tf.clip_by_value(num_examples - start, 0, batch)
        sizes = tf.where(done < table.epochs, left, 0)
        first = table.first_row + done * num_examples + start
        places = first[..., tf.newaxis] + table.batch
        own_first = table.first_row[:, tf.newaxis]
        places = tf.where(tf.sequence_mask(sizes, batch), places, own_first)
        return tf.gather(table.rows, places), sizes

    def _layers(
        self, weights: list[tf.Tensor], h: tf.Tensor, rows: _Rows
    ) -> list[_DenseLayer]:
        """Returns the dense layers; the first one already holds its inputs.

        Args:
          weights: The weights that the server sent.
          h: The model's inputs in all steps.
          rows: The clients' rows.
        """
        layers: list[_DenseLayer] = []
        for layer in self.trainer.model.layers:
            if isinstance(layer, tf.keras.layers.Dense):
                own = (
                    rows,
                    layer,
                    *[weights[self._places[id(v)]] for v in layer.weights],
                )
                if layers:
                    layers.append(_DenseLayer(*own))
                else:
                    layers.append(_FirstLayer(h, self.steps, *own))
            elif layers:
                layers[-1].after.append(layer)
            else:
                h = _apply_rowwise(layer, h, exact=_is_row_independent(layer))
        return layers

    def _take_step(
        self,
        layers: list[_DenseLayer],
        y: tf.Tensor,
        share: tf.Tensor,
        rate: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes one step of every client.

        Args:
          layers: From `_layers`; they record the step's inputs and gradients.
          y: [R, ...], the labels.
          share: Float32 [R], the weight of a row's loss in its client's loss.
          rate: The learning rate, eta.

        Returns:
          The outputs [R, out] and each row's loss, float32 [R].
        """
        h, passed = None, []
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            for layer in layers:
                with tape.stop_recording():
                    z = layer(h, rate)
                tape.watch(z)
                h = layer.activate(z)
                passed.append((layer, z, h))
            of_rows = functools.partial(
                keras_versions.losses_of_rows, self.trainer.single_loss
            )
            losses = tf.cast(_apply_rowwise(of_rows, y, h), tf.float32)
            loss = tf.reduce_sum(losses * share)
        gradient = tape.gradient(loss, z)
        for (layer, *_), (_, z, h_before) in itertools.pairwise(reversed(passed)):
            gradient = tf.cast(layer.back(gradient, rate), h_before.dtype)
            gradient = tape.gradient(h_before, z, gradient)
        layers[0].back(gradient, rate)
        return h, losses

    def _clip_and_sum(
        self, broadcast: cohort.Broadcast, layers: list[_DenseLayer], table: Any
    ) -> tuple[contribution.Contribution, tf.Tensor]:
        """Scales each client's update as the mechanism says, and adds up.

        Args:
          broadcast: What the server sent.
          layers: The dense layers, after all steps.
          table: The clients.

        Returns:
          The sum, and of each client both results of `norm_and_upper_bound`, float64
          [K, 2].
        """
        rate, params = broadcast.learning_rate, broadcast.params
        factors = [layer.factors() for layer in layers]
        length, bound = dense_models.norm_and_upper_bound(
            [gram for _, _, gram in factors],
            [_gram(d) for _, d, _ in factors],
            # A bias is a further column of the input.
            columns=max(x.shape[-1] + 1 + d.shape[-1] for x, d, _ in factors),
            rows=tf.shape(factors[0][1])[1],
        )
        size = tf.abs(tf.cast(rate, tf.float64))
        # The scale is rounded too, and so is each factor when multiplied by it.
        norm = tf.cast(size * (1 + 16 * dense_models.ROUNDOFF) * bound, tf.float32)
        usable = tf.math.is_finite(norm)
        clients = self.query.contributions_of_norms(
            tf.where(usable, norm, 0.0),
            usable,
            params,
            self.query.client_weight(table.num_examples),
        )
        if not self.fine:  # Stay within the bound after rounding, too.
            kernels = tuple(layer.shape for layer in layers)
            share = dense_models.rounding_share(dense_models.num_weights(kernels))
            limit = self.query.l2_norm_bound(params) * (1 - share) / norm
            clients = clients._replace(update=tf.minimum(clients.update, limit))
        seen = tf.cast(size * length, tf.float32)
        clients = clients._replace(norm=tf.where(usable, seen, 0.0))
        # With a NaN learning rate no client is usable, and every update becomes zero.
        scale = tf.where(usable, -rate * clients.update, 0.0)[:, None, None]
        update: list[Any] = [None] * len(broadcast.weights)
        for layer, (x, d, _) in zip(layers, factors, strict=True):
            d = tf.math.multiply_no_nan(d, scale)
            x = tf.cond(
                tf.reduce_all(usable),
                lambda x=x: x,
                lambda x=x: tf.where(tf.math.is_finite(x), x, 0.0),
            )
            kernel, *bias = [self._places[id(v)] for v in layer.layer.weights]
            update[kernel] = self._sum_of(x, d, broadcast.params)
            for place in bias:
                ones = tf.ones([*tf.unstack(tf.shape(d))[:2], 1])
                update[place] = tf.reshape(
                    self._sum_of(ones, d, broadcast.params), [-1]
                )
        present = tf.range(tf.size(usable)) < table.num_clients
        nothing = self.query.initial_sample_state([])
        total = clients.with_scalars(
            update,
            [
                tf.reduce_sum(tf.cast(tf.where(present, value, 0.0), whole.dtype))
                for value, whole in zip(
                    clients.scalars(), nothing.scalars(), strict=True
                )
            ],
        )
        return total, tf.stack([length, bound], axis=1)

    def _sum_of(self, x: tf.Tensor, d: tf.Tensor, params: RoundState) -> tf.Tensor:
        """Returns the exact sum of the clients' rounded products X^T D.

        Each product is computed separately, so that a client's does not depend on the
        others. S bounds every contribution's norm (`l2_norm_bound`, whatever the clip).
        Let c = 1.5 2^k with 2^k > 4 S. For |r| <= 2 S, the float32 number r + c lies
        between 2^k and 2^(k + 1). Its bits, read as an integer, are those of c plus
        an integer of at most 2^21: r in steps of 2^(k - 23) <= S 2^-20, rounded. Int32
        holds the sum of such integers for 512 clients (`MAX_INT32_CLIENTS`). (The bits
        of c overflow, but are subtracted again.)

        Args:
          x: Float32 [K, n, a].
          d: Float32 [K, n, b].
          params: The round's sample params.

        Returns:
          [a, b], float64 or, unless `fine`, int32 in steps of 2^(k - 23).
        """
        shape = [x.shape[-1], d.shape[-1]]
        if self.fine:
            step = self.query.fine_grid_step(params)
            dtype = tf.float64

            def as_numbers(product: tf.Tensor) -> tf.Tensor:
                return tf.cast(bounded_sums.to_grid([product], step)[0], tf.float64)

            def as_sum(total: tf.Tensor) -> tf.Tensor:
                return total

        else:
            offset = self.query.coarse_grid_step(params) * (1.5 * 2.0**23)
            dtype = tf.int32

            def as_numbers(product: tf.Tensor) -> tf.Tensor:
                return tf.bitcast(product + offset, tf.int32)

            def as_sum(total: tf.Tensor) -> tf.Tensor:
                return total - count * tf.bitcast(offset, tf.int32)

        count = tf.shape(x)[0]
        if math.prod(shape) <= dense_models.MAX_BATCHED_ELEMENTS:
            numbers = as_numbers(tf.matmul(x, d, transpose_a=True))
            return as_sum(tf.reduce_sum(numbers, axis=0))

        def add(clients: int, k: tf.Tensor, total: tf.Tensor) -> tuple[Any, Any]:
            numbers = [
                as_numbers(tf.matmul(x[k + i], d[k + i], transpose_a=True))
                for i in range(clients)
            ]
            return k + clients, tf.add_n([total, *numbers])

        # Zeros that depend on an argument: see `CohortPrograms._nobody`.
        k, total = 0, tf.fill(shape, tf.cast(count * 0, dtype))
        for clients in 2, 1:  # Two per pass over the sum while two are left.
            k, total = tf.while_loop(
                lambda k, _, clients=clients: k + clients <= count,
                functools.partial(add, clients),
                (k, total),
                parallel_iterations=1,
            )
        return as_sum(total)


def _bits_of(
    norms: tf.Tensor, layers: list[_DenseLayer], wanted: tf.Tensor
) -> list[tf.Tensor]:
    """Returns `Trained.bits`, or tensors without elements if they are not wanted."""

    def extremes() -> list[tf.Tensor]:
        factors = [layer.factors()[:2] for layer in layers]
        values = [norms, *(part for pair in factors for part in pair)]
        bits = [tf.bitcast(part, tf.int32) for part in values]
        return [tf.stack([tf.reduce_min(b, 0), tf.reduce_max(b, 0)]) for b in bits]

    def nothing() -> list[tf.Tensor]:
        columns = [width for layer in layers for width in layer.shape]
        return [tf.zeros([0, 0, width], tf.int32) for width in (2, *columns)]

    return tf.cond(wanted, extremes, nothing)


def _of_one_output(y: nests.Nest) -> Any:
    """Returns the only label tensor and, if there are any, the examples' weights."""
    (label,) = tf.nest.flatten(nests.labels_of(y))
    if nests.weights_of(y) is None:
        return label
    (weight,) = tf.nest.flatten(nests.weights_of(y))
    return nests.Weighted(label, tf.reshape(weight, [-1]))
