from __future__ import annotations

import itertools
import math
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from scipy import stats

from tests.mechanisms import rounds, statistics
from tfdp_fl.mechanisms import noise

_SEED = tf.constant([17, 4], tf.int64)
# One of each kind.
_KINDS = {
    "of_a_user": _SEED,
    "philox": tf.constant([2**63 + 17, 4], tf.uint64),
}


def _noise(stddev=1.0, shapes=((150, 100), (150, 100), (100,))):
    return noise.add_normal([tf.zeros(shape) for shape in shapes], stddev)


class AddNormalTest(tf.test.TestCase):
    def test_one_stddev_for_each_tensor(self):
        first, second, third = _noise([0.5, 2.0, 0.0], [(20000,)] * 3)
        statistics.assert_gaussian(first, 0.5)
        statistics.assert_gaussian(second, 2.0)
        self.assertAllEqual(third, np.zeros(20000))

    def test_the_wrong_number_of_stddevs_is_an_error(self):
        with self.assertRaises(ValueError):
            _noise([1.0])

    def test_keeps_dtypes_and_shapes(self):
        values = [tf.zeros([2, 3], tf.float64), tf.zeros([], tf.float16)]
        noised = noise.add_normal(values, 1.0)
        self.assertEqual([v.dtype for v in noised], [v.dtype for v in values])
        self.assertEqual([v.shape for v in noised], [v.shape for v in values])

    def test_shapes_that_are_known_only_when_it_runs(self):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)] * 2)
        def add(first, second):
            return noise.add_normal([first, second], 3.0)

        first, second = add(tf.zeros([20000]), tf.zeros([30000]))
        self.assertEqual([len(first), len(second)], [20000, 30000])
        statistics.assert_gaussian(rounds.flat([first, second]), 3.0)


class LongDrawTest(tf.test.TestCase):
    """More numbers than one chunk holds."""

    # Chunks end inside variables, and some variables lie inside a chunk.
    _SHAPES = ((300,), (700, 300), (13,), (40000,), (0, 3), (7,))

    def test_every_number_is_drawn_for_itself(self):
        noised = _noise(2.5, self._SHAPES)
        self.assertEqual([each.shape for each in noised], [*self._SHAPES])
        flat = rounds.flat(noised)
        statistics.assert_gaussian(flat, 2.5)
        chunk = noise._SMALLEST_CHUNK
        for lag in (chunk, 2 * chunk):
            statistics.assert_uncorrelated(flat[lag:], flat[:-lag])

    def test_is_added_in_its_place(self):
        values = [tf.random.normal(shape) for shape in self._SHAPES]
        noised = noise.add_normal(values, 0.0)
        for value, same in zip(values, noised, strict=True):
            self.assertAllEqual(value, same)

    def test_the_graph_stays_small(self):
        graph = (
            tf.function(lambda value: noise.add_normal([value], 1.0))
            .get_concrete_function(tf.TensorSpec([10**8]))
            .graph
        )
        draws = [
            each
            for each in graph.get_operations()
            if each.type == "StatelessRandomUniformFullIntV2"
            and each.outputs[0].dtype == tf.int32
        ]
        self.assertLen(draws, noise._MOST_CHUNKS)


