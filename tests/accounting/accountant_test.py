"""Histories of rounds against dp_accounting and against first principles."""

import copy
import itertools
import json
import math
import pathlib
import sys
import threading
import unittest.mock

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from dp_accounting import rdp as dp_accounting_rdp
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.accounting.charges import charge as _charge
from tests.accounting.charges import history as _history
from tfdp_fl import accounting
from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import curves, gaussian, private_selection

_G = dp_accounting.GaussianDpEvent


# What was reported at the commit that it names, before dp-accounting's accountants.
_FROZEN = json.loads(pathlib.Path(__file__).with_name("frozen.json").read_text())


@pytest.mark.parametrize("run", _FROZEN["runs"])
def test_no_epsilon_is_smaller_or_much_larger_than_it_was(run):
    assert sum(len(each["spent"]) for each in _FROZEN["runs"]) == 210
    charges = list(map(accounting.RoundCharge.from_json, run.get("charges", ())))
    for counts, by, delta, was in run["spent"]:
        if "mu_squared" in run:
            epsilon = accounting.epsilon_of_mu_squared(run["mu_squared"], delta)
        else:
            pairs = zip(charges, counts, strict=True)
            epsilon = _history(*pairs).epsilon(delta, by)
        # PLD is dp-accounting's, as it was; another NumPy's or processor's FFT rounds
        # otherwise, by a part of the whole mass, which is more of a small delta.
        rounding = 1e-7 + 1e-15 / delta if by == "pld" else 1e-9
        assert epsilon >= was * (1 - rounding), (counts, by, delta)
        assert epsilon <= was * 1.02, (counts, by, delta)


# N, m, z, T, then epsilon at 1e-5, by RDP and PLD: poisson, fixed size, unsampled.
@pytest.mark.parametrize(
    "row",
    [
        (1000, 100, 1.0, 100, 7.8993, 7.0466, 83.9369, 36.7715, 96.1163, 91.8173),
        (1000, 50, 1.0, 200, 5.3676, 4.7659, 58.4004, 28.6440, 166.0355, 159.4415),
        (1000, 100, 2.0, 100, 2.5806, 2.3374, 14.0538, 10.5164, 35.0818, 33.1037),
    ],
)
def test_published_figures(row):
    n, m, z, rounds, *epsilons = row
    samplings = (("poisson", m), ("fixed_size", m), ("shuffled", n))
    for place, (sampling, size) in enumerate(samplings):
        by_rdp, by_pld = epsilons[2 * place : 2 * place + 2]
        history = _history((_charge(sampling, n, size, z), rounds))
        assert by_rdp * 0.997 <= history.epsilon(1e-5) <= by_rdp + 6e-5
        assert history.epsilon(1e-5, "pld") == pytest.approx(by_pld, abs=6e-5)


@settings(max_examples=4, deadline=None)
@given(
    st.integers(2, 10_000),
    st.floats(0.001, 0.8),
    st.floats(0.5, 6),
    st.integers(1, 2000),
    st.floats(math.log(1e-9), math.log(0.05)),
)
def test_poisson_by_rdp(n, share, z, rounds, log_delta):
    delta, m = math.exp(log_delta), n * share
    direct = dp_accounting_rdp.RdpAccountant()
    direct.compose(dp_accounting.PoissonSampledDpEvent(m / n, _G(z)), rounds)
    expected = direct.get_epsilon(delta)
    assume(expected < 100)  # Far beyond, PLD's epsilon can be infinite.
    history = _history((_charge(n=n, m=m, z=z), rounds))
    found = history.epsilon(delta)
    assert found <= expected * (1 + 1e-9) + 1e-12
    # Its cells count beside an epsilon next to nothing.
    assert found >= history.epsilon(delta, "pld", True) * 0.999 - 1e-5


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(charge_lib.SAMPLINGS),
    st.integers(1, 900),
    st.floats(0.3, 300),
    st.integers(1, 10**5),
    st.floats(math.log(1e-60), math.log(0.3)),
)
def test_the_delta_of_an_epsilon_is_what_it_was_computed_of(s, m, z, rounds, log_delta):
    history, delta = _history((_charge(s, m=m, z=z), rounds)), math.exp(log_delta)
    epsilon = history.epsilon(delta)
    found = history.delta(epsilon)
    assert found <= delta
    assert epsilon < 1e-9 or found >= delta * (1 - 1e-5)


