"""Whole rounds: noise per variable, replicas, XLA, chunks, hooks, traces."""

from __future__ import annotations

import concurrent.futures
import threading
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.engine import cohorts
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.datasets import ClientFailure, FederatedDataset
from tfdp_fl.engine import (
    chunks,
    dense_models,
    tracing,
)
from tfdp_fl.mechanisms import noise

_CLIP, _Z, _M = 0.4, 1.5, 2.0


@tf.keras.utils.register_keras_serializable("tfdp_fl_test")
class _Twins(tf.keras.layers.Layer):
    """Has two variables of one name and shape."""

    def build(self, shape):
        self.first = self.add_weight(name="w", shape=[shape[-1], 80])
        self.second = self.add_weight(name="w", shape=[shape[-1], 80])

    def call(self, x):
        return x @ self.first + x @ self.second


def _noise_models():
    """Returns `{name: (model, features of one client)}`, 64 outputs each."""
    layers = tf.keras.layers
    left, right = tf.keras.Input([3]), tf.keras.Input([5])
    return {
        "mlp": (
            tf.keras.Sequential(
                [
                    layers.Dense(80, "relu", input_shape=(10,)),
                    layers.Dense(64),
                ]
            ),
            np.ones([1, 10], np.float32),
        ),
        "cnn": (
            tf.keras.Sequential(
                [
                    layers.Conv2D(64, 3, input_shape=(5, 5, 2)),
                    layers.BatchNormalization(),
                    layers.GlobalAveragePooling2D(),
                    layers.Dense(64),
                ]
            ),
            np.ones([1, 5, 5, 2], np.float32),
        ),
        "lstm": (
            tf.keras.Sequential(
                [tf.keras.Input([3]), layers.Embedding(20, 8), layers.LSTM(64)]
            ),
            np.ones([1, 3], np.int32),
        ),
        "two_inputs": (
            tf.keras.Model(
                [left, right],
                layers.Dense(64)(layers.Concatenate()([left, right])),
            ),
            (np.ones([1, 3], np.float32), np.ones([1, 5], np.float32)),
        ),
        "same_name": (
            tf.keras.Sequential([tf.keras.Input([6]), _Twins()]),
            np.ones([1, 6], np.float32),
        ),
    }


class NoiseTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        name=["mlp", "cnn", "lstm", "two_inputs", "same_name"],
        site=["server"],
    )
    def test_every_variable_moves_by_noise_of_z_s_over_m(self, name, site):
        self._check_noise(name, site)

    def test_also_where_the_clients_add_it(self):
        self._check_noise("two_inputs", "client")

    def _check_noise(self, name, site):
        model, x = _noise_models()[name]
        outputs = model.output_shape[-1]
        y = np.zeros([1, outputs], np.float32)
        dataset = FederatedDataset.from_client_arrays({0: (x, y), 1: (x, y)})
        engine = cohorts.make_engine(
            model,
            dataset,
            loss="mse",
            mechanism=tfdp_fl.FixedClipping(
                clip_norm=_CLIP, noise_multiplier=_Z, noise_site=site
            ),
        )
        if name == "cnn":
            # Noise must not push a variance below zero while it is measured.
            for variable in model.non_trainable_variables:
                if "variance" in variable.name:
                    variable.assign(1e3 + variable)
        smallest = min(v.shape.num_elements() for v in model.weights)
        changes = []
        for round_index in range(-(-20_000 // smallest)):
            before = model.get_weights()
            cohorts.run_round(
                engine,
                dataset,
                batch_size=1,
                local_epochs=1,
                learning_rate=0.0,
                clients_per_round=_M,
                noise_multiplier=_Z,
                seed=np.array([7, round_index]),
            )
            changes.append(
                [
                    new.astype(np.float64) - old
                    for old, new in zip(before, model.get_weights(), strict=True)
                ]
            )
        self.assertLen(model.weights, len(changes[0]))
        for variable, parts in zip(
            model.weights, zip(*changes, strict=True), strict=True
        ):
            with self.subTest(variable.name):
                values = np.concatenate([np.ravel(part) for part in parts])
                if "moving" in variable.name:
                    # Training still moves statistics: by less, and clipped.
                    half = len(values) // 2
                    self.assertGreater(np.std(values), 0.5 * _Z * _CLIP / _M)
                    statistics.assert_uncorrelated(
                        values[:half], values[half : 2 * half]
                    )
                else:
                    statistics.assert_gaussian(values, _Z * _CLIP / _M)
        if name == "same_name":
            first, second = (
                np.concatenate([np.ravel(c[i]) for c in changes]) for i in range(2)
            )
            statistics.assert_uncorrelated(first, second)

    def test_rounds_do_not_repeat_and_seeds_do(self):
        moved = {}
        for label, seed in (("a", 1), ("again", 1), ("b", 2)):
            model, dataset = self._silent()
            engine = cohorts.make_engine(model, dataset, mechanism=_fixed())
            before = rounds.flat(model.get_weights())
            for _ in range(2):
                cohorts.run_round(
                    engine,
                    dataset,
                    learning_rate=0.0,
                    noise_multiplier=1.0,
                    seed=np.array([1, seed]),
                )
            moved[label] = rounds.flat(model.get_weights()) - before
        self.assertAllEqual(moved["a"], moved["again"])
        statistics.assert_uncorrelated(moved["a"], moved["b"])

    def _silent(self):
        arrays = cohorts.client_arrays((2, 2))
        return cohorts.mlp(200), FederatedDataset.from_client_arrays(arrays)

    def test_an_empty_cohort_is_pure_noise_divided_by_the_fixed_m(self):
        model = cohorts.mlp(3000)
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays((2, 2)))
        engine = cohorts.make_engine(model, dataset, mechanism=_fixed(), num_replicas=2)
        before = rounds.flat(model.get_weights())
        logs = cohorts.run_round(
            engine,
            dataset,
            positions=np.zeros(0, int),
            clients_per_round=8.0,
            noise_multiplier=3.0,
        )
        moved = rounds.flat(model.get_weights()) - before
        statistics.assert_gaussian(moved, 3.0 * 0.4 / 8)
        self.assertEqual(logs["mean_update_norm"], 0)

    def test_an_empty_first_cohort_has_no_exact_median(self):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays((2, 2, 2)))
        engine = cohorts.make_engine(
            cohorts.mlp(),
            dataset,
            mechanism=tfdp_fl.MedianClipping(noise_multiplier=1.0),
        )
        positions = np.zeros(0, int)
        logs = cohorts.run_round(
            engine, dataset, positions=positions, clients_per_round=8.0
        )
        self.assertEqual(logs["mean_update_norm"], 0)

    def test_denominator_is_the_fixed_m_however_many_come(self):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
        model = cohorts.mlp()
        engine = cohorts.make_engine(model, dataset, mechanism=_fixed(clip_norm=1e6))
        start = model.get_weights()
        moved = []
        for positions in ([0, 3], [0], [3]):
            model.set_weights(start)
            cohorts.run_round(
                engine,
                dataset,
                positions=np.array(positions),
                clients_per_round=7.0,
            )
            moved.append(rounds.flat(model.get_weights()) - rounds.flat(start))
        self.assertAllClose(moved[0], moved[1] + moved[2], atol=1e-6)


def _fixed(clip_norm=0.4, **arguments):
    return tfdp_fl.FixedClipping(clip_norm=clip_norm, noise_multiplier=1.0, **arguments)


def _mechanisms():
    return {
        "none": tfdp_fl.NoPrivacy(),
        "fixed": _fixed(0.1),
        "adaptive": tfdp_fl.AdaptiveClipping(
            noise_multiplier=0.1, count_noise_stddev=1.0
        ),
        "median": tfdp_fl.MedianClipping(noise_multiplier=1.0),
        "local": tfdp_fl.LocalDP(clip_norm=0.1, noise_multiplier=0.5),
        "nbafl": tfdp_fl.NbAFL(epsilon=50.0, constant=1.0, weight_clip=1.0),
    }


