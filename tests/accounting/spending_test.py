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
        self.assertEqual(spending.epsilon_after(_charge(), 0.5, 1e-3), exact(1.5, 1e-3))
        # What a crash may have lost counts against everybody.
        spending.lost_mu_squared = 0.25
        self.assertEqual(spending.epsilon(1e-3), exact(1.25, 1e-3))
        self.assertAlmostEqual(
            spending.central_epsilon(1e-3),
            accounting.epsilon(2.0, "poisson", 10, 4, 2, 1e-3),
            places=12,
        )

    def _ledger(self, *lines):
        """Returns contents with lines of (run, noise, local spending)."""
        entries = [
            accounting.LedgerEntry(
                round_index=t,
                cohort_size=4,
                charge=_charge(z),
                local=local
                and {"mu_squared": local, "max_mu_squared": local * (t + 1)},
                time="",
                details={},
                run=run,
            )
            for t, (run, z, local) in enumerate(lines)
        ]
        return accounting.LedgerContents(
            header={},
            entries=tuple(entries),
            truncated=False,
            head="head",
        )

    def test_what_a_ledger_tells_of_is_counted_once(self):
        spending = spending_lib.Spending(spending_lib.CENTRAL, 10)
        for _ in range(2):
            spending.charge(_charge(), np.array([1]), 0.0)
        # A round of our own that is known, one that is not, two of others.
        contents = self._ledger(
            ("own", 2.0, None),
            ("own", 3.0, None),
            ("other", 2.0, None),
            ("third", 2.0, None),
        )
        for _ in range(2):
            spending.absorb(contents, "own", "a.jsonl")
            self.assertEqual(spending.rounds, 3)
            self.assertEqual(spending.rounds_of_others, 2)
            self.assertAlmostEqual(
                spending.epsilon(1e-3),
                accounting.epsilon(
                    [2.0, 2.0, 2.0, 2.0, 3.0], "poisson", 10, 4, 5, 1e-3
                ),
                places=12,
            )
        again = spending_lib.Spending.from_state(spending.state())
        self.assertEqual(again.epsilon(1e-3), spending.epsilon(1e-3))
        self.assertEqual(again.others, spending.others)

    def test_a_run_in_two_files_counts_twice(self):
        # It may have gone on from one checkpoint in two places.
        spending = spending_lib.Spending(spending_lib.CENTRAL, 10)
        contents = self._ledger(("other", 2.0, None))
        for source in ("a.jsonl", "copy of a.jsonl"):
            spending.absorb(contents, "own", source)
        self.assertEqual(spending.rounds_of_others, 2)

    def test_local_spending_of_others_counts_against_every_client(self):
        spending = spending_lib.Spending(spending_lib.LOCAL, 10)
        spending.charge(_charge(), np.array([1, 2]), 0.5)
        spending.absorb(
            self._ledger(("other", 2.0, 0.25), ("other", 2.0, 0.25)),
            "own",
            "a.jsonl",
        )
        self.assertEqual(spending.max_mu_squared, 0.5 + 0.5)
        with self.assertRaisesRegex(ValueError, "all have a local guarantee"):
            spending.absorb(self._ledger(("third", 2.0, None)), "own", "b.jsonl")
        self.assertEqual(spending.max_mu_squared, 0.5 + 0.5)

    def test_the_state_survives_a_checkpoint(self):
        spending = spending_lib.Spending(spending_lib.LOCAL, 10)
        spending.charge(_charge(), np.array([1, 2]), 0.5)
        spending.charge(_charge(3.0), np.array([2]), 0.25)
        spending.lost_mu_squared = 0.1
        state = spending.state()
        charges = json.loads(json.dumps(state["charges"]))
        again = spending_lib.Spending.from_state({**state, "charges": charges})
        self.assertEqual(again.epsilon(1e-3), spending.epsilon(1e-3))
        self.assertEqual(again.central_epsilon(1e-3), spending.central_epsilon(1e-3))
        self.assertEqual(again.rounds, 2)
        again.charge(_charge(), np.array([2]), math.inf)
        self.assertEqual(again.epsilon(1e-3), math.inf)
        self.assertLess(spending.epsilon(1e-3), math.inf)


class LocalAccountTest(parameterized.TestCase):
    def test_the_client_that_spent_most_counts(self):
        account = spending_lib.LocalAccount(5)
        self.assertEqual(account.epsilon(1e-5), 0.0)
        account.add(np.array([0, 3]), 0.25)
        account.add(np.array([3, 4]), np.array([0.5, 2.0]))
        account.add(np.array([3]), 0.75)
        np.testing.assert_array_equal(account.participations, [1, 0, 0, 3, 1])
        np.testing.assert_array_equal(account.mu_squared, [0.25, 0, 0, 1.5, 2])
        self.assertEqual(account.max_participations, 3)
        self.assertEqual(account.max_mu_squared, 2.0)
        exact = accounting.gaussian_epsilon(1 / math.sqrt(2), 1e-5)
        self.assertAlmostEqual(account.epsilon(1e-5), exact, places=12)

    def test_a_client_twice_in_a_cohort_is_charged_twice(self):
        account = spending_lib.LocalAccount(2)
        self.assertEqual(account.max_mu_squared_after(np.array([1, 1]), 1.0), 2.0)
        self.assertEqual(account.max_mu_squared, 0.0)
        account.add(np.array([1, 1]), 1.0)
        self.assertEqual(account.max_mu_squared, 2.0)

    def test_a_release_without_noise_has_no_guarantee(self):
        account = spending_lib.LocalAccount(2)
        account.add(np.array([0]), math.inf)
        self.assertEqual(account.epsilon(1e-5), math.inf)

    @parameterized.parameters(
        ([4], 1.0, ValueError, "positions"),
        ([-1], 1.0, ValueError, "positions"),
        ([0.5], 1.0, TypeError, "positions"),
        ([0, 1], [1.0], ValueError, "mu_squared"),
        ([0], -1.0, ValueError, "mu_squared"),
        ([0], math.nan, ValueError, "mu_squared"),
    )
    def test_errors_charge_nothing(self, positions, mu_squared, error, name):
        account = spending_lib.LocalAccount(4)
        with self.assertRaisesRegex(error, name):
            account.add(np.array(positions), mu_squared)
        self.assertEqual(account.max_mu_squared, 0.0)
        self.assertEqual(account.max_participations, 0)


class DrawsTest(absltest.TestCase):
    def test_the_client_that_may_spend_most_is_in_every_round(self):
        account = spending_lib.LocalAccount(4)
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
