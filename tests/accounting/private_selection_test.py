"""What a search costs, beside the exact law of the best of a random number."""

import functools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import common, privacy_loss_distribution
from scipy import signal, stats

from tests.accounting import charges
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import curves, gaussian, private_selection
from tfdp_fl.accounting.loss_distribution import LossDistribution

_G = dp_accounting.GaussianDpEvent
_SHAPES = (math.inf, 0.0, 0.5, 1.0, 3.0)


def _charge(*of_trials, mean=4.0, shape=math.inf):
    event = private_selection.BestOfTrialsDpEvent(of_trials, mean, shape)
    return charges.charge(n=100, m=100, event=event)


def _epsilon(*rounds, accountant="rdp"):
    return charges.history(*rounds).epsilon(1e-5, accountant)


def _training(z, q, rounds):
    sampled = dp_accounting.PoissonSampledDpEvent(q, _G(z))
    return dp_accounting.SelfComposedDpEvent(sampled, rounds)


def _generating(mean, shape):
    """Returns x -> E[x^K], by Papernot & Steinke's definitions."""
    if math.isinf(shape):
        return lambda x: np.exp(mean * (x - 1))
    gamma = private_selection._stopping_probability(shape, mean)
    if shape == 0:
        return lambda x: np.log(1 - (1 - gamma) * x) / math.log(gamma)
    return lambda x: ((1 - (1 - gamma) * x) ** -shape - 1) / (gamma**-shape - 1)


def _best(probabilities, generating):
    """Returns the law of the best of K outcomes, listed from worst to best."""
    below = np.concatenate([[0.0], np.cumsum(probabilities)])
    law = np.diff(generating(np.minimum(below, 1)))
    return np.concatenate([[generating(0.0)], law])  # None at all.


def _true_epsilon(p, q, delta):
    """Returns the epsilon at delta of two laws on a list of outcomes."""
    low, high = 0.0, 60.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        is_more = np.maximum(p - math.exp(middle) * q, 0).sum() > delta
        low, high = (middle, high) if is_more else (low, middle)
    return low


def _worst_of_scores(p, q, mean, shape, delta):
    """Returns the true epsilon for scores that tell most, in both directions."""
    generating = _generating(mean, shape)
    return max(
        _true_epsilon(_best(one, generating), _best(other, generating), delta)
        for one, other in ((p, q), (q, p), (p[::-1], q[::-1]), (q[::-1], p[::-1]))
    )


@functools.cache
def _losses(z, q, rounds, step=2e-3):
    """Returns two laws of the sum of a training's losses, each rounded down.

    That is a statistic of what a training releases, so it tells no more than that.
    """
    x = np.linspace(-9 * z, 1 + 9 * z, 40_001)
    without, client = (stats.norm.pdf(x, shift, z) for shift in (0, 1))
    with_it = (1 - q) * without + q * client
    losses = np.floor(np.log(with_it / without) / step).astype(int)
    losses -= losses.min()
    laws = []
    for one in (without, with_it):
        law = round_law = np.bincount(losses, one / one.sum())
        for _ in range(rounds - 1):
            law = np.maximum(signal.fftconvolve(law, round_law), 0)
        law[law < 1e-13] = 0  # What the transform's rounding leaves.
        laws.append(law)
    some = (laws[0] > 0) & (laws[1] > 0)
    return laws[0][some], laws[1][some]


@pytest.fixture(autouse=True)
def _in_coarse_cells(monkeypatch):
    """Which are quick, and round up more."""
    monkeypatch.setattr(curves, "_PLD_INTERVAL", 1e-3)


_BY = pytest.mark.parametrize("accountant", ["rdp", "pld"])
_SHAPE = pytest.mark.parametrize("shape", _SHAPES)


@_SHAPE
@pytest.mark.parametrize("mean", [1.5, 24.0])
@pytest.mark.parametrize("z", [0.8, 6.0])
def test_a_score_that_is_the_presence_of_a_client(shape, mean, z):
    edges = np.linspace(-10 * z, 1 + 10 * z, 20_001)
    p, q = (np.diff(stats.norm.cdf(edges, shift, z)) for shift in (0, 1))
    true = _worst_of_scores(p, q, mean, shape, 1e-5)
    assert true > 0.9 * gaussian.gaussian_epsilon(z, 1e-5) - 1e-3
    charge = _charge(_G(z), mean=mean, shape=shape)
    for accountant in charge_lib.ACCOUNTANTS:
        said = _epsilon(charge, accountant=accountant)
        assert said >= true
        alone = _epsilon(_charge(_G(z), mean=1.0, shape=1.0), accountant=accountant)
        assert said > alone