def test_a_delta_far_out_is_found_at_a_high_order():
    history = _history((_charge(m=1, z=20.0), 100))
    direct = dp_accounting_rdp.RdpAccountant()
    direct.compose(dp_accounting.PoissonSampledDpEvent(0.001, _G(20.0)), 100)
    assert 0 < history.delta(0.1) <= direct.get_delta(0.1) < 1e-40


def test_a_round_computes_one_curve_whatever_came_before():
    history, curve = _history(), curves.rdp_curve
    for k in range(40):
        history.add(_charge(z=1 + k / 100))
        history.epsilon(1e-5)
        with unittest.mock.patch.object(curves, "rdp_curve", wraps=curve) as computed:
            history.with_charges(_charge(z=5.0)).epsilon(1e-5)
        assert computed.call_count <= len(curves.PARTS)
    # Of so many kinds PLD would take minutes.
    assert history.epsilon(1e-5, "pld") == history.epsilon(1e-5)


def test_mixed_rounds_by_pld():
    direct = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    direct.compose(dp_accounting.PoissonSampledDpEvent(0.05, _G(2.0)), 7)
    direct.compose(_G(4.0), 2)
    first, last = _charge(m=50, z=2.0), _charge("shuffled", m=10, z=4.0)
    history = _history((first, 3), (last, 2), (first, 4))
    expected = direct.get_epsilon(1e-6)
    assert history.epsilon(1e-6, "pld") == pytest.approx(expected, abs=1e-6)
    assert history.delta(1.0, "pld") == pytest.approx(direct.get_delta(1.0), abs=1e-9)


@pytest.mark.parametrize("accountant", charge_lib.ACCOUNTANTS)
def test_nothing_done_costs_nothing_and_no_noise_everything(accountant):
    history = _history()
    assert history.epsilon(1e-5, accountant) == history.delta(0.0, accountant) == 0.0
    history.add(_charge(event=dp_accounting.NoOpDpEvent()))
    assert (history.epsilon(1e-5, accountant), history.rounds) == (0.0, 1)
    for sampling in charge_lib.SAMPLINGS:
        history = _history((_charge(sampling), 3), _charge(sampling, z=0.0))
        assert history.epsilon(1e-5, accountant) == math.inf
        assert history.delta(10.0, accountant) == 1.0


@pytest.mark.parametrize("sampling", charge_lib.SAMPLINGS)
def test_incremental_is_the_whole(sampling):
    rounds = [_charge(sampling, z=1 + 0.1 * (t % 3)) for t in range(30)]
    step_by_step = _history()

    for charge in rounds:
        # What would be leaves the history alone.
        before = step_by_step.epsilon(1e-5), step_by_step.charges
        predicted = step_by_step.with_charges(charge).epsilon(1e-5)
        assert (step_by_step.epsilon(1e-5), step_by_step.charges) == before
        step_by_step.add(charge)
        spent = step_by_step.epsilon(1e-5)
        assert spent == predicted
    at_once = _history(*((charge, 10) for charge in rounds[:3]))
    assert spent == pytest.approx(at_once.epsilon(1e-5), abs=1e-12)
    for history in step_by_step, at_once:
        assert history.rounds == 30
        assert [count for _, count in history.charges] == [10] * 3
        assert history.charges[1][0] == rounds[1]


