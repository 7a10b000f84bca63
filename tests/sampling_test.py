"""Who is drawn, how often, and whether anybody could have known."""

from __future__ import annotations

import json
import tracemalloc

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized
from scipy import stats

from tfdp_fl import accounting, sampling

# The cyclic ones have a class of tests of their own.
_SAMPLINGS = ("poisson", "fixed_size", "shuffled")
# Each statistical check rejects a right sampler with this probability.
_FALSE_ALARM = 1e-8


class StatisticsTest(parameterized.TestCase):
    """Unseeded samplers: every run tests other cohorts."""

    def _memberships(self, name, n, m, rounds):
        sampler = sampling.make_sampler(name, n, m)
        drawn = np.zeros((rounds, n), dtype=bool)
        for t in range(rounds):
            cohort = sampler.cohort(t)
            self.assertLen(np.unique(cohort), len(cohort))
            drawn[t, cohort] = True
        return drawn

    @parameterized.parameters(("poisson", 6), ("fixed_size", 6))
    def test_every_client_is_drawn_equally_often(self, name, m):
        n, rounds = 30, 6000
        drawn = self._memberships(name, n, m, rounds)
        q = m / n
        # Each count is Binomial(rounds, q). Under fixed size they sum to a
        # constant: one degree of freedom less, and n/(n-1) in the scale.
        fixed = name == "fixed_size"
        deviations = (drawn.sum(0) - rounds * q) ** 2
        chi = deviations.sum() / (rounds * q * (1 - q))
        if fixed:
            chi *= (n - 1) / n
        degrees = n - 1 if fixed else n
        self.assertGreater(stats.chi2.sf(chi, degrees), _FALSE_ALARM)

    def test_poisson_sizes_are_binomial(self):
        n, m, rounds = 40, 8, 6000
        sizes = self._memberships("poisson", n, m, rounds).sum(1)
        edges = np.arange(3, 14)
        bins = np.digitize(sizes, edges)
        cdf = stats.binom.cdf(edges - 1, n, m / n)
        expected = rounds * np.diff(np.concatenate([[0], cdf, [1]]))
        counts = np.bincount(bins, minlength=len(expected))
        chi = ((counts - expected) ** 2 / expected).sum()
        self.assertGreater(stats.chi2.sf(chi, len(expected) - 1), _FALSE_ALARM)

    @parameterized.parameters("poisson", "fixed_size")
    def test_rounds_are_independent(self, name):
        n, m, rounds = 30, 6, 6000
        drawn = self._memberships(name, n, m, rounds)
        overlap = (drawn[1:] & drawn[:-1]).sum(1)
        q = m / n
        if name == "poisson":
            variance = n * q**2 * (1 - q**2)
            # Neighbouring overlaps share a round.
            variance += 2 * n * q**3 * (1 - q)
        else:  # Hypergeometric; neighbouring ones are uncorrelated.
            variance = m * q * (1 - q) * (n - m) / (n - 1)
        score = (overlap.mean() - n * q**2) / np.sqrt(variance / len(overlap))
        self.assertGreater(2 * stats.norm.sf(abs(score)), _FALSE_ALARM)

    def test_poisson_clients_are_independent(self):
        n, m, rounds = 30, 6, 6000
        drawn = self._memberships("poisson", n, m, rounds)
        q = m / n
        pairs = sum((drawn[:, i] & drawn[:, (i + 1) % n]).sum() for i in range(n))
        variance = n * rounds * (q**2 * (1 - q**2) + 2 * q**3 * (1 - q))
        score = (pairs - n * rounds * q**2) / np.sqrt(variance)
        self.assertGreater(2 * stats.norm.sf(abs(score)), _FALSE_ALARM)

    def test_shuffled_places_are_uniform(self):
        # In which of the pass's cohorts each client is.
        n, m, passes = 12, 3, 3000
        sampler = sampling.make_sampler("shuffled", n, m)
        counts = np.zeros((n, n // m))
        for t in range(passes * (n // m)):
            counts[sampler.cohort(t), t % (n // m)] += 1
        np.testing.assert_array_equal(counts.sum(1), passes)
        expected = passes * m / n
        chi = ((counts - expected) ** 2 / expected).sum() * (n - 1) / n
        degrees = (n - 1) * (n // m - 1)
        self.assertGreater(stats.chi2.sf(chi, degrees), _FALSE_ALARM)


class SamplerTest(parameterized.TestCase):
    @parameterized.parameters(*_SAMPLINGS)
    def test_cohorts_are_sorted_positions(self, name):
        sampler = sampling.make_sampler(name, 50, 20, seed=3)
        self.assertEqual(sampler.sampling, name)
        for t in range(10):
            cohort = sampler.cohort(t)
            self.assertEqual(cohort.dtype, np.int64)
            self.assertTrue(np.all(np.diff(cohort) > 0))
            self.assertTrue(np.all((cohort >= 0) & (cohort < 50)))

    @parameterized.parameters(*_SAMPLINGS)
    def test_with_a_seed_a_round_s_cohort_is_its_own(self, name):
        one = sampling.make_sampler(name, 100, 20, seed=3)
        other = sampling.make_sampler(name, 100, 20, seed=3)
        forward = [one.cohort(t) for t in range(12)]
        for t in (11, 3, 7, 0):
            np.testing.assert_array_equal(other.cohort(t), forward[t])
        different = sampling.make_sampler(name, 100, 20, seed=4)
        self.assertFalse(
            all(np.array_equal(different.cohort(t), forward[t]) for t in range(12))
        )

    @parameterized.parameters(*_SAMPLINGS)
    def test_without_a_seed_nobody_can_tell(self, name):
        np.random.seed(0)
        one = sampling.make_sampler(name, 10_000, 50).cohort(0)
        np.random.seed(0)
        other = sampling.make_sampler(name, 10_000, 50).cohort(0)
        self.assertFalse(np.array_equal(one, other))

    def test_fixed_size_draws_exactly_m(self):
        sampler = sampling.make_sampler("fixed_size", 20, lambda t: 1 + t)
        for t in range(20):
            self.assertLen(sampler.cohort(t), 1 + t)
            self.assertEqual(sampler.expected_cohort_size(t), 1 + t)

    def test_shuffled_meets_everybody_once_per_pass(self):
        sampler = sampling.make_sampler("shuffled", 10, 4)
        for _ in range(3):
            cohorts = [sampler.cohort(t) for t in range(3)]
            self.assertEqual([len(cohort) for cohort in cohorts], [4, 4, 2])
            np.testing.assert_array_equal(
                np.sort(np.concatenate(cohorts)), np.arange(10)
            )
        self.assertEqual(sampler.expected_cohort_size(2), 2)
        first = np.concatenate([sampler.cohort(t) for t in range(3)])
        second = np.concatenate([sampler.cohort(t) for t in range(3, 6)])
        self.assertFalse(np.array_equal(first, second))

    def test_how_often_one_client_can_be_drawn(self):
        for name in ("poisson", "fixed_size"):
            sampler = sampling.make_sampler(name, 10, 4)
            self.assertEqual(sampler.max_participations(7, 3), 7)
        sampler = sampling.make_sampler("shuffled", 10, 4)
        self.assertEqual(sampler.max_participations(0), 0)
        self.assertEqual(sampler.max_participations(3), 1)
        self.assertEqual(sampler.max_participations(4), 2)
        # The last cohort of one pass and the first of the next.
        self.assertEqual(sampler.max_participations(2, 2), 2)

    def test_a_small_cohort_of_many_clients_needs_little_memory(self):
        for name in ("poisson", "fixed_size"):
            sampler = sampling.make_sampler(name, 1_000_000, 50)
            sampler.cohort(0)
            tracemalloc.start()
            sampler.cohort(1)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            self.assertLess(peak, 200_000)  # All positions are 8 MB.


class CyclicTest(parameterized.TestCase):
    def _released(self, sampler, rounds, abandoned=lambda t: False):
        """Returns the cohorts of released rounds; some are abandoned."""
        cohorts = []
        for t in range(rounds):
            cohort = sampler.cohort(t)
            if not abandoned(t):
                sampler.released(cohort)
                cohorts.append(cohort)
        return cohorts

    @parameterized.parameters("poisson", "fixed_size", "cyclic")
    def test_a_round_that_is_run_again_has_a_draw_of_its_own(self, kind):
        groups = 4 if kind == "cyclic" else None
        sampler = sampling.make_sampler(kind, 4000, 100, 7, groups)
        first = sampler.cohort(3)
        np.testing.assert_array_equal(sampler.cohort(3), first)
        sampler.attempt = (4,)
        again = sampler.cohort(3)
        np.testing.assert_array_equal(sampler.cohort(3), again)
        # Some 3 or 10 in common, with one seed for good; the same would be 100.
        self.assertLess(len(np.intersect1d(first, again)), 30)

    def test_groups_do_not_hang_on_the_first_draw(self):
        # A `SeedSequence` of [a, b] is one of [a, b, 0].
        sampler = sampling.make_sampler("cyclic", 40, 3, 7, 4)
        groups = sampler._group()
        of_round = sampler._generator(0).permutation(40)
        self.assertNotEqual(groups.tolist(), of_round[::4].tolist())

    def _check_gaps(self, cohorts, n, groups):
        for client in range(n):
            rounds = [t for t, each in enumerate(cohorts) if client in each]
            if len(rounds) > 1:
                self.assertGreaterEqual(np.diff(rounds).min(), groups)
            self.assertLessEqual(len(rounds), -(-len(cohorts) // groups))

    @parameterized.product(seed=[None, 3], n=[40, 43])
    def test_a_client_s_released_rounds_are_far_enough_apart(self, seed, n):
        sampler = sampling.make_sampler("cyclic", n, 7, seed, num_groups=5)
        cohorts = self._released(sampler, 60, lambda t: t % 7 in (2, 3, 5))
        self._check_gaps(cohorts, n, 5)
        # A state goes on where it was; another fit is just later rounds.
        later = sampling.make_sampler("cyclic", n, 7, seed, num_groups=5)
        later.restore(json.loads(json.dumps(sampler.state())))
        for t in range(60, 90):
            cohort = later.cohort(t)
            later.released(cohort)
            cohorts.append(cohort)
        self._check_gaps(cohorts, n, 5)

    def test_an_abandoned_round_s_group_has_its_turn_again(self):
        sampler = sampling.make_sampler("cyclic", 20, 5, num_groups=4)
        first = sampler.cohort(0)
        np.testing.assert_array_equal(sampler.cohort(1), first)
        sampler.released(first)
        self.assertEmpty(np.intersect1d(sampler.cohort(2), first))

    def test_how_often_one_client_can_be_drawn(self):
        sampler = sampling.make_sampler("cyclic", 20, 5, num_groups=4)
        found = [sampler.max_participations(rounds) for rounds in (0, 1, 4, 5, 9)]
        self.assertEqual(found, [0, 1, 1, 2, 3])

    def test_too_early_a_client_raises(self):
        sampler = sampling.make_sampler("cyclic", 20, 5, num_groups=4)
        state = sampler.state()
        state["released"] = 6
        state["last"] = [3] * 20
        sampler.restore(state)
        with self.assertRaisesRegex(RuntimeError, "less than 4"):
            sampler.cohort(6)
        state["last"] = [2] * 20
        sampler.restore(state)
        sampler.cohort(6)

    @parameterized.parameters(
        ((20, 6, None, 4), "clients_per_round must be at most the 5"),
        ((20, [5, 5], None, 4), "clients_per_round must be one number"),
        ((20, 2.5, None, 4), "clients_per_round"),
        ((20, 5, None, 0), "num_groups"),
    )
    def test_what_groups_cannot_do_is_refused(self, arguments, named):
        n, m, seed, groups = arguments
        with self.assertRaisesRegex(ValueError, named):
            sampling.make_sampler("cyclic", n, m, seed, num_groups=groups)

    def test_other_groups_states_are_refused(self):
        state = sampling.make_sampler("cyclic", 20, 5, num_groups=4).state()
        other = sampling.make_sampler("cyclic", 20, 5, num_groups=3)
        with self.assertRaisesRegex(ValueError, "num_groups"):
            other.restore(state)

    def test_nothing_is_claimed_for_the_draw(self):
        event = dp_accounting.GaussianDpEvent(2.0)
        sampler = sampling.make_sampler("cyclic", 1000, 5, num_groups=4)
        charge = sampler.charge(0, event)
        self.assertEqual(charge.sampling, "cyclic")
        self.assertFalse(charge.is_amplified)
        self.assertEqual(charge.dp_event(), event)
        self.assertEqual(charge.sensitivity, 1.0)


class ChargeTest(parameterized.TestCase):
    _EVENT = dp_accounting.GaussianDpEvent(1.0)

    @parameterized.parameters(*_SAMPLINGS)
    def test_a_run_s_charges_are_the_plan_s(self, name):
        def sizes(t):
            return 20 + 10 * (t % 3)

        sampler = sampling.make_sampler(name, 100, sizes)
        history = accounting.PrivacyAccountant()
        for t in range(9):
            history.add(sampler.charge(t, self._EVENT))
        self.assertAlmostEqual(
            history.epsilon(1e-5),
            accounting.epsilon(1.0, name, 100, sizes, 9, 1e-5),
            places=12,
        )

    def test_a_second_shuffled_sampler_s_pass_is_charged_again(self):
        history = accounting.PrivacyAccountant()
        for sampler in (
            sampling.make_sampler("shuffled", 100, 50, seed=1),
            sampling.make_sampler("shuffled", 100, 50, seed=1),
        ):
            history.add(sampler.charge(0, self._EVENT))
        self.assertAlmostEqual(
            history.epsilon(1e-5),
            accounting.epsilon(1.0, "shuffled", 100, 50, 4, 1e-5),
        )


class StateTest(parameterized.TestCase):
    @parameterized.product(name=_SAMPLINGS, seed=(None, 5))
    def test_the_state_is_json_and_resumes(self, name, seed):
        one = sampling.make_sampler(name, 40, 7, seed=seed)
        one.cohort(3)
        state = json.loads(json.dumps(one.state()))
        other = sampling.make_sampler(name, 40, 7, seed=seed)
        other.restore(state)
        if seed is not None or name == "shuffled":
            for t in (3, 4, 11):
                np.testing.assert_array_equal(other.cohort(t), one.cohort(t))
        event = dp_accounting.GaussianDpEvent(1.0)
        self.assertEqual(other.charge(3, event), one.charge(3, event))

    @parameterized.parameters(
        ("poisson", 40, None, "sampling"),
        ("shuffled", 41, None, "num_clients"),
        ("shuffled", 40, 5, "seed"),
    )
    def test_another_sampler_s_state_is_refused(self, name, n, seed, argument):
        state = sampling.make_sampler("shuffled", 40, 7).state()
        with self.assertRaisesRegex(ValueError, argument):
            sampling.make_sampler(name, n, 7, seed).restore(state)

    def test_the_partition_says_nothing_of_the_key(self):
        state = sampling.make_sampler("shuffled", 40, 7).state()
        self.assertNotIn(state["partition"], state["key"])
        self.assertLen(bytes.fromhex(state["key"]), 32)


class ErrorsTest(parameterized.TestCase):
    @parameterized.parameters(*_SAMPLINGS)
    def test_more_than_everybody(self, name):
        with self.assertRaisesRegex(ValueError, "clients_per_round.*100.*101"):
            sampling.make_sampler(name, 100, 101)
        with self.assertRaisesRegex(ValueError, "clients_per_round"):
            sampling.make_sampler(name, 100, [10, 101])
        late = sampling.make_sampler(name, 100, lambda t: 99 + t)
        late.cohort(0)
        with self.assertRaisesRegex(ValueError, "clients_per_round"):
            late.cohort(2)
        short = sampling.make_sampler(name, 100, [10, 10])
        with self.assertRaisesRegex(ValueError, "clients_per_round"):
            short.cohort(2)

    @parameterized.parameters(
        (("bernoulli", 10, 5), "sampling"),
        (("poisson", 0, 5), "num_clients"),
        (("poisson", 10, 0), "clients_per_round"),
        (("fixed_size", 10, 2.5), "clients_per_round"),
        (("shuffled", 10, 2.5), "clients_per_round"),
        (("poisson", 10, 5, -1), "seed"),
        (("poisson", 10, 5, 1.5), "seed"),
    )
    def test_errors_name_the_argument(self, arguments, name):
        with self.assertRaisesRegex((ValueError, TypeError), name):
            sampling.make_sampler(*arguments)


class FixedScheduleTest(absltest.TestCase):
    def test_a_cohort_is_charged_for_the_size_it_was_drawn_with(self):
        for name in ("poisson", "fixed_size", "shuffled"):
            draws = iter(range(10**6))
            sampler = sampling.make_sampler(
                name, 100, lambda t, draws=draws: 3 + next(draws) % 13
            )
            event = dp_accounting.GaussianDpEvent(1.0)
            for t in range(20):
                before = sampler.expected_cohort_size(t)
                cohort = sampler.cohort(t)
                charged = sampler.charge(t, event).clients_per_round
                self.assertEqual(charged, before)
                if name != "poisson":
                    self.assertLen(cohort, charged)

    def test_only_shuffled_cohorts_come_in_passes(self):
        sampler = sampling.make_sampler("shuffled", 10, 4)
        self.assertEqual(
            [sampler.begins_pass(t) for t in range(4)],
            [True, False, False, True],
        )
        self.assertTrue(sampling.make_sampler("poisson", 10, 4).begins_pass(1))
