import dp_accounting
import numpy as np
import tensorflow_federated as tff
import tensorflow_privacy as tfp
from absl.testing import absltest

import tfdp_fl
from tfdp_fl import aggregators, learning

VECTOR = tff.TensorType(np.float32, [2])
VALUES = [np.array(v, np.float32) for v in ([3, 0], [0, 0.5], [0.25, 0])]


class QueryFactoryTest(absltest.TestCase):
    def test_sum_query_gives_the_mean(self):
        event = dp_accounting.NonPrivateDpEvent()
        process = aggregators.QueryFactory(
            query=tfp.GaussianSumQuery(1.0, 0.0),
            dp_event=event,
            clients_per_round=3,
        ).create(VECTOR)
        values = [*VALUES, np.array([np.nan, 1], np.float32)]
        output = process.next(process.initialize(), values)
        np.testing.assert_allclose(output.result, [1.25 / 3, 0.5 / 3], rtol=1e-6)
        self.assertEqual(output.measurements["discarded_clients"], 1)

    def test_an_event_that_is_no_gaussian_stays_what_it_is(self):
        event = dp_accounting.LaplaceDpEvent(0.125)
        process = aggregators.QueryFactory(
            query=tfp.GaussianSumQuery(1.0, 1.0),
            dp_event=event,
            clients_per_round=[3, 2],
        ).create(VECTOR)
        state = process.next(process.initialize(), VALUES).state
        (charge,) = learning.privacy_charges(
            state,
            tfdp_fl.QueryMechanism(
                query=tfp.GaussianSumQuery(1.0, 1.0), dp_event=event
            ),
            sampling="poisson",
            num_clients=10,
            clients_per_round=[3, 2],
        )
        self.assertEqual(charge.event, event)

    def test_adaptive_query_keeps_its_state(self):
        def query():
            inner = tfp.QuantileAdaptiveClipSumQuery(
                initial_l2_norm_clip=1.0,
                noise_multiplier=0.0,
                target_unclipped_quantile=0.5,
                learning_rate=0.2,
                clipped_count_stddev=0.0,
                expected_num_records=3.0,
                geometric_update=True,
            )
            return tfp.NormalizedQuery(inner, denominator=3.0)

        event = dp_accounting.ComposedDpEvent(
            [
                dp_accounting.GaussianDpEvent(0.0),
                dp_accounting.NonPrivateDpEvent(),
            ]
        )
        ours = aggregators.QueryFactory(
            query=query(), dp_event=event, clients_per_round=3
        ).create(VECTOR)
        theirs = tff.aggregators.DifferentiallyPrivateFactory(query()).create(VECTOR)
        our_state, their_state = ours.initialize(), theirs.initialize()
        for _ in range(3):
            output = ours.next(our_state, VALUES)
            expected = theirs.next(their_state, VALUES)
            np.testing.assert_allclose(output.result, expected.result, rtol=1e-6)
            our_state, their_state = output.state, expected.state
        self.assertLess(output.measurements["clip_norm"], 1.0)


if __name__ == "__main__":
    absltest.main()
