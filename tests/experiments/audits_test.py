"""An audit from settings: its files, and that it finds what is broken."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
from absl.testing import absltest

from tests.keras import files
from tfdp_fl import auditing
from tfdp_fl.experiments import audits, training
from tfdp_fl.experiments.settings import Settings
from tfdp_fl.mechanisms import noise


def _run(folder, **options):
    prepared = training.prepare(
        Settings(
            dataset="digits",
            num_clients=40,
            clients_per_round=20,
            hidden_units="64",
            mechanism="fixed",
            sampling="shuffled",
            noise_multiplier="3",
            rounds=2,
            **options,
        )
    )
    return audits.run(prepared, auditing.CanaryAudit(1000), folder, verbose=0)


class AuditsTest(absltest.TestCase):
    def test_leaves_json_and_a_picture(self):
        folder = files.directory(self)
        result = _run(folder)
        self.assertFalse(result["above_the_claim"])
        self.assertLessEqual(result["low"], result["estimate"])
        said = json.loads((folder / audits.RESULT).read_text())
        self.assertEqual(said["claimed"], result["claimed"])
        self.assertEqual(said["num_canaries"], 1000)
        self.assertGreater((folder / audits.CHART).stat().st_size, 5000)

    def test_noise_that_is_left_out_is_above_the_claim(self):
        add = noise.add_normal
        with mock.patch.object(
            noise, "add_normal", lambda update, stddev: add(update, stddev / 9)
        ):
            result = _run(files.directory(self))
        self.assertTrue(result["above_the_claim"])

    def test_scores_in_standard_deviations(self):
        known = auditing.Scores(observed=np.array([1.0, 3.0]), null_std=0.5)
        self.assertEqual(audits.standardized(known)[0].tolist(), [2.0, 6.0])
        self.assertIsNone(audits.standardized(known)[1])
        others = np.array([1.0, 2.0, 3.0])
        one, other = audits.standardized(
            auditing.Scores(observed=np.array([4.0]), unobserved=others)
        )
        self.assertEqual((one[0], other.std(ddof=1)), (2.0, 1.0))


if __name__ == "__main__":
    absltest.main()
