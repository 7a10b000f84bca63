"""The server wrapper whose clip norm follows a quantile."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl import accounting
from tfdp_fl.flower import (
    DPFedAvgAdaptive,
    DPFedAvgFixed,
    DPFedAvgNumPyClient,
)
from tfdp_fl.mechanisms import formulas


@dataclasses.dataclass
class _FitIns:
    parameters: Any
    config: dict


@dataclasses.dataclass
class _FitRes:
    parameters: Any
    num_examples: int
    metrics: dict


class _Strategy:
    def __init__(self):
        self.results = []

    def configure_fit(self, server_round, parameters, client_manager):
        fit_ins = _FitIns(parameters, {})
        return [(name, fit_ins) for name in client_manager]

    def aggregate_fit(self, server_round, results, failures):
        self.results.append(results)
        return [np.mean([res.parameters[0] for _, res in results], axis=0)], {}


class _Trainer:
    def __init__(self, norm, size):
        self.update = np.zeros(size)
        self.update[0] = norm

    def fit(self, parameters, config):
        return [parameters[0] + self.update], 1, {}


def _run(strategy, norms, rounds=1, size=4):
    """Runs rounds with clients whose updates have the given norms."""
    trainers = {i: _Trainer(norm, size) for i, norm in enumerate(norms)}
    clips, models = [], []
    for server_round in range(1, rounds + 1):
        instructions = strategy.configure_fit(server_round, [np.zeros(size)], trainers)
        results = []
        for name, ins in instructions:
            client = DPFedAvgNumPyClient(trainers[name])
            results.append((name, _FitRes(*client.fit(ins.parameters, ins.config))))
        models.append(strategy.aggregate_fit(server_round, results, [])[0])
        clips.append(strategy.clip_norm)
    return clips, models


class ClipNormTest(parameterized.TestCase):
    @parameterized.parameters(
        # (norms, how many are within the clip norm of 1)
        ((0.5, 0.6, 0.7, 0.8), 4),
        ((2.0, 3.0, 4.0, 5.0), 0),
        ((0.5, 1.0, 2.0, 8.0), 2),
    )
    def test_one_step_is_the_papers(self, norms, within):
        strategy = DPFedAvgAdaptive(
            _Strategy(),
            4,
            init_clip_norm=1.0,
            noise_multiplier=0.0,
            clip_norm_lr=0.3,
            clip_norm_target_quantile=0.4,
        )
        (clip_norm,), _ = _run(strategy, norms)
        self.assertAlmostEqual(
            clip_norm, math.exp(-0.3 * (within / 4 - 0.4)), places=12
        )

    @parameterized.parameters(0.1, 30.0)
    def test_it_finds_the_quantile_from_below_and_above(self, start):
        # The published fault, the bit the wrong way round, runs away: all
        # norms 1 and a clip norm of 0.1 goes to 0.0018.
        strategy = DPFedAvgAdaptive(
            _Strategy(), 10, init_clip_norm=start, noise_multiplier=0.0
        )
        clips, _ = _run(strategy, np.linspace(0.55, 1.45, 10), rounds=80)
        self.assertBetween(clips[-1], 0.9, 1.1)

    def test_the_round_is_clipped_and_noised_with_its_own_clip_norm(self):
        # All norms exceed S, so S is to grow a thousandfold: noise made for
        # the new S would be a thousand times too large.
        size = 100_000
        strategy = DPFedAvgAdaptive(
            _Strategy(),
            50,
            init_clip_norm=0.2,
            noise_multiplier=1.0,
            clip_norm_lr=math.log(1000) / 0.5,
            clip_count_stddev=1.0,
        )
        (clip_norm,), (model,) = _run(strategy, [5.0] * 50, size=size)
        self.assertGreater(clip_norm, 50.0)
        # z_delta = (1 - 1/4)^-1/2. The sample stddev varies by 0.22 %; 2 % is
        # 9 of these (false alarm < 1e-18).
        np.testing.assert_allclose(
            np.std(50 * model[0][1:]), 0.2 / math.sqrt(0.75), rtol=0.02
        )
        self.assertEqual(strategy.released_rounds[0].clip_norm, 0.2)

    def test_the_count_is_noised(self):
        # b = 1/2 = gamma: every move of log S is eta sigma_b / m noise. Of
        # 4000 draws the sample stddev varies by 1.1 %; 9 % is 8 of these.
        strategy = DPFedAvgAdaptive(
            _Strategy(),
            4,
            init_clip_norm=1.0,
            noise_multiplier=0.0,
            clip_norm_lr=0.01,
            clip_count_stddev=0.4,
        )
        np.random.seed(0)
        clips, _ = _run(strategy, [1e-9, 1e-9, 1e9, 1e9], rounds=4000)
        moves = np.diff(np.log([1.0, *clips]))
        np.testing.assert_allclose(np.std(moves), 0.001, rtol=0.09)
        self.assertLess(abs(np.mean(moves)), 8 * 0.001 / math.sqrt(4000))

    def test_it_comes_back_from_the_floor_and_no_deeper(self):
        strategy = DPFedAvgAdaptive(
            _Strategy(),
            2,
            init_clip_norm=1e-90,
            noise_multiplier=0.0,
            min_clip_norm=1e-3,
        )
        self.assertEqual(strategy.clip_norm, 1e-3)
        strategy.clip_norm = 1e-87  # As a count of very noisy bits left it.
        clips, _ = _run(strategy, [1.0, 1.0])
        self.assertEqual(clips, [1e-3])
        # Without the floor 2000 rounds, at a factor of exp(0.1) each.
        clips, _ = _run(strategy, [1.0, 1.0], rounds=75)
        self.assertGreater(clips[-1], 0.9)

    @parameterized.parameters(True, False)
    def test_noise_on_the_count_leads_to_no_norm_that_cannot_be_used(self, big):
        # sigma_b = 1e9 clients: exp overflows, or S is 0.
        strategy = DPFedAvgAdaptive(_Strategy(), 2, 1.0, 0.0, clip_count_stddev=1e9)
        seen = set()
        for _ in range(60):  # Both signs come, but for 2^-59.
            strategy.clip_norm = 1.0
            strategy.configure_fit(1, [np.zeros(2)], "ab")
            results = [
                (name, _FitRes([np.zeros(2)], 1, {"dpfedavg_norm_bit": True}))
                for name in "ab"
            ]
            strategy.aggregate_fit(1, results, [])
            seen.add(strategy.clip_norm)
        self.assertIn(1e30 if big else 1e-8, seen)
        self.assertBetween(min(seen), 1e-8, 1e30)
        self.assertBetween(max(seen), 1e-8, 1e30)

    @parameterized.parameters((50, 1.0, 2.5), (50, 0.0, 0.0))
    def test_default_count_noise(self, m, z, stddev):
        strategy = DPFedAvgAdaptive(_Strategy(), m, noise_multiplier=z)
        self.assertEqual(strategy.clip_count_stddev, stddev)
        self.assertEqual(strategy.clip_norm, 0.1)


class MessagesTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_config(self, server_side):
        strategy = DPFedAvgAdaptive(
            _Strategy(), 50, 0.2, 1.0, server_side, clip_count_stddev=1.0
        )
        self.assertIsInstance(strategy, DPFedAvgFixed)
        ((_, ins), *_) = strategy.configure_fit(1, [np.zeros(2)], range(50))
        stddev = ins.config.pop("dpfedavg_noise_stddev", None)
        self.assertEqual(
            ins.config,
            {"dpfedavg_clip_norm": 0.2, "dpfedavg_adaptive_clip_enabled": True},
        )
        if server_side:
            self.assertIsNone(stddev)
        else:
            self.assertAlmostEqual(stddev, 0.2 / math.sqrt(0.75) / math.sqrt(50))

    @parameterized.parameters(
        {}, {"bit": None}, {"bit": "yes"}, {"bit": np.nan}, {"bit": np.ones(2)}
    )
    def test_a_client_without_a_bit_has_failed_and_pulls_neither_way(self, **changed):
        inner = _Strategy()
        strategy = DPFedAvgAdaptive(inner, 3, noise_multiplier=0.0)
        strategy.configure_fit(1, [np.zeros(2)], "abc")
        bits = {"a": True, "c": False}
        results = [
            (name, _FitRes([np.zeros(2)], 1, {"dpfedavg_norm_bit": bit}))
            for name, bit in bits.items()
        ]
        metrics = {"dpfedavg_norm_bit": changed["bit"]} if changed else {}
        results.append(("b", _FitRes([np.zeros(2)], 1, metrics)))
        with self.assertLogs("tfdp_fl.flower", "WARNING") as logs:
            strategy.aggregate_fit(1, results, [])
        self.assertIn("client 'b': ", logs.output[0])
        self.assertIn("dpfedavg_norm_bit", logs.output[0])
        self.assertLen(inner.results[0], 2)
        # One within, one not, one unknown: b = 1/2 = gamma.
        self.assertAlmostEqual(strategy.clip_norm, 0.1, places=15)

    def test_one_client_moves_the_count_by_one_whatever_it_sends(self):
        strategy = DPFedAvgAdaptive(
            _Strategy(), 2, init_clip_norm=1.0, noise_multiplier=0.0
        )
        strategy.configure_fit(1, [np.zeros(2)], "ab")
        bits = {"a": 1e9, "b": False}
        results = [
            (name, _FitRes([np.zeros(2)], 1, {"dpfedavg_norm_bit": bit}))
            for name, bit in bits.items()
        ]
        strategy.aggregate_fit(1, results, [])
        self.assertEqual(strategy.clip_norm, 1.0)

    def test_exact_bits_do_not_reach_the_wrapped_strategy(self):
        inner = _Strategy()
        _run(DPFedAvgAdaptive(inner, 3, noise_multiplier=0.0), [1.0] * 3)
        for _, res in inner.results[0]:
            self.assertEqual(res.metrics, {})

    def test_an_abandoned_round_moves_nothing(self):
        strategy = DPFedAvgAdaptive(_Strategy(), 3, noise_multiplier=0.0)
        strategy.configure_fit(1, [np.zeros(2)], "abc")
        self.assertEqual(strategy.aggregate_fit(1, [], [OSError()]), (None, {}))
        self.assertEqual(strategy.clip_norm, 0.1)
        self.assertEqual(strategy.released_rounds, ())


class AccountingTest(parameterized.TestCase):
    def test_updates_and_count_together_cost_z(self):
        strategy = DPFedAvgAdaptive(
            _Strategy(), 4, noise_multiplier=1.0, clip_count_stddev=0.8
        )
        _run(strategy, [1.0] * 4, rounds=10)
        self.assertAlmostEqual(
            strategy.privacy_epsilon(40, 1e-5),
            accounting.epsilon(
                noise_multiplier=1.0,
                sampling="fixed_size",
                num_clients=40,
                clients_per_round=4,
                rounds=10,
                delta=1e-5,
            ),
        )
        # And they do: two Gaussians of z_delta and 2 sigma_b are one of z.
        z_delta = formulas.update_noise_multiplier(1.0, 0.8)
        self.assertAlmostEqual((z_delta**-2 + 1.6**-2) ** -0.5, 1.0)

    @parameterized.parameters(
        ({"init_clip_norm": 0.0}, "init_clip_norm"),
        ({"clip_norm_lr": -0.1}, "clip_norm_lr"),
        ({"clip_norm_target_quantile": 1.5}, "clip_norm_target_quantile"),
        ({"clip_count_stddev": -1.0}, "clip_count_stddev"),
        ({"clip_count_stddev": 0.5}, "less than 2 . clip_count_stddev"),
        ({"clip_count_stddev": 0.0}, "less than 2 . clip_count_stddev"),
        ({"num_sampled_clients": 10}, "less than 2 . clip_count_stddev"),
        ({"min_clip_norm": 0.0}, "min_clip_norm"),
    )
    def test_bad_arguments_are_named(self, changes, pattern):
        arguments = {"num_sampled_clients": 50, **changes}
        with self.assertRaisesRegex(ValueError, pattern):
            DPFedAvgAdaptive(_Strategy(), **arguments)


if __name__ == "__main__":
    absltest.main()
