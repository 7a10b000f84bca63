"""In TFF's environment: Keras 2 by TFF's functional models, and TFF's averaging."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tfdp_fl import datasets

_layers, _optimizers = tf.keras.layers, tf.keras.optimizers
_SIZES = (5, 6, 7, 8)
_BATCH, _COHORT, _ROUNDS, _RATE = 5, 3, 5, 0.1


def _model(*hidden):
    tf.keras.utils.set_random_seed(1)
    hidden = hidden or [_layers.Dense(6, "tanh")]
    return tf.keras.Sequential([_layers.InputLayer((4,)), *hidden, _layers.Dense(3)])


def _moved(model, clients, mechanism=None, optimizer=None, loss=None, **fit):
    """Returns how a round moves a model, and its history."""
    federated = tfdp_fl.DPFederatedModel(
        model,
        mechanism or tfdp_fl.NoPrivacy(),
        clients_per_round=len(clients),
        sampling="fixed_size",
    )
    optimizer = optimizer or _optimizers.SGD(0.5)
    federated.compile(optimizer, loss or cohorts.cross_entropy(), ["accuracy"])
    start = model.get_weights()
    history = federated.fit(clients, batch_size=5, verbose=0, **fit).history
    moved = [b - a for a, b in zip(start, model.get_weights(), strict=True)]
    return moved, history


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: _optimizers.SGD(0.5),
        lambda: _optimizers.SGD(0.5, 0.9),
        lambda: _optimizers.Adam(0.1),
    ],
)
def test_a_round_is_the_mean_of_a_plain_keras_loop(optimizer):
    clients, model = cohorts.client_arrays(_SIZES), _model()
    start = model.get_weights()
    updates = []
    for x, y in clients.values():
        alone = _model()
        alone.set_weights(start)
        alone.compile(optimizer(), cohorts.cross_entropy())
        alone.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
        updates.append([b - a for a, b in zip(start, alone.get_weights(), strict=True)])
    moved, history = _moved(model, clients, optimizer=optimizer(), local_epochs=2)
    mean = [np.mean(parts, axis=0) for parts in zip(*updates, strict=True)]
    cohorts.assert_close(moved, mean, rtol=1e-4, atol=2e-5)
    assert 0.05 <= history["accuracy"][0] <= 1.0


def test_a_hostile_client_moves_the_model_by_its_clip():
    clients = cohorts.client_arrays(_SIZES)
    clients[1] = np.full([5, 4], 1e30, np.float32), np.zeros(5, np.int64)
    clients[2] = np.full([5, 4], np.nan, np.float32), np.zeros(5, np.int64)
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.1, noise_multiplier=0.0)
    moved, _ = _moved(_model(), clients, mechanism, _optimizers.SGD(100.0))
    norm = np.sqrt(sum(np.sum(part.astype(np.float64) ** 2) for part in moved))
    assert 1e-4 <= norm <= 0.1 * (1 + 1e-5)


def test_target_evaluation_and_metrics_of_clients():
    clients, test = datasets.load_digits(num_clients=100)
    model = tf.keras.Sequential([_layers.InputLayer((64,)), _layers.Dense(10)])
    federated = tfdp_fl.make_private(
        model,
        target_epsilon=8,
        target_delta=1e-3,
        num_clients=100,
        clients_per_round=50,
        rounds=15,
    )
    federated.compile(_optimizers.SGD(0.3), cohorts.cross_entropy(), ["accuracy"])
    federated.fit(clients, rounds=15, batch_size=5, verbose=0, seed=3)
    assert 6.0 <= federated.epsilon(1e-3) <= 8.0
    assert federated.evaluate(*test, verbose=0)[1] > 0.5
    accuracy = federated.evaluate_clients(clients, verbose=0)["accuracy"]
    assert 0.0 <= np.min(accuracy) <= np.max(accuracy) <= 1.0
    assert np.mean(accuracy) > 0.5


@pytest.mark.parametrize(
    ("hidden", "options", "problem"),
    [
        (_layers.BatchNormalization, {}, "batch norm"),
        (lambda: _layers.Dropout(0.5), {}, r"dropout|operations"),
        (None, {"optimizer": lambda: _optimizers.SGD(0.1, 0.9, True)}, "SGD"),
        (None, {"optimizer": lambda: _optimizers.RMSprop(0.1)}, "SGD"),
        (None, {"loss": lambda: lambda y, p: p}, "the loss"),
        (None, {"class_weight": lambda: {0: 2.0}}, "weights of examples"),
    ],
)
def test_what_tff_cannot_do_is_refused(hidden, options, problem):
    options = {name: make() for name, make in options.items()}
    model = _model(*([hidden()] if hidden else []))
    with pytest.raises(ValueError, match=problem):
        _moved(model, cohorts.client_arrays(_SIZES), **options)


def _cnn():
    return tf.keras.Sequential(
        [
            _layers.Reshape([8, 8, 1], input_shape=(64,)),
            _layers.Conv2D(8, 3, activation="relu"),
            _layers.MaxPooling2D(),
            _layers.Flatten(),
            _layers.Dense(10),
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


def test_noise_off_the_engine_is_tffs_unweighted_federated_averaging(tff):
    # 24 examples a client: the last of five batches is short.
    dataset, _ = datasets.load_digits(num_clients=6, examples_per_client=24, iid=False)
    rounds = [
        np.sort(np.random.default_rng(t).permutation(6)[:_COHORT])
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
            clients_per_round=float(_COHORT),
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
