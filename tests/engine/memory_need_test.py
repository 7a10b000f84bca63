"""Before the first round it is said that memory will not do."""

from __future__ import annotations

from unittest import mock

from absl.testing import absltest

import tfdp_fl
from tests.keras import toy
from tfdp_fl.engine import devices


def _check(free, **changes):
    values = {
        "elements": 10**6,
        "clients_per_round": 100.0,
        "num_replicas": 2,
        "collects": True,
        "mechanism": "MedianClipping",
        **changes,
    }
    with mock.patch.object(devices, "available_bytes", lambda: free):
        devices.check_memory(**values)


class MemoryNeedTest(absltest.TestCase):
    def test_what_fits_is_silent(self):
        # 2 replicas of 16 MB, and 100 updates of 4 MB.
        _check(432e6)
        _check(32e6, collects=False)
        _check(float("inf"), elements=10**15)

    def test_what_does_not_says_what_to_lower(self):
        with self.assertRaisesRegex(
            ValueError, "clients_per_round must be at most 99.*0.4 GiB are free"
        ):
            _check(431e6)
        with self.assertRaisesRegex(ValueError, "num_replicas must be lower"):
            _check(31e6, collects=False)
        with self.assertRaisesRegex(ValueError, "num_replicas must be lower"):
            _check(31e6)

    def test_this_machine_tells(self):
        self.assertGreater(devices.available_bytes(), 1e6)

    def test_before_anything_of_a_training_begins(self):
        fed = toy.federated(tfdp_fl.MedianClipping(noise_multiplier=1.0))
        with (
            mock.patch.object(devices, "available_bytes", lambda: 1000.0),
            self.assertRaisesRegex(ValueError, "at most 5, or the model"),
        ):
            fed.fit(toy.clients(), verbose=0)
        self.assertEqual(fed.rounds, 0)
        self.assertIsNone(fed.run)


if __name__ == "__main__":
    absltest.main()
