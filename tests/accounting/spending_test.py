"""What a run has spent, centrally and client by client."""

from __future__ import annotations

import json
import math

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl import accounting
from tfdp_fl.accounting import spending as spending_lib


def _charge(z=2.0):
    return accounting.RoundCharge(
        sampling="poisson",
        num_clients=10,
        clients_per_round=4,
        event=dp_accounting.GaussianDpEvent(z),
    )


class SpendingTest(parameterized.TestCase):
    def test_a_central_guarantee_is_composed_over_rounds(self):
        spending = spending_lib.Spending(spending_lib.CENTRAL, 10)
        for _ in range(3):
            spending.charge(_charge(), np.array([1, 2]), 0.0)
        expected = accounting.epsilon(2.0, "poisson", 10, 4, 3, 1e-3)
        self.assertAlmostEqual(spending.epsilon(1e-3), expected, places=12)
        self.assertEqual(spending.rounds, 3)
        after = accounting.epsilon(2.0, "poisson", 10, 4, 4, 1e-3)
        self.assertAlmostEqual(
            spending.epsilon_after(_charge(), 0.0, 1e-3), after, places=12
        )
        self.assertAlmostEqual(spending.epsilon(1e-3), expected, places=12)

    @parameterized.parameters(spending_lib.LOCAL, spending_lib.RECORD)
    def test_a_local_one_is_that_of_the_most_seen_client(self, guarantee):
        spending = spending_lib.Spending(guarantee, 10)
        spending.charge(_charge(), np.array([1, 2]), 0.5)
        spending.charge(_charge(), np.array([2, 3]), 0.5)
        exact = accounting.epsilon_of_mu_squared
        self.assertEqual(spending.epsilon(1e-3), exact(1.0, 1e-3))
        # The next round may draw the same client again.
        self.assertEqual(
            spending.epsilon_after(_charge(), 0.5, 1e-3), exact(1.5, 1e-3)
        )
        # What a crash may have lost counts against everybody.
        spending.lost_mu_squared = 0.25
        self.assertEqual(spending.epsilon(1e-3), exact(1.25, 1e-3))
        self.assertAlmostEqual(
            spending.central_epsilon(1e-3),
            accounting.epsilon(2.0, "poisson", 10, 4, 2, 1e-3),
            places=12,
        )

    def test_the_state_survives_a_checkpoint(self):
        spending = spending_lib.Spending(spending_lib.LOCAL, 10)
        spending.charge(_charge(), np.array([1, 2]), 0.5)
        spending.charge(_charge(3.0), np.array([2]), 0.25)
        spending.lost_mu_squared = 0.1
        state = spending.state()
        charges = json.loads(json.dumps(state["charges"]))
        again = spending_lib.Spending.from_state({**state, "charges": charges})
        self.assertEqual(again.epsilon(1e-3), spending.epsilon(1e-3))
        self.assertEqual(
            again.central_epsilon(1e-3), spending.central_epsilon(1e-3)
        )
        self.assertEqual(again.rounds, 2)
        again.charge(_charge(), np.array([2]), math.inf)
        self.assertEqual(again.epsilon(1e-3), math.inf)
        self.assertLess(spending.epsilon(1e-3), math.inf)


if __name__ == "__main__":
    absltest.main()
