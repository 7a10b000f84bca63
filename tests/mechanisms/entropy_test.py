from __future__ import annotations

import pathlib
import unittest
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tfdp_fl.mechanisms import entropy, noise

_HAS_FILE = pathlib.Path(entropy._UUIDS).exists()


@unittest.skipUnless(_HAS_FILE, "The operating system is not Linux.")
class WordsInAGraphTest(absltest.TestCase):
    def _drawn(self, runs, count=8):
        traced = tf.function(lambda: (entropy.words(count), entropy.words(count)))
        return np.array([each.numpy() for _ in range(runs) for each in traced()])

    def test_every_bit_is_as_often_one_as_zero(self):
        rows = self._drawn(1000)
        self.assertEqual(rows.shape, (2000, 8))
        bits = np.unpackbits(rows.view(np.uint8), axis=1)
        # Of 256 bits in 2000 rows; wrong once in 1e8: 0.5 +- 0.074.
        self.assertLess(np.abs(bits.mean(axis=0) - 0.5).max(), 0.074)

    def test_nothing_comes_twice_in_one_run_or_in_two(self):
        for count in (1, 4, 11):
            rows = self._drawn(100, count)
            # 32 bits alike: 200 numbers, once in 2e5; so two words of them.
            seen = {tuple(row) for row in rows}
            self.assertGreaterEqual(len(seen), 200 if count > 1 else 199)

    def test_does_not_hang_on_tensorflows_own_random_numbers(self):
        # Which are a Mersenne Twister that starts from 32 bits: see `entropy`.
        # A variable: of a constant there would be one reading for ever.
        ones = tf.Variable(tf.ones([4], tf.int64))
        with mock.patch.object(
            tf.raw_ops,
            "NonDeterministicInts",
            lambda shape, dtype: ones[: shape[0]],
        ):
            traced = tf.function(noise.next_seed)
            seeds = {tuple(traced().numpy().tolist()) for _ in range(20)}
        self.assertLen(seeds, 20)


class ElsewhereTest(absltest.TestCase):
    def test_is_refused_in_a_graph(self):
        with (
            mock.patch.object(entropy, "_UUIDS", "/nowhere/uuid"),
            self.assertRaisesRegex(NotImplementedError, "needs Linux"),
        ):
            tf.function(lambda: entropy.words(4))()

    def test_is_not_needed_outside_of_one(self):
        with mock.patch.object(entropy, "_UUIDS", "/nowhere/uuid"):
            self.assertEqual(entropy.words(3).shape, (3,))
            self.assertEqual(noise.next_seed().dtype, tf.uint64)
