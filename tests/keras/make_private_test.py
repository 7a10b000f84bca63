"""`make_private` finds the smallest noise that keeps a target."""

from __future__ import annotations

import warnings

import numpy as np
from absl.testing import parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl import sampling as sampling_lib
from tfdp_fl.mechanisms import Deployment, default_median_noise_multiplier

_DELTA = 1e-4
_CLIENTS = 1000
_MADE = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)


def _make(target=4.0, rounds=30, m=100, **options):
    """Makes it for many clients, by RDP; `DefaultAccountantTest` has the default."""
    usual = {"target_delta": _DELTA, "num_clients": _CLIENTS, "clients_per_round": m}
    return toy.private(target, rounds, **{**usual, **options})


def _cost(mechanism, sampling="poisson", rounds=30, m=100, accountant="rdp"):
    """Returns epsilon of the rounds, computed anew."""
    deployment = Deployment(
        clients_per_round=m, num_clients=_CLIENTS, sampling=sampling, rounds=rounds
    )
    sampler = sampling_lib.make_sampler(sampling, _CLIENTS, m)
    history = accounting.PrivacyAccountant()
    for t in range(rounds):
        history.add(sampler.charge(t, mechanism.round_event(t, deployment)))
    return history.epsilon(_DELTA, accountant)


class CalibrationTest(parameterized.TestCase):
    def _assert_used_up(self, found, target=4.0):
        self.assertBetween(found, target * (1 - 1e-3), target * (1 + 1e-9))

    @parameterized.parameters(
        ("adaptive", "poisson", 4.0),
        ("fixed", "fixed_size", 40.0),
        ("median", "shuffled", 4.0),
    )
    def test_target_is_kept_and_used_up(self, mechanism, sampling, target):
        options = {"clip_norm": 0.5} if mechanism == "fixed" else {}
        made = _make(target, mechanism=mechanism, sampling=sampling, **options)
        made = made.mechanism
        self._assert_used_up(_cost(made, sampling), target)
        # Less noise by 0.1 % would be too little.
        less = made.with_noise_multiplier(made.noise_multiplier * 0.999)
        if mechanism == "median":
            self.assertAlmostEqual(
                made.median_noise_multiplier,
                default_median_noise_multiplier(made.noise_multiplier, 100),
            )
        else:
            self.assertGreater(_cost(less, sampling), target)

    def test_schedules(self):
        sizes, noise = [50, 60, 70, 80], [2.0, 1.0, 1.0, 0.5]
        scheduled = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=noise)
        made = _make(mechanism=scheduled, rounds=4, m=sizes).mechanism
        values = [made.noise_multiplier_at(t) for t in range(4)]
        self.assertAlmostEqual(values[0] / values[3], 4.0)
        self._assert_used_up(_cost(made, rounds=4, m=sizes))

    def test_an_impure_schedule_is_calibrated_as_it_will_run(self):
        rng = np.random.default_rng(0)
        impure = tfdp_fl.FixedClipping(
            clip_norm=1.0, noise_multiplier=lambda t: rng.uniform(0.5, 3)
        )
        fed = _make(mechanism=impure, rounds=5, m=lambda t: rng.uniform(20, 200))
        sizes = [fed.setup.clients_per_round(t) for t in range(5)]
        self._assert_used_up(_cost(fed.mechanism, rounds=5, m=sizes))

    @parameterized.parameters("local", "adaptive_local")
    def test_local_targets_hold_for_the_client_seen_most(self, mechanism):
        options = {"clip_norm": 0.5} if mechanism == "local" else {}
        made = _make(8.0, mechanism=mechanism, **options).mechanism
        spent = 30 * made.mu_squared(
            Deployment(
                clients_per_round=100,
                num_clients=_CLIENTS,
                sampling="poisson",
                rounds=30,
                max_participations=30,
                num_variables=2,
            )
        )
        self._assert_used_up(accounting.epsilon_of_mu_squared(spent, _DELTA), 8.0)

    def test_few_clients_a_round_get_as_much_count_noise_as_it_takes(self):
        few = {"target": 2.0, "num_clients": 12, "m": 4, "rounds": 10}
        mechanism = _make(**few).mechanism
        self.assertGreater(mechanism.noise_multiplier, 0.4)
        self.assertEqual(mechanism.count_noise_stddev, mechanism.noise_multiplier)
        # What is asked for by name stays, and may be too little.
        with self.assertRaisesRegex(ValueError, "count_noise_stddev"):
            _make(**few, count_noise_stddev=0.2)

    def test_the_baseline_comes_from_the_same_call(self):
        fed = _make(mechanism="none")
        self.assertIsInstance(fed.mechanism, tfdp_fl.NoPrivacy)
        self.assertIsNone(fed.setup.target)
        toy.fit(fed, 2, data=toy.clients(_CLIENTS))
        self.assertEqual((fed.rounds, fed.epsilon(_DELTA)), (2, np.inf))


