"""The noise in a trained model is what was paid for, variable by variable.

All clients are empty, so that a model moves by the noise alone: every move of a
variable is compared with the formula. More of it, every mechanism and runtime,
is in `tests/stress/noise_stress.py`.
"""

from __future__ import annotations

import math
import pathlib
import random
import tempfile

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from scipy import stats

import tfdp_fl
from tests.keras import hostile, toy
from tests.mechanisms import statistics
from tfdp_fl import accounting
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras import callbacks
from tfdp_fl.mechanisms import tf_privacy as tfp
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

# So little noise that no moving variance, which starts at 1, gets to 0, where
# the server cuts it off.
CLIENTS, CLIP, Z = 4, 0.05, 1.3


def empty_clients(count: int = CLIENTS) -> FederatedDataset:
    """Returns clients without examples."""
    nothing = np.zeros([0, 1], np.float32), np.zeros([0], np.int32)
    return FederatedDataset.from_client_arrays(dict.fromkeys(range(count), nothing))


def model(width: int = 20_000, dtype: str | None = None) -> tf.keras.Model:
    """Returns six variables of `width` elements, two of them not trainable."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            layers.Input((1,)),
            layers.Dense(width, dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.Reshape((width // 100, 100), dtype=dtype),
            layers.GlobalAveragePooling1D(dtype=dtype),
        ]
    )


class Moves(tf.keras.callbacks.Callback):
    """Keeps how far each variable moved in each round.

    Attributes:
      rounds: For each round, float64 arrays, one for each variable.
    """

    def __init__(self):
        super().__init__()
        self.rounds: list[list[np.ndarray]] = []

    def on_train_begin(self, logs=None):
        self._before = self.model.get_weights()

    def on_epoch_end(self, epoch, logs=None):
        after = self.model.get_weights()
        self.rounds.append(
            [
                b.astype(np.float64).ravel() - a.astype(np.float64).ravel()
                for a, b in zip(self._before, after, strict=True)
            ]
        )
        self._before = after


def federated(mechanism, m, made=None, sampling="fixed_size", **options):
    """Returns a compiled model that moves by nothing but noise."""
    fed = tfdp_fl.DPFederatedModel(
        model() if made is None else made,
        mechanism,
        m,
        sampling,
        **{"num_replicas": 1, **options},
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fed.compile(tf.keras.optimizers.SGD(0.1), loss, jit_compile=False)
    return fed


def train(mechanism, rounds=1, made=None, sampling="fixed_size", options=None, **fit):
    """Trains on empty clients; returns the moves and the history."""
    options = {**(options or {})}
    compiled = options.pop("jit_compile", False)
    fed = federated(mechanism, CLIENTS, made, sampling, **options)
    if compiled:
        fed.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    moves = Moves()
    history = toy.fit(fed, rounds, [moves], data=empty_clients(), **fit)
    return moves.rounds, history.history


def fixed(site="server"):
    """Returns a mechanism whose noise on the mean is Z CLIP / CLIENTS."""
    return tfdp_fl.FixedClipping(clip_norm=CLIP, noise_multiplier=Z, noise_site=site)


def assert_is_noise(rounds, stddevs) -> None:
    """Asserts a stddev for each round, the shape, and that all are different.

    `statistics` says how often wrongly. From 2e4 values on a factor 1.1 is
    noticed, from 2e5 on 1.02. The shape is that of a Gaussian by Kolmogorov and
    Smirnov, wrongly refused once in 1e9.
    """
    flat = []
    for variables, stddev in zip(rounds, stddevs, strict=True):
        for values in variables:
            statistics.assert_gaussian(values, stddev)
            assert stats.kstest(values / stddev, "norm").pvalue > 1e-9
            flat.append(values)
    for place, one in enumerate(flat):
        for other in flat[:place]:
            statistics.assert_uncorrelated(one, other)


class NoiseTest(parameterized.TestCase):
    @parameterized.parameters(("server", False), ("client", False), ("server", True))
    def test_of_every_variable_and_round(self, site, xla):
        moves, _ = train(fixed(site), 2, options={"jit_compile": xla})
        assert_is_noise(moves, [Z * CLIP / CLIENTS] * 2)
        self.assertLen(moves[0], 6)

    @parameterized.parameters("float16", "bfloat16")
    def test_of_a_short_dtype_is_float32_before_it_is_rounded(self, dtype):
        # Bit for bit what a float32 model moves to, rounded once.
        short, long = model(dtype=dtype), model()
        long.set_weights([w.astype(np.float32) for w in short.get_weights()])
        for made in (short, long):
            train(fixed(), made=made, seed=4)
        for one, other in zip(short.get_weights(), long.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other.astype(one.dtype))

    def test_without_a_seed_depends_on_nothing_that_a_user_can_set(self):
        seen, cohorts = [], set()
        for _ in range(2):
            tf.keras.utils.set_random_seed(7)
            tf.random.set_seed(7)
            np.random.seed(7)
            random.seed(7)
            fed = federated(fixed(), 10, sampling="poisson")
            moves = Moves()
            toy.fit(fed, data=empty_clients(200), callbacks=[moves])
            seen.append(moves.rounds[0])
            cohorts.add(tuple(fed.run.sampler.cohort(0)))
        assert_is_noise(seen, [Z * CLIP / 10] * 2)
        self.assertLen(cohorts, 2)  # Two alike: less than once in 1e15.


class ExactNoiseTest(parameterized.TestCase):
    """Noise on a grid has the same law, is refused elsewhere, and is told of."""

    @parameterized.parameters(
        {"jit_compile": True, "num_replicas": 2}, {"runtime": True}
    )
    def test_of_every_variable_and_round(self, runtime=False, **options):
        fit = {"runtime": hostile.HereWorkers()} if runtime else {}
        options = {"noise_generator": "exact", **options}
        moves, _ = train(fixed(), 2, options=options, **fit)
        assert_is_noise(moves, [Z * CLIP / CLIENTS] * 2)

    @parameterized.parameters(
        tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0, noise_site="client"),
        tfdp_fl.AdaptiveClipping(noise_multiplier=1.0),
        tfdp_fl.MedianClipping(noise_multiplier=1.0),
        tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.0),
        tfdp_fl.NbAFL(epsilon=1.0, constant=1.0, weight_clip=1.0),
        tfdp_fl.CorrelatedNoise(
            clip_norm=1.0, noise_multiplier=1.0, rounds=4, min_separation=2
        ),
        tfdp_fl.QueryMechanism(
            query=tfp.GaussianSumQuery(1.0, 1.0),
            dp_event=dp_accounting.GaussianDpEvent(1.0),
        ),
        tfdp_fl.NoPrivacy(),
    )
    def test_other_mechanisms_are_refused(self, mechanism):
        with self.assertRaisesRegex(ValueError, "'exact' needs FixedClipping"):
            toy.federated(mechanism, sampling="cyclic", noise_generator="exact")

    @parameterized.parameters(1e6, 1e-7, ((1.0, 2.0**19),), lambda t: 1e6**t)
    def test_noise_that_the_grid_has_no_room_for(self, noise_multiplier):
        mechanism = tfdp_fl.FixedClipping(
            clip_norm=1.0, noise_multiplier=noise_multiplier
        )
        fed = toy.federated(mechanism, noise_generator="exact")
        with self.assertRaisesRegex(ValueError, "noise_multiplier must be 0"):
            toy.fit(fed, 2)
        self.assertIsNone(fed.run)  # Nothing began.

    def test_what_else_is_refused(self):
        fed = toy.federated(noise_generator="exact")
        with self.assertRaisesRegex(ValueError, "seed must be None"):
            toy.fit(fed, seed=3)
        with self.assertRaisesRegex(ValueError, "audit must be None"):
            audit = tfdp_fl.auditing.CanaryAudit(num_canaries=20)
            toy.fit(fed, audit=audit)
        with self.assertRaisesRegex(ValueError, "secure_aggregation must be"):
            toy.federated(
                noise_generator="exact",
                secure_aggregation=AdditiveSecretSharing(),
            )

    def test_ledger_and_statement_say_which_noise_it_was(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        stop = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: setattr(fed, "stop_training", True)
        )
        for generator, resume, caveats in (
            ("philox", None, {"pseudorandom_noise"}),
            # It goes on with the other.
            ("exact", folder, {"pseudorandom_noise", "exact_noise"}),
        ):
            fed = toy.federated(noise_generator=generator)
            saved = [callbacks.RoundCheckpoint(folder), stop]
            toy.fit(fed, 2, saved, resume_from=resume)
            entry = accounting.PrivacyLedger.read(folder / "ledger.jsonl").entries[-1]
            said = entry.details.get("noise_generator", "philox")
            self.assertEqual(said, generator)
            found = fed.privacy_statement(1e-3, "dict")["caveats"]
            self.assertEqual(
                found.keys() & {"pseudorandom_noise", "exact_noise"}, caveats
            )
        self.assertEqual(fed.rounds, 2)
        self.assertIn("rounded to that grid", found["exact_noise"])


def _local(gone=0, rounds=2, z=Z, sampling="fixed_size", m=5, **options):
    """Trains five empty clients by local noise; the last ones cannot be read."""

    def read(client):
        if client >= 5 - gone:
            raise OSError("switched off")
        return np.zeros([0, 1], np.float32), np.zeros([0], np.int32)

    spec = empty_clients().element_spec
    clients = FederatedDataset.from_client_fn(range(5), read, spec)
    mechanism = tfdp_fl.LocalDP(clip_norm=CLIP, noise_multiplier=z)
    fed, moves = federated(mechanism, m, sampling=sampling, **options), Moves()
    toy.fit(fed, rounds, [moves], data=clients)
    return fed, [[np.concatenate(each)] for each in moves.rounds]


_SECURE = {"secure_aggregation": AdditiveSecretSharing(max_share_value=1.0)}


class LocalDropoutsTest(parameterized.TestCase):
    """Local noise where clients drop out: what is released, and what is charged."""

    def _assert_charged(self, fed, rounds=2):
        # Everybody who was drawn, as what they sent may have been seen.
        self.assertEqual(fed.spending.clients.participations.tolist(), [rounds] * 5)
        wanted = accounting.gaussian_epsilon(Z / (2 * rounds**0.5), 1e-3)
        self.assertAlmostEqual(fed.epsilon(1e-3), wanted, places=6)

    @parameterized.product(gone=(0, 1, 2), options=({}, _SECURE))
    def test_the_mean_of_those_who_answered_has_the_noise_of_each(self, gone, options):
        fed, moves = _local(gone, **options)
        assert_is_noise(moves, [Z * CLIP / (5 - gone) ** 0.5] * 2)
        self._assert_charged(fed)
        # The noise of those who are missing is missing too.
        self.assertEqual(math.isinf(fed.central_epsilon(1e-3)), gone > 0)

    @parameterized.parameters(
        (5, {}),
        (1, {"on_client_failure": "abort"}),
        (3, _SECURE),  # Two are no group.
    )
    def test_a_round_that_releases_nothing_is_charged(self, gone, options):
        fed, moves = _local(gone, **options)
        for move in moves:
            np.testing.assert_array_equal(move[0], np.zeros_like(move[0]))
        self._assert_charged(fed)


class LastCohortTest(parameterized.TestCase):
    """Five clients, four a round: the second round of a pass has one."""

    def _moved(self, mechanism):
        fed, moves = federated(mechanism, 4, sampling="shuffled"), Moves()
        toy.fit(fed, 2, [moves], data=empty_clients(5))
        return moves.rounds

    def test_is_divided_by_the_fixed_m(self):
        assert_is_noise(self._moved(fixed()), [Z * CLIP / 4] * 2)

    def test_counts_with_the_noise_for_the_fixed_m(self):
        # m/20 of a cohort of one would be less than z/2, and the noise NaN.
        for moved in self._moved(tfdp_fl.AdaptiveClipping(noise_multiplier=0.3)):
            self.assertTrue(np.isfinite(np.concatenate(moved)).all())

    def test_missing_noises_give_no_central_guarantee(self):
        fed, _ = _local(rounds=1, sampling="shuffled", m=4)
        self.assertTrue(math.isfinite(fed.central_epsilon(1e-5)))
        fed, _ = _local(rounds=2, sampling="shuffled", m=4)
        self.assertEqual(fed.central_epsilon(1e-5), math.inf)
        self.assertTrue(math.isfinite(fed.epsilon(1e-5)))
