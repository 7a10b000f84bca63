"""The last cohort of a shuffled pass may be smaller than m."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tests.mechanisms import rounds, statistics
from tfdp_fl.datasets import FederatedDataset


class LastCohortTest(tf.test.TestCase):
    """Five clients, four a round: the second round has one."""

    def _fitted(self, mechanism, count, learning_rate=0.0):
        model = cohorts.mlp(3000)
        fed = tfdp_fl.DPFederatedModel(
            model, mechanism, clients_per_round=4, sampling="shuffled"
        )
        fed.compile(tf.keras.optimizers.SGD(learning_rate), cohorts.cross_entropy())
        clients = FederatedDataset.from_client_arrays(
            cohorts.client_arrays((2, 2, 2, 2, 2))
        )
        weights = [rounds.flat(model.get_weights())]
        for _ in range(count):
            fed.fit(clients, rounds=1, verbose=0)
            weights.append(rounds.flat(model.get_weights()))
        return fed, np.diff(weights, axis=0)

    def test_is_divided_by_the_fixed_m(self):
        _, moved = self._fitted(
            tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=2.0), 2
        )
        for change in moved:
            statistics.assert_gaussian(change, 2.0 * 0.5 / 4)

    def test_counts_with_the_noise_for_the_fixed_m(self):
        # m/20 of a cohort of one would be less than z/2, and the noise NaN.
        _, moved = self._fitted(tfdp_fl.AdaptiveClipping(noise_multiplier=0.3), 2)
        self.assertTrue(np.isfinite(moved).all())

    def test_missing_noises_give_no_central_guarantee(self):
        mechanism = tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=2.0)
        fed, _ = self._fitted(mechanism, 1)
        self.assertTrue(math.isfinite(fed.central_epsilon(1e-5)))
        fed.fit(
            FederatedDataset.from_client_arrays(cohorts.client_arrays((2, 2, 2, 2, 2))),
            rounds=1,
            verbose=0,
        )
        self.assertEqual(fed.central_epsilon(1e-5), math.inf)
        self.assertTrue(math.isfinite(fed.epsilon(1e-5)))


if __name__ == "__main__":
    tf.test.main()
