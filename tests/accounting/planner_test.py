"""Solving for the missing quantity."""

from __future__ import annotations

import dataclasses

from absl.testing import absltest, parameterized

from tfdp_fl import accounting
from tfdp_fl.accounting import planner

_PLAN = planner.Plan(
    num_clients=1000,
    clients_per_round=100,
    noise_multiplier=3.0,
    rounds=60,
    epsilon=9.0,
    delta=1e-5,
)


def _epsilon(plan, sampling, accountant="rdp"):
    return accounting.epsilon(
        plan.noise_multiplier,
        sampling,
        plan.num_clients,
        plan.clients_per_round,
        plan.rounds,
        plan.delta,
        accountant,
    )


class SolveTest(parameterized.TestCase):
    @parameterized.product(
        missing=planner.QUANTITIES,
        sampling=("poisson", "fixed_size", "shuffled"),
    )
    def test_the_solution_holds_and_one_step_further_does_not(self, missing, sampling):
        plan = dataclasses.replace(_PLAN, **{missing: None})
        solved = planner.solve(plan, sampling)
        # Everything else is as it was given.
        self.assertEqual(dataclasses.replace(solved, **{missing: None}), plan)
        slack = 1 + 1e-9
        self.assertLessEqual(_epsilon(solved, sampling), solved.epsilon * slack)
        step = {
            "num_clients": -1,
            "clients_per_round": 1,
            "rounds": 1,
            "noise_multiplier": -0.01,
        }.get(missing)
        if step is None:
            self.assertAlmostEqual(_epsilon(solved, sampling), solved.epsilon, places=6)
        elif getattr(solved, missing) + step <= 1000 or missing != (
            "clients_per_round"
        ):
            further = dataclasses.replace(
                solved, **{missing: getattr(solved, missing) + step}
            )
            self.assertGreater(_epsilon(further, sampling), 9.0)

    def test_by_pld_it_is_on_the_safe_side(self):
        plan = planner.Plan(
            num_clients=200,
            noise_multiplier=4.0,
            rounds=10,
            epsilon=1.0,
            delta=1e-4,
        )
        solved = planner.solve(plan, "poisson", "pld")
        self.assertLessEqual(_epsilon(solved, "poisson", "pld"), 1.0)
        by_rdp = planner.solve(plan, "poisson")
        self.assertGreaterEqual(solved.clients_per_round, by_rdp.clients_per_round)

    @parameterized.parameters(
        ({"rounds": None, "delta": None}, "exactly five"),
        ({}, "exactly five"),
        ({"delta": 2.0, "rounds": None}, "delta"),
        ({"clients_per_round": 2000, "rounds": None}, "clients_per_round"),
        ({"rounds": 0, "epsilon": None}, "rounds"),
        ({"epsilon": -1.0, "rounds": None}, "epsilon"),
        ({"noise_multiplier": 0.01, "rounds": None}, "not even one round"),
        (
            {"noise_multiplier": 0.01, "clients_per_round": None},
            "no clients_per_round",
        ),
    )
    def test_errors_name_the_quantity(self, changes, words):
        with self.assertRaisesRegex(ValueError, words):
            planner.solve(dataclasses.replace(_PLAN, **changes), "poisson")

    def test_no_population_is_large_enough(self):
        plan = dataclasses.replace(_PLAN, noise_multiplier=0.1, num_clients=None)
        with self.assertRaisesRegex(ValueError, "no num_clients"):
            planner.solve(plan, "shuffled")


class CurveTest(absltest.TestCase):
    def test_the_curve_ends_at_the_plan_and_rises(self):
        curve = list(planner.epsilon_curve(_PLAN, "poisson", points=20))
        self.assertEqual(curve[-1], (60, _epsilon(_PLAN, "poisson")))
        self.assertLen(curve, 20)
        epsilons = [epsilon for _, epsilon in curve]
        self.assertEqual(epsilons, sorted(epsilons))


class SchedulesTest(absltest.TestCase):
    def test_sigma_squared_over_m_is_fixed_and_the_figures_are_right(self):
        constant, *others = planner.suggest_schedules(_PLAN, "poisson")
        self.assertAlmostEqual(constant.epsilon, _epsilon(_PLAN, "poisson"))
        self.assertEqual(constant.rounds, 60)
        self.assertNotEmpty(others)
        for found in others:
            for m, z in zip(found.sizes, found.noise_multipliers, strict=True):
                self.assertAlmostEqual(z * z / m, 9 / 100)
            self.assertEqual(found.sizes[-1], 100)
            self.assertLess(found.sizes[0], 100)
            self.assertEqual(found.client_rounds, sum(found.sizes))
            self.assertAlmostEqual(
                found.epsilon,
                accounting.epsilon(
                    found.noise_multipliers,
                    "poisson",
                    1000,
                    found.sizes,
                    60,
                    1e-5,
                ),
            )
        # Geyer's claim, where sigma stays above 1: it buys rounds.
        half = others[0]
        self.assertLess(half.epsilon, constant.epsilon)
        self.assertGreater(half.rounds, 60)

        def extended(values):
            return lambda t: values[min(t, 59)]

        for rounds, fits in ((half.rounds, True), (half.rounds + 1, False)):
            epsilon = accounting.epsilon(
                extended(half.noise_multipliers),
                "poisson",
                1000,
                extended(half.sizes),
                rounds,
                1e-5,
            )
            self.assertEqual(epsilon <= constant.epsilon, fits)


if __name__ == "__main__":
    absltest.main()
