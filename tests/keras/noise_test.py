"""The noise in a trained model is what was paid for, variable by variable.

All clients are empty, so that a model moves by the noise alone: every move of a
variable is compared with the formula. More of it, every mechanism and runtime,
is in `tests/stress/noise_stress.py`.
"""

from __future__ import annotations

import random

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized
from scipy import stats

import tfdp_fl
from tests.mechanisms import statistics
from tfdp_fl.datasets import FederatedDataset

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


def train(mechanism, rounds=1, made=None, sampling="fixed_size", options=None, **fit):
    """Trains on empty clients; returns the moves and the history."""
    options = options or {}
    compiled = {"jit_compile": options.pop("jit_compile", False)}
    fed = tfdp_fl.DPFederatedModel(
        model() if made is None else made,
        mechanism,
        CLIENTS,
        sampling,
        **{"num_replicas": 1, **options},
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fed.compile(tf.keras.optimizers.SGD(0.1), loss, **compiled)
    moves = Moves()
    history = fed.fit(empty_clients(), rounds, verbose=0, callbacks=[moves], **fit)
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

    def test_without_a_seed_hangs_on_nothing_that_a_user_can_set(self):
        seen, cohorts = [], set()
        for _ in range(2):
            tf.keras.utils.set_random_seed(7)
            tf.random.set_seed(7)
            np.random.seed(7)
            random.seed(7)
            fed = tfdp_fl.DPFederatedModel(
                model(), fixed(), 10, "poisson", num_replicas=1
            )
            fed.compile(
                "sgd",
                tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=False,
            )
            moves = Moves()
            fed.fit(empty_clients(200), verbose=0, callbacks=[moves])
            seen.append(moves.rounds[0])
            cohorts.add(tuple(fed.run.sampler.cohort(0)))
        assert_is_noise(seen, [Z * CLIP / 10] * 2)
        self.assertLen(cohorts, 2)  # Two alike: less than once in 1e15.


if __name__ == "__main__":
    absltest.main()
