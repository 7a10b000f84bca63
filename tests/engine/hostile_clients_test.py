"""One client's data can end no round, and pass nothing on to the next one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tests.mechanisms import references
from tfdp_fl.datasets import FederatedDataset

_layers = tf.keras.layers


def _fixed():
    return tfdp_fl.FixedClipping(clip_norm=0.4, noise_multiplier=0.0)


# By what they are made of: each is traced once, and starts anew in each round.
_engines = {}


def _moved(clients, model=None, *, beside=False, few=False, loss=None, **options):
    """Returns how a round moves a model (None: `cohorts.mlp`), and its logs."""
    dataset = clients
    if isinstance(clients, dict):
        dataset = cohorts.from_arrays(clients)
    key = model and id(model), beside, loss, *options
    if key not in _engines:
        model = model or cohorts.mlp()
        jit_compile = None if beside else False
        options = {"mechanism": _fixed(), "jit_compile": jit_compile, **options}
        engine = cohorts.make_engine(model, dataset, loss=loss, **options)
        _engines[key] = engine, model, model.get_weights()
    engine, model, before = _engines[key]
    model.set_weights(before)
    engine.has_trained = False
    with cohorts.side_by_side(beside, few):
        pending = cohorts.collect(engine, dataset, clients_per_round=3.0)
        logs = engine.release(pending)
    moved = [b - a for a, b in zip(before, model.get_weights(), strict=True)]
    return moved, {**logs, "failures": pending.failures}


def _assert_same(moved, wanted):
    cohorts.assert_close(moved, wanted, rtol=1e-4)


def _without(clients, client):
    return {k: v for k, v in clients.items() if k != client}


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_the_loss_is_that_of_the_others(beside, few, value):
    clients = cohorts.client_arrays((5, 5, 5))
    clients[1][0][2, 1] = value
    entropy = tf.keras.metrics.SparseCategoricalCrossentropy("entropy", None, True)
    training = {"metrics": ["accuracy", entropy]}
    options = {"beside": beside, "few": few, "training": training}
    moved, logs = _moved(clients, **options)
    wanted, _ = _moved(_without(clients, 1), **options)
    assert all(math.isfinite(logs[name]) for name in ("loss", "accuracy", "entropy"))
    if logs["discarded_clients"]:
        _assert_same(moved, wanted)
    else:  # 1e38 saturates the tanh, and does no harm.
        assert value == 1e38


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("where", ["x", "y"])
def test_those_who_idle_do_not_see_anothers_data(few, where):
    # Clients with fewer steps than others are filled up in the table.
    arrays = cohorts.client_arrays((10, 5, 3, 0))
    clients = {
        k: (x, np.repeat(y[:, None], 3, 1).astype("f4")) for k, (x, y) in arrays.items()
    }
    options = {"beside": True, "few": few, "loss": "mse"}
    wanted, _ = _moved(_without(clients, 0), **options)
    for value in (np.nan, np.inf, 1e30):
        x, y = clients[0][0].copy(), clients[0][1].copy()
        (x if where == "x" else y)[:] = value
        moved, logs = _moved({**clients, 0: (x, y)}, **options)
        assert logs["discarded_clients"] == 1
        _assert_same(moved, wanted)


_DISCO = {"epsilon": 10.0, "delta": 1e-3, "clipping_radius": 0.5, "window": 2}


@pytest.mark.parametrize(
    ("mechanism", "window", "allowed"),
    [
        (tfdp_fl.AdaptiveLocalDP(**_DISCO), np.nan, 2 * math.sqrt(4) * 0.5),
        (tfdp_fl.AdaptiveLocalDP(**_DISCO), 0.3, 2 * math.sqrt(4) * 0.3),
        (
            tfdp_fl.NbAFL(epsilon=50.0, constant=3.0, weight_clip=0.5),
            *(None, 5 * 2 * 0.5),
        ),
    ],
)
def test_huge_data_moves_a_sum_of_local_releases_by_its_own_share(
    mechanism, window, allowed
):
    """At most sqrt(L) radii of L layers, or the clipped weights times n.

    It may turn right round. Seen from outside, the mean moves by 1.7 clips / m with
    `AdaptiveLocalDP` and by 1.1 with `NbAFL`.
    """
    sums, engine, windows = [], None, None
    for factor in (1.0, 1e6):
        clients = cohorts.client_arrays((5, 5, 5))
        clients[1] = (clients[1][0] * np.float32(factor), clients[1][1])
        dataset = cohorts.from_arrays(clients)
        engine = engine or cohorts.make_engine(
            cohorts.mlp(), dataset, mechanism=mechanism
        )
        if window is not None:
            windows = np.full([3, 2, engine.num_variables], window, np.float32)
        pending = cohorts.collect(engine, dataset, windows=windows)
        sums.append(cohorts.update_of(pending))
    moved = [a.astype(np.float64) - b for a, b in zip(*sums, strict=True)]
    assert 0.0 <= references.l2_norm(moved) <= allowed * (1 + 1e-4)


@pytest.mark.parametrize("beside", [True, False])
def test_a_huge_loss_stays_a_number(beside):
    arrays = cohorts.client_arrays((5, 5))
    clients = {k: (x, np.ones([5, 3], np.float32)) for k, (x, _) in arrays.items()}
    clients[1][1][:] = 1.8e19
    _, logs = _moved(clients, beside=beside, loss="mse")
    assert math.isfinite(logs["loss"])


def test_labels_of_an_ignored_class_or_of_a_client_left_out_are_allowed():
    clients = cohorts.client_arrays((5, 5, 5))
    clients[1][1][4] = -1
    dataset = cohorts.from_arrays(clients)
    loss = cohorts.cross_entropy(ignore_class=-1)
    cohorts.make_engine(cohorts.mlp(), dataset, loss=loss).check_labels(dataset)
    engine = cohorts.make_engine(cohorts.mlp(), dataset)
    engine.check_labels(dataset.take([0, 2]))
    with pytest.raises(ValueError, match="client 1"):
        engine.check_labels(dataset)


def test_labels_of_a_streamed_client_fail_the_client():
    clients = cohorts.client_arrays((5, 5, 5))
    clients[1][1][4] = 7
    slices = tf.data.Dataset.from_tensor_slices
    clients = {k: slices(client) for k, client in clients.items()}
    of_files = FederatedDataset.from_tf_datasets
    moved, logs = _moved(of_files(clients))
    wanted, _ = _moved(of_files(_without(clients, 1)))
    (failure,) = logs["failures"]
    assert failure.position == 1
    assert "from 0 to 2" in str(failure.error)
    _assert_same(moved, wanted)


def test_a_client_that_raises_has_failed_alone():
    stack = _layers.Embedding(10, 3), _layers.Flatten(), _layers.Dense(3)
    model = cohorts.sequential([4], *stack, dtype=tf.int32)
    rng = np.random.default_rng(0)
    clients = {
        k: (rng.integers(0, 10, [5, 4]), rng.integers(0, 3, 5)) for k in range(3)
    }
    clients[1][0][2, 2] = 99
    moved, logs = _moved(clients, model)
    wanted, _ = _moved(_without(clients, 1), model)
    assert [f.position for f in logs["failures"]] == [1]
    _assert_same(moved, wanted)
    assert math.isfinite(logs["loss"])
    # A lone client ends nothing either.
    _, logs = _moved({1: clients[1]}, model)
    assert len(logs["failures"]) == 1
    # Where nobody can train the error is raised.
    with pytest.raises(tf.errors.InvalidArgumentError):
        _moved(dict.fromkeys(range(3), clients[1]), model)


_MEMORY = tf.Variable(0.0, name="memory")


def _remembers(value):
    before = _MEMORY.read_value()
    _MEMORY.assign(tf.reduce_sum(value))
    return before


def _calls_python(y, p):
    called = tf.numpy_function(lambda v: v, [tf.reduce_sum(p)], tf.float32)
    return tf.ensure_shape(called, [])


class _Optimizer(tf.keras.optimizers.SGD):
    def update_step(self, gradient, *rest):
        super().update_step(gradient + _remembers(gradient), *rest)


class _Remembers(_layers.Layer):
    def call(self, x):
        return x + _remembers(x)


class _Draws(_layers.Layer):
    """What a client draws shifts what all after it draw."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x + self.generator.normal(tf.shape(x))


