"""N is what was there when the cohort was drawn, not what somebody types."""

from __future__ import annotations

import random
import types
import unittest

import numpy as np
from absl.testing import absltest, parameterized

from tests.flower import real_flower
from tfdp_fl import accounting
from tfdp_fl.flower import DPFedAvgFixed


class _Manager:
    """Has Flower's shape; clients may come and go at each step."""

    def __init__(self, *sizes):
        self.sizes = list(sizes)

    @property
    def size(self):
        return self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]

    def num_available(self):
        return self.size

    def sample(self, num_clients, min_num_clients=None, criterion=None):
        return random.sample(range(1000, 1000 + self.size), num_clients)


class _Strategy:
    """Samples by whatever function it is given."""

    def __init__(self, choose):
        self.choose = choose

    def configure_fit(self, server_round, parameters, client_manager):
        ins = types.SimpleNamespace(parameters=parameters, config={})
        return [(client, ins) for client in self.choose(client_manager)]

    def aggregate_fit(self, server_round, results, failures):
        return results[0][1].parameters, {}


def _rounds(strategy, manager, rounds=1):
    for server_round in range(1, rounds + 1):
        instructions = strategy.configure_fit(server_round, [np.zeros(2)], manager)
        results = [
            (c, types.SimpleNamespace(parameters=[np.zeros(2)], metrics={}))
            for c, _ in instructions
        ]
        strategy.aggregate_fit(server_round, results, [])
    return strategy


def _epsilon(n, m, rounds, z=1.0):
    return accounting.epsilon(
        noise_multiplier=z,
        sampling="fixed_size",
        num_clients=n,
        clients_per_round=m,
        rounds=rounds,
        delta=1e-5,
    )


class WatchedTest(parameterized.TestCase):
    def _wrapped(self, choose, m=5):
        return DPFedAvgFixed(_Strategy(choose), m, 1.0)

    def test_what_sample_drew_from_is_charged(self):
        wrapped = _rounds(
            self._wrapped(lambda manager: manager.sample(5)), _Manager(50), 3
        )
        self.assertEqual(
            {(r.available, r.num_clients) for r in wrapped.released_rounds},
            {(50, 50)},
        )
        self.assertAlmostEqual(wrapped.privacy_epsilon(delta=1e-5), _epsilon(50, 5, 3))

    def test_each_round_has_its_own_number(self):
        wrapped = self._wrapped(lambda manager: manager.sample(5))
        _rounds(wrapped, _Manager(50))
        _rounds(wrapped, _Manager(10))
        charged = wrapped.privacy_epsilon(delta=1e-5)
        self.assertGreater(charged, _epsilon(50, 5, 2))
        self.assertLess(charged, _epsilon(10, 5, 2))
        report = wrapped.privacy_report(1e-5)
        self.assertEqual(report["num_clients"], [10, 50])
        self.assertEqual(report["epsilon"], charged)

    def test_a_larger_number_is_refused_and_a_smaller_believed(self):
        wrapped = _rounds(
            self._wrapped(lambda manager: manager.sample(5)), _Manager(50), 2
        )
        with self.assertRaisesRegex(ValueError, "num_clients.*at most 50"):
            wrapped.privacy_epsilon(51, 1e-5)
        self.assertAlmostEqual(wrapped.privacy_epsilon(20, 1e-5), _epsilon(20, 5, 2))

    def test_who_comes_or_goes_during_the_drawing_does_not_count(self):
        # Before, while, after, and at the end.
        for sizes in ((20, 30, 40, 50), (50, 40, 20, 50)):
            wrapped = _rounds(
                self._wrapped(lambda manager: manager.sample(5)),
                _Manager(*sizes),
            )
            (released,) = wrapped.released_rounds
            self.assertEqual(released.num_clients, 20)

    @parameterized.named_parameters(
        ("everybody_in_turn", lambda manager: range(5)),
        ("some_of_those_drawn", lambda manager: manager.sample(9)[:5]),
        (
            "the_better_of_two",
            lambda manager: max(manager.sample(5), manager.sample(5)),
        ),
    )
    def test_a_drawing_that_was_not_seen_is_no_amplification(self, choose):
        with self.assertLogs("tfdp_fl.flower", "WARNING") as logs:
            wrapped = _rounds(self._wrapped(choose), _Manager(1000))
        self.assertIn("nothing is claimed for their sampling", logs.output[0])
        self.assertAlmostEqual(wrapped.privacy_epsilon(1000, 1e-5), _epsilon(5, 5, 1))
        caveats = " ".join(wrapped.privacy_report(1e-5)["caveats"])
        self.assertIn("without amplification", caveats)

    @parameterized.parameters(str, int)
    def test_drawing_with_replacement_is_no_amplification(self, kind):
        class WithReplacement(_Manager):
            def sample(self, num_clients, *_):
                # Another object each time, and one of them twice.
                drawn = [0, *range(num_clients - 1)]
                return [types.SimpleNamespace(cid=kind(i)) for i in drawn]

        wrapped = _rounds(
            self._wrapped(lambda manager: manager.sample(5)),
            WithReplacement(1000),
        )
        self.assertAlmostEqual(wrapped.privacy_epsilon(1000, 1e-5), _epsilon(5, 5, 1))
        (released,) = wrapped.released_rounds
        self.assertEqual(released.num_replies, 4)

    def test_a_manager_that_does_not_tell(self):
        wrapped = _rounds(self._wrapped(lambda manager: manager), "abcde")
        with self.assertRaisesRegex(ValueError, "num_clients must be given"):
            wrapped.privacy_epsilon(delta=1e-5)
        self.assertAlmostEqual(wrapped.privacy_epsilon(100, 1e-5), _epsilon(100, 5, 1))
        caveats = " ".join(wrapped.privacy_report(1e-5, 100)["caveats"])
        self.assertIn("the user's word", caveats)

    def test_delta_is_needed(self):
        wrapped = self._wrapped(lambda manager: manager)
        with self.assertRaisesRegex(ValueError, "delta"):
            wrapped.privacy_epsilon(100)


