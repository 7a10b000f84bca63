"""One pure program for all threads: nothing passes by it, from nobody to nobody."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.engine import cohorts
from tfdp_fl import mechanisms
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import allowed_operations, devices, program
from tfdp_fl.mechanisms import clipping

_layers = tf.keras.layers


def _spec(*shape, dtype=tf.float32):
    return tf.TensorSpec(shape, dtype)


class ProgramTest(tf.test.TestCase):
    def test_large_sums_of_threads_do_not_meet(self):
        # As `AddN` they would: TensorFlow's memory optimizer adds up in a variable
        # that it finds by the operation's name.
        def function(x):
            def body(k, total):
                return k + 1, tf.add_n([total, x, x * 2.0, tf.sin(x), x - 1.0])

            whole = tf.add_n([x, x * 2.0, tf.cos(x), x + 1.0])
            return whole, tf.while_loop(lambda k, _: k < 3, body, (0, x))[1]

        traced = program.Program(function, _spec(None))
        bodies = [
            traced.definition.node,
            *(each.node_def for each in traced.definition.library.function),
        ]
        sums = [node for nodes in bodies for node in nodes if node.op == "AddN"]
        self.assertEqual({node.attr["N"].i for node in sums}, {2})
        rng = np.random.default_rng(0)
        inputs = [rng.normal(size=400_000).astype(np.float32) for _ in range(8)]
        alone = [traced(x) for x in inputs]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                for one, other in zip(alone, pool.map(traced, inputs), strict=True):
                    self.assertAllEqual(one[0], other[0])
                    self.assertAllEqual(one[1], other[1])
        x = inputs[0].astype(np.float64)
        self.assertAllClose(alone[0][0], 4 * x + np.cos(x) + 1, atol=1e-5, rtol=1e-5)

    def test_clips_of_threads_do_not_meet_either(self):
        # Where the cohort sets the clip, threads clip by a function of their own.
        traced = tf.function(clipping.global_norm).get_concrete_function(
            [_spec(3), _spec(2), _spec(4), _spec(5)]
        )
        definition = traced.graph.as_graph_def()
        self.assertNotIn("AddN", {node.op for node in definition.node})

    def test_dropout_inside_of_an_operation_is_refused(self):
        definition = tf.compat.v1.GraphDef()
        node = definition.node.add(op="CudnnRNNV3", name="rnn")
        allowed_operations.check(definition)
        node.attr["dropout"].f = 0.5
        with self.assertRaisesRegex(ValueError, "CudnnRNNV3"):
            allowed_operations.check(definition)

    def test_what_is_read_of_a_variable_is_refused_as_well(self):
        memory = tf.Variable(1.0, name="memory")
        with self.assertRaisesRegex(ValueError, "the variable 'memory"):
            program.Program(lambda x: x * memory, _spec())

    def test_a_constant_that_a_layer_holds_is_a_constant(self):
        table = tf.random.normal([300, 2])
        traced = program.Program(lambda k: tf.gather(table, k), _spec(dtype=tf.int32))
        self.assertAllEqual(traced(tf.constant(7)), table[7])
        self.assertLen(traced.constants, 1)

    def test_an_assertion_runs_although_nobody_uses_it(self):
        def function(x):
            tf.debugging.assert_positive(x)
            return 2 * x

        traced = program.Program(function, _spec())
        self.assertEqual(float(traced(3.0)), 6.0)
        with self.assertRaises(tf.errors.InvalidArgumentError):
            traced(-1.0)


@functools.cache
def _engine(executor="two threads", make_model=None):
    """Returns an engine that keeps each client's update."""
    make_model = make_model or (cohorts.mlp if executor == "XLA" else _with_state)
    threads = 1 if executor == "one thread" else 2
    at_once = 4 if executor == "batched" else None
    with mock.patch.object(devices, "clients_at_once", lambda *_: at_once):
        return cohorts.make_engine(
            make_model(),
            FederatedDataset.from_client_arrays(cohorts.client_arrays()),
            mechanism=mechanisms.MedianClipping(noise_multiplier=0.0),
            num_replicas=threads,
            jit_compile=executor == "XLA",
        )


