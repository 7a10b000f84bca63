"""Shards go to the workers, their sum comes back, and losses are told."""

import contextlib
import os
import signal
import socket
import threading
import time
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl import runtimes
from tfdp_fl.runtimes import local_worker, worker

try:
    import tensorflow_federated as tff
except ImportError:
    tff = None

_CLIENTS, _EXAMPLES, _FEATURES, _CLASSES = 7, 6, 5, 3
_CLIP_NORM = 1.0


def _cohort():
    rng = np.random.default_rng(1)
    weights = [
        rng.normal(size=(_FEATURES, _CLASSES)).astype(np.float32),
        rng.normal(size=_CLASSES).astype(np.float32),
    ]
    x = rng.normal(size=(_CLIENTS, _EXAMPLES, _FEATURES)).astype(np.float32)
    y = rng.integers(0, _CLASSES, (_CLIENTS, _EXAMPLES)).astype(np.int32)
    return weights, x, y


def _local_sgd(weights, x, y):
    """One client's clipped update: two batches of SGD on softmax regression."""
    weights = list(map(tf.convert_to_tensor, weights))
    local = weights
    for start in range(0, _EXAMPLES, 3):
        with tf.GradientTape() as tape:
            tape.watch(local)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(
                    y[start : start + 3],
                    x[start : start + 3] @ local[0] + local[1],
                )
            )
        local = [
            w - 0.5 * g for w, g in zip(local, tape.gradient(loss, local), strict=True)
        ]
    update = [a - b for a, b in zip(local, weights, strict=True)]
    return tf.clip_by_global_norm(update, _CLIP_NORM)


def _expected(weights, x, y):
    updates = [_local_sgd(weights, x[k], y[k]) for k in range(len(x))]
    norms = [norm.numpy() for _, norm in updates]
    sums = [sum(u[i].numpy().astype(np.float64) for u, _ in updates) for i in range(2)]
    return sums, norms


def _training():
    """Builds the computation as somebody would who uses TFF directly."""

    @tff.tensorflow.computation(
        [
            tff.TensorType(np.float32, (_FEATURES, _CLASSES)),
            tff.TensorType(np.float32, (_CLASSES,)),
        ],
        (
            tff.TensorType(np.float32, (None, _EXAMPLES, _FEATURES)),
            tff.TensorType(np.int32, (None, _EXAMPLES)),
        ),
    )
    def train(weights, shard):
        x, y = shard

        def add_client(k, clipped, *sums):
            update, norm = _local_sgd(weights, x[k], y[k])
            return (
                k + 1,
                clipped + tf.cast(norm > _CLIP_NORM, tf.int32),
                *(s + u for s, u in zip(sums, update, strict=True)),
            )

        _, clipped, *sums = tf.while_loop(
            lambda k, *_: k < tf.shape(x)[0],
            add_client,
            (0, 0, *map(tf.zeros_like, weights)),
            parallel_iterations=1,
        )
        return {"clipped": clipped, "sums": sums}

    return train


def _spinning():
    """Builds a computation that ends at the time that it is given."""

    @tff.tensorflow.computation(np.float64, np.float32)
    def until(end, shard):
        spun = tf.while_loop(lambda n: tf.timestamp() < end, lambda n: [n + 1], [0])
        with tf.control_dependencies(spun):
            return tf.identity(shard)

    return until


def _failing():
    @tff.tensorflow.computation(np.float32, np.float32)
    def fail(limit, shard):
        with tf.control_dependencies(
            [tf.debugging.assert_less(shard, limit, message="as asked")]
        ):
            return tf.identity(shard)

    return fail


def _split(array, parts):
    return np.array_split(array, parts)


@contextlib.contextmanager
def _after(seconds, action):
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.join()


class _WorkersTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        if tff is None:
            self.skipTest("TensorFlow Federated is not installed.")

    def assert_trains(self, workers, num_shards=2):
        weights, x, y = _cohort()
        result = workers.run_sharded(
            self.training,
            list(zip(_split(x, num_shards), _split(y, num_shards), strict=True)),
            weights,
        )
        sums, norms = _expected(weights, x, y)
        self.assertEqual(result["clipped"], sum(norm > _CLIP_NORM for norm in norms))
        for actual, expected in zip(result["sums"], sums, strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5)
        return result

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if tff is not None:
            cls.training = _training()
            cls.spinning = _spinning()


