"""Renyi curves against dp-accounting's own, and against integrals."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
from absl.testing import parameterized
from scipy import integrate, stats

from tfdp_fl.accounting import rdp

_REMOVED = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACED = dp_accounting.NeighboringRelation.REPLACE_ONE


def _poisson(q, z):
    return dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))


def _curve(event, relation, most=64):
    """Returns the orders up to the most, and the divergences at them."""
    parts = [k for k, part in enumerate(rdp.PARTS) if part[0] < most]
    return (
        np.concatenate([rdp.PARTS[k] for k in parts]),
        np.concatenate([rdp.curve(event, relation, k) for k in parts]),
    )


class CurveTest(parameterized.TestCase):
    @parameterized.product(q=[0.003, 0.2], z=[0.35, 1.0, 3.0])
    def test_fractional_orders_are_the_integral(self, q, z):
        orders, curve = _curve(_poisson(q, z), _REMOVED, 8)
        for alpha, value in list(zip(orders, curve, strict=True))[::12]:
            expected = _renyi_by_quadrature(q, z, alpha)
            self.assertAlmostEqual(value, expected, delta=1e-7 * expected)

    @parameterized.product(q=[0.001, 0.3, 0.9], z=[0.02, 0.4, 20.0])
    def test_the_curve_rises_with_the_order_and_sampling_never_costs(self, q, z):
        orders, curve = _curve(_poisson(q, z), _REMOVED)
        self.assertTrue(np.all(np.diff(curve) >= -1e-9 * curve[1:] - 1e-12))
        self.assertTrue(np.all(curve <= orders / (2 * z * z) * (1 + 1e-12)))

    def test_rounding_never_makes_a_round_free(self):
        # It was 0 in floating point, and so was epsilon, for any number of rounds.
        _, curve = _curve(_poisson(1e-9, 100.0), _REMOVED)
        self.assertTrue(np.all(curve > 0))

    @parameterized.parameters(0.05, 0.5, 2.0, 20.0, 200.0)
    def test_the_bound_covers_a_real_replacement(self, z):
        # One client replaced by its opposite, in another's place: the cohort's
        # sum moves from +1 to -1 with probability q, and is 0 otherwise. The
        # bound's noise is against the sensitivity 2.
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            10, 3, dp_accounting.GaussianDpEvent(z / 2)
        )
        orders, curve = _curve(event, _REPLACED, 32)
        for alpha in (2.0, 3.0, 8.0, 30.0):
            actual = _renyi_of_mixtures(0.3, z, alpha)
            self.assertGreaterEqual(curve[orders == alpha][0], actual * (1 - 1e-9))


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
