import numpy as np
import pytest

from tfdp_fl.correlated_noise import (
    participation,
    strategies,
)


def promised(rounds, most, gap):
    return participation.Participation(
        rounds=rounds, min_separation=gap, max_participations=most
    )


@pytest.mark.parametrize("strategy", [strategies.BandedToeplitz(8), strategies.BLT(2)])
def test_what_is_optimised_for_a_momentum_is_best_for_it(strategy):
    where = promised(24, 3, 8)
    for momentum, other in ((0.0, 0.9), (0.9, 0.0)):

        def cost(made, momentum=momentum):
            return made.squared_errors(momentum)[-1] * made.sensitivity**2

        own = cost(strategy.generator(where, momentum))
        assert own <= cost(strategy.generator(where, other)) + 1e-5
        assert own < cost(strategies.BandedToeplitz(1).generator(where, momentum))


# MaxErr * sensitivity and RMSE * sensitivity, checked against jax-privacy's
# own sensitivity and error: (T, k, b), strategy, (max, rms).
INDEPENDENT, EIGHT, MANY = (strategies.BandedToeplitz(n) for n in (1, 8, 32))
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
    assert rounded(strategy, promised(*run)) == expected


@pytest.mark.parametrize("run", BLTS)
def test_the_table_of_buffers(run):
    where = promised(*run)
    for buffers, expected in zip((2, 3, 5), BLTS[run], strict=True):
        found = rounded(strategies.BLT(buffers), where)
        assert found[0] <= 1.005 * expected[0] + 5e-3
        assert found[1] <= 1.01 * expected[1] + 5e-3
        assert found[0] >= 0.995 * expected[0] - 5e-3
