"""Noise where `noise_stress.py` does not look: who adds it, and who carries it.

The local mechanisms of `fit` that it leaves out, TFF's factories, and Flower's
wrappers. Nobody's update but the noise: every variable of every round is
compared with the paper's formula. If two of the four clients that add noise
had the same, the stddev of the mean would be 1.22 times it.
"""

from __future__ import annotations

import importlib.util
import math
import unittest
from collections.abc import Callable
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import noise_test
from tfdp_fl.mechanisms import noise

_TFF = importlib.util.find_spec("tensorflow_federated")
_WIDTH, _M, _ROUNDS = 200_000, 4, 2
_S, _Z = noise_test.CLIP, noise_test.Z
_FIXED = _Z * _S / _M
_CORRELATED_ROUNDS = 4

# AdaptiveLocalDP as published: sigma_l = 2 r sqrt(2 ln(1.25 / delta_r)) /
# epsilon_r, epsilon_r = epsilon / T, delta_r = delta / T; a mean of m.
_PUBLISHED = {
    "epsilon": 1.0,
    "delta": 1e-3,
    "clipping_radius": _S,
    "calibration": "classic",
    "composition": "basic",
    "layers": "separate",
}


def _adaptive_local(rounds: int) -> float:
    each = 2 * _S * math.sqrt(2 * math.log(1.25 * rounds / 1e-3)) * rounds
    return each / _M**0.5


# NbAFL: sigma_U = 2 C T c / (n epsilon), a mean of m; and sigma_D = 2 c C
# sqrt(T^2 - L^2 N) / (n N epsilon) where T > sqrt(N) L.
_C, _CONSTANT, _EXAMPLES, _EPSILON = 50.0, 1.5, 5, 1e6


def _nbafl(rounds: int, downlink: bool = True) -> float:
    up = 2 * _C * rounds * _CONSTANT / (_EXAMPLES * _EPSILON)
    squares = rounds**2 - _M**2 * _M
    down = 2 * _CONSTANT * _C * max(0, squares) ** 0.5
    down /= _EXAMPLES * _M * _EPSILON
    return math.hypot(up / _M**0.5, down * downlink)


def mechanisms() -> dict[str, tuple[tfdp_fl.Mechanism, Callable]]:
    """Returns mechanisms, and the stddev on their mean given the clip."""
    z = (_Z**-2 - (2 * 2.0) ** -2) ** -0.5
    adaptive = {"initial_clip_norm": _S, "count_noise_stddev": 2.0}
    return {
        "fixed": (noise_test.fixed(), lambda clip: _FIXED),
        "fixed_client": (noise_test.fixed("client"), lambda clip: _FIXED),
        "adaptive": (
            tfdp_fl.AdaptiveClipping(noise_multiplier=_Z, **adaptive),
            lambda clip: z * clip / _M,
        ),
        "adaptive_client": (
            tfdp_fl.AdaptiveClipping(
                noise_multiplier=_Z, noise_site="client", **adaptive
            ),
            lambda clip: z * clip / _M,
        ),
        "median": (
            tfdp_fl.MedianClipping(
                noise_multiplier=_Z * 1e3, median_noise_multiplier=0.01
            ),
            lambda clip: _Z * 1e3 * clip / _M,
        ),
        "local": (
            tfdp_fl.LocalDP(clip_norm=_S, noise_multiplier=_Z),
            lambda clip: _Z * _S / _M**0.5,
        ),
        "adaptive_local": (
            tfdp_fl.AdaptiveLocalDP(**_PUBLISHED),
            lambda clip: _adaptive_local(_ROUNDS),
        ),
    }


def correlated() -> tfdp_fl.CorrelatedNoise:
    return tfdp_fl.CorrelatedNoise(
        clip_norm=_S,
        noise_multiplier=_Z,
        strategy="blt:2",
        rounds=_CORRELATED_ROUNDS,
        min_separation=1,
    )


def undone(mechanism, rounds):
    """Returns C times the noise of the rounds: what was drawn for each."""
    c = mechanism.generator.coefficients
    return [
        [
            sum(c[j] * rounds[t - j][v] for j in range(t + 1))
            for v in range(len(rounds[0]))
        ]
        for t in range(len(rounds))
    ]


