"""What one round costs, by the table of samplings."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_fl.accounting import charge as charge_lib

_G = dp_accounting.GaussianDpEvent


def _charge(sampling="poisson", n=1000, m=100, event=None, **place):
    return charge_lib.RoundCharge(
        sampling=sampling,
        num_clients=n,
        clients_per_round=m,
        event=_G(1.0) if event is None else event,
        **place,
    )


class RoundChargeTest(parameterized.TestCase):
    def test_poisson(self):
        charge = _charge()
        expected = dp_accounting.PoissonSampledDpEvent(0.1, _G(1.0))
        self.assertEqual(charge.dp_event("rdp"), expected)
        self.assertEqual(charge.dp_event("pld"), expected)
        self.assertEqual(charge.relation.name, "ADD_OR_REMOVE_ONE")

    def test_poisson_with_everybody_is_a_plain_gaussian(self):
        self.assertEqual(_charge(m=1000).dp_event(), _G(1.0))
        self.assertEqual(_charge(m=2000.5).dp_event(), _G(1.0))

    def test_fixed_size_is_charged_at_twice_the_sensitivity(self):
        charge = _charge("fixed_size")
        self.assertEqual(
            charge.dp_event("rdp"),
            dp_accounting.SampledWithoutReplacementDpEvent(1000, 100, _G(0.5)),
        )
        self.assertEqual(
            charge.dp_event("pld"),
            dp_accounting.TruncatedSubsampledGaussianDpEvent(1000, 1.0, 100, 1.0),
        )
        self.assertEqual(charge.relation.name, "REPLACE_ONE")

    def test_shuffled_claims_no_amplification(self):
        charge = _charge("shuffled", pass_index=3, pass_offset=0)
        self.assertEqual(charge.dp_event(), _G(1.0))
        self.assertEqual(charge.relation.name, "ADD_OR_REMOVE_ONE")

    def test_a_round_s_gaussians_are_collapsed(self):
        # The PLD accountant refuses a composition under sampling.
        event = dp_accounting.ComposedDpEvent([_G(2.0), _G(2.0)])
        sampled = _charge(event=event).dp_event("pld")
        self.assertIsInstance(sampled.event, _G)
        self.assertAlmostEqual(sampled.event.noise_multiplier, 2 / 2**0.5)

    @parameterized.product(
        sampling=charge_lib.SAMPLINGS, accountant=charge_lib.ACCOUNTANTS
    )
    def test_no_noise_is_no_privacy(self, sampling, accountant):
        for event in (_G(0.0), dp_accounting.NonPrivateDpEvent()):
            self.assertEqual(
                _charge(sampling, event=event).dp_event(accountant),
                dp_accounting.NonPrivateDpEvent(),
            )

    @settings(max_examples=60, deadline=None)
    @given(
        st.sampled_from(charge_lib.SAMPLINGS),
        st.integers(2, 10**9),
        st.floats(0, 1),
        st.floats(0, 1e6),
        st.one_of(st.none(), st.integers(0, 10**6)),
    )
    def test_json_round_trip_is_exact(self, sampling, n, share, z, index):
        m = max(1, int(n * share))
        if sampling == "poisson":
            m = max(0.5, n * share)
        place = {}
        if sampling == "shuffled" and index is not None:
            place = {
                "pass_index": index,
                "pass_offset": n - m,
                "partition": "ab",
            }
        charge = _charge(sampling, n, m, _G(z), **place)
        again = charge_lib.RoundCharge.from_json(charge.to_json())
        self.assertEqual(again, charge)
        self.assertEqual(hash(again), hash(charge))
        self.assertEqual(again.to_json(), charge.to_json())
        self.assertNotIn("\n", charge.to_json())

    @parameterized.parameters(
        ({"sampling": "bernoulli"}, ValueError, "sampling"),
        ({"n": 0}, ValueError, "num_clients"),
        ({"m": 0}, ValueError, "clients_per_round"),
        (
            {"sampling": "fixed_size", "m": 1001},
            ValueError,
            "clients_per_round",
        ),
        (
            {"sampling": "fixed_size", "m": 10.5},
            ValueError,
            "clients_per_round",
        ),
        ({"event": _G(-1.0)}, ValueError, "noise multiplier"),
        ({"event": "Gaussian"}, TypeError, "event"),
        ({"pass_index": 1}, ValueError, "pass_index"),
        ({"sampling": "shuffled", "pass_index": 1}, ValueError, "together"),
        (
            {
                "sampling": "fixed_size",
                "event": dp_accounting.LaplaceDpEvent(1.0),
            },
            ValueError,
            "GaussianDpEvent",
        ),
    )
    def test_errors_name_the_argument(self, arguments, error, name):
        with self.assertRaisesRegex(error, name):
            _charge(**arguments)


class EventsTest(parameterized.TestCase):
    def test_gaussians_of_one_round_are_one_gaussian(self):
        event = dp_accounting.ComposedDpEvent(
            [_G(2.0), dp_accounting.SelfComposedDpEvent(_G(3.0), 4)]
        )
        expected = (2.0**-2 + 4 * 3.0**-2) ** -0.5
        self.assertAlmostEqual(
            charge_lib.noise_multiplier_of(event), expected, places=14
        )

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
        self.assertEqual(charge_lib.noise_multiplier_of(event), expected)

    def test_json_is_exact_and_hashable(self):
        event = dp_accounting.ComposedDpEvent(
            [
                _G(np.float64(0.1) + 0.2),
                dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
                    np.float32(1.5), [0.0, 1.0], [0.25, 0.75]
                ),
            ]
        )
        event = charge_lib.normalised(event)
        again = charge_lib.event_from_json(charge_lib.event_to_json(event))
        self.assertEqual(again, event)
        self.assertEqual(hash(again), hash(event))
        self.assertEqual(again.events[0].noise_multiplier, 0.1 + 0.2)

    def test_nothing_but_dp_accounting_s_events_is_made(self):
        for name in ("os", "NeighboringRelation", "NoSuchDpEvent"):
            with self.assertRaisesRegex(ValueError, name):
                charge_lib.event_from_json({"type": name})

    def test_what_is_no_event_is_refused(self):
        with self.assertRaisesRegex(TypeError, "event"):
            charge_lib.normalised(1.0)
        with self.assertRaisesRegex(ValueError, "NaN"):
            charge_lib.normalised(_G(math.nan))


if __name__ == "__main__":
    absltest.main()
