"""Composed privacy loss distributions: no rounding makes an epsilon too small."""

import math
from unittest import mock

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from tests.accounting.charges import charge, history
from tfdp_fl import accounting
from tfdp_fl.accounting import (
    curves,
    known_selection,
    loss_distribution,
    private_selection,
)
from tfdp_fl.accounting.loss_distribution import LossDistribution, _Losses

_RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
_POISSON = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))


def _delta_of_known_rounds(q, z, rounds, epsilon):
    """Returns the exact delta of a Gaussian of k terms, for a binomial k."""
    k = np.arange(1, int(rounds * q + 40 * math.sqrt(rounds * q) + 60))
    logs = stats.binom.logpmf(k, rounds, q)
    parts = [accounting.gaussian_delta(z / math.sqrt(n), epsilon) for n in k.tolist()]
    return math.fsum(np.exp(logs) * parts)


@pytest.mark.parametrize(
    "m, z, rounds", [(100, 1.0, 10**4), (100, 2.0, 10**5), (1000, 30.0, 10**5)]
)
def test_small_deltas_after_many_rounds(m, z, rounds):
    # float64 loses them: the delta at the epsilon of 1e-13 was 16 to 80 times as large.
    kind = charge("fixed_size", 10**5, m, z, known_selection=True)
    composed = history((kind, rounds))
    for delta in (1e-6, 1e-9, 1e-11, 1e-13, 1e-15):
        epsilon = composed.epsilon(delta, "pld")
        assert epsilon <= composed.epsilon(delta)
        true = _delta_of_known_rounds(m / 10**5, z / 2, rounds, epsilon)
        assert true <= delta
        if delta == 1e-6:
            assert true > 0.8 * delta
        assert composed.delta(epsilon, "pld") >= true


def _coin(p, first=0):
    return LossDistribution(1e-3, (_Losses(first, np.array([1 - p, p]), 0.0),))


@pytest.mark.parametrize("p", [0.5, 0.1, 1e-3])
@pytest.mark.parametrize("count", [2, 99, 101, 10**4, 10**6])
def test_the_error_of_a_power_is_within_its_bound_and_not_far_below(p, count):
    (losses,) = _coin(p).self_compose(count)._directions
    k = losses.first + np.arange(len(losses.probabilities))
    true = stats.binom.pmf(k, count, p)
    error = np.abs(losses.probabilities - true).sum()
    # SciPy's own figures have a relative error of up to 1e-12 or so.
    assert error <= losses.error + 1e-10
    assert losses.error < 1e-14 * count * math.log2(len(k) + 2) * 12


def test_errors_of_parts_add_up():
    parts = [_coin(0.3).self_compose(count) for count in (10, 10**4)]
    both = parts[0].compose(parts[1])
    assert both.error > sum(part.error for part in parts)
    assert parts[0].self_compose(3).error > 3 * parts[0].error
    (losses,) = both._directions
    k = losses.first + np.arange(len(losses.probabilities))
    true = stats.binom.pmf(k, 10 + 10**4, 0.3)
    assert np.abs(losses.probabilities - true).sum() <= both.error + 1e-10
    # A delta includes them.
    exact = np.maximum(-np.expm1(3.0 - k * 1e-3), 0) @ true
    assert 0 <= both.delta(3.0) - exact - both.error <= 1e-8


def test_ends_of_two_parts_that_are_cut_off_count():
    tail = np.full(20, 1e-5)
    ends = np.r_[tail, 1.0 - tail.sum() - tail.sum(), tail]
    one = LossDistribution(0.1, (_Losses(-20, ends, 0.0),))
    with mock.patch.object(loss_distribution, "_TAIL", 1e-4):
        (both,) = one.compose(one)._directions
    assert len(both.probabilities) < 2 * len(ends) - 1
    # No loss has become smaller.
    assert 1e-5 < both.infinite < 1e-4
    total = both.probabilities.sum() + both.infinite
    assert total == pytest.approx(1.0, rel=1e-12)


def test_directions_are_paired():
    one_way = LossDistribution(
        0.1, (_Losses(0, np.array([1.0]), 0.0), _Losses(0, np.array([0.5]), 0.5))
    )
    for both in (one_way.compose(_coin(0.5)), _coin(0.5).compose(one_way)):
        remove, add = both.deltas(1.0)
        assert remove < 1e-9
        assert add == pytest.approx(0.5)


def test_a_release_without_noise_stays_infinite():
    bare = LossDistribution(0.1, (_Losses(0, np.array([0.0]), 1.0),))
    for composed in (bare, bare.self_compose(3), bare.compose(_coin(0.5))):
        assert composed.delta(50.0) == 1.0
        assert composed.epsilon(1e-5) == math.inf


