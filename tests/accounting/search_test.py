"""What a search costs, beside the exact law of the best of a random number."""

import itertools
import math

import dp_accounting
import numpy as np
from absl.testing import parameterized
from dp_accounting.pld import common, privacy_loss_distribution
from scipy import signal, stats

from tfdp_fl import accounting
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import search

_G = dp_accounting.GaussianDpEvent
_SHAPES = (math.inf, 0.0, 0.5, 1.0, 3.0)


def _charge(*of_trials, mean=4.0, shape=math.inf):
    return accounting.RoundCharge(
        sampling="poisson",
        num_clients=100,
        clients_per_round=100,
        event=search.BestOfTrialsDpEvent(of_trials, mean, shape),
    )


def _epsilon(*charges, delta=1e-5, accountant="rdp"):
    return accounting.PrivacyAccountant(charges).epsilon(delta, accountant)


def _generating(mean, shape):
    """Returns x -> E[x^K], from the definitions in Papernot & Steinke."""
    if math.isinf(shape):
        return lambda x: np.exp(mean * (x - 1))
    gamma = search._stopping(shape, mean)
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

    def delta_at(epsilon):
        return np.maximum(p - math.exp(epsilon) * q, 0).sum()

    low, high = 0.0, 60.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return low


def _worst_of_scores(p, q, mean, shape, delta):
    """Returns the true epsilon for scores that tell most, in both directions."""
    generating = _generating(mean, shape)
    return max(
        _true_epsilon(_best(one, generating), _best(other, generating), delta)
        for one, other in ((p, q), (q, p), (p[::-1], q[::-1]), (q[::-1], p[::-1]))
    )


def _training(z, q, rounds, step=2e-3):
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


class CostTest(parameterized.TestCase):
    @parameterized.product(
        accountant=("rdp", "pld"), shape=_SHAPES, mean=(1.5, 24.0), z=(0.8, 6.0)
    )
    def test_a_score_that_is_the_presence_of_a_client(self, accountant, shape, mean, z):
        edges = np.linspace(-10 * z, 1 + 10 * z, 20_001)
        p, q = (np.diff(stats.norm.cdf(edges, shift, z)) for shift in (0, 1))
        true = _worst_of_scores(p, q, mean, shape, 1e-5)
        charge = _charge(_G(z), mean=mean, shape=shape)
        said = _epsilon(charge, accountant=accountant)
        self.assertGreaterEqual(said, true)
        at_true = accounting.PrivacyAccountant([charge]).delta(true, accountant)
        self.assertGreater(at_true, 0.9e-5)
        alone = _epsilon(_charge(_G(z), mean=1.0, shape=1.0), accountant=accountant)
        self.assertGreater(true, 0.9 * accounting.gaussian_epsilon(z, 1e-5) - 1e-3)
        self.assertGreater(said, alone)

    @parameterized.product(shape=_SHAPES, z_q_rounds=((1.0, 0.1, 20), (0.7, 0.02, 100)))
    def test_trainings_that_are_scored_by_what_tells_most(self, shape, z_q_rounds):
        (z, q, rounds), mean = z_q_rounds, 4.0
        p, other = _training(z, q, rounds)
        true = _worst_of_scores(p, other, mean, shape, 1e-5)
        training = dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(q, _G(z)), rounds
        )
        charge = _charge(training, mean=mean, shape=shape)
        by_pld = _epsilon(charge, accountant="pld")
        self.assertGreaterEqual(by_pld, true)
        self.assertGreaterEqual(_epsilon(charge), by_pld)

    def test_one_trial_for_certain_costs_what_a_trial_costs(self):
        alone = accounting.PrivacyAccountant()
        alone.add(
            accounting.RoundCharge(
                sampling="poisson",
                num_clients=100,
                clients_per_round=10,
                event=_G(1.0),
            ),
            50,
        )
        trial = dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(0.1, _G(1.0)), 50
        )
        for accountant in ("rdp", "pld"):
            charge = _charge(trial, mean=1.0, shape=1.0)
            said = _epsilon(charge, accountant=accountant)
            expected = alone.epsilon(1e-5, accountant)
            self.assertGreaterEqual(said, expected * (1 - 1e-6))
            self.assertLess(said, 1.005 * expected)

    def test_the_dearest_kind_of_trial_counts_wherever_it_stands(self):
        cheap, dear = _G(5.0), _G(0.7)
        for shape, by in itertools.product((math.inf, 1.0), ("rdp", "pld")):
            alone = _epsilon(_charge(dear, shape=shape), accountant=by)
            for several in ((cheap, dear), (dear, cheap)):
                said = _epsilon(_charge(*several, shape=shape), accountant=by)
                self.assertGreaterEqual(said, alone)

    @parameterized.parameters(*_SHAPES)
    def test_what_one_trial_may_give_away_the_best_of_many_may(self, shape):
        trial = privacy_loss_distribution.from_privacy_parameters(
            common.DifferentialPrivacyParameters(0.0, 1e-4)
        )
        event = search.BestOfTrialsDpEvent((), 24.0, shape)
        profile = search.BestOfTrialsProfile(event, [trial])
        true = 1 - float(_generating(24.0, shape)(1 - 1e-4))
        self.assertBetween(profile.delta(9.0), true, 25e-4)
        self.assertEqual(profile.epsilon(0.9 * true), math.inf)

    def test_of_many_trials_the_smaller_bound_is_said(self):
        history = accounting.PrivacyAccountant([_charge(_G(1.5), mean=100.0)])
        self.assertEqual(history.epsilon(1e-2, "pld"), history.epsilon(1e-2))
        self.assertLess(history.delta(25.0, "pld"), 1e-2)

    def test_a_trial_without_noise_is_no_guarantee(self):
        for event in (_G(0.0), dp_accounting.NonPrivateDpEvent()):
            for shape in (math.inf, 1.0):
                charge = _charge(event, _G(1.0), shape=shape)
                self.assertEqual(_epsilon(charge), math.inf)
                self.assertEqual(_epsilon(charge, accountant="pld"), math.inf)

    def test_who_knows_who_took_part_sees_no_sampling(self):
        history = accounting.PrivacyAccountant()
        sampled = dp_accounting.PoissonSampledDpEvent(0.1, _G(2.0))
        history.add(_charge(sampled, shape=1.0))
        self.assertAlmostEqual(
            history.epsilon_if_participation_is_known(1e-5),
            _epsilon(_charge(_G(2.0), shape=1.0), accountant="pld"),
        )

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

    def test_pld_has_no_answer_of_several_searches_rather_than_a_small_one(self):
        round_of_another = accounting.RoundCharge(
            sampling="poisson", num_clients=100, clients_per_round=10, event=_G(1.0)
        )
        for more in (_charge(_G(1.0)), _charge(_G(2.0)), round_of_another):
            with self.assertRaisesRegex(ValueError, "rdp"):
                _epsilon(_charge(_G(1.0)), more, accountant="pld")


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
