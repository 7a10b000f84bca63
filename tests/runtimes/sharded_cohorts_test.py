"""A model that is trained on workers is the one that is trained here."""

import contextlib
import dataclasses
import os
import signal
import tempfile
import threading
import time
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tfdp_fl import runtimes, secure_aggregation
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import calls, dense_models, layout
from tfdp_fl.runtimes import local_worker, sharded_cohorts

try:
    import tensorflow_federated as tff
except ImportError:
    tff = None

_FEATURES, _CLASSES, _NUM_CLIENTS, _ROUNDS = 40, 3, 14, 2

_layers = tf.keras.layers


def _arrays(count, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, _FEATURES)).astype(np.float32)
    return x, np.argmax(x[:, :_CLASSES], axis=1).astype(np.int32)


def _alike():
    """Clients with two full batches each."""
    x, y = _arrays(8 * _NUM_CLIENTS)
    return FederatedDataset.from_indices(
        x, y, np.arange(len(x)).reshape(_NUM_CLIENTS, 8)
    )


def _uneven():
    """Clients of 0 to 9 examples, some of which are of several clients."""
    x, y = _arrays(60)
    rng = np.random.default_rng(1)
    return FederatedDataset.from_indices(
        x, y, [rng.integers(0, 60, size) for size in [0, 9, 1, 4, 8, 3, 6] * 2]
    )


def _almost_alike():
    """Clients of 8 to 12 examples, most of which take three steps of 4."""
    sizes = [12, 11, 8, 9, 12, 10, 12] * 2
    x, y = _arrays(sum(sizes))
    rows = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    return FederatedDataset.from_indices(x, y, rows)


def _streamed():
    """Clients that are read one by one, of which two cannot be."""

    def read(client):
        if client in (3, 8):
            raise OSError("gone")
        return _arrays(5 + client % 3, seed=client)

    return FederatedDataset.from_client_fn(range(_NUM_CLIENTS), read)


def _nested():
    """Features of two names and dtypes."""
    x, y = _arrays(8 * _NUM_CLIENTS)
    return FederatedDataset.from_indices(
        {"z": x, "a": np.arange(len(x), dtype=np.uint8)[:, None]},
        y,
        np.arange(len(x)).reshape(_NUM_CLIENTS, 8),
    )


def _weighted(rows):
    x, y = _arrays(sum(map(len, rows)))
    weight = np.random.default_rng(2).exponential(size=len(x))
    return FederatedDataset.from_indices(x, y, rows, sample_weight=weight)


def _weighted_alike():
    return _weighted(np.arange(8 * _NUM_CLIENTS).reshape(_NUM_CLIENTS, 8))


def _weighted_uneven():
    ends = np.cumsum([0, 9, 1, 4, 8, 3, 6] * 2)
    return _weighted(np.split(np.arange(ends[-1]), ends[:-1]))


def _sequential(*layers):
    return tf.keras.Sequential(
        [_layers.Input((_FEATURES,)), *layers, _layers.Dense(_CLASSES)]
    )


def _mlp():
    # Wide enough for clients to be trained side by side.
    return _sequential(_layers.Dense(60, activation="relu"))


def _with_state_and_noise():
    return _sequential(
        _layers.Dense(5), _layers.BatchNormalization(), _layers.Dropout(0.4)
    )


def _two_inputs():
    a, z = _layers.Input((1,), name="a"), _layers.Input((_FEATURES,), name="z")
    return tf.keras.Model(
        {"z": z, "a": a},
        _layers.Dense(_CLASSES)(_layers.concatenate([_layers.Rescaling(0.01)(a), z])),
    )


def _recurrent():
    return _sequential(_layers.Reshape((8, 5)), _layers.LSTM(3))


