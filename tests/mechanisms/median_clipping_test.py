from __future__ import annotations

import warnings
from unittest import mock

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.mechanisms import Deployment, median_clipping, noise

_WIDE = [[100, 100], [100, 100], [5000]]


def _query(median_noise_multiplier=None, noise_site="server"):
    mechanism = tfdp_fl.MedianClipping(
        noise_multiplier=1.0,
        median_noise_multiplier=median_noise_multiplier,
        noise_site=noise_site,
    )
    query = mechanism.bind(Deployment(clients_per_round=4, sampling="fixed_size"))
    return query, query.initial_global_state()


class ExactMedianTest(tf.test.TestCase, parameterized.TestCase):
    def test_norms_half_one_two_eight(self):
        query, state = _query()
        updates = rounds.updates_with_norms([0.5, 1, 2, 8])
        done = rounds.run_round(query, state, updates)
        norms = [references.l2_norm(record.update) for record in done.records]
        self.assertAllClose(norms, [0.5, 1, 1.5, 1.5], rtol=1e-5)
        self.assertAllClose(done.state.clip_norm, 1.5, rtol=1e-6)

    @parameterized.parameters(1, 2, 3, 4, 7, 10)
    def test_without_noise_is_algorithm_1(self, count):
        query, state = _query()
        norms = np.random.default_rng(count).exponential(size=count)
        updates = rounds.updates_with_norms(norms)
        done = rounds.run_round(query, state, updates, clients_per_round=6)
        wanted, bound = references.median_clipping_mean(updates, 6)
        self.assertAllClose(done.state.clip_norm, bound, rtol=1e-5)
        for actual, expected in zip(done.mean, wanted, strict=True):
            self.assertAllClose(actual, expected, rtol=1e-4, atol=1e-7)

    @parameterized.parameters("server", "client")
    def test_noise_is_scaled_to_the_median_of_this_round(self, noise_site):
        query, state = _query(noise_site=noise_site)
        updates = rounds.updates_with_norms([0.5, 1, 2, 8], _WIDE)
        exact = rounds.run_round(query, state, updates)
        noisy = rounds.run_round(query, state, updates, noise_multiplier=1.3)
        difference = rounds.flat(noisy.mean) - rounds.flat(exact.mean)
        statistics.assert_gaussian(difference, 1.3 * 1.5 / 4)

    def test_a_huge_client_moves_the_mean_by_at_most_s_over_m(self):
        query, state = _query()
        updates = rounds.updates_with_norms([0.5, 1, 2, 8, 9])
        before = rounds.run_round(query, state, updates)
        updates[4] = [v * np.float32(1e6) for v in updates[4]]
        after = rounds.run_round(query, state, updates)
        moved = rounds.flat(after.mean) - rounds.flat(before.mean)
        self.assertLessEqual(np.linalg.norm(moved), 2.0 / 5)
        self.assertAllClose(after.state.clip_norm, 2.0, rtol=1e-5)

    def test_a_bad_client_counts_as_norm_zero(self):
        query, state = _query()
        updates = rounds.updates_with_norms([1, 2, 3])
        updates[2][0][0, 0] = np.nan
        done = rounds.run_round(query, state, updates)
        self.assertAllClose(done.state.clip_norm, 1.0, rtol=1e-5)
        self.assertEqual(float(done.total.discarded), 1)
        self.assertTrue(np.isfinite(rounds.flat(done.mean)).all())

    def test_one_of_two_clients_is_not_to_set_it(self):
        with self.assertRaisesRegex(ValueError, "clients_per_round must be at least 3"):
            tfdp_fl.MedianClipping(noise_multiplier=1.0).check(
                Deployment(clients_per_round=2)
            )

    def test_an_empty_cohort_keeps_the_last_median(self):
        query, state = _query()
        state = rounds.run_round(
            query, state, rounds.updates_with_norms([3.0])
        ).next_state
        done = rounds.run_round(
            query,
            state,
            [],
            noise_multiplier=1.0,
            clients_per_round=4,
            template=rounds.zero_updates(1, _WIDE)[0],
        )
        self.assertAllClose(done.state.clip_norm, 3.0, rtol=1e-5)
        statistics.assert_gaussian(rounds.flat(done.mean), 3.0 / 4)