@pytest.mark.parametrize("k", [1, 2, 7])
def test_k_passes_are_one_gaussian_of_z_over_root_k(k):
    z, history = 1.3, _history()
    for p, c in itertools.product(range(k), range(10)):
        history.add(
            _charge("shuffled", z=z, pass_index=p, pass_offset=100 * c, partition="a")
        )
    one = _history(_charge("shuffled", z=z / math.sqrt(k)))
    exact = gaussian.gaussian_epsilon(z / math.sqrt(k), 1e-5)
    assert history.epsilon(1e-5) == pytest.approx(one.epsilon(1e-5), abs=1e-9)
    assert history.epsilon(1e-5, "pld") == pytest.approx(exact, abs=1e-9)


_N = 12
_COHORT = st.tuples(
    st.integers(0, _N - 1), st.integers(1, _N), st.sampled_from([0.25, 1.0, 4.0])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_COHORT, max_size=10))
def test_a_pass_costs_what_its_most_exposed_client_met(cohorts):
    history, spent = accountant_lib.PrivacyAccountant(), np.zeros(_N)
    for start, size, weight in cohorts:
        size = min(size, _N - start)
        spent[start : start + size] += weight
        place = {"pass_index": 0, "pass_offset": start, "partition": "a"}
        history.add(_charge("shuffled", _N, size, weight**-0.5, **place))
        extended = copy.copy(history), history.with_charges()
        expected = gaussian.epsilon_of_mu_squared(spent.max(), 1e-3)
        for again in (*extended, history):
            assert again.epsilon(1e-3, "pld") == pytest.approx(expected)
        for again in extended:
            again.add(_charge("shuffled", _N, _N, **{**place, "pass_offset": 0}))
    # Of passes everybody knows who took part.
    known = history.epsilon_if_participation_is_known(1e-3)
    assert known == history.epsilon(1e-3, "pld")


def test_other_events():
    laplace = dp_accounting.LaplaceDpEvent(2.0)
    history = _history((_charge("shuffled", event=laplace), 4))
    for accountant in charge_lib.ACCOUNTANTS:
        # Four releases of pure epsilon 1/2.
        assert 1.9 <= history.epsilon(1e-9, accountant) <= 2.01
    places = [
        {"pass_index": 0, "pass_offset": 100 * c, "partition": "a"} for c in range(4)
    ]
    one_pass = _history(*(_charge("shuffled", event=laplace, **p) for p in places))
    assert 0.49 <= one_pass.epsilon(1e-9, "pld") <= 0.5001
    # Where RDP has no bound, PLD's is given, whatever was known before.
    sampled, grows = _history((_charge(event=laplace), 4)), _history(_charge())
    assert sampled.epsilon(1e-5) == sampled.epsilon(1e-5, "pld") < 1.0
    before = grows.epsilon(1e-5, "pld")
    assert before < grows.epsilon(1e-5)
    grows.add(_charge(event=laplace))
    assert before < grows.epsilon(1e-5) == grows.epsilon(1e-5, "pld")
    assert grows.delta(1.0) == grows.delta(1.0, "pld")
    # Where none has one, the charge is refused, and nothing is added.
    search = private_selection.BestOfTrialsDpEvent(
        events=(dp_accounting.GaussianDpEvent(2.0),), mean=2.0, shape=1.0
    )
    for charge in (
        _charge(event=search),
        _charge("poisson", event=dp_accounting.RandomizedResponseDpEvent(0.5, 2)),
    ):
        with pytest.raises(ValueError, match="no accountant has a bound together"):
            grows.add(charge)
    assert grows.rounds == 2
    sampled_trial = dp_accounting.PoissonSampledDpEvent(0.1, laplace)
    unbounded = private_selection.BestOfTrialsDpEvent(
        events=(sampled_trial,), mean=2.0, shape=1.0
    )
    with pytest.raises(ValueError, match=r"no accountant has a bound\."):
        _history(_charge(event=unbounded))


