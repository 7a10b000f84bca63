import pytest

import tfdp_fl
from tfdp_fl import accounting
from tfdp_fl.correlated_noise import Participation, Workload, compare
from tfdp_fl.correlated_noise.comparison import STRATEGIES


def test_every_row_keeps_the_target_and_the_best_comes_first():
    where = Participation(rounds=128, min_separation=32)
    found = compare(where, 32, target_epsilon=2.0, target_delta=1e-5)
    products = [each.max_error * each.sensitivity for each in found]
    assert products == sorted(products)
    for each in found:
        spent = accounting.gaussian_epsilon(
            each.noise_multiplier / each.sensitivity, 1e-5
        )
        assert spent == pytest.approx(2.0, rel=1e-6)
        assert each.worst_stddev == pytest.approx(
            each.noise_multiplier * each.max_error / 32
        )
    by_name = {each.name: each for each in found}
    assert found[0].name == "b bands"
    assert found[-1].name == "independent"
    assert by_name["tree"].copies == 9
    assert by_name["b bands"].copies == 31
    assert by_name["2 buffers"].max_error * by_name[
        "2 buffers"
    ].sensitivity == pytest.approx(6.38, abs=5e-3)


def test_momentum_makes_another_comparison():
    where = Participation(rounds=64, min_separation=8)
    plain = compare(where, 8, 2.0, 1e-5)
    other = compare(where, 8, 2.0, 1e-5, workload=Workload(momentum=0.9))
    assert {e.name for e in plain} == {e.name for e in other}
    assert [e.max_error for e in plain] != [e.max_error for e in other]


def test_counts_that_move_a_clip_are_paid_for():
    where = Participation(rounds=64, min_separation=8)
    plain = compare(where, 8, 2.0, 1e-5)
    other = compare(where, 8, 2.0, 1e-5, adaptive_clip=True)
    for one, two in zip(plain, other, strict=True):
        assert one.name == two.name
        mechanism = tfdp_fl.CorrelatedNoise(
            clip_norm=1.0,
            noise_multiplier=two.noise_multiplier,
            strategy=STRATEGIES[two.name],
            rounds=64,
            min_separation=8,
            target_quantile=0.5,
        )
        counts = (2 * mechanism.count_noise_stddev_of(two.noise_multiplier)) ** -2
        spent = (two.sensitivity / two.noise_multiplier) ** 2 + 8 * counts
        assert accounting.gaussian_epsilon(spent**-0.5, 1e-5) == pytest.approx(
            2.0, rel=1e-6
        )
        assert one.noise_multiplier < two.noise_multiplier
