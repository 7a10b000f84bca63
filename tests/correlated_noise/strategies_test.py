import numpy as np
import pytest

from tests.correlated_noise import references
from tfdp_fl.correlated_noise import BLT, BandedToeplitz, Participation, toeplitz


def promised(rounds=24, gap=8, most=None):
    return Participation(rounds=rounds, min_separation=gap, max_participations=most)


def test_bands_are_the_min_separation_unless_said_otherwise():
    assert len(BandedToeplitz().generator(promised()).coefficients) == 8
    assert len(BandedToeplitz().generator(promised(4, 8)).coefficients) == 4
    assert len(BandedToeplitz(3).generator(promised()).coefficients) == 3


def test_given_coefficients_are_used_as_they_are():
    made = BandedToeplitz(coefficients=[1, 0.5, 0.25])
    assert len(made.coefficients) == 3
    np.testing.assert_array_equal(
        made.generator(promised()).coefficients, [1, 0.5, 0.25]
    )
    assert len(made.generator(promised(2, 1)).coefficients) == 2


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: BandedToeplitz(0), "bands"),
        (lambda: BandedToeplitz(2.5), "bands"),
        (lambda: BandedToeplitz(3, coefficients=(1, 0.5)), "bands"),
        (lambda: BandedToeplitz(coefficients=(1, 0, 0.9)), "coefficients"),
        (lambda: BandedToeplitz(coefficients=(1, -0.5)), "coefficients"),
        (lambda: BLT(0), "num_buffers"),
        (lambda: BLT(theta=(0.5,)), "theta_hat"),
        (lambda: BLT(theta=(0.5,), theta_hat=(0.4, 0.3)), "theta_hat"),
        (lambda: BLT(theta=(1.5,), theta_hat=(0.4,)), "theta"),
        (lambda: BLT(theta=(0.3,), theta_hat=(0.5,)), "coefficients"),
        (
            lambda: BLT(theta=(0.5, 0.5), theta_hat=(0.3, 0.1)).generator(promised()),
            r"theta .*differ in float32",
        ),
    ],
)
def test_what_is_no_strategy_is_refused(make, named):
    with pytest.raises((ValueError, TypeError), match=named):
        make()


@pytest.mark.parametrize(
    "rounds, min_separation, momentum, buffers",
    # Optima whose poles merge, which float32 once gave a negative weight; the
    # best of T = 2048 has a pole that float32 cannot tell from 1.
    [(128, 8, 0.0, 5), (512, 8, 0.5, 3), (2048, 128, 0.5, 5), (8, 8, 0.0, 2)],
)
def test_the_best_buffers_never_rise(rounds, min_separation, momentum, buffers):
    where = promised(rounds, min_separation)
    made = BLT(num_buffers=buffers).generator(where, momentum)
    assert np.all(np.diff(made.coefficients) <= 0)
    assert np.min(made.weights) >= 0


# What is optimised.


@pytest.mark.parametrize("strategy", [BandedToeplitz(8), BLT(2)])
def test_what_is_optimised_for_a_momentum_is_best_for_it(strategy):
    where = promised(24, 8, 3)
    for momentum, other in ((0.0, 0.9), (0.9, 0.0)):

        def cost(made, momentum=momentum):
            return made.squared_errors(momentum)[-1] * made.sensitivity**2

        own = cost(strategy.generator(where, momentum))
        assert own <= cost(strategy.generator(where, other)) + 1e-5
        assert own < cost(BandedToeplitz(1).generator(where, momentum))


