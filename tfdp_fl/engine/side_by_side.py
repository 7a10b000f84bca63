"""Clients of a dense model side by side, without a model for each client.

Plain SGD changes a dense kernel by a sum of outer products, one for each
example that a client has seen:

    W_k = W - eta X_k^T D_k,    D_k = dLoss / d(pre-activations).

So a client's kernel need not exist. Its product with a batch x is
x W - eta (x X_k^T) D_k, where x W is one matrix product for all clients
together; the norm of its update follows from Gram matrices (`gram_norms`); and
the sum of the clipped updates is one product over the examples of all clients,
each weighted by its client's factor.

It is the same local SGD, step by step, as `one_by_one`, and faster where
clients hold few examples for the size of the kernels (`dense_models`).

Where Keras's policy is mixed_bfloat16, the products with the server's weights,
and those of the way back, are in bfloat16. All that an update is made of, X_k
and D_k, is held in float32: corrections, Gram matrices, norms and the sum are
what they are without that policy.

The file is long because its subject is one: the steps of such clients, and the
sum that they come to.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import tensorflow as tf

from tfdp_fl.datasets import nests
from tfdp_fl.engine import cohort, dense_models, gram_norms, tables
from tfdp_fl.engine import trainer as trainer_lib
from tfdp_fl.mechanisms import cohort_query, contribution


class _DenseLayer(NamedTuple):
    """One dense layer: where its kernel and bias stand among the weights."""

    layer: tf.keras.layers.Dense
    kernel: int
    bias: int | None

    @property
    def dtype(self) -> str:
        """What it computes with: "float32" or "bfloat16"."""
        return self.layer.compute_dtype


class _Memory:
    """What one dense layer remembers of its clients' steps.

    Attributes:
      inputs: Its inputs at each step, float32 [K, B, in].
      gradients: The loss's gradients at its pre-activations, float32
        [K, B, out].
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


