import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from absl.testing import absltest

from tfdp_fl.learning import nbafl


class ProximalOptimizerTest(absltest.TestCase):
    def test_pulls_towards_what_was_received(self):
        rate, mu = 0.1, 0.5
        optimizer = nbafl.ProximalOptimizer(
            tff.learning.optimizers.build_sgdm(rate), mu
        )
        received = np.array([1.0, -2.0], np.float32)
        weights = (tf.constant(received),)
        state = optimizer.initialize((tf.TensorSpec([2], tf.float32),))
        expected = received.copy()
        for gradient in ([1.0, 1.0], [0.0, 0.0], [0.5, -1.0]):
            state, weights = optimizer.next(state, weights, (tf.constant(gradient),))
            pull = mu * (expected - received)
            expected = expected - rate * (np.array(gradient) + pull)
        np.testing.assert_allclose(weights[0], expected, rtol=1e-6)