# MaxErr * sensitivity and RMSE * sensitivity, checked against jax-privacy's
# own sensitivity and error: (T, k, b), strategy, (max, rms).
INDEPENDENT, EIGHT, MANY = (BandedToeplitz(n) for n in (1, 8, 32))
EXACT = [
    ((64, 8, 8), INDEPENDENT, (22.6, 16.1)),
    ((64, 1, 64), EIGHT, (3.42, 2.68)),
    ((64, 8, 8), EIGHT, (9.69, 7.59)),
    ((128, 4, 32), MANY, (6.17, 5.18)),
    ((2048, 8, 256), MANY, (25, 18.6)),
]
BLTS = {
    (64, 1, 64): ((2.39, 2.23), (2.39, 2.23), (2.39, 2.23)),
    (64, 8, 8): ((10.1, 8.55), (10.1, 8.55), (10.1, 8.55)),
    (2048, 8, 256): ((13.3, 11.3), (13.2, 11.7), (13.2, 11.7)),
}


def rounded(strategy, where):
    """Returns both products to the three digits that the table has."""
    made = strategy.generator(where)
    squares = made.squared_errors()
    return tuple(
        float(f"{error * made.sensitivity:.3g}")
        for error in np.sqrt([squares.max(), squares.mean()])
    )


@pytest.mark.parametrize("run, strategy, expected", EXACT)
def test_the_table_of_bands(run, strategy, expected):
    rounds, most, gap = run
    assert rounded(strategy, promised(rounds, gap, most)) == expected


@pytest.mark.parametrize("run", BLTS)
def test_the_table_of_buffers(run):
    rounds, most, gap = run
    where = promised(rounds, gap, most)
    for buffers, expected in zip((2, 3, 5), BLTS[run], strict=True):
        found = rounded(BLT(buffers), where)
        assert found[0] <= 1.005 * expected[0] + 5e-3
        assert found[1] <= 1.01 * expected[1] + 5e-3
        assert found[0] >= 0.995 * expected[0] - 5e-3


# What it costs.


def square_root(rounds):
    steps = np.arange(1, rounds)
    return np.cumprod(np.concatenate([[1], (2 * steps - 1) / (2 * steps)]))


FALLING = {
    "square root": square_root(12),
    "two bands": [1, 0.5],
    "identity": [1.0],
    "constant": np.ones(12),
    "steps": [1, 1, 1, 0.3, 0.3, 0.3, 0.1],
    "fast": 0.2 ** np.arange(12),
    "random": np.concatenate([[1], np.sort(np.random.default_rng(5).random(11))[::-1]]),
}


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("rounds", [1, 2, 5, 8, 12])
def test_sensitivity_is_that_of_the_worst_pattern(name, rounds):
    c = toeplitz.checked(FALLING[name])
    dense = references.dense(c, rounds)
    for gap in range(1, rounds + 1):
        worst = references.worst_by_count(dense, gap)
        for most in range(1, rounds + 1):
            found = np.sum(toeplitz.charges(c, promised(rounds, gap, most)) ** 2)
            np.testing.assert_allclose(found, worst[most], rtol=1e-12)


@pytest.mark.parametrize("name", FALLING)
def test_first_rounds_are_charged_what_they_release(name):
    c = toeplitz.checked(FALLING[name])
    squares = np.cumsum(toeplitz.charges(c, promised(12, 3, 3)) ** 2)
    for rounds in range(1, 13):
        worst = references.worst_by_count(references.dense(c, rounds), 3)
        np.testing.assert_allclose(squares[rounds - 1], worst[:4][-1], rtol=1e-12)


@pytest.mark.parametrize(
    "coefficients",
    [(1, 0, 0.9), (1, -0.1), (0.5, 0.1), (2, 1), (), (1, np.nan), (1, 1.0000001)],
)
def test_what_the_formula_does_not_cover_is_refused(coefficients):
    with pytest.raises(ValueError, match="coefficients"):
        toeplitz.checked(coefficients)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_workload_is_what_the_models_hold(beta):
    # Row t is the model after round t, of a server that runs SGD with momentum.
    models, velocity, model = np.zeros([12, 12]), np.zeros(12), np.zeros(12)
    for t, sums in enumerate(np.eye(12)):
        velocity = beta * velocity + sums
        models[t] = model = model + velocity
    made = references.dense(toeplitz.workload(12, beta), 12)
    np.testing.assert_allclose(made, models, rtol=1e-10)
