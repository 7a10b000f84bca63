from __future__ import annotations

import dataclasses
from unittest import mock

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.accounting import caveats
from tfdp_fl.mechanisms import Deployment
from tfdp_fl.mechanisms import tf_privacy as tfp

_WIDE = [[100, 100], [100, 100], [5000]]
_EVENT = dp_accounting.GaussianDpEvent(1.0)


def _bound(query):
    # Whatever the query's noise, nothing is claimed for it here.
    mechanism = tfdp_fl.QueryMechanism(
        query=query, dp_event=dp_accounting.NonPrivateDpEvent()
    )
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
        query, state = _bound(tfp.NormalizedQuery(tfp.GaussianSumQuery(0.5, 0.0), 5.0))
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

    @parameterized.named_parameters(
        (
            "no_noise",
            tfp.GaussianSumQuery(1.0, 0.0),
            dp_accounting.GaussianDpEvent(10.0),
        ),
        ("less_noise", tfp.GaussianSumQuery(1.0, 0.99), _EVENT),
        (
            "sampling_twice",
            tfp.GaussianSumQuery(1.0, 1.0),
            dp_accounting.PoissonSampledDpEvent(0.01, _EVENT),
        ),
        (
            "another_kind",
            tfp.GaussianSumQuery(1.0, 1.0),
            dp_accounting.LaplaceDpEvent(2.0),
        ),
        ("no_privacy", tfp.NoPrivacySumQuery(), _EVENT),
        (
            "count_forgotten",
            _adaptive(1.0, 1.0),
            dp_accounting.GaussianDpEvent(1.0),
        ),
        (
            "inside_another",
            tfp.NormalizedQuery(tfp.GaussianSumQuery(1.0, 0.5), 8.0),
            _EVENT,
        ),
    )
    def test_an_event_that_costs_less_is_refused(self, query, event):
        with self.assertRaisesRegex(ValueError, "dp_event must not"):
            tfdp_fl.QueryMechanism(query=query, dp_event=event)

    @parameterized.parameters(
        (tfp.GaussianSumQuery(0.3, 0.3 * 1.1), 1.1),
        (tfp.GaussianSumQuery(1.0, 1.5), 1.0),
        (tfp.NormalizedQuery(tfp.GaussianSumQuery(1.0, 1.0), 8.0), 1.0),
        (_adaptive(1.0, 1.0), 0.8**0.5),
    )
    def test_an_event_that_costs_as_much_or_more_is_taken(self, query, z):
        event = dp_accounting.GaussianDpEvent(z)
        tfdp_fl.QueryMechanism(query=query, dp_event=event)

    def test_a_query_for_several_variables_is_tried_when_it_is_bound(self):
        def nested(stddev):
            queries = [tfp.GaussianSumQuery(1.0, s) for s in (2.0, stddev)]
            return tfdp_fl.QueryMechanism(
                query=tfp.NestedSumQuery(queries),
                dp_event=dp_accounting.ComposedDpEvent(
                    [dp_accounting.GaussianDpEvent(2.0)] * 2
                ),
            )

        deployment = Deployment(clients_per_round=8, num_variables=2)
        nested(2.0).bind(deployment)
        with self.assertRaisesRegex(ValueError, "dp_event must not cost less"):
            nested(1.0).bind(deployment)

    @parameterized.named_parameters(
        (
            "tree",
            lambda: tfp.TreeResidualSumQuery.build_l2_gaussian_query(
                1.0, 1.0, [tf.TensorSpec([4])]
            ),
        ),
        (
            "cumulative_tree",
            lambda: tfp.TreeCumulativeSumQuery.build_l2_gaussian_query(
                1.0, 1.0, [tf.TensorSpec([4])]
            ),
        ),
        (
            "inside_another",
            lambda: tfp.NormalizedQuery(
                tfp.TreeResidualSumQuery.build_l2_gaussian_query(
                    1.0, 1.0, [tf.TensorSpec([4])]
                ),
                8.0,
            ),
        ),
        (
            "adaptive_tree",
            lambda: tfp.QAdaClipTreeResSumQuery(
                1.0, 1.0, [tf.TensorSpec([4])], 0.5, 0.2, 1.0, 8.0
            ),
        ),
        (
            "range",
            lambda: tfp.TreeRangeSumQuery.build_central_gaussian_query(1.0, 1.0),
        ),
        (
            "restart",
            lambda: tfp.RestartQuery(
                tfp.TreeResidualSumQuery.build_l2_gaussian_query(
                    1.0, 1.0, [tf.TensorSpec([4])]
                ),
                mock.Mock(),
            ),
        ),
        ("discrete", lambda: tfp.DiscreteGaussianSumQuery(1.0, 1.0)),
        ("average", lambda: tfp.NoPrivacyAverageQuery()),
    )
    def test_queries_that_cannot_be_charged_are_refused(self, query):
        try:
            made = query()
        except ModuleNotFoundError as error:
            self.skipTest(f"TF-Privacy needs {error.name} for this query.")
        with self.assertRaisesRegex(ValueError, "query must.*FixedClipping"):
            tfdp_fl.QueryMechanism(query=made, dp_event=_EVENT)

    @parameterized.named_parameters(
        ("reports_nothing", dp_accounting.UnsupportedDpEvent(), 1.0, False),
        ("reports_no_privacy", dp_accounting.NonPrivateDpEvent(), 1.0, False),
        ("reports_more", dp_accounting.GaussianDpEvent(0.5), 1.0, False),
        ("has_no_noise", _EVENT, 0.0, False),
        ("grows", _EVENT, 1.0, True),
    )
    def test_a_query_of_the_users_own_is_tried(self, reported, stddev, grows):
        class Own(tfp.SumAggregationDPQuery):
            def initial_global_state(self):
                return tf.zeros([1])

            def get_noised_result(self, sample_state, global_state):
                noised = [
                    each + stddev * tf.random.normal(each.shape)
                    for each in sample_state
                ]
                if grows:
                    global_state = tf.concat([global_state] * 2, 0)
                return noised, global_state, reported

        with self.assertRaises(ValueError):
            tfdp_fl.QueryMechanism(query=Own(), dp_event=_EVENT)

    @parameterized.parameters(True, False)
    def test_a_query_that_takes_the_models_shapes_only(self, tells_the_truth):
        """Such a query cannot be tried before the shapes are known."""
        reported = _EVENT if tells_the_truth else dp_accounting.GaussianDpEvent(0.05)

        class OfTheModel(tfp.GaussianSumQuery):
            def initial_sample_state(self, template=None):
                assert [each.shape for each in template] == [(3, 2), (2,)]
                return super().initial_sample_state(template)

            def get_noised_result(self, sample_state, global_state):
                result, state, _ = super().get_noised_result(sample_state, global_state)
                return result, state, reported

        mechanism = tfdp_fl.QueryMechanism(query=OfTheModel(0.5, 0.5), dp_event=_EVENT)
        deployment = Deployment(
            clients_per_round=8, num_variables=2, shapes=((3, 2), (2,))
        )
        if tells_the_truth:
            mechanism.bind(deployment)
            deployment = dataclasses.replace(deployment, shapes=((3, 3), (3,)))
            message = "must take tensors of zeros of the model's shapes"
        else:
            message = "dp_event must not cost less"
        with self.assertRaisesRegex(ValueError, message):
            mechanism.bind(deployment)

    def test_the_noise_follows_tensorflows_seed_and_a_caveat_says_so(self):
        mechanism = tfdp_fl.QueryMechanism(
            query=tfp.GaussianSumQuery(0.5, 0.5), dp_event=_EVENT
        )
        query = mechanism.bind(Deployment(clients_per_round=8))
        means = []
        for _ in range(2):
            tf.random.set_seed(3)
            state = query.initial_global_state()
            done = rounds.run_round(query, state, rounds.zero_updates(2, _WIDE))
            means.append(rounds.flat(done.mean))
        self.assertAllEqual(*means)
        self.assertIn("query_noise_from_tf_random", mechanism.caveats())
        for key in mechanism.caveats():
            self.assertIn(key, caveats.CAVEATS)


if __name__ == "__main__":
    tf.test.main()
