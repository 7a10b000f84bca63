"""Histories of rounds against dp_accounting and against first principles."""

from __future__ import annotations

import math
import unittest.mock

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized
from dp_accounting import pld
from dp_accounting import rdp as dp_accounting_rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import gaussian

_G = dp_accounting.GaussianDpEvent


def _charge(sampling="poisson", n=1000, m=100, z=1.0, event=None, **place):
    return charge_lib.RoundCharge(
        sampling=sampling,
        num_clients=n,
        clients_per_round=m,
        event=_G(z) if event is None else event,
        **place,
    )


def _history(*charges):
    history = accountant_lib.PrivacyAccountant()
    for charge in charges:
        charge, count = charge if isinstance(charge, tuple) else (charge, 1)
        history.add(charge, count)
    return history


# N, m, z, T, then epsilon at 1e-5: poisson RDP, poisson PLD, fixed-size RDP,
# fixed-size PLD, unsampled RDP, unsampled PLD (with dp_accounting's default
# orders).
_TABLE = (
    (1000, 100, 1.0, 100, 7.8993, 7.0466, 83.9369, 36.7715, 96.1163, 91.8173),
    (1000, 50, 1.0, 200, 5.3676, 4.7659, 58.4004, 28.6440, 166.0355, 159.4415),
    (1000, 100, 2.0, 100, 2.5806, 2.3374, 14.0538, 10.5164, 35.0818, 33.1037),
)


class TableTest(parameterized.TestCase):
    @parameterized.parameters(*_TABLE)
    def test_published_figures(
        self, n, m, z, rounds, p_rdp, p_pld, f_rdp, f_pld, n_rdp, n_pld
    ):
        for sampling, size, by_rdp, by_pld in (
            ("poisson", m, p_rdp, p_pld),
            ("fixed_size", m, f_rdp, f_pld),
            ("shuffled", n, n_rdp, n_pld),
        ):
            charge = _charge(sampling, n, size, z)
            history = _history((charge, rounds))
            self.assertLessEqual(history.epsilon(1e-5), by_rdp + 6e-5)
            self.assertGreaterEqual(history.epsilon(1e-5), by_rdp * 0.997)
            self.assertAlmostEqual(history.epsilon(1e-5, "pld"), by_pld, delta=6e-5)


class AgainstDpAccountingTest(parameterized.TestCase):
    @settings(max_examples=4, deadline=None)
    @given(
        st.integers(2, 10_000),
        st.floats(0.001, 0.8),
        st.floats(0.5, 6),
        st.integers(1, 2000),
        st.floats(math.log(1e-9), math.log(0.05)),
    )
    def test_poisson_by_rdp(self, n, share, z, rounds, log_delta):
        delta, m = math.exp(log_delta), n * share
        direct = dp_accounting_rdp.RdpAccountant()
        direct.compose(dp_accounting.PoissonSampledDpEvent(m / n, _G(z)), rounds)
        expected = direct.get_epsilon(delta)
        found = _history((_charge(n=n, m=m, z=z), rounds)).epsilon(delta)
        self.assertLessEqual(found, expected * (1 + 1e-9) + 1e-12)
        by_pld = _history((_charge(n=n, m=m, z=z), rounds)).epsilon(delta, "pld", True)
        # Its cells count beside an epsilon next to nothing.
        self.assertGreaterEqual(found, by_pld * 0.999 - 1e-5)

    @settings(max_examples=3, deadline=None)
    @given(
        st.integers(50, 5000),
        st.floats(0.02, 0.8),
        st.floats(0.7, 5),
        st.integers(1, 500),
    )
    def test_fixed_size_by_rdp(self, n, share, z, rounds):
        m = max(1, int(n * share))
        direct = dp_accounting_rdp.RdpAccountant(
            range(2, 65), dp_accounting.NeighboringRelation.REPLACE_ONE
        )
        direct.compose(
            dp_accounting.SampledWithoutReplacementDpEvent(n, m, _G(z / 2)),
            rounds,
        )
        found = _history((_charge("fixed_size", n, m, z), rounds)).epsilon(1e-6)
        everybody = _history((_charge("fixed_size", n, n, z), rounds)).epsilon(1e-6)
        self.assertLessEqual(found, direct.get_epsilon(1e-6) * (1 + 1e-7))
        self.assertLessEqual(found, everybody * (1 + 1e-9))

    def test_mixed_rounds_by_pld(self):
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        direct = pld.PLDAccountant(relation)
        direct.compose(dp_accounting.PoissonSampledDpEvent(0.05, _G(2.0)), 7)
        direct.compose(dp_accounting.PoissonSampledDpEvent(0.1, _G(3.0)), 5)
        direct.compose(_G(4.0), 2)
        history = _history(
            (_charge(m=50, z=2.0), 3),
            (_charge("shuffled", m=10, z=4.0), 2),
            (_charge(m=100, z=3.0), 5),
            (_charge(m=50, z=2.0), 4),
        )
        self.assertAlmostEqual(
            history.epsilon(1e-6, "pld"), direct.get_epsilon(1e-6), places=6
        )
        self.assertAlmostEqual(
            history.delta(1.0, "pld"), direct.get_delta(1.0), places=9
        )


