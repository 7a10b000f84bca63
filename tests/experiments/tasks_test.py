"""The experiments' models."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl.experiments import tasks


class ModelsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(((36,),), ((6, 6, 1),))
    def test_pooled_images_keep_their_norm(self, shape):
        model = tasks.mlp(shape, 10, (7,), pooling=2)
        self.assertEqual(model.count_params(), (9 + 1) * 7 + 8 * 10)
        before = tf.keras.Model(model.inputs, model.layers[-3].output)
        blocks = np.kron(np.arange(9.0).reshape(3, 3), np.ones((2, 2)))
        pooled = before(blocks.reshape(1, *shape))
        self.assertAllClose(pooled, [2 * np.arange(9.0)])
        self.assertAllClose(tf.norm(pooled), np.linalg.norm(blocks))

    def test_pooling_refuses_what_is_no_image(self):
        with self.assertRaisesRegex(ValueError, "pooling must be given image"):
            tasks.mlp((50,), 10, (), pooling=2)

    @parameterized.parameters(((784,),), ((28, 28, 1),))
    def test_cnn(self, shape):
        model = tasks.cnn(shape, 10, (512,))
        # McMahan et al. (2017), section 3: 1,663,370 parameters.
        self.assertEqual(model.count_params(), 1_663_370)
        self.assertEqual(model(tf.zeros([2, *shape])).shape, (2, 10))

    def test_lstm_does_not_count_padding(self):
        model = tasks.lstm(11, (6,))
        model.compile(
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        x = np.array([[3, 4, 5, 0, 0]])
        one, other = (
            model.evaluate(x, np.array([[4, 5, 6, pad, pad]]), verbose=0)
            for pad in (0, 7)
        )
        self.assertAllClose(one, other)
        unlike = model.evaluate(x, np.array([[4, 5, 9, 0, 0]]), verbose=0)
        self.assertNotAllClose(one, unlike)
