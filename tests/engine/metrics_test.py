"""Metrics of all kinds over many clients are what Keras says of all their examples."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tests.keras import toy

_ops, _layers = tf.keras.ops, tf.keras.layers
_constant = tf.keras.initializers.Constant


class _Own(tf.keras.metrics.Metric):
    """A metric of one or two variables, in whose place `result` gives `shown`."""

    def __init__(self, name, update, begin=(0.0,), shown=lambda *v: v[0], dtype=None):
        super().__init__(name=name)
        self._update, self._shown = update, shown
        self._states = [
            self.add_weight(shape=(), initializer=_constant(value), dtype=dtype)
            for value in begin
        ]

    def update_state(self, y, p, sample_weight=None):
        best = _ops.cast(_ops.argmax(p, axis=-1), "int32")
        hits = _ops.cast(best == _ops.cast(y, "int32"), "float32")
        new = self._update(hits, p, *map(_ops.convert_to_tensor, self._states))
        for variable, value in zip(self._states, new, strict=True):
            variable.assign(value)

    def result(self):
        return self._shown(*self._states)


class _Resets(_Own):
    """Begins anew with what it began with."""

    def __init__(self, name, update, begin, **options):
        self._begin = begin
        super().__init__(name, update, begin, **options)

    def reset_state(self):
        for variable, value in zip(self._states, self._begin, strict=True):
            variable.assign(value)


def _count(hits, p, n):
    return [n + _ops.cast(_ops.sum(hits), n.dtype)]


def _smoothed(hits, p, total, count):
    return [total + _ops.sum(hits), count + _ops.cast(_ops.size(hits), "float32")]


def _largest(hits, p, before):
    return [_ops.maximum(before, _ops.cast(_ops.max(p), before.dtype))]


def _smallest(hits, p, before):
    return [_ops.minimum(before, _ops.cast(_ops.min(p), before.dtype))]


def _any(hits, p, before):
    return [_ops.logical_or(before, _ops.max(p) > 2)]


def _count_and_largest(hits, p, n, top):
    return [*_count(hits, p, n), *_largest(hits, p, top)]


def _two(n, top):
    return {"n": n, "top": top}


def _ratio(total, count):
    return total / count


class _Late(tf.keras.metrics.Metric):
    """Makes its variable when it sees labels."""

    total = None

    def update_state(self, y, p, sample_weight=None):
        if self.total is None:
            self.total = self.add_weight(shape=(), initializer=_constant(5.0))
        self.total.assign_add(_ops.cast(_ops.size(y), "float32"))

    def result(self):
        return self.total


def _metrics():
    """Returns new ones of every kind."""
    return [
        _Own("variable", _count),
        _Own("dictionary", _count, shown=lambda n: {"one": n, "two": 2 * n}),
        _Own("tensor", _count, shown=_ops.convert_to_tensor),
        _Own("whole", _count, dtype="int32"),
        _Resets("smallest", _smallest, [1e9]),
        _Own("smallest_never_reset", _smallest, [1e9]),
        _Resets("largest", _largest, [-np.inf]),
        _Resets("largest_whole", _largest, [0], dtype="uint8"),
        _Resets("any", _any, [False], dtype="bool"),
        _Resets("smoothed", _smoothed, [1.0, 2.0], shown=_ratio),
        _Resets("both", _count_and_largest, [0.0, -9.0], shown=_two),
        tf.keras.metrics.SparseTopKCategoricalAccuracy(2),
        _Late(name="late"),
    ]


_WAYS = {
    "one by one": {},
    "three threads": {"max_parallel_clients": 3},
    "streamed": {"max_parallel_clients": 2},
    "batched": {"at_once": 2},
    "XLA": {"jit_compile": True},
}


@functools.cache
def _by_keras():
    """Returns what Keras says, and the labels and predictions that it says it of."""
    model, arrays = cohorts.mlp(), cohorts.client_arrays()
    x, y = map(np.concatenate, zip(*arrays.values(), strict=True))
    model.compile(
        tf.keras.optimizers.SGD(0.0), cohorts.cross_entropy(), metrics=_metrics()
    )
    found = model.fit(x, y, batch_size=5, verbose=0).history
    return found, y, model.predict(x, verbose=0)


@pytest.mark.parametrize("way", _WAYS)
def test_training_metrics_are_those_of_keras(way):
    used, dataset, (wanted, y, predicted) = _metrics(), cohorts.dataset(), _by_keras()
    engine = cohorts.make_engine(
        cohorts.mlp(), dataset, training={"metrics": used}, **_WAYS[way]
    )
    if way == "streamed":
        dataset = toy.streamed(dataset)
    for _ in range(2):
        # At rate 0, all steps see the same weights.
        logs = cohorts.run_round(engine, dataset, learning_rate=0.0, local_epochs=1)
        for key, (value,) in wanted.items():
            np.testing.assert_allclose(logs[key], float(value), 1e-5)
        for metric in used:  # As a validation leaves them behind.
            metric.update_state(y, predicted)


def _average(hits, p, before):
    return [0.9 * before + 0.1 * _ops.mean(hits)]


def _streaming_mean(hits, p, mean, count):
    count = count + _ops.cast(_ops.size(hits), "float32")
    return [mean + _ops.sum(hits - mean) / count, count]


@pytest.mark.parametrize(
    ("update", "begin"),
    [
        (_average, [0.5]),
        (lambda hits, p, before: [_ops.mean(p)], [0.0]),
        (_streaming_mean, [0.0, 0.0]),
        (lambda hits, p, before: [before * _ops.exp(_ops.mean(p))], [1.0]),
    ],
)
def test_a_state_that_is_no_sum_is_refused_by_name(update, begin):
    metrics = ["accuracy", _Own("mine", update, begin)]
    with pytest.raises(ValueError, match="'mine', whose state cannot"):
        cohorts.make_engine(
            cohorts.mlp(), cohorts.dataset(), training={"metrics": metrics}
        )


class _OfTensorFlow(tf.keras.metrics.Metric):
    """Keeps its state where Keras knows nothing of it."""

    def __init__(self):
        super().__init__(name="hidden")
        self.kept = tf.Variable(0.0)

    def update_state(self, y, p, sample_weight=None):
        self.kept.assign_add(1.0)

    def result(self):
        return self.kept


def test_state_that_keras_does_not_know_of_is_refused():
    with pytest.raises(ValueError, match="must keep what training reads and changes"):
        cohorts.make_engine(
            cohorts.mlp(), cohorts.dataset(), training={"metrics": [_OfTensorFlow()]}
        )


class _Endpoint(_layers.Layer):
    """Keeps a metric of what goes through it, and a loss; perhaps it reads it."""

    def __init__(self, reads=False):
        super().__init__()
        self._mean = tf.keras.metrics.Mean(name="mean")
        self._reads = reads

    def call(self, x):
        self._mean.update_state(x)
        self.add_loss(_ops.mean(x**2))
        return x + self._mean.total if self._reads else x


class _Tracks(tf.keras.Model):
    """The way of Keras's own page on `compute_loss`."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.loss_tracker = tf.keras.metrics.Mean(name="loss")
        self.square = tf.keras.metrics.Mean(name="square")

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        loss = _ops.mean(y_pred**2) + _ops.sum(self.losses)
        self.loss_tracker.update_state(loss)
        self.square.update_state(y_pred**2)
        return loss

    @property
    def metrics(self):
        return [self.loss_tracker, self.square]


