"""Clients of a dense model side by side, without a model for each client.

Plain SGD changes a dense kernel by a sum of outer products, one for each
example that a client has seen:

    W_k = W - eta X_k^T D_k,    D_k = dLoss / d(pre-activations).

So a client's kernel need not exist. Its product with a batch x is
x W - eta (x X_k^T) D_k, where x W is one matrix product for all clients
together, and the norm of its update follows from Gram matrices (`norm_bound`).
The clipped update itself is made last, of the factors, and rounded to whole
numbers of steps, which are added up without an error (`_sum_of`). So what a client
adds is a function of its own rows: a call trains a number of clients for which a
row's results do not depend on the others (`dense_models.widths`), and has a number
of steps that follows from each client's own.

It is the same local SGD, step by step, as `CohortPrograms` one by one, and faster where
clients hold few examples for the size of the kernels (`dense_models`).

Where Keras's policy is mixed_bfloat16, the products with the server's weights,
and those of the way back, are in bfloat16. All that an update is made of, X_k
and D_k, is held in float32: corrections, Gram matrices, norms and the sum are
what they are without that policy.

Shapes: K clients, S steps, B rows in a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.datasets import nests
from tfdp_fl.engine import cohort, dense_models, layout
from tfdp_fl.engine import trainer as trainer_lib
from tfdp_fl.mechanisms import cohort_query, contribution, records
from tfdp_fl.mechanisms.contribution import RoundState

# Products of so many elements are made of all clients at once, larger ones one after
# the other: they stay in the processor's cache.
_AT_ONCE = 2**15


class _DenseLayer:
    """A dense layer with the server's weights, and its clients' steps so far.

    Attributes:
      layer: Keras's.
      shape: Of its kernel.
      gradients: The loss's gradients at its pre-activations, float32
        [K, B, out] for each step.
    """

    def __init__(
        self,
        layer: tf.keras.layers.Layer,
        kernel: tf.Tensor,
        bias: tf.Tensor | None = None,
    ):
        self.layer = layer
        self.shape = tuple(layer.kernel.shape)
        self.gradients: list[tf.Tensor] = []
        self._kernel = tf.cast(kernel, layer.compute_dtype)
        self._bias = None if bias is None else tf.cast(bias, layer.compute_dtype)
        self._inputs: list[tf.Tensor] = []

    def server_product(self, h: tf.Tensor) -> tf.Tensor:
        """Returns h W + b, with the weights that all clients received."""
        z = tf.matmul(tf.cast(h, self._kernel.dtype), self._kernel)
        return z if self._bias is None else tf.nn.bias_add(z, self._bias)

    def gram(self, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        """Returns the products of two clients' inputs, row by row."""
        products = tf.matmul(one, other, transpose_b=True)
        # A bias is one more kernel row, for an input that is always 1.
        return products if self._bias is None else products + 1.0

    def changed(self, z: tf.Tensor, products: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Returns a server product with the clients' own steps in it.

        Args:
          z: [K B, out].
          products: Float32 [K, B, s B], of the inputs with those of the steps
            before.
          rate: The learning rate, eta.
        """
        change = tf.matmul(products, tf.concat(self.gradients, axis=1))
        return tf.cast(tf.cast(z, tf.float32) - rate * _rows(change), z.dtype)

    def __call__(self, h: tf.Tensor, clients: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Returns every client's own h W_k + b_k, [K B, out], in the next step."""
        z = self.server_product(h)
        h = tf.cast(
            tf.reshape(tf.cast(h, z.dtype), [clients, -1, h.shape[-1]]), "float32"
        )
        if self.gradients:
            products = self.gram(h, tf.concat(self._inputs, axis=1))
            z = self.changed(z, products, rate)
        self._inputs.append(h)
        return z

    def factors(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns X [K, S B, in], D [K, S B, out] and X X^T, over all steps."""
        x = tf.concat(self._inputs, axis=1)
        return x, tf.concat(self.gradients, axis=1), self.gram(x, x)


class _FirstLayer(_DenseLayer):
    """The first dense layer: its inputs in all steps are known before training.

    So the products with the server's kernel, and the Gram matrices, are made for
    all steps at once.
    """

    def __init__(
        self, h: tf.Tensor, clients: tf.Tensor, steps: int, *layer_and_weights: Any
    ):
        """Takes the inputs [K S B, in] of all steps, and what every layer takes."""
        super().__init__(*layer_and_weights)
        z = self.server_product(h)
        h = tf.cast(tf.cast(h, z.dtype), tf.float32)
        self._x = tf.reshape(h, [clients, -1, h.shape[-1]])
        self._gram = self.gram(self._x, self._x)
        z = tf.reshape(z, [clients, -1, z.shape[-1]])
        self._products = tf.split(z, steps, axis=1)

    def __call__(
        self, h: tf.Tensor | None, clients: tf.Tensor, rate: tf.Tensor
    ) -> tf.Tensor:
        """As for every layer; h is not asked for."""
        del h, clients
        step = len(self.gradients)
        z = self._products[step]
        batch = tf.shape(z)[1]
        z, until = _rows(z), step * batch
        if not step:
            return z
        return self.changed(z, self._gram[:, until : until + batch, :until], rate)

    def factors(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """As for every layer."""
        return self._x, tf.concat(self.gradients, axis=1), self._gram


@dataclasses.dataclass(frozen=True, eq=False)
class GhostClipping:
    """Trains clients of a dense model side by side, and adds them up.

    Attributes:
      trainer: Has the model, the loss and the metrics.
      query: The mechanism's query; it only scales.
      steps: S; clients with fewer idle afterwards.
      fine: Whether records are rounded to as fine a grid as float64 sums allow
        (`records`); else to the one of int32 sums, which takes half the time.
    """

    trainer: trainer_lib.Trainer
    query: cohort_query.CohortQuery
    steps: int
    fine: bool

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        """The place of each variable in an update, by its identity."""
        return {id(v): place for place, v in enumerate(self.trainer.aggregated)}

    def __call__(
        self, received: cohort.Broadcast, chunk: layout.Chunk
    ) -> cohort.Trained:
        """Trains K clients: all steps of theirs, then clips and adds up.

        Args:
          received: What the server sends to each of them.
          chunk: The clients.
        """
        (x,), table = tf.nest.flatten(chunk.x), chunk.table
        y = _of_one_output(chunk.y)
        batch = tf.size(table.batch)
        rows, sizes = self._batches(table)
        layers = self._layers(received.weights, x, rows)
        total = cohort.CohortSum.zeros(self.trainer.no_metrics())
        for step in range(self.steps):
            labels = tf.nest.map_structure(
                lambda leaf, step=step: _examples(leaf, rows[step]), y
            )
            total = self._step(layers, labels, sizes[step], batch, received, total)
        dense = [layer for layer in layers if isinstance(layer, _DenseLayer)]
        clipped = self._clip_and_sum(received, dense, table)
        return total._replace(contribution=clipped), cohort.PerClient()

    def _batches(self, table: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows of all batches, int32 [S, K, B], and their sizes [S, K].

        A client without such a step, or such a row, gets its own first row, which it
        trains on anyway: a NaN there is its own. That loss is not counted. (Padding
        gets the first row of all, and adds nothing.)
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
        self, weights: list[tf.Tensor], x: tf.Tensor, rows: tf.Tensor
    ) -> list[Any]:
        """Returns the layers from the first dense one on, which knows its inputs."""
        clients = tf.shape(rows)[1]
        h = _examples(x, tf.transpose(rows, [1, 0, 2]))
        layers: list[Any] = []
        for layer in self.trainer.model.layers:
            if isinstance(layer, tf.keras.layers.Dense):
                own = layer, *[weights[self._places[id(v)]] for v in layer.weights]
                if layers:
                    layers.append(_DenseLayer(*own))
                else:
                    layers.append(_FirstLayer(h, clients, self.steps, *own))
            elif layers:
                layers.append(layer)
            else:
                h = layer(h)
        return layers

    def _step(
        self,
        layers: list[Any],
        y: nests.Nest,
        sizes: tf.Tensor,
        batch: tf.Tensor,
        received: cohort.Broadcast,
        total: cohort.CohortSum,
    ) -> cohort.CohortSum:
        """Takes one step of every client, on labels (and weights) y [K B].

        Returns:
          The sum with the step's loss, examples and metrics.
        """
        clients = tf.size(sizes)
        # A client's loss is the mean over its own rows.
        valid = tf.sequence_mask(sizes, batch)
        share = tf.cast(sizes, tf.float32)[:, tf.newaxis]
        mean = tf.math.divide_no_nan(tf.cast(valid, tf.float32), share)
        valid, mean = tf.reshape(valid, [-1]), tf.reshape(mean, [-1])
        outputs: list[tf.Tensor] = []
        h = None
        y, weight = nests.labels_and_weights(y)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for layer in layers:
                if not isinstance(layer, _DenseLayer):
                    h = layer(h)
                    continue
                z = layer(h, clients, received.learning_rate)
                if h is None:
                    tape.watch(z)
                outputs.append(z)
                h = layer.layer.activation(z)
            losses = keras_versions.losses_of_rows(self.trainer.single_loss, y, h)
            losses = tf.cast(losses, tf.float32)
            if weight is not None:
                losses *= weight
            loss = tf.reduce_sum(losses * mean)
        dense = [layer for layer in layers if isinstance(layer, _DenseLayer)]
        for layer, gradient in zip(dense, tape.gradient(loss, outputs), strict=True):
            gradient = tf.reshape(gradient, [clients, batch, gradient.shape[-1]])
            layer.gradients.append(tf.cast(gradient, tf.float32))
        counts = tf.math.is_finite(losses) & valid
        y, h = tf.boolean_mask(y, valid), tf.boolean_mask(h, valid)
        if weight is not None:
            weight = tf.boolean_mask(weight, valid)
        losses = tf.where(counts, cohort.bound_loss(losses), 0.0)
        return total._replace(
            loss=total.loss + tf.reduce_sum(losses),
            examples=total.examples + tf.reduce_sum(tf.cast(counts, tf.float32)),
            metrics=self.trainer.with_batch(total.metrics, y, h, weight),
        )

    def _clip_and_sum(
        self, received: cohort.Broadcast, dense: list[_DenseLayer], table: Any
    ) -> contribution.Contribution:
        """Scales each client's update as the mechanism says, and adds up.

        Args:
          received: What the server sent.
          dense: The dense layers, after all steps.
          table: The clients.
        """
        rate, params = received.learning_rate, received.params
        factors = [layer.factors() for layer in dense]
        length, bound = dense_models.norm_bound(
            [gram for _, _, gram in factors],
            [tf.matmul(d, d, transpose_b=True) for _, d, _ in factors],
            # A bias is one more column of an input.
            columns=max(x.shape[-1] + 1 + d.shape[-1] for x, d, _ in factors),
            rows=tf.shape(factors[0][1])[1],
        )
        size = tf.abs(tf.cast(rate, tf.float64))
        # The scale, and each factor times it, are rounded as well.
        norm = tf.cast(size * (1 + 16 * dense_models.ROUNDOFF) * bound, tf.float32)
        usable = tf.math.is_finite(norm)
        clients = self.query.bounded_factor(
            tf.where(usable, norm, 0.0),
            usable,
            params,
            self.query.client_weight(table.num_examples),
        )
        if not self.fine:  # Rounding to whole numbers leads nobody out of the bound.
            share = dense_models.rounding_share([layer.shape for layer in dense])
            most = self.query.l2_norm_bound(params) * (1 - share) / norm
            clients = clients._replace(update=tf.minimum(clients.update, most))
        seen = tf.cast(size * length, tf.float32)
        clients = clients._replace(norm=tf.where(usable, seen, 0.0))
        # A rate that is no number makes nobody usable, and zero of everybody.
        scale = tf.where(usable, -rate * clients.update, 0.0)[:, None, None]
        update: list[Any] = [None] * len(received.weights)
        for layer, (x, d, _) in zip(dense, factors, strict=True):
            d = tf.math.multiply_no_nan(d, scale)
            x = tf.cond(
                tf.reduce_all(usable),
                lambda x=x: x,
                lambda x=x: tf.where(tf.math.is_finite(x), x, 0.0),
            )
            kernel, *bias = [self._places[id(v)] for v in layer.layer.weights]
            update[kernel] = self._sum_of(x, d, received.params)
            for place in bias:
                ones = tf.ones([*tf.unstack(tf.shape(d))[:2], 1])
                update[place] = tf.reshape(self._sum_of(ones, d, received.params), [-1])
        present = tf.range(tf.size(usable)) < table.num_clients
        nothing = self.query.initial_sample_state([])
        return clients.with_scalars(
            update,
            [
                tf.reduce_sum(tf.cast(tf.where(present, value, 0.0), whole.dtype))
                for value, whole in zip(
                    clients.scalars(), nothing.scalars(), strict=True
                )
            ],
        )

    def _sum_of(self, x: tf.Tensor, d: tf.Tensor, params: RoundState) -> tf.Tensor:
        """Returns the exact sum of the clients' rounded products X^T D.

        Each product is computed by itself, so that a client's is the same among
        any others. S is what no record is longer than (`l2_norm_bound`, whatever
        the clip). With c = 1.5 2^k for 2^k > 4 S, the float32 number r + c, for
        |r| <= 2 S, lies between 2^k and 2^(k + 1): its bits are those of c plus
        the whole number of steps of 2^(k - 23) <= S 2^-20 that r is rounded to.
        Int32 adds up such numbers, of at most 2^21 each, of 512 clients. (It wraps
        for the bits of c, which are taken away again.)

        Args:
          x: Float32 [K, n, a].
          d: Float32 [K, n, b].
          params: Of the round.

        Returns:
          Float64 [a, b].
        """
        shape = [x.shape[-1], d.shape[-1]]
        if self.fine:
            step = self.query.grid_step(params)
            dtype = tf.float64

            def as_numbers(product: tf.Tensor) -> tf.Tensor:
                return tf.cast(records.to_grid([product], step)[0], tf.float64)

            def as_sum(total: tf.Tensor) -> tf.Tensor:
                return total

        else:
            largest = tf.cast(self.query.l2_norm_bound(params), tf.float32)
            power = 8.0 * records.power_of_two_below(largest)
            offset, dtype = 1.5 * power, tf.int32

            def as_numbers(product: tf.Tensor) -> tf.Tensor:
                return tf.bitcast(product + offset, tf.int32)

            def as_sum(total: tf.Tensor) -> tf.Tensor:
                total -= count * tf.bitcast(offset, tf.int32)
                return tf.cast(total, tf.float64) * tf.cast(power * 2.0**-23, "float64")

        count = tf.shape(x)[0]
        if math.prod(shape) <= _AT_ONCE:
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
        for clients in 2, 1:  # Two in one pass over the sum, as long as there are two.
            k, total = tf.while_loop(
                lambda k, _, clients=clients: k + clients <= count,
                functools.partial(add, clients),
                (k, total),
                parallel_iterations=1,
            )
        return as_sum(total)


def _of_one_output(y: nests.Nest) -> Any:
    """Returns the one label, with the one weight of each example beside it."""
    (label,) = tf.nest.flatten(nests.labels_of(y))
    if nests.weights_of(y) is None:
        return label
    (weight,) = tf.nest.flatten(nests.weights_of(y))
    return nests.Weighted(label, tf.reshape(weight, [-1]))


def _examples(leaf: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns the examples of some rows, one after the other."""
    return tf.gather(leaf, tf.reshape(rows, [-1]))


def _rows(tensor: tf.Tensor) -> tf.Tensor:
    """Returns [K, B, n] as [K B, n]."""
    return tf.reshape(tensor, [-1, tensor.shape[-1]])
