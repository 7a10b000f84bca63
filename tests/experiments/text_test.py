"""Text from a character model."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tfdp_fl import datasets
from tfdp_fl.experiments import models, text

_VOCABULARY = datasets.shakespeare_vocabulary()


class _Next(tf.keras.layers.Layer):
    """Says that each character is followed by the one after it."""

    def call(self, ids):
        return 20.0 * tf.one_hot(ids + 1, len(_VOCABULARY))


class _Padding(tf.keras.layers.Layer):
    """Says that everything is padding, or unknown, and `a` the likeliest."""

    def call(self, ids):
        a = datasets.encode_text("a")[0]
        row = tf.one_hot([0, 1], len(_VOCABULARY), 50.0, 0.0)
        row = tf.reduce_sum(row, 0) + tf.one_hot(a, len(_VOCABULARY))
        return row + 0.0 * tf.one_hot(ids, len(_VOCABULARY))


def _model(layer):
    return tf.keras.Sequential([tf.keras.Input((None,), dtype=tf.int32), layer()])


class SampleTextTest(absltest.TestCase):
    def test_follows_the_model(self):
        for temperature in (0.0, 0.3):
            written = text.sample_text(
                _model(_Next), "A", 5, temperature=temperature, seed=1
            )
            self.assertEqual(written, "ABCDEF")

    def test_writes_characters_only(self):
        model = _model(_Padding)
        self.assertEqual(text.sample_text(model, "b", 3, temperature=0), "baaa")
        self.assertLen(text.sample_text(model, "b", 30, temperature=9), 31)

    def test_draws_from_the_softmax(self):
        # All 65 characters are as likely at a high temperature: 6500 draws
        # leave one of them out with probability 65 exp(-100).
        model = _model(_Padding)
        written = text.sample_text(model, "b", 6500, temperature=1e6, seed=2)
        counts = np.bincount(datasets.encode_text(written), minlength=67)
        self.assertEqual(counts[:2].tolist(), [0, 0])
        # Six standard deviations of 9.9; by chance 2e-7 for all of them.
        np.testing.assert_allclose(counts[2:], 100, atol=60)

    def test_seed_and_context(self):
        tf.keras.utils.set_random_seed(3)
        model = models.lstm(len(_VOCABULARY), (4,))
        first = text.sample_text(model, "The ", 20, seed=4, temperature=1)
        again = text.sample_text(model, "The ", 20, seed=4, temperature=1)
        other = text.sample_text(model, "The ", 20, seed=5, temperature=1)
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)
        # What is further back than the context is not looked at.
        short, long = (
            text.sample_text(model, prompt, 9, seed=4, context=2)
            for prompt in ("ab", "xyzab")
        )
        self.assertEqual(short[2:], long[5:])

    def test_refusals(self):
        model = models.lstm(len(_VOCABULARY), (4,))
        for name, arguments in (
            ("prompt", {"prompt": ""}),
            ("length", {"length": -1}),
            ("temperature", {"temperature": -0.1}),
            ("context", {"context": 0}),
            ("model", {"model": models.lstm(5, (4,))}),
        ):
            with self.subTest(name), self.assertRaisesRegex(ValueError, name):
                text.sample_text(**{"model": model, "prompt": "a", **arguments})


if __name__ == "__main__":
    absltest.main()
