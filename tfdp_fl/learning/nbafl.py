"""The parts of a learning process that NbAFL has of its own.

Wei et al. (2020), Algorithm 1: the server sends noised weights, the clients
hand in noised weights, the server averages them. (Both noises are
`NbAFLFactory`'s: that before broadcast is drawn when the weights are made, so
that everybody who sees them sees one and the same.)
"""

from __future__ import annotations

import collections
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff


def build_replace_finalizer(
    weights_type: tff.types.StructWithPythonType,
) -> tff.learning.templates.FinalizerProcess:
    """Returns the finalizer that puts the aggregated weights in place."""
    trainable_type = weights_type.trainable

    @tff.tensorflow.computation(weights_type, trainable_type)
    def replace(weights, trainable):
        return tff.learning.models.ModelWeights(
            trainable=trainable, non_trainable=weights.non_trainable
        )

    @tff.federated_computation
    def init_fn():
        return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(weights_type, tff.SERVER),
        tff.FederatedType(trainable_type, tff.SERVER),
    )
    def next_fn(state, weights, aggregate):
        return tff.templates.MeasuredProcessOutput(
            state=state,
            result=tff.federated_map(replace, (weights, aggregate)),
            measurements=tff.federated_value((), tff.SERVER),
        )

    return tff.learning.templates.FinalizerProcess(init_fn, next_fn)


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
