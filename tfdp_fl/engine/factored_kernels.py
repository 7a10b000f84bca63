"""Large dense kernels, of which a client has no copy of its own.

Plain SGD changes a dense kernel by a sum of outer products, one for each
example that the client has seen:

    W_k = W - eta X_k^T D_k,    D_k = dLoss / d(pre-activations).

A kernel that is much larger than a client's examples costs most of its time in
memory: it is written at the client's start and at each step, and read again.
Instead, it stays the server's, X_k and -eta D_k are kept, and a layer's product
is x W + (x X_k^T) (-eta D_k), two narrow products more. At the end the client's
update, X_k^T (-eta D_k), is one product, and is clipped like any other.

It is the same local SGD, up to rounding, in any model: `side_by_side` has more
of it, and asks for a model of dense layers only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.engine import calls, graphs

# Fewer elements stay in a core's cache from step to step.
FEWEST_ELEMENTS = 2**18
# A kernel of a rows and b columns is worth it up to this part of a b / (a + b)
# rows of X_k: the narrow products cost so much of the layer's own.
NARROW = 1 / 4


class Factors(NamedTuple):
    """How a client's steps have changed a kernel: by inputs^T changes.

    Attributes:
      inputs: The layer's inputs, float32 [n, a].
      changes: The loss's gradients at its pre-activations times minus the
        learning rate, float32 [n, b].
    """

    inputs: tf.Tensor
    changes: tf.Tensor


def is_plain_dense(layer: Any) -> bool:
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
    )


class _Step:
    """One step of a client, while it is traced."""

    def __init__(
        self,
        tape: tf.GradientTape,
        kernels: Sequence[tf.Tensor],
        factors: Sequence[Factors],
    ):
        self._tape = tape
        self._kernels = kernels
        self._factors = factors
        self.inputs: list[Any] = [None] * len(kernels)
        self.products: list[Any] = [None] * len(kernels)

    def product(self, number: int, x: tf.Tensor) -> tf.Tensor:
        """Returns the product of [B, a] with the client's own kernel."""
        before = self._factors[number]
        self.inputs[number] = exact = tf.cast(x, tf.float32)
        seen = tf.matmul(exact, before.inputs, transpose_b=True)
        z = tf.matmul(x, self._kernels[number])
        own = tf.cast(z, tf.float32) + tf.matmul(seen, before.changes)
        self.products[number] = z = tf.cast(own, x.dtype)
        self._tape.watch(z)
        return z

    def after(
        self, gradients: list[tf.Tensor | None], rate: tf.Tensor
    ) -> list[Factors]:
        """Returns the factors with this step's.

        Args:
          gradients: Of the loss at `products`; None where it knows none.
          rate: The learning rate.
        """
        found = []
        for before, x, z, gradient in zip(
            self._factors, self.inputs, self.products, gradients, strict=True
        ):
            gradient = tf.zeros_like(z) if gradient is None else gradient
            change = -rate * tf.cast(gradient, tf.float32)
            found.append(
                Factors(
                    tf.concat([before.inputs, x], 0),
                    tf.concat([before.changes, change], 0),
                )
            )
        return found


class FactoredKernels:
    """The kernels of a replica that may be held so.

    Attributes:
      places: Where they stand among the variables of an update.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        variables: list[tf.Variable],
        gradients: Callable[[], Any] | None,
    ):
        """Finds them. Their layers' `call`s are replaced.

        Args:
          model: A replica.
          variables: What an update is about, in its order.
          gradients: Computes those of a batch's loss, and is traced; None where
            steps are not plain SGD, and no kernel may be held so.
        """
        places = {id(each.handle): place for place, each in enumerate(variables)}
        self._step: _Step | None = None
        self._called: list[tuple[Any, Any]] | None = []
        self._layers: list[Any] = []
        self.places: list[int] = []
        large = [
            layer
            for layer in keras_versions.layers_of(model)
            if is_plain_dense(layer)
            and layer.kernel.shape.num_elements() >= FEWEST_ELEMENTS
        ]
        if gradients is None or not large:
            return
        for layer in large:
            self._replace_call(layer)
        graph = calls.traced(tf.function(gradients, autograph=False)).graph
        readers = graphs.readers_of_variables(graph)
        called, self._called = self._called, None
        for layer in large:
            handle = keras_versions.tf_variable(layer.kernel).handle
            inputs = [x for each, x in called if each is layer]
            if (
                # Others would read the server's kernel, not the client's.
                readers.get(id(handle)) == ["ReadVariableOp"]
                and len(inputs) == 1
                and inputs[0].shape.rank == 2
                and inputs[0].dtype == layer.compute_dtype
            ):
                self._layers.append(layer)
                self.places.append(places[id(handle)])

    def _replace_call(self, layer: Any) -> None:
        keras_call = layer.call

        @tf.autograph.experimental.do_not_convert
        def call(x: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
            if self._called is not None:
                self._called.append((layer, x))
            if self._step is None or layer not in self._layers:
                return keras_call(x, *args, **kwargs)
            z = self._step.product(self._layers.index(layer), x)
            if layer.use_bias:
                bias = tf.convert_to_tensor(layer.bias)
                z = tf.nn.bias_add(z, tf.cast(bias, z.dtype))
            return layer.activation(z)

        layer.call = call

    @property
    def most_rows(self) -> float:
        """Returns how many examples of a client are still worth it."""
        sides = [list(layer.kernel.shape) for layer in self._layers]
        return min((NARROW * a * b / (a + b) for a, b in sides), default=0)

    def as_computed_with(self, weights: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the weights, with these kernels in their layers' dtype."""
        found = list(weights)
        for layer, place in zip(self._layers, self.places, strict=True):
            found[place] = tf.cast(weights[place], layer.compute_dtype)
        return found

    def unchanged(self) -> list[Factors]:
        """Returns the factors of a client before its first step."""
        return [
            Factors(tf.zeros([0, a]), tf.zeros([0, b]))
            for a, b in (layer.kernel.shape for layer in self._layers)
        ]

    def shapes(self) -> list[Factors]:
        """Returns the shapes of factors, for any number of examples."""
        return [
            Factors(tf.TensorShape([None, a]), tf.TensorShape([None, b]))
            for a, b in (layer.kernel.shape for layer in self._layers)
        ]

    @contextlib.contextmanager
    def step(
        self,
        tape: tf.GradientTape,
        weights: list[tf.Tensor],
        factors: Sequence[Factors],
    ) -> Iterator[_Step]:
        """Has the layers compute with a client's kernels inside the block.

        Args:
          tape: Records the step.
          weights: What `as_computed_with` returned.
          factors: The client's so far.
        """
        kernels = [weights[place] for place in self.places]
        self._step = _Step(tape, kernels, factors)
        try:
            yield self._step
        finally:
            self._step = None

    def updates(self, factors: Sequence[Factors]) -> dict[int, tf.Tensor]:
        """Returns a client's updates of these kernels, by their places."""
        if not factors:
            return {}
        return {
            place: tf.matmul(own.inputs, own.changes, transpose_a=True)
            for place, own in zip(self.places, factors, strict=True)
        }