class InterruptTest(tf.test.TestCase):
    def test_what_an_interrupted_round_still_does_moves_no_other(self):
        # Its steps would be in the updates of clients that are charged.
        dataset = FederatedDataset.from_client_arrays(
            cohorts.client_arrays((5, 5, 5, 5))
        )
        one, other = (
            cohorts.make_engine(cohorts.mlp(), dataset, num_replicas=2)
            for _ in range(2)
        )
        prepared = tracing.CohortFunctions.prepared
        go_on, still = threading.Event(), []

        def slow(self, *arguments):
            call = prepared(self, *arguments)

            def train():
                if threading.current_thread() is threading.main_thread():
                    return call()
                go_on.wait(60)
                still.append(call())
                return still[-1]

            return train

        with (
            mock.patch.object(tracing.CohortFunctions, "prepared", slow),
            mock.patch.object(
                concurrent.futures, "wait", side_effect=KeyboardInterrupt
            ),
            self.assertRaises(KeyboardInterrupt),
        ):
            one.collect(dataset, cohorts.inputs(dataset))
        go_on.set()
        first, second = (
            engine.collect(dataset, cohorts.inputs(dataset)) for engine in (one, other)
        )
        self.assertLen(still, 1)
        for a, b in zip(
            tf.nest.flatten(first.sums), tf.nest.flatten(second.sums), strict=True
        ):
            self.assertAllEqual(a, b)


class SameResultTest(tf.test.TestCase, parameterized.TestCase):
    """However a cohort is run, the released model is the same."""

    def setUp(self):
        super().setUp()
        self.arrays = cohorts.client_arrays((7, 0, 3, 12, 5, 5))
        self.dataset = FederatedDataset.from_client_arrays(self.arrays)

    def _weights(self, mechanism, dataset=None, count=2, inputs=None, **options):
        model = cohorts.mlp()
        dataset = dataset or self.dataset
        engine = cohorts.make_engine(model, dataset, mechanism=mechanism, **options)
        logs = None
        for round_index in range(count):
            logs = cohorts.run_round(
                engine,
                dataset,
                round_index=round_index,
                noise_multiplier=mechanism.noise_multiplier_at(0),
                seed=np.array([5, round_index]),
                **(inputs or {}),
            )
        return rounds.flat(model.get_weights()), logs

    @parameterized.parameters("none", "adaptive", "local", "median", "nbafl")
    def test_on_one_replica_or_two(self, name):
        mechanism = _mechanisms()[name]
        one, one_logs = self._weights(mechanism)
        two, two_logs = self._weights(mechanism, num_replicas=2)
        self.assertAllClose(one, two, rtol=1e-4, atol=1e-6)
        self.assertAllClose(one_logs, two_logs, rtol=1e-4)

    def test_compiled_by_xla_or_not(self):
        # Equal clients: a batch that is short is never compiled by XLA.
        dataset = FederatedDataset.from_client_arrays(
            cohorts.client_arrays((10, 0, 5, 15))
        )
        for optimizer in (None, tf.keras.optimizers.Adam(0.1)):
            plain, logs = self._weights(_fixed(0.1), dataset, optimizer=optimizer)
            xla, xla_logs = self._weights(
                _fixed(0.1), dataset, optimizer=optimizer, jit_compile=True
            )
            self.assertAllClose(plain, xla, rtol=1e-4, atol=1e-6)
            self.assertAllClose(logs, xla_logs, rtol=1e-4)

    @parameterized.parameters("adaptive", "median")
    def test_from_memory_or_streamed_in_chunks(self, name):
        mechanism = _mechanisms()[name]
        streamed = FederatedDataset.from_client_fn(
            list(self.arrays), self.arrays.__getitem__
        )
        self.assertFalse(streamed.is_indexed)
        indexed, logs = self._weights(mechanism)
        with mock.patch.object(chunks, "CHUNK_BYTES", 150):
            chunked, chunked_logs = self._weights(mechanism, streamed, num_replicas=2)
        self.assertAllClose(indexed, chunked, rtol=1e-4, atol=1e-6)
        self.assertAllClose(logs, chunked_logs, rtol=1e-4)

    def test_streamed_to_xla(self):
        streamed = FederatedDataset.from_client_fn(
            list(self.arrays), self.arrays.__getitem__
        )
        options = {"batch_size": 1}  # No batch is short, so XLA compiles all.
        compiled, logs = self._weights(
            _mechanisms()["fixed"],
            streamed,
            jit_compile=True,
            inputs=options,
        )
        plain, plain_logs = self._weights(_mechanisms()["fixed"], inputs=options)
        self.assertAllClose(compiled, plain, rtol=1e-4, atol=1e-6)
        self.assertAllClose(logs, plain_logs, rtol=1e-4)

    def test_median_clipping_in_chunks(self):
        mechanism = _mechanisms()["median"]
        whole, _ = self._weights(mechanism)
        with mock.patch.object(chunks, "CHUNK_BYTES", 4 * 51 * 2):
            parts, _ = self._weights(mechanism)
        self.assertAllClose(whole, parts, rtol=1e-4, atol=1e-6)

    def test_with_a_clip_far_away_it_is_plain_averaging(self):
        plain, _ = self._weights(_mechanisms()["none"])
        far = tfdp_fl.FixedClipping(clip_norm=1e6, noise_multiplier=0.0)
        fixed, _ = self._weights(far)
        self.assertAllClose(plain, fixed, rtol=1e-5, atol=1e-7)

    def test_shuffled_examples_repeat_with_the_generator(self):
        def shuffled(seed):
            return self._weights(
                _mechanisms()["none"],
                count=1,
                inputs={"shuffle": np.random.default_rng(seed)},
            )[0]

        first = shuffled(0)
        self.assertAllEqual(first, shuffled(0))
        self.assertNotAllEqual(first, shuffled(1))


