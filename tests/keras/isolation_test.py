"""Nothing passes from client to client, by whatever a program can keep it in."""

from __future__ import annotations

import functools
import os
import tempfile

import numpy as np
import pytest
import tensorflow as tf

from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset

_layers = tf.keras.layers


class _BareResource(_layers.Layer):
    """Assigns a variable that no `tf.Variable` stands for."""

    def build(self, shape):
        options = {"dtype": tf.float32, "shape": [], "shared_name": "bare"}
        self.handle = [tf.raw_ops.VarHandleOp(**options)]
        self.assign(tf.zeros([]))

    def assign(self, value):
        return tf.raw_ops.AssignVariableOp(resource=self.handle[0], value=value)

    def call(self, x):
        kept = tf.raw_ops.ReadVariableOp(resource=self.handle[0], dtype=tf.float32)
        with tf.control_dependencies([self.assign(tf.reduce_max(x) + 0 * kept)]):
            return x + tf.ensure_shape(kept, [])


_QUEUE = tf.queue.FIFOQueue(1000, [tf.float32], shapes=[[]])
_TABLE = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
_FILE = os.path.join(tempfile.gettempdir(), "kept")


def _after(operation, x):
    with tf.control_dependencies([operation]):
        return tf.identity(x)


def _queue(x):
    """Adds to a client's features what another one left behind."""
    with tf.control_dependencies([_QUEUE.enqueue(tf.reduce_sum(x))]):
        return x + tf.cond(_QUEUE.size() > 1, _QUEUE.dequeue, lambda: tf.zeros([]))


def _table(x):
    key = tf.constant(0, tf.int64)
    kept = tf.reshape(_TABLE.lookup(key), [])
    return _after(_TABLE.insert(key, tf.reduce_sum(x) + 0 * kept), x + kept)


def _sampling(x):
    return x + tf.random.normal(tf.shape(x))


def _in_a_loop(x):
    return tf.while_loop(
        lambda i, _: i < 2, lambda i, y: (i + 1, _sampling(y)), (0, x)
    )[1]


def _file(x):
    return _after(tf.io.write_file(_FILE, tf.strings.as_string(tf.reduce_sum(x))), x)


def _python(x):
    kept = tf.numpy_function(lambda y: y, [x], tf.float32, stateful=False)
    return tf.ensure_shape(kept, x.shape)


def _prints(x):
    tf.print(x)
    return x


def _batch(x):
    """Computes together with the clients that train at the same time."""
    double = tf.function(lambda rows: rows + tf.reduce_sum(rows))
    limits = {"num_batch_threads": 1, "max_batch_size": 10}
    (batched,) = tf.raw_ops.BatchFunction(
        in_tensors=[tf.reduce_sum(x)[None]],
        captured_tensors=[],
        f=double.get_concrete_function(tf.TensorSpec([None])),
        batch_timeout_micros=1000,
        Tout=[tf.float32],
        **limits,
    )
    return x + tf.reshape(batched, [])


# What each of them keeps something in.
_CHANNELS = {
    _queue: "QueueEnqueueV2|QueueSizeV2|QueueDequeueV2",
    _table: "LookupTableInsertV2",
    functools.partial(tf.nn.dropout, rate=0.5): "RandomUniform",
    _sampling: "RandomStandardNormal",
    _in_a_loop: "RandomStandardNormal",
    _file: "WriteFile",
    lambda x: x + tf.strings.to_number(tf.io.read_file(_FILE)): "ReadFile",
    _python: "PyFuncStateless",
    _prints: "PrintV2",
    # It writes into a constant, which stays written.
    lambda x: x + tf.raw_ops.InplaceAdd(x=tf.zeros([1, 8]), i=[0], v=x[:1]): (
        "InplaceAdd"
    ),
    lambda x: x + tf.raw_ops.Empty(shape=[8], dtype=tf.float32): "Empty",
    _batch: "BatchFunction",
}