class BruteForceTest(parameterized.TestCase):
    """Fixed-size PLD against integrals of the hockey-stick divergence."""

    def _pair(self, q, z, shifts, x):
        """Densities of a round with the client, and with its replacement."""
        other, one, two = shifts
        stays = (1 - q) * stats.norm.pdf(x, other, z)
        return (
            stays + q * stats.norm.pdf(x, one, z),
            stays + q * stats.norm.pdf(x, two, z),
        )

    @parameterized.product(shape=((10, 3), (100, 5), (8, 8)), epsilon=(0.1, 1.5))
    def test_one_round(self, shape, epsilon):
        (n, m), z = shape, 1.2
        q = m / n
        x = np.linspace(-12 * z - 2, 12 * z + 2, 20_001)
        step = x[1] - x[0]
        found = _history(_charge("fixed_size", n, m, z)).delta(epsilon, "pld")
        worst = 0.0
        # Who takes the client's place, the client, its replacement: on the
        # line that is all that clipped updates can do.
        for other in (-1, 0, 1):
            for one in (-1, 0, 1):
                for two in (-1, 0, 1):
                    p, r = self._pair(q, z, (other, one, two), x)
                    excess = np.maximum(p - math.exp(epsilon) * r, 0)
                    worst = max(worst, excess.sum() * step)
        self.assertGreaterEqual(found, worst * (1 - 1e-6))
        # The event's own dominating pair: 0 against +2 and -2. With everybody
        # in the cohort, +1 against -1.
        shifts = (0, 2, -2) if m < n else (0, 1, -1)
        x = np.linspace(-12 * z - 4, 12 * z + 4, 100_001)
        p, r = self._pair(q, z, shifts, x)
        excess = np.maximum(p - math.exp(epsilon) * r, 0).sum()
        self.assertAlmostEqual(found, excess * (x[1] - x[0]), delta=1e-4 * found + 1e-7)

    def test_two_rounds(self):
        q, z, epsilon = 0.25, 1.5, 1.0
        found = _history((_charge("fixed_size", 8, 2, z), 2)).delta(epsilon, "pld")
        x = np.linspace(-9 * z - 3, 9 * z + 3, 801)
        p, r = self._pair(q, z, (0, 2, -2), x)
        excess = np.outer(p, p) - math.exp(epsilon) * np.outer(r, r)
        expected = np.maximum(excess, 0).sum() * (x[1] - x[0]) ** 2
        self.assertAlmostEqual(found, expected, delta=3e-4 * expected)
        p, r = self._pair(q, z, (0, 1, -1), x)
        excess = np.outer(p, p) - math.exp(epsilon) * np.outer(r, r)
        real = np.maximum(excess, 0).sum() * (x[1] - x[0]) ** 2
        self.assertGreaterEqual(found, real)

    def test_rdp_is_above_pld(self):
        for sampling in charge_lib.SAMPLINGS:
            history = _history((_charge(sampling, 50, 10, 3.0), 20))
            self.assertGreater(history.epsilon(1e-4), history.epsilon(1e-4, "pld"))


