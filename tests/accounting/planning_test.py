"""What is asked before a run, and the passes over shuffled clients."""

from __future__ import annotations

import math

import dp_accounting
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_fl import accounting
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import planning

_SAMPLINGS = charge_lib.SAMPLINGS


class EpsilonTest(parameterized.TestCase):
    @parameterized.product(
        sampling=["poisson", "fixed_size", "shuffled"],
        accountant=["rdp", "pld"],
    )
    def test_noise_out_of_reach_is_taken_for_less(self, sampling, accountant):
        # It was an OverflowError, a NaN, or, shuffled, an epsilon of 0.
        def of(z):
            return planning.epsilon(z, sampling, 100, 10, 3, 1e-3, accountant)

        for z in (1e-200, 1e-160, 1e-9):
            self.assertEqual(of(z), math.inf)
        for z in (1e8, 1e160, 1e300):
            self.assertBetween(of(z), 0.0, 1e-3)

    @parameterized.product(sampling=_SAMPLINGS, accountant=charge_lib.ACCOUNTANTS)
    def test_equal_rounds_are_the_constant(self, sampling, accountant):
        constant = accounting.epsilon(4.0, sampling, 100, 20, 12, 1e-5, accountant)
        for noise, sizes in (
            ([4.0] * 12, 20),
            (lambda t: 4.0, lambda t: 20),
            (4.0, tuple([20] * 12)),
        ):
            self.assertEqual(
                accounting.epsilon(noise, sampling, 100, sizes, 12, 1e-5, accountant),
                constant,
            )

    @parameterized.parameters(*_SAMPLINGS)
    def test_delta_and_epsilon_agree(self, sampling):
        for accountant in charge_lib.ACCOUNTANTS:
            epsilon = accounting.epsilon(2.0, sampling, 100, 20, 10, 1e-4, accountant)
            delta = accounting.delta(2.0, sampling, 100, 20, 10, epsilon, accountant)
            self.assertAlmostEqual(delta, 1e-4, delta=1e-6)

    def test_rounds_that_differ_are_composed(self):
        mixed = accounting.epsilon([1.0, 3.0], "poisson", 100, [10, 40], 2, 1e-5)
        for z, m in ((1.0, 10), (3.0, 40)):
            self.assertGreater(mixed, accounting.epsilon(z, "poisson", 100, m, 1, 1e-5))
        swapped = accounting.epsilon([3.0, 1.0], "poisson", 100, [40, 10], 2, 1e-5)
        self.assertAlmostEqual(mixed, swapped, places=12)

    @parameterized.parameters(
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"sampling": "none"}, "sampling"),
        ({"num_clients": 0}, "num_clients"),
        ({"clients_per_round": 101}, "clients_per_round"),
        ({"clients_per_round": [10, 10]}, "clients_per_round"),
        ({"noise_multiplier": [1.0]}, "noise_multiplier"),
        ({"rounds": -1}, "rounds"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"accountant": "moments"}, "accountant"),
    )
    def test_errors_name_the_argument(self, wrong, name):
        arguments = {
            "noise_multiplier": 1.0,
            "sampling": "poisson",
            "num_clients": 100,
            "clients_per_round": 10,
            "rounds": 5,
            "delta": 1e-5,
        }
        with self.assertRaisesRegex((ValueError, TypeError), name):
            accounting.epsilon(**{**arguments, **wrong})