def test_an_event_that_samples_itself_is_unsampled_where_it_is_known_who_was_there():
    event = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(1.0, [0, 1], [0.99, 0.01])
    history = _history(_charge("cyclic", event=event))
    assert history.epsilon_if_participation_is_known(1e-5, "pld") == math.inf


@pytest.mark.parametrize("n, m, z, t", [(10**5, 8175, 4.96739119, 780), (10, 1, 1, 62)])
def test_the_delta_of_plds_epsilon_is_not_above_its_own(n, m, z, t):
    for delta in (1.469255296161866e-08, 2.6357e-3):
        plan = {"sampling": "poisson", "num_clients": n, "clients_per_round": m}
        plan |= {"noise_multiplier": z, "rounds": t, "accountant": "pld"}
        epsilon = accounting.epsilon(**plan, delta=delta)
        assert accounting.delta(**plan, epsilon=epsilon) <= delta


def test_two_relations_are_refused_and_nothing_is_added():
    history = _history(_charge("poisson"))
    with pytest.raises(ValueError, match="REPLACE_ONE"):
        history.add(_charge("fixed_size"))
    assert (history.rounds, len(history.charges)) == (1, 1)
    history.add(_charge("shuffled"))
    assert history.rounds == 2


def test_a_huge_epsilon_gets_coarser_cells_and_stays_above():
    charge = _charge(n=100, m=10, z=1.5)
    fine = _history((charge, 40)).epsilon(1e-5, "pld")
    with unittest.mock.patch.object(curves, "_PLD_MAX_CELLS", 2_000):
        coarse = _history((charge, 40)).epsilon(1e-5, "pld")
    assert fine <= coarse <= 1.01 * fine


@pytest.mark.parametrize("sampling, moved", [("poisson", 1), ("fixed_size", 2)])
def test_every_round_that_a_client_could_have_been_in(sampling, moved):
    history = _history((_charge(sampling, z=2.0), 60), _charge(sampling, m=50))
    # An event's own sampling does not count.
    event = dp_accounting.PoissonSampledDpEvent(0.1, _G(1.5))
    sampled = _history((_charge("cyclic", m=10, event=event), 3))
    for each, mu_squared in ((history, moved**2 * 16), (sampled, 3 / 1.5**2)):
        expected = gaussian.epsilon_of_mu_squared(mu_squared, 1e-5)
        known = each.epsilon_if_participation_is_known(1e-5)
        assert known == pytest.approx(expected, abs=1e-9)
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 3.0)
    history = _history(_charge("cyclic", event=event))
    assert history.epsilon_if_participation_is_known(1e-5) == math.inf


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(charge_lib.SAMPLINGS),
    st.integers(1, 100),
    st.floats(0.05, 8),
    st.integers(1, 300),
    st.integers(1, 50),
    st.floats(1.0, 3.0),
)
# Where taking everybody costs less than what sampling was proven to.
@example("fixed_size", 34, 1.0, 202, 3, 1.0)
def test_more_rounds_more_clients_less_noise_never_cost_less(
    sampling, m, z, rounds, more, factor
):
    def epsilon(m, z, rounds):
        return _history((_charge(sampling, 100, m, z), rounds)).epsilon(1e-5)

    base = epsilon(m, z, rounds) * (1 - 1e-9) - 1e-12
    assert epsilon(m, z, rounds + more) >= base
    assert epsilon(min(100, m + more), z, rounds) >= base
    assert epsilon(m, z / factor, rounds) >= base


@pytest.mark.parametrize(
    "sampling, n, m, z, rounds",
    [("poisson", 10_000, 500, 0.94, 350), ("fixed_size", 500, 100, 4.0, 60)],
)
def test_a_coarse_bound_is_a_little_larger(sampling, n, m, z, rounds):
    history = _history((_charge(sampling, n, m, z), rounds))
    coarse = history.epsilon(1e-5, "pld", coarse=True)
    exact = history.epsilon(1e-5, "pld")
    assert exact <= coarse <= exact * 1.001


