"""The names of Flower's older API: what they ask, hand on, and translate."""

from __future__ import annotations

import math

import numpy as np
from absl.testing import parameterized

import tfdp_fl
from tests.flower import older_api
from tfdp_fl import accounting
from tfdp_fl.flower import (
    DPFedAvg,
    DPFedAvgAdaptive,
    DPFedAvgFixed,
)

_MODEL = [np.linspace(-1, 1, 50), np.array(0.25)]
_SENT = older_api.parameters(*_MODEL)


def _updates(m):
    rng = np.random.default_rng(5)
    return [[rng.normal(size=50), rng.normal(size=())] for _ in range(m)]


def _flat(parameters):
    return np.concatenate([np.ravel(part) for part in parameters])


class ConfigureTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_the_noise_stddev_is_sent_only_if_clients_are_to_add_noise(self, by_server):
        inner = older_api.Strategy({"lr": 0.1})
        strategy = DPFedAvgFixed(inner, 4, 0.5, 2.0, by_server)
        told = strategy.configure_fit(3, _SENT, older_api.Manager("abcd"))
        self.assertEqual(sorted(client for client, _ in told), list("abcd"))
        for _, ins in told:
            self.assertIs(ins.parameters, _SENT)
            wanted = {"lr": 0.1, "dpfedavg_clip_norm": 0.5}
            if not by_server:  # z S / sqrt(m)
                wanted["dpfedavg_noise_stddev"] = 0.5
            self.assertEqual(ins.config, wanted)
            self.assertIsInstance(ins.config["dpfedavg_clip_norm"], float)
        self.assertEqual(inner.config, {"lr": 0.1})

    @parameterized.parameters(True, False)
    def test_adaptive_clipping_asks_for_the_bit(self, by_server):
        strategy = DPFedAvgAdaptive(
            older_api.Strategy(), 50, 0.2, 1.0, by_server, clip_count_stddev=1.0
        )
        ((_, ins), *_) = strategy.configure_fit(1, _SENT, older_api.Manager(range(50)))
        stddev = ins.config.pop("dpfedavg_noise_stddev", None)
        self.assertEqual(
            ins.config,
            {"dpfedavg_clip_norm": 0.2, "dpfedavg_adaptive_clip_enabled": True},
        )
        if by_server:
            self.assertIsNone(stddev)
        else:
            self.assertAlmostEqual(stddev, 0.2 / math.sqrt(0.75) / math.sqrt(50))

    def test_m_of_those_connected_are_asked_whatever_the_strategy_asks(self):
        strategy = DPFedAvgFixed(older_api.Strategy(), 3, 0.5, num_clients=8)
        with self.assertRaisesRegex(ValueError, "num_clients .* 7, got 8"):
            strategy.configure_fit(1, _SENT, older_api.Manager("abcdefg"))
        told = strategy.configure_fit(1, _SENT, older_api.Manager("abcdefghij"))
        self.assertLen({client for client, _ in told}, 3)

    def test_different_models_are_an_error(self):
        class Personal(older_api.Strategy):
            def configure_fit(self, server_round, parameters, client_manager):
                return [
                    (client, older_api.FitIns(older_api.parameters(float(i)), {}))
                    for i, client in enumerate(client_manager.all().values())
                ]

        with self.assertRaisesRegex(ValueError, "different models"):
            DPFedAvgFixed(Personal(), 3, 0.5).configure_fit(
                1, _SENT, older_api.Manager("abc")
            )


class AggregateTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_without_noise_it_is_the_mean_of_clipped_updates(self, by_server):
        inner, changes = older_api.Strategy(), _updates(5)
        strategy = DPFedAvgFixed(inner, 5, 1.5, 0.0, by_server)
        got = older_api.a_round(strategy, _MODEL, changes)
        # McMahan et al. (2018).
        deltas = [_flat(change) for change in changes]
        mean = sum(d * min(1, 1.5 / np.linalg.norm(d)) for d in deltas) / 5
        np.testing.assert_allclose(_flat(got), _flat(_MODEL) + mean, rtol=1e-12)
        # The strategy is handed nothing else.
        (((_, handed),),) = inner.handed
        self.assertEqual((handed.num_examples, handed.metrics), (1, {}))
        self.assertEqual(strategy.evaluate(4, None), (0.5, {"round": 4}))
        self.assertFalse(hasattr(strategy, "configure_evaluate"))
        self.assertIn("clip_norm=1.5", repr(strategy))


class FailureTest(parameterized.TestCase):
    def _round(self, strategy, change, number=1):
        manager = older_api.Manager(older_api.Trainer(each) for each in _updates(3))
        told = strategy.configure_fit(number, _SENT, manager)
        results = older_api.fit(told)
        return strategy.aggregate_fit(number, change(results) or results, [])[0]

    @parameterized.named_parameters(
        ("silent", lambda results: results[:2]),
        ("shapes", lambda r: setattr(r[1][1], "parameters", older_api.parameters(0))),
        ("none", lambda results: [("nobody", None)]),
    )
    def test_abort_is_the_users_choice(self, change):
        inner = older_api.Strategy()
        strategy = DPFedAvgFixed(inner, 3, 0.5, on_client_failure="abort")
        with self.assertLogs("tfdp_fl.flower", "WARNING") as logs:
            self.assertIsNone(self._round(strategy, change))
        self.assertIn("Round 1 is abandoned", logs.output[-1])
        self.assertEqual(inner.handed, [])
        self.assertEqual(strategy.privacy_epsilon(1e-5), 0.0)
        self.assertIsNotNone(self._round(strategy, list, 2))
        self.assertEqual([r.server_round for r in strategy.released_rounds], [2])


