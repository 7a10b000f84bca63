from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import stacks
from tfdp_fl.engine import server_update

_MEANS = [
    [np.float32([0.5, -1.0]), np.float32([[2.0]])],
    [np.float32([-0.25, 3.0]), np.float32([[0.0]])],
    [np.float32([1.0, 0.5]), np.float32([[-1.0]])],
]


def _variable(value, name="kernel"):
    """Returns a variable as this Keras's optimizers take them."""
    make = tf.keras.Variable if stacks.KERAS_3 else tf.Variable
    return make(value, name=name)


def _variables():
    return [_variable([1.0, 2.0]), _variable([[3.0]])]


def _moved(optimizer):
    """Returns the variables after each of three mean updates."""
    variables = _variables()
    update = server_update.ServerUpdate(variables, [], optimizer)
    seen = []
    for mean in _MEANS:
        update.apply([tf.constant(v) for v in mean])
        seen.append([v.numpy() for v in variables])
    return seen


class ServerOptimizerTest(tf.test.TestCase, parameterized.TestCase):
    """Against the update rules of Reddi et al. (2021), Algorithm 2."""

    def _assert_moves(self, optimizer, rule):
        state, expected = None, [v.numpy() for v in _variables()]
        for mean, actual in zip(_MEANS, _moved(optimizer), strict=True):
            steps, state = rule(mean, state)
            expected = [w + s for w, s in zip(expected, steps, strict=True)]
            for one, other in zip(actual, expected, strict=True):
                self.assertAllClose(one, other, rtol=1e-5)

    def test_fedavg(self):
        self._assert_moves(None, lambda mean, _: (mean, None))

    def test_a_server_learning_rate(self):
        self._assert_moves(
            tf.keras.optimizers.SGD(0.3),
            lambda mean, _: ([0.3 * v for v in mean], None),
        )

    @parameterized.parameters(
        (tf.keras.optimizers.SGD(0.5, momentum=0.9),),
        *(
            (each,)
            for each in stacks.legacy_optimizers(
                lambda legacy: legacy.SGD(0.5, momentum=0.9)
            )
        ),
    )
    def test_fedavgm(self, optimizer):
        def rule(mean, momentum):
            momentum = momentum or [0.0, 0.0]
            momentum = [0.9 * m + 0.5 * v for m, v in zip(momentum, mean, strict=True)]
            return momentum, momentum

        self._assert_moves(optimizer, rule)

    def test_fedadam(self):
        def rule(mean, state):
            t, first, second = state or (0, [0.0, 0.0], [0.0, 0.0])
            t += 1
            first = [0.9 * m + 0.1 * v for m, v in zip(first, mean, strict=True)]
            second = [0.99 * s + 0.01 * v**2 for s, v in zip(second, mean, strict=True)]
            steps = [
                0.1
                * (m / (1 - 0.9**t))
                / (np.sqrt(s / (1 - 0.99**t)) + 1e-3 / np.sqrt(1 - 0.99**t))
                for m, s in zip(first, second, strict=True)
            ]
            return steps, (t, first, second)

        self._assert_moves(tf.keras.optimizers.Adam(0.1, 0.9, 0.99, epsilon=1e-3), rule)


class StateTest(tf.test.TestCase):
    def test_non_trainable_state_moves_by_the_mean(self):
        state = _variable([1.0, 1.0], "moving_mean")
        update = server_update.ServerUpdate(
            [_variable([0.0])], [state], tf.keras.optimizers.SGD(100.0)
        )
        update.apply([tf.constant([0.0]), tf.constant([0.5, -2.0])])
        self.assertAllClose(state, [1.5, -1.0])

    def test_noise_does_not_make_a_variance_negative(self):
        variance = _variable([1.0, 1.0], "moving_variance")
        with tf.name_scope("variance_head"):
            weight = _variable([1.0, 1.0])
        update = server_update.ServerUpdate([weight], [variance])
        change = tf.constant([-3.0, 1.0])
        update.apply([change, change])
        self.assertAllClose(variance, [0.0, 2.0])
        self.assertAllClose(weight, [-2.0, 2.0])
        update.replace([change, change])
        self.assertAllClose(variance, [0.0, 1.0])
        self.assertAllClose(weight, [-3.0, 1.0])

    def test_an_optimizers_slots_are_there_for_checkpoints(self):
        variables = _variables()
        update = server_update.ServerUpdate(
            variables, [], tf.keras.optimizers.Adam(0.1)
        )
        before = len(update.state)
        update.apply([tf.constant(v) for v in _MEANS[0]])
        self.assertLen(update.state, before)
        self.assertGreaterEqual(before, 5)
        self.assertEmpty(server_update.ServerUpdate(variables, []).state)


if __name__ == "__main__":
    tf.test.main()