class FitTest(parameterized.TestCase):
    @parameterized.product(xla=[False, True], replicas=[1, 2])
    def test_adaptive_local(self, xla, replicas):
        rounds, _ = noise_test.train(
            tfdp_fl.AdaptiveLocalDP(**_PUBLISHED),
            1,
            noise_test.model(_WIDTH),
            options={
                "jit_compile": xla,
                "num_replicas": replicas,
            },
        )
        # One round: the next one's radii are the norms of nothing, and zero.
        noise_test.assert_is_noise(rounds, [_adaptive_local(1)])

    @parameterized.product(rounds=[_ROUNDS, 10], xla=[False, True])
    def test_nbafl(self, rounds, xla):
        tf.keras.utils.set_random_seed(1)
        layers = tf.keras.layers
        model = tf.keras.Sequential(
            [
                layers.Input((1,)),
                layers.Dense(_WIDTH),
                layers.Reshape((_WIDTH // 100, 100)),
                layers.GlobalAveragePooling1D(),
            ]
        )
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        fed = tfdp_fl.DPFederatedModel(
            model,
            tfdp_fl.NbAFL(epsilon=_EPSILON, constant=_CONSTANT, weight_clip=_C),
            _M,
            "fixed_size",
            num_replicas=2,
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Clients that do not move: their weights and their noise come back.
        fed.compile(tf.keras.optimizers.SGD(0.0), loss, jit_compile=xla)
        data = np.ones([_EXAMPLES, 1], "f4"), np.zeros(_EXAMPLES, "i4")
        moves = noise_test.Moves()
        fed.fit([data] * _M, rounds, verbose=0, callbacks=[moves])
        seen = moves.rounds[:_ROUNDS]
        noise_test.assert_is_noise(seen, [_nbafl(rounds)] * _ROUNDS)


@unittest.skipIf(_TFF is None, "TensorFlow Federated is not installed.")
class FactoriesTest(parameterized.TestCase):
    def _rounds(self, factory, count, weights=None, keep=2):
        import tensorflow_federated as tff

        value = tff.to_type([(np.float32, [_WIDTH])] * 2)
        types = [value] if weights is None else [value, np.float32]
        process = factory.create(*map(tff.to_type, types))
        state = process.initialize()
        zeros = [np.zeros(_WIDTH, np.float32)] * 2
        values = [[zeros] * _M]
        if weights is not None:
            values.append([weights] * _M)
        rounds, clips = [], []
        for _ in range(count):
            output = process.next(state, *values)
            state = output.state
            rounds.append([np.asarray(each) for each in output.result])
            clips.append(float(output.measurements["clip_norm"]))
        return rounds[:keep], clips[:keep]

    @parameterized.parameters(*mechanisms())
    def test_mechanism(self, name):
        from tfdp_fl import aggregators

        mechanism, stddev = mechanisms()[name]
        options = {"rounds": _ROUNDS} if name.endswith("local") else {}
        rounds, clips = self._rounds(
            aggregators.from_mechanism(mechanism, _M, **options), _ROUNDS
        )
        noise_test.assert_is_noise(rounds, [stddev(clip) for clip in clips])

    def test_correlated(self):
        from tfdp_fl import aggregators

        mechanism, count = correlated(), _CORRELATED_ROUNDS
        rounds, _ = self._rounds(
            aggregators.from_mechanism(mechanism, _M), count, keep=count
        )
        noise_test.assert_is_noise(undone(mechanism, rounds), [_FIXED] * count)

    @parameterized.parameters(_ROUNDS, 10)
    def test_nbafl(self, planned):
        from tfdp_fl import aggregators

        factory = aggregators.NbAFLFactory(
            epsilon=_EPSILON,
            constant=_CONSTANT,
            weight_clip=_C,
            clients_per_round=_M,
            num_clients=_M,
            rounds=planned,
            min_examples=_EXAMPLES,
        )
        rounds, _ = self._rounds(factory, _ROUNDS, np.float32(_EXAMPLES))
        noise_test.assert_is_noise(rounds, [_nbafl(planned)] * _ROUNDS)

    def test_a_factor_of_two_percent_is_noticed(self):
        from tfdp_fl import aggregators

        add = noise.add_normal
        for name in ("fixed", "local"):
            mechanism, stddev = mechanisms()[name]
            with mock.patch.object(noise, "add_normal", lambda t, s: add(t, s * 1.02)):
                rounds, clips = self._rounds(
                    aggregators.from_mechanism(mechanism, _M), _ROUNDS
                )
            with self.assertRaisesRegex(AssertionError, "stddev"):
                noise_test.assert_is_noise(rounds, map(stddev, clips))


if __name__ == "__main__":
    absltest.main()
