import asyncio
import shutil
import tempfile

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from absl.testing import absltest, parameterized

from tfdp_fl import aggregators, datasets, learning, mechanisms
from tfdp_fl.aggregators import accountable_state

CLIENTS = 4
OPTIMIZER = tff.learning.optimizers.build_sgdm(0.1)


def client_data():
    """Handwritten digits, four clients with 20 examples each."""
    data, _ = datasets.load_digits(num_clients=40)
    arrays = [data.client(name) for name in data.client_ids[:CLIENTS]]

    def dataset(name):
        x, y = arrays[int(name)]
        x = np.reshape(x, [len(x), -1]).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices(
            (x[:20], y[:20].astype(np.int32))
        ).batch(10)

    return tff.simulation.datasets.ClientData.from_clients_and_tf_fn(
        [str(k) for k in range(CLIENTS)], dataset
    )


def keras_model():
    return tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(64),
            tf.keras.layers.Dense(
                10, kernel_initializer=tf.keras.initializers.GlorotUniform(1)
            ),
        ]
    )


LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SPEC = (
    tf.TensorSpec([None, 64], tf.float32),
    tf.TensorSpec([None], tf.int32),
)


def model_fn():
    return tff.learning.models.from_keras_model(
        keras_model(), loss=LOSS, input_spec=SPEC
    )


def functional_model():
    return tff.learning.models.functional_model_from_keras(keras_model, LOSS, SPEC)


def run(process, cohorts):
    state = process.initialize()
    for cohort in cohorts:
        output = process.next(state, cohort)
        state = output.state
    return state, output.metrics


