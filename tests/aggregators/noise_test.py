"""The noise of the aggregators, inside TFF.

A standard deviation is estimated from D = 40 000 coordinates; it is off by
more than 3 % (8.5 of its own standard deviations, 1/sqrt(2D) = 0.35 %) with a
probability below 1e-16, and a factor of 1.1 is always seen. A correlation of
independent draws exceeds 0.035 (7 standard deviations of 1/sqrt(D)) with a
probability below 1e-11. All of this file together: below 1e-9.
"""

import numpy as np
import tensorflow_federated as tff
from absl.testing import absltest, parameterized

from tfdp_fl import aggregators

SIZE = 40_000
VALUE = tff.types.to_type([(np.float32, [SIZE // 2]), (np.float32, [SIZE // 2])])
TOLERANCE = 0.03
CORRELATION = 0.035
CLIENTS = 4


def zeros(num_clients=CLIENTS):
    return [[np.zeros(SIZE // 2, np.float32)] * 2] * num_clients


def flat(result):
    return np.concatenate(result).astype(np.float64)


class NoiseTest(parameterized.TestCase):
    def assert_independent(self, draws):
        for draw in draws:
            # The two tensors of a value, too.
            halves = np.corrcoef(draw[: SIZE // 2], draw[SIZE // 2 :])[0, 1]
            self.assertLess(abs(halves), CORRELATION * 2**0.5)
        for i, first in enumerate(draws):
            for second in draws[i + 1 :]:
                correlation = np.corrcoef(first, second)[0, 1]
                self.assertLess(abs(correlation), CORRELATION)

    @parameterized.named_parameters(
        (
            "server",
            aggregators.FixedClippingFactory(
                clip_norm=2.0, noise_multiplier=1.5, clients_per_round=CLIENTS
            ),
            2.0 * 1.5 / CLIENTS,
        ),
        # Four equal draws would give 1/2 sqrt(4) = 2 times the sum's stddev.
        (
            "client",
            aggregators.FixedClippingFactory(
                clip_norm=2.0,
                noise_multiplier=1.5,
                clients_per_round=CLIENTS,
                noise_site="client",
            ),
            2.0 * 1.5 / CLIENTS,
        ),
        (
            "local",
            aggregators.LocalDPFactory(
                clip_norm=2.0, noise_multiplier=1.5, clients_per_round=CLIENTS
            ),
            2.0 * 1.5 / CLIENTS**0.5,
        ),
        (
            "adaptive_client",
            aggregators.AdaptiveClippingFactory(
                noise_multiplier=1.0,
                initial_clip_norm=2.0,
                clip_learning_rate=0.0,
                clients_per_round=CLIENTS,
                count_noise_stddev=1.0,
                noise_site="client",
            ),
            2.0 * (1 - 0.25) ** -0.5 / CLIENTS,
        ),
    )
    def test_scale_and_independence(self, factory, stddev):
        process = factory.create(VALUE)
        first = process.next(process.initialize(), zeros())
        second = process.next(first.state, zeros())
        repeated = process.next(first.state, zeros())
        fresh = process.next(process.initialize(), zeros())
        again = factory.create(VALUE)
        rebuilt = again.next(again.initialize(), zeros())
        draws = [
            flat(output.result) for output in (first, second, repeated, fresh, rebuilt)
        ]
        for draw in draws:
            self.assertAlmostEqual(draw.mean(), 0, delta=stddev * CORRELATION)
            self.assertAlmostEqual(draw.std() / stddev, 1, delta=TOLERANCE)
        self.assert_independent(draws)

    def test_layers_of_adaptive_local_dp(self):
        factory = aggregators.AdaptiveLocalDPFactory(
            epsilon=5.0,
            delta=1e-5,
            rounds=10,
            clipping_radius=0.5,
            clients_per_round=CLIENTS,
        )
        process = factory.create(VALUE)
        draw = flat(process.next(process.initialize(), zeros()).result)
        ratio = factory.mechanism.noise_over_sensitivity(factory.deployment)
        # Two layers that are released together: sqrt(2) times the noise.
        stddev = 2 * 0.5 * ratio * 2**0.5 / CLIENTS**0.5
        self.assertAlmostEqual(draw.std() / stddev, 1, delta=TOLERANCE)
        self.assert_independent([draw])


if __name__ == "__main__":
    absltest.main()
