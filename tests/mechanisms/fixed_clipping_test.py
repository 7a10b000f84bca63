from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.mechanisms import Deployment

_NORMS = (0.0, 0.05, 0.3, 0.5, 0.500001, 7.0, 1e4)
_WIDE = [[100, 100], [100, 100], [5000]]


def _query(noise_site="server", clip_norm=0.5, sampling="fixed_size"):
    mechanism = tfdp_fl.FixedClipping(
        clip_norm=clip_norm, noise_multiplier=1.0, noise_site=noise_site
    )
    query = mechanism.bind(
        Deployment(clients_per_round=4, num_clients=9, sampling=sampling)
    )
    return query, query.initial_global_state()


class FixedClippingMeanTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(noise_site=["server", "client"], m=[3, 7, 20])
    def test_without_noise_is_the_papers_mean(self, noise_site, m):
        query, state = _query(noise_site)
        updates = rounds.updates_with_norms(_NORMS)
        done = rounds.run_round(query, state, updates, clients_per_round=m)
        wanted = references.fixed_clipping_mean(updates, 0.5, m)
        for actual, expected in zip(done.mean, wanted, strict=True):
            self.assertAllClose(actual, expected, rtol=1e-5, atol=1e-7)
        self.assertEqual(float(done.total.clipped), 3)
        self.assertAllClose(done.total.norm, sum(_NORMS), rtol=1e-6)

    def test_divides_by_the_fixed_m_however_many_answer(self):
        query, state = _query()
        updates = rounds.updates_with_norms([0.2] * 6)
        for answered in (0, 1, 6):
            done = rounds.run_round(
                query,
                state,
                updates[:answered],
                clients_per_round=4,
                template=updates[0],
            )
            expected = sum(rounds.flat(u) for u in updates[:answered]) / 4
            self.assertAllClose(
                rounds.flat(done.mean), expected + np.zeros(26), atol=1e-7
            )

    def test_one_client_moves_the_mean_by_at_most_s_over_m(self):
        query, state = _query()
        updates = rounds.updates_with_norms([0.3] * 5)
        before = rounds.run_round(query, state, updates)
        updates[2] = [v * np.float32(1e6) for v in updates[2]]
        after = rounds.run_round(query, state, updates)
        without = rounds.run_round(
            query, state, updates[:2] + updates[3:], clients_per_round=5
        )
        for other in (before, without):
            moved = rounds.flat(after.mean) - rounds.flat(other.mean)
            self.assertLessEqual(np.linalg.norm(moved), 0.5 / 5 * (1 + 1e-5))
        self.assertGreater(np.linalg.norm(moved), 0.5 / 5 * 0.999)

    @parameterized.parameters(np.nan, np.inf, -np.inf)
    def test_a_bad_client_becomes_zero_before_clipping(self, bad):
        query, state = _query()
        updates = rounds.updates_with_norms([0.1, 0.2, 0.3])
        updates[1][2][1, 1] = bad
        done = rounds.run_round(query, state, updates)
        expected = (rounds.flat(updates[0]) + rounds.flat(updates[2])) / 3
        self.assertAllClose(rounds.flat(done.mean), expected)
        self.assertEqual(float(done.total.discarded), 1)
        self.assertAllClose(done.total.norm, 0.4)


class ClipRangeTest(parameterized.TestCase):
    @parameterized.parameters(1e-11, 1e31)
    def test_a_clip_that_float32_cannot_keep_is_refused(self, clip):
        for make in (
            lambda: tfdp_fl.FixedClipping(clip_norm=clip, noise_multiplier=1.0),
            lambda: tfdp_fl.AdaptiveClipping(
                initial_clip_norm=clip, noise_multiplier=1.0
            ),
            lambda: tfdp_fl.LocalDP(clip_norm=clip, noise_multiplier=1.0),
        ):
            with self.assertRaisesRegex(ValueError, "clip_norm must be from"):
                make()

    @parameterized.parameters((1e-10, 1e-20), (1e18, 1e18), (1.0, 1e38))
    def test_noise_that_float32_cannot_keep_is_refused(self, clip, noise):
        for schedule in (noise, [noise], lambda _: noise):
            with self.assertRaisesRegex(ValueError, "noise_multiplier times the clip"):
                tfdp_fl.FixedClipping(
                    clip_norm=clip, noise_multiplier=schedule
                ).noise_multiplier_at(0)


class FixedClippingNoiseTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(noise_site=["server", "client"], answered=[1, 10])
    def test_stddev_of_the_mean_is_z_s_over_m(self, noise_site, answered):
        query, state = _query(noise_site)
        done = rounds.run_round(
            query,
            state,
            rounds.zero_updates(answered, _WIDE),
            noise_multiplier=1.7,
            clients_per_round=answered,
        )
        statistics.assert_gaussian(rounds.flat(done.mean), 1.7 * 0.5 / answered)
        statistics.assert_uncorrelated(done.mean[0], done.mean[1])

    def test_a_client_adds_one_mth_of_the_variance(self):
        query, state = _query("client")
        done = rounds.run_round(
            query,
            state,
            rounds.zero_updates(4, _WIDE),
            noise_multiplier=1.2,
        )
        shares = [rounds.flat(record.update) for record in done.records]
        for k, share in enumerate(shares):
            statistics.assert_gaussian(share, 1.2 * 0.5 / 2)
            statistics.assert_uncorrelated(share, shares[k - 1])

    def test_a_bad_client_still_adds_its_share(self):
        query, state = _query("client")
        updates = rounds.zero_updates(1, _WIDE)
        updates[0][0][0, 0] = np.nan
        done = rounds.run_round(query, state, updates, noise_multiplier=1.0)
        statistics.assert_gaussian(rounds.flat(done.mean), 0.5)


class FixedClippingArgumentsTest(parameterized.TestCase):
    @parameterized.parameters("poisson", "shuffled")
    def test_noise_at_the_clients_needs_cohorts_of_fixed_size(self, sampling):
        mechanism = tfdp_fl.FixedClipping(
            clip_norm=1.0, noise_multiplier=1.0, noise_site="client"
        )
        deployment = Deployment(clients_per_round=5, sampling=sampling)
        for use in (mechanism.check, mechanism.bind):
            with self.assertRaisesRegex(ValueError, "noise_site.*fixed_size"):
                use(deployment)


if __name__ == "__main__":
    tf.test.main()
