import itertools
import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tests.mechanisms import statistics
from tfdp_fl.mechanisms import noise

_SEED = tf.constant([17, 4], tf.int64)
# Longer than one chunk. Chunks end inside variables, and some lie inside a chunk.
_LONG = ((300,), (700, 300), (13,), (40000,), (0, 3), (7,))


def _noise(stddev=1.0, shapes=((150, 100), (150, 100), (100,))):
    return noise.add_normal([tf.zeros(shape) for shape in shapes], stddev)


def test_one_stddev_for_each_tensor_of_a_shape_known_when_it_runs():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)] * 3)
    def add(*tensors):
        return noise.add_normal(tensors, [2.0, 0.0, 3.0])

    first, none, third = add(*(tf.zeros([n]) for n in (20_000, 13, 30_000)))
    statistics.assert_gaussian(first, 2.0)
    assert len(none) == 13 and not np.any(none)
    statistics.assert_gaussian(third, 3.0)
    with pytest.raises(ValueError):
        _noise([1.0])
    values = [tf.random.normal(shape) for shape in _LONG]
    values += [tf.ones([], tf.float16)]
    for value, same in zip(values, noise.add_normal(values, 0.0), strict=True):
        assert (value.dtype, value.shape) == (same.dtype, same.shape)
        np.testing.assert_array_equal(value, same)


def test_a_sum_has_no_digits_below_its_noise():
    sums = [tf.fill([5], tf.constant(1 / 3, tf.float64))]
    (noised,) = noise.add_normal(sums, tf.constant(2.0))
    draws = tf.constant([1.5], tf.float32)
    add = noise.add_scaled_noise  # Of correlated noise.
    one = add(sums[0][:1], draws, tf.constant(2.0))
    assert noised.dtype == one.dtype == tf.float32
    np.testing.assert_array_equal(one, np.float32(1 / 3 + 3))
    assert np.isnan(add(sums[0][:1], draws, tf.constant(np.nan))).all()
    # The sum is not rounded before: 2^-30 moves a large one.
    large, minus = [tf.constant([2.0**24 + x], tf.float64) for x in (0.0, 2.0**-20)]
    moved = add(minus, -tf.constant([2.0**24]), tf.constant(1.0))
    np.testing.assert_array_equal(moved, [2.0**-20])
    assert not add(large, -tf.constant([2.0**24]), tf.constant(1.0)).numpy().any()


_WORDS = (0, 1, -1, 6, -7, 2**20, 2**30, -(2**30), 2**31 - 1, -(2**31))


def test_a_draw_is_what_float64_makes_of_the_same_words():
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (3, 10**5))
    words[:, : len(_WORDS) ** 3] = np.array([*itertools.product(_WORDS, repeat=3)]).T
    given = mock.Mock(return_value=tf.constant(words, tf.int32))
    with mock.patch.object(noise, "_uniform", given):
        draws = noise._box_muller(2 * 10**5, _SEED).numpy()
    assert given.call_args.args[0] == [3, 10**5]
    high, low, direction = words
    v = (high % 2**31 + abs(low) / 2**31 + 2.0**-33) / 2**32
    radius = np.sqrt(-2 * np.where(high < 0, np.log(v), np.log1p(-v)))
    angle = direction * (np.pi / 2**31)
    expected = radius * np.array([np.cos(angle), np.sin(angle)])
    error = np.hypot(*(draws.reshape(2, -1) - expected))
    assert np.max(error / radius) < 1e-6
    assert max(draws) == pytest.approx(math.sqrt(130 * math.log(2)), rel=1e-6)
    assert np.all(np.isfinite(draws))
    # No pair is (0, 0), and the smallest are no steps of 2^-11.5.
    assert 2**-33 < np.min(np.hypot(*draws.reshape(2, -1))) < 2**-31


def test_small_draws_are_as_fine_as_large_ones():
    # Radii below 2^-9: with 24 bits of u, they would be among 64 values.
    draws = noise._box_muller(2**25, _SEED).numpy().reshape(2, -1)
    squares = np.sum(draws.astype(np.float64) ** 2, axis=0)
    steps = -np.expm1(-squares[squares < 2.0**-18] / 2) * 2**24
    # Expected: 2^24 * 2^-19 = 32.
    assert len(steps) > 5
    assert np.mean(np.abs(steps - np.rint(steps)) < 0.05) < 0.7


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_bits_are_those_that_tensorflow_draws(jit_compile):
    draw = tf.function(noise._uniform, jit_compile=jit_compile)
    random = np.random.default_rng(0)
    for words in tf.constant([[0, 1], *random.integers(-(2**63), 2**63, (9, 2))]):
        for dtype in (tf.int32, tf.uint64):
            ours = draw([3, 5], words, dtype)
            theirs = tf.random.stateless_uniform(
                [3, 5], words, None, None, dtype, alg="philox"
            )
            np.testing.assert_array_equal(ours, theirs)
    split = tf.random.experimental.stateless_split(words, 4, alg="philox")
    np.testing.assert_array_equal(split, noise._uniform([4, 2], words, tf.int64))