@unittest.skipUnless(real_flower.INSTALLED, real_flower.WHY_NOT)
class FlowersManagerTest(parameterized.TestCase):
    def _run(self, connected, m, rounds, **arguments):
        clients = [real_flower.client([np.zeros(2)]) for _ in range(connected)]
        wrapped = DPFedAvgFixed(real_flower.strategy("FedAvg", m, **arguments), m, 1.0)
        manager = real_flower.manager(clients)
        for server_round in range(1, rounds + 1):
            real_flower.round_of(
                wrapped,
                manager,
                real_flower.parameters(np.zeros(2)),
                server_round,
            )
        return wrapped

    def test_the_issues_ten_clients(self):
        # Priced as ten of a thousand they cost 11.2.
        wrapped = self._run(10, 10, 100)
        with self.assertRaisesRegex(ValueError, "num_clients.*at most 10"):
            wrapped.privacy_epsilon(1000, 1e-5)
        self.assertAlmostEqual(wrapped.privacy_epsilon(delta=1e-5), 293.44, delta=0.05)

    def test_a_real_sample_is_charged_as_one(self):
        wrapped = self._run(40, 4, 5)
        self.assertEqual(
            {(r.available, r.num_clients) for r in wrapped.released_rounds},
            {(40, 40)},
        )
        self.assertAlmostEqual(wrapped.privacy_epsilon(delta=1e-5), _epsilon(40, 4, 5))

    def test_a_criterion_leaves_fewer_to_draw_from(self):
        import flwr

        class Even(flwr.server.criterion.Criterion):
            def select(self, client):
                return int(client.cid) % 2 == 0

        class Some(flwr.server.strategy.FedAvg):
            def configure_fit(self, server_round, parameters, client_manager):
                clients = client_manager.sample(4, 4, Even())
                ins = flwr.common.FitIns(parameters, {})
                return [(client, ins) for client in clients]

        clients = [real_flower.client([np.zeros(2)]) for _ in range(40)]
        wrapped = DPFedAvgFixed(Some(), 4, 1.0)
        real_flower.round_of(
            wrapped,
            real_flower.manager(clients),
            real_flower.parameters(np.zeros(2)),
        )
        (released,) = wrapped.released_rounds
        self.assertEqual((released.available, released.num_clients), (40, 20))

    def test_who_connects_or_leaves_meanwhile_does_not_count(self):
        clients = [real_flower.client([np.zeros(2)]) for _ in range(40)]
        manager = real_flower.manager(clients)
        everybody = dict(manager.clients)
        draw = manager.sample

        def sample(num_clients, min_num_clients=None, criterion=None):
            drawn = draw(num_clients, min_num_clients, criterion)
            rest = [p for p in everybody.values() if p not in drawn]
            # Ten of them were late, ten others are gone already.
            for proxy in rest[:10]:
                manager.unregister(proxy)
            for proxy in late:
                manager.register(proxy)
            return drawn

        late = list(everybody.values())[30:]
        for proxy in late:
            manager.unregister(proxy)
        manager.sample = sample
        wrapper = DPFedAvgFixed(real_flower.strategy("FedAvg", 4), 4, 1.0)
        real_flower.round_of(wrapper, manager, real_flower.parameters(np.zeros(2)))
        (released,) = wrapper.released_rounds
        self.assertEqual((released.available, released.num_clients), (30, 20))

    def test_strategies_see_a_client_manager(self):
        import flwr

        seen = []

        class Curious(flwr.server.strategy.FedAvg):
            def configure_fit(self, server_round, parameters, client_manager):
                seen.append(isinstance(client_manager, flwr.server.ClientManager))
                seen.append(len(client_manager))
                return super().configure_fit(server_round, parameters, client_manager)

        DPFedAvgFixed(Curious(min_fit_clients=2), 2, 1.0).configure_fit(
            1,
            real_flower.parameters(np.zeros(2)),
            real_flower.manager([real_flower.client([np.zeros(2)])] * 2),
        )
        self.assertEqual(seen, [True, 2])


if __name__ == "__main__":
    absltest.main()
