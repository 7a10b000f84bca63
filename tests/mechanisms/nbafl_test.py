from __future__ import annotations

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.mechanisms import Deployment

_WIDE = [[150, 150], [150, 150], [5000]]
# T = 10 is below sqrt(N) L = 40: no noise before broadcast. T = 100 is above.
_SHORT = Deployment(clients_per_round=4, num_clients=100, rounds=10)
_LONG = Deployment(clients_per_round=4, num_clients=100, rounds=100, min_examples=7)


def _bound(deployment=_SHORT, epsilon=10.0, constant=1.0, weight_clip=0.5):
    mechanism = tfdp_fl.NbAFL(
        epsilon=epsilon, constant=constant, weight_clip=weight_clip
    )
    query = mechanism.bind(deployment)
    return query, query.initial_global_state()


class UplinkTest(tf.test.TestCase, parameterized.TestCase):
    def test_without_noise_weights_are_clipped_and_averaged_by_examples(self):
        query, state = _bound(epsilon=1e9)
        self.assertTrue(query.mechanism.releases_weights)
        weights = rounds.updates_with_norms([0.1, 0.4, 2.0, 1e4])
        examples = [1, 10, 30, 5]
        done = rounds.run_round(query, state, weights, num_examples=examples)
        clipped = [references.clipped(each, 0.5) for each in weights]
        for i, actual in enumerate(done.mean):
            mean = sum(
                n * each[i] for n, each in zip(examples, clipped, strict=True)
            ) / sum(examples)
            self.assertAllClose(
                actual,
                references.nbafl_server_clip([mean], 0.5)[0],
                rtol=1e-4,
                atol=1e-6,
            )
        self.assertEqual(float(done.total.clipped), 2)

    @parameterized.parameters(1, 20, 600)
    def test_noise_follows_the_clients_own_number_of_examples(self, examples):
        query, state = _bound(constant=1.3)
        done = rounds.run_round(
            query,
            state,
            rounds.zero_updates(1, _WIDE),
            num_examples=[examples],
        )
        # A record is weighted by n.
        sent = rounds.flat(done.records[0].update) / examples
        sigma = references.nbafl_uplink_sigma(0.5, 1.3, 10, examples, 10.0)
        statistics.assert_gaussian(sent, sigma)
        statistics.assert_uncorrelated(*done.records[0].update[:2])

    def test_clients_with_nothing_to_say_weigh_nothing(self):
        query, state = _bound(epsilon=1e9)
        weights = rounds.updates_with_norms([0.1, 0.2, 0.3])
        weights[1][0][0, 0] = np.nan
        done = rounds.run_round(query, state, weights, num_examples=[6, 100, 0])
        self.assertAllClose(rounds.flat(done.mean), rounds.flat(weights[0]), atol=1e-6)
        self.assertEqual(float(done.total.weight), 6)
        self.assertEqual(float(done.total.discarded), 1)

    @parameterized.parameters(0.5, 0.99999994, 2.0**31, 2**31, 2**32)
    def test_whoever_weighs_anything_has_noise(self, examples):
        query, state = _bound(constant=1.3)
        done = rounds.run_round(
            query, state, rounds.zero_updates(1, _WIDE), num_examples=[examples]
        )
        self.assertEqual(float(done.total.weight), np.float32(examples))
        sigma = references.nbafl_uplink_sigma(0.5, 1.3, 10, 1, 10.0)
        statistics.assert_gaussian(rounds.flat(done.records[0].update), sigma)

    @parameterized.parameters(np.nan, np.inf, -np.inf, -5.0, -5, 0.0)
    def test_what_is_no_number_of_examples_weighs_nothing(self, examples):
        query, state = _bound(epsilon=1e9)
        weights = rounds.updates_with_norms([0.1, 0.2])
        done = rounds.run_round(query, state, weights, num_examples=[6.0, examples])
        self.assertEqual(float(done.total.weight), 6)
        self.assertAllClose(rounds.flat(done.mean), rounds.flat(weights[0]), atol=1e-6)


