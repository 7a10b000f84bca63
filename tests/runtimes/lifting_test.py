"""A traced function does on a worker what it does in process."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl import runtimes

try:
    import tensorflow_federated as tff
except ImportError:
    tff = None

_CLIENTS, _EXAMPLES, _BATCH, _CLASSES = 4, 6, 3, 3

_layers = tf.keras.layers


def _dense():
    return [_layers.Input((5,)), _layers.Dense(4, activation="relu")]


def _batch_normalization():
    return [*_dense(), _layers.BatchNormalization()]


def _dropout():
    return [*_dense(), _layers.Dropout(0.5, seed=3)]


def _convolution():
    return [
        _layers.Input((6, 6, 1)),
        _layers.Conv2D(2, 3, activation="relu"),
        _layers.MaxPool2D(),
        _layers.Flatten(),
    ]


class _Pair(NamedTuple):
    first: Any
    second: Any


class _Cohort:
    """A Keras model trained in place, client by client."""

    def __init__(self, layers):
        self.model = tf.keras.Sequential([*layers(), _layers.Dense(_CLASSES)])
        optimizer = tf.keras.optimizers.SGD(0.5, momentum=0.9)
        optimizer.build(self.model.trainable_variables)
        self.variables = self.model.variables
        slots = [v for v in optimizer.variables if v.shape.rank]
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                value = loss(y, self.model(x, training=True))
            trainable = self.model.trainable_variables
            gradients = tape.gradient(value, trainable)
            optimizer.apply_gradients(zip(gradients, trainable, strict=True))

        @tf.function
        def run(weights, shard):
            x, y = shard["x"], shard["y"]
            sums = [tf.zeros_like(weight) for weight in weights]
            for k in tf.range(tf.shape(x)[0]):
                for variable, weight in zip(self.variables, weights, strict=True):
                    variable.assign(weight)
                for slot in slots:
                    slot.assign(tf.zeros_like(slot))
                for start in tf.range(0, _EXAMPLES, _BATCH):
                    step(
                        x[k, start : start + _BATCH],
                        y[k, start : start + _BATCH],
                    )
                sums = [
                    s + (variable - weight)
                    for s, variable, weight in zip(
                        sums, self.variables, weights, strict=True
                    )
                ]
            return {"updates": sums, "clients": tf.shape(x)[0]}

        self.run = run
        rng = np.random.default_rng(2)
        features = self.model.input_shape[1:]
        self.weights = [v.numpy() for v in self.variables]
        self.shard = {
            "y": rng.integers(0, _CLASSES, (_CLIENTS, _EXAMPLES)).astype("i4"),
            "x": rng.normal(size=(_CLIENTS, _EXAMPLES, *features)).astype("f4"),
        }
        self.broadcast_spec = [tf.TensorSpec(w.shape) for w in self.weights]
        self.shard_spec = {
            "y": tf.TensorSpec((None, _EXAMPLES), tf.int32),
            "x": tf.TensorSpec((None, _EXAMPLES, *features)),
        }

    def shards(self):
        return [
            {name: array[part] for name, array in self.shard.items()}
            for part in (slice(0, 1), slice(1, None))
        ]

    def lift(self, **arguments):
        return runtimes.computation_from_function(
            self.run, self.broadcast_spec, self.shard_spec, **arguments
        )


class LiftingTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if tff is not None:
            cls.workers = runtimes.TFFWorkers(num_workers=1).open()
            cls.addClassCleanup(cls.workers.close)

    def setUp(self):
        super().setUp()
        if tff is None:
            self.skipTest("TensorFlow Federated is not installed.")

    @parameterized.named_parameters(
        ("dense", _dense),
        ("batch_normalization", _batch_normalization),
        ("convolution", _convolution),
    )
    def test_trains_as_in_process(self, layers):
        cohort = _Cohort(layers)
        computation = cohort.lift()
        expected = cohort.run(cohort.weights, cohort.shard)
        for _ in range(2):
            actual = self.workers.run_sharded(
                computation, cohort.shards(), cohort.weights
            )
            self.assertEqual(actual["clients"], _CLIENTS)
            for a, b in zip(actual["updates"], expected["updates"], strict=True):
                self.assertGreater(np.abs(b).max(), 1e-3)
                np.testing.assert_allclose(a, b, atol=1e-5)

    def test_type_signature(self):
        computation = _Cohort(_dense).lift()
        self.assertEqual(
            computation.type_signature.compact_representation(),
            "(<broadcast=<float32[5,4],float32[4],float32[4,3],float32[3]>,"
            "shard=<x=float32[?,6,5],y=int32[?,6]>> -> "
            "<clients=int32,updates="
            "<float32[5,4],float32[4],float32[4,3],float32[3]>>)",
        )

    def test_the_model_outside_is_left_alone(self):
        cohort = _Cohort(_dense)
        before = cohort.model.get_weights()
        self.workers.run_sharded(cohort.lift(), cohort.shards(), cohort.weights)
        for a, b in zip(before, cohort.model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        x = np.zeros((2, 5), np.float32)
        self.assertEqual(cohort.model.predict(x, verbose=0).shape, (2, 3))

    def test_assigned_variables_are_not_sent(self):
        cohort = _Cohort(lambda: [_layers.Input((2000,))])
        whole, lean = (
            len(tff.framework.serialize_computation(c).SerializeToString())
            for c in (cohort.lift(), cohort.lift(assigned=cohort.variables))
        )
        self.assertGreater(whole - lean, 4 * 2000 * _CLASSES)
        sums = [
            self.workers.run_sharded(
                cohort.lift(assigned=assigned), cohort.shards(), cohort.weights
            )["updates"][0]
            for assigned in ((), cohort.variables)
        ]
        np.testing.assert_array_equal(*sums)

    def test_variables_have_their_value_of_the_time(self):
        rate = tf.Variable(2.0)
        calls = tf.Variable(0, dtype=tf.int32)

        @tf.function
        def times(broadcast, shard):
            calls.assign_add(1)
            return broadcast * shard * rate, tf.identity(calls)

        spec = tf.TensorSpec([])
        computation = runtimes.computation_from_function(times, spec, spec)
        rate.assign(5.0)
        for _ in range(2):
            result = self.workers.run_sharded(
                computation, [np.float32(3), np.float32(4)], np.float32(10)
            )
            self.assertEqual(result, (140.0, 2))
        self.assertEqual(calls.numpy(), 0)

    def test_captured_constants_and_python_functions(self):
        constant = tf.constant([1.0, 2.0])
        computation = runtimes.computation_from_function(
            lambda broadcast, shard: constant * shard,
            tf.TensorSpec([]),
            tf.TensorSpec([2]),
        )
        result = self.workers.run_sharded(
            computation, [np.float32([3, 4])], np.float32(0)
        )
        np.testing.assert_array_equal(result, [3.0, 8.0])

    @parameterized.named_parameters(
        ("operation_seed", lambda: tf.random.normal([], seed=1)),
        (
            "bits",
            lambda: tf.cast(
                tf.raw_ops.NonDeterministicInts(shape=[], dtype=tf.int64),
                tf.float64,
            ),
        ),
        ("no_seed", lambda: tf.random.normal([])),
    )
    def test_random_operations_draw_afresh(self, draw):
        tf.random.set_seed(5)
        self.addCleanup(tf.random.set_seed, None)
        slots = 4

        def one_hot(broadcast, shard):
            return tf.one_hot(shard, slots, dtype=tf.float64) * tf.cast(
                draw(), tf.float64
            )

        computation = runtimes.computation_from_function(
            one_hot, tf.TensorSpec([]), tf.TensorSpec([], tf.int32)
        )
        # Two processes, that start with the same graph, and two rounds.
        seen = []
        with runtimes.TFFWorkers(num_workers=2) as workers:
            for _ in range(2):
                seen.extend(
                    workers.run_sharded(
                        computation,
                        [np.int32(slot) for slot in range(slots)],
                        np.float32(0),
                    )
                )
        # 24-bit numbers at least: 28 pairs agree by chance with p < 2e-6.
        self.assertLen(set(seen), 2 * slots)

    def test_dropout_differs_between_rounds(self):
        cohort = _Cohort(_dropout)
        computation = cohort.lift()
        one, two = (
            self.workers.run_sharded(computation, cohort.shards(), cohort.weights)[
                "updates"
            ]
            for _ in range(2)
        )
        self.assertGreater(max(abs(a - b).max() for a, b in zip(one, two)), 0)  # noqa: B905

    def test_seeds_that_are_arguments_repeat(self):
        computation = runtimes.computation_from_function(
            lambda broadcast, shard: tf.random.stateless_normal([3], shard),
            tf.TensorSpec([]),
            tf.TensorSpec([2], tf.int32),
        )
        seed = np.int32([1, 2])
        result = self.workers.run_sharded(computation, [seed], np.float32(0))
        np.testing.assert_allclose(
            result, tf.random.stateless_normal([3], seed), rtol=1e-6
        )

    def test_generators_are_refused(self):
        generator = tf.random.Generator.from_seed(1)
        spec = tf.TensorSpec([])
        with self.assertRaisesRegex(ValueError, "Generator"):
            runtimes.computation_from_function(
                lambda broadcast, shard: generator.normal([]), spec, spec
            )

    def test_a_generator_that_is_assigned_from_a_seed(self):
        generator = tf.random.Generator.from_seed(1)

        @tf.function
        def draw(broadcast, shard):
            generator.state.assign(shard)
            return generator.normal([2])

        computation = runtimes.computation_from_function(
            draw,
            tf.TensorSpec([]),
            tf.TensorSpec([3], tf.int64),
            assigned=[generator.state],
        )
        states = [np.int64([0, 0, key]) for key in (1, 2, 1)]
        one, two, three = self.workers.run_sharded(
            computation, states, np.float32(0), reduction="none"
        )
        np.testing.assert_array_equal(one, three)
        self.assertNotEqual(one[0], two[0])
        np.testing.assert_allclose(one, draw(0.0, tf.constant(states[0])), rtol=1e-6)

    def test_named_tuples_and_empty_parts(self):
        @tf.function
        def pair(broadcast, shard):
            return _Pair(
                _Pair(broadcast.first + shard.first, ()),
                [shard.second["b"], {}],
            )

        computation = runtimes.computation_from_function(
            pair,
            _Pair(tf.TensorSpec([]), ()),
            _Pair(tf.TensorSpec([2]), {"b": tf.TensorSpec([], tf.int32)}),
        )
        result = self.workers.run_sharded(
            computation,
            [_Pair(np.float32([1, 2]), {"b": np.int32(4)})] * 2,
            _Pair(np.float32(3), ()),
        )
        self.assertIsInstance(result, _Pair)
        self.assertIsInstance(result.first, _Pair)
        np.testing.assert_array_equal(result.first.first, [8, 10])
        self.assertEqual(result.first.second, ())
        self.assertEqual(result.second, [8, {}])

    def test_legacy_optimizers(self):
        optimizer = tf.keras.optimizers.legacy.SGD(0.5, momentum=0.5)
        variable = tf.Variable([1.0, 2.0])
        optimizer._create_all_weights([variable])

        @tf.function
        def step(broadcast, shard):
            variable.assign(broadcast)
            optimizer.apply_gradients([(shard, variable)])
            return tf.identity(variable)

        spec = tf.TensorSpec([2])
        computation = runtimes.computation_from_function(step, spec, spec)
        for _ in range(2):
            result = self.workers.run_sharded(
                computation, [np.float32([1, 2])], np.float32([5, 5])
            )
            np.testing.assert_allclose(result, [4.5, 4.0])

    def test_tables_are_refused(self):
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer([1], [2]), 0
        )
        spec = tf.TensorSpec([], tf.int32)
        with self.assertRaisesRegex(ValueError, "captures a resource"):
            runtimes.computation_from_function(
                lambda broadcast, shard: table.lookup(shard), spec, spec
            )


if __name__ == "__main__":
    tf.test.main()
