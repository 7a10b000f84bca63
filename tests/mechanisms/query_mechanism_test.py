from __future__ import annotations

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_privacy as tfp
from absl.testing import parameterized

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.mechanisms import Deployment

_WIDE = [[100, 100], [100, 100], [5000]]
_EVENT = dp_accounting.GaussianDpEvent(1.0)


def _bound(query):
    mechanism = tfdp_fl.QueryMechanism(query=query, dp_event=_EVENT)
    bound = mechanism.bind(Deployment(clients_per_round=8))
    return bound, bound.initial_global_state()


def _adaptive(noise_multiplier=0.0, count_stddev=0.0):
    return tfp.QuantileAdaptiveClipSumQuery(
        initial_l2_norm_clip=0.5,
        noise_multiplier=noise_multiplier,
        target_unclipped_quantile=0.4,
        learning_rate=0.3,
        clipped_count_stddev=count_stddev,
        expected_num_records=8,
    )


class QueryMechanismTest(tf.test.TestCase, parameterized.TestCase):
    def assert_mean(self, done, updates, bound, m):
        wanted = references.fixed_clipping_mean(updates, bound, m)
        for actual, expected in zip(done.mean, wanted, strict=True):
            self.assertAllClose(actual, expected, rtol=1e-4, atol=1e-7)

    def test_a_sum_is_divided_by_the_fixed_m(self):
        query, state = _bound(tfp.GaussianSumQuery(0.5, 0.0))
        updates = rounds.updates_with_norms([0.1, 0.5, 2.0, 1e4])
        done = rounds.run_round(query, state, updates, clients_per_round=8)
        self.assert_mean(done, updates, 0.5, 8)

    def test_a_normalized_query_keeps_its_own_denominator(self):
        query, state = _bound(
            tfp.NormalizedQuery(tfp.GaussianSumQuery(0.5, 0.0), 5.0)
        )
        updates = rounds.updates_with_norms([0.1, 0.5, 2.0])
        done = rounds.run_round(query, state, updates, clients_per_round=8)
        self.assert_mean(done, updates, 0.5, 5)

    def test_tf_privacys_adaptive_query_moves_its_clip(self):
        query, state = _bound(_adaptive())
        norms = [0.1, 0.2, 0.4, 1.0, 2.0, 3.0, 4.0, 5.0]
        updates = rounds.updates_with_norms(norms)
        bound = 0.5
        for _ in range(3):
            done = rounds.run_round(query, state, updates, clients_per_round=8)
            self.assert_mean(done, updates, bound, 8)
            self.assertAllClose(
                query.derive_metrics(state)["clip_norm"], bound, rtol=1e-5
            )
            bound = references.next_clip(bound, norms, 0.4, 0.3, 8)
            state = done.next_state

    def test_both_adaptive_clips_are_the_same_mechanism(self):
        ours = tfdp_fl.AdaptiveClipping(
            noise_multiplier=0.0,
            initial_clip_norm=0.5,
            target_quantile=0.4,
            clip_learning_rate=0.3,
        ).bind(Deployment(clients_per_round=8))
        own_state = ours.initial_global_state()
        theirs, their_state = _bound(_adaptive())
        updates = rounds.updates_with_norms([0.1, 0.3, 0.6, 1, 2, 3, 4, 5])
        for _ in range(4):
            one = rounds.run_round(ours, own_state, updates)
            two = rounds.run_round(theirs, their_state, updates)
            self.assertAllClose(rounds.flat(one.mean), rounds.flat(two.mean))
            own_state, their_state = one.next_state, two.next_state

    @parameterized.parameters(
        (tfp.GaussianSumQuery(0.5, 1.5), 1.5 / 8),
        (tfp.NormalizedQuery(tfp.GaussianSumQuery(0.5, 1.5), 5.0), 1.5 / 5),
        (_adaptive(3.0, 0.4), 3.0 * 0.5 / 8),
    )
    def test_noise_is_the_querys(self, query, stddev):
        bound, state = _bound(query)
        updates = rounds.zero_updates(2, _WIDE)
        first, second = (
            rounds.run_round(bound, state, updates, clients_per_round=8)
            for _ in range(2)
        )
        statistics.assert_gaussian(rounds.flat(first.mean), stddev)
        statistics.assert_uncorrelated(first.mean[0], first.mean[1])
        statistics.assert_uncorrelated(first.mean[0], second.mean[0])

    @parameterized.parameters(
        (tfp.GaussianSumQuery(0.5, 0.0),),
        (tfp.NormalizedQuery(tfp.GaussianSumQuery(0.5, 0.0), 3.0),),
        (_adaptive(),),
    )
    def test_a_bad_client_becomes_zero_before_the_query_sees_it(self, query):
        bound, state = _bound(query)
        updates = rounds.updates_with_norms([0.1, 0.2, 0.3])
        updates[1][3][1] = np.nan
        done = rounds.run_round(bound, state, updates)
        expected = (rounds.flat(updates[0]) + rounds.flat(updates[2])) / 3
        self.assertAllClose(rounds.flat(done.mean), expected)
        self.assertEqual(float(done.total.discarded), 1)

    def test_sums_of_parts_of_a_cohort_merge(self):
        query, state = _bound(_adaptive())
        updates = rounds.updates_with_norms([0.1, 0.4, 2.0, 8.0])
        whole = rounds.run_round(query, state, updates)
        parts = [
            rounds.run_round(query, state, updates[:1]).total,
            rounds.run_round(query, state, updates[1:]).total,
        ]
        merged = query.merge_sample_states(*parts)
        for one, other in zip(
            tf.nest.flatten(whole.total), tf.nest.flatten(merged), strict=True
        ):
            self.assertAllClose(one, other)

    def test_costs_what_was_declared(self):
        mechanism = tfdp_fl.QueryMechanism(
            query=tfp.GaussianSumQuery(0.5, 1.0), dp_event=_EVENT
        )
        self.assertEqual(
            mechanism.round_event(3, Deployment(clients_per_round=8)), _EVENT
        )
        self.assertIn("custom_query_event", mechanism.caveats())
        self.assertIn("GaussianSumQuery", mechanism.describe())

    def test_what_is_not_allowed(self):
        query = tfp.GaussianSumQuery(0.5, 1.0)
        with self.assertRaisesRegex(TypeError, "query"):
            tfdp_fl.QueryMechanism(query="sum", dp_event=_EVENT)
        with self.assertRaisesRegex(TypeError, "dp_event"):
            tfdp_fl.QueryMechanism(query=query, dp_event=1.0)
        with self.assertRaisesRegex(ValueError, "dp_event"):
            tfdp_fl.QueryMechanism(
                query=query, dp_event=dp_accounting.UnsupportedDpEvent()
            )


if __name__ == "__main__":
    tf.test.main()
