"""The proximal term of local training, as a TFF optimizer."""

from __future__ import annotations

import collections
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff


class ProximalOptimizer(tff.learning.optimizers.Optimizer):
    """Adds the gradient of (mu/2) ||w - w_received||^2 before each step.

    Li et al. (2020), "Federated Optimization in Heterogeneous Networks",
    eq. (2); Wei et al. (2020), eq. (4). A client starts from what it received,
    so the weights of the first step are w_received.
    """

    def __init__(self, optimizer: tff.learning.optimizers.Optimizer, mu: float):
        """Wraps an optimizer; `mu` is the weight of the term, at least 0."""
        self._optimizer = optimizer
        self._mu = mu

    def initialize(self, specs: Any) -> Any:
        """Implements `Optimizer.initialize`."""
        return collections.OrderedDict(
            inner=self._optimizer.initialize(specs),
            started=tf.constant(False),
            received=tf.nest.map_structure(
                lambda spec: tf.zeros(spec.shape, spec.dtype), specs
            ),
        )

    def next(self, state: Any, weights: Any, gradients: Any) -> Any:
        """Implements `Optimizer.next`."""
        received = tf.nest.map_structure(
            lambda kept, now: tf.where(state["started"], kept, now),
            state["received"],
            weights,
        )
        pulled = tf.nest.map_structure(
            lambda gradient, now, kept: (
                tf.convert_to_tensor(gradient)
                + tf.cast(self._mu, now.dtype) * (now - kept)
            ),
            gradients,
            weights,
            received,
        )
        inner, updated = self._optimizer.next(state["inner"], weights, pulled)
        new_state = collections.OrderedDict(
            inner=inner, started=tf.constant(True), received=received
        )
        return new_state, updated

    def get_hparams(self, state: Any) -> Any:
        """Implements `Optimizer.get_hparams`."""
        return self._optimizer.get_hparams(state["inner"])

    def set_hparams(self, state: Any, hparams: Any) -> Any:
        """Implements `Optimizer.set_hparams`."""
        new_state = collections.OrderedDict(state)
        new_state["inner"] = self._optimizer.set_hparams(state["inner"], hparams)
        return new_state
