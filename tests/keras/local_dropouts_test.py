"""Local noise where clients drop out: what is released, and what is charged."""

from __future__ import annotations

import math

import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import noise_test
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

_DELTA = 1e-3
_N, _CLIP, _Z = 5, noise_test.CLIP, noise_test.Z
_LOCAL = tfdp_fl.LocalDP(clip_norm=_CLIP, noise_multiplier=_Z)
_SECURE = {"secure_aggregation": AdditiveSecretSharing(max_share_value=1.0)}


def _trained(gone, rounds=2, **options):
    """Trains on empty clients, of whom the last cannot be read."""

    def read(client):
        if client >= _N - gone:
            raise OSError("switched off")
        return np.zeros([0, 1], np.float32), np.zeros([0], np.int32)

    spec = noise_test.empty_clients().element_spec
    clients = FederatedDataset.from_client_fn(range(_N), read, spec)
    fed = tfdp_fl.DPFederatedModel(
        noise_test.model(), _LOCAL, _N, "fixed_size", num_replicas=1, **options
    )
    loss = "sparse_categorical_crossentropy"
    fed.compile("sgd", loss, jit_compile=False)
    moves = noise_test.Moves()
    fed.fit(clients, rounds, verbose=0, callbacks=[moves])
    return fed, [[np.concatenate(each)] for each in moves.rounds]


class LocalDropoutsTest(parameterized.TestCase):
    def _assert_charged(self, fed, rounds=2):
        # Everybody who was drawn, as what they sent may have been seen.
        self.assertEqual(fed.spending.clients.participations.tolist(), [rounds] * _N)
        wanted = tfdp_fl.accounting.gaussian_epsilon(_Z / (2 * rounds**0.5), _DELTA)
        self.assertAlmostEqual(fed.epsilon(_DELTA), wanted, places=6)

    @parameterized.product(gone=(0, 1, 2), options=({}, _SECURE))
    def test_the_mean_of_those_who_answered_has_the_noise_of_each(self, gone, options):
        fed, moves = _trained(gone, **options)
        noise_test.assert_is_noise(moves, [_Z * _CLIP / (_N - gone) ** 0.5] * 2)
        self._assert_charged(fed)
        # The noise of those who are missing is missing too.
        self.assertEqual(math.isinf(fed.central_epsilon(_DELTA)), gone > 0)

    @parameterized.parameters(
        (_N, {}),
        (1, {"on_client_failure": "abort"}),
        (3, _SECURE),  # Two are no group.
    )
    def test_a_round_that_releases_nothing_is_charged(self, gone, options):
        fed, moves = _trained(gone, **options)
        for move in moves:
            np.testing.assert_array_equal(move[0], np.zeros_like(move[0]))
        self._assert_charged(fed)


if __name__ == "__main__":
    absltest.main()
