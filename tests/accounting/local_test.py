"""What each client spends by its own noise."""

from __future__ import annotations

import math

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl.accounting import gaussian, local


class LocalAccountTest(parameterized.TestCase):
    def test_the_client_that_spent_most_counts(self):
        account = local.LocalAccount(5)
        self.assertEqual(account.epsilon(1e-5), 0.0)
        account.add(np.array([0, 3]), 0.25)
        account.add(np.array([3, 4]), np.array([0.5, 2.0]))
        account.add(np.array([3]), 0.75)
        np.testing.assert_array_equal(account.participations, [1, 0, 0, 3, 1])
        np.testing.assert_array_equal(account.mu_squared, [0.25, 0, 0, 1.5, 2])
        self.assertEqual(account.max_participations, 3)
        self.assertEqual(account.max_mu_squared, 2.0)
        exact = gaussian.gaussian_epsilon(1 / math.sqrt(2), 1e-5)
        self.assertAlmostEqual(account.epsilon(1e-5), exact, places=12)

    def test_a_client_twice_in_a_cohort_is_charged_twice(self):
        account = local.LocalAccount(2)
        self.assertEqual(account.max_mu_squared_after(np.array([1, 1]), 1.0), 2.0)
        self.assertEqual(account.max_mu_squared, 0.0)
        account.add(np.array([1, 1]), 1.0)
        self.assertEqual(account.max_mu_squared, 2.0)

    def test_a_release_without_noise_has_no_guarantee(self):
        account = local.LocalAccount(2)
        account.add(np.array([0]), math.inf)
        self.assertEqual(account.epsilon(1e-5), math.inf)

    def test_the_state_survives_a_checkpoint(self):
        account = local.LocalAccount(4)
        account.add(np.array([1, 2]), 0.1)
        other = local.LocalAccount(4)
        other.set_state(account.get_state())
        account.add(np.array([1]), 0.2)
        other.add(np.array([1]), 0.2)
        np.testing.assert_array_equal(other.mu_squared, account.mu_squared)
        self.assertEqual(other.max_participations, 2)
        with self.assertRaisesRegex(ValueError, "state"):
            local.LocalAccount(3).set_state(account.get_state())

    @parameterized.parameters(
        ([4], 1.0, ValueError, "positions"),
        ([-1], 1.0, ValueError, "positions"),
        ([0.5], 1.0, TypeError, "positions"),
        ([0, 1], [1.0], ValueError, "mu_squared"),
        ([0], -1.0, ValueError, "mu_squared"),
        ([0], math.nan, ValueError, "mu_squared"),
    )
    def test_errors_charge_nothing(self, positions, mu_squared, error, name):
        account = local.LocalAccount(4)
        with self.assertRaisesRegex(error, name):
            account.add(np.array(positions), mu_squared)
        self.assertEqual(account.max_mu_squared, 0.0)
        self.assertEqual(account.max_participations, 0)

    def test_an_empty_cohort_is_legal(self):
        account = local.LocalAccount(4)
        account.add(np.array([]), 1.0)
        self.assertEqual(account.max_participations, 0)


class DrawsTest(absltest.TestCase):
    def test_the_client_that_may_spend_most_is_in_every_round(self):
        account = local.LocalAccount(4)
        account.add(np.array([0, 1]), 0.5)
        account.add(np.array([0]), 0.5)
        after = account.max_mu_squared_after_draws
        self.assertEqual(after(0, 0.5), 1.0)
        self.assertEqual(after(3, 0.5), 2.5)
        # Client 0 sits out; the others have two or three rounds left.
        self.assertEqual(after(1, 0.25, 2), 1.0)
        self.assertEqual(after(9, 0.75, 2), 1.5)
        self.assertEqual(after(9, np.inf, 2), np.inf)
        self.assertEqual(after(0, np.inf), 1.0)


if __name__ == "__main__":
    absltest.main()