class AdaptiveTest(parameterized.TestCase):
    def test_the_count_is_noised(self):
        # b = 1/2 = gamma: every move of log S is eta sigma_b / m noise. Of
        # 2000 draws the sample stddev varies by 1.6 %; 9 % is 5.7 of these.
        strategy = DPFedAvgAdaptive(
            older_api.Strategy(),
            4,
            init_clip_norm=1.0,
            noise_multiplier=0.0,
            clip_norm_lr=0.01,
            clip_count_stddev=0.4,
        )
        np.random.seed(0)
        clips, updates = [1.0], [[norm] for norm in (1e-9, 1e-9, 1e9, 1e9)]
        for number in range(2000):
            older_api.a_round(strategy, [0.0], updates, number)
            clips.append(strategy.clip_norm)
        moves = np.diff(np.log(clips))
        np.testing.assert_allclose(np.std(moves), 0.001, rtol=0.09)
        self.assertLess(abs(np.mean(moves)), 8 * 0.001 / math.sqrt(2000))


class TranslationTest(parameterized.TestCase):
    def test_of_arguments(self):
        self.assertEqual(
            DPFedAvgFixed(older_api.Strategy(), 3, 0.5, 2.0, False).mechanism,
            tfdp_fl.FixedClipping(
                clip_norm=0.5, noise_multiplier=2.0, noise_site="client"
            ),
        )
        self.assertEqual(
            DPFedAvgAdaptive(older_api.Strategy(), 50).mechanism,
            tfdp_fl.AdaptiveClipping(
                noise_multiplier=1.0,
                initial_clip_norm=0.1,
                target_quantile=0.5,
                clip_learning_rate=0.2,
            ),
        )

    @parameterized.parameters((None, 5), (50, 50))
    def test_nothing_is_claimed_for_sampling_unless_n_is_declared(self, said, charged):
        strategy = DPFedAvgFixed(older_api.Strategy(), 5, 0.5, num_clients=said)
        for number in range(1, 4):
            older_api.a_round(strategy, [np.zeros(2)], [[np.zeros(2)]] * 50, number)
        self.assertAlmostEqual(
            strategy.privacy_epsilon(1e-5),
            accounting.epsilon(1.0, "fixed_size", charged, 5, 3, 1e-5),
        )

    def test_a_median_is_clipped_by_the_server(self):
        mechanism = tfdp_fl.MedianClipping(noise_multiplier=0.0)
        strategy = DPFedAvg(older_api.Strategy(), 3, mechanism)
        changes = [[np.array([norm, 0.0])] for norm in (0.5, 1.0, 8.0)]
        got = older_api.a_round(strategy, [np.zeros(2)], changes)
        np.testing.assert_allclose(got[0], [2.5 / 3, 0], rtol=1e-5)

    @parameterized.parameters(
        (tfdp_fl.NoPrivacy(),),
        (tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.0),),
        (
            tfdp_fl.CorrelatedNoise(
                clip_norm=1.0, noise_multiplier=1.0, rounds=8, min_separation=2
            ),
        ),
    )
    def test_other_mechanisms_are_refused(self, mechanism):
        with self.assertRaisesRegex(ValueError, "mechanism must be a central"):
            DPFedAvg(older_api.Strategy(), 2, mechanism)

    @parameterized.parameters(
        ({"num_sampled_clients": 0}, ValueError),
        ({"num_clients": 2}, ValueError),
        ({"clip_norm": 0.0}, ValueError),
        ({"noise_multiplier": -1.0}, ValueError),
        ({"server_side_noising": 1}, TypeError),
        ({"strategy": object()}, TypeError),
        ({"on_client_failure": "ignore"}, ValueError),
    )
    def test_bad_arguments_are_named(self, changes, error):
        arguments = {
            "strategy": older_api.Strategy(),
            "num_sampled_clients": 3,
            "clip_norm": 1.0,
        }
        with self.assertRaisesRegex(error, next(iter(changes))):
            DPFedAvgFixed(**{**arguments, **changes})

    @parameterized.parameters(
        ({"init_clip_norm": 0.0}, "init_clip_norm"),
        ({"clip_norm_lr": -0.1}, "clip_norm_lr"),
        ({"clip_norm_target_quantile": 1.5}, "clip_norm_target_quantile"),
        ({"clip_count_stddev": -1.0}, "clip_count_stddev"),
        ({"clip_count_stddev": 0.5}, "less than 2 . count_noise_stddev"),
        ({"num_sampled_clients": 10}, "less than 2 . count_noise_stddev"),
    )
    def test_bad_arguments_of_adaptive_clipping_are_named(self, changes, pattern):
        arguments = {"num_sampled_clients": 50, **changes}
        with self.assertRaisesRegex(ValueError, pattern):
            DPFedAvgAdaptive(older_api.Strategy(), **arguments)