def _mixes(x):
    return x - tf.reduce_mean(x, axis=0)


def _wide_clients(examples, count=3):
    rng = np.random.default_rng(0)
    return {
        k: (
            rng.normal(size=(examples, 40)).astype(np.float32),
            rng.integers(0, 3, examples),
        )
        for k in range(count)
    }


def _linear():
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(40,))])


class SideBySideTest(tf.test.TestCase, parameterized.TestCase):
    """Dense models, all clients side by side: the same local SGD."""

    def _engine(self, model, dataset, jit_compile, loss=None, **options):
        with mock.patch.object(dense_models, "is_worthwhile", lambda *args: True):
            return cohorts.make_engine(
                model, dataset, jit_compile=jit_compile, loss=loss, **options
            )

    def _moved(self, arrays, jit_compile, mechanism, *, loss=None, **changes):
        model = changes.pop("model", cohorts.mlp)()
        dataset = FederatedDataset.from_client_arrays(arrays)
        engine = self._engine(
            model,
            dataset,
            jit_compile,
            loss,
            mechanism=mechanism,
            training={"metrics": ["accuracy"]},
        )
        before = [w.astype(np.float64) for w in model.get_weights()]
        with mock.patch.object(dense_models, "is_worthwhile", lambda *args: True):
            logs = cohorts.run_round(engine, dataset, **changes)
        used = engine.has_trained_side_by_side
        self.assertEqual(used, jit_compile is None)
        moved = [
            new - old for old, new in zip(before, model.get_weights(), strict=True)
        ]
        return moved, logs

    @parameterized.product(
        mechanism=["none", "fixed", "adaptive"], sizes=[(5, 5, 5), (7, 0, 3, 5)]
    )
    def test_is_what_the_general_engine_does(self, mechanism, sizes):
        arrays = cohorts.client_arrays(sizes)
        mechanism = _mechanisms()[mechanism]
        fast, fast_logs = self._moved(arrays, None, mechanism)
        slow, slow_logs = self._moved(arrays, False, mechanism)
        for one, other in zip(fast, slow, strict=True):
            self.assertAllClose(one, other, rtol=1e-4, atol=1e-6)
        self.assertAllClose(fast_logs, slow_logs, rtol=1e-4)

    def _use_bfloat16(self):
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
        self.addCleanup(tf.keras.mixed_precision.set_global_policy, "float32")

    def test_a_step_in_bfloat16_is_kerass_before_it_rounds_the_update(self):
        self._use_bfloat16()
        arrays = _wide_clients(4)
        fast, slow = (
            self._moved(
                arrays,
                jit_compile,
                _mechanisms()["none"],
                model=_linear,
                batch_size=4,
                local_epochs=1,
            )[0]
            for jit_compile in (None, False)
        )
        for one, other in zip(fast, slow, strict=True):
            # Keras rounds each client's, here 3, and adds up its examples.
            largest = np.abs(other).max()
            self.assertAllClose(one, other, rtol=0, atol=2**-8 * largest)
            self.assertNotAllClose(one, other, rtol=0, atol=2**-14 * largest)

    def test_an_update_in_bfloat16_is_a_product_in_float32(self):
        # Of one example as bfloat16 has it: rows are multiples of each other.
        self._use_bfloat16()
        arrays = _wide_clients(1, count=1)
        (kernel, _), _ = self._moved(
            arrays,
            None,
            _mechanisms()["none"],
            model=_linear,
            batch_size=1,
            local_epochs=1,
            learning_rate=10.0,
            clients_per_round=1.0,
        )
        (x,) = arrays[0][0]
        rounded = tf.cast(tf.cast(x, tf.bfloat16), tf.float64).numpy()
        self.assertNotAllClose(x, rounded, rtol=1e-4)
        for column in kernel.T:
            self.assertGreater(abs(column[0]), 1e-3)
            self.assertAllClose(column / column[0], rounded / rounded[0], rtol=1e-4)

    @parameterized.parameters("none", "fixed")
    def test_in_bfloat16_it_is_near_the_general_engine(self, mechanism):
        arrays = cohorts.client_arrays((7, 0, 3, 5))
        mechanism = _mechanisms()[mechanism]
        exact, _ = self._moved(arrays, None, mechanism)
        self._use_bfloat16()
        for jit_compile in (None, False):
            moved, logs = self._moved(arrays, jit_compile, mechanism)
            for one, other in zip(moved, exact, strict=True):
                self.assertAllClose(one, other, rtol=0, atol=0.05 * np.abs(other).max())
            self.assertEqual(logs["discarded_clients"], 0)

    def _rounds(self, jit_compile, count=3):
        """Returns the weights and logs after some rounds of seven clients."""
        model = cohorts.mlp()
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays([5] * 7))
        engine = self._engine(
            model,
            dataset,
            jit_compile,
            mechanism=_mechanisms()["fixed"],
            training={"metrics": ["accuracy"]},
            num_replicas=2,
        )
        with mock.patch.object(dense_models, "is_worthwhile", lambda *args: True):
            logs = [cohorts.run_round(engine, dataset) for _ in range(count)]
        return model.get_weights(), logs, engine

    def test_a_few_at_a_time_is_the_same(self):
        with mock.patch.multiple(
            dense_models,
            clients_at_once=lambda *_: 2,
            is_small=lambda *_: False,
        ):
            fast, fast_logs, engine = self._rounds(None)
        self.assertEqual(
            {way.kind for way, _ in engine.functions.traced},
            {"side by side"},
        )
        slow, slow_logs, _ = self._rounds(False)
        for one, other in zip(fast, slow, strict=True):
            self.assertAllClose(one, other, rtol=1e-4, atol=1e-6)
        for one, other in zip(fast_logs, slow_logs, strict=True):
            self.assertAllClose(one, other, rtol=1e-4)

    def test_what_was_added_up_stays_when_the_next_cohort_trains(self):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays([5] * 7))
        engine = self._engine(
            cohorts.mlp(), dataset, None, mechanism=_mechanisms()["fixed"]
        )
        with mock.patch.multiple(
            dense_models,
            is_worthwhile=lambda *_: True,
            clients_at_once=lambda *_: 2,
        ):
            first = engine.collect(dataset, cohorts.inputs(dataset))
            (total,) = first.sums
            before = [each.numpy().copy() for each in total.contribution.update]
            engine.collect(dataset, cohorts.inputs(dataset, positions=np.arange(3)))
        for was, now in zip(before, total.contribution.update, strict=True):
            self.assertAllEqual(was, now)

    def test_a_bad_client_becomes_zero_and_nobody_else_notices(self):
        good = cohorts.client_arrays((5, 5, 5))
        bad = {k: (x.copy(), y) for k, (x, y) in good.items()}
        bad[1][0][2, 1] = np.nan
        without = {k: v for k, v in good.items() if k != 1}
        moved, logs = self._moved(bad, None, _fixed(0.1), clients_per_round=3.0)
        expected, _ = self._moved(without, None, _fixed(0.1), clients_per_round=3.0)
        self.assertEqual(logs["discarded_clients"], 1)
        for one, other in zip(moved, expected, strict=True):
            self.assertAllClose(one, other, rtol=1e-4, atol=1e-7)

    @parameterized.parameters(0.0, 1e-5, 1e-4, 1e-3, 1e-2)
    def test_the_clip_holds_where_a_clients_steps_cancel_out(self, epsilon):
        # Large and nearly equal examples with opposite labels: the squared
        # norm is a small difference of large Gram products.
        rng = np.random.default_rng(0)
        base = rng.normal(size=[1, 300])
        x = 50 * (base + epsilon * rng.normal(size=[20, 300]))
        y = np.arange(20) % 2

        def model():
            tf.keras.utils.set_random_seed(0)
            return tf.keras.Sequential(
                [
                    tf.keras.layers.Dense(
                        2, input_shape=(300,), kernel_initializer="zeros"
                    )
                ]
            )

        arrays = {0: (x.astype(np.float32), y)}
        for clip in (1e-4, 1e-3, 1e-2):
            moved, _ = self._moved(
                arrays,
                None,
                _fixed(clip),
                model=model,
                batch_size=20,
                local_epochs=1,
                learning_rate=0.01,
                clients_per_round=1.0,
            )
            self.assertLessEqual(references.l2_norm(moved), clip * 1.001)

    @parameterized.named_parameters(
        ("loss", "loss"), ("activation", "activation"), ("layer", "layer")
    )
    def test_what_may_mix_clients_is_trained_one_by_one(self, where):
        def loss(y, predicted):
            return tf.reduce_mean(tf.abs(_mixes(predicted)))

        layers = tf.keras.layers
        model = tf.keras.Sequential(
            [
                layers.Dense(
                    6,
                    activation=_mixes if where == "activation" else "tanh",
                    input_shape=(4,),
                ),
                layers.Activation(_mixes if where == "layer" else "linear"),
                layers.Dense(3),
            ]
        )
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays((5, 5)))
        engine = self._engine(
            model, dataset, None, loss=loss if where == "loss" else None
        )
        self.assertIsNone(engine.layout.kernels)


class RetracingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("adaptive", "median")
    def test_cohorts_of_changing_size_trace_once(self, name):
        model = tf.keras.Sequential([tf.keras.Input([4]), _Counting()])
        dataset = FederatedDataset.from_client_arrays(
            cohorts.client_arrays((5, 7, 0, 12, 3, 5, 5, 5))
        )
        mechanism = _mechanisms()[name]
        engine = cohorts.make_engine(
            model, dataset, mechanism=mechanism, num_replicas=2
        )

        def run(positions):
            cohorts.run_round(
                engine,
                dataset,
                positions=np.array(positions, int),
                noise_multiplier=mechanism.noise_multiplier_at(0),
                seed=np.array([len(positions), 3]),
            )

        # Both kinds of function: with batches of one size and of several.
        for positions in ([0, 1, 2], [0, 5, 6], [], [1, 3]):
            run(positions)
        traced = _Counting.calls
        for positions in ([], [1], [0], [2], [1, 2, 3, 4], range(8), [3, 4]):
            run(positions)
        self.assertEqual(_Counting.calls, traced)


@tf.keras.utils.register_keras_serializable("tfdp_fl_test")
class _Counting(tf.keras.layers.Dense):
    """Counts how often Python runs it: once a trace."""

    calls = 0

    def __init__(self, units=3, **kwargs):
        super().__init__(units, **kwargs)

    def call(self, x):
        _Counting.calls += 1
        return super().call(x)


