import numpy as np
import pytest
import tensorflow as tf

from tests.correlated_noise import references
from tfdp_fl.correlated_noise import BLT, BandedToeplitz, Participation

SHAPES = ([3], [2, 2], [])
ROUNDS = 37
STRATEGIES = {
    "independent": BandedToeplitz(1),
    "2 bands": BandedToeplitz(2),
    "5 bands": BandedToeplitz(5),
    "all bands": BandedToeplitz(ROUNDS),
    "1 buffer": BLT(1),
    "3 buffers": BLT(3),
}


def promised(rounds=ROUNDS, gap=8):
    return Participation(rounds=rounds, min_separation=gap)


def stream(generator, draws, shapes=SHAPES, graph=True):
    """Returns noise of all rounds, [rounds, size], from a table of draws."""
    sizes = [int(np.prod(shape)) for shape in shapes]

    def one_round(memory, row):
        parts = tf.split(row, sizes)
        fresh = [
            tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)
        ]
        return generator.next_noise(memory, fresh)

    if graph:
        one_round = tf.function(one_round)
    memory = generator.first_memory(shapes)
    result = []
    for row in tf.constant(draws, tf.float32):
        noise, memory = one_round(memory, row)
        result.append(np.concatenate([np.ravel(n) for n in noise]))
    return np.array(result), memory


def dense_noise(generator, draws):
    rounds = generator.participation.rounds
    return np.linalg.solve(references.dense(generator.coefficients, rounds), draws)


def table_for(generator):
    shape = (generator.participation.rounds, 8)
    return np.random.default_rng(7).normal(size=shape)


@pytest.mark.parametrize("name", STRATEGIES)
def test_noise_is_what_the_dense_matrices_make_of_the_draws(name):
    generator = STRATEGIES[name].generator(promised())
    draws = table_for(generator)
    noise, memory = stream(generator, draws)
    expected = dense_noise(generator, draws)
    np.testing.assert_allclose(noise, expected, atol=3e-6)
    assert int(memory.position) == ROUNDS
    for buffer, shape in zip(memory.buffers, SHAPES, strict=True):
        assert buffer.shape == [generator.copies, *shape]


@pytest.mark.parametrize("name", ["5 bands", "3 buffers"])
def test_mixed_precision_of_products_does_not_touch_it(name, request):
    # With products in bfloat16 it was 0.01 off.
    optimizer = tf.config.optimizer
    option = "auto_mixed_precision_onednn_bfloat16"
    request.addfinalizer(lambda: optimizer.set_experimental_options({option: False}))
    optimizer.set_experimental_options({option: True})
    generator = STRATEGIES[name].generator(promised())
    draws = table_for(generator)
    noise, _ = stream(generator, draws)
    expected = dense_noise(generator, draws)
    np.testing.assert_allclose(noise, expected, atol=3e-6)


@pytest.mark.parametrize("strategy", [BandedToeplitz(32), BLT(3)])
def test_float32_is_exact_enough_over_two_thousand_rounds(strategy):
    generator = strategy.generator(promised(2048, 256))
    draws = table_for(generator)
    noise, _ = stream(generator, draws)
    difference = noise - dense_noise(generator, draws)
    assert np.abs(np.cumsum(difference, axis=0)).max() < 5e-4


@pytest.mark.parametrize("name", STRATEGIES)
def test_charges_go_by_the_coefficients_that_are_used(name):
    generator = STRATEGIES[name].generator(promised())
    matrix = references.dense(generator.coefficients, ROUNDS)
    first = references.worst_by_count(matrix[:, :ROUNDS], 8)[-1]
    assert generator.sensitivity**2 >= first * (1 - 1e-12)
    assert np.sum(generator.charges**2) == pytest.approx(generator.sensitivity**2)
    assert generator.sensitivity**2 == pytest.approx(first)