def _model(*inner):
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential([_layers.Input((8,)), *inner, _layers.Dense(3)])


def _with(function):
    return _model(_layers.Lambda(function, output_shape=(8,), name="channel"))


def _assert_refused(message, model, **compiled):
    fed = toy.federated(model=model, compile_options=compiled)
    before = fed.get_weights()
    uses = [lambda: toy.fit(fed)]
    if not compiled:
        uses.append(lambda: fed.evaluate_clients(toy.clients(), verbose=0))
    for use in uses:
        with pytest.raises(ValueError, match=message):
            use()
    assert fed.run is None
    toy.assert_same(before, fed)


@pytest.mark.parametrize("function, operation", _CHANNELS.items())
def test_a_layer_is_refused_by_its_name(function, operation):
    _assert_refused(f"({operation}) in layer 'channel'", _with(function))


def test_in_whatever_way_clients_train():
    for function in (_queue, _sampling):
        for jit_compile in (None, True):
            _assert_refused("'channel'", _with(function), jit_compile=jit_compile)
    # A resource that is no variable.
    _assert_refused("ReadVariableOp in", _model(_BareResource()))


class _Keeps(tf.keras.metrics.Metric):
    """Says what the largest label was of all that it has seen."""

    def __init__(self, name="keeps", **options):
        super().__init__(name=name, **options)
        self.kept = self.add_weight(shape=(), initializer="zeros", name="kept")

    def update_state(self, y, predicted, sample_weight=None):
        largest = tf.reduce_max(tf.cast(y, tf.float32))
        self.kept.assign(tf.maximum(tf.convert_to_tensor(self.kept), largest))

    def result(self):
        return tf.convert_to_tensor(self.kept)

    def reset_state(self):
        pass


def test_a_loss_that_reads_a_metric_and_losses_and_metrics_that_draw():
    metric = _Keeps()

    def loss(y, predicted):
        return toy.loss()(y, predicted) + tf.convert_to_tensor(metric.kept)

    def draws(y, predicted):
        return tf.reduce_mean(predicted**2, -1) + tf.random.uniform([])

    message = "keep what training reads and changes"
    _assert_refused(message, _model(), loss=loss, metrics=[metric])
    _assert_refused("RandomUniform", _model(), loss=draws)
    _assert_refused("RandomUniform", _model(), metrics=[draws])


class _KeepsInInference(_layers.Layer):
    """Adds what the client before left behind, where it does not train."""

    def build(self, shape):
        options = {"shape": (), "initializer": "zeros", "trainable": False}
        self.kept = self.add_weight(name="kept", **options)

    def call(self, x, training=False):
        if training:
            return x
        before = tf.convert_to_tensor(self.kept)
        self.kept.assign(tf.cast(tf.reduce_max(x), tf.float32))
        return x + before


@pytest.mark.parametrize("kind, name", [("layer", "loss"), ("metric", "keeps")])
def test_in_an_evaluation_a_client_moves_its_own_values_alone(kind, name):
    x, y = toy.arrays(40)
    y, rows, found = np.minimum(y, 1), np.arange(40).reshape(4, 10), []
    for hostile in (False, True):
        own_x, own_y = x.copy(), y.copy()
        if hostile:
            own_x[:10], own_y[:10] = 1234.5, 2
        fed = toy.federated(
            model=_model(*[_KeepsInInference()] * (kind == "layer")),
            compile_options={"metrics": [_Keeps()] * (kind == "metric") or None},
        )
        before = fed.get_weights()
        clients = FederatedDataset.from_indices(own_x, own_y, rows)
        found.append(fed.evaluate_clients(clients, verbose=0)[name])
        toy.assert_same(before, fed)
        kept = [v.numpy() for metric in fed.model.metrics for v in metric.variables]
        assert kind == "layer" or 2.0 not in kept
    assert found[0][0] != found[1][0]
    np.testing.assert_array_equal(found[0][1:], found[1][1:])
