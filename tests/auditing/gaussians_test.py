"""Tests of epsilon between two Gaussians."""

import math

import numpy as np
from absl.testing import absltest, parameterized
from scipy import integrate, stats

from tfdp_fl.accounting import gaussian
from tfdp_fl.auditing import estimate


class GaussiansTest(parameterized.TestCase):
    @parameterized.product(z=(0.3, 0.5, 1.0, 2.0, 10.0), delta=(1e-6, 1e-3))
    def test_of_equal_spread_it_is_the_gaussian_mechanism(self, z, delta):
        # Moved and stretched, which changes nothing.
        found = estimate.epsilon_of(5 + 3 / z, 3.0, 5.0, 3.0, delta)
        self.assertAlmostEqual(found, gaussian.gaussian_epsilon(z, delta), delta=1e-6)

    @parameterized.parameters((0.7, 1.3, 0.5), (1.2, 0.8, 2.0), (0.0, 2.0, 1.0))
    def test_delta_is_the_integral(self, mean, std, epsilon):
        p, q = stats.norm(mean, std), stats.norm(0.2, 1.0)

        def excess(x):
            return max(0.0, p.pdf(x) - math.exp(epsilon) * q.pdf(x))

        wanted = sum(
            integrate.quad(excess, low, low + 0.25, epsabs=1e-12)[0]
            for low in np.arange(-20, 20, 0.25)
        )
        found = estimate.delta_of(epsilon, mean, std, 0.2, 1.0)
        self.assertAlmostEqual(found, wanted, places=7)

    def test_the_same_gaussian_costs_nothing(self):
        self.assertEqual(estimate.epsilon_of(1.0, 2.0, 1.0, 2.0, 1e-9), 0.0)

    def test_order_does_not_matter(self):
        self.assertAlmostEqual(
            estimate.epsilon_of(1.0, 2.0, 0.0, 1.0, 1e-4),
            estimate.epsilon_of(0.0, 1.0, 1.0, 2.0, 1e-4),
        )

    @parameterized.parameters(({"delta": 0.0},), ({"std": 0.0},))
    def test_arguments(self, change):
        arguments = {
            "mean": 0.0,
            "std": 1.0,
            "other_mean": 0.0,
            "other_std": 1.0,
            "delta": 1e-3,
            **change,
        }
        with self.assertRaisesRegex(ValueError, next(iter(change))):
            estimate.epsilon_of(**arguments)


if __name__ == "__main__":
    absltest.main()
