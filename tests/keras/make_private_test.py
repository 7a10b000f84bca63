"""`make_private` finds the smallest noise that keeps a target."""

from __future__ import annotations

import math
import warnings

import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl import sampling as sampling_lib
from tfdp_fl.mechanisms import Deployment, default_median_noise_multiplier

_DELTA = 1e-4
_CLIENTS = 1000


def _make(target=4.0, rounds=30, m=100, **options):
    return tfdp_fl.make_private(
        toy.dense(),
        target_epsilon=target,
        target_delta=_DELTA,
        num_clients=options.pop("num_clients", _CLIENTS),
        clients_per_round=m,
        rounds=rounds,
        # Cheap to compute again; `DefaultAccountantTest` has the default.
        **{"accountant": "rdp", **options},
    )


def _cost(mechanism, sampling, rounds, m, accountant="rdp"):
    """Returns epsilon of the rounds, computed anew."""
    deployment = Deployment(
        clients_per_round=m,
        num_clients=_CLIENTS,
        sampling=sampling,
        rounds=rounds,
    )
    sampler = sampling_lib.make_sampler(sampling, _CLIENTS, m)
    history = accounting.PrivacyAccountant()
    for t in range(rounds):
        history.add(sampler.charge(t, mechanism.round_event(t, deployment)))
    return history.epsilon(_DELTA, accountant)


class CalibrationTest(parameterized.TestCase):
    @parameterized.product(
        mechanism=("adaptive", "fixed", "median"),
        sampling=("poisson", "fixed_size", "shuffled"),
    )
    def test_target_is_kept_and_used_up(self, mechanism, sampling):
        options = {"clip_norm": 0.5} if mechanism == "fixed" else {}
        made = _make(
            40.0 if sampling == "fixed_size" else 4.0,
            mechanism=mechanism,
            sampling=sampling,
            **options,
        ).mechanism
        target = 40.0 if sampling == "fixed_size" else 4.0
        found = _cost(made, sampling, 30, 100)
        self.assertLessEqual(found, target)
        self.assertGreater(found, target * (1 - 1e-3))
        # Less noise by 0.1 % would be too little.
        less = made.with_noise_multiplier(made.noise_multiplier * 0.999)
        if mechanism == "median":
            self.assertAlmostEqual(
                made.median_noise_multiplier,
                default_median_noise_multiplier(made.noise_multiplier, 100),
            )
        else:
            self.assertGreater(_cost(less, sampling, 30, 100), target)

    def test_given_median_noise_is_kept(self):
        made = _make(mechanism="median", median_noise_multiplier=3.0).mechanism
        self.assertEqual(made.median_noise_multiplier, 3.0)
        self.assertLessEqual(_cost(made, "poisson", 30, 100), 4.0)

    def test_scheduled_cohorts(self):
        sizes = [50 + 10 * t for t in range(8)]
        fed = _make(mechanism="fixed", clip_norm=1.0, rounds=8, m=sizes)
        found = _cost(fed.mechanism, "poisson", 8, sizes)
        self.assertBetween(found, 4.0 * (1 - 1e-3), 4.0)

    @parameterized.named_parameters(
        ("sequence", [2.0, 1.0, 1.0, 0.5]),
        ("callable", lambda t: (2.0, 1.0, 1.0, 0.5)[t]),
    )
    def test_scheduled_noise_is_scaled_as_a_whole(self, schedule):
        fed = _make(
            mechanism=tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=schedule),
            rounds=4,
        )
        values = [fed.mechanism.noise_multiplier_at(t) for t in range(4)]
        self.assertAlmostEqual(values[0] / values[3], 4.0)
        found = _cost(fed.mechanism, "poisson", 4, 100)
        self.assertBetween(found, 4.0 * (1 - 1e-3), 4.0)

    def test_pld_needs_less_noise(self):
        by_rdp = _make(mechanism="fixed", clip_norm=1.0)
        by_pld = _make(mechanism="fixed", clip_norm=1.0, accountant="pld")
        self.assertLess(
            by_pld.mechanism.noise_multiplier, by_rdp.mechanism.noise_multiplier
        )
        self.assertEqual(by_pld.accountant, "pld")
        found = _cost(by_pld.mechanism, "poisson", 30, 100, "pld")
        self.assertBetween(found, 4.0 * (1 - 1e-3), 4.0)

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
        found = accounting.epsilon_of_mu_squared(spent, _DELTA)
        self.assertBetween(found, 8.0 * (1 - 1e-3), 8.0 * (1 + 1e-9))

    def test_history_ends_at_the_target(self):
        fed = tfdp_fl.make_private(
            toy.dense(),
            target_epsilon=9.0,
            target_delta=1e-3,
            num_clients=toy.NUM_CLIENTS,
            clients_per_round=20,
            rounds=5,
            num_replicas=1,
            count_noise_stddev=4.0,
        )
        fed.compile("sgd", toy.loss(), jit_compile=False)
        history = fed.fit(toy.clients(), rounds=5, verbose=0).history
        self.assertIsInstance(fed.mechanism, tfdp_fl.AdaptiveClipping)
        self.assertBetween(history["epsilon"][-1], 9.0 * (1 - 1e-3), 9.0)
        self.assertEqual(history["epsilon"], sorted(history["epsilon"]))
        self.assertEqual(fed.epsilon(1e-3), history["epsilon"][-1])


class RefusalTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("epsilon", {"target": 0.0}, "target_epsilon must be a positive"),
        ("nan", {"target": math.nan}, "target_epsilon must be a positive"),
        ("rounds", {"rounds": 0}, "rounds must be an integer of at least 1"),
        ("N", {"num_clients": 0}, "num_clients must be an integer"),
        ("m", {"m": 1001}, "clients_per_round .*1000.* got 1001"),
        ("sampling", {"sampling": "random"}, "sampling must be one of"),
        ("mechanism", {"mechanism": "laplace"}, "mechanism must be one of"),
        (
            "no noise to choose",
            {"mechanism": tfdp_fl.NoPrivacy()},
            "mechanism must be one whose noise_multiplier can be chosen",
        ),
        (
            "local instance",
            {"mechanism": tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.0)},
            "mechanism must be one whose noise_multiplier can be chosen",
        ),
        (
            "noise at clients",
            {"noise_site": "client"},
            "noise_site='client' needs sampling='fixed_size'",
        ),
        (
            "too little count noise for an adaptive clip",
            {"m": 5, "target": 0.05, "count_noise_stddev": 0.25},
            "target_epsilon=0.05 .* cannot be kept .*clients_per_round / 20",
        ),
        ("accountant", {"accountant": "gdp"}, "accountant must be one of"),
    )
    def test_refuses(self, options, message):
        with self.assertRaisesRegex(ValueError, message):
            _make(**options)

    @parameterized.named_parameters(
        ("unknown", {"clip": 1.0}, "clip is not an argument of"),
        ("noise", {"noise_multiplier": 1.0}, "noise_multiplier is not an arg"),
        (
            "options of a made mechanism",
            {
                "mechanism": tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0),
                "clip_norm": 2.0,
            },
            r"\['clip_norm'\] cannot be given",
        ),
    )
    def test_refuses_unknown_options(self, options, message):
        with self.assertRaisesRegex(TypeError, message):
            _make(**options)