class RadiusTest(tf.test.TestCase):
    """What is made of Philox's bits, without a user's seed."""

    _WORDS = (0, 1, -1, 6, -7, 2**20, 2**30, -(2**30), 2**31 - 1, -(2**31))

    def test_is_what_float64_makes_of_the_same_words(self):
        words = np.array(list(itertools.product(self._WORDS, repeat=3))).T
        words = np.concatenate(
            [
                words,
                np.random.default_rng(1).integers(
                    -(2**31), 2**31, (3, 10**5 - words.shape[1])
                ),
            ],
            1,
        )

        def drawn(shape, seed, **options):
            del seed, options
            self.assertEqual(shape, [3, 10**5])
            return tf.constant(words, tf.int32)

        with mock.patch.object(tf.random, "stateless_uniform", drawn):
            draws = noise._by_radius(2 * 10**5, _SEED).numpy()
        high, low, direction = words
        u = (high % 2**31 + abs(low) / 2**31 + 2.0**-33) / 2**31
        # As a float32 they are the next ones, of which the largest is 1.
        u = np.minimum(u, 1)
        radius = np.sqrt(-2 * np.log(u))
        angle = direction * (np.pi / 2**31)
        self.assertAllClose(
            draws.reshape(2, -1),
            [radius * np.cos(angle), radius * np.sin(angle)],
            rtol=1e-5,
            # Radii near zero go up in steps, of which this is the first.
            atol=2**-11.5,
        )
        self.assertAllClose(max(draws), math.sqrt(128 * math.log(2)), 1e-6)
        self.assertTrue(np.all(np.isfinite(draws)))

    def test_two_of_a_pair_are_independent(self):
        draws = noise._by_radius(2 * 10**6, tf.constant([3, 5], tf.int64))
        first, second = draws.numpy().reshape(2, -1).astype(float)
        squares = first**2, second**2
        for one, other in (
            (first, second),
            squares,
            (first, squares[1]),
            (squares[0], second),
            (np.sign(first), squares[1]),
        ):
            statistics.assert_uncorrelated(one, other)
        # Each wrongly refused once in 1e9.
        exponential = stats.kstest(sum(squares) / 2, "expon")
        self.assertGreater(exponential.pvalue, 1e-9)
        turns = np.arctan2(second, first) / (2 * np.pi) + 0.5
        self.assertGreater(stats.kstest(turns, "uniform").pvalue, 1e-9)

    def test_any_number_of_them(self):
        for length in (0, 1, 15, 16, 17, 33, 1000):
            draws = noise._by_radius(length, _SEED)
            self.assertEqual(draws.shape, [length])
            unknown = tf.function(
                noise._by_radius,
                input_signature=[
                    tf.TensorSpec([], tf.int32),
                    tf.TensorSpec([2], tf.int64),
                ],
            )(length, _SEED)
            self.assertAllEqual(unknown, draws)


class FreshnessTest(tf.test.TestCase):
    def assert_all_differ(self, draws):
        for i, one in enumerate(draws):
            for other in draws[:i]:
                self.assertNotAllEqual(one, other)
                statistics.assert_uncorrelated(one, other)

    def test_every_call_draws_anew(self):
        self.assert_all_differ([_noise()[0] for _ in range(3)])

    def test_a_global_seed_does_not_make_it_repeat(self):
        draws = []
        for _ in range(2):
            tf.random.set_seed(1)
            draws.append(_noise()[0])
        self.assert_all_differ(draws)

    def test_a_traced_function_draws_anew_in_every_call(self):
        traced = tf.function(lambda: _noise()[0])
        self.assert_all_differ([traced() for _ in range(3)])

    def test_every_turn_of_a_loop_draws_anew(self):
        @tf.function
        def loop():
            return tf.map_fn(lambda _: _noise()[0], tf.zeros([3]))

        self.assert_all_differ(list(loop().numpy()))


class SeededTest(tf.test.TestCase):
    def test_repeats_bit_for_bit(self):
        draws = []
        for _ in range(2):
            with noise.seeded(_SEED):
                draws.append([_noise()[0], noise.normal([1000], 1.0)])
        self.assertAllEqual(draws[0][0], draws[1][0])
        self.assertAllEqual(draws[0][1], draws[1][1])

    def test_two_draws_inside_one_block_differ(self):
        with noise.seeded(_SEED):
            first, second = _noise()[0], _noise()[0]
        statistics.assert_uncorrelated(first, second)

    def test_a_traced_function_follows_a_seed_that_is_its_argument(self):
        @tf.function
        def drawn(seed):
            with noise.seeded(seed):
                return _noise()[0]

        self.assertAllEqual(drawn(_SEED), drawn(_SEED))
        self.assertNotAllEqual(drawn(_SEED), drawn(_SEED + 1))
        with noise.seeded(_SEED):
            self.assertAllEqual(drawn(_SEED), _noise()[0])

    def test_ends_with_its_block_also_after_an_error(self):
        with self.assertRaises(RuntimeError), noise.seeded(_SEED):
            raise RuntimeError
        self.assertNotAllEqual(noise.next_seed(), noise.next_seed())

    def test_blocks_nest(self):
        with noise.seeded(_SEED):
            first = _noise()[0]
            with noise.seeded(_SEED + 9):
                _noise()
            second = _noise()[0]
        with noise.seeded(_SEED):
            self.assertAllEqual(first, _noise()[0])
            self.assertAllEqual(second, _noise()[0])


