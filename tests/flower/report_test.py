"""What has to be read together with epsilon."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.flower import flower_messages as fm
from tfdp_fl import accounting
from tfdp_fl.flower import PrivateStrategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfTheUser(tfdp_fl.FixedClipping):
    """A mechanism that has something to say of itself, and of this clip."""

    own_caveats: ClassVar[dict[str, str]] = {
        "clip_by_the_moon": "The clip norm was chosen by the moon."
    }

    def caveats(self):
        return ("clip_by_the_moon", "clients_excluded")


class CaveatsOfTheMechanismTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("median", tfdp_fl.MedianClipping(noise_multiplier=1.0)),
        (
            "classic",
            tfdp_fl.LocalDP(
                clip_norm=1.0, epsilon=4.0, delta=1e-5, calibration="classic"
            ),
        ),
        ("of_the_user", _OfTheUser(clip_norm=1.0, noise_multiplier=1.0)),
        (
            "correlated",
            tfdp_fl.CorrelatedNoise(
                clip_norm=1.0, noise_multiplier=1.0, rounds=3, min_separation=2
            ),
        ),
    )
    def test_the_report_has_them_all_in_the_statements_words(self, mechanism):
        grid = fm.Grid({i: fm.adds([np.ones(2)]) for i in range(6)})
        strategy = PrivateStrategy(
            fm.Strategy(3),
            mechanism,
            num_clients=6,
            clients_per_round=3,
            rounds=3,
        )
        fm.a_round(strategy, grid, fm.model(np.zeros(2)))
        said = strategy.privacy_report(1e-5)["caveats"]
        self.assertNotEmpty(mechanism.caveats())
        for key in mechanism.caveats():
            self.assertEqual(said.count(accounting.CAVEATS[key]), 1, key)

    def test_a_private_median_needs_no_caveat(self):
        strategy = PrivateStrategy(
            fm.Strategy(3),
            tfdp_fl.MedianClipping(noise_multiplier=1.0, median_noise_multiplier=1.0),
            num_clients=6,
            clients_per_round=3,
        )
        said = strategy.privacy_report(1e-5)["caveats"]
        self.assertNotIn(accounting.CAVEATS["exact_median"], said)


if __name__ == "__main__":
    absltest.main()
