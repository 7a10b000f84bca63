from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.mechanisms import references, rounds
from tfdp_fl.mechanisms import Client, Deployment, Round, clipping


def _clipped(update, clip_norm=1.0):
    mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.0)
    return mechanism.contribution(
        update,
        Round(tf.constant(clip_norm), 0.0, 1.0),
        Client(),
        Deployment(clients_per_round=1),
    )


class ClipByNormTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(1e-6, 0.1, 0.999999, 1.0, 1.000001, 3.0, 1e6)
    def test_is_the_papers_flat_clip(self, norm):
        (update,) = rounds.updates_with_norms([norm])
        result = _clipped([tf.constant(v) for v in update])
        for actual, wanted in zip(
            result.update, references.clipped(update, 1.0), strict=True
        ):
            self.assertAllClose(actual, wanted, rtol=1e-6, atol=0)
        self.assertAllClose(result.norm, references.l2_norm(update), rtol=1e-6)
        self.assertEqual(float(result.discarded), 0)
        self.assertLessEqual(references.l2_norm(result.update), 1 + 1e-6)

    @parameterized.parameters(
        (2**20, True),
        (3 * 2**20 - 5, False),
        (3 * 2**20 - 5, True),
        (70 * 2**20 + 3, False),
    )
    def test_norm_of_a_large_layer(self, size, compiled):
        """Each part counts, once; seen to fail without the last part.

        All elements but one are below what a float32 sum of so many would
        still notice.
        """
        layer = np.full(size, 2**-12, np.float32)
        layer[-1] = 4.0
        norm = tf.function(lambda x: clipping.global_norm([x]), jit_compile=compiled)(
            tf.constant(layer)
        )
        expected = np.sqrt((size - 1) * 2.0**-24 + 16)
        self.assertAllClose(norm, expected, rtol=8e-6, atol=0)

    @parameterized.parameters(False, True)
    def test_a_bad_element_in_any_part_of_a_layer(self, compiled):
        clip = tf.function(lambda x: _clipped([x]), jit_compile=compiled)
        with mock.patch.object(clipping, "_COPIED", 100):
            for place, bad in itertools.product((0, 299, 300, -1), (np.nan, 3e38)):
                update = np.full(1001, 0.1, np.float32)
                update[place] = bad
                result = clip(tf.constant(update))
                self.assertEqual(float(result.discarded), 1)
                self.assertAllEqual(result.update[0], np.zeros(1001))

    def test_a_zero_update_is_legal_and_a_zero_bound_gives_zero(self):
        for value, bound in ((0.0, 1.0), (0.0, 0.0), (1.0, 0.0)):
            result = _clipped([tf.fill([3], value), tf.fill([2, 2], value)], bound)
            self.assertAllEqual(rounds.flat(result.update), np.zeros(7))
            self.assertEqual(float(result.discarded), 0)

    # Beyond 2e38 the norm is no float32.
    @parameterized.parameters(float("nan"), float("inf"), -float("inf"), 3.4e38)
    def test_one_bad_element_zeroes_the_whole_update(self, bad):
        parts = [np.ones([2, 3], np.float32), np.ones([4], np.float32)]
        parts[1][2] = parts[0][1, 1] = bad
        result = _clipped([tf.constant(v) for v in parts])
        self.assertAllEqual(rounds.flat(result.update), np.zeros(10))
        self.assertEqual(float(result.discarded), 1)
        self.assertEqual(float(result.clipped), 0)
        self.assertEqual(float(result.norm), 0)

    @parameterized.parameters("float16", "bfloat16", "float32", "float64")
    def test_keeps_dtypes(self, dtype):
        update = [tf.cast([3.0, 4.0], dtype)]
        result = _clipped(update)
        self.assertEqual(result.update[0].dtype, dtype)
        self.assertAllClose(tf.cast(result.update[0], "float64"), [0.6, 0.8], rtol=1e-2)
        bad = [tf.cast([3.0, float("nan")], dtype)]
        result = _clipped(bad)
        self.assertAllEqual(tf.cast(result.update[0], "float32"), [0, 0])
