"""Nothing passes from client to client, by whatever a program can keep it in."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset

_layers = tf.keras.layers
_registered = tf.keras.utils.register_keras_serializable("isolation_test")


@_registered
class _Queue(_layers.Layer):
    """Adds to a client's features what another one left behind."""

    def __init__(self, **options):
        super().__init__(**options)
        self.queue = tf.queue.FIFOQueue(1000, [tf.float32], shapes=[[]])

    def get_config(self):
        return super().get_config()

    def call(self, x):
        with tf.control_dependencies([self.queue.enqueue(tf.reduce_sum(x))]):
            kept = tf.cond(
                self.queue.size() > 1, self.queue.dequeue, lambda: tf.zeros([])
            )
        return x + kept


@_registered
class _Table(_layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.table = tf.lookup.experimental.MutableHashTable(
            tf.int64, tf.float32, default_value=0.0
        )

    def get_config(self):
        return super().get_config()

    def call(self, x):
        key = tf.constant(0, tf.int64)
        kept = tf.reshape(self.table.lookup(key), [])
        with tf.control_dependencies([kept]):
            written = self.table.insert(key, tf.reduce_sum(x))
        with tf.control_dependencies([written]):
            return x + kept


@_registered
class _OpDropout(_layers.Layer):
    def call(self, x):
        return tf.nn.dropout(x, 0.5)


@_registered
class _Sampling(_layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


@_registered
class _SamplingInALoop(_layers.Layer):
    def call(self, x):
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, y: (i + 1, y + tf.random.normal(tf.shape(y))),
            (0, x),
        )[1]


@_registered
class _OwnGenerator(_layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x + self.generator.normal(tf.shape(x))


_FOLDER = tempfile.mkdtemp()


@_registered
class _File(_layers.Layer):
    def call(self, x):
        path = os.path.join(_FOLDER, "kept")
        written = tf.io.write_file(path, tf.strings.as_string(tf.reduce_sum(x)))
        with tf.control_dependencies([written]):
            return tf.identity(x)


@_registered
class _ReadsAFile(_layers.Layer):
    def call(self, x):
        kept = tf.io.read_file(os.path.join(_FOLDER, "kept"))
        return x + tf.strings.to_number(kept)


@_registered
class _Python(_layers.Layer):
    def call(self, x):
        kept = tf.numpy_function(lambda y: y, [x], tf.float32, stateful=False)
        return tf.ensure_shape(kept, x.shape)


@_registered
class _InPlace(_layers.Layer):
    """Writes into a constant, which stays written."""

    def call(self, x):
        kept = tf.raw_ops.InplaceAdd(x=tf.zeros([1, 8]), i=[0], v=x[:1])
        return x + kept


@_registered
class _UnwrittenMemory(_layers.Layer):
    def call(self, x):
        return x + tf.raw_ops.Empty(shape=[8], dtype=tf.float32, init=False)


@_registered
class _Prints(_layers.Layer):
    def call(self, x):
        tf.print(x)
        return x


@_registered
class _Batch(_layers.Layer):
    """Computes together with the clients that train at the same time."""

    def call(self, x):
        double = tf.function(lambda rows: rows + tf.reduce_sum(rows))
        (batched,) = tf.raw_ops.BatchFunction(
            in_tensors=[tf.reduce_sum(x)[None]],
            captured_tensors=[],
            f=double.get_concrete_function(tf.TensorSpec([None])),
            num_batch_threads=1,
            max_batch_size=10,
            batch_timeout_micros=1000,
            Tout=[tf.float32],
        )
        return x + tf.reshape(batched, [])


@_registered
class _BareResource(_layers.Layer):
    """Assigns a variable that no `tf.Variable` stands for."""

    def build(self, shape):
        self.handle = [
            tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="bare")
        ]
        self.assign(tf.zeros([]))

    def assign(self, value):
        return tf.raw_ops.AssignVariableOp(resource=self.handle[0], value=value)

    def call(self, x):
        kept = tf.raw_ops.ReadVariableOp(resource=self.handle[0], dtype=tf.float32)
        with tf.control_dependencies([kept]):
            written = self.assign(tf.reduce_max(x))
        with tf.control_dependencies([written]):
            return x + tf.ensure_shape(kept, [])


# What each of them keeps something in.
_CHANNELS = {
    "queue": (_Queue, "QueueEnqueueV2|QueueSizeV2|QueueDequeueV2"),
    "table": (_Table, "LookupTableInsertV2"),
    "op_dropout": (_OpDropout, "RandomUniform"),
    "sampling": (_Sampling, "RandomStandardNormal"),
    "in_a_loop": (_SamplingInALoop, "RandomStandardNormal"),
    "file": (_File, "WriteFile"),
    "reads_a_file": (_ReadsAFile, "ReadFile"),
    "python": (_Python, "PyFuncStateless"),
    "prints": (_Prints, "PrintV2"),
    "in_place": (_InPlace, "InplaceAdd"),
    "unwritten_memory": (_UnwrittenMemory, "Empty"),
    "batch": (_Batch, "BatchFunction"),
}


def _model(*inner):
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential([_layers.Input((8,)), *inner, _layers.Dense(3)])


class TrainingTest(parameterized.TestCase):
    def _refused(self, message, model, **compiled):
        fed = toy.federated(model=model, compile_options=compiled)
        before = fed.get_weights()
        with self.assertRaisesRegex(ValueError, message):
            fed.fit(toy.clients(), verbose=0)
        self.assertIsNone(fed.run)
        toy.assert_same(before, fed)

    @parameterized.named_parameters(
        (name, *channel) for name, channel in _CHANNELS.items()
    )
    def test_a_layer_is_refused_by_its_name(self, layer, operation):
        model, message = (
            _model(layer(name="channel")),
            f"({operation}) in layer 'channel'",
        )
        self._refused(message, model)
        with self.assertRaisesRegex(ValueError, message):
            toy.federated(model=model).evaluate_clients(toy.clients(), verbose=0)

    @parameterized.product(layer=[_Queue, _OpDropout], jit_compile=[None, True])
    def test_in_whatever_way_clients_train(self, layer, jit_compile):
        self._refused(
            "'channel'", _model(layer(name="channel")), jit_compile=jit_compile
        )

    def test_a_generator_that_is_not_seeded_for_each_client(self):
        self._refused("would pass from one", _model(_OwnGenerator()))

    def test_a_resource_that_is_no_variable(self):
        model = _model(_BareResource())
        self._refused("ReadVariableOp in", model)
        with self.assertRaisesRegex(ValueError, "ReadVariableOp in"):
            toy.federated(model=model).evaluate_clients(toy.clients(), verbose=0)

    def test_a_loss_that_reads_a_metric(self):
        made = []

        class Largest(tf.keras.metrics.Metric):
            def __init__(self, name="largest", **options):
                super().__init__(name=name, **options)
                self.kept = self.add_weight(shape=(), initializer="zeros", name="kept")
                made.append(self)

            def update_state(self, y, predicted, sample_weight=None):
                self.kept.assign(tf.reduce_max(predicted))

            def result(self):
                return tf.convert_to_tensor(self.kept)

        def loss(y, predicted):
            return toy.loss()(y, predicted) + tf.convert_to_tensor(made[-1].kept)

        self._refused(
            "keep what training reads and changes",
            _model(),
            loss=loss,
            metrics=[Largest()],
        )

    @parameterized.parameters("loss", "metrics")
    def test_a_loss_or_metric_that_draws(self, place):
        def draws(y, predicted):
            return tf.reduce_mean(predicted**2, -1) + tf.random.uniform([])

        own = draws if place == "loss" else [draws]
        self._refused("RandomUniform", _model(), **{place: own})

    @parameterized.named_parameters(
        ("dropout", lambda: _layers.Dropout(0.5)),
        ("noise", lambda: _layers.GaussianNoise(0.5)),
        ("normalization", _layers.BatchNormalization),
    )
    def test_what_is_reset_for_each_client_is_allowed(self, make):
        fed = toy.federated(
            tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.0),
            _model(make()),
            clients_per_round=toy.NUM_CLIENTS,
        )
        fed.fit(toy.clients(), seed=1, verbose=0)
        self.assertEqual(fed.rounds, 1)


