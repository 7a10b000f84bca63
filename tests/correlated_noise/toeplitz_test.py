import numpy as np
import pytest

from tests.correlated_noise import references
from tfdp_fl.correlated_noise import participation, toeplitz


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
            promised = participation.Participation(
                rounds=rounds, min_separation=gap, max_participations=most
            )
            found = np.sum(toeplitz.charges(c, promised) ** 2)
            np.testing.assert_allclose(found, worst[most], rtol=1e-12)


@pytest.mark.parametrize("name", FALLING)
def test_first_rounds_are_charged_what_they_release(name):
    c = toeplitz.checked(FALLING[name])
    promised = participation.Participation(
        rounds=12, min_separation=3, max_participations=3
    )
    squares = np.cumsum(toeplitz.charges(c, promised) ** 2)
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