class LocalWorkersTest(_WorkersTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if tff is not None:
            cls.workers = runtimes.TFFWorkers(num_workers=2).open()
            cls.addClassCleanup(cls.workers.close)

    def test_example_clips_some_clients_and_not_others(self):
        _, norms = _expected(*_cohort())
        self.assertBetween(sum(norm > _CLIP_NORM for norm in norms), 1, _CLIENTS - 1)

    @parameterized.parameters(1, 2, 3, 7)
    def test_sums_over_shards(self, num_shards):
        self.assert_trains(self.workers, num_shards)
        shards = [record.shards for record in self.workers.last_round]
        self.assertEqual(
            [index for part in shards for index in part],
            list(range(num_shards)),
        )
        self.assertLen(shards, min(2, num_shards))

    @parameterized.parameters(1, 5)
    def test_results_of_the_shards(self, num_shards):
        @tff.tensorflow.computation(np.float32, tff.TensorType(np.float32, (None,)))
        def scaled(scale, shard):
            return [scale * shard, tf.size(shard)]

        shards = [np.arange(n, dtype=np.float32) for n in range(num_shards)]
        results = self.workers.run_sharded(
            scaled, shards, np.float32(2), reduction="none"
        )
        self.assertLen(results, num_shards)
        for shard, (values, size) in zip(shards, results, strict=True):
            np.testing.assert_array_equal(values, 2 * shard)
            self.assertEqual(size, len(shard))

    def test_reductions(self):
        with self.assertRaisesRegex(ValueError, "reduction .*'mean'"):
            self.workers.run_sharded(
                self.spinning, [np.float32(1)], 0.0, reduction="mean"
            )

    def test_both_workers_work(self):
        # Sending the computation comes out of this time.
        self.workers.run_sharded(
            self.spinning, [np.float32(1), np.float32(2)], time.time() + 3.0
        )
        first, second = self.workers.last_round
        self.assertEqual((first.pid, second.pid), self.workers.pids)
        self.assertNotEqual(first.pid, second.pid)
        self.assertEqual((first.shards, second.shards), ((0,), (1,)))
        for record in (first, second):
            self.assertGreater(record.cpu_seconds, 0.05)
            self.assertGreater(record.seconds, 0.3)
            self.assertIn(record.address, self.workers.addresses)

    def test_same_shards_give_the_same_bits(self):
        one, two = (self.assert_trains(self.workers) for _ in range(2))
        for a, b in zip(one["sums"], two["sums"], strict=True):
            np.testing.assert_array_equal(a, b)

    def test_tensors_are_taken_too(self):
        weights, x, y = _cohort()
        shards = [(tf.constant(x), tf.constant(y))]
        tensors = self.workers.run_sharded(
            self.training, shards, list(map(tf.constant, weights))
        )
        arrays = self.workers.run_sharded(self.training, [(x, y)], weights)
        np.testing.assert_array_equal(tensors["sums"][0], arrays["sums"][0])

    @parameterized.parameters(2, 3)  # One of a worker's own, and several.
    def test_nobody_adds_what_is_no_number(self, num_shards):
        @tff.tensorflow.computation(np.float32, np.str_)
        def named(_, shard):
            return shard

        shards = [np.array("a")] * num_shards
        for _ in range(2):
            with self.assertRaisesRegex(TypeError, "sum operator"):
                self.workers.run_sharded(named, shards, np.float32(0))
        found = self.workers.run_sharded(named, shards, np.float32(0), reduction="none")
        self.assertEqual(found, [b"a"] * num_shards)

    def test_the_computation_is_sent_once(self):
        training = _training()
        weights, x, y = _cohort()
        create_value = tff.framework.RemoteExecutor.create_value
        sent = []

        async def counted(executor, value, type_spec=None):
            if isinstance(value, tff.framework.ConcreteComputation):
                sent.append(value)
            return await create_value(executor, value, type_spec)

        with mock.patch.object(tff.framework.RemoteExecutor, "create_value", counted):
            for _ in range(3):
                self.workers.run_sharded(
                    training,
                    list(zip(_split(x, 2), _split(y, 2), strict=True)),
                    weights,
                )
        self.assertLen(sent, 2)

    def test_a_failing_computation_names_its_worker(self):
        fail = _failing()
        with self.assertRaisesRegex(
            runtimes.WorkerError, f"{self.workers.addresses[1]}.*as asked"
        ) as caught:
            self.workers.run_sharded(
                fail, [np.float32(1), np.float32(3)], np.float32(2)
            )
        self.assertNotIsInstance(caught.exception, runtimes.WorkerLost)
        pids = self.workers.pids
        self.assert_trains(self.workers)
        self.assertEqual(self.workers.pids, pids)

    def test_no_shards(self):
        with self.assertRaisesRegex(ValueError, "shards"):
            self.workers.run_sharded(self.training, [], _cohort()[0])

    def test_a_computation_of_another_type(self):
        @tff.tensorflow.computation(np.float32)
        def one(x):
            return x

        with self.assertRaisesRegex(ValueError, "broadcast, shard"):
            self.workers.run_sharded(one, [np.float32(1)], np.float32(1))


class LostLocalWorkerTest(_WorkersTestCase):
    def test_killed_in_a_round_then_goes_on(self):
        with runtimes.TFFWorkers(num_workers=2) as workers:
            self.assert_trains(workers)
            before = workers.last_round
            lost, survivor = workers.pids
            address = workers.addresses[0]
            started = time.monotonic()
            with (
                _after(0.5, lambda: os.kill(lost, signal.SIGKILL)),
                self.assertRaisesRegex(
                    runtimes.WorkerLost, f"{address}.*ended by signal 9"
                ) as caught,
            ):
                workers.run_sharded(
                    self.spinning,
                    [np.float32(1), np.float32(2)],
                    time.time() + 1.5,
                )
            self.assertLess(time.monotonic() - started, 30.0)
            self.assertEqual(caught.exception.address, address)
            self.assertIs(workers.last_round, before)

            self.assert_trains(workers)
            self.assertNotEqual(workers.pids[0], lost)
            self.assertEqual(workers.pids[1], survivor)
            pids = workers.pids

            # Killed between rounds: nothing was lost.
            os.kill(pids[1], signal.SIGKILL)
            time.sleep(0.5)
            self.assert_trains(workers)
            self.assertNotEqual(workers.pids[1], survivor)

            workers.restart()
            self.assert_trains(workers)
            self.assertEmpty({*workers.pids} & {*pids})

    @parameterized.parameters(2, 3)  # Of the second there are two on one.
    def test_says_when_all_is_sent_and_they_compute(self, num_shards):
        with runtimes.TFFWorkers(num_workers=2, round_timeout_seconds=60.0) as workers:
            shards = [np.float32(1)] * num_shards
            workers.run_sharded(self.spinning, shards, 0.0)
            pids, said = workers.pids, []

            def sent():
                said.append(True)
                for pid in pids:  # None of them would ever end by itself.
                    os.kill(pid, signal.SIGKILL)

            with self.assertRaisesRegex(runtimes.WorkerLost, "by signal 9"):
                workers._run_sharded(
                    self.spinning, shards, np.float64(1e30), "sum", sent
                )
            self.assertEqual(said, [True])

    def test_a_round_that_takes_too_long(self):
        with runtimes.TFFWorkers(num_workers=1, round_timeout_seconds=1.0) as workers:
            with self.assertRaisesRegex(
                runtimes.WorkerLost, "did not finish within 1 seconds"
            ):
                workers.run_sharded(self.spinning, [np.float32(1)], time.time() + 20.0)
            # A new worker is not ready in a second on every machine.
            workers._round_timeout = None
            self.assert_trains(workers)

    def test_close(self):
        workers = runtimes.TFFWorkers(num_workers=1)
        self.assertEqual(workers.addresses, (None,))
        workers.open()
        (pid,) = workers.pids
        for _ in range(2):
            workers.close()
            with self.assertRaises(ProcessLookupError):
                os.kill(pid, 0)
        with self.assertRaisesRegex(RuntimeError, "closed"):
            workers.open()

    def test_close_on_garbage_collection(self):
        workers = runtimes.TFFWorkers(num_workers=1).open()
        (pid,) = workers.pids
        del workers
        with self.assertRaises(ProcessLookupError):
            os.kill(pid, 0)

    def test_given_ports(self):
        with local_worker.reserve_port() as reservation:
            port = reservation.getsockname()[1]
        with runtimes.TFFWorkers(num_workers=1, ports=[port]) as workers:
            self.assertEqual(workers.addresses, (f"localhost:{port}",))
            self.assert_trains(workers)

    def test_port_in_use(self):
        with socket.create_server(("", 0), reuse_port=True) as other:
            port = other.getsockname()[1]
            with self.assertRaisesRegex(
                runtimes.WorkerUnavailable, f"localhost:{port} was not started"
            ):
                runtimes.TFFWorkers(num_workers=1, ports=[port]).open()


class HostsTest(_WorkersTestCase):
    def setUp(self):
        super().setUp()
        self.processes = [local_worker.LocalWorker() for _ in range(2)]
        for process in self.processes:
            self.addCleanup(process.stop)
        self.workers = runtimes.TFFWorkers(
            hosts=[process.address for process in self.processes]
        )
        self.addCleanup(self.workers.close)

    def test_trains_and_leaves_them_running(self):
        self.assert_trains(self.workers)
        self.assertEqual(
            [record.address for record in self.workers.last_round],
            [process.address for process in self.processes],
        )
        self.assertEqual(self.workers.pids, (None, None))
        self.workers.close()
        self.assertTrue(all(process.alive for process in self.processes))
        with runtimes.TFFWorkers(hosts=[self.processes[0].address]) as again:
            self.assert_trains(again)

    def test_killed_in_a_round_and_started_again(self):
        self.workers.open()
        lost = self.processes[1]
        port = int(lost.address.rpartition(":")[2])
        with (
            _after(0.5, lost.stop),
            self.assertRaisesRegex(runtimes.WorkerLost, lost.address),
        ):
            self.workers.run_sharded(
                self.spinning,
                [np.float32(1), np.float32(2)],
                time.time() + 2.0,
            )
        again = local_worker.LocalWorker(port=port)
        self.addCleanup(again.stop)
        self.assert_trains(self.workers)

    def test_one_that_hangs(self):
        self.workers.open()
        pid = self.processes[0].pid
        self.addCleanup(os.kill, pid, signal.SIGCONT)
        with (
            mock.patch.object(worker, "_PING_EVERY_SECONDS", 0.5),
            mock.patch.object(worker, "_PING_TIMEOUT_SECONDS", 1.0),
            _after(0.3, lambda: os.kill(pid, signal.SIGSTOP)),
            self.assertRaisesRegex(
                runtimes.WorkerLost,
                f"{self.processes[0].address} .*no longer answers",
            ),
        ):
            self.workers.run_sharded(
                self.spinning,
                [np.float32(1), np.float32(2)],
                time.time() + 8.0,
            )

    def test_pings_leave_a_long_round_alone(self):
        with mock.patch.object(worker, "_PING_EVERY_SECONDS", 0.0):
            result = self.workers.run_sharded(
                self.spinning,
                [np.float32(1), np.float32(2)],
                time.time() + 1.0,
            )
        self.assertEqual(result, 3.0)


class UnavailableTest(_WorkersTestCase):
    def test_nobody_there(self):
        with local_worker.reserve_port() as reservation:
            address = f"localhost:{reservation.getsockname()[1]}"
            started = time.monotonic()
            with self.assertRaisesRegex(
                runtimes.WorkerUnavailable,
                f"{address} did not answer within 0.5 seconds",
            ) as caught:
                runtimes.TFFWorkers(hosts=[address], connect_timeout_seconds=0.5).open()
            self.assertLess(time.monotonic() - started, 5.0)
            self.assertEqual(caught.exception.address, address)

    def test_somebody_else_there(self):
        with socket.create_server(("localhost", 0)) as server:
            address = f"localhost:{server.getsockname()[1]}"
            with self.assertRaisesRegex(
                runtimes.WorkerUnavailable, f"{address} did not answer"
            ):
                runtimes.TFFWorkers(hosts=[address], connect_timeout_seconds=0.5).open()


class ArgumentsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"num_workers": 0}, ValueError, "num_workers .* got 0"),
        ({"num_workers": 1.5}, TypeError, "num_workers .* got 1.5"),
        ({"num_workers": 2, "ports": [5000]}, ValueError, "ports .*5000"),
        ({"ports": [5000, 5000]}, ValueError, "ports .*different"),
        ({"ports": [5000, 70000]}, ValueError, "ports .*70000"),
        ({"threads_per_worker": 0}, ValueError, "threads_per_worker"),
        ({"connect_timeout_seconds": 0}, ValueError, "connect_timeout"),
        ({"round_timeout_seconds": -1}, ValueError, "round_timeout"),
        (
            {"max_concurrent_computation_calls": 0},
            ValueError,
            "max_concurrent_computation_calls",
        ),
        ({"hosts": []}, ValueError, "hosts"),
        ({"hosts": "a:1"}, TypeError, "hosts .*'a:1'"),
        ({"hosts": ["a"]}, ValueError, "hosts .*'a'"),
        ({"hosts": ["a:b"]}, ValueError, "hosts .*'a:b'"),
        ({"hosts": ["a:70000"]}, ValueError, "hosts .*'a:70000'"),
        ({"hosts": ["a:1", "a:1"]}, ValueError, "hosts .*different"),
        ({"hosts": ["a:1"], "num_workers": 1}, ValueError, "num_workers"),
        ({"hosts": ["a:1"], "ports": [1]}, ValueError, "ports"),
    )
    def test_refused(self, arguments, error, message):
        with self.assertRaisesRegex(error, message):
            runtimes.TFFWorkers(**arguments)

    def test_nothing_is_started_by_construction(self):
        workers = runtimes.TFFWorkers()
        self.assertEqual(workers.num_workers, 2)
        self.assertEqual(workers.pids, (None, None))
        self.assertEqual(
            runtimes.TFFWorkers(hosts=["a:1", "[::1]:2", "b:3"]).num_workers, 3
        )


if __name__ == "__main__":
    tf.test.main()
