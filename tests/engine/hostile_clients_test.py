"""One client's data can end no round, and pass nothing on to the next one."""

import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tests.keras import hostile, toy
from tests.mechanisms import references

_layers = tf.keras.layers


_FIXED = tfdp_fl.FixedClipping(clip_norm=0.4, noise_multiplier=0.0)
# By what they are made of: each is traced once, and starts anew in each round.
_engines = {}


def _moved(clients, model=None, *, beside=False, few=False, loss=None, **options):
    """Returns how a round moves a model (None: `cohorts.mlp`), and its logs."""
    dataset = cohorts.from_arrays(clients)
    key = model and id(model), beside, loss, *options.items()
    if repr(key) not in _engines:
        model = model or cohorts.mlp()
        jit_compile = None if beside else False
        options = {"mechanism": _FIXED, "jit_compile": jit_compile, **options}
        engine = cohorts.make_engine(model, dataset, loss=loss, **options)
        _engines[repr(key)] = engine, model, model.get_weights()
    engine, model, before = _engines[repr(key)]
    model.set_weights(before)
    with cohorts.side_by_side(beside, few, steps=(4,)):
        pending = cohorts.collect(engine, dataset, clients_per_round=3.0)
        _, logs = engine.release(pending, cohorts.paid())
    moved = [b - a for a, b in zip(before, model.get_weights(), strict=True)]
    return moved, {**logs, "failures": pending.failures}


def _assert_same(moved, wanted):
    cohorts.assert_close(moved, wanted, rtol=1e-4)


def _without(clients, client):
    return {k: v for k, v in clients.items() if k != client}


_ENTROPY = tf.keras.metrics.SparseCategoricalCrossentropy("entropy", None, True)
_MEASURED = {"metrics": ["accuracy", _ENTROPY]}


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_the_loss_is_that_of_the_others(beside, few, value):
    clients = cohorts.client_arrays((5, 5, 5))
    clients[1][0][2, 1] = value
    options = {"beside": beside, "few": few, "training": _MEASURED}
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
    # Clients with fewer rows than others of as many steps are filled up in the table.
    arrays = cohorts.client_arrays((10, 7, 5, 3, 0))
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


_DISCO = tfdp_fl.AdaptiveLocalDP(
    epsilon=10.0, delta=1e-3, clipping_radius=0.5, window=2
)
_NBAFL = tfdp_fl.NbAFL(epsilon=50.0, constant=3.0, weight_clip=0.5)


@pytest.mark.parametrize(
    ("mechanism", "window", "allowed"),
    [
        (_DISCO, np.nan, 2 * math.sqrt(4) * 0.5),
        (_DISCO, 0.3, 2 * math.sqrt(4) * 0.3),
        (_NBAFL, None, 5 * 2 * 0.5),
    ],
)
def test_huge_data_moves_a_sum_of_local_releases_by_its_own_share(
    mechanism, window, allowed
):
    """At most twice sqrt(L) radii of L layers, or twice the clipped weights times n."""
    sums, clients = [], cohorts.client_arrays((5, 5, 5))
    dataset, (x, y) = cohorts.from_arrays(clients), clients[1]
    engine = cohorts.make_engine(cohorts.mlp(), dataset, mechanism=mechanism)
    windows = None if window is None else np.full([3, 2, 4], window, np.float32)
    for factor in (1.0, 1e6):
        clients[1] = x * np.float32(factor), y
        dataset = cohorts.from_arrays(clients)
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


def _words(*stack, **options):
    embedding = _layers.Embedding(4, 3, **options)
    return cohorts.sequential([2], embedding, *stack, _layers.Dense(3), dtype="int32")


@pytest.mark.parametrize("at_once", [None, 4])
def test_a_client_that_raises_has_failed_alone(at_once):
    model, rng = _words(_layers.Flatten()), np.random.default_rng(0)
    clients = {k: (rng.integers(0, 4, [5, 2]), rng.integers(0, 3, 5)) for k in range(4)}
    clients[2][0][2, 1] = 99
    moved, logs = _moved(clients, model, at_once=at_once)
    wanted, _ = _moved(_without(clients, 2), model, at_once=at_once)
    assert [f.position for f in logs["failures"]] == [2]
    _assert_same(moved, wanted)
    assert math.isfinite(logs["loss"])
    # A lone client ends nothing either.
    _, logs = _moved({2: clients[2]}, model, at_once=at_once)
    assert len(logs["failures"]) == 1
    # Nor do those who can be none of them trained: that would tell that nobody else
    # was there.
    nobody = dict.fromkeys(range(3), clients[2])
    moved, logs = _moved(nobody, model, at_once=at_once)
    assert len(logs["failures"]) == 3
    assert not any(map(np.any, moved))


