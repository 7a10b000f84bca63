"""Tests of the audit: what it finds, in sound training and in broken one.

The figures that are compared are epsilons at delta = 1e-5 of one or a few
Gaussian releases. A canary's score has a standard deviation of 1 in its own
unit, so the mean of 2000 is off by 0.022; bounds are five times that or more.
"""

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.accounting import gaussian
from tfdp_fl.auditing import CanaryAudit, canaries, estimate
from tfdp_fl.engine import cohort, rounds
from tfdp_fl.mechanisms import noise

_DELTA = 1e-5
_CANARIES = 2000
# By how much an audit's lower end may pass the claim. It is 0.89 of it in the
# mean where it spreads most (server momentum: standard deviation 0.047 in 38
# runs): this is more than six of these away, a chance below 1e-9.
_MARGIN = 1.2


def _model() -> tf.keras.Model:
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((8,)),
            tf.keras.layers.Dense(1000),
            tf.keras.layers.Dense(3),
        ]
    )


def _audited(mechanism, audit, rounds=1, sampling="shuffled", **options):
    """Trains on eight clients, all of them in every round if shuffled."""
    fed = tfdp_fl.DPFederatedModel(
        _model(),
        mechanism,
        options.pop("clients_per_round", 8),
        sampling,
        num_replicas=1,
    )
    fed.compile(
        tf.keras.optimizers.SGD(0.01),
        toy.loss(),
        server_optimizer=options.pop("server_optimizer", None),
    )
    fed.fit(toy.clients(8), rounds=rounds, verbose=0, audit=audit, **options)
    return fed


def _fixed(z=1.0):
    return tfdp_fl.FixedClipping(clip_norm=0.1, noise_multiplier=z)


def _flat(variables):
    return np.concatenate([np.ravel(each) for each in variables])


# All kinds of clip, without noise on what an adaptive one goes by.
_SCALED = (
    ("fixed", _fixed(0.1), "shuffled"),
    (
        "adaptive",
        tfdp_fl.AdaptiveClipping(noise_multiplier=0.0, initial_clip_norm=0.022),
        "shuffled",
    ),
    ("median", tfdp_fl.MedianClipping(noise_multiplier=0.1), "shuffled"),
)


class OneReleaseTest(parameterized.TestCase):
    @parameterized.parameters(0.5, 1.0, 2.0)
    def test_is_found_within_fifteen_percent(self, z):
        # As a release is: 4000 canaries and noise, d = 20 000.
        rng, size, count = np.random.default_rng(1), 20_000, 4000
        drawn = canaries.Canaries(count, size, seed=2)
        added = drawn.sum_of(np.arange(count))
        update = added + rng.normal(0, z, size)
        found = estimate.estimate(
            estimate.Scores(
                observed=canaries.scores(drawn, update, added, np.ones(count)),
                null_std=size**-0.5,
            ),
            _DELTA,
        )
        exact = gaussian.gaussian_epsilon(z, _DELTA)
        self.assertAlmostEqual(found.epsilon / exact, 1, delta=0.15)
        self.assertBetween(found.epsilon, found.low, found.high)

    def test_of_those_who_did_not_take_part_nothing_is_found(self):
        rng, size = np.random.default_rng(1), 20_000
        drawn = canaries.Canaries(_CANARIES, size, seed=2)
        found = canaries.scores(
            drawn, rng.normal(size=size), np.zeros(size), np.zeros(_CANARIES)
        )
        self.assertAlmostEqual(found.mean() * size**0.5, 0, delta=0.11)
        self.assertAlmostEqual(found.std() * size**0.5, 1, delta=0.08)


class IntervalTest(parameterized.TestCase):
    """How often the truth is outside of it, in 60 releases of z = 1/8.

    Nominally 3 times. A good interval misses more than 18 of them less than
    once in 5 million tests, even if it misses 8 % (Binomial(60, 0.08)). One
    that leaves out an error of the unit misses 30 or more: of the norm in the
    first two, of the measured spread in the last.
    """

    @parameterized.named_parameters(
        ("one_round", 500, 256, 1, False),
        ("eight_rounds", 500, 256, 8, False),
        ("measured_null", 200, 2000, 1, True),
    )
    def test_misses_no_more_than_it_says(self, count, size, rounds, measured):
        rng = np.random.default_rng(1)
        truth = gaussian.gaussian_epsilon(1 / 8, _DELTA)
        missed = 0
        for seed in range(60):
            drawn = canaries.Canaries(count, size, seed)
            added = rounds * drawn.sum_of(np.arange(count))
            update = added + rng.normal(0, rounds / 8, size)
            others = None
            if measured:
                others = canaries.scores(
                    canaries.Canaries(count, size, 60 + seed),
                    update,
                    added,
                    np.zeros(count),
                )
            found = estimate.estimate(
                estimate.Scores(
                    observed=canaries.scores(
                        drawn, update, added, np.full(count, rounds)
                    ),
                    unobserved=others,
                    null_std=size**-0.5,
                ),
                _DELTA,
            )
            missed += not found.low <= truth <= found.high
        self.assertLessEqual(missed, 18)

    def test_thresholds_too_are_no_surer_than_the_unit(self):
        # With d = 2 it is off by half of itself.
        found = estimate.estimate(
            estimate.Scores(observed=np.full(1000, 2.8), null_std=2**-0.5),
            _DELTA,
        )
        self.assertLess(found.low, 1.0)
        self.assertGreater(found.epsilon, 10.0)


