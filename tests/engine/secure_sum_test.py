"""What a client hands in to secure aggregation, and what comes of it."""

from __future__ import annotations

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.engine import cohorts
from tfdp_fl import secure_aggregation
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import RoundInputs, secure_sum

_CLIP = 1e-4


def _collected(mechanism, noise_multiplier, sizes=(7, 3, 5)):
    dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays(sizes=sizes))
    engine = cohorts.make_engine(
        cohorts.mlp(), dataset, mechanism=mechanism, collect_records=True
    )
    inputs = RoundInputs(
        round_index=0,
        positions=np.arange(len(sizes)),
        clients_per_round=float(len(sizes)),
        noise_multiplier=noise_multiplier,
        batch_size=2,
        local_epochs=1,
        learning_rate=0.1,
        seed=np.array([3, 4]),
    )
    return engine, engine.collect(dataset, inputs)


class SumSecurelyTest(parameterized.TestCase):
    def _sent(self, mechanism, protocol, noise_multiplier=0.0):
        """Returns the vectors that a cohort sends, as they are on the grid."""
        engine, pending = _collected(mechanism, noise_multiplier)
        sent = []
        really = secure_aggregation.sum_in_groups

        def spy(updates, protocol, group_size=None, *, num_members=None):
            rows = updates
            if callable(updates):
                rows = [updates(index) for index in range(num_members)]
            sent.extend(protocol.decode(protocol.encode(row)) for row in rows)
            return really(rows, protocol, group_size)

        with mock.patch.object(secure_sum.secure_aggregation, "sum_in_groups", spy):
            failed = secure_sum.sum_securely(engine, pending, protocol)
        self.assertEqual(failed, ())
        return sent

    @parameterized.product(
        mechanism=(
            tfdp_fl.FixedClipping(clip_norm=_CLIP, noise_multiplier=1.0),
            tfdp_fl.AdaptiveClipping(
                initial_clip_norm=_CLIP,
                noise_multiplier=1.0,
                count_noise_stddev=1.0,
            ),
        ),
        bits=(32, 64),
    )
    def test_is_within_the_clip_where_the_server_adds_the_noise(self, mechanism, bits):
        # The grid of 32 bits has steps of 7.6e-6: rounded to the nearest, 51
        # coordinates may be up to 27 % longer than this clip.
        protocol = secure_aggregation.AdditiveSecretSharing(bits=bits)
        sent = self._sent(mechanism, protocol, 1.0)
        self.assertLen(sent, 3)
        scalars = len(mechanism.released_sums) + 1
        for vector in sent:
            norm = np.linalg.norm(vector[:-scalars])
            self.assertBetween(norm, 0.5 * _CLIP, _CLIP)
            self.assertEqual(vector[-1], 1.0)

    def test_a_discarded_client_is_not_in_the_mean_of_those_that_answered(self):
        mechanism = tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1e-3)
        engine, pending = _collected(mechanism, 1e-3, sizes=(7, 3, 5, 4))
        ((members, rows),) = pending.collected
        updates = rows.updates.numpy()
        updates[1] = 1e30
        pending.collected = [(members, rows._replace(updates=tf.constant(updates)))]
        protocol = secure_aggregation.AdditiveSecretSharing()
        with self.assertWarnsRegex(UserWarning, "were discarded"):
            self.assertEqual(secure_sum.sum_securely(engine, pending, protocol), ())
        (total,) = pending.sums
        self.assertAlmostEqual(float(total.contribution.weight), 3.0, places=5)
        self.assertEqual(pending.without_noise, 1)
        others = np.delete(updates, 1, axis=0).sum(axis=0)
        got = np.concatenate([np.ravel(part) for part in total.contribution.update])
        np.testing.assert_allclose(got, others, atol=1e-5)

    def test_a_cohort_that_cannot_be_split_has_failed(self):
        # As when one of six drops out and groups have three members.
        protocol = secure_aggregation.AdditiveSecretSharing(
            min_participants=3, max_participants=4
        )
        engine, pending = _collected(tfdp_fl.NoPrivacy(), 0.0, sizes=(7, 3, 5, 1, 2))
        with self.assertWarnsRegex(UserWarning, "can not be split"):
            failed = secure_sum.sum_securely(engine, pending, protocol)
        self.assertEqual(failed, (0, 1, 2, 3, 4))

    def test_the_median_clips_what_is_sent(self):
        protocol = secure_aggregation.AdditiveSecretSharing(bits=32)
        sent = self._sent(tfdp_fl.MedianClipping(noise_multiplier=1.0), protocol, 1.0)
        norms = sorted(np.linalg.norm(vector[:-1]) for vector in sent)
        self.assertGreater(norms[0], 0.0)
        self.assertGreater(norms[2], norms[0])
        # Two of three are as long as the median, up to what is rounded off.
        self.assertAlmostEqual(norms[1] / norms[2], 1.0, places=3)

    def test_a_grid_that_is_too_coarse_is_refused(self):
        coarse = secure_aggregation.AdditiveSecretSharing(bits=32, max_share_value=1e8)
        with self.assertRaisesRegex(ValueError, "bits and the weight.*bits=64"):
            self._sent(tfdp_fl.NoPrivacy(), coarse)
        mechanism = tfdp_fl.FixedClipping(
            clip_norm=1e-5, noise_multiplier=1.0, noise_site="client"
        )
        with self.assertRaisesRegex(ValueError, "noise on its update"):
            self._sent(
                mechanism,
                secure_aggregation.AdditiveSecretSharing(bits=32),
                1.0,
            )