class PrivacyAccountantTest(parameterized.TestCase):
    @parameterized.parameters(*charge_lib.ACCOUNTANTS)
    def test_nothing_done_costs_nothing(self, accountant):
        history = _history()
        self.assertEqual(history.epsilon(1e-5, accountant), 0.0)
        self.assertEqual(history.delta(0.0, accountant), 0.0)
        history.add(_charge(event=dp_accounting.NoOpDpEvent()))
        self.assertEqual(history.epsilon(1e-5, accountant), 0.0)
        self.assertEqual(history.rounds, 1)

    @parameterized.product(
        sampling=charge_lib.SAMPLINGS, accountant=charge_lib.ACCOUNTANTS
    )
    def test_one_round_without_noise_ends_the_guarantee(self, sampling, accountant):
        history = _history((_charge(sampling), 3), _charge(sampling, z=0.0))
        self.assertEqual(history.epsilon(1e-5, accountant), math.inf)
        self.assertEqual(history.delta(10.0, accountant), 1.0)

    def test_incremental_is_the_whole(self):
        rounds = [_charge(z=1 + 0.1 * (t % 3)) for t in range(30)]
        step_by_step = _history()
        for charge in rounds:
            step_by_step.add(charge)
            step_by_step.epsilon(1e-5)
        at_once = _history(*((charge, 10) for charge in rounds[:3]))
        self.assertAlmostEqual(
            step_by_step.epsilon(1e-5), at_once.epsilon(1e-5), places=12
        )
        for history in step_by_step, at_once:
            self.assertEqual(history.rounds, 30)
            self.assertEqual([count for _, count in history.charges], [10] * 3)
            self.assertEqual(history.charges[1][0], rounds[1])

    @parameterized.parameters(*charge_lib.SAMPLINGS)
    def test_would_be_leaves_the_history_alone(self, sampling):
        place = {}
        if sampling == "shuffled":
            place = {"pass_index": 0, "pass_offset": 100}
        history = _history((_charge(sampling, **place), 3))
        before = history.epsilon(1e-5), history.charges, history.rounds
        next_round = _charge(sampling, z=0.9)
        would_be = history.would_be(next_round)
        predicted = history.epsilon_after(next_round, 1e-5)
        self.assertEqual(would_be.epsilon(1e-5), predicted)
        self.assertEqual(
            (history.epsilon(1e-5), history.charges, history.rounds), before
        )
        history.add(next_round)
        self.assertEqual(history.epsilon(1e-5), predicted)

    @parameterized.product(k=(1, 2, 7), accountant=charge_lib.ACCOUNTANTS)
    def test_k_passes_are_one_gaussian_of_z_over_root_k(self, k, accountant):
        z, cohorts = 1.3, 10
        history = _history(
            *(
                _charge("shuffled", z=z, pass_index=p, pass_offset=100 * c)
                for p in range(k)
                for c in range(cohorts)
            )
        )
        one = _history(_charge("shuffled", z=z / math.sqrt(k)))
        self.assertAlmostEqual(
            history.epsilon(1e-5, accountant),
            one.epsilon(1e-5, accountant),
            places=9,
        )
        if accountant == "pld":
            exact = gaussian.gaussian_epsilon(z / math.sqrt(k), 1e-5)
            self.assertAlmostEqual(history.epsilon(1e-5, "pld"), exact, places=9)

    def test_a_pass_costs_its_least_noise(self):
        history = _history(
            *(
                _charge("shuffled", z=z, pass_index=0, pass_offset=100 * place)
                for place, z in enumerate((2.0, 1.0, 3.0))
            )
        )
        expected = _history(_charge("shuffled", z=1.0)).epsilon(1e-5)
        self.assertEqual(history.epsilon(1e-5), expected)

    def test_a_cohort_run_again_is_charged_again(self):
        cohort = _charge("shuffled", pass_index=0, pass_offset=300, partition="a")
        history = _history(
            _charge("shuffled", pass_index=0, pass_offset=0, partition="a"),
            cohort,
            cohort,
        )
        twice = _history((_charge("shuffled"), 2)).epsilon(1e-5)
        self.assertEqual(history.epsilon(1e-5), twice)

    def test_two_orders_never_share_a_pass(self):
        history = _history(
            _charge("shuffled", pass_index=0, pass_offset=0, partition="a"),
            _charge("shuffled", pass_index=0, pass_offset=100, partition="b"),
        )
        twice = _history((_charge("shuffled"), 2)).epsilon(1e-5)
        self.assertEqual(history.epsilon(1e-5), twice)

    def test_other_events(self):
        laplace = dp_accounting.LaplaceDpEvent(2.0)
        history = _history((_charge("shuffled", event=laplace), 4))
        for accountant in charge_lib.ACCOUNTANTS:
            # Four releases of pure epsilon 1/2.
            self.assertBetween(history.epsilon(1e-9, accountant), 1.9, 2.01)
        one_pass = _history(
            *(
                _charge(
                    "shuffled",
                    event=laplace,
                    pass_index=0,
                    pass_offset=100 * c,
                )
                for c in range(4)
            )
        )
        self.assertBetween(one_pass.epsilon(1e-9, "pld"), 0.49, 0.5001)
        sampled = _history((_charge(event=laplace), 4))
        self.assertLess(sampled.epsilon(1e-5, "pld"), 1.0)
        with self.assertRaisesRegex(ValueError, "LaplaceDpEvent.*'pld'"):
            sampled.epsilon(1e-5)

    def test_two_relations_are_refused_and_nothing_is_added(self):
        history = _history(_charge("poisson"))
        with self.assertRaisesRegex(ValueError, "REPLACE_ONE"):
            history.add(_charge("fixed_size"))
        self.assertEqual(history.rounds, 1)
        self.assertLen(history.charges, 1)
        history.add(_charge("shuffled"))
        self.assertEqual(history.rounds, 2)

    def test_a_huge_epsilon_gets_coarser_cells_and_stays_above(self):
        charge = _charge(n=100, m=10, z=1.5)
        fine = _history((charge, 40)).epsilon(1e-5, "pld")
        with unittest.mock.patch.object(accountant_lib, "_PLD_MAX_CELLS", 2_000):
            coarse = _history((charge, 40)).epsilon(1e-5, "pld")
        self.assertBetween(coarse, fine, 1.01 * fine)