class CalibrateTest(parameterized.TestCase):
    @settings(max_examples=8, deadline=None)
    @given(
        st.sampled_from(_SAMPLINGS),
        st.floats(0.05, 100),
        st.integers(1, 200),
        st.integers(1, 500),
    )
    def test_it_inverts_epsilon_and_rounds_up(self, sampling, target, m, rounds):
        arguments = (sampling, 200, m, rounds)
        z = accounting.calibrate_noise_multiplier(target, *arguments, 1e-5)
        found = accounting.epsilon(z, *arguments, 1e-5)
        self.assertLessEqual(found, target)
        self.assertGreaterEqual(found, target * 0.999)
        self.assertGreater(accounting.epsilon(z * 0.999, *arguments, 1e-5), target)

    @parameterized.parameters("poisson", "shuffled")
    def test_by_pld(self, sampling):
        arguments = (sampling, 200, 10, 20)
        z = accounting.calibrate_noise_multiplier(0.8, *arguments, 1e-4, "pld")
        found = accounting.epsilon(z, *arguments, 1e-4, "pld")
        self.assertLessEqual(found, 0.8)
        self.assertGreaterEqual(found, 0.8 * 0.999)
        self.assertLess(z, accounting.calibrate_noise_multiplier(0.8, *arguments, 1e-4))

    def test_delta_has_two_names_and_one_value(self):
        with self.assertRaisesRegex(ValueError, "target_delta"):
            accounting.calibrate_noise_multiplier(1.0, "poisson", 100, 10, 5)
        with self.assertRaisesRegex(ValueError, "target_delta"):
            accounting.calibrate_noise_multiplier(
                1.0, "poisson", 100, 10, 5, 1e-5, target_delta=1e-5
            )

    def test_any_charges(self):
        # Two releases a round, as adaptive clipping has.
        def make(z):
            yield (
                charge_lib.RoundCharge(
                    sampling="poisson",
                    num_clients=100,
                    clients_per_round=10,
                    event=dp_accounting.ComposedDpEvent(
                        [dp_accounting.GaussianDpEvent(z)] * 2
                    ),
                ),
                10,
            )

        z = accounting.calibrate(make, 2.0, 1e-5)
        one = accounting.calibrate_noise_multiplier(2.0, "poisson", 100, 10, 10, 1e-5)
        self.assertAlmostEqual(z / math.sqrt(2) / one, 1, delta=2e-3)
        with self.assertRaisesRegex(ValueError, "up to 1 "):
            accounting.calibrate(make, 0.01, 1e-5, upper=1.0)
        self.assertAlmostEqual(
            accounting.calibrate(make, 2.0, 1e-5, upper=z * 1.01) / z,
            1,
            delta=1e-3,
        )

    def test_a_target_that_no_noise_reaches(self):
        def make(z):
            del z
            yield charge_lib.RoundCharge(
                sampling="poisson",
                num_clients=100,
                clients_per_round=10,
                event=dp_accounting.GaussianDpEvent(0.0),
            )

        with self.assertRaisesRegex(ValueError, "target_epsilon=2 "):
            accounting.calibrate(make, 2.0, 1e-5)


class MaxRoundsTest(parameterized.TestCase):
    # A PLD of every prefix of a schedule is slow, and the same code.
    @parameterized.parameters(
        ("poisson", "rdp", False),
        ("poisson", "rdp", True),
        ("poisson", "pld", False),
        ("fixed_size", "rdp", False),
        ("shuffled", "rdp", True),
        ("shuffled", "pld", False),
    )
    def test_one_round_more_overspends(self, sampling, accountant, scheduled):
        z = (lambda t: 2.0 + 0.01 * t) if scheduled else 2.0
        m = (lambda t: 20 + t % 2) if scheduled else 20
        found = accounting.max_rounds(z, sampling, 100, m, 5.0, 1e-5, accountant)
        self.assertGreater(found, 0)

        def epsilon(rounds):
            return accounting.epsilon(z, sampling, 100, m, rounds, 1e-5, accountant)

        self.assertLessEqual(epsilon(found), 5.0)
        self.assertGreater(epsilon(found + 1), 5.0)

    def test_a_sequence_is_not_continued(self):
        self.assertEqual(
            accounting.max_rounds([5.0] * 7, "poisson", 100, 5, 50.0, 1e-5), 7
        )

    @settings(max_examples=100, deadline=None)
    @given(st.integers(0, 3000), st.integers(1, 4000), st.integers(1, 5000))
    def test_the_search_finds_the_last_true(self, answer, limit, guess):
        def predicate(n):
            self.assertBetween(n, 1, limit)
            return n <= answer

        self.assertEqual(
            planning.last_true(predicate, limit, guess), min(answer, limit)
        )


class PassCohortsTest(parameterized.TestCase):
    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(1, 30),
        st.lists(st.integers(1, 30), min_size=40, max_size=40),
    )
    def test_every_pass_covers_every_position_once(self, n, sizes):
        sizes = [min(n, size) for size in sizes]
        plan = charge_lib.PassCohorts(n, sizes)
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

    def test_sizes_are_checked(self):
        with self.assertRaisesRegex(ValueError, "clients_per_round"):
            charge_lib.PassCohorts(10, 11)
        with self.assertRaisesRegex(ValueError, "whole number"):
            charge_lib.PassCohorts(10, 2.5)
        with self.assertRaisesRegex(ValueError, "clients_per_round"):
            charge_lib.PassCohorts(10, lambda t: 10 + t).cohort(20)


if __name__ == "__main__":
    absltest.main()
