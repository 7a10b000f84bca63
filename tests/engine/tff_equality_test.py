"""Noise off, the engine is TFF's unweighted federated averaging."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tfdp_fl import datasets

_BATCH, _CLIENTS, _ROUNDS, _RATE = 5, 3, 5, 0.1


def _cnn():
    return tf.keras.Sequential(
        [
            tf.keras.layers.Reshape([8, 8, 1], input_shape=(64,)),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )


@pytest.fixture
def tff():
    import tensorflow_federated as tff

    outer = tff.framework.get_context_stack().current
    tff.backends.native.set_sync_local_cpp_execution_context()
    yield tff
    # The context's worker process ends with the context.
    tff.framework.set_default_context(outer)
    gc.collect()


def test_weights_after_five_rounds_on_digits(tff):
    # 24 examples a client: the last of five batches is short.
    dataset, _ = datasets.load_digits(num_clients=6, examples_per_client=24, iid=False)
    rounds = [
        np.sort(np.random.default_rng(t).permutation(6)[:_CLIENTS])
        for t in range(_ROUNDS)
    ]
    tf.keras.utils.set_random_seed(4)
    model = _cnn()
    start = model.get_weights()
    theirs = _tff_weights(tff, start, dataset, rounds)
    engine = cohorts.make_engine(model, dataset, num_replicas=2)
    for t, positions in enumerate(rounds):
        cohorts.run_round(
            engine,
            dataset,
            round_index=t,
            positions=positions,
            clients_per_round=float(_CLIENTS),
            batch_size=_BATCH,
            local_epochs=1,
            learning_rate=_RATE,
        )
    for first, ours, wanted in zip(start, model.get_weights(), theirs, strict=True):
        assert np.linalg.norm(ours - wanted) < 1e-4 * np.linalg.norm(wanted)
        # And it is not the start that both still are at.
        assert np.linalg.norm(ours - first) > 0.01


def _tff_weights(tff, start, dataset, rounds):
    spec = tuple(
        tf.TensorSpec([None, *part.shape], part.dtype) for part in dataset.element_spec
    )

    def model_fn():
        return tff.learning.models.from_keras_model(
            _cnn(), loss=cohorts.cross_entropy(), input_spec=spec
        )

    process = tff.learning.algorithms.build_unweighted_fed_avg(
        model_fn,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(_RATE),
        server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
    )
    weights = tff.learning.models.ModelWeights(trainable=start, non_trainable=[])
    state = process.set_model_weights(process.initialize(), weights)
    ids, slices = list(dataset.client_ids), tf.data.Dataset.from_tensor_slices
    for positions in rounds:
        clients = [
            slices(tuple(map(np.asarray, dataset.client(ids[position])))).batch(_BATCH)
            for position in positions
        ]
        state = process.next(state, clients).state
    return list(process.get_model_weights(state).trainable)
