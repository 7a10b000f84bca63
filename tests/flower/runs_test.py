"""Flower 1.42 as its users run it, on loopback, with Keras clients."""

from __future__ import annotations

import importlib.util
import tempfile
import unittest

from absl.testing import absltest

from tests.flower import flower_messages as fm
from tests.flower import flower_processes


@unittest.skipUnless(fm.INSTALLED, fm.WHY_NOT)
class RunsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enter_context(
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        )

    @unittest.skipUnless(
        importlib.util.find_spec("ray"), "Flower's simulation needs ray"
    )
    def test_flwr_run_simulates(self):
        with flower_processes.Federation(self.folder, True) as federation:
            report = federation.run(
                federation=(
                    "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2"
                ),
                hostile="nan@2=1",
            )
        self.assertEqual(report["replies"], {"1": 4, "2": 4, "3": 4})
        self.assertEqual(report["charged"], [4, 4, 4])
        self.assertEqual(report["rejected"], 0)
        self.assertGreater(report["accuracy"], 0.3)
        self.assertNotEqual(report["clip_norm"], 1.0)

    def test_a_superlink_with_two_supernodes(self):
        with flower_processes.Federation(self.folder, False) as federation:
            for number in range(2):
                federation.add_node(number, of=2)
            report = federation.run(
                num_clients=2,
                clients_per_round=2,
                num_rounds=2,
                mechanism="fixed",
                noise_multiplier=0.001,
                # One sends a NaN, past the mod; then it drops out, and the
                # other claims, past the mod, a thousand million examples.
                hostile="nan@1=0 bare@1=0 gone@2=0 heavy@2=1 bare@2=1",
            )
        self.assertEqual(report["replies"], {"1": 2, "2": 1})
        self.assertEqual((report["discarded"], report["rejected"]), (1, 0))
        # S / m twice, whatever the other client sends, and noise of 0.04.
        self.assertBetween(report["norm"], 0.5, 1.05)
        self.assertFalse(report["tensorflow"])


if __name__ == "__main__":
    absltest.main()