class RefusalTest(parameterized.TestCase):
    @parameterized.parameters(
        (
            {"mechanism": tfdp_fl.NoPrivacy()},
            ValueError,
            "mechanism must be one whose noise_multiplier can be chosen",
        ),
        (
            {"mechanism": tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.0)},
            ValueError,
            "mechanism must be one whose noise_multiplier can be chosen",
        ),
        (
            {"noise_site": "client"},
            ValueError,
            "noise_site='client' needs sampling='fixed_size'",
        ),
        (
            {"m": 5, "target": 0.05, "count_noise_stddev": 0.25},
            ValueError,
            "target_epsilon=0.05 .* cannot be kept .*clients_per_round / 20",
        ),
        ({"noise_multiplier": 1.0}, TypeError, "noise_multiplier is not an arg"),
        (
            {"mechanism": _MADE, "clip_norm": 2.0},
            TypeError,
            r"\['clip_norm'\] cannot be given",
        ),
    )
    def test_refuses(self, options, error, message):
        with self.assertRaisesRegex(error, message):
            _make(**options)

    def test_far_fewer_clients_than_planned_names_both_numbers(self):
        fed = _make(m=20, rounds=2)
        with self.assertRaisesRegex(ValueError, "num_clients=1000 .* got 40"):
            toy.fit(fed, 2)
        self.assertIsNone(fed.run)

    def test_a_delta_that_is_too_large_is_warned_of_when_it_is_made(self):
        with self.assertWarnsRegex(RuntimeWarning, "target_delta should .*got 0.002"):
            tfdp_fl.make_private(toy.dense(), 4.0, 2e-3, 1000, 100, 3, accountant="rdp")


class TargetTest(parameterized.TestCase):
    """A target is a budget: `fit` does not pass it in silence."""

    def test_more_rounds_than_planned_are_not_run(self):
        fed = toy.private(9.0, 4, mechanism="fixed", clip_norm=0.5)
        with warnings.catch_warnings():  # What was asked for runs without a word.
            warnings.simplefilter("error", RuntimeWarning)
            toy.fit(fed, 1)
        with self.assertWarnsRegex(
            RuntimeWarning, "epsilon=9 .* allows 3 of the 12 rounds asked for"
        ):
            self.assertLen(toy.fit(fed, 12).epoch, 3)
        self.assertBetween(fed.epsilon(1e-3), 9.0 * (1 - 1e-3), 9.0)
        with self.assertWarnsRegex(RuntimeWarning, "allows 0 of the 1 rounds"):
            self.assertEmpty(toy.fit(fed, 1).epoch)
        self.assertEqual(fed.rounds, 4)

    @parameterized.parameters("local", "adaptive_local")
    def test_clients_do_not_get_a_fresh_target_for_every_fit(self, mechanism):
        options = {"clip_norm": 0.5} if mechanism == "local" else {}
        fed = toy.private(8.0, 6, mechanism=mechanism, sampling="shuffled", **options)
        # 6 rounds are 3 passes: 3 participations of every client.
        for _ in range(3):
            toy.fit(fed, 2)
        self.assertEqual(fed.rounds, 6)
        self.assertBetween(fed.epsilon(1e-3), 8.0 * (1 - 1e-3), 8.0 * (1 + 1e-9))
        with self.assertWarnsRegex(RuntimeWarning, "allows 0 of the 2"):
            toy.fit(fed, 2)
        self.assertEqual(fed.rounds, 6)

    def test_cohorts_that_are_not_known_may_allow_more(self):
        fed = toy.private(8.0, 3, mechanism="local", clip_norm=0.5)
        with self.assertWarnsRegex(
            RuntimeWarning, "at least 3 of the 40 rounds .* may end there"
        ):
            toy.fit(fed, 40)
        # 40 clients are drawn half of the time: somebody is soon drawn thrice.
        self.assertBetween(fed.rounds, 3, 12)
        self.assertLessEqual(fed.epsilon(1e-3), 8.0 * (1 + 1e-9))


class DefaultAccountantTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"sampling": "fixed_size", "clients_per_round": 5}, "pld"),
        ({"sampling": "fixed_size"}, "rdp"),  # Half of the clients.
        ({"clients_per_round": [20, 20, 10, 10]}, "pld"),
        ({"clients_per_round": [20, 21, 22, 23]}, "rdp"),
        ({"mechanism": "none"}, "rdp"),
        ({"mechanism": "local", "clip_norm": 1.0}, "rdp"),
    )
    def test_pld_where_it_is_tight_and_quick(self, options, wanted):
        made = toy.private(2.0, 4, accountant=None, **options)
        self.assertEqual(made.setup.accountant, wanted)

    def test_one_number_everywhere(self):
        fed = toy.private(2.0, 4, accountant=None)
        told = toy.fit(fed, 4).history["epsilon"]
        epsilon = fed.epsilon(1e-3)
        self.assertEqual(told, sorted(told))
        self.assertEqual(told[-1], epsilon)
        self.assertBetween(epsilon, 2.0 * (1 - 1e-3), 2.0)
        self.assertEqual(epsilon, fed.epsilon(1e-3, "pld"))
        stated = fed.privacy_statement(1e-3, format="dict")
        self.assertEqual(stated["epsilon"], epsilon)
        # By RDP it would be more.
        self.assertGreater(fed.epsilon(1e-3, "rdp"), 2.05)
