"""What rounding to the model's dtype leaves of clips and noise."""

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl.flower import release


def _sent(received, update, clip_norm, stddev):
    """Returns what a client sends whose training added `update`."""
    asked = release.Instruction(clip_norm, stddev, False)
    returned = [np.asarray(received, np.float64) + update]
    (array,) = release.released([received], returned, asked).arrays
    return array


class NoiseTest(parameterized.TestCase):
    # The gaps are 9.8e-4, 7.8e-3 and 1.2e-7: a share would be rounded away.
    @parameterized.parameters(
        (np.float16, 1.0, 6.5e-4),
        (np.float32, 1e5, 5.2e-3),
        (np.float32, 1.0, 8e-8),
        (np.float64, 1.0, 6.5e-4),
        (np.int64, 7, 6.5e-4),
    )
    def test_shares_that_are_rounded_add_up_to_what_is_charged(
        self, dtype, weight, clip_norm
    ):
        # 20 000 sums: 5 % are ten standard deviations of the estimate.
        received, clients = np.full(20_000, weight, dtype), 100
        total = np.zeros(len(received))
        for _ in range(clients):
            sent = _sent(received, 0.0, clip_norm, clip_norm / clients**0.5)
            total += np.asarray(sent, np.float64) - weight
        self.assertAlmostEqual(total.std() / clip_norm, 1.0, delta=0.05)
        self.assertAlmostEqual(total.mean() / clip_norm, 0.0, delta=0.07)

    @parameterized.parameters(
        (np.float32, 1.0, 0.1, np.float32),
        (np.float32, 1e5, 0.1, np.float64),
        (np.float32, 1e5, 0.2, np.float32),
        (np.float16, 1.0, 0.1, np.float16),
        (np.float16, 1.0, 0.01, np.float64),
        (np.float16, 1e-3, 2.0, np.float16),
        (np.float16, 1.0, 1e4, np.float64),
        (np.float64, 1e5, 0.1, np.float64),
    )
    def test_the_dtype_goes_by_the_model_and_the_noise_alone(
        self, dtype, weight, stddev, expected
    ):
        received = np.full(3, weight, dtype)
        for update in (0.0, 1e-9, 1e3, np.nan):
            sent = _sent(received, update, 1e-3, stddev)
            self.assertEqual(sent.dtype, expected)

    def test_noise_that_no_dtype_has_is_refused(self):
        with self.assertRaisesRegex(ValueError, "dpfedavg_noise_stddev.*1e-07"):
            _sent(np.full(3, 1e9), 0.0, 1e-6, 1e-7)


if __name__ == "__main__":
    absltest.main()