@_SHAPE
@pytest.mark.parametrize("z, q, rounds", [(1.0, 0.1, 20), (0.7, 0.02, 100)])
def test_trainings_that_are_scored_by_what_tells_most(shape, z, q, rounds):
    true = _worst_of_scores(*_losses(z, q, rounds), 4.0, shape, 1e-5)
    charge = _charge(_training(z, q, rounds), shape=shape)
    by_pld = _epsilon(charge, accountant="pld")
    assert by_pld >= true
    assert _epsilon(charge) >= by_pld


@_BY
def test_one_trial_for_certain_costs_what_a_trial_costs(accountant):
    alone = _epsilon((charges.charge(n=100, m=10), 50), accountant=accountant)
    charge = _charge(_training(1.0, 0.1, 50), mean=1.0, shape=1.0)
    said = _epsilon(charge, accountant=accountant)
    assert alone * (1 - 1e-6) <= said < 1.005 * alone


@_BY
@pytest.mark.parametrize("shape", [math.inf, 1.0])
def test_the_dearest_kind_of_trial_counts_wherever_it_stands(accountant, shape):
    cheap, dear = _G(5.0), _G(0.7)
    alone = _epsilon(_charge(dear, shape=shape), accountant=accountant)
    for several in ((cheap, dear), (dear, cheap)):
        said = _epsilon(_charge(*several, shape=shape), accountant=accountant)
        assert said >= alone
    # A trial without noise is no guarantee.
    for event in (_G(0.0), dp_accounting.NonPrivateDpEvent()):
        charge = _charge(event, _G(1.0), shape=shape)
        assert _epsilon(charge, accountant=accountant) == math.inf


@_SHAPE
def test_what_one_trial_may_give_away_the_best_of_many_may(shape):
    trial = LossDistribution.of(
        privacy_loss_distribution.from_privacy_parameters(
            common.DifferentialPrivacyParameters(0.0, 1e-4)
        ),
        1e-4,
    )
    event = private_selection.BestOfTrialsDpEvent((), 24.0, shape)
    true = 1 - float(_generating(24.0, shape)(1 - 1e-4))
    assert private_selection.epsilon_of_best(event, [trial], 0.9 * true) == math.inf


def test_of_many_trials_the_smaller_bound_is_said():
    history = charges.history(_charge(_G(1.5), mean=100.0))
    assert history.epsilon(1e-2, "pld") == history.epsilon(1e-2)
    assert history.delta(25.0) < 1e-2


def test_who_knows_who_took_part_sees_no_sampling():
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, _G(2.0))
    history = charges.history(_charge(sampled, shape=1.0))
    known = _epsilon(_charge(_G(2.0), shape=1.0), accountant="pld")
    found = history.epsilon_if_participation_is_known(1e-5)
    assert found == pytest.approx(known, abs=1e-7)


def test_a_ledger_keeps_it_exactly():
    trial = dp_accounting.SelfComposedDpEvent(_G(np.float64(0.1) + 0.2), np.int64(3))
    charge = _charge(trial, _G(5.0))
    again = charge_lib.RoundCharge.from_json(charge.to_json())
    assert (again, hash(again)) == (charge, hash(charge))
    assert isinstance(again.event, private_selection.BestOfTrialsDpEvent)
    assert charge_lib.noise_multiplier_of(again.event) is None


def test_rdp_answers_for_pld_of_a_search_beside_anything():
    alone = _epsilon(_charge(_G(1.0)), accountant="pld")
    for more in (_charge(_G(1.0)), _charge(_G(2.0)), charges.charge(n=100, m=10)):
        by_pld, by_rdp = (
            _epsilon(_charge(_G(1.0)), more, accountant=name) for name in ("pld", "rdp")
        )
        assert by_pld == by_rdp > alone


@pytest.mark.parametrize("name", ["poisson", "geometric", "logarithmic", 0.5, 2])
def test_the_numbers_that_are_drawn_have_the_law_that_is_charged(name):
    count = private_selection.TrialCount.from_arguments(6.0, name)
    generator = np.random.default_rng(3)
    drawn = np.array([count.draw(generator) for _ in range(20_000)])
    # Four standard errors: a false alarm in about 1 of 4 000 runs of 5 tests.
    assert abs(drawn.mean() - 6) < 4 * drawn.std() / len(drawn) ** 0.5
    assert count.may_be_zero == bool((drawn == 0).any())
    generating = _generating(count.mean, count.shape)
    for x in (0.3, 0.8):
        values = x**drawn
        error = 4 * values.std() / len(drawn) ** 0.5
        assert abs(values.mean() - generating(x)) < error


def test_what_is_refused():
    for mean in (0.5, math.nan):
        with pytest.raises(ValueError, match="expected_trials"):
            private_selection.TrialCount.from_arguments(mean, "poisson")
    for name in ("uniform", -0.5, math.inf, 1e-4):
        with pytest.raises(ValueError, match="distribution"):
            private_selection.TrialCount.from_arguments(2, name)
