import numpy as np
import pytest

from tfdp_fl.correlated_noise import (
    BLT,
    BandedToeplitz,
    Participation,
    strategies,
)


def promised(rounds=24, gap=8):
    return Participation(rounds=rounds, min_separation=gap)


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
    made = strategies.BLT(num_buffers=buffers).generator(
        Participation(rounds=rounds, min_separation=min_separation),
        momentum,
    )
    assert np.all(np.diff(made.coefficients) <= 0)
    assert np.min(made.weights) >= 0
