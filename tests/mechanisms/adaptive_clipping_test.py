from __future__ import annotations

import math
from unittest import mock

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.mechanisms import Deployment, Round, noise

_WIDE = [[100, 100], [100, 100], [5000]]


def _query(m=20, noise_multiplier=1.0, sampling="fixed_size", **arguments):
    mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=noise_multiplier, **arguments)
    query = mechanism.bind(Deployment(clients_per_round=m, sampling=sampling))
    return query, query.initial_global_state()


class AdaptiveClippingMeanTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        noise_site=["server", "client"],
        bound=[0.2, 1.0, 30.0],
        quantile=[0.0, 0.3, 0.5, 1.0],
    )
    def test_without_noise_is_algorithm_1(self, noise_site, bound, quantile):
        norms = [0.1, 0.2, 0.5, 0.9, 1.5, 4.0]
        query, state = _query(
            noise_site=noise_site,
            initial_clip_norm=bound,
            target_quantile=quantile,
            clip_learning_rate=0.3,
        )
        updates = rounds.updates_with_norms(norms)
        for _ in range(3):
            done = rounds.run_round(query, state, updates, clients_per_round=8)
            wanted = references.fixed_clipping_mean(updates, bound, 8)
            for actual, expected in zip(done.mean, wanted, strict=True):
                self.assertAllClose(actual, expected, rtol=1e-4, atol=1e-7)
            # A client that is missing counts half: the bits are centred.
            bound = references.next_clip(bound, norms, quantile, 0.3, 8, 1.0)
            state = done.next_state
            self.assertAllClose(state.clip_norm, bound, rtol=1e-5)

    def test_polarity_all_norms_above_the_clip_make_it_rise(self):
        query, state = _query(initial_clip_norm=0.1)
        updates = rounds.updates_with_norms([1.0] * 20)
        clips = [0.1]
        for _ in range(10):
            state = rounds.run_round(query, state, updates).next_state
            clips.append(float(state.clip_norm))
        self.assertAllClose(clips, 0.1 * np.exp(0.1 * np.arange(11)), rtol=1e-4)

    def test_a_norm_equal_to_the_clip_is_not_clipped(self):
        query, state = _query(initial_clip_norm=1.0, clip_learning_rate=1.0)
        update = [np.float32([[1.0]]), np.zeros(1, np.float32)]
        done = rounds.run_round(query, state, [update])
        self.assertAllClose(done.next_state.clip_norm, math.exp(-0.5))

    @parameterized.parameters((0.1, 0.8), (10.0, 0.3))
    def test_finds_the_quantile_from_far_away(self, start, quantile):
        norms = np.random.default_rng(3).lognormal(sigma=0.5, size=20)
        wanted = np.quantile(norms, quantile)
        query, state = _query(
            initial_clip_norm=start * wanted, target_quantile=quantile
        )
        updates = tf.constant(norms[:, None], tf.float32)

        @tf.function
        def step(state, seed):
            state = query.begin_round(state, 0.5, 20.0)
            params = query.derive_sample_params(state)
            total = query.initial_sample_state([tf.zeros([1])])
            for update in updates:
                record = query.preprocess_record(params, [update])
                total = query.accumulate_preprocessed_record(total, record)
            with noise.seeded(seed):
                _, state, _ = query.get_noised_result(total, state)
            return state

        clips = []
        for t in range(150):
            state = step(state, tf.constant([5, t], tf.int64))
            clips.append(float(state.clip_norm))
        share = [(norms <= clip).mean() for clip in clips[100:]]
        self.assertAllClose(np.mean(share), quantile, atol=0.06)


class AdaptiveClippingNoiseTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(noise_site=["server", "client"], sigma_b=[None, 0.8])
    def test_updates_are_noised_with_z_delta_and_this_rounds_clip(
        self, noise_site, sigma_b
    ):
        z, m = 1.4, 16
        query, state = _query(
            m,
            noise_multiplier=z,
            noise_site=noise_site,
            initial_clip_norm=0.25,
            clip_learning_rate=3.0,
            count_noise_stddev=sigma_b,
        )
        done = rounds.run_round(
            query, state, rounds.zero_updates(m, _WIDE), noise_multiplier=z
        )
        z_delta = references.update_noise_multiplier(z, sigma_b or m / 20)
        # The clip moves by a factor of about exp(-1.5) after this round.
        self.assertLess(float(done.next_state.clip_norm), 0.25 * 0.5)
        statistics.assert_gaussian(rounds.flat(done.mean), z_delta * 0.25 / m)
        statistics.assert_uncorrelated(done.mean[0], done.mean[1])
        self.assertAllClose(
            query.derive_metrics(done.state)["noise_stddev"], z_delta * 0.25
        )

    @parameterized.product(noise_site=["server", "client"], sigma_b=[None, 1.5])
    def test_the_count_is_noised_with_sigma_b_in_all(self, noise_site, sigma_b):
        m, z = 16, 0.5
        query, state = _query(
            m, noise_multiplier=z, noise_site=noise_site, count_noise_stddev=sigma_b
        )
        begun = query.begin_round(state, z, m)
        params = query.derive_sample_params(begun)
        # One stddev in the place of each draw; of what is added to a list, none.
        with mock.patch.multiple(
            noise,
            normal=lambda shape, stddev: stddev,
            add_normal=lambda tensors, stddev: tensors,
        ):
            record = query.preprocess_record(params, [tf.zeros([1])])
            total = query.initial_sample_state([tf.zeros([1])])
            _, after, _ = query.get_noised_result(total, begun)
        # The clip moves by exp(-rate b), b = (what is added to the count) / m.
        by_server = -m * math.log(float(after.clip_norm) / 0.1) / 0.2
        by_client = float(record.sums["below_clip"]) - 0.5
        expected = {"server": (1.0, 0.0), "client": (0.0, 1 / math.sqrt(m))}
        self.assertAllClose(
            [by_server, by_client],
            np.multiply(expected[noise_site], sigma_b or m / 20),
            atol=1e-5,
        )

    def test_with_noise_at_the_clients_the_server_adds_none(self):
        query, state = _query(noise_multiplier=0.5, noise_site="client")
        begun = query.begin_round(state, 0.5, 20)
        total = query.initial_sample_state([tf.zeros([3])])
        mean, after, _ = query.get_noised_result(total, begun)
        self.assertAllEqual(mean[0], np.zeros(3))
        self.assertAllClose(after.clip_norm, 0.1)

    def test_without_noise_on_the_updates_the_count_is_exact_too(self):
        query, state = _query(noise_multiplier=0.0)
        updates = rounds.updates_with_norms([1.0] * 4)
        clips = {
            float(rounds.run_round(query, state, updates).next_state.clip_norm)
            for _ in range(5)
        }
        self.assertLen(clips, 1)

    def test_follows_schedules_of_z_and_m(self):
        query, state = _query(m=lambda t: 10 * (t + 1), noise_multiplier=0.5)
        for m, z in ((10, 0.5), (40, 1.5)):
            begun = query.begin_round(state, z, m)
            begun = begun._replace(clip_norm=tf.constant(2.0))
            stddevs = query.mechanism.noise_stddevs(begun, query.deployment)
            self.assertAllClose(stddevs["below_clip"], m / 20)
            update = 2.0 * references.update_noise_multiplier(z, m / 20)
            self.assertAllClose(stddevs["update"], update)
            # The same of plain numbers, for the planner and Flower.
            numbers = query.mechanism.noise_stddevs(
                Round(2.0, z, float(m)), query.deployment
            )
            self.assertIsInstance(numbers["update"], float)
            self.assertAllClose(numbers["update"], update)


class AdaptiveClippingArgumentsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(0.3, 1.0, 2.5, 37.0)
    def test_z_delta_of_what_is_allowed_is_right_in_float32(self, sigma_b):
        # Closer to 2 sigma_b the noise would be wrong, and infinite at last.
        mechanism = tfdp_fl.AdaptiveClipping(
            noise_multiplier=0.1, count_noise_stddev=sigma_b
        )
        deployment = Deployment(clients_per_round=5)
        z = mechanism.noise_limit(0, deployment)
        with self.assertRaisesRegex(ValueError, "ten-thousandth"):
            mechanism.with_noise_multiplier(z * (1 + 1e-6))
        wanted = references.update_noise_multiplier(z, sigma_b)
        for number in (float, tf.constant):
            stddevs = mechanism.noise_stddevs(Round(1.0, number(z), 5.0), deployment)
            self.assertAllClose(stddevs["update"], wanted, rtol=2e-3)
        stddevs = mechanism.noise_stddevs(Round(1.0, tf.constant(0.0), 5.0), deployment)
        self.assertEqual(float(stddevs["update"]), 0.0)

    @parameterized.parameters((1.0, 0.5), (1.0, 0.1), (1.0, 0.0), ([0.1, 1.0], 0.4))
    def test_z_of_two_sigma_b_or_more_is_an_error(self, z, sigma_b):
        with self.assertRaisesRegex(ValueError, "noise_multiplier.*count_noise"):
            tfdp_fl.AdaptiveClipping(noise_multiplier=z, count_noise_stddev=sigma_b)

    def test_z_too_large_for_the_cohort_is_an_error(self):
        mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=1.0)
        with self.assertRaisesRegex(ValueError, "noise_multiplier.*count_noise"):
            mechanism.bind(Deployment(clients_per_round=10))
        mechanism.bind(Deployment(clients_per_round=11))

    def test_every_round_of_a_schedule_is_checked(self):
        mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=lambda t: 0.4 * t)
        deployment = Deployment(clients_per_round=10, rounds=5)
        with self.assertRaisesRegex(ValueError, "noise_multiplier"):
            mechanism.check(deployment)
        short = Deployment(clients_per_round=10, rounds=3)
        mechanism.check(short)
        mechanism.round_event(2, short)
        with self.assertRaisesRegex(ValueError, "noise_multiplier"):
            mechanism.round_event(3, short)

    def test_both_releases_cost_z_together(self):
        mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=1.3)
        self.assertEqual(
            mechanism.round_event(0, Deployment(clients_per_round=50)),
            dp_accounting.GaussianDpEvent(1.3),
        )


if __name__ == "__main__":
    tf.test.main()