def _fixed(**changes):
    values = {"clip_norm": 0.05, "noise_multiplier": 0.0, **changes}
    return tfdp_fl.FixedClipping(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    """Settings; `side_by_side` is what is to come of them.

    `small` is whether a cohort of them is not worth a second worker.
    """

    clients: object = _alike
    model: object = _mlp
    mechanism: object = _fixed
    sampling: str = "fixed_size"
    optimizer: object = lambda: tf.keras.optimizers.SGD(0.2)
    options: dict = dataclasses.field(default_factory=dict)
    compiled: dict = dataclasses.field(default_factory=dict)
    fit: dict = dataclasses.field(default_factory=dict)
    side_by_side: bool = False
    small: bool = False
    mapped: bool = False


_CASES = {
    "side_by_side": _Case(side_by_side=True),
    "small": _Case(side_by_side=True, small=True, mapped=True),
    "side_by_side_almost_alike": _Case(
        clients=_almost_alike,
        side_by_side=True,
        fit={"shuffle": True},
        mapped=True,
    ),
    "adaptive": _Case(
        mechanism=lambda: tfdp_fl.AdaptiveClipping(
            noise_multiplier=0.0, initial_clip_norm=0.05
        ),
        side_by_side=True,
    ),
    # Cohorts of 7 of 14: the same noise of the same rounds, wherever trained.
    "correlated": _Case(
        mechanism=lambda: tfdp_fl.CorrelatedNoise(
            clip_norm=0.05,
            noise_multiplier=0.1,
            strategy="blt:2",
            rounds=4,
            min_separation=2,
            target_quantile=0.5,
        ),
        sampling="cyclic",
        side_by_side=True,
    ),
    "one_by_one": _Case(
        clients=_uneven,
        sampling="poisson",
        fit={"shuffle": True, "local_epochs": 2},
        mapped=True,
    ),
    "slots": _Case(optimizer=lambda: tf.keras.optimizers.Adam(0.01)),
    "batch_normalization_and_dropout": _Case(model=_with_state_and_noise),
    "state_that_stays": _Case(
        model=_with_state_and_noise, options={"non_trainable_state": "keep"}
    ),
    "recurrent": _Case(model=_recurrent),
    "nested_features": _Case(clients=_nested, model=_two_inputs, mapped=True),
    "streamed": _Case(clients=_streamed),
    "weights": _Case(
        clients=_weighted_uneven,
        compiled={"weighted_metrics": ["accuracy"]},
        mapped=True,
    ),
    "weights_side_by_side": _Case(
        clients=_weighted_alike,
        fit={"class_weight": {0: 0.1, 1: 4.0}},
        side_by_side=True,
    ),
    # With a seed, each client's own noise is the same wherever it trains.
    "client_noise": _Case(
        mechanism=lambda: _fixed(noise_multiplier=0.5, noise_site="client"),
    ),
    "windows": _Case(
        mechanism=lambda: tfdp_fl.AdaptiveLocalDP(
            epsilon=100.0, delta=1e-5, clipping_radius=0.05
        ),
        mapped=True,
    ),
    "median": _Case(
        mechanism=lambda: tfdp_fl.MedianClipping(noise_multiplier=0.5),
        clients=_uneven,
    ),
    "nbafl": _Case(
        mechanism=lambda: tfdp_fl.NbAFL(
            epsilon=500.0, constant=3.0, weight_clip=5.0, mu=0.1
        ),
    ),
    "secure_aggregation": _Case(
        options={"secure_aggregation": secure_aggregation.AdditiveSecretSharing()}
    ),
    "variance_and_xla_here": _Case(
        fit={"between_client_variance": True}, compiled={"jit_compile": True}
    ),
    "hooks": _Case(
        compiled={
            "broadcast_hook": lambda weights, seed: [
                w + 0.01 * tf.random.stateless_normal(w.shape, seed) for w in weights
            ],
            "upload_hook": lambda tensors: [2.0 * each for each in tensors],
        }
    ),
}


def _federated(case):
    tf.keras.utils.set_random_seed(1)
    federated = tfdp_fl.DPFederatedModel(
        case.model(),
        case.mechanism(),
        clients_per_round=7,
        sampling=case.sampling,
        num_replicas=1,
        **case.options,
    )
    federated.compile(
        optimizer=case.optimizer(),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **{
            "jit_compile": None if case.side_by_side else False,
            **case.compiled,
        },
    )
    return federated


def _fit(federated, case, clients, **arguments):
    with mock.patch.object(dense_models, "is_small", lambda *_: case.small):
        return federated.fit(
            clients,
            **{
                "rounds": _ROUNDS,
                "batch_size": 4,
                "seed": 5,
                "verbose": 0,
                **case.fit,
                **arguments,
            },
        )


def trained_by_workers(test, workers, case):
    """Returns the clients of the last round; fails if one was told of twice.

    Or if others than all workers, or one where the cohort is small, had any.
    """
    told = [set(record.clients) for record in workers.last_round]
    test.assertLen(told, 1 if case.small else workers.num_workers)
    test.assertTrue(all(told))
    clients = set.union(*told)
    test.assertLen(clients, sum(map(len, told)))
    return clients


def assert_clip_holds(test, runtime, policy):
    """Fails if a client moves a model by more than its clip, on workers.

    Args:
      test: The test case.
      runtime: Workers, or None: here.
      policy: Keras's dtype policy.
    """
    mixed_precision = tf.keras.mixed_precision
    mixed_precision.set_global_policy(policy)
    test.addCleanup(mixed_precision.set_global_policy, "float32")
    # Large features that cancel in the logits, small ones that add up.
    size, clip = 3000.0, 0.01
    sign = np.where(np.arange(10) % 2, 1.0, -1.0)
    x = np.full([10, 400], size * 2.0**-12 * 0.99) * sign[:, None]
    x[:, :2] = size
    clients = FederatedDataset.from_client_arrays(
        {0: (x.astype(np.float32), (sign > 0).astype(np.float32))}
    )
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [_layers.Input([400]), _layers.Dense(128), _layers.Dense(1)]
    )
    rows = model.layers[0].kernel.numpy()
    rows[1] = -rows[0]
    model.layers[0].kernel.assign(rows)
    federated = tfdp_fl.DPFederatedModel(
        model,
        _fixed(clip_norm=clip),
        clients_per_round=1,
        sampling="fixed_size",
        num_replicas=1,
    )
    federated.compile(
        tf.keras.optimizers.SGD(50.0),
        tf.keras.losses.BinaryCrossentropy(from_logits=True),
    )
    before = [w.astype(np.float64) for w in model.get_weights()]
    federated.fit(clients, batch_size=10, verbose=0, runtime=runtime)
    moved = [new - old for old, new in zip(before, model.get_weights(), strict=True)]
    if runtime is not None:
        made = runtime._computations[federated.engine]
        test.assertNotEmpty(made)
        test.assertTrue(all(way.side_by_side for way, *_ in made))
    # Up to how a weight of 0.1 is rounded.
    norm = np.sqrt(sum(np.sum(part**2) for part in moved))
    test.assertBetween(norm, 0.01 * clip, clip * 1.001)


