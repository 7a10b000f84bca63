"""The shared formulas, on floats, numpy arrays and tensors alike."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl.mechanisms import formulas


class FormulasTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((1.0, 2.5), (0.3, 1.0), (2.0, 1.001))
    def test_update_noise_multiplier(self, z, sigma_b):
        wanted = (z**-2 - (2 * sigma_b) ** -2) ** -0.5
        self.assertAlmostEqual(
            formulas.update_noise_multiplier(z, sigma_b), wanted, places=9
        )
        for convert in (np.float64, lambda x: tf.constant(x, tf.float64)):
            got = formulas.update_noise_multiplier(convert(z), convert(sigma_b))
            self.assertAllClose(got, wanted, rtol=1e-9)

    def test_no_noise_stays_no_noise(self):
        self.assertEqual(formulas.update_noise_multiplier(0.0, 0.0), 0.0)
        self.assertEqual(formulas.update_noise_multiplier(0.0, 2.0), 0.0)

    @parameterized.parameters((1.0, 0.5), (1.0, 0.0), (3.0, 1.0))
    def test_a_count_that_costs_everything_is_refused(self, z, sigma_b):
        with self.assertRaisesRegex(ValueError, "2 \\* count_noise_stddev"):
            formulas.update_noise_multiplier(z, sigma_b)

    def test_what_is_allowed_is_right_in_float32(self):
        # Closer to 2 sigma_b the noise would be wrong, and infinite at last.
        with self.assertRaisesRegex(ValueError, "ten-thousandth"):
            formulas.check_count_noise(2 * (1 - 1e-8), 1.0)
        for sigma_b in (0.3, 1.0, 2.5, 37.0):
            z = formulas.largest_noise_multiplier(sigma_b)
            formulas.check_count_noise(z, sigma_b)
            wanted = (z**-2 - (2 * sigma_b) ** -2) ** -0.5
            got = formulas.update_noise_multiplier(
                tf.constant(z, tf.float32), tf.constant(sigma_b, tf.float32)
            )
            self.assertAllClose(got, wanted, rtol=2e-3)

    def test_next_clip_norm(self):
        # All within the clip norm: it falls; none: it rises.
        wanted = {1.0: 0.1 * math.exp(-0.1), 0.0: 0.1 * math.exp(0.1)}
        for fraction, value in wanted.items():
            self.assertAlmostEqual(
                formulas.next_clip_norm(0.1, fraction, 0.5, 0.2), value
            )
            self.assertAllClose(
                formulas.next_clip_norm(
                    tf.constant(0.1), tf.constant(fraction), 0.5, 0.2, tf.exp
                ),
                value,
            )


if __name__ == "__main__":
    tf.test.main()
