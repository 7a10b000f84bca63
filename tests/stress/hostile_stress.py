"""Every mechanism, on every way to train, attacked in every way by one client.

`tests/keras/hostile.py` says how far that client may get, and why. Ways that
need a network or TFF are in files of their own.
"""

from __future__ import annotations

import importlib.util
import time
import unittest

from absl.testing import absltest, parameterized

from tests.keras import hostile, hostile_test
from tests.stress import counts

_TFF = importlib.util.find_spec("tensorflow_federated")


class HostileClientTest(parameterized.TestCase):
    def _attack(self, way, runtime=None):
        tries, started = 0, time.time()
        for case in hostile.CASES.values():
            trainer = hostile.Trainer(case, way, runtime)
            without = trainer.without()
            for attack in hostile.ATTACKS:
                hostile_test.check_attack(self, trainer, without, attack)
                tries += 1
            if not way.startswith("streamed"):
                continue
            for failure in hostile.FAILURES:
                hostile_test.check_failure(self, trainer, without, failure)
                tries += 1
        counts.held(
            "A hostile client moves a mean by at most S/m, ends nothing and is "
            f"counted; {len(hostile.CASES)} mechanisms ({way})",
            tries,
            "attacks",
            time.time() - started,
        )

    @parameterized.parameters(*hostile.WAYS)
    def test_in_this_process(self, way):
        self._attack(way)

    @unittest.skipIf(_TFF is None, "TensorFlow Federated is not installed.")
    def test_on_tff_workers(self):
        from tfdp_fl import runtimes

        with runtimes.TFFWorkers(num_workers=2) as workers:
            self._attack("tff_workers", workers)


if __name__ == "__main__":
    absltest.main()