class CanariesTest(absltest.TestCase):
    def test_are_the_same_whenever_they_are_made(self):
        drawn = canaries.Canaries(5, 300, seed=1)
        each = np.stack([drawn.sum_of(np.array([i])) for i in range(5)])
        np.testing.assert_allclose((each**2).sum(axis=1), 1, rtol=1e-5)
        np.testing.assert_allclose(
            drawn.sum_of(np.arange(5)), each.sum(axis=0), rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(
            drawn.projections(each[2]), each @ each[2], rtol=1e-4, atol=1e-6
        )


class TrainingTest(parameterized.TestCase):
    """In training, and nothing is found above what is claimed."""

    @parameterized.named_parameters(
        ("several_rounds", _fixed(3.0), "shuffled", 4, {}),
        (
            "adaptive",
            tfdp_fl.AdaptiveClipping(noise_multiplier=1.0, count_noise_stddev=5.0),
            "shuffled",
            1,
            {},
        ),
        ("fixed_size", _fixed(), "fixed_size", 4, {"clients_per_round": 4}),
        (
            "correlated",
            tfdp_fl.CorrelatedNoise(
                clip_norm=0.1,
                noise_multiplier=2.0,
                strategy=tfdp_fl.BLT(2),
                rounds=8,
                min_separation=4,
            ),
            "cyclic",
            8,
            {"clients_per_round": 2},
        ),
        (
            "server_momentum",
            _fixed(3.0),
            "shuffled",
            3,
            {"server_optimizer": tf.keras.optimizers.SGD(1.0, momentum=0.5)},
        ),
    )
    def test_estimate_is_not_above_the_claim(
        self, mechanism, sampling, rounds, options
    ):
        audit = CanaryAudit(num_canaries=_CANARIES)
        fed = _audited(mechanism, audit, rounds, sampling, **options)
        self.assertLess(
            audit.estimate(_DELTA).low, fed.epsilon(_DELTA, "pld") * _MARGIN
        )

    def test_one_release_is_found_in_training(self):
        audit = CanaryAudit(num_canaries=_CANARIES)
        fed = _audited(_fixed(), audit)
        found = audit.estimate(_DELTA)
        self.assertAlmostEqual(found.epsilon / fed.epsilon(_DELTA), 1, delta=0.15)
        self.assertEqual(found.num_canaries, _CANARIES)

    def test_the_statement_has_it(self):
        audit = CanaryAudit(num_canaries=100)
        fed = _audited(_fixed(), audit)
        text = fed.privacy_statement(_DELTA)
        self.assertIn("audit with 100 canary clients", text)
        self.assertIn(f"as {audit.estimate(_DELTA).epsilon:.3g} ", text)
        fed.fit(toy.clients(8), rounds=2, verbose=0)
        self.assertIn("in 1 of the rounds", fed.privacy_statement(_DELTA))

    def test_all_iterates(self):
        audit = CanaryAudit(num_canaries=_CANARIES, iterates="all")
        fed = _audited(_fixed(), audit, rounds=1)
        found = audit.estimate(_DELTA)
        self.assertAlmostEqual(found.epsilon / fed.epsilon(_DELTA), 1, delta=0.2)

    @parameterized.named_parameters(*_SCALED)
    def test_canaries_add_their_clipped_updates_and_nothing_else(
        self, mechanism, sampling
    ):
        handed_in = []
        add = rounds.PendingRound.add_contribution

        def seen(pending, one):
            handed_in.append(one)
            add(pending, one)

        options = {"sampling": sampling, "seed": 3}
        plain = _audited(mechanism, None, **options)
        with mock.patch.object(rounds.PendingRound, "add_contribution", seen):
            fed = _audited(mechanism, CanaryAudit(num_canaries=200), **options)
        (one,) = handed_in
        self.assertFalse(np.any(one.scalars()))
        added = _flat(one.update)
        # A squared norm of 200 S^2 with a standard deviation of 2.6 S^2.
        clip = fed.model.history.history["clip_norm"][0]
        self.assertAlmostEqual(np.sum(added**2) / (200 * clip**2), 1, delta=0.1)
        moved = _flat(fed.model.weights) - _flat(plain.model.weights)
        np.testing.assert_allclose(moved, added / 8, atol=1e-6)

    @parameterized.named_parameters(*_SCALED)
    def test_clip_goes_its_way_as_without_canaries(self, mechanism, sampling):
        # One client's bit is 2.5 % of the clip. With bits of its own each
        # canary would be that: 200 of them would divide it by ten every round.
        plain, audited = (
            _audited(mechanism, audit, 6, sampling, seed=3)
            for audit in (None, CanaryAudit(num_canaries=200))
        )
        self.assertEqual(audited.rounds, 6)
        for name in ("clip_norm", "noise_stddev"):
            np.testing.assert_allclose(
                audited.model.history.history[name],
                plain.model.history.history[name],
                rtol=0.15,
            )


class PlantedFaultsTest(parameterized.TestCase):
    """What is broken looks larger than the epsilon that is claimed."""

    def _assert_found(self, fed, audit):
        self.assertGreater(audit.estimate(_DELTA).low, fed.epsilon(_DELTA, "pld") * 1.2)

    def test_half_the_noise(self):
        add = noise.add_normal
        with mock.patch.object(
            noise, "add_normal", lambda update, stddev: add(update, stddev / 2)
        ):
            audit = CanaryAudit(num_canaries=_CANARIES)
            self._assert_found(_audited(_fixed(), audit), audit)

    def test_one_variable_without_noise(self):
        add = noise.add_normal
        with mock.patch.object(
            noise,
            "add_normal",
            lambda update, stddev: [
                update[0],
                *add(update[1:], stddev),
            ],
        ):
            audit = CanaryAudit(num_canaries=_CANARIES)
            self._assert_found(_audited(_fixed(), audit), audit)

    def test_one_client_twice_in_the_sum(self):
        add = rounds.PendingRound.add_contribution

        def twice(pending, one):
            add(pending, one)
            add(pending, one)

        with mock.patch.object(rounds.PendingRound, "add_contribution", twice):
            audit = CanaryAudit(num_canaries=_CANARIES)
            self._assert_found(_audited(_fixed(), audit), audit)

    def test_a_layer_that_is_not_clipped(self):
        scale = cohort.UpdateSpec.unflatten

        def loose(spec, flat):
            first, *rest = scale(spec, flat)
            return [3.0 * first, *rest]

        with mock.patch.object(cohort.UpdateSpec, "unflatten", loose):
            audit = CanaryAudit(num_canaries=_CANARIES)
            self._assert_found(_audited(_fixed(), audit), audit)

    def test_the_same_noise_in_two_rounds(self):
        audit = CanaryAudit(num_canaries=6000, iterates="all")
        options = {"rounds": 2, "sampling": "poisson", "clients_per_round": 4}
        with mock.patch(
            "tfdp_fl.keras.randomness.round_seed",
            lambda *_: np.array([1, 2], np.int64),
        ):
            fed = _audited(_fixed(), audit, **options)
        self.assertGreater(audit.estimate(_DELTA).low, fed.epsilon(_DELTA))
        # With noise of its own for each round, the same attack finds nothing.
        audit = CanaryAudit(num_canaries=6000, iterates="all")
        fed = _audited(_fixed(), audit, **options)
        self.assertLess(
            audit.estimate(_DELTA).low, fed.epsilon(_DELTA, "pld") * _MARGIN
        )


class ArgumentsTest(parameterized.TestCase):
    @parameterized.parameters(0, 1, -3)
    def test_number_of_canaries(self, number):
        with self.assertRaisesRegex(ValueError, "num_canaries"):
            CanaryAudit(number)

    def test_what_is_not_audited(self):
        for mechanism in (
            tfdp_fl.NoPrivacy(),
            tfdp_fl.LocalDP(clip_norm=1.0, epsilon=1.0, delta=1e-3),
        ):
            with self.assertRaisesRegex(ValueError, "audit must be None"):
                _audited(mechanism, CanaryAudit(10), sampling="fixed_size")
        with self.assertRaisesRegex(TypeError, "audit"):
            _audited(_fixed(), "yes")

    def test_once_only_and_after_the_run(self):
        audit = CanaryAudit(10)
        with self.assertRaisesRegex(ValueError, "given to a fit"):
            audit.estimate(_DELTA)
        fed = _audited(_fixed(), audit)
        with self.assertRaisesRegex(ValueError, "a new CanaryAudit"):
            fed.fit(toy.clients(8), verbose=0, audit=audit)
        with self.assertRaisesRegex(ValueError, "delta"):
            audit.estimate(2.0)


if __name__ == "__main__":
    absltest.main()
