"""The message API of the real Flower: its strategies, mods and ClientApps."""

from __future__ import annotations

import logging
import sys
from unittest import mock

import numpy as np
import pytest

import tfdp_fl
from tests.flower import flower_messages as fm
from tfdp_fl import accounting
from tfdp_fl.flower import private_mod

pytestmark = fm.NEEDS_FLOWER


def _strategy(name="FedAvg", m=3):
    from flwr.serverapp import strategy

    logging.getLogger("flwr").setLevel("ERROR")
    options = {"QFedAvg": {"client_learning_rate": 0.1}}.get(name, {})
    if name in ("Krum", "MultiKrum", "Bulyan"):
        options = {"num_malicious_nodes": 0}
    usual = {"fraction_train": 1e-9, "fraction_evaluate": 0.0}
    usual |= {"min_train_nodes": m, "min_available_nodes": m}
    return getattr(strategy, name)(**usual, **options)


def _grid(updates):
    return fm.Grid({10 + i: fm.adds([u], 10**i) for i, u in enumerate(updates)})


@pytest.mark.parametrize(
    "name", ["FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedProx", "FedYogi"]
)
def test_what_averages_makes_the_same_of_the_mean(name):
    updates = [[1.0, 0, 0], [0, 0.25, 0], [0, 0, -4.0]]
    mean = np.array([0.5, 0.25, -0.5]) / 3
    private = fm.private(strategy=_strategy(name))
    # The reference is the same strategy by itself, with one client that
    # sends the mean.
    alone, one = _strategy(name, 1), fm.Grid({10: fm.adds([mean], 1)}, mod=None)
    got = wanted = fm.model(np.ones(3))
    for number in range(1, 4):
        got, _ = fm.a_round(private, _grid(updates), got, number)
        wanted, _ = fm.a_round(alone, one, wanted, number)
    np.testing.assert_allclose(fm.arrays(got)[0], fm.arrays(wanted)[0], rtol=1e-6)
    assert private.rejected_replies == 0


def test_what_does_not_average_is_refused_and_start_ends_on_the_budget():
    robust = ("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan")
    for name in (*robust, "QFedAvg"):
        with pytest.raises(ValueError, match="must be one that averages"):
            fm.private(strategy=_strategy(name))
    target = accounting.epsilon(1.0, "fixed_size", 12, 3, 4, 1e-5)
    budget = {"target_epsilon": target, "target_delta": 1e-5}
    private = fm.private(fm.NOISY, 3, 12, _strategy(), **budget)
    start = {"initial_arrays": fm.model(np.zeros(2)), "num_rounds": 7}
    result = private.start(grid=_grid([[1.0, 0]] * 12), **start)
    assert len(private.released_rounds) == 4
    assert result.arrays is not None


def test_the_mod_works_where_flower_takes_mods():
    from flwr.clientapp import ClientApp

    for of_app, of_train in (([private_mod], []), ([], [private_mod])):
        app = ClientApp(mods=of_app)
        app.train(mods=of_train)(fm.app(fm.adds([np.full(2, 9.0)])))
        config = fm.ConfigRecord({"dpfedavg_clip_norm": 0.5})
        content = fm.RecordDict({"arrays": fm.model(np.zeros(2)), "config": config})
        reply = app(fm.Message(content, 7, "train"), mock.Mock())
        (sent,) = fm.arrays(reply.content["arrays"])
        assert np.linalg.norm(sent) == pytest.approx(0.5)
        assert reply.content["metrics"]["num-examples"] == 1


# Flower's own simulation: its link, two nodes in processes of their own.

# What a node does in a round: one sends a NaN, past the mod; then it drops out, and
# the other claims, past the mod, a thousand million examples.
_ACTS = {(1, 0): "nan", (2, 0): "gone", (2, 1): "heavy"}


def _act(message, context):
    server_round = message.content["config"]["server-round"]
    return _ACTS.get((server_round, context.node_config["partition-id"]))


def _train(message, context):
    act = _act(message, context)
    if act == "gone":
        raise OSError("The disk is full.")
    value = np.nan if act == "nan" else 9.0
    weights = [w + value for w in fm.arrays(message.content["arrays"])]
    metrics = {"num-examples": 10**9 if act == "heavy" else 100}
    return fm.Message(
        fm.RecordDict({"arrays": fm.model(*weights), "m": fm.MetricRecord(metrics)}),
        reply_to=message,
    )


def _mod(message, context, call_next):
    if _act(message, context):
        return call_next(message, context)
    return private_mod(message, context, call_next)


def test_two_nodes_that_turn_hostile():
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    server, client, done = ServerApp(), ClientApp(mods=[_mod]), []
    client.train()(_train)

    @server.main()
    def main(grid, context):
        mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.001)
        private = fm.private(mechanism, 2, strategy=_strategy(m=2))
        start = fm.model(np.zeros((64, 10), np.float32), np.zeros(10, np.float32))
        done.append((private, private.start(grid, start, num_rounds=2).arrays))

    # The nodes find this module by its name.
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.cloudpickle.register_pickle_by_value(fm)
    run_simulation(server, client, num_supernodes=2)
    ((private, arrays),) = done
    assert [r.num_replies for r in private.released_rounds] == [2, 1]
    assert (private.discarded_updates, private.rejected_replies) == (1, 0)
    # S / m twice, whatever the other client sends, and noise of 0.025.
    norm = np.sqrt(sum(np.sum(w.astype(float) ** 2) for w in fm.arrays(arrays)))
    assert norm == pytest.approx(1.0, abs=0.1)
