"""What clients do in a round, on top of `tff.learning`'s local training."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff


def build_local_training(
    model_fn: Any,
    optimizer: tff.learning.optimizers.Optimizer,
    *,
    as_weights: bool,
    metrics_aggregator: Any,
    loop_implementation: tff.learning.LoopImplementation,
    local_epochs: int,
) -> tff.learning.templates.ClientWorkProcess:
    """Returns TFF's local training, in which a failed one hands in NaN.

    TFF replaces an update that holds a NaN or an Inf by zero, and says so only with
    a weight of zero. As NaN it is discarded, counted and reported by the mechanism,
    like any other.

    Args:
      model_fn: A callable that returns a `VariableModel`, or a
        `FunctionalModel`.
      optimizer: The clients' optimizer.
      as_weights: Whether the weights after training are handed in, and the number
        of examples with them, in the place of the update.
      metrics_aggregator: See `tff.learning.algorithms.build_weighted_fed_avg`.
      loop_implementation: The same.
      local_epochs: How often each client goes through its data set. The number of
        examples counts each once.
    """
    templates, weighting = tff.learning.templates, tff.learning.ClientWeighting
    build, name = templates.build_model_delta_client_work, "model_fn"
    if isinstance(model_fn, tff.learning.models.FunctionalModel):
        build, name = templates.build_functional_model_delta_client_work, "model"
    work = build(
        **{name: model_fn},
        optimizer=optimizer,
        client_weighting=weighting.NUM_EXAMPLES if as_weights else weighting.UNIFORM,
        metrics_aggregator=metrics_aggregator,
        loop_implementation=loop_implementation,
    )
    state_type, weights_type, data_type = work.next.type_signature.parameter
    result_type = work.next.type_signature.result.result.member

    @tff.tensorflow.computation(data_type.member)
    def repeat(dataset):
        return dataset.repeat(local_epochs)

    @tff.tensorflow.computation(weights_type.member, result_type)
    def finish(received, result):
        value, weight = result.update, result.update_weight  # w_received - w.
        if as_weights:
            start = tf.nest.flatten(received.trainable)
            value = tf.nest.map_structure(
                tf.subtract, tf.nest.pack_sequence_as(value, start), value
            )
            # In all epochs, and a whole number in each.
            weight = tf.round(weight / local_epochs)
        usable = result.update_weight > 0
        return templates.ClientResult(
            update=tf.nest.map_structure(
                lambda part: tf.where(usable, part, np.nan * tf.ones_like(part)), value
            ),
            update_weight=weight,
        )

    @tff.federated_computation(state_type, weights_type, data_type)
    def next_fn(state, weights, client_data):
        if local_epochs > 1:
            client_data = tff.federated_map(repeat, client_data)
        output = work.next(state, weights, client_data)
        return tff.templates.MeasuredProcessOutput(
            state=output.state,
            result=tff.federated_map(finish, (weights, output.result)),
            measurements=output.measurements,
        )

    return templates.ClientWorkProcess(
        work.initialize,
        next_fn,
        get_hparams_fn=work.get_hparams,
        set_hparams_fn=work.set_hparams,
    )
