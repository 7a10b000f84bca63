from __future__ import annotations

import math
import warnings

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.accounting import gaussian
from tfdp_fl.mechanisms import Deployment

_WIDE = [[100, 100], [100, 100], [5000]]
_DEPLOYMENT = Deployment(
    clients_per_round=4, num_clients=20, sampling="fixed_size", rounds=10
)


def _bound(deployment=_DEPLOYMENT, **arguments):
    query = tfdp_fl.LocalDP(**arguments).bind(deployment)
    return query, query.initial_global_state()


class LocalDPReleaseTest(tf.test.TestCase, parameterized.TestCase):
    def test_without_noise_is_the_mean_of_clipped_updates(self):
        query, state = _bound(clip_norm=0.5, noise_multiplier=0.0)
        updates = rounds.updates_with_norms([0.0, 0.1, 0.5, 3.0, 1e5])
        done = rounds.run_round(query, state, updates, clients_per_round=9)
        wanted = references.fixed_clipping_mean(updates, 0.5, 5)
        for actual, expected in zip(done.mean, wanted, strict=True):
            self.assertAllClose(actual, expected, rtol=1e-5, atol=1e-7)
        self.assertEqual(float(done.total.clipped), 2)

    def test_every_client_adds_noise_of_z_local_s(self):
        query, state = _bound(clip_norm=0.5, noise_multiplier=1.6)
        done = rounds.run_round(query, state, rounds.zero_updates(4, _WIDE))
        shares = [rounds.flat(record.update) for record in done.records]
        for k, share in enumerate(shares):
            statistics.assert_gaussian(share, 1.6 * 0.5)
            statistics.assert_uncorrelated(share, shares[k - 1])
        statistics.assert_uncorrelated(*done.records[0].update[:2])
        # The mean of m releases: sqrt(m) times less than one of them, and
        # sqrt(m) times more than a central z S / m.
        statistics.assert_gaussian(rounds.flat(done.mean), 1.6 * 0.5 / 2)
        self.assertAllClose(
            query.derive_metrics(done.state)["noise_stddev"], 2 * 1.6 * 0.5
        )

    def test_a_bad_client_still_releases_its_noise(self):
        query, state = _bound(clip_norm=0.5, noise_multiplier=1.0)
        updates = rounds.zero_updates(1, _WIDE)
        updates[0][2][7] = np.inf
        done = rounds.run_round(query, state, updates)
        statistics.assert_gaussian(rounds.flat(done.mean), 0.5)
        self.assertEqual(float(done.total.discarded), 1)

    def test_nobody_answered(self):
        query, state = _bound(clip_norm=0.5, noise_multiplier=1.0)
        done = rounds.run_round(query, state, [], template=rounds.zero_updates(1)[0])
        self.assertAllEqual(rounds.flat(done.mean), np.zeros(26))