@pytest.mark.parametrize("way", ["XLA", "streamed on workers"])
def test_a_client_for_whose_rows_memory_does_not_suffice_has_failed_alone(way):
    clients = cohorts.client_arrays((5, 60, 5, 10))
    dataset, train_chunk = cohorts.from_arrays(clients), None
    model = cohorts.mlp()
    engine = cohorts.make_engine(model, dataset, jit_compile=way == "XLA")
    if way != "XLA":
        dataset = toy.streamed(dataset)
        workers = hostile.HereWorkers().collector(engine, dataset)
        train_chunk = workers._train_chunk
    state, unique = engine.query.initial_global_state(), np.unique

    def with_little_memory(array, **options):
        if np.size(array) >= 120:
            raise MemoryError
        return unique(array, **options)

    def collected(positions):
        inputs = cohorts.inputs(dataset, state=state, positions=np.array(positions))
        return engine.collect(dataset, inputs, train_chunk)

    with mock.patch.object(np, "unique", with_little_memory):
        pending = collected(range(4))
        assert [failure.position for failure in pending.failures] == [1]
        wanted = cohorts.update_of(collected([0, 2, 3]))
    for part, other in zip(cohorts.update_of(pending), wanted, strict=True):
        np.testing.assert_array_equal(part, other)


def test_what_cannot_be_batched_trains_one_by_one():
    # TensorFlow cannot vectorize the gradient of a recurrent layer's mask.
    x, y = np.array([[0, 1], [2, 3]], np.int32), np.array([0, 1])
    dataset = cohorts.from_arrays(dict.fromkeys(range(4), (x, y)))
    model = _words(_layers.LSTM(2), mask_zero=True)
    engine = cohorts.make_engine(model, dataset, at_once=3)
    for _ in range(2):
        pending = cohorts.collect(engine, dataset)
        assert float(pending.sums[0].contribution.weight) == 4.0
    assert "one by one" in engine.executor
    assert "not in batches: TensorFlow cannot vectorize" in engine.executor


_MEMORY = tf.Variable(0.0, name="memory")


class _Asserts(tfdp_fl.MedianClipping):
    """Raises an error for an update that is not finite."""

    def scale(self, norm, round):
        with tf.control_dependencies([tf.debugging.assert_greater(norm, 0.0)]):
            return super().scale(norm, round)


def test_a_client_whose_clipping_raises_has_failed_alone():
    # All updates wait for the median of their norms. One of them ended `fit`.
    mechanism = _Asserts(noise_multiplier=0.0)
    clients = cohorts.client_arrays((5, 7, 4, 6))
    x, y = clients[2]
    _, logs = _moved({**clients, 2: (np.nan * x, y)}, mechanism=mechanism)
    assert [failure.position for failure in logs["failures"]] == [2]
    assert "Assert" in logs["failures"][0].reason
    assert _moved(clients, mechanism=mechanism)[1]["failures"] == []


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


_GENERATOR = tf.random.Generator.from_seed(1)
_LOSS = cohorts.cross_entropy()


class _AsTheWeights(tf.keras.optimizers.SGD):
    def build(self, variables):
        super().build(variables)
        for variable in variables:
            self.add_variable_from_reference(variable, "kept").assign(variable)


class _Watches(tfdp_fl.MedianClipping):
    """Scales by what it saw of others."""

    def scale(self, norm, round):
        return super().scale(norm, round) + 0 * _remembers(norm)


_PRIVATE_MEDIAN = _Watches(noise_multiplier=2.0, median_noise_multiplier=4.0)
_SGD = tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
_HOOK = {"upload_hook": lambda update: [v + _remembers(v) for v in update]}


@pytest.mark.parametrize(
    ("layer", "options", "problem"),
    [
        (None, {"loss": lambda y, p: _LOSS(y, p) + 0 * _remembers(p)}, "to the next"),
        (None, {"training": _HOOK}, "to the next"),
        # Also where all updates wait for the clip.
        (None, {"mechanism": _PRIVATE_MEDIAN}, "to the next"),
        (None, {"optimizer": _Optimizer(0.1, momentum=0.5)}, "to the next"),
        (_layers.Lambda(lambda x: x + _remembers(x), (4,)), {}, "memory.*to the next"),
        # What a client draws shifts what all after it draw.
        (_layers.Lambda(lambda x: x + _GENERATOR.normal([4]), (4,)), {}, "would pass"),
        (None, {"loss": _calls_python}, "py_function"),
        (_layers.SpectralNormalization(_layers.Dense(4)), {}, "kernel' assigned"),
        (None, {"optimizer": tf.keras.optimizers.Nadam(0.1)}, "Nadam"),
        (None, {"optimizer": _AsTheWeights(0.1)}, "_AsTheW.*start as the weights"),
        (None, {"optimizer": _SGD}, "gradient_accumulation_steps"),
        (_layers.LSTM(3, stateful=True), {}, "stateful=True"),
    ],
)
def test_a_state_outside_of_the_weights_is_refused(layer, options, problem):
    shape = [5, 4, 2] if "stateful" in problem else [5, 4]
    clients = {0: (np.ones(shape, np.float32), np.zeros(5, np.int64))}
    stack = [layer] if layer else []
    model = cohorts.sequential(shape[1:], *stack, _layers.Dense(3), batch_size=5)
    dataset = cohorts.from_arrays(clients)
    with pytest.raises(ValueError, match=problem):
        cohorts.run_round(cohorts.make_engine(model, dataset, **options), dataset)
