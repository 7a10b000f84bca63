import numpy as np
import pytest

from tfdp_fl.correlated_noise import Workload


def test_momentum_is_that_of_sgd():
    beta, rounds = 0.8, 7
    made = Workload(momentum=beta)
    sums = np.eye(rounds)
    velocity, model = np.zeros(rounds), np.zeros(rounds)
    for t in range(rounds):
        velocity = beta * velocity + sums[t]
        model = model + velocity
        np.testing.assert_allclose(made.applied(np.eye(rounds))[t], model, rtol=1e-12)
    np.testing.assert_allclose(
        made.coefficients(rounds),
        (1 - beta ** (np.arange(rounds) + 1)) / (1 - beta),
        rtol=1e-12,
    )


def test_rates_scale_what_each_round_brings():
    made = Workload(rates=[1.0, 0.5, 0.0])
    np.testing.assert_array_equal(
        made.applied(np.eye(3)), [[1, 0, 0], [1, 0.5, 0], [1, 0.5, 0]]
    )


def test_rates_have_to_be_one_a_round():
    with pytest.raises(ValueError, match=r"rates.*4.*3"):
        Workload(rates=[1, 1, 1]).applied(np.eye(4))


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"rates": [0, 0]},
        {"rates": [-1.0]},
        {"rates": [float("nan")]},
    ],
)
def test_what_makes_no_model_is_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Workload(**arguments)
