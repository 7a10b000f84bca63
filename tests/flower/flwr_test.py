"""Rounds through the real Flower's older API: strategies, clients, no network."""

from __future__ import annotations

import unittest

import numpy as np
from absl.testing import parameterized

from tests.flower import real_flower
from tfdp_fl.flower import (
    DPFedAvgAdaptive,
    DPFedAvgFixed,
    RoundsAbandonedError,
)


def _put(result, tensor):
    result.parameters.tensors[0] = tensor


@unittest.skipUnless(real_flower.INSTALLED, real_flower.WHY_NOT)
class FlowerTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("no_bit", lambda res: res.metrics.clear()),
        ("no_parameters", lambda res: setattr(res, "parameters", None)),
        ("zip", lambda res: _put(res, b"PK\x03\x04" + b"\0" * 99)),
    )
    def test_one_hostile_reply_ends_nothing(self, change):
        updates = np.random.default_rng(7).normal(size=(6, 8)).astype(np.float32)
        wrapper = DPFedAvgAdaptive(real_flower.strategy("FedAvg", 6), 6, 1000.0, 0.0)
        hostile = []

        def spoil(results):
            proxy, result = results[2]
            hostile.append(proxy.cid)
            change(result)

        with self.assertLogs("tfdp_fl.flower", "WARNING") as logs:
            got, metrics = real_flower.round_of(
                wrapper,
                real_flower.manager([real_flower.client([u]) for u in updates]),
                real_flower.parameters(np.zeros(8, np.float32)),
                change=spoil,
            )
        self.assertIn(f"client {hostile[0]!r}: ", logs.output[0])
        self.assertEqual(metrics, {})
        np.testing.assert_allclose(
            real_flower.arrays(got)[0],
            np.delete(updates, int(hostile[0]), axis=0).sum(axis=0) / 6,
            rtol=0,
            atol=2e-6,
        )
        self.assertEqual(wrapper.rejected_replies, 1)

    def test_flowers_own_server_ends_on_a_budget_and_on_silence(self):
        import flwr

        def server(strategy):
            initial = real_flower.parameters(np.zeros(8, np.float32))
            strategy.strategy.initial_parameters = initial
            clients = [real_flower.client([np.ones(8)]) for _ in range(12)]
            return flwr.server.Server(
                client_manager=real_flower.manager(clients), strategy=strategy
            )

        strategy = DPFedAvgFixed(
            real_flower.strategy("FedAvg", 6),
            6,
            0.5,
            num_clients=12,
            target_epsilon=40.0,
            target_delta=1e-5,
        )
        server(strategy).fit(num_rounds=30, timeout=None)
        spent = strategy.privacy_epsilon()
        self.assertBetween(spent, 30.0, 40.0)
        self.assertLess(len(strategy.released_rounds), 30)
        self.assertEqual(strategy.stopped_before_round, 30)

        strategy = DPFedAvgFixed(
            real_flower.strategy("FedAvg", 6), 6, 0.5, max_abandoned_rounds=3
        )
        silent = server(strategy)
        for proxy in silent.client_manager().all().values():
            proxy.client = None  # All of them raise.
        with self.assertRaisesRegex(RoundsAbandonedError, "3 rounds in a row"):
            silent.fit(num_rounds=30, timeout=None)


@unittest.skipUnless(real_flower.INSTALLED, real_flower.WHY_NOT)
class FlowersStrategiesTest(parameterized.TestCase):
    @parameterized.parameters(
        "FedAvg",
        "FedAvgM",
        "FedProx",
        "FaultTolerantFedAvg",
        "FedAdagrad",
        "FedAdam",
        "FedYogi",
        "FedOpt",
    )
    def test_what_averages_is_accepted_and_makes_the_same_of_the_mean(self, name):
        arguments = {}
        if name == "FedProx":
            arguments["proximal_mu"] = 0.1
        if name in ("FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedOpt"):
            arguments["initial_parameters"] = real_flower.parameters(np.zeros(2))
        updates = [[3.0, 0.0], [0.0, 0.3], [-0.1, 0.1], [0.2, 0.5]]
        clients = [real_flower.client([np.array(u)]) for u in updates]
        wrapper = DPFedAvgFixed(real_flower.strategy(name, 4, **arguments), 4, 1.0, 0.0)
        got, _ = real_flower.round_of(
            wrapper,
            real_flower.manager(clients),
            real_flower.parameters(np.zeros(2)),
        )
        clipped = [u / np.maximum(1, np.linalg.norm(u)) for u in updates]
        # The same strategy alone, with one client that sends the mean.
        alone = real_flower.strategy(name, 1, **arguments)
        mean = real_flower.client([np.mean(clipped, axis=0)], wrapped=False)
        wanted, _ = real_flower.round_of(
            alone,
            real_flower.manager([mean]),
            real_flower.parameters(np.zeros(2)),
        )
        np.testing.assert_allclose(
            real_flower.arrays(got)[0],
            real_flower.arrays(wanted)[0],
            rtol=1e-12,
        )

    @parameterized.parameters("FedMedian", "FedTrimmedAvg", "Krum", "Bulyan", "QFedAvg")
    def test_what_does_not_is_refused_by_name(self, name):
        with self.assertRaisesRegex(ValueError, f"one that averages .*{name}"):
            DPFedAvgFixed(real_flower.strategy(name, 40), 40, 1.0)

    def test_a_subclass_is_as_good_as_the_class_that_averages(self):
        import flwr

        class Own(flwr.server.strategy.FedAvg):
            def aggregate_fit(self, server_round, results, failures):
                return results[0][1].parameters, {}

        class Median(flwr.server.strategy.FedMedian):
            def evaluate(self, server_round, parameters):
                return None

        DPFedAvgFixed(Own(), 2, 1.0)
        with self.assertRaisesRegex(ValueError, "aggregate_fit of FedMedian"):
            DPFedAvgFixed(Median(), 2, 1.0)