class MomentsTest(tf.test.TestCase):
    def test_variance_and_scale_are_those_of_the_unclipped_updates(self):
        arrays = cohorts.client_arrays()
        dataset = FederatedDataset.from_client_arrays(arrays)
        for mechanism in (_fixed(1e-3), _mechanisms()["median"]):
            model = cohorts.mlp()
            updates = [
                cohorts.reference_update(
                    model,
                    client,
                    tf.keras.optimizers.SGD(0.1),
                    cohorts.cross_entropy(),
                )
                for client in arrays.values()
            ]
            engine = cohorts.make_engine(
                model,
                dataset,
                mechanism=mechanism,
                moments=True,
                num_replicas=2,
            )
            logs = cohorts.run_round(engine, dataset)
            variance, scale = references.variance_and_scale(updates)
            self.assertAllClose(logs["between_client_variance"], variance, rtol=1e-4)
            self.assertAllClose(logs["update_scale"], scale, rtol=1e-4)

    def test_nobody_took_part(self):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
        engine = cohorts.make_engine(
            cohorts.mlp(), dataset, mechanism=_fixed(), moments=True
        )
        logs = cohorts.run_round(engine, dataset, positions=np.zeros(0, int))
        self.assertEqual(logs["between_client_variance"], 0)
        self.assertEqual(logs["update_scale"], 0)