@_registered
class _KeepsInInference(_layers.Layer):
    """Adds what the client before left behind, where it does not train."""

    def build(self, shape):
        self.kept = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="kept"
        )

    def call(self, x, training=False):
        if training:
            return x
        before = tf.convert_to_tensor(self.kept)
        self.kept.assign(tf.cast(tf.reduce_max(x), tf.float32))
        return x + before


@_registered
class _NeverReset(tf.keras.metrics.Metric):
    """Says what the largest label was of all that it has seen."""

    def __init__(self, name="never_reset", **options):
        super().__init__(name=name, **options)
        self.kept = self.add_weight(shape=(), initializer="zeros", name="kept")

    def update_state(self, y, predicted, sample_weight=None):
        largest = tf.reduce_max(tf.cast(y, tf.float32))
        self.kept.assign(tf.maximum(tf.convert_to_tensor(self.kept), largest))

    def result(self):
        return tf.convert_to_tensor(self.kept)

    def reset_state(self):
        pass


class EvaluationTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("layer", lambda: _model(_KeepsInInference()), None, "loss"),
        ("metric", _model, _NeverReset, "never_reset"),
    )
    def test_a_client_moves_its_own_values_alone(self, make, metric, name):
        x, y = toy.arrays(40)
        rows = np.arange(40).reshape(4, 10)
        found = []
        for first in (0.0, 1234.5):
            own_x, own_y = x.copy(), y.copy()
            if first:
                own_x[:10], own_y[:10] = first, 2
            else:
                own_y[:] = np.minimum(own_y, 1)
            own_y[10:] = np.minimum(y[10:], 1)
            fed = toy.federated(
                model=make(),
                compile_options={"metrics": [metric()] if metric else None},
            )
            before = fed.get_weights()
            clients = FederatedDataset.from_indices(own_x, own_y, rows)
            found.append(fed.evaluate_clients(clients, verbose=0)[name])
            toy.assert_same(before, fed)
            for each in fed.model.metrics if metric else ():
                for variable in each.variables:
                    self.assertNotEqual(np.max(variable), 2.0)
        self.assertNotEqual(found[0][0], found[1][0])
        np.testing.assert_array_equal(found[0][1:], found[1][1:])

    def test_values_are_those_of_keras(self):
        model = _model(_layers.BatchNormalization(), _layers.Dropout(0.5))
        fed = toy.federated(model=model, compile_options={"metrics": ["accuracy"]})
        clients = toy.clients(3)
        found = fed.evaluate_clients(clients, batch_size=4, verbose=0)
        for place in range(3):
            x, y = clients.client(place)
            wanted = fed.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
            for name, value in wanted.items():
                self.assertAlmostEqual(found[name][place], value, places=5)


if __name__ == "__main__":
    absltest.main()
