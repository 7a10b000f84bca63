"""The Gaussian mechanism against its definition and known values."""

from __future__ import annotations

import math

from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from tfdp_fl.accounting import gaussian

_Z = st.floats(0.05, 100)
_EPSILON = st.floats(1e-3, 50)
_LOG_DELTA = st.floats(math.log(1e-30), math.log(0.2))


class GaussianTest(parameterized.TestCase):
    @parameterized.product(z=[0.3, 1.0, 4.0], epsilon=[0.0, 0.5, 3.0])
    def test_delta_is_the_hockey_stick_divergence(self, z, epsilon):
        p, q = stats.norm(1, z), stats.norm(0, z)
        # P > e^eps Q exactly from this point on.
        start = 0.5 + epsilon * z * z
        expected, _ = integrate.quad(
            lambda x: p.pdf(x) - math.exp(epsilon) * q.pdf(x),
            start,
            start + 40 * z,
            epsabs=1e-15,
            limit=200,
        )
        delta = gaussian.gaussian_delta(z, epsilon)
        self.assertAlmostEqual(delta, expected, delta=1e-9 * expected + 1e-14)

    @parameterized.product(
        z=[0.05, 3.0, 900.0, 9.9e5, 7.1e8, 2.5e14, 6.8e15, 2.2e17],
        epsilon_z=[0.0, 0.3, 12.0],
    )
    def test_delta_is_never_less_than_it_is(self, z, epsilon_z):
        # Much noise leaves last digits of nearly equal numbers: it was 0.
        epsilon = epsilon_z / z
        delta = gaussian.gaussian_delta(z, epsilon)
        self.assertGreaterEqual(delta, _mp_delta(z, epsilon))
        self.assertLessEqual(delta, _mp_delta(z, epsilon) * (1 + 1e-6) + 1e-12)

    def test_what_is_too_small_for_a_float_is_rounded_up(self):
        for z in (0.0, 1e-320, 1e-200, 1e-155):
            self.assertEqual(gaussian.gaussian_epsilon(z, 1e-3), math.inf)
            self.assertEqual(gaussian.gaussian_delta(z, 1.0), 1.0)
        self.assertEqual(gaussian.gaussian_epsilon(math.inf, 1e-5), 0.0)
        self.assertEqual(gaussian.gaussian_delta(math.inf, 0.0), 0.0)
        for delta in (0.0, 1.0, -1.0, math.nan):
            with self.assertRaisesRegex(ValueError, "delta"):
                gaussian.gaussian_epsilon(1.0, delta)
        # By the delta of epsilon = 0, 2 Phi(1 / 2z) - 1; it never came back.
        z = gaussian.analytic_noise_multiplier(1e-320, 1e-3)
        self.assertAlmostEqual(1e-3 * z * math.sqrt(2 * math.pi), 1, delta=1e-5)
        self.assertGreater(gaussian.analytic_noise_multiplier(1e308, 0.1), 0)
        with self.assertRaisesRegex(ValueError, "epsilon and delta must"):
            gaussian.analytic_noise_multiplier(1e-320, 1e-320)

    @settings(max_examples=150, deadline=None)
    @given(_Z, _LOG_DELTA)
    def test_epsilon_inverts_delta(self, z, log_delta):
        delta = math.exp(log_delta)
        epsilon = gaussian.gaussian_epsilon(z, delta)
        self.assertLessEqual(gaussian.gaussian_delta(z, epsilon), delta * (1 + 1e-9))
        if epsilon > 0:
            less = epsilon - 1e-6 * max(1.0, epsilon)
            if less > 0:
                self.assertGreater(gaussian.gaussian_delta(z, less), delta)

    @settings(max_examples=150, deadline=None)
    @given(_EPSILON, _LOG_DELTA)
    def test_the_analytic_noise_is_enough_and_the_smallest(self, epsilon, log_delta):
        delta = math.exp(log_delta)
        z = gaussian.analytic_noise_multiplier(epsilon, delta)
        self.assertLessEqual(gaussian.gaussian_delta(z, epsilon), delta * (1 + 1e-9))
        self.assertGreater(gaussian.gaussian_delta(z * (1 - 1e-6), epsilon), delta)


def _mp_delta(z, epsilon):
    import mpmath

    with mpmath.workdps(60):
        z, epsilon = mpmath.mpf(z), mpmath.mpf(epsilon)
        phi = lambda x: mpmath.erfc(-x / mpmath.sqrt(2)) / 2  # noqa: E731
        mu = 1 / z
        return float(
            phi(mu / 2 - epsilon / mu)
            - mpmath.exp(epsilon) * phi(-mu / 2 - epsilon / mu)
        )