class ClientTest(tf.test.TestCase):
    def test_a_client_with_bad_data_counts_as_zero(self):
        arrays = cohorts.client_arrays((5, 5, 5))
        arrays[1][0][0, 0] = np.inf
        dataset = FederatedDataset.from_client_arrays(arrays)
        for mechanism in (_fixed(), _mechanisms()["median"]):
            model = cohorts.mlp()
            engine = cohorts.make_engine(model, dataset, mechanism=mechanism)
            logs = cohorts.run_round(engine, dataset)
            self.assertEqual(logs["discarded_clients"], 1)
            self.assertTrue(np.isfinite(rounds.flat(model.get_weights())).all())

    def test_a_client_that_cannot_be_read_is_left_out_and_reported(self):
        arrays = cohorts.client_arrays((5, 5, 5))

        def read(client):
            if client == 1:
                raise OSError("gone")
            return arrays[client]

        dataset = FederatedDataset.from_client_fn(
            [0, 1, 2],
            read,
            element_spec=FederatedDataset.from_client_arrays(arrays).element_spec,
        )
        for mechanism in (_fixed(1e6), _mechanisms()["median"]):
            model = cohorts.mlp()
            engine = cohorts.make_engine(model, dataset, mechanism=mechanism)
            pending = engine.collect(dataset, cohorts.inputs(dataset))
            self.assertLen(pending.failures, 1)
            self.assertIsInstance(pending.failures[0], ClientFailure)
            self.assertEqual(pending.failures[0].position, 1)
            self.assertEqual(
                sum(float(each.contribution.weight) for each in pending.sums), 2
            )
            engine.release(pending)

    def test_one_client_moves_the_model_by_at_most_s_over_m(self):
        arrays = cohorts.client_arrays((5, 5, 5))
        model = cohorts.mlp()
        start = model.get_weights()
        ends = []
        for factor in (1.0, 1e6):
            x, y = arrays[0]
            changed = {**arrays, 0: (x * factor, y)}
            model.set_weights(start)
            dataset = FederatedDataset.from_client_arrays(changed)
            engine = cohorts.make_engine(model, dataset, mechanism=_fixed(0.01))
            cohorts.run_round(engine, dataset, clients_per_round=4.0)
            ends.append(rounds.flat(model.get_weights()).astype(float))
        self.assertLessEqual(np.linalg.norm(ends[1] - ends[0]), 2 * 0.01 / 4 * 1.001)

    def test_collect_leaves_model_and_state_alone(self):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
        model = cohorts.mlp()
        engine = cohorts.make_engine(
            model, dataset, mechanism=_mechanisms()["adaptive"]
        )
        before, state = model.get_weights(), engine.state
        pending = engine.collect(dataset, cohorts.inputs(dataset))
        self.assertAllEqual(rounds.flat(before), rounds.flat(model.get_weights()))
        self.assertIs(engine.state, state)
        engine.release(pending)
        self.assertNotEqual(float(engine.state.clip_norm), float(state.clip_norm))


