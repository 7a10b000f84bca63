"""Cohorts of a fixed size whose rounds are abandoned if one of them fails."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import optimize, stats

from tests.accounting.charges import charge, history
from tfdp_fl import accounting
from tfdp_fl.accounting import curves, known_selection

_Z, _DELTA, _CELL = 2.0, 1e-5, 2e-3


def _true_epsilon(n, m, failing, attempts):
    """Returns what one attack achieves: a client with 1, or with -1; others with 0.

    Attempts are released if none of `m` of `n` clients fails, which is seen. The loss
    of each is rounded down.
    """
    rate = math.comb(n - failing, m) / math.comb(n, m)
    q = m / (n - failing)
    x = np.linspace(-9 * _Z, 9 * _Z, 40_001)
    there, other = (
        (1 - q) * stats.norm.pdf(x, 0, _Z) + q * stats.norm.pdf(x, mean, _Z)
        for mean in (1, -1)
    )
    cells = np.floor(np.log(there / other) / _CELL).astype(int)
    size = 1 << int(np.ceil(np.log2((cells.max() - cells.min() + 2) * attempts)))
    mass = np.bincount(cells % size, rate * there / there.sum(), minlength=size)
    mass[0] += 1 - rate
    mass = np.fft.irfft(np.fft.rfft(mass) ** attempts, size).clip(0)
    losses = np.fft.fftfreq(size, 1 / size) * _CELL

    def delta(epsilon):
        return mass @ -np.expm1(np.minimum(epsilon - losses, 0))

    return optimize.brentq(lambda epsilon: delta(epsilon) - _DELTA, 0, 500)


@pytest.mark.parametrize(
    "n, m, failing, attempts, was_too_little",
    [(20, 1, 19, 60, True), (4, 2, 2, 60, True), (20, 2, 10, 60, False)],
)
def test_what_is_charged_covers_those_who_do_not_fail(
    n, m, failing, attempts, was_too_little
):
    true = _true_epsilon(n, m, failing, attempts)
    known = charge("fixed_size", n, m, _Z, known_selection=True)
    for by in ("rdp", "pld"):
        assert history((known, attempts)).epsilon(_DELTA, by) >= true
    # Releases alone, as drawn from all.
    released = round(attempts * math.comb(n - failing, m) / math.comb(n, m))
    usual = history((charge("fixed_size", n, m, _Z), released))
    assert (usual.epsilon(_DELTA, "pld") < true) == was_too_little


@pytest.mark.parametrize("q, z", [(0.1, 1.0), (0.5, 0.2), (0.01, 30.0), (0.3, 3.0)])
def test_both_accountants_are_above_the_mixture_and_near_it(q, z):
    event = known_selection.KnownSelectionDpEvent(q, dp_accounting.GaussianDpEvent(z))
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    # One attempt at epsilon costs q times the delta of the Gaussian.
    by_pld = curves.loss_distribution(event, relation, 1e-4)
    # (Also in the upper tail, where the probabilities below are all 1 in float64.)
    for epsilon in (0.0, 0.1, 1.0, 4.0, *(0.5 / z**2 + np.array([8.0, 8.6]) / z)):
        exact = q * accounting.gaussian_delta(z, epsilon)
        found = by_pld.delta(epsilon)
        assert exact * (1 - 1e-9) <= found <= exact * 1.01 + 1e-4
    orders = np.array([1.5, 2.0, 8.0, 32.0])
    moments = np.exp((orders - 1) * orders / (2 * z * z)) if z > 0.5 else np.inf
    expected = np.log1p(q * (moments - 1)) / (orders - 1)
    found = known_selection.renyi_divergence(event, orders)
    if z > 0.5:
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert np.all(found <= orders / (2 * z * z))


def test_a_cohort_of_everybody_is_known_anyway():
    whole = charge("fixed_size", 50, 50, known_selection=True)
    assert not whole.is_charged_if_abandoned
    assert whole.dp_event() == charge("fixed_size", 50, 50).dp_event()
    assert charge("fixed_size", 50, 5, known_selection=True).is_charged_if_abandoned
    with pytest.raises(ValueError, match="known_selection must be False"):
        charge("poisson", 50, 5, known_selection=True)
    # With no noise, or nothing but noise.
    for z, epsilon in ((0.0, math.inf), (math.inf, 0.0)):
        event = (
            dp_accounting.GaussianDpEvent(z) if z == 0 else dp_accounting.NoOpDpEvent()
        )
        one = charge("fixed_size", 50, 5, event=event, known_selection=True)
        assert history(one).epsilon(_DELTA) == epsilon