def _with_endpoint(kind=tf.keras.Model, name=None, **options):
    toy.seed(1)
    inputs = tf.keras.Input([4])
    return kind(inputs, _Endpoint(**options)(_layers.Dense(3)(inputs)), name=name)


@pytest.mark.parametrize("kind", [tf.keras.Model, _Tracks])
def test_metrics_that_a_model_keeps_are_those_of_keras(kind):
    model, arrays = (
        _with_endpoint(kind, name="one"),
        cohorts.client_arrays([5, 5, 0, 5]),
    )
    dataset = cohorts.from_arrays(arrays)
    engine = cohorts.make_engine(model, dataset, max_parallel_clients=2)
    options = {"learning_rate": 0.0, "local_epochs": 1}
    logs = cohorts.run_round(engine, dataset, **options)
    x, y = map(np.concatenate, zip(*arrays.values(), strict=True))
    model.compile(tf.keras.optimizers.SGD(0.0), cohorts.cross_entropy())
    wanted = model.fit(x, y, batch_size=5, verbose=0).history
    assert wanted.keys() >= {"loss", "square" if kind is _Tracks else "mean"}
    for key, (value,) in wanted.items():
        np.testing.assert_allclose(logs[key], value, 1e-5)


def test_a_layer_that_reads_its_metric_learns_nothing_of_others():
    model, dataset = _with_endpoint(reads=True), cohorts.dataset()
    engine = cohorts.make_engine(model, dataset)

    def update(positions):
        pending = cohorts.collect(engine, dataset, positions=np.array(positions))
        return np.concatenate(list(map(np.ravel, cohorts.update_of(pending))))

    assert update([3]).any()
    np.testing.assert_array_equal(update([0, 3]) - update([0]), update([3]))


@pytest.mark.parametrize("nobody", ["no examples", "no labels"])
def test_a_round_in_which_nobody_has_a_loss_says_so(nobody):
    x, y = np.ones([3, 4], np.float32), np.full([3, 1], np.nan, np.float32)
    count = 0 if nobody == "no examples" else 3
    data = cohorts.from_arrays({0: (x[:count], y[:count]), 1: (x[:0], y[:0])})
    model = cohorts.sequential([4], _layers.Dense(1))
    measured = {"metrics": ["mae", _Own("hits", _count)]}
    engine = cohorts.make_engine(model, data, loss="mse", training=measured)
    logs = cohorts.run_round(engine, data)
    assert np.isnan([logs["loss"], logs["mae"], logs["hits"]]).all()
    assert logs["discarded_clients"] == (nobody == "no labels")