class _WorkersTestCase(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if tff is None:
            return
        cls.processes = [local_worker.LocalWorker(threads=1) for _ in range(2)]
        for process in cls.processes:
            cls.addClassCleanup(process.stop)

    def setUp(self):
        super().setUp()
        if tff is None:
            self.skipTest("TensorFlow Federated is not installed.")

    def workers(self, **arguments):
        return self.enter_context(
            runtimes.TFFWorkers(
                hosts=[process.address for process in self.processes],
                **{"float32_products": True, **arguments},
            )
        )

    def directory(self):
        return self.enter_context(tempfile.TemporaryDirectory())

    def assert_same_model(self, one, other):
        for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


class SameResultTest(_WorkersTestCase):
    def _compare(self, case, clients, **arguments):
        here, there = _federated(case), _federated(case)
        start = here.get_weights()
        expected = _fit(here, case, clients).history
        workers = self.workers(**arguments)
        actual = _fit(there, case, clients, runtime=workers).history
        moved = np.abs(start[0] - here.get_weights()[0])
        self.assertGreater(moved.max(), 1e-3)
        self.assert_same_model(here, there)
        self.assertEqual(list(expected), list(actual))
        for name, values in expected.items():
            np.testing.assert_allclose(actual[name], values, atol=1e-4, rtol=1e-4)
        if there.run.windows is not None:
            np.testing.assert_allclose(here.run.windows, there.run.windows, atol=1e-5)
            self.assertTrue(np.isfinite(there.run.windows).any())
        (made,) = workers._computations.values()
        for way, *_ in made:
            self.assertEqual(way.side_by_side, case.side_by_side)
        return workers, there

    def test_products_of_workers_elsewhere_are_not_trusted(self):
        case = _CASES["side_by_side"]
        self._compare(
            dataclasses.replace(
                case, side_by_side=False, compiled={"jit_compile": None}
            ),
            case.clients(),
            float32_products=None,
        )

    @parameterized.named_parameters((name, case) for name, case in _CASES.items())
    def test_data_with_the_request(self, case):
        workers, there = self._compare(case, case.clients())
        read = trained_by_workers(self, workers, case)
        drawn = set(there.run.sampler.cohort(_ROUNDS - 1).tolist())
        if case.clients is _streamed:
            drawn -= {3, 8}
        if case.sampling == "cyclic":  # It is the other group's turn now.
            drawn = set(range(_NUM_CLIENTS)) - drawn
        self.assertEqual(read, drawn)

    @parameterized.named_parameters(
        (name, case) for name, case in _CASES.items() if case.mapped
    )
    def test_data_read_on_the_workers(self, case):
        clients = case.clients()
        directory = self.directory()
        runtimes.export_for_workers(clients, directory)
        self._compare(case, clients, data=directory, shards_per_worker=2)

    def test_who_has_a_nan_takes_nobody_with_it(self):
        # Who trains a small cohort takes for granted that nobody has, and has
        # to find out.
        x, y = _arrays(8 * _NUM_CLIENTS)
        x[8 * 3, 0] = np.nan
        rows = np.arange(len(x)).reshape(_NUM_CLIENTS, 8)
        clients = FederatedDataset.from_indices(x, y, rows)
        case = dataclasses.replace(
            _CASES["small"], sampling="poisson", fit={"rounds": 6}
        )
        workers, there = self._compare(case, clients)
        self.assertTrue(np.isfinite(there.get_weights()[0]).all())
        (made,) = workers._computations.values()
        self.assertEqual({way.optimistic for way, *_ in made}, {True, False})

    @parameterized.parameters((1, 2), (3, 4))
    def test_who_trains_twice_does_so_once_and_is_told_of_once(
        self, rounds, calls_of_workers
    ):
        x, y = _arrays(8 * 7)
        x[8 * 3, 0] = np.nan
        clients = FederatedDataset.from_indices(x, y, np.arange(len(x)).reshape(7, 8))
        federated = _federated(_CASES["small"])
        workers = self.workers()
        with mock.patch.object(
            workers, "_run_sharded", wraps=workers._run_sharded
        ) as called:
            _fit(
                federated,
                _CASES["small"],
                clients,
                runtime=workers,
                rounds=rounds,
            )
        self.assertEqual(called.call_count, calls_of_workers)
        told = [place for each in workers.last_round for place in each.clients]
        self.assertCountEqual(told, range(7))
        self.assertEqual([each.shards for each in workers.last_round], [(0,)])

    @parameterized.product(
        on_workers=[True, False],
        # The divergence of an infinite output is 0, and its metric no number.
        loss=["mean_absolute_error", "kl_divergence"],
        batch_size=[4, 8],
    )
    def test_who_passes_all_bounds_leaves_history_in_them(
        self, on_workers, loss, batch_size
    ):
        x, _ = _arrays(7 * 7)
        y = np.full([len(x), _CLASSES], 2.0, np.float32)
        kernel = "glorot_uniform" if "error" in loss else "zeros"
        clients = {}
        for name, size, weight in (("usual", 1.0, 1.0), ("high", 1e18, 1e8)):
            own = np.where(np.arange(len(x))[:, None] // 7 == 3, size, x)
            clients[name] = FederatedDataset.from_indices(
                own.astype(np.float32),
                y,
                np.arange(len(x)).reshape(7, 7),
                sample_weight=np.where(own[:, 0] == size, weight, 1.0),
            )
        runtime = self.workers() if on_workers else None
        found = {}
        for name, each in clients.items():
            tf.keras.utils.set_random_seed(1)
            federated = tfdp_fl.DPFederatedModel(
                tf.keras.Sequential(
                    [
                        _layers.Input((_FEATURES,)),
                        _layers.Dense(
                            _CLASSES,
                            kernel_initializer=kernel,
                            bias_initializer=tf.keras.initializers.Constant(0.5),
                        ),
                    ]
                ),
                _fixed(),
                clients_per_round=7,
                sampling="fixed_size",
                num_replicas=1,
            )
            federated.compile(
                tf.keras.optimizers.SGD(0.2),
                loss,
                [tf.keras.metrics.CosineSimilarity(name="cosine")],
            )
            with mock.patch.multiple(dense_models, is_worthwhile=lambda *_: True):
                found[name] = federated.fit(
                    each,
                    batch_size=batch_size,
                    verbose=0,
                    seed=3,
                    runtime=runtime,
                ).history
            made = federated.engine.functions.traced
            if on_workers:
                made = runtime._computations[federated.engine]
            ways = [
                part for key in made for part in key if isinstance(part, layout.Way)
            ]
            self.assertTrue(any(way.optimistic for way in ways))
        high = found["high"]
        self.assertEqual(high["discarded_clients"], [0.0])
        self.assertLessEqual(abs(high["cosine"][0]), 1.0 + 1e-6)
        self.assertBetween(high["loss"][0], 1e6, 1e25)
        self.assertBetween(found["usual"]["loss"][0], 0.1, 10.0)

    @parameterized.parameters(True, False)
    def test_small_cohorts_train_on_one_thread_of_workers_of_ours(self, ours):
        case = _CASES["small"]
        here, there = _federated(case), _federated(case)
        clients = case.clients()
        _fit(here, case, clients)
        workers = (
            self.enter_context(runtimes.TFFWorkers(num_workers=2))
            if ours
            else self.workers()  # Nobody knows what devices they have.
        )
        with mock.patch.object(
            calls, "called_on_one_thread", wraps=calls.called_on_one_thread
        ) as called:
            _fit(there, case, clients, runtime=workers)
        self.assertEqual(called.call_count, ours)
        self.assert_same_model(here, there)

    @parameterized.parameters("float32", "mixed_bfloat16")
    def test_the_clip_holds_for_data_that_an_adversary_would_choose(self, policy):
        for runtime in (None, self.workers()):
            assert_clip_holds(self, runtime, policy)

    def test_cohorts_of_any_size_are_one_computation(self):
        case = _Case(sampling="poisson")
        sizes = [
            *_fit(_federated(case), case, _alike(), rounds=6).history["cohort_size"]
        ]
        self.assertGreater(len(set(sizes)), 3)
        federated = _federated(case)
        workers = self.workers()
        _fit(federated, case, _alike(), rounds=6, runtime=workers)
        (made,) = workers._computations.values()
        self.assertLen(made, 1)

    def test_a_cohort_without_clients(self):
        case = _Case(
            sampling="poisson",
            mechanism=lambda: _fixed(noise_multiplier=1.0),
            options={},
        )
        federated, here = _federated(case), _federated(case)
        for each in federated, here:
            each.setup = dataclasses.replace(each.setup, clients_per_round=0.01)
        workers = self.workers()
        history = _fit(federated, case, _alike(), runtime=workers).history
        _fit(here, case, _alike())
        self.assertEqual(history["cohort_size"], [0.0] * _ROUNDS)
        self.assertEqual(workers.last_round, ())
        self.assert_same_model(here, federated)

    def test_requests_of_bounded_size(self):
        case = _Case(clients=_uneven, fit={"shuffle": True})
        limit = sharded_cohorts.MESSAGE_BYTES
        self.addCleanup(setattr, sharded_cohorts, "MESSAGE_BYTES", limit)
        sharded_cohorts.MESSAGE_BYTES = 5 * 4 * (_FEATURES + 1)  # 5 examples.
        workers, _ = self._compare(case, _uneven())
        self.assertGreater(max(len(r.shards) for r in workers.last_round), 1)
        self.assertEqual(sum(len(r.clients) for r in workers.last_round), 7)


class LostWorkerTest(_WorkersTestCase):
    def test_nothing_happened_and_training_goes_on(self):
        # A round takes long enough for a worker to be lost in it.
        case = _Case(
            mechanism=lambda: tfdp_fl.AdaptiveClipping(
                noise_multiplier=1.0, count_noise_stddev=2.0
            ),
            fit={"local_epochs": 800},
            options={"delta": 1e-3},
        )
        expected = _federated(case)
        _fit(expected, case, _alike())

        federated = _federated(case)
        ledger = os.path.join(self.directory(), "ledger.jsonl")
        charged = tfdp_fl.callbacks.Ledger(ledger)
        with runtimes.TFFWorkers(num_workers=2) as workers:
            lost, survivor = workers.open().pids

            class Kill(tf.keras.callbacks.Callback):
                def on_epoch_begin(self, epoch, logs=None):
                    if epoch == 1:
                        threading.Timer(0.2, os.kill, (lost, signal.SIGKILL)).start()
                        self.weights = self.model.get_weights()
                        self.killed_at = time.monotonic()

            kill = Kill()
            with self.assertRaises(runtimes.WorkerLost):
                _fit(
                    federated,
                    case,
                    _alike(),
                    runtime=workers,
                    callbacks=[kill, charged],
                )
            self.assertLess(time.monotonic() - kill.killed_at, 30.0)
            self.assertEqual(federated.rounds, 1)
            for a, b in zip(kill.weights, federated.get_weights(), strict=True):
                np.testing.assert_array_equal(a, b)
            with open(ledger) as file:
                lines = len(file.readlines())
            _fit(
                federated,
                case,
                _alike(),
                rounds=_ROUNDS - 1,
                runtime=workers,
                callbacks=[charged],
            )
            self.assertEqual(workers.pids[1], survivor)
            self.assertNotEqual(workers.pids[0], lost)
        with open(ledger) as file:
            self.assertEqual(len(file.readlines()), lines + _ROUNDS - 1)
        self.assertEqual(federated.rounds, _ROUNDS)
        self.assertEqual(federated.epsilon(1e-3), expected.epsilon(1e-3))
        self.assert_same_model(expected, federated)


class RefusedTest(_WorkersTestCase):
    def test_what_cannot_go_to_workers_is_named(self):
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer([0], [1.0]), 1.0
        )

        @tf.autograph.experimental.do_not_convert
        def weighted(y, predicted):
            weight = table.lookup(tf.constant(0))
            return tf.reduce_mean(predicted**2, axis=-1) * weight

        federated = _federated(_Case())
        federated.compile(optimizer="sgd", loss=weighted)
        with self.assertRaisesRegex(ValueError, "captures a resource"):
            _fit(federated, _Case(), _alike(), runtime=self.workers())
        self.assertEqual(federated.rounds, 0)

    def test_a_runtime_of_another_kind(self):
        with self.assertRaisesRegex(TypeError, "runtime .*'local'"):
            _fit(_federated(_Case()), _Case(), _alike(), runtime="local")

    def test_a_worker_that_is_not_there(self):
        with local_worker.reserve_port() as reservation:
            address = f"localhost:{reservation.getsockname()[1]}"
            workers = runtimes.TFFWorkers(hosts=[address], connect_timeout_seconds=0.2)
            federated = _federated(_Case())
            with (
                contextlib.closing(workers),
                self.assertRaisesRegex(runtimes.WorkerUnavailable, address),
            ):
                _fit(federated, _Case(), _alike(), runtime=workers)
        self.assertEqual(federated.rounds, 0)


if __name__ == "__main__":
    tf.test.main()
