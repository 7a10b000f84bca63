"""A model that is trained on Ray's workers is the one that is trained here."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pickle
import signal
import sys
import time
import unittest
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tests.conformance.runtimes import ray_workers as shared_workers
from tests.runtimes import cohorts
from tfdp_fl import runtimes
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import program
from tfdp_fl.runtimes import ray_workers
from tfdp_fl.runtimes import workers as workers_lib

_INSTALLED = importlib.util.find_spec("ray") is not None
_WHY_NOT = "ray is not installed (tests only)"


class MessageTest(parameterized.TestCase):
    """What goes to a worker, run here after a journey through pickle."""

    def test_a_program_that_travelled_is_the_program(self):
        table = tf.random.normal([300, 4])  # Too large to be part of the graph.

        def function(nest, rows):
            size = tf.debugging.assert_positive(nest["a"])
            with tf.control_dependencies([size]):
                return {
                    "sum": tf.add_n([nest["a"], nest["b"], nest["b"]]),
                    "t": (tf.gather(table, rows),),
                }

        spec = tf.TensorSpec([None], tf.float32)
        traced = program.Program(
            function, {"a": spec, "b": spec}, tf.TensorSpec([None], tf.int32)
        )
        message = pickle.loads(pickle.dumps(ray_workers._Message.of(traced)))
        run = message.runnable()
        a, b = np.ones(3, np.float32), np.arange(3, dtype=np.float32)
        here = traced({"a": a, "b": b}, np.array([7, 2], np.int32))
        there = run([a, b, np.array([7, 2], np.int32)])
        np.testing.assert_array_equal(there[0], a + 2 * b)
        for one, other in zip(tf.nest.flatten(here), there, strict=True):
            np.testing.assert_array_equal(one, other)
        with self.assertRaises(tf.errors.InvalidArgumentError):
            run([-a, b, np.array([7, 2], np.int32)])


@unittest.skipUnless(_INSTALLED, _WHY_NOT)
class _RayTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.shared = shared_workers()

    def change(self, **values):
        """Changes what the workers were made with, for this test."""
        self.enter_context(mock.patch.multiple(self.shared, **values))


class ProductsTest(_RayTestCase):
    def test_of_a_ray_that_was_there_are_not_trusted(self):
        case = cohorts._CASES["side_by_side"]
        self.enter_context(mock.patch.object(self.shared._cluster, "_started", False))
        for said in (None, True):
            self.change(_float32_products=said)
            federated = cohorts._federated(case)
            cohorts._fit(federated, case, case.clients(), runtime=self.shared)
            for strategy in federated.engine.programs.traced:
                self.assertEqual((strategy.kind == "side by side"), said is True)
        with self.assertRaisesRegex(TypeError, "float32_products"):
            runtimes.RayWorkers(float32_products="yes")

    def test_of_one_that_is_started_here_they_are_known(self):
        for address, variable, started, here in (
            (None, None, True, True),
            (None, None, False, False),
            ("auto", None, True, False),
            (None, "10.0.0.1:6379", True, False),
        ):
            cluster = ray_workers._Cluster(address, {})
            cluster._started = started
            changed = {} if variable is None else {"RAY_ADDRESS": variable}
            with mock.patch.dict(os.environ, changed):
                if variable is None:
                    os.environ.pop("RAY_ADDRESS", None)
                self.assertEqual(cluster.is_here, here)


class SameResultTest(_RayTestCase):
    def _compare(self, case, clients):
        here, there = cohorts._federated(case), cohorts._federated(case)
        start = here.get_weights()
        expected = cohorts._fit(here, case, clients).history
        actual = cohorts._fit(there, case, clients, runtime=self.shared).history
        self.assertGreater(np.abs(start[0] - here.get_weights()[0]).max(), 1e-3)
        for a, b in zip(here.get_weights(), there.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        self.assertEqual(list(expected), list(actual))
        for name, values in expected.items():
            np.testing.assert_allclose(actual[name], values, atol=1e-4, rtol=1e-4)
        if there.run.windows is not None:
            np.testing.assert_allclose(here.run.windows, there.run.windows, atol=1e-5)
            self.assertTrue(np.isfinite(there.run.windows).any())
        for strategy in there.engine.programs.traced:
            self.assertEqual((strategy.kind == "side by side"), case.side_by_side)
        return there

    @parameterized.named_parameters(
        (name, case) for name, case in cohorts._CASES.items()
    )
    def test_whatever_is_trained(self, case):
        with mock.patch.object(self.shared, "run", wraps=self.shared.run) as run:
            self._compare(case, case.clients())
        # All workers, or one where the cohort is small, had a shard.
        for call in run.mock_calls:
            self.assertLen(call.args[0].shards, 1 if case.small else 2)

    @parameterized.parameters("side_by_side", "one_by_one")
    def test_large_arrays_that_ray_stores(self, name):
        case = cohorts._CASES[name]
        with mock.patch.object(ray_workers, "_INLINE_BYTES", 0):
            self._compare(case, case.clients())

    @parameterized.parameters("float32", "mixed_bfloat16")
    def test_the_clip_holds_for_data_that_an_adversary_would_choose(self, policy):
        cohorts.assert_clip_holds(self, self.shared, policy)

    def test_several_shards_for_each_worker(self):
        self.change(shards_per_worker=2)
        self._compare(cohorts._CASES["adaptive"], cohorts._alike())

    def test_a_nan_of_one_client_takes_nobody_with_it(self):
        x, y = cohorts._arrays(8 * cohorts._NUM_CLIENTS)
        x[8 * 3, 0] = np.nan
        rows = np.arange(len(x)).reshape(cohorts._NUM_CLIENTS, 8)
        clients = FederatedDataset.from_indices(x, y, rows)
        case = dataclasses.replace(
            cohorts._CASES["small"], sampling="poisson", fit={"rounds": 6}
        )
        there = self._compare(case, clients)
        self.assertTrue(np.isfinite(there.get_weights()[0]).all())

    # The divergence of an infinite output is 0, and its metric no number.
    @parameterized.parameters(("mean_absolute_error", 4), ("kl_divergence", 8))
    def test_a_client_that_passes_all_bounds(self, loss, batch_size):
        cohorts.assert_bounds_hold_history(self, self.shared, loss, batch_size)

    def test_cohorts_of_any_size_are_one_program(self):
        case = cohorts._Case(sampling="poisson")
        federated = cohorts._federated(case)
        history = cohorts._fit(
            federated, case, cohorts._alike(), rounds=6, runtime=self.shared
        ).history
        self.assertGreater(len(set(history["cohort_size"])), 3)
        self.assertLen(federated.engine.programs.traced, 1)

    def test_a_cohort_without_clients(self):
        case = cohorts._Case(
            sampling="poisson",
            mechanism=lambda: cohorts._fixed(noise_multiplier=1.0),
            options={},
        )
        there, here = cohorts._federated(case), cohorts._federated(case)
        for each in there, here:
            each._setup = dataclasses.replace(each.setup, clients_per_round=0.01)
        with mock.patch.object(self.shared, "run") as run:
            history = cohorts._fit(there, case, cohorts._alike(), runtime=self.shared)
        run.assert_not_called()
        cohorts._fit(here, case, cohorts._alike())
        self.assertEqual(set(history.history["cohort_size"]), {0.0})
        for a, b in zip(here.get_weights(), there.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)

    def test_requests_of_bounded_size(self):
        # Of a dataset in memory Ray has all examples, once.
        case = cohorts._CASES["streamed"]
        limit = 5 * 4 * (cohorts._FEATURES + 1)  # 5 examples.
        with (
            mock.patch.object(workers_lib, "MESSAGE_BYTES", limit),
            mock.patch.object(self.shared, "run", wraps=self.shared.run) as run,
        ):
            self._compare(case, case.clients())
        self.assertGreater(run.call_count, 2 * cohorts._ROUNDS)


class HereTest(parameterized.TestCase):
    """What must hold of workers, in this process."""

    @parameterized.parameters(("mean_absolute_error", 8), ("kl_divergence", 4))
    def test_a_client_that_passes_all_bounds(self, loss, batch_size):
        cohorts.assert_bounds_hold_history(self, None, loss, batch_size)

    def test_a_runtime_of_another_kind(self):
        case = cohorts._Case()
        with self.assertRaisesRegex(TypeError, "runtime .*'local'"):
            cohorts._fit(
                cohorts._federated(case), case, cohorts._alike(), runtime="local"
            )


class LostWorkerTest(_RayTestCase):
    def _fit(self, workers, kill):
        """Trains, and ends a worker once; returns the model."""
        case = cohorts._CASES["one_by_one"]
        federated = cohorts._federated(case)
        original, victim = workers._cluster.actor, workers.pids[1]
        rounds = []

        def actor(place):
            rounds.append(place)
            if kill and place == 1 and rounds.count(1) == 1:
                # As its shards are sent.
                os.kill(victim, signal.SIGKILL)
            return original(place)

        with mock.patch.object(workers._cluster, "actor", actor):
            cohorts._fit(federated, case, case.clients(), runtime=workers)
        self.assertEqual(workers.pids[1] != victim, kill)
        return federated

    def test_its_shard_is_repeated_and_the_model_is_the_same(self):
        whole, mended = (self._fit(self.shared, kill) for kill in (False, True))
        for a, b in zip(whole.get_weights(), mended.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        self.assertEqual(whole.epsilon(1e-3), mended.epsilon(1e-3))

    def test_a_program_that_no_worker_can_take_over_ends_the_round(self):
        # A program that no other test has.
        model = cohorts._sequential(tf.keras.layers.Dense(3))
        case = cohorts._Case(model=lambda: model)
        federated = cohorts._federated(case)
        of = ray_workers._Message.of

        def broken(traced):
            return dataclasses.replace(of(traced), graph=b"no graph")

        with (
            mock.patch.object(ray_workers._Message, "of", broken),
            self.assertRaises(runtimes.WorkerError),
        ):
            cohorts._fit(federated, case, case.clients(), runtime=self.shared)
        self.assertEqual(federated.epsilon(1e-3), 0.0)

    def test_else_the_round_is_abandoned_and_nothing_is_charged(self):
        case = cohorts._CASES["one_by_one"]
        federated = cohorts._federated(case)
        before = federated.get_weights()
        workers = self.shared
        self.change(_max_repeats=0)
        victim = workers.pids[1]
        os.kill(victim, signal.SIGKILL)
        time.sleep(1)
        with self.assertRaisesRegex(runtimes.WorkerLost, "of Ray is lost"):
            cohorts._fit(federated, case, case.clients(), runtime=workers)
        for a, b in zip(before, federated.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        self.assertEqual(federated.epsilon(1e-3), 0.0)
        # And the next call starts it anew.
        cohorts._fit(federated, case, case.clients(), runtime=workers)


@unittest.skipUnless(_INSTALLED, _WHY_NOT)
class ClosedTest(parameterized.TestCase):
    def test_closed_workers_stay_closed(self):
        workers = runtimes.RayWorkers()
        workers.close()
        with self.assertRaisesRegex(RuntimeError, "closed"):
            workers.open()


class MissingTest(absltest.TestCase):
    def test_what_to_install_is_said(self):
        with (
            mock.patch.dict(sys.modules, {"ray": None}),
            self.assertRaisesRegex(ImportError, "RayWorkers.*pip install ray"),
        ):
            runtimes.RayWorkers()