class TargetTest(parameterized.TestCase):
    """A target is a budget: `fit` does not pass it in silence."""

    def _made(self, mechanism="fixed", rounds=4, epsilon=9.0, **options):
        if mechanism in ("fixed", "local"):
            options["clip_norm"] = 0.5
        fed = tfdp_fl.make_private(
            toy.dense(),
            target_epsilon=epsilon,
            target_delta=1e-3,
            num_clients=toy.NUM_CLIENTS,
            clients_per_round=20,
            rounds=rounds,
            mechanism=mechanism,
            num_replicas=1,
            **options,
        )
        fed.compile("sgd", toy.loss(), jit_compile=False)
        return fed

    def test_what_was_planned_is_kept(self):
        target = self._made(accountant="pld").target
        self.assertEqual(
            (target.epsilon, target.delta, target.rounds, target.accountant),
            (9.0, 1e-3, 4, "pld"),
        )
        self.assertEqual(target.num_clients, toy.NUM_CLIENTS)
        self.assertEqual(target.on_overspend, "stop")

    def test_more_rounds_than_planned_are_not_run(self):
        fed = self._made()
        with self.assertWarnsRegex(
            RuntimeWarning, "epsilon=9 .* allows 4 of the 12 rounds asked for"
        ):
            history = fed.fit(toy.clients(), rounds=12, verbose=0)
        self.assertLen(history.epoch, 4)
        self.assertBetween(fed.epsilon(1e-3), 9.0 * (1 - 1e-3), 9.0)
        with (
            self.subTest("and a fit that cannot run one says so"),
            self.assertWarnsRegex(RuntimeWarning, "allows 0 of the 1 rounds"),
        ):
            history = fed.fit(toy.clients(), rounds=1, verbose=0)
            self.assertEmpty(history.epoch)
            self.assertEqual(fed.rounds, 4)

    def test_what_was_asked_for_runs_without_a_word(self):
        fed = self._made()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for rounds in (1, 3):
                fed.fit(toy.clients(), rounds=rounds, verbose=0)
        self.assertEqual(fed.rounds, 4)

    def test_warn_goes_on_and_says_so_once(self):
        fed = self._made(on_overspend="warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            for _ in range(3):
                fed.fit(toy.clients(), rounds=3, verbose=0)
        self.assertEqual(fed.rounds, 9)
        self.assertGreater(fed.epsilon(1e-3), 9.0)
        said = [
            str(each.message) for each in caught if "make_private" in str(each.message)
        ]
        self.assertLen(said, 1)
        self.assertIn("training goes on and spends more", said[0])

    @parameterized.parameters("local", "adaptive_local")
    def test_clients_do_not_get_a_fresh_target_for_every_fit(self, mechanism):
        fed = self._made(mechanism, rounds=6, epsilon=8.0, sampling="shuffled")
        # 6 rounds are 3 passes: 3 participations of every client.
        for _ in range(3):
            fed.fit(toy.clients(), rounds=2, verbose=0)
        self.assertEqual(fed.rounds, 6)
        self.assertBetween(fed.epsilon(1e-3), 8.0 * (1 - 1e-3), 8.0 * (1 + 1e-9))
        with self.assertWarnsRegex(RuntimeWarning, "allows 0 of the 2"):
            fed.fit(toy.clients(), rounds=2, verbose=0)
        self.assertEqual(fed.rounds, 6)

    def test_cohorts_that_are_not_known_may_allow_more(self):
        fed = self._made("local", rounds=3, epsilon=8.0, sampling="poisson")
        with self.assertWarnsRegex(
            RuntimeWarning, "at least 3 of the 40 rounds .* may end there"
        ):
            fed.fit(toy.clients(), rounds=40, verbose=0)
        # 40 clients are drawn half of the time: somebody is soon drawn thrice.
        self.assertBetween(fed.rounds, 3, 12)
        self.assertLessEqual(fed.epsilon(1e-3), 8.0 * (1 + 1e-9))

    def test_clients_that_sit_out_do_not_end_the_training(self):
        fed = self._made("local", rounds=6, epsilon=8.0, max_participations=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            fed.fit(toy.clients(), rounds=6, verbose=0)
        self.assertEqual(fed.rounds, 6)
        self.assertLessEqual(fed.epsilon(1e-3), 8.0 * (1 + 1e-9))

    def test_a_smaller_population_than_planned_runs_fewer_rounds(self):
        fed = self._made()
        with self.assertWarnsRegex(RuntimeWarning, "of the 4 rounds"):
            fed.fit(toy.clients(25), rounds=4, verbose=0)
        self.assertLess(fed.rounds, 4)
        self.assertLessEqual(fed.epsilon(1e-3), 9.0)

    def test_a_delta_that_is_too_large_is_warned_of_when_it_is_made(self):
        with self.assertWarnsRegex(
            RuntimeWarning, "target_delta should be below .*0.001, got 0.002"
        ):
            tfdp_fl.make_private(
                toy.dense(),
                target_epsilon=4.0,
                target_delta=2e-3,
                num_clients=1000,
                clients_per_round=100,
                rounds=3,
            )

    def test_on_overspend_is_checked(self):
        with self.assertRaisesRegex(ValueError, "on_overspend must be one of"):
            self._made(on_overspend="ignore")

    def test_an_impure_schedule_is_calibrated_as_it_will_run(self):
        rng = np.random.default_rng(0)
        fed = tfdp_fl.make_private(
            toy.dense(),
            target_epsilon=4.0,
            target_delta=_DELTA,
            num_clients=_CLIENTS,
            clients_per_round=lambda t: rng.uniform(20, 200),
            rounds=5,
            mechanism=tfdp_fl.FixedClipping(
                clip_norm=1.0, noise_multiplier=lambda t: rng.uniform(0.5, 3)
            ),
        )
        sizes = [fed.setup.clients_per_round(t) for t in range(5)]
        found = _cost(fed.mechanism, "poisson", 5, sizes)
        self.assertBetween(found, 4.0 * (1 - 1e-3), 4.0)

    def test_few_clients_a_round_get_as_much_count_noise_as_it_takes(self):
        options = {
            "target_epsilon": 2.0,
            "target_delta": 1e-2,
            "num_clients": 12,
            "clients_per_round": 4,
            "rounds": 10,
        }
        mechanism = tfdp_fl.make_private(toy.dense(), **options).mechanism
        self.assertGreater(mechanism.noise_multiplier, 0.4)
        self.assertEqual(mechanism.count_noise_stddev, mechanism.noise_multiplier)
        # What is asked for by name stays, and may be too little.
        with self.assertRaisesRegex(ValueError, "count_noise_stddev"):
            tfdp_fl.make_private(toy.dense(), **options, count_noise_stddev=0.2)

    def test_the_baseline_comes_from_the_same_call(self):
        fed = self._made(mechanism="none")
        self.assertIsInstance(fed.mechanism, tfdp_fl.NoPrivacy)
        self.assertIsNone(fed.target)
        fed.compile("sgd", toy.loss())
        fed.fit(toy.clients(_CLIENTS), rounds=2, verbose=0)
        self.assertEqual((fed.rounds, fed.epsilon(_DELTA)), (2, np.inf))


class DefaultAccountantTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"mechanism": "fixed", "clip_norm": 1.0}, "pld"),
        ({"mechanism": "adaptive"}, "pld"),
        ({"mechanism": "median"}, "pld"),
        ({"sampling": "fixed_size", "clients_per_round": 5}, "pld"),
        ({"sampling": "fixed_size"}, "rdp"),  # Half of the clients.
        ({"sampling": "shuffled"}, "pld"),
        ({"clients_per_round": [20, 20, 10, 10]}, "pld"),
        ({"clients_per_round": [20, 21, 22, 23]}, "rdp"),
        ({"accountant": "rdp"}, "rdp"),
        ({"mechanism": "none"}, "rdp"),
        ({"mechanism": "local", "clip_norm": 1.0}, "rdp"),
    )
    def test_pld_where_it_is_tight_and_quick(self, options, wanted):
        fed = tfdp_fl.make_private(
            toy.dense(),
            **{
                "target_epsilon": 2.0,
                "target_delta": 1e-3,
                "num_clients": toy.NUM_CLIENTS,
                "clients_per_round": 20,
                "rounds": 4,
                "num_replicas": 1,
                **options,
            },
        )
        self.assertEqual(fed.accountant, wanted)

    def test_one_number_everywhere(self):
        fed = tfdp_fl.make_private(
            toy.dense(),
            target_epsilon=2.0,
            target_delta=1e-3,
            num_clients=toy.NUM_CLIENTS,
            clients_per_round=20,
            rounds=4,
            num_replicas=1,
        )
        fed.compile("sgd", toy.loss())
        told = fed.fit(toy.clients(), 4, verbose=0).history["epsilon"]
        epsilon = fed.epsilon(1e-3)
        self.assertEqual(told[-1], epsilon)
        self.assertBetween(epsilon, 2.0 * (1 - 1e-3), 2.0)
        self.assertEqual(epsilon, fed.epsilon(1e-3, "pld"))
        stated = fed.privacy_statement(1e-3, format="dict")
        self.assertEqual(stated["epsilon"], epsilon)
        # By RDP it would be more.
        self.assertGreater(fed.epsilon(1e-3, "rdp"), 2.05)


if __name__ == "__main__":
    absltest.main()
