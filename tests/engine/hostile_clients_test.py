"""One client's data can end no round, and pass nothing on to the next one."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.engine import cohorts
from tests.mechanisms import references
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models

_layers = tf.keras.layers


def _fixed():
    return tfdp_fl.FixedClipping(clip_norm=0.4, noise_multiplier=0.0)


# By what they are made of: each is traced once, and starts anew in each round.
_engines = {}


def _moved(
    clients,
    model=None,
    *,
    beside=False,
    streamed=False,
    few=False,
    loss=None,
    **options,
):
    """Returns how a round moves a model (None: `cohorts.mlp`), and its logs."""
    if streamed:
        dataset = FederatedDataset.from_tf_datasets(
            {
                k: tf.data.Dataset.from_tensor_slices(client)
                for k, client in clients.items()
            }
        )
    else:
        dataset = FederatedDataset.from_client_arrays(clients)
    key = model and id(model), beside, loss, *options
    if key not in _engines:
        model = model or cohorts.mlp()
        engine = cohorts.make_engine(
            model,
            dataset,
            mechanism=_fixed(),
            jit_compile=None if beside else False,
            loss=loss,
            **options,
        )
        _engines[key] = engine, model, model.get_weights()
    engine, model, before = _engines[key]
    model.set_weights(before)
    engine.has_trained = False
    with mock.patch.multiple(
        dense_models, is_worthwhile=lambda *_: beside, is_small=lambda *_: few
    ):
        pending = engine.collect(
            dataset, cohorts.inputs(dataset, clients_per_round=3.0)
        )
        logs = engine.release(pending)
    moved = [b - a for a, b in zip(before, model.get_weights(), strict=True)]
    return moved, {**logs, "failures": pending.failures}


class NaNTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        beside=[True, False], few=[True, False], value=[np.nan, np.inf, 1e38]
    )
    def test_the_loss_is_that_of_the_others(self, beside, few, value):
        clients = cohorts.client_arrays((5, 5, 5))
        clients[1][0][2, 1] = value
        others = {k: v for k, v in clients.items() if k != 1}
        entropy = tf.keras.metrics.SparseCategoricalCrossentropy(
            "entropy", from_logits=True
        )
        options = {
            "beside": beside,
            "few": few,
            "training": {"metrics": ["accuracy", entropy]},
        }
        moved, logs = _moved(clients, **options)
        wanted, _ = _moved(others, **options)
        self.assertTrue(math.isfinite(logs["loss"]))
        self.assertTrue(math.isfinite(logs["accuracy"]))
        self.assertTrue(math.isfinite(logs["entropy"]))
        if logs["discarded_clients"]:
            for one, other in zip(moved, wanted, strict=True):
                self.assertAllClose(one, other, rtol=1e-4, atol=1e-6)
        else:  # 1e38 saturates the tanh, and does no harm.
            self.assertEqual(value, 1e38)


class IdleTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(few=[True, False], where=["x", "y"])
    def test_those_who_idle_do_not_see_anothers_data(self, few, where):
        # Clients with fewer steps than others are filled up in the table.
        clients = {
            k: (x, y[:, None].astype(np.float32) * np.ones([1, 3], np.float32))
            for k, (x, y) in cohorts.client_arrays((10, 5, 3, 0)).items()
        }
        others = {k: v for k, v in clients.items() if k != 0}
        wanted, _ = _moved(others, beside=True, few=few, loss="mse")
        for value in (np.nan, np.inf, 1e30):
            x, y = clients[0][0].copy(), clients[0][1].copy()
            (x if where == "x" else y)[:] = value
            moved, logs = _moved(
                {0: (x, y), **others}, beside=True, few=few, loss="mse"
            )
            self.assertEqual(logs["discarded_clients"], 1)
            for one, other in zip(moved, wanted, strict=True):
                self.assertAllClose(one, other, rtol=1e-4, atol=1e-6)


class OwnNoiseTest(tf.test.TestCase, parameterized.TestCase):
    """How far huge data moves a sum of local releases: its own share only.

    Seen from outside, the mean moves by 1.7 clips / m with `AdaptiveLocalDP`
    and by 1.1 with `NbAFL`. A client's share is at most sqrt(L) radii of L
    layers, or the clipped weights times n; it may turn right round.
    """

    def _moved(self, mechanism, windows=None):
        sums, engine = [], None
        for factor in (1.0, 1e6):
            clients = cohorts.client_arrays((5, 5, 5))
            clients[1] = (clients[1][0] * np.float32(factor), clients[1][1])
            dataset = FederatedDataset.from_client_arrays(clients)
            engine = engine or cohorts.make_engine(
                cohorts.mlp(), dataset, mechanism=mechanism
            )
            inputs = cohorts.inputs(dataset)
            if windows is not None:
                norms = np.full([3, 2, engine.num_variables], windows, np.float32)
                inputs = dataclasses.replace(inputs, windows=norms)
            (total,) = engine.collect(dataset, inputs).sums
            sums.append([v.numpy() for v in total.contribution.update])
        moved = [a.astype(np.float64) - b for a, b in zip(*sums, strict=True)]
        return references.l2_norm(moved)

    @parameterized.parameters(np.nan, 0.3)
    def test_adaptive_local_dp(self, window):
        mechanism = tfdp_fl.AdaptiveLocalDP(
            epsilon=10.0, delta=1e-3, clipping_radius=0.5, window=2
        )
        radius = 0.5 if math.isnan(window) else window
        moved = self._moved(mechanism, window)
        self.assertBetween(moved, 0.0, 2 * math.sqrt(4) * radius * (1 + 1e-4))

    def test_nbafl(self):
        mechanism = tfdp_fl.NbAFL(epsilon=50.0, constant=3.0, weight_clip=0.5)
        moved = self._moved(mechanism)
        self.assertBetween(moved, 0.0, 5 * 2 * 0.5 * (1 + 1e-4))


class LossTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_a_huge_loss_stays_a_number(self, beside):
        clients = {
            k: (x, np.ones([len(x), 3], np.float32))
            for k, (x, _) in cohorts.client_arrays((5, 5)).items()
        }
        clients[1][1][:] = 1.8e19
        _, logs = _moved(clients, beside=beside, loss="mse")
        self.assertTrue(math.isfinite(logs["loss"]))


class LabelTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(3, -1)
    def test_outside_of_the_classes_is_said_before_the_first_round(self, label):
        clients = cohorts.client_arrays((5, 5, 5))
        clients[2][1][4] = label
        fed = tfdp_fl.DPFederatedModel(cohorts.mlp(), _fixed(), clients_per_round=3)
        fed.compile("sgd", cohorts.cross_entropy())
        with self.assertRaisesRegex(
            ValueError, "labels must be integers from 0 to 2, .* for client 2"
        ):
            fed.fit(FederatedDataset.from_client_arrays(clients), verbose=0)
        self.assertEqual(fed.rounds, 0)

    def test_an_ignored_class_is_allowed(self):
        clients = cohorts.client_arrays((5, 5, 5))
        clients[2][1][4] = -1
        loss = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=-1
        )
        dataset = FederatedDataset.from_client_arrays(clients)
        engine = cohorts.make_engine(cohorts.mlp(), dataset, loss=loss)
        engine.check_labels(dataset)

    def test_of_a_client_that_is_not_taken_do_not_matter(self):
        clients = cohorts.client_arrays((5, 5, 5))
        clients[1][1][4] = 9
        dataset = FederatedDataset.from_client_arrays(clients)
        engine = cohorts.make_engine(cohorts.mlp(), dataset)
        engine.check_labels(dataset.take([0, 2]))
        with self.assertRaisesRegex(ValueError, "client 1"):
            engine.check_labels(dataset)

    def test_of_a_streamed_client_fail_the_client(self):
        clients = cohorts.client_arrays((5, 5, 5))
        others = {k: v for k, v in clients.items() if k != 1}
        clients[1][1][4] = 7
        moved, logs = _moved(clients, streamed=True)
        wanted, _ = _moved(others, streamed=True)
        (failure,) = logs["failures"]
        self.assertEqual(failure.position, 1)
        self.assertIn("from 0 to 2", str(failure.error))
        for one, other in zip(moved, wanted, strict=True):
            self.assertAllClose(one, other, rtol=1e-4, atol=1e-6)


class TrainingErrorTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        tf.keras.utils.set_random_seed(1)
        cls.model = tf.keras.Sequential(
            [
                tf.keras.Input([4], dtype=tf.int32),
                _layers.Embedding(10, 3),
                _layers.Flatten(),
                _layers.Dense(3),
            ]
        )

    def _clients(self, *bad):
        rng = np.random.default_rng(0)
        clients = {
            k: (rng.integers(0, 10, [5, 4]), rng.integers(0, 3, 5)) for k in range(3)
        }
        for k in bad:
            clients[k][0][2, 2] = 99
        return clients

    def test_a_client_whose_data_raises_has_failed(self):
        clients = self._clients(1)
        moved, logs = _moved(clients, self.model)
        wanted, _ = _moved({0: clients[0], 2: clients[2]}, self.model)
        self.assertEqual([f.position for f in logs["failures"]], [1])
        for one, other in zip(moved, wanted, strict=True):
            self.assertAllClose(one, other, rtol=1e-4, atol=1e-6)
        self.assertTrue(math.isfinite(logs["loss"]))

    def test_a_lone_client_ends_nothing(self):
        clients = self._clients(0)
        _, logs = _moved({0: clients[0]}, self.model)
        self.assertLen(logs["failures"], 1)

    def test_where_nobody_can_train_the_error_is_raised(self):
        with self.assertRaises(tf.errors.InvalidArgumentError):
            _moved(self._clients(0, 1, 2), self.model)


class StateTest(tf.test.TestCase, parameterized.TestCase):
    def test_a_stateful_layer_is_refused(self):
        model = tf.keras.Sequential(
            [
                tf.keras.Input([4, 2], batch_size=5),
                _layers.LSTM(3, stateful=True),
                _layers.Dense(3),
            ]
        )
        clients = {0: (np.zeros([5, 4, 2], np.float32), np.zeros(5, np.int64))}
        dataset = FederatedDataset.from_client_arrays(clients)
        with self.assertRaisesRegex(ValueError, "stateful=True"):
            cohorts.make_engine(model, dataset)

    def _refused(self, word="to the next", **options):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
        with self.assertRaisesRegex(ValueError, word):
            cohorts.make_engine(cohorts.mlp(), dataset, **options)

    def test_a_memory_of_loss_hook_or_optimizer_is_refused(self):
        memory = tf.Variable(0.0, name="memory")
        usual = cohorts.cross_entropy()

        def remembers(value):
            before = memory.read_value()
            memory.assign(tf.reduce_sum(value))
            return before

        self._refused(
            loss=lambda y, p: usual(y, p) + 0 * remembers(p),
        )

        def hook(update):
            return [each + remembers(each) for each in update]

        self._refused(training={"upload_hook": hook})

        class Optimizer(tf.keras.optimizers.SGD):
            def update_step(self, gradient, *rest):
                super().update_step(gradient + remembers(gradient), *rest)

        self._refused(optimizer=Optimizer(0.1, momentum=0.5))

    def test_python_that_is_called_back_is_refused(self):
        def loss(y, p):
            called = tf.numpy_function(lambda v: v, [tf.reduce_sum(p)], tf.float32)
            return tf.ensure_shape(called, [])

        self._refused("py_function", loss=loss)

    @parameterized.parameters(
        (tf.keras.optimizers.Nadam(0.1), "Nadam"),
        (
            tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
            "gradient_accumulation_steps",
        ),
    )
    def test_an_optimizer_with_hidden_state_is_refused(self, optimizer, pattern):
        with self.assertRaisesRegex(ValueError, pattern):
            _moved(cohorts.client_arrays((5,)), optimizer=optimizer)

    def test_constraints_hold_under_plain_sgd(self):
        model = tf.keras.Sequential(
            [
                tf.keras.Input([4]),
                _layers.Dense(3, kernel_constraint=tf.keras.constraints.MaxNorm(0.5)),
            ]
        )
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays((5,)))
        engine = cohorts.make_engine(model, dataset)
        cohorts.run_round(engine, dataset, learning_rate=10.0)
        norms = np.linalg.norm(model.get_weights()[0], axis=0)
        self.assertAllLessEqual(norms, 0.5 * (1 + 1e-5))

    def test_a_memory_outside_of_the_weights_is_refused(self):
        memory = tf.Variable(0.0, name="memory")

        class Remembers(_layers.Layer):
            def call(self, x):
                before = memory.read_value()
                memory.assign(tf.reduce_sum(x))
                return x + before

        with tf.keras.utils.custom_object_scope({"Remembers": Remembers}):
            model = tf.keras.Sequential(
                [tf.keras.Input([4]), Remembers(), _layers.Dense(3)]
            )
            dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
            with self.assertRaisesRegex(ValueError, "memory.*to the next"):
                cohorts.make_engine(model, dataset)

    def test_an_own_generator_is_a_memory(self):
        # What a client draws shifts what all after it draw.
        class Noisy(_layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.generator = tf.random.Generator.from_seed(1)

            def call(self, x):
                return x + self.generator.normal(tf.shape(x))

        with tf.keras.utils.custom_object_scope({"Noisy": Noisy}):
            model = tf.keras.Sequential(
                [tf.keras.Input([4]), Noisy(), _layers.Dense(3)]
            )
            with self.assertRaisesRegex(ValueError, "would pass from one"):
                _moved(cohorts.client_arrays((3, 3)), model)