def test_epsilon_and_delta_agree():
    loss = curves.loss_distribution(
        dp_accounting.SelfComposedDpEvent(_POISSON, 300), _RELATION, 1e-3
    )
    for delta in (0.3, 1e-3, 1e-7):
        epsilon = loss.epsilon(delta)
        assert loss.delta(epsilon) <= delta
        assert epsilon == 0 or loss.delta(epsilon - 1e-9) > delta
    assert loss.epsilon(loss.error) == math.inf
    points = np.linspace(0.0, 3.0, 40)
    one_by_one = [loss.delta(point) for point in points.tolist()]
    np.testing.assert_allclose(loss.delta_at(points), one_by_one, rtol=1e-7, atol=2e-9)
    assert np.all(loss.delta_at(points) >= np.array(one_by_one) * (1 - 1e-9))


def test_events_within_events_have_errors():
    composed = dp_accounting.SelfComposedDpEvent(_POISSON, 500)
    whole = curves.loss_distribution(
        dp_accounting.ComposedDpEvent([composed, _POISSON]), _RELATION, 1e-3
    )
    alone = curves.loss_distribution(_POISSON, _RELATION, 1e-3)
    again = alone.self_compose(500).compose(alone)
    assert whole.error == again.error > 0 == alone.error
    assert whole.delta(1.0) == again.delta(1.0)
    known = known_selection.KnownSelectionDpEvent(
        0.1, dp_accounting.GaussianDpEvent(1.0)
    )
    assert curves.loss_distribution(known, _RELATION, 1e-3).error == 0


def test_a_negative_cell_within_the_error_cuts_nothing_off():
    true, count = np.zeros(2001), 100
    true[[0, 100]] = 0.77, 0.23
    k = np.arange(count + 1)
    chances = stats.binom.pmf(k, count, 0.23)
    for error in (1e-13, 5e-10, 1e-9):
        cells = true.copy()
        cells[-1] = -error
        one = LossDistribution(1e-3, (_Losses(0, cells, 0.0, error),))
        composed = one.self_compose(count)
        for epsilon in (2.0, 2.6, 3.0):
            exact = np.maximum(-np.expm1(epsilon - k * 0.1), 0) @ chances
            assert exact * (1 - 1e-9) <= composed.delta(epsilon) <= exact + 1e-6


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_losses_that_end_have_an_epsilon(scale):
    event = dp_accounting.LaplaceDpEvent(scale)
    composed = history(charge("poisson", 1000, 100, event=event))
    for coarse in (False, True):
        assert 0 < composed.epsilon(1e-5, "pld", coarse) < 1 / scale
    loss = _coin(0.5, 3)
    assert loss.epsilon(1e-5) == pytest.approx(4e-3, rel=1e-2)
    for delta in (5e-324, 1e-300):
        assert 0.9999 * 4e-3 <= loss.epsilon(delta) <= 5e-3
    nothing = LossDistribution.of(privacy_loss_distribution.identity(1e-4), 1e-4)
    assert nothing.self_compose(5).compose(nothing).epsilon(1e-9) < 1e-9


@pytest.mark.parametrize("shape", [0.0, 1.0])
def test_a_search_of_long_trials_has_an_epsilon(shape):
    one = dp_accounting.PoissonSampledDpEvent(1e-3, dp_accounting.GaussianDpEvent(1.0))
    trial = dp_accounting.SelfComposedDpEvent(one, 10**5)
    event = private_selection.BestOfTrialsDpEvent((trial,), 30.0, shape)
    composed = history(charge(n=100, m=100, event=event))
    for delta in (1e-6, 1e-8, 1e-10):
        assert composed.epsilon(delta, "pld") <= composed.epsilon(delta) < math.inf


def test_what_the_librarys_accountant_transforms_has_an_error():
    laplace = dp_accounting.LaplaceDpEvent(2.0)
    for event, is_exact in (
        (_POISSON, True),
        (dp_accounting.GaussianDpEvent(2.0), True),
        (laplace, False),
        (dp_accounting.PoissonSampledDpEvent(0.1, laplace), False),
    ):
        loss = curves.loss_distribution(event, _RELATION, 1e-3)
        assert (loss.error == 0) == is_exact
        assert loss.error < 1e-10
        # It is the accountant's distribution.
        usual = dp_accounting.pld.PLDAccountant(_RELATION, 1e-3).compose(event)
        for epsilon in (0.1, 0.3):
            expected = usual.get_delta(epsilon)
            assert loss.delta(epsilon) == pytest.approx(expected, rel=1e-7, abs=1e-10)
