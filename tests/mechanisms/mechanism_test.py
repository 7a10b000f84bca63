from __future__ import annotations

import dataclasses

import dp_accounting
from absl.testing import absltest, parameterized

import tfdp_fl
from tfdp_fl.mechanisms import Deployment

_MECHANISMS = (
    tfdp_fl.NoPrivacy(),
    tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.5),
    tfdp_fl.AdaptiveClipping(noise_multiplier=1.5),
    tfdp_fl.MedianClipping(noise_multiplier=1.5),
    tfdp_fl.LocalDP(clip_norm=1.0, epsilon=8.0, delta=1e-5),
    tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5),
    tfdp_fl.NbAFL(epsilon=10.0, constant=1.0, weight_clip=1.0),
)


class EveryMechanismTest(parameterized.TestCase):
    @parameterized.parameters(*_MECHANISMS)
    def test_is_immutable(self, mechanism):
        for field in dataclasses.fields(mechanism):
            with self.assertRaises(dataclasses.FrozenInstanceError):
                setattr(mechanism, field.name, 1)
        with self.assertRaises((dataclasses.FrozenInstanceError, TypeError)):
            mechanism.another = 1

    @parameterized.parameters(*_MECHANISMS)
    def test_takes_keywords_only(self, mechanism):
        with self.assertRaises(TypeError):
            type(mechanism)(1.0)

    @parameterized.parameters(*_MECHANISMS)
    def test_equal_parameters_make_equal_mechanisms(self, mechanism):
        again = type(mechanism)(**mechanism.parameters())
        self.assertEqual(again, mechanism)

    @parameterized.parameters(*_MECHANISMS)
    def test_says_one_sentence_of_itself(self, mechanism):
        text = mechanism.describe()
        self.assertTrue(text.endswith("."))
        self.assertNotIn("{", text)
        self.assertEqual(mechanism.name, type(mechanism).__name__)


class NoiseMultiplierTest(parameterized.TestCase):
    def test_follows_its_schedule(self):
        for schedule in ([1.0, 2.0, 3.0], lambda t: t + 1.0):
            mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=schedule)
            self.assertEqual(
                [mechanism.noise_multiplier_at(t) for t in range(3)], [1, 2, 3]
            )
            deployment = Deployment(clients_per_round=10)
            self.assertEqual(
                [mechanism.round_event(t, deployment) for t in range(3)],
                [dp_accounting.GaussianDpEvent(z) for z in (1.0, 2.0, 3.0)],
            )

    def test_a_sequence_that_is_too_short_is_an_error(self):
        mechanism = tfdp_fl.MedianClipping(noise_multiplier=[1.0, 2.0])
        with self.assertRaisesRegex(ValueError, "noise_multiplier.*2 values"):
            mechanism.noise_multiplier_at(2)

    def test_a_callable_is_checked_in_every_round(self):
        mechanism = tfdp_fl.FixedClipping(
            clip_norm=1.0, noise_multiplier=lambda t: 1.0 - t
        )
        self.assertEqual(mechanism.noise_multiplier_at(1), 0)
        with self.assertRaisesRegex(ValueError, "noise_multiplier.*-1"):
            mechanism.noise_multiplier_at(2)
        mechanism = tfdp_fl.FixedClipping(
            clip_norm=1.0, noise_multiplier=lambda t: 1.0 if t == 0 else "much"
        )
        with self.assertRaisesRegex(TypeError, "noise_multiplier.*'much'"):
            mechanism.noise_multiplier_at(1)

    def test_without_noise_nothing_is_claimed(self):
        mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0)
        self.assertIsInstance(
            mechanism.round_event(0, Deployment(clients_per_round=10)),
            dp_accounting.NonPrivateDpEvent,
        )

    def test_can_be_exchanged(self):
        mechanism = tfdp_fl.FixedClipping(clip_norm=2.0, noise_multiplier=1.0)
        other = mechanism.with_noise_multiplier(3.0)
        self.assertEqual((other.clip_norm, other.noise_multiplier), (2.0, 3.0))
        self.assertEqual(mechanism.noise_multiplier, 1.0)
        with self.assertRaisesRegex(ValueError, "noise_multiplier"):
            mechanism.with_noise_multiplier(-1.0)
        with self.assertRaisesRegex(ValueError, "NbAFL.*noise_multiplier"):
            _MECHANISMS[-1].with_noise_multiplier(1.0)


class ScalesUpdatesTest(absltest.TestCase):
    def test_follows_from_what_is_overridden(self):
        # Side by side a runtime that believed a wrong flag would release
        # something else than the mechanism says.
        class Own(tfdp_fl.FixedClipping):
            def contribution(self, update, round, client, deployment):
                return super().contribution(update, round, client, deployment)

        own = Own(clip_norm=1.0, noise_multiplier=1.0)
        self.assertFalse(own.scales_updates)
        self.assertFalse(own.bind(Deployment(clients_per_round=3)).only_scales)
        self.assertEqual(
            [each.scales_updates for each in _MECHANISMS],
            [True, True, True, True, True, False, False],
        )


class DeploymentTest(absltest.TestCase):
    def test_cohort_size_follows_its_schedule(self):
        self.assertEqual(Deployment(clients_per_round=7).cohort_size(3), 7)
        sizes = Deployment(clients_per_round=(10, 20, 30))
        self.assertEqual([sizes.cohort_size(t) for t in range(3)], [10, 20, 30])
        growing = Deployment(clients_per_round=lambda t: 10 * (t + 1))
        self.assertEqual(growing.cohort_size(4), 50)


if __name__ == "__main__":
    absltest.main()
