import numpy as np
import pytest
from scipy import special

from tfdp_fl.correlated_noise import (
    optimisation,
    participation,
    strategies,
    toeplitz,
)
from tfdp_fl.correlated_noise.toeplitz import Workload

WORKLOADS = {
    "prefix": Workload(),
    "momentum": Workload(momentum=0.9),
    "rates": Workload(rates=np.linspace(1, 0.1, 24)),
    "both": Workload(momentum=0.5, rates=np.linspace(0, 1, 24)),
}


def promised(rounds, most, gap):
    return participation.Participation(
        rounds=rounds, min_separation=gap, max_participations=most
    )


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("kind", ["banded", "blt"])
def test_gradients_are_exact(kind, name):
    make = getattr(optimisation, f"{kind}_loss")
    size = {"banded": 9, "blt": 3}[kind]
    loss = make(size, promised(24, 3, 7), WORKLOADS[name])
    rng = np.random.default_rng(3)
    free = rng.normal(size=size - 1 if kind == "banded" else 2 * size)
    _, gradient = loss(free)
    for i, step in enumerate(np.eye(len(free)) * 1e-5):
        slope = (loss(free + step)[0] - loss(free - step)[0]) / 2e-5
        assert gradient[i] == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_loss_is_error_times_sensitivity(name):
    where, made = promised(24, 3, 7), WORKLOADS[name]
    free = np.random.default_rng(3).normal(size=8)
    c = np.concatenate([[1], np.cumprod(special.expit(free))])
    errors = toeplitz.squared_errors(c, 24, made)
    error = errors[-1] if made.rates is None else errors.mean()
    square = np.sum(toeplitz.charges(c, where) ** 2)
    found, _ = optimisation.banded_loss(9, where, made)(free)
    assert found == pytest.approx(np.log(error * square))


@pytest.mark.parametrize("name", ["prefix", "momentum"])
def test_the_last_model_is_the_noisiest_without_rates(name):
    errors = toeplitz.squared_errors(np.array([1, 0.5, 0.3]), 24, WORKLOADS[name])
    assert errors[-1] == errors.max()


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("where", [promised(24, 1, 24), promised(24, 3, 8)])
def test_optimised_coefficients_beat_those_of_another_workload(where, name):
    made = WORKLOADS[name]

    def objective(generator):
        errors = generator.squared_errors(made)
        error = errors[-1] if made.rates is None else errors.mean()
        return error * generator.sensitivity**2

    for strategy in (strategies.BandedToeplitz(8), strategies.BLT(2)):
        own = objective(strategy.generator(where, made))
        for other in WORKLOADS.values():
            assert own <= objective(strategy.generator(where, other)) + 1e-5
    independent = strategies.BandedToeplitz(1).generator(where, made)
    assert own < objective(independent)