def test_two_draws_differ():
    def one():
        return _noise()[0]

    traced = tf.function(lambda: (one(), one()))
    drawn = [one(), one(), *traced(), *traced(), tf.function(one)()]
    # In the turns of a loop.
    drawn += list(tf.function(lambda: tf.map_fn(lambda _: one(), tf.zeros([3])))())
    for _ in range(2):
        tf.random.set_seed(1)
        drawn.append(one())
    with noise.use_seed(_SEED):
        drawn += [one(), one()]
    for first, second in itertools.combinations(drawn, 2):
        assert not np.array_equal(first, second)
        statistics.assert_uncorrelated(first, second)


def test_a_seed_is_followed_in_its_block_and_in_a_traced_function():
    @tf.function
    def drawn(seed):
        with noise.use_seed(seed):
            return _noise()[0]

    np.testing.assert_array_equal(drawn(_SEED), drawn(_SEED))
    assert not np.array_equal(drawn(_SEED), drawn(_SEED + 1))
    with noise.use_seed(_SEED):
        np.testing.assert_array_equal(drawn(_SEED), _noise()[0])
    # Blocks nest, and end also after an error.
    with noise.use_seed(_SEED):
        first = _noise()[0]
        with pytest.raises(RuntimeError), noise.use_seed(_SEED + 9):
            _noise()
            raise RuntimeError
        second = _noise()[0]
    with noise.use_seed(_SEED):
        np.testing.assert_array_equal(first, _noise()[0])
        np.testing.assert_array_equal(second, _noise()[0])
    assert not np.array_equal(noise.next_seed(), noise.next_seed())


@pytest.mark.parametrize("xla", [None, False, True])
def test_is_gaussian_and_repeats(xla):
    def drawn(seed):
        with noise.use_seed(seed):
            parts = [
                noise.normal([], 1.0),
                *_noise(1.0, _LONG),
                *noise.standard_normals([tf.zeros([20011])], noise.next_seed()),
            ]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    if xla is not None:
        drawn = tf.function(drawn, jit_compile=xla)
    seed = tf.constant([2**63 + 17, 4], tf.uint64)
    values = drawn(seed)
    np.testing.assert_array_equal(values, drawn(seed))
    statistics.assert_gaussian(values, 1.0)
    # Wrongly refused once in 1e9.
    assert stats.kstest(values, "norm").pvalue > 1e-9
    for lag in (1, 8, noise._SMALLEST_CHUNK, 2 * noise._SMALLEST_CHUNK):
        statistics.assert_uncorrelated(values[lag:], values[:-lag])
    for other in range(3):
        statistics.assert_uncorrelated(values, drawn(noise.fold_in(seed, other)))


def test_a_child_depends_on_both():
    seed = tf.constant([2**63 + 17, 4], tf.uint64)
    other = tf.bitwise.bitwise_xor(seed, tf.ones_like(seed))
    numbers = [0, 1, -1, 2**31, 2**32, 2**33 + 1, -(2**40), 2**62]
    children = [noise.fold_in(parent, n) for parent in (seed, other) for n in numbers]
    for child in children:
        assert (child.dtype, child.shape) == (seed.dtype, seed.shape)
    words = np.array([child.numpy() for child in children])
    assert len({tuple(row) for row in words}) == 2 * len(numbers)
    # Every word is secret: none comes twice (once in 2e7).
    assert len(np.unique(words)) == words.size
    assert len({int(noise.integer(seed, k)) for k in range(50)}) == 50


def test_fresh_seeds():
    seeds = [noise.fresh_seed() for _ in range(20)]
    assert len({seed.tobytes() for seed in seeds}) == 20
    assert (seeds[0].dtype, seeds[0].shape) == (np.uint64, (2,))


def _entropy(runs, count=8):
    traced = tf.function(lambda: (noise.entropy(count), noise.entropy(count)))
    return np.array([each.numpy() for _ in range(runs) for each in traced()])


