"""Flower 1.42's own simulation: its link, two nodes in processes of their own."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import tfdp_fl
from tests.flower import flower_messages as fm

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
    return tfdp_fl.flower.private_mod(message, context, call_next)


@fm.NEEDS_FLOWER
def test_two_nodes_that_turn_hostile():
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp, strategy
    from flwr.simulation import run_simulation

    server, client, done = ServerApp(), ClientApp(mods=[_mod]), []
    client.train()(_train)

    @server.main()
    def main(grid, context):
        averages = strategy.FedAvg(
            fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2
        )
        mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.001)
        private = fm.private(mechanism, 2, strategy=averages)
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
