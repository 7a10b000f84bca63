import numpy as np
import tensorflow_federated as tff
from absl.testing import absltest

from tfdp_fl import aggregators

VECTOR = tff.TensorType(np.float32, [2])


class SecureSumTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        # TFF 0.87 runs its secure sums only there.
        context = tff.framework.get_context_stack().current
        self.addCleanup(tff.framework.set_default_context, context)
        tff.backends.test.set_sync_test_cpp_execution_context()

    def test_sums_records_securely(self):
        process = aggregators.AdaptiveClippingFactory(
            noise_multiplier=0.0,
            clients_per_round=2,
            initial_clip_norm=1.0,
            noise_site="client",
            inner_factory=tff.aggregators.SecureSumFactory(4.0, -4.0),
            scalars_factory=tff.aggregators.SecureSumFactory(64.0, -64.0),
        ).create(VECTOR)
        values = [np.array(v, np.float32) for v in ([3, 0], [0, 0.5])]
        output = process.next(process.initialize(), values)
        np.testing.assert_allclose(output.result, [0.5, 0.25], atol=1e-5)
        self.assertEqual(output.measurements["cohort_size"], 2)
        self.assertAlmostEqual(output.measurements["mean_update_norm"], 1.75, places=4)
        # One of two was not clipped, which is the target: the clip stays.
        self.assertAlmostEqual(output.state.query_state.clip_norm, 1.0, places=5)
        self.assertIn("inner", output.measurements)


if __name__ == "__main__":
    absltest.main()
