"""Rounds through the real Flower's older API: strategies, clients, no network."""

from __future__ import annotations

import numpy as np
import pytest

from tests.flower import real_flower
from tfdp_fl.flower import DPFedAvgAdaptive, DPFedAvgFixed, RoundsAbandonedError

pytestmark = real_flower.NEEDS_FLOWER


def _zip(result):
    result.parameters.tensors[0] = b"PK\x03\x04" + b"\0" * 99


@pytest.mark.parametrize(
    "change",
    [_zip, lambda r: r.metrics.clear(), lambda r: setattr(r, "parameters", None)],
)
def test_one_hostile_reply_ends_nothing(change, caplog):
    updates = np.random.default_rng(7).normal(size=(6, 8)).astype(np.float32)
    wrapper = DPFedAvgAdaptive(real_flower.strategy("FedAvg", 6), 6, 1000.0, 0.0)
    hostile = []

    def spoil(results):
        proxy, result = results[2]
        hostile.append(proxy.cid)
        change(result)

    got, metrics = real_flower.round_of(
        wrapper,
        [real_flower.client([u]) for u in updates],
        np.zeros(8, np.float32),
        change=spoil,
    )
    assert f"client {hostile[0]!r}: " in caplog.text
    assert metrics == {}
    others = np.delete(updates, int(hostile[0]), axis=0).sum(axis=0) / 6
    np.testing.assert_allclose(got, others, rtol=0, atol=2e-6)
    assert wrapper.rejected_replies == 1


def _server(strategy):
    import flwr

    strategy.strategy.initial_parameters = real_flower.parameters(np.zeros(8))
    clients = [real_flower.client([np.ones(8)]) for _ in range(12)]
    return flwr.server.Server(
        client_manager=real_flower.manager(clients), strategy=strategy
    )


def test_flowers_own_server_ends_on_a_budget_and_on_silence():
    inner = real_flower.strategy("FedAvg", 6)
    budget = {"target_epsilon": 40.0, "target_delta": 1e-5}
    strategy = DPFedAvgFixed(inner, 6, 0.5, num_clients=12, **budget)
    _server(strategy).fit(num_rounds=30, timeout=None)
    assert 30.0 < strategy.privacy_epsilon() <= 40.0
    assert len(strategy.released_rounds) < 30
    assert strategy.stopped_before_round == 30

    silent = _server(DPFedAvgFixed(inner, 6, 0.5, max_abandoned_rounds=3))
    for proxy in silent.client_manager().all().values():
        proxy.client = None  # All of them raise.
    with pytest.raises(RoundsAbandonedError, match="3 rounds in a row"):
        silent.fit(num_rounds=30, timeout=None)


_OPTIMIZING = ("FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedOpt")


@pytest.mark.parametrize(
    "name", ["FedAvg", "FedProx", "FaultTolerantFedAvg", *_OPTIMIZING]
)
def test_what_averages_is_accepted_and_makes_the_same_of_the_mean(name):
    arguments = {}
    if name == "FedProx":
        arguments["proximal_mu"] = 0.1
    if name in _OPTIMIZING:
        arguments["initial_parameters"] = real_flower.parameters(np.zeros(2))
    updates = [[3.0, 0.0], [0.0, 0.3], [-0.1, 0.1], [0.2, 0.5]]
    clients = [real_flower.client([np.array(u)]) for u in updates]
    wrapper = DPFedAvgFixed(real_flower.strategy(name, 4, **arguments), 4, 1.0, 0.0)
    got, _ = real_flower.round_of(wrapper, clients, np.zeros(2))
    clipped = [u / np.maximum(1, np.linalg.norm(u)) for u in updates]
    # The same strategy alone, with one client that sends the mean.
    alone = real_flower.strategy(name, 1, **arguments)
    mean = real_flower.client([np.mean(clipped, axis=0)], wrapped=False)
    wanted, _ = real_flower.round_of(alone, [mean], np.zeros(2))
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


@pytest.mark.parametrize(
    "name", ["FedMedian", "FedTrimmedAvg", "Krum", "Bulyan", "QFedAvg"]
)
def test_what_does_not_average_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"one that averages .*{name}"):
        DPFedAvgFixed(real_flower.strategy(name, 40), 40, 1.0)


def test_a_subclass_is_as_good_as_the_class_that_averages():
    import flwr

    class Own(flwr.server.strategy.FedAvg):
        def aggregate_fit(self, server_round, results, failures):
            return results[0][1].parameters, {}

    class Median(flwr.server.strategy.FedMedian):
        def evaluate(self, server_round, parameters):
            return None

    DPFedAvgFixed(Own(), 2, 1.0)
    with pytest.raises(ValueError, match="aggregate_fit of FedMedian"):
        DPFedAvgFixed(Median(), 2, 1.0)