class SideBySide:
    """Trains clients of a dense model side by side, and adds them up."""

    def __init__(
        self,
        trainer: trainer_lib.Trainer,
        query: cohort_query.CohortQuery,
        steps: int,
        full_batches: bool,
    ):
        """Prepares the function for a number of local steps.

        Args:
          trainer: Has the model, the loss and the metrics.
          query: The mechanism's query; it only scales.
          steps: S.
          full_batches: Every client takes S steps of exactly B examples.
        """
        self._trainer = trainer
        self._query = query
        self._steps = steps
        self._full_batches = full_batches
        places = {
            id(variable): index for index, variable in enumerate(trainer.aggregated)
        }
        chain = cast(list[Any], dense_models.chain_of(trainer.model))
        self._layers: list[Any] = [
            _DenseLayer(
                layer,
                places[id(layer.kernel)],
                places[id(layer.bias)] if layer.use_bias else None,
            )
            if isinstance(layer, tf.keras.layers.Dense)
            else layer
            for layer in chain
            if not isinstance(layer, tf.keras.layers.InputLayer)
        ]

    def __call__(
        self,
        received: cohort.Received,
        x: Any,
        y: Any,
        table: tables.SideBySideTable,
    ) -> cohort.Trained:
        """Trains K clients: all steps of theirs, then clips and adds up.

        Args:
          received: What the server sends to each of them.
          x: The features, one tensor, leading dimension over stored examples.
          y: The labels, likewise.
          table: A `SideBySideTable`.
        """
        (x,) = tf.nest.flatten(x)
        y = _of_one_output(y)
        weights = self._as_computed_with(received.weights)
        specs = self._trainer.metric_specs
        metrics = [tf.zeros(each.shape, each.dtype) for each in specs]
        shape = tf.shape(table.rows)
        clients, batch = shape[1], shape[2]
        labels = tf.nest.map_structure(
            lambda each: self._own(tf.gather(each, table.rows), table.sizes), y
        )
        memory = self._first_memory(weights, x, table, clients)
        loss, examples = tf.zeros([]), tf.zeros([])
        for step in range(self._steps):
            mean, valid = self._row_weights(table.sizes[step], batch)
            summed, counted, metrics = self._step(
                weights,
                tf.nest.map_structure(
                    lambda each, step=step: _rows(each[step], keep=each.shape.rank - 3),
                    labels,
                ),
                mean,
                valid,
                memory,
                received.learning_rate,
                (clients, batch),
                metrics,
            )
            loss += summed
            examples += counted
        clipped = self._clip_and_sum(received, memory, table.measured)
        total = cohort.CohortSum(clipped, loss, examples, ())
        return cohort.Trained(total, metrics, tf.zeros([0, 0]))

    def _as_computed_with(self, weights: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the server's weights in what their layers compute with."""
        found = list(weights)
        for layer in filter(_is_dense, self._layers):
            for place in (layer.kernel, layer.bias):
                if place is not None:
                    found[place] = tf.cast(weights[place], layer.dtype)
        return found

    def _first_memory(
        self,
        weights: list[tf.Tensor],
        x: tf.Tensor,
        table: tables.SideBySideTable,
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
            h = tf.cast(h, layer.dtype)
            products = self._server_product(layer, weights, h)
            known = tf.reshape(h, [clients, -1, kernel.shape[0]])
            first.known = tf.cast(known, tf.float32)
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
        y: Any,
        mean_weights: tf.Tensor,
        valid: tf.Tensor | None,
        memory: list[_Memory],
        learning_rate: tf.Tensor,
        shape: tuple[tf.Tensor, tf.Tensor],
        metrics: list[tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Takes one step of every client, on labels (and weights) y [K B].

        Returns:
          The loss summed over examples, how many they are (those whose loss is
          a number), and the metrics' next state.
        """
        outputs: list[tf.Tensor] = []
        h = None
        y, weight = self._trainer.labels_and_weights(y)
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
            losses = tf.cast(losses, tf.float32)
            if weight is not None:
                losses *= weight
            loss = tf.reduce_sum(losses * mean_weights)
        for own, gradient in zip(memory, tape.gradient(loss, outputs), strict=True):
            gradient = tf.reshape(gradient, [*shape, gradient.shape[-1]])
            own.gradients.append(tf.cast(gradient, tf.float32))
        if valid is not None:
            y, h = tf.boolean_mask(y, valid), tf.boolean_mask(h, valid)
            if weight is not None:
                weight = tf.boolean_mask(weight, valid)
        metrics = self._trainer.with_batch(metrics, y, h, weight)
        counts = tf.math.is_finite(losses)
        if valid is not None:
            counts &= valid
        return (
            tf.reduce_sum(tf.where(counts, cohort.bounded_loss(losses), 0.0)),
            tf.reduce_sum(tf.cast(counts, tf.float32)),
            metrics,
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
                gram: tf.Tensor = own.gram  # The first layer has one.
                products = gram[:, until : until + shape[1], :until]
        else:
            h = tf.cast(h, layer.dtype)
            z = self._server_product(layer, weights, h)
            here = tf.cast(tf.reshape(h, [*shape, h.shape[-1]]), tf.float32)
            if step:
                earlier = tf.concat(own.inputs, axis=1)
                products = self._gram(layer, here, earlier)
            own.inputs.append(here)
        if step:
            change = tf.matmul(products, tf.concat(own.gradients, axis=1))
            change = learning_rate * _rows(change)
            z = tf.cast(tf.cast(z, tf.float32) - change, layer.dtype)
        return z

    def _clip_and_sum(
        self, received: cohort.Received, memory: list[_Memory], measured: Any
    ) -> contribution.Contribution:
        """Scales each client's update as the mechanism says, and adds up.

        Args:
          received: What the server sent.
          memory: What each dense layer remembers.
          measured: Float32 [K], see `tables.ClientTable`.
        """
        rate = received.learning_rate
        dense = [layer for layer in self._layers if _is_dense(layer)]
        grams, factors = self._factors(dense, memory)
        length, bound = gram_norms.norm_bound(
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
        size = tf.abs(tf.cast(rate, tf.float64))
        # The scale, and each factor times it, are rounded as well.
        norm = tf.cast(size * (1 + 16 * gram_norms.ROUNDOFF) * bound, tf.float32)
        usable = tf.math.is_finite(norm)
        each = self._query.mechanism.contribution_of_norm(
            tf.where(usable, norm, 0.0), usable, received.params
        )
        if not isinstance(measured, tuple):
            each = each.weighted(self._query.client_weight(measured))
        seen = tf.cast(size * length, tf.float32)
        each = each._replace(norm=tf.where(usable, seen, 0.0))
        # A rate that is no number makes nobody usable, and zero of everybody.
        scale = tf.where(usable, -rate * each.update, 0.0)[:, None, None]
        update: list[Any] = [None] * len(received.weights)
        for layer, (x, d) in zip(dense, factors, strict=True):
            d = _rows(tf.math.multiply_no_nan(d, scale))
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

    def _factors(
        self, dense: list[_DenseLayer], memory: list[_Memory]
    ) -> tuple[list[Any], list[Any]]:
        """Returns (X X^T, D D^T) and (X, D) of each layer, over all steps."""
        grams, factors = [], []
        for layer, own in zip(dense, memory, strict=True):
            d = tf.concat(own.gradients, axis=1)
            x, gram = own.known, own.gram
            if x is None:
                x = tf.concat(own.inputs, axis=1)
                gram = self._gram(layer, x, x)
            grams.append((gram, tf.matmul(d, d, transpose_b=True)))
            factors.append((x, d))
        return grams, factors


def _of_one_output(y: Any) -> Any:
    """Returns the one label, with the one weight of each example beside it."""
    (label,) = tf.nest.flatten(nests.labels_of(y))
    if nests.weights_of(y) is None:
        return label
    (weight,) = tf.nest.flatten(nests.weights_of(y))
    return nests.Weighted(label, tf.reshape(weight, [-1]))


def _is_dense(layer: Any) -> bool:
    return isinstance(layer, _DenseLayer)


def _rows(tensor: tf.Tensor, keep: int = 1) -> tf.Tensor:
    """Returns [K, B, ...] as [K B, ...], where `keep` dimensions follow."""
    inner = tensor.shape[tensor.shape.rank - keep :] if keep else []
    return tf.reshape(tensor, [-1, *inner])
