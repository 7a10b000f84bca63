"""Rounds through the real Flower's older API: strategies, clients, no network."""

from __future__ import annotations

import numpy as np
import pytest

from tests.flower import real_flower
from tfdp_fl.flower import DPFedAvgFixed, RoundsAbandonedError

pytestmark = real_flower.NEEDS_FLOWER


def test_flowers_own_server_ends_on_a_budget_and_on_silence():
    import flwr

    def server(strategy):
        strategy.strategy.initial_parameters = real_flower.parameters(np.zeros(8))
        clients = [real_flower.client([np.ones(8)]) for _ in range(12)]
        manager = real_flower.manager(clients)
        return flwr.server.Server(client_manager=manager, strategy=strategy)

    inner = real_flower.strategy("FedAvg", 6)
    budget = {"target_epsilon": 40.0, "target_delta": 1e-5}
    strategy = DPFedAvgFixed(inner, 6, 0.5, num_clients=12, **budget)
    server(strategy).fit(num_rounds=30, timeout=None)
    assert 30.0 < strategy.privacy_epsilon() <= 40.0
    assert len(strategy.released_rounds) < 30
    assert strategy.stopped_before_round == 30

    silent = server(DPFedAvgFixed(inner, 6, 0.5, max_abandoned_rounds=3))
    for proxy in silent.client_manager().all().values():
        proxy.client = None  # All of them raise.
    with pytest.raises(RoundsAbandonedError, match="3 rounds in a row"):
        silent.fit(num_rounds=30, timeout=None)


@pytest.mark.parametrize(
    "name", ["FedAvg", "FedProx", "FaultTolerantFedAvg", "FedAdam"]
)
def test_what_averages_is_accepted_and_makes_the_same_of_the_mean(name):
    arguments = {}
    if name == "FedProx":
        arguments["proximal_mu"] = 0.1
    if name == "FedAdam":
        arguments["initial_parameters"] = real_flower.parameters(np.zeros(2))
    updates = [[3.0, 0.0], [0.0, 0.3], [-0.1, 0.1], [0.2, 0.5]]
    clients = [real_flower.client([np.array(u)]) for u in updates]
    wrapper = DPFedAvgFixed(real_flower.strategy(name, 4, **arguments), 4, 1.0, 0.0)
    got = real_flower.round_of(wrapper, clients, np.zeros(2))
    clipped = [u / np.maximum(1, np.linalg.norm(u)) for u in updates]
    # The same strategy alone, with one client that sends the mean.
    alone = real_flower.strategy(name, 1, **arguments)
    mean = real_flower.client([np.mean(clipped, axis=0)], wrapped=False)
    wanted = real_flower.round_of(alone, [mean], np.zeros(2))
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_what_does_not_average_is_refused_by_name():
    import flwr

    for name in ("FedMedian", "FedTrimmedAvg", "Krum", "Bulyan", "QFedAvg"):
        with pytest.raises(ValueError, match=f"one that averages .*{name}"):
            DPFedAvgFixed(real_flower.strategy(name, 40), 40, 1.0)

    class Own(flwr.server.strategy.FedAvg):
        def aggregate_fit(self, server_round, results, failures):
            return results[0][1].parameters, {}

    class Median(flwr.server.strategy.FedMedian):
        def evaluate(self, server_round, parameters):
            return None

    DPFedAvgFixed(Own(), 2, 1.0)
    with pytest.raises(ValueError, match="aggregate_fit of FedMedian"):
        DPFedAvgFixed(Median(), 2, 1.0)