def _stateful():
    return _layers.LSTM(3, stateful=True)


_LOSS = cohorts.cross_entropy()
_SGD = tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
_HOOK = {"upload_hook": lambda update: [v + _remembers(v) for v in update]}


@pytest.mark.parametrize(
    ("layer", "options", "problem"),
    [
        (None, {"loss": lambda y, p: _LOSS(y, p) + 0 * _remembers(p)}, "to the next"),
        (None, {"training": _HOOK}, "to the next"),
        (None, {"optimizer": _Optimizer(0.1, momentum=0.5)}, "to the next"),
        (_Remembers, {}, "memory.*to the next"),
        (_Draws, {}, "would pass from one"),
        (None, {"loss": _calls_python}, "py_function"),
        (None, {"optimizer": tf.keras.optimizers.Nadam(0.1)}, "Nadam"),
        (None, {"optimizer": _SGD}, "gradient_accumulation_steps"),
        (_stateful, {}, "stateful=True"),
    ],
)
def test_a_state_outside_of_the_weights_is_refused(layer, options, problem):
    shape = [5, 4, 2] if layer is _stateful else [5, 4]
    clients = {0: (np.ones(shape, np.float32), np.zeros(5, np.int64))}
    stack = [layer()] if layer else []
    model = cohorts.sequential(shape[1:], *stack, _layers.Dense(3), batch_size=5)
    dataset = cohorts.from_arrays(clients)
    with pytest.raises(ValueError, match=problem):
        cohorts.run_round(cohorts.make_engine(model, dataset, **options), dataset)