@pytest.mark.parametrize("size, wanted", [(4, "pld"), (20, "rdp"), (39, "rdp")])
def test_near_full_cohorts_of_a_fixed_size_are_left_to_rdp(size, wanted):
    # N = 40, m = 39, z = 4, three rounds: PLD says 8.01, RDP 4.01.
    one = _charge("fixed_size", 40, size, 4.0)
    assert accountant_lib.select_accountant([one]) == wanted


def test_who_asks_while_another_thread_adds_loses_nothing(monkeypatch):
    one, curve = accountant_lib.PrivacyAccountant(), accountant_lib._rdp_curve
    charges = [_charge(z=z) for z in (1.0, 0.5)]
    one.add(charges[0])
    asking, added = threading.Event(), threading.Event()

    def slow(charge, part):
        if part == curves.FIRST_PART:
            asking.set()
            added.wait(1.0)  # It never comes, as nobody adds meanwhile.
        return curve(charge, part)

    monkeypatch.setattr(accountant_lib, "_rdp_curve", slow)
    asks = threading.Thread(target=one.epsilon, args=(1e-5,))
    asks.start()
    assert asking.wait(60)
    monkeypatch.setattr(accountant_lib, "_rdp_curve", curve)
    one.add(charges[1])
    added.set()
    asks.join()
    assert one.epsilon(1e-5) == accountant_lib.PrivacyAccountant(charges).epsilon(1e-5)


@pytest.mark.parametrize("sampling", ["random_allocation", "shuffled", "poisson"])
def test_who_is_interrupted_while_adding_pays_when_adding_again(sampling):
    # A pass counted as paid and was never added: 1.6 printed, 4.8 true.
    fields = {"partition": "x"} if sampling != "poisson" else {}

    def cost(number):
        place = {"pass_index": number // 3 * 3, "pass_offset": number % 3}
        if sampling == "shuffled":
            place = {"pass_index": number // 3, "pass_offset": number % 3 * 10}
        place = {**fields, **place} if fields else {}
        return charge_lib.Participation(
            sampling=sampling, num_clients=30, clients_per_round=10, **place
        ).cost(_G(2.0))

    file, lines = accountant_lib.__file__, [0]

    def trace_until(line):
        def trace(frame, event, _):
            code = frame.f_code
            # (Not in the wrapper, where the lock would stay held.)
            is_own = code.co_filename == file and code.co_name != "wrapper"
            if is_own and event == "line":
                lines[0] += 1
                if lines[0] == line:
                    raise KeyboardInterrupt
            return trace

        return trace

    # (The third is in a pass that was begun, and costs more than its first round.)
    for number, repeats in ((0, 1), (2, 1), (3, 2)):
        whole = [*map(cost, range(number)), (cost(number), repeats)]
        whole = accounting.PrivacyAccountant(whole)
        expected = {by: whole.epsilon(1e-3, by) for by in charge_lib.ACCOUNTANTS}
        for line in itertools.count(1):
            interrupted = accounting.PrivacyAccountant(map(cost, range(number)))
            interrupted.epsilon(1e-3)  # Caches sums.
            lines[0] = 0
            sys.settrace(trace_until(line))
            try:
                interrupted.add(cost(number), repeats)
            except KeyboardInterrupt:
                pass
            else:
                break
            finally:
                sys.settrace(None)
            interrupted.add(cost(number), repeats)
            for by, least in expected.items():
                got = interrupted.epsilon(1e-3, by)
                assert got >= least * (1 - 1e-6), (line, by)
        assert line > 10


def test_a_delta_below_the_mass_at_infinity_gets_the_answer_of_rdp():
    history = _history((_charge("poisson"), 2))
    for delta in (1e-30, 1e-320):
        assert history.epsilon(delta, "pld") == history.epsilon(delta) < math.inf