class HookTest(tf.test.TestCase):
    def test_broadcast_hook_changes_what_clients_receive_only(self):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
        seeds = []

        def hook(weights, seed):
            seeds.append(seed)
            return [
                v + 0.1 * tf.random.stateless_normal(v.shape, seed) for v in weights
            ]

        def moved(num_replicas, broadcast_hook, seed):
            model = cohorts.mlp()
            before = rounds.flat(model.get_weights())
            engine = cohorts.make_engine(
                model,
                dataset,
                num_replicas=num_replicas,
                broadcast_hook=broadcast_hook,
            )
            cohorts.run_round(engine, dataset, seed=np.array([1, seed]))
            return rounds.flat(model.get_weights()) - before

        one = moved(1, hook, 1)
        self.assertAllClose(one, moved(2, hook, 1), rtol=1e-4, atol=1e-6)
        self.assertNotAllClose(one, moved(1, hook, 2))
        self.assertNotAllClose(one, moved(1, None, 1))
        # An update is what the client changed, not the hook.
        self.assertAllClose(one, moved(1, None, 1), atol=0.1)

    def test_an_upload_hook_draws_noise_of_its_own_for_every_client(self):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays((2, 2)))
        model = cohorts.mlp(3000)
        engine = cohorts.make_engine(
            model,
            dataset,
            collect_records=True,
            training={"upload_hook": lambda u: noise.add_normal(u, 0.3)},
        )
        pending = engine.collect(dataset, cohorts.inputs(dataset, learning_rate=0.0))
        ((_, collected),) = pending.collected[0]
        one, other = collected.updates.numpy()
        statistics.assert_gaussian(one, 0.3)
        statistics.assert_gaussian(other, 0.3)
        statistics.assert_uncorrelated(one, other)


class WindowTest(tf.test.TestCase):
    def test_adaptive_local_dp_returns_the_norms_before_noise(self):
        arrays = cohorts.client_arrays()
        dataset = FederatedDataset.from_client_arrays(arrays)
        model = cohorts.mlp()
        engine = cohorts.make_engine(
            model,
            dataset,
            mechanism=tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5),
            num_replicas=2,
        )
        updates = [
            cohorts.reference_update(
                model,
                client,
                tf.keras.optimizers.SGD(0.1),
                cohorts.cross_entropy(),
            )
            for client in arrays.values()
        ]
        windows = np.full([4, 3, 4], np.nan, np.float32)
        pending = engine.collect(dataset, cohorts.inputs(dataset, windows=windows))
        self.assertAllClose(
            pending.window_norms,
            [[np.linalg.norm(v) for v in update] for update in updates],
            rtol=1e-4,
        )
        engine.release(pending)

    def test_every_client_uses_its_own_window(self):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays((2, 2)))
        engine = cohorts.make_engine(
            cohorts.mlp(3000),
            dataset,
            mechanism=tfdp_fl.AdaptiveLocalDP(
                epsilon=8.0, delta=1e-5, layers="separate"
            ),
            collect_records=True,
        )
        windows = np.full([2, 3, 4], 0.5, np.float32)
        windows[1] = 0.1
        pending = engine.collect(
            dataset,
            cohorts.inputs(dataset, learning_rate=0.0, windows=windows),
        )
        ((_, collected),) = pending.collected[0]
        zeta = references.analytic_sigma(1.0, 8.0, 1e-5) * 3**0.5
        for update, radius in zip(collected.updates.numpy(), (0.5, 0.1), strict=True):
            statistics.assert_gaussian(update, 2 * radius * zeta)


if __name__ == "__main__":
    tf.test.main()