def _rows(engine, clients):
    """Returns each client's own update, [D], and its norm."""
    dataset = FederatedDataset.from_client_arrays(clients)
    rows = {}

    def noting(pending, *_):
        for members, collected in pending.collected:
            norms = engine.query.norm_of_scalars(collected.scalars).numpy()
            for member, row, norm in zip(
                members, collected.updates.numpy(), norms, strict=True
            ):
                rows[int(member)] = (row, norm)

    engine.complete = noting
    engine.collect(dataset, cohorts.inputs(dataset))
    return rows


def _with_state():
    tf.keras.utils.set_random_seed(2)
    return tf.keras.Sequential(
        [
            tf.keras.Input([4]),
            _layers.Dense(5),
            _layers.BatchNormalization(),
            _layers.Dropout(0.3),
            _layers.GaussianNoise(0.2),
            _layers.Dense(3),
        ]
    )


class IndependenceTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("one thread", "two threads", "XLA", "batched")
    def test_others_are_bit_for_bit_what_they_are_without(self, executor):
        engine = _engine(executor)
        clients = dict(cohorts.client_arrays((5, 7, 5, 3, 5, 7, 2)))
        usual = _rows(engine, clients)
        for place, kind in itertools.product([0, 3, 6], ["nan", "huge", "none"]):
            changed = dict(clients)
            x, y = changed[place]
            changed[place] = {
                "nan": (np.full_like(x, np.nan), y),
                "huge": (np.full_like(x, 1e30), y),
                "none": (x[:0], y[:0]),
            }[kind]
            hostile = _rows(engine, changed)
            self.assertEqual(usual.keys(), hostile.keys())
            for member, (row, norm) in usual.items():
                self.assertGreater(norm, 1e-4)
                if member == place:
                    continue
                if (executor, kind) == ("batched", "none"):
                    # Batches of other sizes are other products, of other rounding.
                    self.assertAllClose(row, hostile[member][0], atol=1e-6)
                    continue
                self.assertAllEqual(row, hostile[member][0])
                self.assertEqual(norm, hostile[member][1])

    def test_the_executor_changes_no_clients_draws(self):
        clients = cohorts.client_arrays((5, 5, 7, 5, 0, 12))
        one, two, batched = (
            _rows(_engine(executor), clients)
            for executor in ("one thread", "two threads", "batched")
        )
        for member, (row, _) in one.items():
            self.assertAllEqual(row, two[member][0])
            self.assertAllClose(row, batched[member][0], atol=1e-6)

    @parameterized.parameters("two threads", "batched")
    def test_clients_alike_in_their_data_draw_differently(self, executor):
        x, y = cohorts.client_arrays((5,))[0]
        alike = _rows(_engine(executor), dict.fromkeys(range(4), (x, y)))
        rows = [row for row, _ in alike.values()]
        for k in range(1, 4):
            self.assertGreater(np.abs(rows[0] - rows[k]).max(), 1e-4)

    def test_a_layer_that_writes_a_python_attribute(self):
        @tf.keras.utils.register_keras_serializable("program_test")
        class Noting(_layers.Layer):
            def call(self, x):
                before = getattr(self, "last", None)
                self.last = x
                return x if before is None else x + 0 * tf.reduce_sum(before)

        def model():
            inner = _layers.Dense(3, "tanh"), Noting(), _layers.Dense(3)
            return tf.keras.Sequential([tf.keras.Input([4]), *inner])

        clients = dict(cohorts.client_arrays((5, 5)))
        try:
            both = _rows(_engine(make_model=model), clients)
        except Exception as error:  # Refused is as well as harmless.
            self.assertNotIsInstance(error, AssertionError)
            return
        first = next(iter(clients))
        clients[first] = (np.full_like(clients[first][0], 1e30), clients[first][1])
        changed = _rows(_engine(make_model=model), clients)
        self.assertAllEqual(both[1][0], changed[1][0])
