"""What is asked before a run, and the passes over shuffled clients."""

import math

import dp_accounting
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accounting.charges import charge
from tfdp_fl import accounting
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import planning

_SAMPLINGS = charge_lib.SAMPLINGS


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffled"])
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_noise_out_of_reach_is_taken_for_less(sampling, accountant):
    # It was an OverflowError, a NaN, or, shuffled, an epsilon of 0.
    for z in (0.0, 1e-200, 1e-160, 1e-9, 1e8, 1e160, 1e300):
        found = accounting.epsilon(z, sampling, 100, 10, 3, 1e-3, accountant)
        assert (0.0 <= found <= 1e-3) if z > 1 else (found == math.inf)


@pytest.mark.usefixtures("wide_cells")
@pytest.mark.parametrize("sampling", _SAMPLINGS)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_equal_rounds_are_the_constant(sampling, accountant):
    constant = accounting.epsilon(4.0, sampling, 100, 20, 12, 1e-5, accountant)
    schedules = (lambda t: 4.0, lambda t: 20)
    for noise, sizes in (([4.0] * 12, 20), schedules, (4.0, tuple([20] * 12))):
        found = accounting.epsilon(noise, sampling, 100, sizes, 12, 1e-5, accountant)
        assert found == constant
    delta = accounting.delta(4.0, sampling, 100, 20, 12, constant, accountant)
    assert delta == pytest.approx(1e-5, abs=1e-7)


def test_errors_name_the_argument():
    wrong = {"noise_multiplier": (-1.0, [1.0]), "sampling": ("none",), "rounds": (-1,)}
    wrong |= {"num_clients": (0,), "clients_per_round": (101, [10, 10])}
    wrong |= {"delta": (0.0, 1.0), "accountant": ("moments",)}
    usual = {"noise_multiplier": 1.0, "sampling": "poisson", "num_clients": 100}
    usual |= {"clients_per_round": 10, "rounds": 5, "delta": 1e-5}
    for name, value in [(key, each) for key in wrong for each in wrong[key]]:
        with pytest.raises((ValueError, TypeError), match=name):
            accounting.epsilon(**{**usual, name: value})
    for sampling in (
        "none",
        "min_separation",
    ):  # Also where there is nothing to charge.
        with pytest.raises(ValueError, match="sampling must be one of"):
            accounting.epsilon(**{**usual, "sampling": sampling, "rounds": 0})


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(_SAMPLINGS),
    st.floats(0.05, 100),
    st.integers(1, 200),
    st.integers(1, 500),
)
def test_calibration_inverts_epsilon_and_rounds_up(sampling, target, m, rounds):
    arguments = (sampling, 200, m, rounds)
    z = accounting.calibrate_noise_multiplier(target, *arguments, 1e-5)
    assert target * 0.999 <= accounting.epsilon(z, *arguments, 1e-5) <= target
    assert accounting.epsilon(z * 0.999, *arguments, 1e-5) > target


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_calibration_by_pld(sampling):
    arguments = (sampling, 200, 10, 20)
    z = accounting.calibrate_noise_multiplier(0.8, *arguments, 1e-4, "pld")
    found = accounting.epsilon(z, *arguments, 1e-4, "pld")
    assert 0.8 * 0.999 <= found <= 0.8
    assert z < accounting.calibrate_noise_multiplier(0.8, *arguments, 1e-4)
    for deltas in ({}, {"delta": 1e-4, "target_delta": 1e-4}):
        with pytest.raises(ValueError, match="target_delta"):
            accounting.calibrate_noise_multiplier(0.8, *arguments, **deltas)


def test_calibration_of_any_charges():
    # Two releases a round, as adaptive clipping has.
    def make(z):
        both = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(z)] * 2)
        yield charge(n=100, m=10, event=both), 10

    z = accounting.calibrate(make, 2.0, 1e-5)
    one = accounting.calibrate_noise_multiplier(2.0, "poisson", 100, 10, 10, 1e-5)
    assert z / math.sqrt(2) / one == pytest.approx(1, abs=2e-3)
    with pytest.raises(ValueError, match="up to 1 "):
        accounting.calibrate(make, 0.01, 1e-5, upper=1.0)
    # A large target is reached, by one round or by two passes.
    for rounds in (10, 20):
        settings = "shuffled", 100, 10, rounds, 1e-5, "pld"
        little = accounting.calibrate_noise_multiplier(1e6, *settings)
        assert accounting.epsilon(little, *settings) == pytest.approx(1e6, rel=2e-3)
    limited = accounting.calibrate(make, 2.0, 1e-5, upper=z * 1.01)
    assert limited / z == pytest.approx(1, abs=1e-3)
    with pytest.raises(ValueError, match="target_epsilon=2 "):
        accounting.calibrate(lambda z: [charge(z=0.0)], 2.0, 1e-5)


@pytest.mark.usefixtures("wide_cells")
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffled"])
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_one_round_more_overspends(sampling, accountant):
    constant, scheduled = (2.0, 20), (lambda t: 2.0 + 0.01 * t, lambda t: 20 + t % 2)
    for z, m in (constant, scheduled) if accountant == "rdp" else (constant,):
        found = accounting.max_rounds(z, sampling, 100, m, 5.0, 1e-5, accountant)
        assert found > 0
        within, over = (
            accounting.epsilon(z, sampling, 100, m, rounds, 1e-5, accountant)
            for rounds in (found, found + 1)
        )
        assert within <= 5.0 < over


def test_the_ends_of_max_rounds():
    assert accounting.max_rounds(0.5, "poisson", 10, 10, 0.1, 1e-5) == 0
    assert accounting.max_rounds(0.0, "shuffled", 10, 5, 100.0, 1e-5) == 0
    # A sequence is not continued.
    assert accounting.max_rounds([5.0] * 7, "poisson", 100, 5, 50.0, 1e-5) == 7


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=40, max_size=40))
def test_every_pass_covers_every_position_once(n, sizes):
    sizes = [min(n, size) for size in sizes]
    plan = charge_lib.PassCohorts(n, sizes)
    covered: dict[int, list[int]] = {}
    for t, size in enumerate(sizes):
        index, start, stop = plan.cohort(t)
        assert 1 <= stop - start <= size
        covered.setdefault(index, []).extend(range(start, stop))
    for index, positions in covered.items():
        whole = list(range(n))
        last = index == max(covered)
        assert positions == (whole[: len(positions)] if last else whole)


def test_a_long_calibration_says_how_far_it_is(monkeypatch, capsys):
    arguments = (8.0, "poisson", 1000, 100, 20, 1e-5)
    monkeypatch.setattr(planning, "_SILENT_SECONDS", math.inf)
    noise = accounting.calibrate_noise_multiplier(*arguments)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(planning, "_SILENT_SECONDS", -1)
    assert accounting.calibrate_noise_multiplier(*arguments) == noise
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("Calibrating: noise multiplier 0.")


@pytest.mark.parametrize("target", [1e-10, 4.9e-233, 5e-324])
def test_calibration_by_pld_for_an_epsilon_of_almost_zero(target):
    setup = {"sampling": "poisson", "num_clients": 1000, "clients_per_round": 50}
    z = accounting.calibrate_noise_multiplier(
        target, rounds=20, target_delta=1e-3, accountant="pld", **setup
    )
    assert 61 < z < 95