class KnownParticipationTest(parameterized.TestCase):
    """An observer who knows who took part meets no amplification."""

    @parameterized.parameters(("poisson", 1), ("fixed_size", 2))
    def test_every_round_that_a_client_could_have_been_in(self, sampling, moved):
        history = _history((_charge(sampling, z=2.0), 60), _charge(sampling, m=50))
        mu_squared = moved**2 * (60 / 4 + 1)
        self.assertAlmostEqual(
            history.epsilon_if_participation_is_known(1e-5),
            gaussian.epsilon_of_mu_squared(mu_squared, 1e-5),
            places=9,
        )

    def test_an_event_s_own_sampling_does_not_count(self):
        event = dp_accounting.PoissonSampledDpEvent(0.1, _G(1.5))
        history = _history((_charge("cyclic", m=10, event=event), 3))
        self.assertAlmostEqual(
            history.epsilon_if_participation_is_known(1e-5),
            gaussian.gaussian_epsilon(1.5 / 3**0.5, 1e-5),
            places=9,
        )
        event = dp_accounting.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 3.0)
        history = _history(_charge("cyclic", event=event))
        self.assertEqual(history.epsilon_if_participation_is_known(1e-5), math.inf)


class MonotoneTest(absltest.TestCase):
    @settings(max_examples=30, deadline=None)
    @given(
        st.sampled_from(charge_lib.SAMPLINGS),
        st.integers(1, 100),
        st.floats(0.05, 8),
        st.integers(1, 300),
        st.integers(1, 50),
        st.floats(1.0, 3.0),
    )
    def test_more_rounds_more_clients_less_noise_never_cost_less(
        self, sampling, m, z, rounds, more, factor
    ):
        def epsilon(m, z, rounds):
            return _history((_charge(sampling, 100, m, z), rounds)).epsilon(1e-5)

        base = epsilon(m, z, rounds) * (1 - 1e-9) - 1e-12
        self.assertGreaterEqual(epsilon(m, z, rounds + more), base)
        self.assertGreaterEqual(epsilon(min(100, m + more), z, rounds), base)
        self.assertGreaterEqual(epsilon(m, z / factor, rounds), base)


