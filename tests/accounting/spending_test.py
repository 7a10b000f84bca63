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


if __name__ == "__main__":
    absltest.main()
