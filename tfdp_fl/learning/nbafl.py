"""The parts of a learning process that NbAFL has of its own.

Wei et al. (2020), Algorithm 1: the server sends noised weights, the clients
hand in noised weights, the server averages them. (The clients' part is
`NbAFLFactory`.)
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tfdp_fl.mechanisms import noise


class DownlinkState(NamedTuple):
    """The noise with which the weights of a state are to be seen.

    Attributes:
      seed: Uint64 [2], of the noise. It is drawn when the weights are made, so
        that everybody who sees them (the clients of the next round, also if
        it is repeated, and readers of the model) sees one and the same
        noise: two draws would average out.
      stddev: Float32 scalar, 0 for weights that hold nobody's data.
    """

    seed: Any
    stddev: Any


def build_noised_broadcast(
    weights_type: tff.types.StructWithPythonType, stddev: float
) -> tff.learning.templates.DistributionProcess:
    """Returns the distribution that noises the weights before broadcast.

    Args:
      weights_type: Type of `tff.learning.models.ModelWeights`.
      stddev: Sigma_D, added to each trainable weight; not in the first round,
        whose weights hold nobody's data.
    """

    @tff.tensorflow.computation
    def initial_state():
        return DownlinkState(seed=noise.next_seed(), stddev=tf.zeros([]))

    @tff.tensorflow.computation
    def next_state():
        return DownlinkState(
            seed=noise.next_seed(), stddev=tf.constant(stddev, tf.float32)
        )

    state_type = initial_state.type_signature.result

    @tff.tensorflow.computation(state_type, weights_type)
    def add_noise(state, weights):
        return noised(state, weights)

    @tff.federated_computation
    def init_fn():
        return tff.federated_eval(initial_state, tff.SERVER)

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(weights_type, tff.SERVER),
    )
    def next_fn(state, weights):
        return tff.templates.MeasuredProcessOutput(
            state=tff.federated_eval(next_state, tff.SERVER),
            result=tff.federated_broadcast(
                tff.federated_map(add_noise, (state, weights))
            ),
            measurements=tff.federated_value((), tff.SERVER),
        )

    return tff.learning.templates.DistributionProcess(init_fn, next_fn)


def noised(
    state: DownlinkState, weights: tff.learning.models.ModelWeights
) -> tff.learning.models.ModelWeights:
    """Returns the weights as they may be seen."""
    with noise.seeded(state.seed):
        trainable = noise.add_normal(tf.nest.flatten(weights.trainable), state.stddev)
    return tff.learning.models.ModelWeights(
        trainable=tf.nest.pack_sequence_as(weights.trainable, trainable),
        non_trainable=weights.non_trainable,
    )


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


def build_model_access(
    process: tff.learning.templates.LearningProcess,
) -> tuple[tff.Computation, tff.Computation]:
    """Returns `get_model_weights` and `set_model_weights` of a process.

    Weights are read with the noise of the next broadcast; weights that are put
    in are taken to hold nobody's data and get none.
    """
    state_type = process.next.type_signature.parameter[0].member

    @tff.tensorflow.computation(state_type)
    def get_model_weights(state):
        return noised(state.distributor, state.global_model_weights)

    @tff.tensorflow.computation(state_type, state_type.global_model_weights)
    def set_model_weights(state, weights):
        return tff.learning.templates.LearningAlgorithmState(
            global_model_weights=weights,
            distributor=state.distributor._replace(stddev=tf.zeros([])),
            client_work=state.client_work,
            aggregator=state.aggregator,
            finalizer=state.finalizer,
        )

    return get_model_weights, set_model_weights


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