# MaxErr * sensitivity and RMSE * sensitivity, checked against jax-privacy's
# own sensitivity and error: (T, k, b): {strategy: (max, rms)}.
BANDED = {
    (16, 1, 16): {8: (2.11, 1.81)},
    (16, 2, 8): {8: (2.99, 2.55)},
    (64, 1, 64): {8: (3.42, 2.68), 32: (2.56, 2.24)},
    (64, 8, 8): {8: (9.69, 7.59)},
    (128, 4, 32): {8: (9.08, 6.91), 32: (6.17, 5.18)},
    (512, 1, 512): {8: (8.44, 6.17), 32: (4.96, 3.89)},
    (512, 16, 32): {8: (33.8, 24.7), 32: (19.8, 15.5)},
    (2048, 1, 2048): {8: (16.4, 11.7), 32: (8.83, 6.59)},
    (2048, 8, 256): {8: (46.3, 33.2), 32: (25, 18.6), 256: (12.7, 10.7)},
}
# More bands than lie between a client's rounds, optimised for k = 1.
BANDED_FOR_ONE = {(64, 8, 8): {32: (10.9, 9.57)}}
BLTS = {
    (16, 1, 16): ((1.94, 1.8), (1.94, 1.8), (1.94, 1.8)),
    (16, 2, 8): ((3.02, 2.71), (3.02, 2.71), (3.02, 2.71)),
    (64, 1, 64): ((2.39, 2.23), (2.39, 2.23), (2.39, 2.23)),
    (64, 8, 8): ((10.1, 8.55), (10.1, 8.55), (10.1, 8.55)),
    (128, 4, 32): ((6.38, 5.67), (6.35, 5.64), (6.35, 5.64)),
    (512, 1, 512): ((3.08, 2.91), (3.05, 2.89), (3.05, 2.89)),
    (512, 16, 32): ((20.8, 17.5), (20.8, 17.5), (20.7, 17.4)),
    (2048, 1, 2048): ((3.58, 3.39), (3.5, 3.34), (3.49, 3.33)),
    (2048, 8, 256): ((13.3, 11.3), (13.2, 11.7), (13.2, 11.7)),
}
# Independent noise, square root (45.3 is the root of 2048).
OTHERS = {
    (16, 1, 16): ((4, 2.92), (1.94, 1.8)),
    (16, 2, 8): ((5.66, 4.12), (3.05, 2.81)),
    (64, 1, 64): ((8, 5.7), (2.39, 2.23)),
    (64, 8, 8): ((22.6, 16.1), (10.9, 10.2)),
    (128, 4, 32): ((22.6, 16.1), (6.58, 6.17)),
    (512, 1, 512): ((22.6, 16), (3.05, 2.89)),
    (512, 16, 32): ((90.5, 64.1), (24.1, 22.8)),
    (2048, 1, 2048): ((45.3, 32), (3.49, 3.33)),
    (2048, 8, 256): ((128, 90.5), (14.4, 13.7)),
}


def rounded(strategy, where):
    """Returns both products to the three digits that the table has."""
    made = strategy.generator(where)
    squares = made.squared_errors(Workload())
    return tuple(
        float(f"{error * made.sensitivity:.3g}")
        for error in np.sqrt([squares.max(), squares.mean()])
    )


@pytest.mark.parametrize("run", OTHERS)
def test_the_table_of_what_needs_no_optimisation(run):
    where = promised(*run)
    steps = np.arange(1, run[0])
    root = np.cumprod(np.concatenate([[1], (2 * steps - 1) / (2 * steps)]))
    for strategy, expected in zip(
        (
            strategies.BandedToeplitz(1),
            strategies.BandedToeplitz(coefficients=root),
        ),
        OTHERS[run],
        strict=True,
    ):
        assert rounded(strategy, where) == expected


@pytest.mark.parametrize("run", BANDED)
def test_the_table_of_bands(run):
    where = promised(*run)
    for bands, expected in BANDED[run].items():
        found = rounded(strategies.BandedToeplitz(bands), where)
        assert found == expected


@pytest.mark.parametrize("run", BANDED_FOR_ONE)
def test_bands_beyond_the_separation_are_best_for_the_run_at_hand(run):
    where, once = promised(*run), promised(run[0], 1, run[0])
    for bands, expected in BANDED_FOR_ONE[run].items():
        alone = strategies.BandedToeplitz(bands).generator(once)
        other = strategies.BandedToeplitz(coefficients=alone.coefficients)
        found = rounded(other, where)
        assert found == expected
        own = rounded(strategies.BandedToeplitz(bands), where)
        assert own[0] < found[0]


@pytest.mark.parametrize("run", BLTS)
def test_the_table_of_buffers(run):
    where = promised(*run)
    for buffers, expected in zip((2, 3, 5), BLTS[run], strict=True):
        found = rounded(strategies.BLT(buffers), where)
        assert found[0] <= 1.005 * expected[0] + 5e-3
        assert found[1] <= 1.01 * expected[1] + 5e-3
        assert found[0] >= 0.995 * expected[0] - 5e-3


@pytest.mark.parametrize(
    ("strategy", "run", "expected"),
    [
        (strategies.BLT(2), (64, 1, 64), 2.3913),
        (strategies.BandedToeplitz(8), (64, 1, 64), 3.4243),
        (strategies.BLT(2), (64, 8, 8), 10.0762),
    ],
)
def test_jax_privacys_own_optimum_is_reached(strategy, run, expected):
    made = strategy.generator(promised(*run))
    found = np.sqrt(made.squared_errors(Workload()).max()) * made.sensitivity
    assert found == pytest.approx(expected, rel=1e-3)
    assert found <= expected * 1.0001