def test_every_bit_of_the_entropy_is_as_often_one_and_nothing_comes_twice():
    rows = _entropy(1000)
    assert rows.shape == (2000, 8)
    bits = np.unpackbits(rows.view(np.uint8), axis=1)
    # Of 256 bits in 2000 rows; wrong once in 1e8: 0.5 +- 0.074.
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.074
    for count in (1, 4, 11):
        # 32 bits alike: 200 numbers, once in 2e5; so two words of them.
        seen = {tuple(row) for row in _entropy(100, count)}
        assert len(seen) >= (200 if count > 1 else 199)


def test_the_entropy_does_not_depend_on_tensorflows_own_random_numbers():
    # Which begin with 32 bits. A constant would be read once for ever.
    ones = tf.Variable(tf.ones([4], tf.int64))
    with mock.patch.object(
        tf.raw_ops, "NonDeterministicInts", lambda shape, dtype: ones[: shape[0]]
    ):
        traced = tf.function(noise.next_seed)
        seeds = {tuple(traced().numpy().tolist()) for _ in range(20)}
    assert len(seeds) == 20


def test_elsewhere_entropy_is_refused_in_a_graph_only():
    with mock.patch.object(noise, "_UUIDS", "/nowhere/uuid"):
        with pytest.raises(NotImplementedError, match="needs Linux"):
            tf.function(lambda: noise.entropy(4))()
        assert noise.entropy(3).shape == (3,)
        assert noise.next_seed().dtype == tf.uint64


def _by_tensorflow(update, stddev):
    return [each + stddev * tf.random.normal(each.shape) for each in update]


def _by_numpy(update, stddev):
    return [each + np.random.normal(size=each.shape) for each in update]


def _by_fixed_seed(update, stddev):
    draw = tf.random.stateless_normal(update[0].shape, [1, 2])
    draw += 1e-6 * tf.random.normal(update[0].shape)
    return [update[0] + stddev * draw, *_by_tensorflow(update[1:], stddev)]


def _of_one_tensor(update, stddev):
    return [*_by_tensorflow(update[:1], stddev), update[1] * 2.0]


def _in_a_function(update, stddev):
    inner = tf.function(lambda: tf.random.normal(update[0].shape))
    return [update[0] + inner(), *_by_tensorflow(update[1:], stddev)]


def _by_the_host(update, stddev):
    def draw():
        return np.random.normal(size=100).astype("f4")

    return [tf.numpy_function(draw, [], tf.float32), update[1]]


def _with_fresh_draws(function, seeds):
    """Returns the noise of several calls of one graph, as a release calls it."""

    @tf.function(autograph=False)
    def release(seed, update, stddev):
        with noise.use_seed(seed):
            return noise.with_fresh_draws(
                *(lambda *given: (function(*given), ()), update, stddev),
                must_add_noise=True,
                argument="add_noise",
            )[0]

    zeros = [tf.zeros([100]), tf.zeros([30_000])]
    return [
        np.concatenate(release(tf.constant(seed, tf.int64), zeros, tf.constant(3.0)))
        for seed in seeds
    ]


@pytest.mark.parametrize("function", [_by_tensorflow, noise.add_normal])
def test_noise_of_ones_own_code_is_new_in_each_round_and_process(function):
    # It was the same in two processes, once `tf.random.set_seed` had been called.
    tf.random.set_seed(0)
    first, other, again = _with_fresh_draws(function, [[1, 2], [1, 3], [1, 2]])
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.999
    for each, stddev in ((first, 3.0), (other, 3.0), (first - other, 3.0 * 2**0.5)):
        statistics.assert_gaussian(each[100:], stddev)
    tf.random.set_seed(0)
    (fresh,) = _with_fresh_draws(function, [[9, 9]])
    assert (fresh != first).mean() > 0.999


@pytest.mark.parametrize(
    "function",
    [_by_numpy, _by_fixed_seed, _of_one_tensor, _in_a_function, _by_the_host],
)
def test_noise_that_would_repeat_is_refused(function):
    # The noise of two rounds was equal: epsilon 9 said, none true.
    with pytest.raises(ValueError, match="add_noise must draw its noise by"):
        _with_fresh_draws(function, [[1, 2]])
    # What does not depend on the clients needs no noise.
    constant = [tf.ones([100]), tf.zeros([30_000])]
    (found,) = _with_fresh_draws(lambda *_: constant, [[1, 2]])
    assert found.sum() == 100
