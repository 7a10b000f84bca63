"""What clients do in a round, on top of `tff.learning`'s local training."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff


def build_local_training(
    model_fn: Any,
    optimizer: tff.learning.optimizers.Optimizer,
    client_weighting: tff.learning.ClientWeighting,
    metrics_aggregator: Any,
    loop_implementation: tff.learning.LoopImplementation,
    local_epochs: int,
) -> tff.learning.templates.ClientWorkProcess:
    """Returns TFF's local training for either kind of model.

    Args:
      model_fn: A callable that returns a `VariableModel`, or a
        `FunctionalModel`.
      optimizer: The clients' optimizer.
      client_weighting: The weight of a client's update.
      metrics_aggregator: See `tff.learning.algorithms.build_weighted_fed_avg`.
      loop_implementation: The same.
      local_epochs: How often each client goes through its data set. A weight
        by examples counts each example once.
    """
    templates = tff.learning.templates
    build, name = templates.build_model_delta_client_work, "model_fn"
    if isinstance(model_fn, tff.learning.models.FunctionalModel):
        build, name = templates.build_functional_model_delta_client_work, "model"
    work = build(
        **{name: model_fn},
        optimizer=optimizer,
        client_weighting=client_weighting,
        metrics_aggregator=metrics_aggregator,
        loop_implementation=loop_implementation,
    )
    if local_epochs == 1:
        return work
    once = client_weighting == tff.learning.ClientWeighting.NUM_EXAMPLES
    return _repeated(work, local_epochs, once)


def _repeated(
    work: tff.learning.templates.ClientWorkProcess,
    epochs: int,
    counts_examples: bool,
) -> tff.learning.templates.ClientWorkProcess:
    state_type, weights_type, data_type = work.next.type_signature.parameter
    result_type = work.next.type_signature.result.result.member

    @tff.tensorflow.computation(data_type.member)
    def repeat(dataset):
        return dataset.repeat(epochs)

    @tff.tensorflow.computation(result_type)
    def reweight(result):
        weight = result.update_weight
        if counts_examples:  # In all epochs, and a whole number in each.
            weight = tf.round(weight / epochs)
        return tff.learning.templates.ClientResult(
            update=result.update, update_weight=weight
        )

    @tff.federated_computation(state_type, weights_type, data_type)
    def next_fn(state, weights, client_data):
        output = work.next(state, weights, tff.federated_map(repeat, client_data))
        return tff.templates.MeasuredProcessOutput(
            state=output.state,
            result=tff.federated_map(reweight, output.result),
            measurements=output.measurements,
        )

    return _with_next(work, next_fn)


def mark_failures(
    work: tff.learning.templates.ClientWorkProcess, as_weights: bool = False
) -> tff.learning.templates.ClientWorkProcess:
    """Returns client work in which a failed training hands in NaN.

    TFF replaces an update that holds a NaN or an Inf by zero, and says so only with
    a weight of zero. As NaN it is discarded, counted and reported by the mechanism,
    like any other.

    Args:
      work: TFF's local training, whose result is w_received - w.
      as_weights: Whether w, the weights after training, is handed in instead.
    """
    state_type, weights_type, data_type = work.next.type_signature.parameter
    result_type = work.next.type_signature.result.result.member

    @tff.tensorflow.computation(weights_type.member, result_type)
    def mark(received, result):
        value = result.update
        if as_weights:
            start = tf.nest.flatten(received.trainable)
            value = tf.nest.map_structure(
                tf.subtract, tf.nest.pack_sequence_as(value, start), value
            )
        usable = result.update_weight > 0
        return tff.learning.templates.ClientResult(
            update=tf.nest.map_structure(
                lambda part: tf.where(usable, part, np.nan * tf.ones_like(part)), value
            ),
            update_weight=result.update_weight,
        )

    @tff.federated_computation(state_type, weights_type, data_type)
    def next_fn(state, weights, client_data):
        output = work.next(state, weights, client_data)
        return tff.templates.MeasuredProcessOutput(
            state=output.state,
            result=tff.federated_map(mark, (weights, output.result)),
            measurements=output.measurements,
        )

    return _with_next(work, next_fn)


def _with_next(
    work: tff.learning.templates.ClientWorkProcess, next_fn: tff.Computation
) -> tff.learning.templates.ClientWorkProcess:
    return tff.learning.templates.ClientWorkProcess(
        work.initialize,
        next_fn,
        get_hparams_fn=work.get_hparams,
        set_hparams_fn=work.set_hparams,
    )
