"""Events as data."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl.accounting import events

_G = dp_accounting.GaussianDpEvent


class EventsTest(parameterized.TestCase):
    def test_gaussians_of_one_round_are_one_gaussian(self):
        event = dp_accounting.ComposedDpEvent(
            [_G(2.0), dp_accounting.SelfComposedDpEvent(_G(3.0), 4)]
        )
        expected = (2.0**-2 + 4 * 3.0**-2) ** -0.5
        self.assertAlmostEqual(events.noise_multiplier_of(event), expected, places=14)

    def test_adaptive_clipping_s_two_releases_cost_z(self):
        z, sigma_b = 1.0, 2.5
        z_delta = (z**-2 - (2 * sigma_b) ** -2) ** -0.5
        event = dp_accounting.ComposedDpEvent([_G(z_delta), _G(2 * sigma_b)])
        self.assertAlmostEqual(events.noise_multiplier_of(event), z, places=14)

    @parameterized.parameters(
        (dp_accounting.NonPrivateDpEvent(), 0.0),
        (dp_accounting.ComposedDpEvent([_G(1.0), _G(0.0)]), 0.0),
        (dp_accounting.LaplaceDpEvent(0.0), 0.0),
        (dp_accounting.NoOpDpEvent(), math.inf),
        (dp_accounting.ComposedDpEvent([]), math.inf),
        (dp_accounting.LaplaceDpEvent(1.0), None),
        (
            dp_accounting.ComposedDpEvent([_G(1.0), dp_accounting.LaplaceDpEvent(1.0)]),
            None,
        ),
    )
    def test_extremes_and_others(self, event, expected):
        self.assertEqual(events.noise_multiplier_of(event), expected)

    def test_json_is_exact_and_hashable(self):
        event = dp_accounting.ComposedDpEvent(
            [
                _G(np.float64(0.1) + 0.2),
                dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
                    np.float32(1.5), [0.0, 1.0], [0.25, 0.75]
                ),
            ]
        )
        event = events.normalised(event)
        again = events.event_from_dict(events.event_to_dict(event))
        self.assertEqual(again, event)
        self.assertEqual(hash(again), hash(event))
        self.assertEqual(again.events[0].noise_multiplier, 0.1 + 0.2)

    def test_nothing_but_dp_accounting_s_events_is_made(self):
        for name in ("os", "NeighboringRelation", "NoSuchDpEvent"):
            with self.assertRaisesRegex(ValueError, name):
                events.event_from_dict({"type": name})

    def test_what_is_no_event_is_refused(self):
        with self.assertRaisesRegex(TypeError, "event"):
            events.normalised(1.0)
        with self.assertRaisesRegex(ValueError, "NaN"):
            events.normalised(_G(math.nan))


if __name__ == "__main__":
    absltest.main()
