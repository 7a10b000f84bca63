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

    def test_hparams_are_those_of_the_inner_optimizer(self):
        inner = tff.learning.optimizers.build_sgdm(0.1)
        optimizer = nbafl.ProximalOptimizer(inner, 0.5)
        state = optimizer.initialize(tf.TensorSpec([], tf.float32))
        hparams = optimizer.get_hparams(state)
        self.assertEqual(
            hparams, inner.get_hparams(inner.initialize(tf.TensorSpec([])))
        )
        hparams["learning_rate"] = 0.3
        state = optimizer.set_hparams(state, hparams)
        self.assertEqual(optimizer.get_hparams(state)["learning_rate"], 0.3)


if __name__ == "__main__":
    absltest.main()