class PrivateMedianTest(tf.test.TestCase, parameterized.TestCase):
    def test_it_is_a_quantile_near_the_half_at_a_useful_noise(self):
        norms = np.random.default_rng(0).lognormal(size=200)
        found = tf.function(
            lambda: median_clipping.private_median(tf.constant(norms, tf.float32), 2.0)
        )
        # Each answer has noise of stddev sqrt(12), in clients of 200.
        shares = [(norms <= float(found())).mean() for _ in range(50)]
        self.assertAllInRange(shares, 0.3, 0.7)

    def _found_with(self, norms, z, draw):
        """Returns the median, with `draw(stddev)` in place of the noise."""
        with mock.patch.object(
            noise, "normal", lambda shape, stddev: draw(float(stddev))
        ):
            return float(median_clipping.private_median(tf.constant(norms), z))

    def test_a_client_moves_every_question_by_one_half(self):
        # The first question is whether more than half of the norms are at
        # most 1; its answer changes where the noise crosses minus the sum.
        def least_noise_for_yes(norms):
            for noise_on_sum in np.arange(-3.25, 4, 0.5):
                found = self._found_with(norms, 1.0, lambda _, n=noise_on_sum: n)
                if found < 1:
                    return noise_on_sum
            raise AssertionError

        for norms in ([0.1] * 3 + [9.0], [0.1], [0.1] * 5 + [9.0] * 5):
            alone = least_noise_for_yes(norms)
            self.assertEqual(least_noise_for_yes([*norms, 0.1]), alone - 0.5)
            self.assertEqual(least_noise_for_yes([*norms, 9.0]), alone + 0.5)

    @parameterized.parameters(0.1, 0.7, 4.0)
    def test_all_answers_together_cost_one_gaussian(self, z):
        stddevs = []
        self._found_with([1.0] * 3, z, lambda stddev: stddevs.append(stddev) or 0.0)
        together = sum((stddev / 0.5) ** -2 for stddev in stddevs) ** -0.5
        self.assertAlmostEqual(together, z, 5)

    def test_every_answer_has_noise_of_its_own(self):
        seeds = []
        original = noise.next_seed
        with mock.patch.object(
            noise,
            "next_seed",
            lambda: seeds.append(original()) or seeds[-1],
        ):
            for _ in range(2):
                median_clipping.private_median(tf.ones([3]), 1.0)
        self.assertLen(
            {tuple(seed.numpy()) for seed in seeds},
            2 * median_clipping.SEARCH_STEPS,
        )

    def test_stays_on_its_grid_even_for_an_empty_cohort(self):
        for norms in ([], [0.0] * 50, [1e30] * 50):
            found = float(
                median_clipping.private_median(tf.constant(norms, tf.float32), 0.1)
            )
            self.assertBetween(
                found,
                median_clipping.SMALLEST_NORM,
                median_clipping.LARGEST_NORM,
            )

    def test_is_what_the_round_clips_with(self):
        query, state = _query(median_noise_multiplier=0.001)
        updates = rounds.updates_with_norms([0.5, 1, 1, 2, 8])
        done = rounds.run_round(query, state, updates)
        self.assertAllClose(done.state.clip_norm, 1.0, rtol=0.01)
        bound = float(done.state.clip_norm)
        wanted = references.fixed_clipping_mean(updates, bound, 5)
        self.assertAllClose(rounds.flat(done.mean), rounds.flat(wanted), atol=1e-6)


class UnreliableMedianTest(parameterized.TestCase):
    def _bind(self, z_median):
        tfdp_fl.MedianClipping(
            noise_multiplier=1.0, median_noise_multiplier=z_median
        ).bind(Deployment(clients_per_round=100))

    def test_too_much_noise_for_the_cohort_is_warned_of(self):
        with self.assertWarnsRegex(UserWarning, "take at most 7.22"):
            self._bind(16.5)

    def test_what_the_warning_advises_is_silent(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self._bind(7.2)

    @parameterized.parameters(
        (1.0, 100, 5.0),  # Five times, where the cohort allows it.
        (3.3, 100, 100 / (8 * 3**0.5)),  # 2 m/2 = 4 z_median sqrt(12)/2.
        (3.3, 10, 1.5 * 3.3),  # No cohort is so small that it costs much.
        (3.3, 1e6, 16.5),
    )
    def test_the_default_follows_the_cohort(self, z, m, expected):
        found = tfdp_fl.mechanisms.default_median_noise_multiplier(z, m)
        self.assertAlmostEqual(found, expected)


class MedianClippingCostTest(parameterized.TestCase):
    @parameterized.parameters((1.0, 1.0), (0.7, 3.0), (5.0, 0.5))
    def test_a_private_median_is_composed_into_the_round(self, z, z_median):
        mechanism = tfdp_fl.MedianClipping(
            noise_multiplier=z, median_noise_multiplier=z_median
        )
        event = mechanism.round_event(0, Deployment(clients_per_round=5))
        self.assertAlmostEqual(event.noise_multiplier, (z**-2 + z_median**-2) ** -0.5)
        self.assertNotIn("exact_median", mechanism.caveats())

    def test_the_exact_median_is_not_covered_and_says_so(self):
        mechanism = tfdp_fl.MedianClipping(noise_multiplier=1.3)
        self.assertEqual(
            mechanism.round_event(0, Deployment(clients_per_round=5)),
            dp_accounting.GaussianDpEvent(1.3),
        )
        self.assertIn("exact_median", mechanism.caveats())

    def test_a_private_median_under_an_exact_sum_is_not_private(self):
        mechanism = tfdp_fl.MedianClipping(
            noise_multiplier=0.0, median_noise_multiplier=1.0
        )
        self.assertIsInstance(
            mechanism.round_event(0, Deployment(clients_per_round=5)),
            dp_accounting.NonPrivateDpEvent,
        )


if __name__ == "__main__":
    tf.test.main()