class KindsOfSeedTest(parameterized.TestCase, tf.test.TestCase):
    # Longer than one chunk, of shapes that end inside of blocks and chunks.
    _SHAPES = ((300,), (700, 300), (13,), (40000,))

    def _drawn(self, seed, stddev=1.0):
        with noise.seeded(seed):
            return [
                noise.normal([], 1.0)[None],
                *noise.add_normal([tf.zeros(s) for s in self._SHAPES], stddev),
                *noise.standard_normals([tf.zeros([20011])], noise.next_seed()),
            ]

    @parameterized.product(kind=list(_KINDS), xla=[None, False, True])
    def test_is_gaussian_and_repeats(self, kind, xla):
        def drawn(seed):
            return tf.concat([tf.reshape(v, [-1]) for v in self._drawn(seed)], 0)

        if xla is not None:
            drawn = tf.function(drawn, jit_compile=xla)
        seed = _KINDS[kind]
        values = drawn(seed)
        self.assertAllEqual(values, drawn(seed))
        statistics.assert_gaussian(values, 1.0)
        # Wrongly refused once in 1e9.
        self.assertGreater(stats.kstest(values, "norm").pvalue, 1e-9)
        for lag in (1, 8, noise._SMALLEST_CHUNK):
            statistics.assert_uncorrelated(values[lag:], values[:-lag])
        for other in range(3):
            statistics.assert_uncorrelated(values, drawn(noise.fold_in(seed, other)))

    def test_a_users_seed_draws_what_it_always_did(self):
        with noise.seeded(_SEED):
            first, _ = noise.normal([2], 1.0), noise.next_seed()
            added = noise.add_normal([tf.zeros([3])], 2.0)[0]
        self.assertAllClose(first, [-0.113940895, -1.255936], 1e-5)
        self.assertAllClose(added, [-1.730042, 0.09592744, -0.38477606], 1e-5)
        self.assertAllEqual(noise.fold_in(_SEED, -3), [-5325777890577690760, -3])

    @parameterized.parameters(*_KINDS)
    def test_a_child_is_a_seed_of_its_kind_and_hangs_on_both(self, kind):
        seed = _KINDS[kind]
        other = tf.bitwise.bitwise_xor(seed, tf.ones_like(seed))
        numbers = [0, 1, -1, 2**31, 2**32, 2**33 + 1, -(2**40), 2**62]
        children = [noise.fold_in(seed, each) for each in numbers]
        children += [noise.fold_in(other, each) for each in numbers]
        for each in children:
            self.assertEqual((each.dtype, each.shape), (seed.dtype, seed.shape))
        words = np.array([each.numpy() for each in children])
        self.assertLen({tuple(row) for row in words}, 2 * len(numbers))
        if kind != "of_a_user":  # Whose last word is the number.
            # Every word is secret: none comes twice (once in 2e7).
            self.assertLen(np.unique(words), words.size)
        integers = [int(noise.integer(seed, k)) for k in range(50)]
        self.assertLen(set(integers), 50)

    def test_fresh_seeds(self):
        seeds = [noise.fresh_seed() for _ in range(20)]
        self.assertLen({each.tobytes() for each in seeds}, 20)
        self.assertEqual(seeds[0].dtype, _KINDS["philox"].dtype)
        self.assertEqual(seeds[0].shape, _KINDS["philox"].shape)


if __name__ == "__main__":
    tf.test.main()
