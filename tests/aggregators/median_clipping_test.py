import numpy as np
import tensorflow_federated as tff
from absl.testing import absltest

from tfdp_fl import aggregators

# A client's own axis shows what is left of its update in the mean.
VECTOR = tff.TensorType(np.float32, [4])
NORMS = (0.5, 1.0, 2.0, 8.0)
VALUES = [norm * np.eye(4, dtype=np.float32)[row] for row, norm in enumerate(NORMS)]


class MedianClippingFactoryTest(absltest.TestCase):
    def test_clips_to_the_median_of_the_same_round(self):
        process = aggregators.MedianClippingFactory(
            noise_multiplier=0.0, clients_per_round=4
        ).create(VECTOR)
        output = process.next(process.initialize(), VALUES)
        np.testing.assert_allclose(4 * output.result, [0.5, 1.0, 1.5, 1.5], rtol=1e-6)
        self.assertAlmostEqual(output.measurements["clip_norm"], 1.5)
        self.assertAlmostEqual(output.measurements["clipped_fraction"], 0.5)

        # The clip of one round says nothing about the next one's.
        output = process.next(output.state, [3 * value for value in VALUES])
        self.assertAlmostEqual(output.measurements["clip_norm"], 4.5)

        # Nobody there: the last clip stays, and the mean is zero.
        output = process.next(output.state, [])
        self.assertAlmostEqual(output.measurements["clip_norm"], 4.5)
        np.testing.assert_array_equal(output.result, np.zeros(4))

        # A client with a NaN counts as a norm of zero, and is discarded.
        values = [np.full(4, np.nan, np.float32), *VALUES[1:]]
        output = process.next(output.state, values)
        self.assertEqual(output.measurements["discarded_clients"], 1)
        np.testing.assert_allclose(4 * output.result, [0.0, 1.0, 1.5, 1.5], rtol=1e-6)

    def test_private_median_is_near_the_median(self):
        process = aggregators.MedianClippingFactory(
            noise_multiplier=0.0,
            clients_per_round=4,
            median_noise_multiplier=1e-3,
        ).create(VECTOR)
        # Almost no noise, and two norms that are the median either way.
        values = [VALUES[0], VALUES[2], VALUES[2], VALUES[3]]
        output = process.next(process.initialize(), values)
        self.assertAlmostEqual(output.measurements["clip_norm"], 2.0, delta=0.02)


if __name__ == "__main__":
    absltest.main()
