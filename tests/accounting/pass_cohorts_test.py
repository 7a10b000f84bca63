"""Passes cut into cohorts."""

from __future__ import annotations

from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_fl.accounting import pass_cohorts


class PassCohortsTest(parameterized.TestCase):
    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(1, 30),
        st.lists(st.integers(1, 30), min_size=40, max_size=40),
    )
    def test_every_pass_covers_every_position_once(self, n, sizes):
        sizes = [min(n, size) for size in sizes]
        plan = pass_cohorts.PassCohorts(n, sizes)
        covered: dict[int, list[int]] = {}
        for t, size in enumerate(sizes):
            index, start, stop = plan.cohort(t)
            self.assertBetween(stop - start, 1, size)
            covered.setdefault(index, []).extend(range(start, stop))
        last = max(covered)
        for index, positions in covered.items():
            whole = list(range(n))
            self.assertEqual(
                positions, whole if index < last else whole[: len(positions)]
            )

    @parameterized.parameters((10, 5), (10, 3), (7, 7), (1, 1))
    def test_a_constant_is_its_equal_sequence(self, n, m):
        constant = pass_cohorts.PassCohorts(n, m)
        sequence = pass_cohorts.PassCohorts(n, [m] * 30)
        function = pass_cohorts.PassCohorts(n, lambda t: m)
        for t in (17, 0, 29):
            self.assertEqual(constant.cohort(t), sequence.cohort(t))
            self.assertEqual(constant.cohort(t), function.cohort(t))

    def test_sizes_are_checked(self):
        with self.assertRaisesRegex(ValueError, "clients_per_round"):
            pass_cohorts.PassCohorts(10, 11)
        with self.assertRaisesRegex(ValueError, "whole number"):
            pass_cohorts.PassCohorts(10, 2.5)
        with self.assertRaisesRegex(ValueError, "clients_per_round"):
            pass_cohorts.PassCohorts(10, lambda t: 10 + t).cohort(20)


if __name__ == "__main__":
    absltest.main()