def assert_close(first, second, atol=1e-5):
    for one, other in zip(first.trainable, second.trainable, strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


class BuildDPFedAvgTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        data = client_data()
        cls.cohort = [
            data.create_tf_dataset_for_client(name) for name in data.client_ids
        ]

    @parameterized.named_parameters(
        ("keras", model_fn), ("functional", functional_model())
    )
    def test_equals_unweighted_fed_avg_without_clip_and_noise(self, model):
        server = tff.learning.optimizers.build_sgdm(0.7, momentum=0.5)
        ours = learning.build_dp_fed_avg(
            model,
            mechanisms.FixedClipping(clip_norm=1e6, noise_multiplier=0.0),
            CLIENTS,
            OPTIMIZER,
            server,
        )
        theirs = tff.learning.algorithms.build_unweighted_fed_avg(
            model, OPTIMIZER, server
        )
        self.assertIsInstance(ours, tff.learning.templates.LearningProcess)
        self.assertEqual(
            ours.get_model_weights.type_signature.result,
            theirs.get_model_weights.type_signature.result,
        )
        self.assertEqual(
            ours.next.type_signature.parameter[1],
            theirs.next.type_signature.parameter[1],
        )
        state, metrics = run(ours, [self.cohort] * 3)
        expected, _ = run(theirs, [self.cohort] * 3)
        assert_close(ours.get_model_weights(state), theirs.get_model_weights(expected))
        self.assertEqual(metrics["aggregator"]["cohort_size"], CLIENTS)
        self.assertGreater(metrics["aggregator"]["mean_update_norm"], 0.1)

    def test_failed_client_programs_and_epsilon(self):
        process = learning.build_dp_fed_avg(
            model_fn,
            mechanisms.AdaptiveClipping(noise_multiplier=1.0),
            CLIENTS * 5,
            OPTIMIZER,
            num_clients=1000,
            local_epochs=2,
        )
        broken = self.cohort[0].map(lambda x, y: (x * np.nan, y))
        state, metrics = run(process, [[broken, *self.cohort[1:]], self.cohort])
        self.assertEqual(metrics["client_work"]["train"]["num_examples"], 160)
        once = process.next(process.initialize(), [broken, *self.cohort[1:]]).metrics
        self.assertEqual(once["aggregator"]["discarded_clients"], 1)
        weights = process.get_model_weights(state)
        self.assertTrue(all(np.isfinite(w).all() for w in weights.trainable))

        # What tff.program keeps and releases.
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        manager = tff.program.FileProgramStateManager(directory)
        asyncio.run(manager.save(state, 2))
        loaded = asyncio.run(manager.load(2, process.initialize()))
        release = tff.program.MemoryReleaseManager()
        asyncio.run(release.release(metrics, 2))
        self.assertIn(2, release.values())
        assert_close(process.get_model_weights(loaded), weights, atol=0)
        self.assertEqual(accountable_state(loaded).rounds, 2)

        # Epsilon is that of the rounds in the state.
        def spent(state):
            return process.epsilon(state, delta=1e-5, sampling="poisson")

        self.assertEqual(spent(process.initialize()), 0.0)
        self.assertEqual(spent(loaded), spent(state))
        resumed = process.next(loaded, self.cohort).state
        self.assertGreater(spent(resumed), spent(state))
        with self.assertRaisesRegex(ValueError, "sampling"):
            process.epsilon(state, delta=1e-5)
        with self.assertRaisesRegex(ValueError, "num_clients"):
            process.epsilon(state, delta=1e-5, sampling="poisson", num_clients=7)

    def test_a_state_that_two_processes_made_costs_what_both_cost(self):
        def build(noise_multiplier, clients_per_round=CLIENTS, num_clients=100):
            return learning.build_dp_fed_avg(
                model_fn,
                mechanisms.FixedClipping(
                    clip_norm=1.0, noise_multiplier=noise_multiplier
                ),
                clients_per_round,
                OPTIMIZER,
                sampling="poisson",
                num_clients=num_clients,
            )

        state, _ = run(build(0.1), [self.cohort] * 2)
        alone = build(0.1).epsilon(state, delta=1e-5)
        after = build(5.0)
        state = after.next(state, self.cohort).state
        self.assertGreater(alone, 100)
        self.assertGreaterEqual(after.epsilon(state, delta=1e-5), alone)
        bare = learning.epsilon(
            state,
            after.mechanism,
            sampling="poisson",
            num_clients=100,
            clients_per_round=CLIENTS,
            delta=1e-5,
        )
        self.assertEqual(bare, after.epsilon(state, delta=1e-5))
        # The same of m, and of N, of which a process may have been told less.
        wide = build(5.0, clients_per_round=1)
        state = wide.next(state, self.cohort[:1]).state
        self.assertGreaterEqual(wide.epsilon(state, delta=1e-5), alone)
        with self.assertRaisesRegex(ValueError, "num_clients must be the 100"):
            build(5.0, 1, num_clients=10_000).epsilon(state, delta=1e-5)
        self.assertIn("N = 100", wide.privacy_statement(state, delta=1e-5))

    def test_releases_past_the_mechanism_have_no_epsilon(self):
        factory = aggregators.FixedClippingFactory(
            clip_norm=1.0, noise_multiplier=1.0, clients_per_round=CLIENTS
        )
        mime = tff.learning.algorithms.build_unweighted_mime_lite(
            model_fn,
            tff.learning.optimizers.build_sgdm(0.1, momentum=0.9),
            model_aggregator=factory,
        )
        declared = {
            "sampling": "poisson",
            "num_clients": 100,
            "clients_per_round": CLIENTS,
            "delta": 1e-5,
        }
        state, _ = run(mime, [self.cohort])
        with self.assertRaisesRegex(ValueError, "full gradients"):
            learning.epsilon(state, factory.mechanism, **declared)
        plain = tff.learning.algorithms.build_unweighted_fed_avg(
            model_fn, OPTIMIZER, model_aggregator=factory
        )
        state, _ = run(plain, [self.cohort])
        value = learning.epsilon(state, factory.mechanism, **declared)
        self.assertGreater(value, 0)
        self.assertIn("what else", value.statement)

    def test_arguments(self):
        fixed = mechanisms.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
        with self.assertRaisesRegex(TypeError, "client_optimizer_fn"):
            learning.build_dp_fed_avg(model_fn, fixed, 4, tf.keras.optimizers.SGD)
        with self.assertRaisesRegex(TypeError, "model_fn"):
            learning.build_dp_fed_avg("model", fixed, 4, OPTIMIZER)
        with self.assertRaisesRegex(TypeError, "VariableModel"):
            learning.build_dp_fed_avg(keras_model, fixed, 4, OPTIMIZER)
        with self.assertRaisesRegex(TypeError, "mechanism"):
            learning.build_dp_fed_avg(model_fn, 1.0, 4, OPTIMIZER)


class NbAFLTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        BuildDPFedAvgTest.setUpClass()
        cls.cohort = BuildDPFedAvgTest.cohort
        cls.cohort = [cls.cohort[0], *(data.take(1) for data in cls.cohort[1:])]

    @parameterized.named_parameters(
        ("keras", model_fn), ("functional", functional_model())
    )
    def test_without_noise_it_is_weighted_fed_avg_of_weights(self, model):
        mechanism = mechanisms.NbAFL(epsilon=1e12, constant=1.0, weight_clip=50.0)
        ours = learning.build_dp_fed_avg(
            model,
            mechanism,
            CLIENTS,
            OPTIMIZER,
            rounds=3,
            num_clients=CLIENTS,
            local_epochs=2,
        )
        theirs = tff.learning.algorithms.build_weighted_fed_avg(model, OPTIMIZER)
        state, metrics = run(ours, [self.cohort] * 2)
        twice = [data.repeat(2) for data in self.cohort]
        expected, _ = run(theirs, [twice] * 2)
        assert_close(ours.get_model_weights(state), theirs.get_model_weights(expected))
        self.assertEqual(metrics["aggregator"]["discarded_clients"], 0)

    def test_clients_of_one_example_have_noise_after_any_number_of_epochs(self):
        # 41 times 1/41 is below 1 in float32.
        process = learning.build_dp_fed_avg(
            model_fn,
            mechanisms.NbAFL(epsilon=1.0, constant=3.0, weight_clip=1.0),
            CLIENTS,
            OPTIMIZER,
            rounds=2,
            num_clients=CLIENTS,
            min_examples=1,
            local_epochs=41,
        )
        state = process.initialize()
        alone = [data.unbatch().take(1).batch(1) for data in self.cohort]
        one, other = (
            process.next(state, alone).state.global_model_weights.trainable[0]
            for _ in range(2)
        )
        self.assertGreater(np.abs(one - other).max(), 0.1)

    def test_downlink_noise_is_seen_once_and_the_same_by_all(self):
        mechanism = mechanisms.NbAFL(
            epsilon=100.0, constant=1.0, weight_clip=50.0, mu=0.1
        )
        process = learning.build_dp_fed_avg(
            model_fn,
            mechanism,
            1,
            OPTIMIZER,
            rounds=50,
            num_clients=CLIENTS,
            min_examples=10,
        )
        state = process.initialize()
        # What nobody's data is in has no noise, and what is put in is kept.
        first = process.get_model_weights(state)
        assert_close(first, state.global_model_weights, atol=0)
        state = process.next(state, self.cohort[:1]).state
        seen = process.get_model_weights(state)
        assert_close(seen, process.get_model_weights(state), atol=0)
        noise = np.concatenate(
            [
                np.ravel(one - other)
                for one, other in zip(
                    seen.trainable,
                    state.global_model_weights.trainable,
                    strict=True,
                )
            ]
        )
        # 650 coordinates: 20 % are 7 standard deviations of the estimate
        # (false alarm below 1e-11); the scale itself is tested in nbafl_test.
        stddev = 2 * 50 * (50**2 - CLIENTS) ** 0.5 / (10 * CLIENTS * 100)
        self.assertAlmostEqual(noise.std() / stddev, 1, delta=0.2)
        placed = process.set_model_weights(state, first)
        assert_close(process.get_model_weights(placed), first, atol=0)
        # Per record: mu^2 = (epsilon / (T c))^2 a round.
        self.assertGreater(process.epsilon(state, delta=0.5, sampling="poisson"), 0)

    def test_arguments(self):
        mechanism = mechanisms.NbAFL(epsilon=1.0, constant=1.0, weight_clip=1.0)
        with self.assertRaisesRegex(ValueError, "server_optimizer_fn"):
            learning.build_dp_fed_avg(
                model_fn,
                mechanism,
                4,
                OPTIMIZER,
                OPTIMIZER,
                rounds=3,
                num_clients=4,
            )
        with self.assertRaisesRegex(ValueError, "num_clients"):
            learning.build_dp_fed_avg(model_fn, mechanism, 4, OPTIMIZER, rounds=3)


if __name__ == "__main__":
    absltest.main()
