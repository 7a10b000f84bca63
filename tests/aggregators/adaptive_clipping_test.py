import numpy as np
import tensorflow_federated as tff
from absl.testing import absltest

from tfdp_fl import aggregators

VECTOR = tff.TensorType(np.float32, [2])


class AdaptiveClippingFactoryTest(absltest.TestCase):
    def test_clip_follows_tff_gaussian_adaptive_round_by_round(self):
        ours = aggregators.AdaptiveClippingFactory(
            noise_multiplier=0.0,
            clients_per_round=5,
            initial_clip_norm=0.4,
            target_quantile=0.7,
            clip_learning_rate=0.3,
        ).create(VECTOR)
        theirs = tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(
            noise_multiplier=0.0,
            clients_per_round=5.0,
            initial_l2_norm_clip=0.4,
            target_unclipped_quantile=0.7,
            learning_rate=0.3,
            clipped_count_stddev=0.0,
        ).create(VECTOR)
        rng = np.random.default_rng(0)
        our_state, their_state = ours.initialize(), theirs.initialize()
        clips = []
        for _ in range(6):
            scales = rng.lognormal(size=[5, 1])
            values = list((rng.normal(size=[5, 2]) * scales).astype("f4"))
            output = ours.next(our_state, values)
            expected = theirs.next(their_state, values)
            np.testing.assert_allclose(
                output.result, expected.result, rtol=1e-5, atol=1e-7
            )
            # TFF reports the clip of the next round, we that of this one.
            clips.append(output.measurements["clip_norm"])
            our_state, their_state = output.state, expected.state
            np.testing.assert_allclose(
                our_state.query_state.clip_norm,
                expected.measurements["dp_query_metrics"]["clip"],
                rtol=1e-5,
            )
        self.assertAlmostEqual(clips[0], 0.4, places=6)
        self.assertLen(set(clips), 6)


if __name__ == "__main__":
    absltest.main()
