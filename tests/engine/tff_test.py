"""In TFF's environment: Keras 2 by TFF's functional models."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tests.keras import toy
from tests.mechanisms import references
from tfdp_fl import datasets

_layers, _optimizers = tf.keras.layers, tf.keras.optimizers
_SIZES = (5, 6, 7, 8)


def _model(*hidden):
    toy.seed(1)
    hidden = hidden or [_layers.Dense(6, "tanh")]
    return tf.keras.Sequential([_layers.InputLayer((4,)), *hidden, _layers.Dense(3)])


def _convolutions():
    shape, flat = _layers.Reshape([2, 2, 1]), _layers.Flatten()
    stack = _layers.Conv2D(3, 2, padding="same"), _layers.MaxPooling2D()
    return _model(shape, *stack, flat)


def _moved(model, clients, optimizer, loss=None, mechanism=None, **fit):
    """Returns how a round moves a model, and its history."""
    how = (mechanism or tfdp_fl.NoPrivacy(), len(clients), "fixed_size")
    federated = tfdp_fl.DPFederatedModel(model, *how)
    federated.compile(optimizer, loss or cohorts.cross_entropy(), ["accuracy"])
    start = model.get_weights()
    history = federated.fit(clients, batch_size=5, verbose=0, **fit).history
    moved = [b - a for a, b in zip(start, model.get_weights(), strict=True)]
    return moved, history


@pytest.mark.parametrize(
    ("make_model", "optimizer"),
    [
        (_convolutions, lambda: _optimizers.SGD(0.5)),
        (_model, lambda: _optimizers.SGD(0.5, 0.9)),
        (_model, lambda: _optimizers.Adam(0.1)),
    ],
)
def test_a_round_is_the_mean_of_a_plain_keras_loop(make_model, optimizer):
    clients, model = cohorts.client_arrays(_SIZES), make_model()
    start = model.get_weights()
    updates = []
    for x, y in clients.values():
        alone = make_model()
        alone.set_weights(start)
        alone.compile(optimizer(), cohorts.cross_entropy())
        alone.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
        updates.append([b - a for a, b in zip(start, alone.get_weights(), strict=True)])
    moved, history = _moved(model, clients, optimizer(), local_epochs=2)
    mean = [np.mean(parts, axis=0) for parts in zip(*updates, strict=True)]
    cohorts.assert_close(moved, mean, rtol=1e-4, atol=2e-5)
    assert 0.05 <= history["accuracy"][0] <= 1.0


def test_a_hostile_client_moves_the_model_by_its_clip():
    clients = cohorts.client_arrays(_SIZES)
    clients[1] = np.full([5, 4], 1e30, np.float32), np.zeros(5, np.int64)
    clients[2] = np.full([5, 4], np.nan, np.float32), np.zeros(5, np.int64)
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.1, noise_multiplier=0.0)
    optimizer = _optimizers.SGD(100.0)
    moved, _ = _moved(_model(), clients, optimizer, mechanism=mechanism)
    assert 1e-4 <= references.l2_norm(moved) <= 0.1 * (1 + 1e-5)


def test_target_evaluation_and_metrics_of_clients():
    clients, test = datasets.load_digits(num_clients=100)
    model = tf.keras.Sequential([_layers.InputLayer((64,)), _layers.Dense(10)])
    target = {"target_epsilon": 8, "target_delta": 1e-3, "num_clients": 100}
    federated = tfdp_fl.make_private(model, clients_per_round=50, rounds=15, **target)
    federated.compile(_optimizers.SGD(0.3), cohorts.cross_entropy(), ["accuracy"])
    federated.fit(clients, rounds=15, batch_size=5, verbose=0, seed=3)
    assert 6.0 <= federated.epsilon(1e-3) <= 8.0
    assert federated.evaluate(*test, verbose=0)[1] > 0.5
    accuracy = federated.evaluate_clients(clients, verbose=0)["accuracy"]
    assert 0.0 <= np.min(accuracy) <= np.max(accuracy) <= 1.0
    assert np.mean(accuracy) > 0.5


_SGD = _optimizers.SGD


class _Counts(_layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight("calls", (), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


_L2, _NORM = tf.keras.regularizers.L2(), tf.keras.constraints.UnitNorm()


@pytest.mark.parametrize(
    ("hidden", "optimizer", "options", "problem"),
    [
        (_layers.BatchNormalization(), _SGD(), {}, "batch norm"),
        (_layers.Dropout(0.5), _SGD(), {}, r"dropout|operations"),
        (None, _SGD(0.1, 0.9, True), {}, "SGD"),
        (None, _optimizers.RMSprop(0.1), {}, "SGD"),
        (None, _SGD(), {"loss": lambda y, p: p}, "the loss"),
        (None, _SGD(), {}, "sample_weight must be declared"),
        (_layers.Dense(4, kernel_regularizer=_L2), _SGD(), {}, "losses that layers"),
        (_layers.Dense(4, activity_regularizer=_L2), _SGD(), {}, "losses that layers"),
        (_layers.Dense(4, trainable=False), _SGD(), {}, "trainable=False"),
        (_layers.Dense(4, kernel_constraint=_NORM), _SGD(), {}, "constraints"),
        (_Counts(), _SGD(), {}, "assign_add"),
    ],
)
def test_what_tff_cannot_do_is_refused(hidden, optimizer, options, problem):
    model = _model(*([hidden] if hidden else []))
    clients = cohorts.client_arrays(_SIZES)
    if "sample_weight" in problem:
        clients = {k: (x, y, y * 0.0 + 1) for k, (x, y) in clients.items()}
    with pytest.raises(ValueError, match=problem):
        _moved(model, clients, optimizer, **options)
