"""Whole rounds: denominators, threads, XLA, chunks, hooks, traces."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.engine import cohorts
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.datasets import ClientFailure, FederatedDataset
from tfdp_fl.engine import chunks, dense_models, program
from tfdp_fl.mechanisms import noise


def _fixed(clip_norm=0.4, **arguments):
    return tfdp_fl.FixedClipping(clip_norm=clip_norm, noise_multiplier=1.0, **arguments)


def _mechanism(name):
    return {
        "none": tfdp_fl.NoPrivacy(),
        "fixed": _fixed(0.1),
        "tight": _fixed(0.01),
        "adaptive": tfdp_fl.AdaptiveClipping(
            noise_multiplier=0.1, count_noise_stddev=1.0
        ),
        "median": tfdp_fl.MedianClipping(noise_multiplier=1.0),
    }[name]


_ADAM = tf.keras.optimizers.Adam(0.1)


def _dataset(sizes=cohorts.SIZES):
    return FederatedDataset.from_client_arrays(cohorts.client_arrays(sizes))


@functools.cache
def _engine(name="fixed", units=6, **options):
    """Returns a model and its engine, the same ones for the same options."""
    model = cohorts.mlp(units)
    made = cohorts.make_engine(model, _dataset(), mechanism=_mechanism(name), **options)
    return model, made


def _round(dataset, *, count=1, engine=None, **inputs):
    """Returns how rounds move a model from its first weights, and the last logs."""
    model, made = engine or _engine()
    start = cohorts.mlp(model.layers[0].units).get_weights()
    model.set_weights(start)
    made.state = made.query.initial_global_state()
    for round_index in range(count):
        options = {"seed": np.array([5, round_index]), **inputs}
        logs = cohorts.run_round(made, dataset, round_index=round_index, **options)
    return rounds.flat(model.get_weights()) - rounds.flat(start), logs


@tf.keras.utils.register_keras_serializable("tfdp_fl_test")
class _Twins(tf.keras.layers.Layer):
    """Has two variables of one name and shape."""

    def build(self, shape):
        self.first = self.add_weight(name="w", shape=[shape[-1], 8000])
        self.second = self.add_weight(name="w", shape=[shape[-1], 8000])

    def call(self, x):
        return x @ self.first + x @ self.second


class NoiseTest(tf.test.TestCase):
    def test_variables_of_one_name_have_noise_of_their_own(self):
        model = tf.keras.Sequential([tf.keras.Input([3]), _Twins()])
        clients = {0: (np.ones([1, 3], np.float32), np.zeros([1, 8000], np.float32))}
        dataset = FederatedDataset.from_client_arrays(clients)
        engine = cohorts.make_engine(model, dataset, loss="mse", mechanism=_fixed())
        before = model.get_weights()
        cohorts.run_round(engine, dataset, learning_rate=0.0, noise_multiplier=1.5)
        first, second = (
            np.ravel(new.astype(np.float64) - old)
            for old, new in zip(before, model.get_weights(), strict=True)
        )
        for moved in (first, second):
            statistics.assert_gaussian(moved, 1.5 * 0.4)
        statistics.assert_uncorrelated(first, second)

    def test_rounds_do_not_repeat_and_seeds_do(self):
        moved = [
            _round(
                _dataset(),
                count=2,
                engine=_engine(units=200),
                learning_rate=0.0,
                noise_multiplier=1.0,
                seed=np.array([1, seed]),
            )[0]
            for seed in (1, 1, 2)
        ]
        self.assertAllEqual(moved[0], moved[1])
        statistics.assert_uncorrelated(moved[0], moved[2])

    def test_an_empty_cohort_is_pure_noise_divided_by_the_fixed_m(self):
        moved, logs = _round(
            _dataset(),
            engine=_engine(units=3000, num_replicas=2),
            positions=np.zeros(0, int),
            clients_per_round=8.0,
            noise_multiplier=3.0,
        )
        statistics.assert_gaussian(moved, 3.0 * 0.1 / 8)
        self.assertEqual(logs["mean_update_norm"], 0)

    def test_an_empty_first_cohort_has_no_exact_median(self):
        nobody = np.zeros(0, int)
        _, logs = _round(_dataset(), engine=_engine("median"), positions=nobody)
        self.assertEqual(logs["mean_update_norm"], 0)


class InterruptTest(tf.test.TestCase):
    def test_what_an_interrupted_round_still_does_moves_no_other(self):
        # Its steps would be in the updates of clients that are charged.
        dataset = _dataset((5, 5, 5, 5))
        one, other = (
            cohorts.make_engine(cohorts.mlp(), dataset, num_replicas=2)
            for _ in range(2)
        )
        call = program.Program.__call__
        go_on, still = threading.Event(), []

        def slow(self, *arguments):
            if threading.current_thread() is threading.main_thread():
                return call(self, *arguments)
            go_on.wait(60)
            still.append(call(self, *arguments))
            return still[-1]

        with (
            mock.patch.object(program.Program, "__call__", slow),
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

    def _assert_same(self, one, other):
        self.assertAllClose(one[0], other[0], rtol=1e-4, atol=1e-6)
        self.assertAllClose(one[1], other[1], rtol=1e-4)

    @parameterized.parameters("adaptive", "median")
    def test_on_threads_in_parts_or_streamed_in_chunks(self, name):
        arrays = cohorts.client_arrays((7, 0, 3, 12, 5, 5))
        dataset = FederatedDataset.from_client_arrays(arrays)
        streamed = FederatedDataset.from_client_fn(list(arrays), arrays.__getitem__)
        self.assertFalse(streamed.is_indexed)
        options = {"count": 2, "noise_multiplier": 0.1}
        usual = _round(dataset, engine=_engine(name), **options)
        threads = _engine(name, num_replicas=2)
        self._assert_same(_round(dataset, engine=threads, **options), usual)
        with mock.patch.object(chunks, "CHUNK_BYTES", 4 * 51 * 2):
            self._assert_same(_round(dataset, engine=_engine(name), **options), usual)
        with mock.patch.object(chunks, "CHUNK_BYTES", 150):
            self._assert_same(_round(streamed, engine=threads, **options), usual)

    def test_compiled_by_xla_or_not(self):
        # Equal clients: a batch that is short is never compiled by XLA.
        arrays = cohorts.client_arrays((10, 0, 5, 15))
        dataset = FederatedDataset.from_client_arrays(arrays)
        streamed = FederatedDataset.from_client_fn(list(arrays), arrays.__getitem__)
        results = [
            _round(
                clients,
                count=2,
                engine=_engine(optimizer=_ADAM, jit_compile=jit_compile),
            )
            for clients, jit_compile in (
                (dataset, False),
                (dataset, True),
                (streamed, True),
            )
        ]
        for result in results[1:]:
            self._assert_same(result, results[0])

    def test_what_xla_compiles_serves_clients_of_any_length(self):
        # A slice of a length that is not constant would be compiled for each one.
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays((5, 10)))
        _, engine = _engine(optimizer=_ADAM, jit_compile=True)
        cohorts.run_round(engine, dataset)
        (program,) = (
            program
            for strategy, program in engine.programs.traced.items()
            if strategy.xla
        )
        for function in program.definition.library.function:
            constants = {n.name for n in function.node_def if n.op == "Const"}
            for node in function.node_def:
                if node.op == "StridedSlice" and not node.attr["shrink_axis_mask"].i:
                    bounds = {name.split(":")[0] for name in node.input[1:3]}
                    self.assertContainsSubset(bounds, constants, node.name)

    def test_shuffled_examples_repeat_with_the_generator(self):
        first, again, other = (
            _round(_dataset(), shuffle=np.random.default_rng(seed))[0]
            for seed in (0, 0, 1)
        )
        self.assertAllEqual(first, again)
        self.assertNotAllEqual(first, other)


def _mixes(x):
    return x - tf.reduce_mean(x, axis=0)


def _linear():
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(40,))])


def _wide_clients(examples, count=3):
    rng = np.random.default_rng(0)
    return {
        k: (
            rng.normal(size=(examples, 40)).astype(np.float32),
            rng.integers(0, 3, examples),
        )
        for k in range(count)
    }


class SideBySideTest(tf.test.TestCase, parameterized.TestCase):
    """Dense models, all clients side by side: the same local SGD."""

    def setUp(self):
        super().setUp()
        self.enter_context(
            mock.patch.object(dense_models, "is_worthwhile", lambda *_: True)
        )

    def _both(self, dataset, name="fixed", **options):
        """Returns a round side by side, and one by one."""
        results = []
        for jit_compile in (None, False):
            engine = _engine(name, num_replicas=2, jit_compile=jit_compile)
            results.append(_round(dataset, engine=engine, **options))
            self.assertEqual(engine[1].has_trained_side_by_side, jit_compile is None)
        return results

    @parameterized.product(
        mechanism=["none", "fixed", "adaptive"], sizes=[(5, 5, 5), (7, 0, 3, 5)]
    )
    def test_is_what_the_general_engine_does(self, mechanism, sizes):
        fast, slow = self._both(_dataset(sizes), mechanism)
        self.assertAllClose(fast[0], slow[0], rtol=1e-4, atol=1e-6)
        self.assertAllClose(fast[1], slow[1], rtol=1e-4)

    def test_a_few_at_a_time_is_the_same(self):
        with mock.patch.multiple(
            dense_models, clients_at_once=lambda *_: 2, is_small=lambda *_: False
        ):
            fast, slow = self._both(_dataset([5] * 7), count=3)
        self.assertAllClose(fast[0], slow[0], rtol=1e-4, atol=1e-6)
        self.assertAllClose(fast[1], slow[1], rtol=1e-4)

    def test_what_was_added_up_stays_when_the_next_cohort_trains(self):
        dataset = _dataset([5] * 7)
        _, engine = _engine(num_replicas=2, jit_compile=None)
        with mock.patch.object(dense_models, "clients_at_once", lambda *_: 2):
            (total,) = engine.collect(dataset, cohorts.inputs(dataset)).sums
            before = [part.numpy().copy() for part in total.contribution.update]
            engine.collect(dataset, cohorts.inputs(dataset, positions=np.arange(3)))
        for was, now in zip(before, total.contribution.update, strict=True):
            self.assertAllEqual(was, now)

    def test_a_bad_client_becomes_zero_and_nobody_else_notices(self):
        good = cohorts.client_arrays((5, 5, 5))
        without = FederatedDataset.from_client_arrays({0: good[0], 2: good[2]})
        good[1][0][2, 1] = np.nan
        bad = FederatedDataset.from_client_arrays(good)
        (moved, logs), _ = self._both(bad, clients_per_round=3.0)
        (expected, _), _ = self._both(without, clients_per_round=3.0)
        self.assertEqual(logs["discarded_clients"], 1)
        self.assertAllClose(moved, expected, rtol=1e-4, atol=1e-7)

    def test_the_clip_holds_where_a_clients_steps_cancel_out(self):
        # Large and nearly equal examples with opposite labels: the squared
        # norm is a small difference of large Gram products.
        model = tf.keras.Sequential(
            [tf.keras.layers.Dense(2, input_shape=(300,), kernel_initializer="zeros")]
        )
        for clip in (1e-4, 1e-3, 1e-2):
            engine = None
            for epsilon in (0.0, 1e-5, 1e-4, 1e-3, 1e-2):
                rng = np.random.default_rng(0)
                base = rng.normal(size=[1, 300])
                x = 50 * (base + epsilon * rng.normal(size=[20, 300]))
                dataset = FederatedDataset.from_client_arrays(
                    {0: (x.astype(np.float32), np.arange(20) % 2)}
                )
                engine = engine or cohorts.make_engine(
                    model, dataset, jit_compile=None, mechanism=_fixed(clip)
                )
                inputs = cohorts.inputs(
                    dataset, batch_size=20, local_epochs=1, learning_rate=0.01
                )
                (total,) = engine.collect(dataset, inputs).sums
                moved = [part.numpy() for part in total.contribution.update]
                self.assertLessEqual(references.l2_norm(moved), clip * 1.001)
            self.assertTrue(engine.has_trained_side_by_side)

    @parameterized.parameters("loss", "activation", "layer")
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
        engine = cohorts.make_engine(
            model,
            _dataset((5, 5)),
            jit_compile=None,
            loss=loss if where == "loss" else None,
        )
        self.assertIsNone(engine.layout.kernels)

    def _in_bfloat16(self, arrays, jit_compile, **changes):
        """Returns how a round moves a linear model."""
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
        self.addCleanup(tf.keras.mixed_precision.set_global_policy, "float32")
        model, dataset = _linear(), FederatedDataset.from_client_arrays(arrays)
        engine = cohorts.make_engine(model, dataset, jit_compile=jit_compile)
        before = [w.astype(np.float64) for w in model.get_weights()]
        cohorts.run_round(engine, dataset, local_epochs=1, **changes)
        self.assertEqual(engine.has_trained_side_by_side, jit_compile is None)
        return [b - a for a, b in zip(before, model.get_weights(), strict=True)]

    def test_a_step_in_bfloat16_is_kerass_before_it_rounds_the_update(self):
        fast, slow = (
            self._in_bfloat16(_wide_clients(4), jit_compile, batch_size=4)
            for jit_compile in (None, False)
        )
        for one, other in zip(fast, slow, strict=True):
            # Keras rounds each client's, here 3, and adds up its examples.
            largest = np.abs(other).max()
            self.assertAllClose(one, other, rtol=0, atol=2**-8 * largest)
            self.assertNotAllClose(one, other, rtol=0, atol=2**-14 * largest)

    def test_an_update_in_bfloat16_is_a_product_in_float32(self):
        # Of one example as bfloat16 has it: rows are multiples of each other.
        arrays = _wide_clients(1, count=1)
        kernel, _ = self._in_bfloat16(arrays, None, batch_size=1, learning_rate=10.0)
        (x,) = arrays[0][0]
        rounded = tf.cast(tf.cast(x, tf.bfloat16), tf.float64).numpy()
        self.assertNotAllClose(x, rounded, rtol=1e-4)
        for column in kernel.T:
            self.assertGreater(abs(column[0]), 1e-3)
            self.assertAllClose(column / column[0], rounded / rounded[0], rtol=1e-4)


@tf.keras.utils.register_keras_serializable("tfdp_fl_test")
class _Counting(tf.keras.layers.Dense):
    """Counts how often Python runs it: once a trace."""

    calls = 0

    def __init__(self, units=3, **kwargs):
        super().__init__(units, **kwargs)

    def call(self, x):
        _Counting.calls += 1
        return super().call(x)


class RetracingTest(tf.test.TestCase):
    def test_cohorts_of_changing_size_trace_once(self):
        model = tf.keras.Sequential([tf.keras.Input([4]), _Counting()])
        dataset = _dataset((5, 7, 0, 12, 3, 5, 5, 5))
        engine = cohorts.make_engine(
            model, dataset, mechanism=_mechanism("median"), num_replicas=2
        )

        def run(positions):
            seed = np.array([len(positions), 3])
            positions = np.array(positions, int)
            cohorts.run_round(engine, dataset, positions=positions, seed=seed)

        # Both kinds of program: with batches of one size and of several.
        for positions in ([0, 1, 2], [0, 5, 6], [], [1, 3]):
            run(positions)
        traced = _Counting.calls
        for positions in ([], [1], [0], [2], [1, 2, 3, 4], range(8), [3, 4]):
            run(positions)
        self.assertEqual(_Counting.calls, traced)


def _reference_updates(arrays):
    """Returns each client's update, by a plain Keras loop."""
    model, loss = cohorts.mlp(), cohorts.cross_entropy()
    return [
        cohorts.reference_update(model, client, tf.keras.optimizers.SGD(0.1), loss)
        for client in arrays.values()
    ]


class MomentsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("fixed", "median")
    def test_variance_and_scale_are_those_of_the_unclipped_updates(self, name):
        updates = _reference_updates(cohorts.client_arrays())
        engine = _engine(name, moments=True, num_replicas=2)
        _, logs = _round(_dataset(), engine=engine)
        variance, scale = references.variance_and_scale(updates)
        self.assertAllClose(logs["between_client_variance"], variance, rtol=1e-4)
        self.assertAllClose(logs["update_scale"], scale, rtol=1e-4)
        _, logs = _round(_dataset(), engine=engine, positions=np.zeros(0, int))
        self.assertEqual(logs["between_client_variance"], 0)
        self.assertEqual(logs["update_scale"], 0)


class ClientTest(tf.test.TestCase):
    def test_a_client_that_cannot_be_read_is_left_out_and_reported(self):
        arrays = cohorts.client_arrays((5, 5, 5))

        def read(client):
            if client == 1:
                raise OSError("gone")
            return arrays[client]

        dataset = FederatedDataset.from_client_fn(
            [0, 1, 2], read, element_spec=_dataset().element_spec
        )
        for name in ("fixed", "median"):
            _, engine = _engine(name)
            pending = engine.collect(dataset, cohorts.inputs(dataset))
            self.assertLen(pending.failures, 1)
            self.assertIsInstance(pending.failures[0], ClientFailure)
            self.assertEqual(pending.failures[0].position, 1)
            self.assertEqual(
                sum(float(total.contribution.weight) for total in pending.sums), 2
            )
        # The median is of those that answered: half of all norms are not 0.
        _, engine = _engine("median")
        answered = engine.collect(dataset, cohorts.inputs(dataset)).state.clip_norm
        others = dataset.take([0, 2])
        alone = engine.collect(others, cohorts.inputs(others)).state.clip_norm
        self.assertAllClose(answered, alone)

    def test_one_client_moves_the_model_by_at_most_s_over_m(self):
        ends = []
        for factor in (1.0, 1e6):
            arrays = cohorts.client_arrays((5, 5, 5))
            arrays[0] = arrays[0][0] * np.float32(factor), arrays[0][1]
            dataset = FederatedDataset.from_client_arrays(arrays)
            moved, _ = _round(dataset, engine=_engine("tight"), clients_per_round=4.0)
            ends.append(moved.astype(float))
        self.assertLessEqual(np.linalg.norm(ends[1] - ends[0]), 2 * 0.01 / 4 * 1.001)

    def test_collect_leaves_model_and_state_alone(self):
        model, engine = _engine("adaptive")
        before, state = model.get_weights(), engine.state
        pending = engine.collect(_dataset(), cohorts.inputs(_dataset()))
        self.assertAllEqual(rounds.flat(before), rounds.flat(model.get_weights()))
        self.assertIs(engine.state, state)
        engine.release(pending)
        self.assertNotEqual(float(engine.state.clip_norm), float(state.clip_norm))