class CoarseTest(parameterized.TestCase):
    @parameterized.parameters(
        ("poisson", 10_000, 500, 0.94, 350),
        ("fixed_size", 500, 100, 4.0, 60),
    )
    def test_a_bound_a_little_larger(self, sampling, n, m, z, rounds):
        history = accountant_lib.PrivacyAccountant()
        history.add(
            charge_lib.RoundCharge(
                sampling=sampling,
                num_clients=n,
                clients_per_round=m,
                event=dp_accounting.GaussianDpEvent(z),
            ),
            rounds,
        )
        coarse = history.epsilon(1e-5, "pld", coarse=True)
        exact = history.epsilon(1e-5, "pld")
        self.assertBetween(coarse, exact, exact * 1.001)
        self.assertEqual(history.epsilon(1e-5, "pld", coarse=True), exact)


class TightestTest(absltest.TestCase):
    def test_near_full_cohorts_of_a_fixed_size_are_left_to_rdp(self):
        # N = 40, m = 39, z = 4, three rounds: PLD says 8.01, RDP 4.01.
        for size, wanted in ((4, "pld"), (20, "rdp"), (39, "rdp")):
            one = charge_lib.RoundCharge(
                sampling="fixed_size",
                num_clients=40,
                clients_per_round=size,
                event=dp_accounting.GaussianDpEvent(4.0),
            )
            self.assertEqual(accountant_lib.tightest([one]), wanted)


_N = 12
_COHORT = st.tuples(
    st.integers(0, _N - 1),
    st.integers(1, _N),
    st.sampled_from([0.25, 1.0, 4.0]),
)


class PassTest(absltest.TestCase):
    @settings(max_examples=100, deadline=None)
    @given(st.lists(_COHORT, max_size=10))
    def test_a_pass_costs_what_its_most_exposed_client_met(self, cohorts):
        history, spent = accountant_lib.PrivacyAccountant(), np.zeros(_N)
        for start, size, weight in cohorts:
            size = min(size, _N - start)
            spent[start : start + size] += weight
            history.add(
                _charge(
                    *("shuffled", _N, size, weight**-0.5),
                    pass_index=0,
                    pass_offset=start,
                )
            )
            copy = history.copy()
            for again in (copy, history):
                self.assertAlmostEqual(
                    again.epsilon(1e-3, "pld"),
                    gaussian.epsilon_of_mu_squared(spent.max(), 1e-3),
                )
            copy.add(_charge("shuffled", _N, _N, pass_index=0, pass_offset=0))


if __name__ == "__main__":
    absltest.main()
