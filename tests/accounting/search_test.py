"""What a search costs, beside the exact law of the best of a random number."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
from absl.testing import parameterized
from scipy import stats

from tests.accounting import charges
from tfdp_fl import accounting
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import search

_G = dp_accounting.GaussianDpEvent
_SAMPLED = dp_accounting.PoissonSampledDpEvent(0.1, _G(2.0))
_SHAPES = (math.inf, 0.0, 0.5, 1.0, 3.0)


def _charge(*of_trials, mean=4.0, shape=math.inf):
    event = search.BestOfTrialsDpEvent(of_trials, mean, shape)
    return charges.charge(n=100, event=event)


def _epsilon(*charge):
    return charges.history(*charge).epsilon(1e-5)


def _generating(mean, shape):
    """Returns x -> E[x^K], from the definitions in Papernot & Steinke."""
    if math.isinf(shape):
        return lambda x: np.exp(mean * (x - 1))
    gamma = search._stopping(shape, mean)
    if shape == 0:
        return lambda x: np.log(1 - (1 - gamma) * x) / math.log(gamma)
    return lambda x: ((1 - (1 - gamma) * x) ** -shape - 1) / (gamma**-shape - 1)


def _best(probabilities, mean, shape):
    """Returns the law of the best of K outcomes, listed from worst to best."""
    generating = _generating(mean, shape)
    below = np.concatenate([[0.0], np.cumsum(probabilities)])
    law = np.diff(generating(np.minimum(below, 1)))
    return np.concatenate([[generating(0.0)], law])  # None at all.


def _true_epsilon(p, q, delta):
    """Returns the epsilon at delta of two laws on a list of outcomes."""

    def delta_at(epsilon):
        return np.maximum(p - math.exp(epsilon) * q, 0).sum()

    low, high = 0.0, 60.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return low


class CostTest(parameterized.TestCase):
    @parameterized.product(shape=_SHAPES, mean=(1.5, 24.0), z=(0.8, 6.0))
    def test_a_score_that_is_the_presence_of_a_client(self, shape, mean, z):
        edges = np.linspace(-10 * z, 1 + 10 * z, 20_001)
        p, q = (np.diff(stats.norm.cdf(edges, shift, z)) for shift in (0, 1))
        # Scores that tell most, in both directions.
        true = max(
            _true_epsilon(_best(one, mean, shape), _best(other, mean, shape), 1e-5)
            for one, other in ((p, q), (q, p), (p[::-1], q[::-1]), (q[::-1], p[::-1]))
        )
        said = _epsilon(_charge(_G(z), mean=mean, shape=shape))
        self.assertGreaterEqual(said, true)
        alone = _epsilon(_charge(_G(z), mean=1.0, shape=1.0))
        self.assertGreater(true, 0.9 * accounting.gaussian_epsilon(z, 1e-5) - 1e-3)
        self.assertGreater(said, alone)

    @parameterized.parameters(math.inf, 1.0)
    def test_a_trial_costs_the_dearest_of_its_kinds(self, shape):
        cheap, dear = _G(5.0), _G(0.7)
        alone = _epsilon(_charge(dear, shape=shape))
        for several in ((cheap, dear), (dear, cheap)):
            self.assertGreaterEqual(_epsilon(_charge(*several, shape=shape)), alone)
        for event in (_G(0.0), dp_accounting.NonPrivateDpEvent()):
            charge = _charge(event, _G(1.0), shape=shape)
            self.assertEqual(_epsilon(charge), math.inf)

    def test_one_trial_for_certain_costs_what_a_trial_costs(self):
        alone = _epsilon((charges.charge(n=100, m=10, z=2.0), 50))
        trial = dp_accounting.SelfComposedDpEvent(_SAMPLED, 50)
        said = _epsilon(_charge(trial, mean=1.0, shape=1.0))
        self.assertBetween(said, alone, 1.005 * alone)
        # Who knows who took part sees no sampling.
        history = charges.history(_charge(_SAMPLED, shape=1.0))
        self.assertAlmostEqual(
            history.epsilon_if_participation_is_known(1e-5),
            _epsilon(_charge(_G(2.0), shape=1.0)),
        )
        with self.assertRaisesRegex(ValueError, "rdp"):
            history.epsilon(1e-5, "pld")

    def test_a_ledger_keeps_it_exactly(self):
        charge = _charge(
            dp_accounting.SelfComposedDpEvent(_G(np.float64(0.1) + 0.2), np.int64(3)),
            _G(5.0),
        )
        again = accounting.RoundCharge.from_json(charge.to_json())
        self.assertEqual(again, charge)
        self.assertEqual(hash(again), hash(charge))
        self.assertIsInstance(again.event, search.BestOfTrialsDpEvent)
        self.assertIsNone(charge_lib.noise_multiplier_of(again.event))


class TrialCountTest(parameterized.TestCase):
    @parameterized.parameters("poisson", "geometric", "logarithmic", 0.5, 2)
    def test_the_numbers_that_are_drawn_have_the_law_that_is_charged(self, name):
        count = search.TrialCount.named(6.0, name)
        generator = np.random.default_rng(3)
        drawn = np.array([count.draw(generator) for _ in range(20_000)])
        # Four standard errors: a false alarm in about 1 of 4 000 runs of 5 tests.
        self.assertLess(abs(drawn.mean() - 6), 4 * drawn.std() / len(drawn) ** 0.5)
        self.assertEqual(count.may_be_none, bool((drawn == 0).any()))
        generating = _generating(count.mean, count.shape)
        for x in (0.3, 0.8):
            values = x**drawn
            error = 4 * values.std() / len(drawn) ** 0.5
            self.assertLess(abs(values.mean() - generating(x)), error)

    @parameterized.parameters(
        (0.5, "poisson", "expected_trials"),
        (math.nan, "poisson", "expected_trials"),
        (2, "uniform", "distribution"),
        (2, -0.5, "distribution"),
        (2, math.inf, "distribution"),
    )
    def test_what_is_refused(self, mean, name, argument):
        with self.assertRaisesRegex(ValueError, argument):
            search.TrialCount.named(mean, name)
