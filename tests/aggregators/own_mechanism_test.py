"""A mechanism from outside of the package as a TFF aggregation factory."""

from __future__ import annotations

import numpy as np
import tensorflow_federated as tff
from absl.testing import absltest

from tests.mechanisms import rounds
from tests.outside.loading import smooth_clipping
from tfdp_fl import aggregators, mechanisms


class OwnMechanismTest(absltest.TestCase):
    def test_is_what_its_query_computes(self):
        mechanism = smooth_clipping()(noise_multiplier=0.0)
        process = aggregators.from_mechanism(mechanism, 3).create(
            tff.TensorType(np.float32, [4])
        )
        values = [np.full([4], v, np.float32) for v in (0.1, 1.0, 50.0)]
        state = process.initialize()
        query = mechanism.bind(mechanisms.Deployment(clients_per_round=3))
        query_state = query.initial_global_state()
        for _ in range(2):
            output = process.next(state, values)
            done = rounds.run_round(query, query_state, [[v] for v in values])
            np.testing.assert_allclose(output.result, done.mean[0], rtol=1e-5)
            state, query_state = output.state, done.next_state
            np.testing.assert_allclose(
                state.query_state.clip_norm, query_state.clip_norm, rtol=1e-5
            )


if __name__ == "__main__":
    absltest.main()
