from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl.engine import release


def _variable(value, name="kernel"):
    return tf.keras.Variable(value, name=name)


def _variables():
    return [_variable([1.0, 2.0]), _variable([[3.0]])]


_MEANS = [([0.5, -1.0], [[2.0]]), ([-0.25, 3.0], [[0.0]]), ([1.0, 0.5], [[-1.0]])]


class ServerOptimizerTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (None, 1.0, 0.0),
        (tf.keras.optimizers.SGD(0.5, momentum=0.9), 0.5, 0.9),
    )
    def test_fedavg_and_fedavgm(self, optimizer, rate, momentum):
        # The update rules of Reddi et al. (2021), Algorithm 2.
        variables = _variables()
        update = release.ServerUpdate(variables, [], optimizer)
        expected, steps = [v.numpy() for v in variables], [0.0, 0.0]
        for mean in _MEANS:
            update.apply([tf.constant(v) for v in mean])
            steps = [
                momentum * s + rate * np.array(v)
                for s, v in zip(steps, mean, strict=True)
            ]
            expected = [w + s for w, s in zip(expected, steps, strict=True)]
            for variable, wanted in zip(variables, expected, strict=True):
                self.assertAllClose(variable, wanted, rtol=1e-5)


class StateTest(tf.test.TestCase):
    def test_non_trainable_state_moves_by_the_mean(self):
        state = _variable([1.0, 1.0], "moving_mean")
        update = release.ServerUpdate(
            [_variable([0.0])], [state], tf.keras.optimizers.SGD(100.0)
        )
        update.apply([tf.constant([0.0]), tf.constant([0.5, -2.0])])
        self.assertAllClose(state, [1.5, -1.0])

    def test_noise_does_not_make_a_variance_negative(self):
        variance = _variable([1.0, 1.0], "moving_variance")
        with tf.name_scope("variance_head"):
            weight = _variable([1.0, 1.0])
        update = release.ServerUpdate([weight], [variance])
        change = tf.constant([-3.0, 1.0])
        update.apply([change, change])
        self.assertAllClose(variance, [0.0, 2.0])
        self.assertAllClose(weight, [-2.0, 2.0])
        update.replace([change, change])
        self.assertAllClose(variance, [0.0, 1.0])
        self.assertAllClose(weight, [-3.0, 1.0])
