from __future__ import annotations

import dp_accounting
import numpy as np
import tensorflow as tf

import tfdp_fl
from tests.mechanisms import references, rounds
from tfdp_fl.mechanisms import Deployment


class NoPrivacyTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.deployment = Deployment(clients_per_round=100)
        self.query = tfdp_fl.NoPrivacy().bind(self.deployment)
        self.state = self.query.initial_global_state()

    def test_is_the_mean_over_those_who_answered(self):
        updates = rounds.updates_with_norms([0.1, 1, 10, 1e3, 1e5])
        done = rounds.run_round(self.query, self.state, updates, clients_per_round=100)
        for actual, summed in zip(done.mean, references.total(updates), strict=True):
            self.assertAllClose(actual, summed / 5, rtol=1e-5)
        self.assertEqual(float(done.total.clipped), 0)

    def test_nobody_answered(self):
        done = rounds.run_round(
            self.query, self.state, [], template=rounds.zero_updates(1)[0]
        )
        self.assertAllEqual(rounds.flat(done.mean), np.zeros(26))

    def test_claims_nothing(self):
        self.assertEqual(tfdp_fl.NoPrivacy().guarantee, "none")
        self.assertIsInstance(
            tfdp_fl.NoPrivacy().round_event(0, self.deployment),
            dp_accounting.NonPrivateDpEvent,
        )


if __name__ == "__main__":
    tf.test.main()