class HookTest(tf.test.TestCase):
    def test_broadcast_hook_changes_what_clients_receive_only(self):
        def hook(weights, seed):
            return [
                v + 0.1 * tf.random.stateless_normal(v.shape, seed) for v in weights
            ]

        def moved(seed, **options):
            engine = _engine("none", **options)
            return _round(_dataset(), engine=engine, seed=np.array([1, seed]))[0]

        one = moved(1, broadcast_hook=hook)
        two = moved(1, broadcast_hook=hook, num_replicas=2)
        self.assertAllClose(one, two, rtol=1e-4, atol=1e-6)
        self.assertNotAllClose(one, moved(2, broadcast_hook=hook))
        self.assertNotAllClose(one, moved(1))
        # An update is what the client changed, not the hook.
        self.assertAllClose(one, moved(1), atol=0.1)

    def test_an_upload_hook_draws_noise_of_its_own_for_every_client(self):
        dataset = _dataset((2, 2))
        engine = cohorts.make_engine(
            cohorts.mlp(3000),
            dataset,
            collect_records=True,
            training={"upload_hook": lambda u: noise.add_normal(u, 0.3)},
        )
        pending = engine.collect(dataset, cohorts.inputs(dataset, learning_rate=0.0))
        ((_, collected),) = pending.collected
        one, other = collected.updates.numpy()
        statistics.assert_gaussian(one, 0.3)
        statistics.assert_gaussian(other, 0.3)
        statistics.assert_uncorrelated(one, other)


class WindowTest(tf.test.TestCase):
    def test_adaptive_local_dp_returns_the_norms_before_noise(self):
        arrays = cohorts.client_arrays()
        dataset = FederatedDataset.from_client_arrays(arrays)
        engine = cohorts.make_engine(
            cohorts.mlp(),
            dataset,
            mechanism=tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5),
            num_replicas=2,
        )
        windows = np.full([4, 3, 4], np.nan, np.float32)
        pending = engine.collect(dataset, cohorts.inputs(dataset, windows=windows))
        wanted = [
            [np.linalg.norm(v) for v in update] for update in _reference_updates(arrays)
        ]
        self.assertAllClose(pending.window_norms, wanted, rtol=1e-4)

    def test_every_client_uses_its_own_window(self):
        dataset = _dataset((2, 2))
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
        ((_, collected),) = pending.collected
        zeta = references.analytic_sigma(1.0, 8.0, 1e-5) * 3**0.5
        for update, radius in zip(collected.updates.numpy(), (0.5, 0.1), strict=True):
            statistics.assert_gaussian(update, 2 * radius * zeta)
