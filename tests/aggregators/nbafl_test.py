import numpy as np
import tensorflow_federated as tff
from absl.testing import absltest

from tests.mechanisms import references
from tfdp_fl import aggregators, mechanisms

SIZE = 40_000
VECTOR = tff.TensorType(np.float32, [2])
EXAMPLES = tff.TensorType(np.float32)


def factory(**options):
    arguments = {
        "epsilon": 1e9,
        "constant": 1.0,
        "weight_clip": 2.0,
        "clients_per_round": 2,
        "num_clients": 4,
        "rounds": 3,
    }
    return aggregators.NbAFLFactory(**{**arguments, **options})


class NbAFLFactoryTest(absltest.TestCase):
    def test_weighted_mean_of_clipped_weights(self):
        process = factory().create(VECTOR, EXAMPLES)
        self.assertTrue(process.is_weighted)
        values = [
            np.array([0, 8], np.float32),
            np.array([1, 0], np.float32),
            np.array([np.inf, 0], np.float32),
        ]
        output = process.next(process.initialize(), values, [10.0, 30.0, 5.0])
        np.testing.assert_allclose(output.result, [0.75, 0.5], atol=1e-4)
        self.assertEqual(output.measurements["discarded_clients"], 1)

    def test_a_round_without_anything_usable_fails(self):
        process = factory().create(VECTOR, EXAMPLES)
        state = process.initialize()
        for values, examples in (
            ([], []),
            ([np.ones(2, np.float32)], [0.0]),
            ([np.full(2, np.nan, np.float32)], [10.0]),
        ):
            with self.assertRaisesRegex(Exception, "nothing usable"):
                process.next(state, values, examples)

    def test_noise_of_both_channels(self):
        # As in noise_test.py: 3 % are 8.5 standard deviations of the estimate.
        mechanism = mechanisms.NbAFL(epsilon=10.0, constant=1.5, weight_clip=200.0)
        facts = {
            "clients_per_round": 2,
            "num_clients": 4,
            "rounds": 30,
            "min_examples": 10,
        }
        uplink = references.nbafl_uplink_sigma(200.0, 1.5, 30, 20, 10.0)
        # Two clients with 20 examples each: the mean has 1/sqrt(2) of it.
        expected = {False: uplink / 2**0.5}
        with_downlink = aggregators.NbAFLFactory(mechanism, **facts)
        downlink = with_downlink.downlink_noise_stddev
        self.assertAlmostEqual(
            downlink,
            2 * 1.5 * 200 * (30**2 - 2**2 * 4) ** 0.5 / (10 * 4 * 10),
            places=3,
        )
        expected[True] = (expected[False] ** 2 + downlink**2) ** 0.5
        for flag, stddev in expected.items():
            process = aggregators.NbAFLFactory(
                mechanism, downlink_noise=flag, **facts
            ).create(tff.TensorType(np.float32, [SIZE]), EXAMPLES)
            zeros = [np.zeros(SIZE, np.float32)] * 2
            result = process.next(process.initialize(), zeros, [20.0, 20.0]).result
            # The mean's elements are cut at +-200, some 4 sigma away.
            self.assertAlmostEqual(result.std() / stddev, 1, delta=0.03)


if __name__ == "__main__":
    absltest.main()