class DownlinkTest(tf.test.TestCase, parameterized.TestCase):
    def _released(self, deployment, value=0.0, epsilon=10.0):
        query, state = _bound(deployment, epsilon)
        total = query.initial_sample_state(
            [tf.zeros([150, 150]), tf.zeros([150, 150]), tf.zeros([5000])]
        )
        total = total._replace(
            update=[v + 5 * value for v in total.update],
            weight=tf.constant(5.0),
        )
        weights, _, _ = query.get_noised_result(total, state)
        return weights

    def test_noise_before_broadcast_when_it_is_due(self):
        weights = self._released(_LONG)
        sigma = references.nbafl_downlink_sigma(0.5, 1.0, 100, 4, 100, 7, 10.0)
        statistics.assert_gaussian(rounds.flat(weights), sigma)
        statistics.assert_uncorrelated(weights[0], weights[1])
        again = self._released(_LONG)
        statistics.assert_uncorrelated(weights[0], again[0])

    def test_none_when_it_is_not_due(self):
        self.assertAllEqual(rounds.flat(self._released(_SHORT)), np.zeros(50_000))

    @parameterized.parameters(0.3, 0.5, -0.7, 20.0, -1e6)
    def test_the_mean_is_clipped_element_by_element(self, value):
        weights = rounds.flat(self._released(_SHORT, value))
        expected = references.nbafl_server_clip([value], 0.5)[0]
        self.assertAllClose(weights, expected + np.zeros(50_000))

    @parameterized.parameters(
        (10, 4, 100), (40, 4, 100), (41, 4, 100), (100, 1, 9), (4, 1, 16)
    )
    def test_condition_and_formula(self, rounds_, m, population):
        actual = tfdp_fl.NbAFL(
            weight_clip=2.0, constant=3.0, epsilon=50.0
        ).downlink_stddev(
            Deployment(
                clients_per_round=m,
                num_clients=population,
                rounds=rounds_,
                min_examples=11,
            )
        )
        expected = references.nbafl_downlink_sigma(
            2.0, 3.0, rounds_, m, population, 11, 50.0
        )
        self.assertAlmostEqual(actual, expected)
        self.assertEqual(actual > 0, rounds_ > population**0.5 * m)

    def test_unknown_sizes_are_an_error_where_noise_is_due(self):
        mechanism = tfdp_fl.NbAFL(epsilon=10.0, constant=1.0, weight_clip=1.0)
        for sizes in (None, 0):
            with self.assertRaisesRegex(ValueError, "min_examples"):
                mechanism.bind(
                    Deployment(
                        clients_per_round=4,
                        num_clients=100,
                        rounds=100,
                        min_examples=sizes,
                    )
                )
        mechanism.bind(_SHORT)  # Not due.


class CostTest(parameterized.TestCase):
    @parameterized.parameters((1, 0.76), (2, 0.17), (3, 0.014))
    def test_the_constant_implies_a_delta(self, constant, delta):
        mechanism = tfdp_fl.NbAFL(epsilon=10.0, constant=constant, weight_clip=1.0)
        self.assertAlmostEqual(mechanism.implied_delta / delta, 1, 1)
        self.assertIn(f"{mechanism.implied_delta:.3g}", mechanism.describe())

    def test_one_upload_costs_its_sensitivity_over_sigma(self):
        mechanism = tfdp_fl.NbAFL(epsilon=10.0, constant=2.0, weight_clip=0.3)
        for examples in (1, 50):
            sigma = references.nbafl_uplink_sigma(0.3, 2.0, 10, examples, 10.0)
            self.assertAlmostEqual(
                mechanism.mu_squared(_SHORT), (2 * 0.3 / examples / sigma) ** 2
            )

    def test_is_per_record_and_says_so(self):
        mechanism = tfdp_fl.NbAFL(epsilon=10.0, constant=2.0, weight_clip=0.3)
        self.assertEqual(mechanism.guarantee, "record")
        self.assertIn("per_record", mechanism.caveats())
        self.assertIsInstance(
            mechanism.round_event(0, _SHORT), dp_accounting.NonPrivateDpEvent
        )


if __name__ == "__main__":
    tf.test.main()