class LocalDPCalibrationTest(parameterized.TestCase):
    """What one client adds, divided by S: its sensitivity is 2 S."""

    def _noise(self, deployment=_DEPLOYMENT, **arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mechanism = tfdp_fl.LocalDP(clip_norm=1.0, **arguments)
            return mechanism.client_noise_multiplier(deployment)

    @parameterized.product(
        epsilon=[0.3, 1.0, 8.0, 50.0], delta=[1e-3, 1e-6], rounds=[1, 10]
    )
    def test_basic_splits_epsilon_and_delta_by_the_rounds(self, epsilon, delta, rounds):
        deployment = Deployment(clients_per_round=4, rounds=rounds)
        for calibration, sigma in (
            ("analytic", references.analytic_sigma),
            ("classic", references.classic_sigma),
        ):
            actual = self._noise(
                deployment,
                epsilon=epsilon,
                delta=delta,
                calibration=calibration,
                composition="basic",
            )
            expected = sigma(2.0, epsilon / rounds, delta / rounds)
            self.assertAlmostEqual(actual / expected, 1, 6)

    @parameterized.product(epsilon=[0.5, 8.0, 16.0], participations=[1, 7])
    def test_rdp_composes_a_clients_own_participations(self, epsilon, participations):
        deployment = Deployment(
            clients_per_round=4, rounds=50, max_participations=participations
        )
        actual = self._noise(deployment, epsilon=epsilon, delta=1e-5)
        # k releases of sensitivity 2 and noise sigma are one of sigma/sqrt(k).
        expected = references.analytic_sigma(2.0, epsilon, 1e-5)
        expected *= math.sqrt(participations)
        self.assertAlmostEqual(actual / expected, 1, 6)
        delta = references.gaussian_delta(
            actual / math.sqrt(participations), 2.0, epsilon
        )
        self.assertAlmostEqual(delta / 1e-5, 1, 5)

    def test_not_knowing_participations_assumes_every_round(self):
        known = Deployment(clients_per_round=4, rounds=10, max_participations=10)
        self.assertEqual(
            self._noise(epsilon=8.0, delta=1e-5),
            self._noise(known, epsilon=8.0, delta=1e-5),
        )

    @parameterized.parameters(1e-3, 0.01, 0.1, 0.5, 0.9, 0.999)
    def test_analytic_needs_at_most_the_classic_noise_below_one(self, epsilon):
        for delta in (1e-2, 1e-5, 1e-9):
            analytic = gaussian.analytic_noise_multiplier(epsilon, delta)
            classic = gaussian.classic_noise_multiplier(epsilon, delta)
            self.assertLessEqual(analytic, classic)

    @parameterized.parameters(0.1, 0.999, 1.0, 5.0, 20.0, 100.0)
    def test_analytic_keeps_its_promise_also_beyond_one(self, epsilon):
        for delta in (1e-2, 1e-5):
            z = gaussian.analytic_noise_multiplier(epsilon, delta)
            self.assertLessEqual(
                references.gaussian_delta(z, 1.0, epsilon), delta * (1 + 1e-6)
            )
            self.assertGreater(
                references.gaussian_delta(z * 0.999, 1.0, epsilon), delta
            )

    def test_the_classic_formula_breaks_its_promise_beyond_one(self):
        z = references.classic_sigma(1.0, 20.0, 1e-5)
        self.assertGreater(references.gaussian_delta(z, 1.0, 20.0), 1e-5)

    def test_classic_is_refused_from_one_on_unless_asked_for_by_name(self):
        for epsilon in (1.0, 8.0):
            with self.assertRaisesRegex(ValueError, "epsilon"):
                gaussian.classic_noise_multiplier(epsilon, 1e-5)
        mechanism = tfdp_fl.LocalDP(
            clip_norm=1.0, epsilon=8.0, delta=1e-5, calibration="classic"
        )
        with self.assertWarnsRegex(UserWarning, "classic.*epsilon < 1"):
            mechanism.bind(_DEPLOYMENT)
        self.assertIn("classic_above_one", mechanism.caveats())


class LocalDPCostTest(parameterized.TestCase):
    @parameterized.parameters(0.5, 3.0)
    def test_one_round_costs_a_client_its_sensitivity_over_sigma(self, z):
        mechanism = tfdp_fl.LocalDP(clip_norm=7.0, noise_multiplier=z)
        self.assertAlmostEqual(mechanism.mu_squared(_DEPLOYMENT), (2 / z) ** 2)

    def test_the_whole_budget_is_spent_at_the_last_participation(self):
        mechanism = tfdp_fl.LocalDP(clip_norm=1.0, epsilon=8.0, delta=1e-5)
        mu_squared = 10 * mechanism.mu_squared(_DEPLOYMENT)
        self.assertAlmostEqual(
            gaussian.gaussian_epsilon(mu_squared**-0.5, 1e-5), 8.0, 4
        )

    def test_without_noise_it_is_infinite(self):
        mechanism = tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=0.0)
        self.assertEqual(mechanism.mu_squared(_DEPLOYMENT), math.inf)

    def test_the_mean_gives_a_central_guarantee_where_m_answer(self):
        mechanism = tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.5)
        self.assertEqual(
            mechanism.round_event(0, _DEPLOYMENT),
            dp_accounting.GaussianDpEvent(3.0),
        )

    @parameterized.parameters("poisson", None)
    def test_none_is_claimed_where_m_is_not_sure(self, sampling):
        mechanism = tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.5)
        event = mechanism.round_event(
            0, Deployment(clients_per_round=4, sampling=sampling)
        )
        self.assertIsInstance(event, dp_accounting.NonPrivateDpEvent)


class LocalDPArgumentsTest(parameterized.TestCase):
    def test_a_budget_needs_to_know_the_rounds(self):
        mechanism = tfdp_fl.LocalDP(clip_norm=1.0, epsilon=1.0, delta=1e-5)
        with self.assertRaisesRegex(ValueError, "rounds"):
            mechanism.bind(Deployment(clients_per_round=4))

    def test_is_local(self):
        mechanism = tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.0)
        self.assertEqual(mechanism.guarantee, "local")
        self.assertIn("local_not_central", mechanism.caveats())


if __name__ == "__main__":
    tf.test.main()
