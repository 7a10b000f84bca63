import numpy as np
import tensorflow_federated as tff
from absl.testing import absltest

from tfdp_fl import aggregators

VALUE = tff.types.to_type([(np.float32, [2]), (np.float32, [2])])
INDEX = tff.TensorType(np.int32)


def value(first, second):
    return [np.array([first, 0], np.float32), np.array([0, second], np.float32)]


def factory(**options):
    # A budget that leaves noise of about 1e-5 of a radius.
    arguments = {
        "epsilon": 1e10,
        "delta": 1e-5,
        "rounds": 4,
        "clients_per_round": 2,
        "num_clients": 3,
        "clipping_radius": 10.0,
        "window": 2,
    }
    return aggregators.WindowedAdaptiveLocalDPFactory(**{**arguments, **options})


class WindowedAdaptiveLocalDPFactoryTest(absltest.TestCase):
    def test_signature(self):
        process = factory().create(VALUE, INDEX)
        self.assertTrue(process.is_weighted)
        state_type = process.initialize.type_signature.result.member
        self.assertEqual(
            state_type.query_state.windows,
            tff.TensorType(np.float32, [3, 2, 2]),
        )
        self.assertEqual(
            process.next.type_signature.result.result,
            tff.FederatedType(VALUE, tff.SERVER),
        )

    def test_radius_is_the_mean_of_the_clients_own_window(self):
        process = factory().create(VALUE, INDEX)
        state = process.initialize()

        # Nobody has a window: the radius is clipping_radius.
        output = process.next(state, [value(1, 20), value(4, 2)], [0, 2])
        np.testing.assert_allclose(output.result[0], [2.5, 0], atol=0.02)
        np.testing.assert_allclose(output.result[1], [0, 6], atol=0.02)
        windows = output.state.query_state.windows
        np.testing.assert_allclose(windows[0, 1], [1, 20])
        np.testing.assert_allclose(windows[2, 1], [4, 2])
        self.assertTrue(np.isnan(windows[1]).all())

        # Client 0 is cut to its own last norms (1 and at most 10), client 1
        # is new. Client 2 sits out, and its window waits.
        output = process.next(output.state, [value(3, 30), value(5, 5)], [0, 1])
        np.testing.assert_allclose(output.result[0], [3, 0], atol=0.02)
        np.testing.assert_allclose(output.result[1], [0, 7.5], atol=0.02)

        # A window of two: client 0 now has the mean of 1 and 3.
        output = process.next(output.state, [value(9, 0)], [0])
        np.testing.assert_allclose(output.result[0], [2, 0], atol=0.02)
        windows = output.state.query_state.windows
        np.testing.assert_allclose(windows[0], [[3, 30], [9, 0]])
        np.testing.assert_allclose(windows[2, 1], [4, 2])

        # A client that is discarded leaves no norm behind.
        output = process.next(output.state, [value(np.nan, 1)], [2])
        self.assertEqual(output.measurements["discarded_clients"], 1)
        np.testing.assert_allclose(output.state.query_state.windows[2, 1], [4, 2])
        with self.assertRaisesRegex(Exception, "client index"):
            process.next(output.state, [value(1, 1)], [3])

    def test_index_is_an_integer(self):
        with self.assertRaisesRegex(TypeError, "weight_type"):
            factory().create(VALUE, tff.TensorType(np.float32))


if __name__ == "__main__":
    absltest.main()
