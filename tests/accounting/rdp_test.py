"""Renyi curves against dp_accounting's own."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized
from dp_accounting import rdp as dp_accounting_rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from tfdp_fl.accounting import rdp

_INTEGERS = tuple(float(a) for a in (*range(2, 65), 128, 256, 512))
_Q = st.floats(1e-4, 0.9)
_Z = st.floats(0.4, 10)


def _dp_accounting(event, relation, orders):
    accountant = dp_accounting_rdp.RdpAccountant(orders, relation)
    accountant.compose(event)
    return np.array(accountant._rdp)


class PoissonTest(parameterized.TestCase):
    @settings(max_examples=15, deadline=None)
    @given(_Q, _Z)
    def test_integer_orders_are_dp_accounting_s(self, q, z):
        expected = _dp_accounting(
            dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)),
            dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
            _INTEGERS,
        )
        np.testing.assert_allclose(
            rdp.poisson_gaussian_rdp(q, z, _INTEGERS),
            expected,
            rtol=1e-8,
            atol=1e-11,
        )

    @parameterized.product(q=[0.003, 0.2], z=[0.35, 1.0, 3.0])
    def test_fractional_orders_are_the_integral(self, q, z):
        orders = (1.05, 1.5, 2.7, 8.3)
        found = rdp.poisson_gaussian_rdp(q, z, orders)
        for alpha, value in zip(orders, found, strict=True):
            expected = _renyi_by_quadrature(q, z, alpha)
            self.assertAlmostEqual(value, expected, delta=1e-7 * expected)

    @settings(max_examples=30, deadline=None)
    @given(_Q, st.floats(0.01, 20))
    def test_the_curve_rises_with_the_order(self, q, z):
        curve = rdp.poisson_gaussian_rdp(q, z, rdp.DENSE_ORDERS)
        self.assertTrue(np.all(np.isfinite(curve)))
        self.assertTrue(np.all(np.diff(curve) >= -1e-9 * curve[1:] - 1e-12))

    @parameterized.parameters(0.001, 0.02, 0.029, 0.031)
    def test_hardly_any_noise_is_bounded_quickly(self, z):
        # Above the exact value and never above the unsampled one.
        curve = rdp.poisson_gaussian_rdp(0.1, z, rdp.DENSE_ORDERS)
        unsampled = rdp.gaussian_rdp(z, rdp.DENSE_ORDERS)
        self.assertTrue(np.all(curve <= unsampled))
        self.assertTrue(np.all(curve > 0))

    def test_degenerate_parameters(self):
        orders = (1.5, 2.0, 3.0)
        np.testing.assert_array_equal(
            rdp.poisson_gaussian_rdp(0.0, 1.0, orders), np.zeros(3)
        )
        np.testing.assert_array_equal(
            rdp.poisson_gaussian_rdp(0.1, 0.0, orders), np.full(3, np.inf)
        )
        np.testing.assert_array_equal(
            rdp.poisson_gaussian_rdp(1.0, 2.0, orders), np.array(orders) / 8
        )


class FixedSizeTest(parameterized.TestCase):
    @settings(max_examples=5, deadline=None)
    @given(_Q, st.floats(0.3, 2.5))
    def test_integer_orders_are_dp_accounting_s(self, q, z):
        n = 10_000
        m = max(1, round(q * n))
        orders = (*_INTEGERS[:30], 256.0, 300.0)
        expected = _dp_accounting(
            dp_accounting.SampledWithoutReplacementDpEvent(
                n, m, dp_accounting.GaussianDpEvent(z)
            ),
            dp_accounting.NeighboringRelation.REPLACE_ONE,
            orders,
        )
        found = rdp.fixed_size_gaussian_rdp(m / n, z, orders)
        capped = np.minimum(expected, rdp.gaussian_rdp(z, orders))
        np.testing.assert_allclose(found, capped, rtol=1e-6, atol=1e-12)

    def test_fractional_orders_are_interpolated_from_above(self):
        q, z = 0.1, 1.0
        curve = rdp.fixed_size_gaussian_rdp(q, z, (2.0, 2.25, 3.0))
        # log A is convex and linear in between here.
        log_a = curve * (np.array((2.0, 2.25, 3.0)) - 1)
        self.assertAlmostEqual(log_a[1], 0.75 * log_a[0] + 0.25 * log_a[2])

    @parameterized.parameters(0.05, 0.5, 2.0, 20.0, 200.0)
    def test_the_bound_covers_a_real_replacement(self, z):
        # One client replaced by its opposite, in another's place: the cohort's
        # sum moves from +1 to -1 with probability q, and is 0 otherwise. The
        # bound's noise is against the sensitivity 2.
        q, orders = 0.3, (2.0, 3.0, 8.0, 30.0)
        bound = rdp.fixed_size_gaussian_rdp(q, z / 2, orders)
        for alpha, value in zip(orders, bound, strict=True):
            actual = _renyi_of_mixtures(q, z, alpha)
            self.assertGreaterEqual(value, actual * (1 - 1e-9))

    def test_everybody_is_a_plain_gaussian(self):
        np.testing.assert_array_equal(
            rdp.fixed_size_gaussian_rdp(1.0, 0.5, (2.0, 4.0)), [4.0, 8.0]
        )


class ConversionTest(parameterized.TestCase):
    @settings(max_examples=50, deadline=None)
    @given(
        _Q,
        st.floats(0.5, 20),
        st.integers(1, 5000),
        st.floats(math.log(1e-12), math.log(0.3)),
    )
    def test_conversions_are_dp_accounting_s(self, q, z, steps, log_delta):
        orders = np.array([1.05, 1.5, 2, 3, 5, 8, 20, 64, 256])
        curve = steps * rdp.poisson_gaussian_rdp(q, z, tuple(orders))
        delta = math.exp(log_delta)
        found, _ = rdp.compute_epsilon(orders, curve, delta)
        module = dp_accounting_rdp.rdp_privacy_accountant
        expected, _ = module.compute_epsilon(orders, curve, delta)
        self.assertAlmostEqual(found, expected, delta=1e-9 * expected + 1e-12)
        found, _ = rdp.compute_delta(orders, curve, expected + 0.5)
        expected, _ = module.compute_delta(orders, curve, expected + 0.5)
        self.assertAlmostEqual(found, expected, delta=1e-9 * expected)

    def test_the_grid_does_not_limit_a_gaussian(self):
        # Against the best real order: within 0.1 % from epsilon 0.05 to 1e4.
        orders = np.array(rdp.DENSE_ORDERS)
        for mu in np.geomspace(0.01, 100, 25):
            z = 1 / mu
            found, order = rdp.compute_epsilon(
                orders, rdp.gaussian_rdp(z, rdp.DENSE_ORDERS), 1e-5
            )
            fine = order + (order - 1) * np.linspace(-0.1, 0.1, 2001)
            best, _ = rdp.compute_epsilon(fine, rdp.gaussian_rdp(z, tuple(fine)), 1e-5)
            self.assertLessEqual(found, best * 1.001)

    def test_the_default_orders_of_dp_accounting_are_in_the_grid(self):
        module = dp_accounting_rdp.rdp_privacy_accountant
        self.assertSequenceEqual(
            rdp.DEFAULT_DP_ACCOUNTING_ORDERS, module.DEFAULT_RDP_ORDERS
        )
        self.assertContainsSubset(rdp.DEFAULT_DP_ACCOUNTING_ORDERS, rdp.DENSE_ORDERS)


def _renyi_by_quadrature(q, z, alpha):
    def integrand(x):
        p = stats.norm.logpdf(x, 0, z)
        w = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))
        return math.exp(p + alpha * w)

    points = np.linspace(-15 * z, alpha + 15 * z, 40)
    total = sum(
        integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-11)[0]
        for a, b in itertools.pairwise(points)
    )
    return math.log(total) / (alpha - 1)


def _renyi_of_mixtures(q, z, alpha):
    x = np.linspace(-alpha * 3 - 15 * z, alpha * 3 + 15 * z, 400_001)
    zero = math.log1p(-q) + stats.norm.logpdf(x, 0, z)
    p = np.logaddexp(zero, math.log(q) + stats.norm.logpdf(x, 1, z))
    r = np.logaddexp(zero, math.log(q) + stats.norm.logpdf(x, -1, z))
    terms = alpha * p + (1 - alpha) * r
    top = terms.max()
    total = np.exp(terms - top).sum() * (x[1] - x[0])
    return (math.log(total) + top) / (alpha - 1)


if __name__ == "__main__":
    absltest.main()
