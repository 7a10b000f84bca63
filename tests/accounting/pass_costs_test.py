"""Parallel composition within a pass."""

from __future__ import annotations

import numpy as np
from absl.testing import absltest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_fl.accounting import pass_costs

_N = 12
_COHORT = st.tuples(
    st.integers(0, _N - 1),
    st.integers(1, _N),
    st.sampled_from([0.25, 1.0, 4.0]),
)


class PassCostsTest(absltest.TestCase):
    @settings(max_examples=200, deadline=None)
    @given(st.lists(_COHORT, max_size=10))
    def test_the_pass_costs_what_its_most_exposed_client_met(self, cohorts):
        costs, spent, total = pass_costs.PassCosts(), np.zeros(_N), 0.0
        for start, size, weight in cohorts:
            stop = min(_N, start + size)
            spent[start:stop] += weight
            total += costs.add("pass", start, stop, weight)
            self.assertEqual(total, spent.max())

    def test_passes_add_up_and_copies_are_independent(self):
        costs = pass_costs.PassCosts()
        self.assertEqual(costs.add("a", 0, 5, 1.0), 1.0)
        copy = costs.copy()
        self.assertEqual(costs.add("a", 5, 10, 1.0), 0.0)
        self.assertEqual(costs.add("a", 5, 10, 1.0), 1.0)
        self.assertEqual(copy.add("a", 5, 10, 3.0), 2.0)
        self.assertEqual(costs.add("b", 0, 5, 1.0), 1.0)


if __name__ == "__main__":
    absltest.main()
