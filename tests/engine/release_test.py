from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tfdp_fl.engine import release


def _variable(value, name="kernel"):
    return tf.keras.Variable(value, name=name)


_MEANS = [([0.5, -1.0], [[2.0]]), ([-0.25, 3.0], [[0.0]]), ([1.0, 0.5], [[-1.0]])]


@pytest.mark.parametrize(
    ("optimizer", "rate", "momentum"),
    [(None, 1.0, 0.0), (tf.keras.optimizers.SGD(0.5, momentum=0.9), 0.5, 0.9)],
)
def test_fedavg_and_fedavgm(optimizer, rate, momentum):
    # The update rules of Reddi et al. (2021), Algorithm 2.
    variables = [_variable([1.0, 2.0]), _variable([[3.0]])]
    update = release.ServerUpdate(variables, [], optimizer)
    expected, steps = [v.numpy() for v in variables], [0.0, 0.0]
    for mean in _MEANS:
        update.apply([tf.constant(v) for v in mean])
        steps = [
            momentum * s + rate * np.array(v) for s, v in zip(steps, mean, strict=True)
        ]
        expected = [w + s for w, s in zip(expected, steps, strict=True)]
        cohorts.assert_close([v.numpy() for v in variables], expected, rtol=1e-5)


def test_non_trainable_state_moves_by_the_mean():
    state = _variable([1.0, 1.0], "moving_mean")
    update = release.ServerUpdate(
        [_variable([0.0])], [state], tf.keras.optimizers.SGD(100.0)
    )
    update.apply([tf.constant([0.0]), tf.constant([0.5, -2.0])])
    cohorts.assert_close(state.numpy(), np.array([1.5, -1.0]))


def test_noise_does_not_make_a_variance_negative():
    variance = _variable([1.0, 1.0], "moving_variance")
    with tf.name_scope("variance_head"):
        weight = _variable([1.0, 1.0])
    update = release.ServerUpdate([weight], [variance])
    change = tf.constant([-3.0, 1.0])
    update.apply([change, change])
    cohorts.assert_close([*weight.numpy(), *variance.numpy()], [-2.0, 2.0, 0.0, 2.0])
    update.replace([change, change])
    cohorts.assert_close([*weight.numpy(), *variance.numpy()], [-3.0, 1.0, 0.0, 1.0])
