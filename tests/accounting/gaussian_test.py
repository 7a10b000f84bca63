"""One Gaussian release: its exact conversions, and its Renyi curve under sampling."""

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from tfdp_fl.accounting import curves, gaussian


def _mp_delta(z, epsilon):
    with mpmath.workdps(60):
        z, epsilon = mpmath.mpf(z), mpmath.mpf(epsilon)
        mu = 1 / z
        below, above = (
            mpmath.erfc(-x / mpmath.sqrt(2)) / 2
            for x in (mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu)
        )
        return float(below - mpmath.exp(epsilon) * above)


@pytest.mark.parametrize(
    "z", [1e-4, 7e-4, 0.05, 3.0, 900.0, 9.9e5, 7.1e8, 2.5e14, 6.8e15, 2.2e17]
)
@pytest.mark.parametrize("epsilon_z", [0.0, 0.3, 12.0])
def test_delta_is_never_less_than_it_is(z, epsilon_z):
    # Much noise leaves last digits of nearly equal numbers: it was 0.
    true, delta = _mp_delta(z, epsilon_z / z), gaussian.gaussian_delta(z, epsilon_z / z)
    assert true <= delta <= true * (1 + 1e-6) + 1e-12


def test_what_is_too_small_for_a_float_is_rounded_up():
    for z in (0.0, 1e-320, 1e-200, 1e-155):
        assert gaussian.gaussian_epsilon(z, 1e-3) == math.inf
        assert gaussian.gaussian_delta(z, 1.0) == 1.0
    assert gaussian.gaussian_epsilon(math.inf, 1e-5) == 0.0
    assert gaussian.gaussian_delta(math.inf, 0.0) == 0.0
    for delta in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="delta"):
            gaussian.gaussian_epsilon(1.0, delta)
    # By the delta of epsilon = 0, 2 Phi(1 / 2z) - 1; it never came back.
    z = gaussian.analytic_noise_multiplier(1e-320, 1e-3)
    assert 1e-3 * z * math.sqrt(2 * math.pi) == pytest.approx(1, abs=1e-5)
    assert gaussian.analytic_noise_multiplier(1e308, 0.1) > 0
    with pytest.raises(ValueError, match="epsilon and delta must"):
        gaussian.analytic_noise_multiplier(1e-320, 1e-320)


@settings(max_examples=150, deadline=None)
@given(
    st.floats(0.05, 100), st.floats(1e-3, 50), st.floats(math.log(1e-30), math.log(0.2))
)
def test_epsilon_inverts_delta(z, wanted, log_delta):
    delta = math.exp(log_delta)
    epsilon = gaussian.gaussian_epsilon(z, delta)
    assert gaussian.gaussian_delta(z, epsilon) <= delta * (1 + 1e-9)
    less = epsilon - 1e-6 * max(1.0, epsilon)
    assert less <= 0 or gaussian.gaussian_delta(z, less) > delta
    # The analytic noise is enough, and the smallest.
    found = gaussian.analytic_noise_multiplier(wanted, delta)
    assert gaussian.gaussian_delta(found, wanted) <= delta * (1 + 1e-9)
    assert gaussian.gaussian_delta(found * (1 - 1e-6), wanted) > delta


def _curve(q, z, most=64):
    """Returns the orders up to the most, and the divergences at them."""
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    parts = [k for k, part in enumerate(curves.PARTS) if part[0] < most]
    return (
        np.concatenate([curves.PARTS[k] for k in parts]),
        np.concatenate([curves.rdp_curve(event, relation, k) for k in parts]),
    )


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


@pytest.mark.parametrize("q", [0.003, 0.2])
@pytest.mark.parametrize("z", [0.35, 1.0, 3.0])
def test_fractional_orders_are_the_integral(q, z):
    orders, curve = _curve(q, z, 8)
    for alpha, value in list(zip(orders, curve, strict=True))[::12]:
        assert value == pytest.approx(_renyi_by_quadrature(q, z, alpha), rel=1e-7)


@pytest.mark.parametrize("q, z", [(1e-3, 2.0), (1e-6, 1.0), (0.05, 8.0)])
def test_near_order_one_the_curve_is_no_less_than_it_is(q, z):
    orders, curve = _curve(q, z, 3)
    with mpmath.workdps(40):
        for alpha, value in list(zip(orders, curve, strict=True))[::9]:
            a, mu = mpmath.mpf(float(alpha)), 1 / mpmath.mpf(z)

            def integrand(x, a=a, mu=mu):
                ratio = (1 - mpmath.mpf(q)) + q * mpmath.exp(mu * x - mu * mu / 2)
                return mpmath.npdf(x) * (ratio**a - 1 - a * (ratio - 1))

            points = [-12, -6, -3, 0, 3, 6, 12, 20]
            log_a = mpmath.log1p(mpmath.quad(integrand, points))
            assert log_a / (a - 1) <= value <= log_a / (a - 1) * (1 + 1e-6) + 1e-11


@pytest.mark.parametrize("q", [0.001, 0.3, 0.9])
@pytest.mark.parametrize("z", [0.02, 0.4, 20.0])
def test_the_curve_rises_with_the_order_and_sampling_never_costs(q, z):
    orders, curve = _curve(q, z)
    assert np.all(np.diff(curve) >= -1e-9 * curve[1:] - 1e-12)
    assert np.all(curve <= orders / (2 * z * z) * (1 + 1e-12))
    # It was 0 in floating point, and so was epsilon, for any number of rounds.
    assert np.all(_curve(1e-9, 100.0)[1] > 0)


@pytest.mark.parametrize("q", [1e-4, 0.01, 0.3])
@pytest.mark.parametrize("z", [0.4, 1.0, 5.0])
def test_a_sampled_gaussian_costs_no_less_than_dp_accounting_says(q, z):
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    for part, orders in enumerate(curves.PARTS):
        whole = (np.floor(orders) == orders) & (orders <= 256)
        if whole.any():
            ours = curves.rdp_curve(event, relation, part)[whole]
            theirs = dp_accounting.rdp.RdpAccountant(orders[whole], relation)
            theirs = theirs.compose(event)._rdp
            assert (ours >= theirs).all()
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)
