"""The server: any averaging strategy of Flower's, made private."""

from __future__ import annotations

import json
import pathlib
import sys

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import tfdp_fl
from keras_app import task

app = ServerApp()


def _mechanism(name: str, noise_multiplier: float) -> tfdp_fl.FixedClipping:
    if name == "fixed":
        return tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=noise_multiplier)
    if name == "shares":
        return tfdp_fl.FixedClipping(
            clip_norm=1.0,
            noise_multiplier=noise_multiplier,
            noise_site="client",
        )
    if name == "local":
        return tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=noise_multiplier)
    if name == "median":
        return tfdp_fl.MedianClipping(noise_multiplier=noise_multiplier)
    return tfdp_fl.AdaptiveClipping(
        initial_clip_norm=1.0, noise_multiplier=noise_multiplier
    )


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains, and writes down what happened."""
    config = context.run_config
    m = config["clients-per-round"]
    budget = {}
    if config["target-epsilon"]:
        budget = {
            "target_epsilon": config["target-epsilon"],
            "target_delta": 1e-3,
        }
    strategy = tfdp_fl.flower.PrivateStrategy(
        FedAvg(
            fraction_train=1e-9,
            fraction_evaluate=0.0,
            min_train_nodes=m,
            min_available_nodes=config["num-clients"],
        ),
        _mechanism(config["mechanism"], config["noise-multiplier"]),
        num_clients=config["num-clients"],
        clients_per_round=m,
        **budget,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.initial_weights()),
        num_rounds=config["num-rounds"],
        timeout=config["round-timeout"],
    )
    weights = result.arrays.to_numpy_ndarrays()
    moved = [w - v for w, v in zip(weights, task.initial_weights(), strict=True)]
    report = {
        **strategy.privacy_report(1e-3),
        "accuracy": task.accuracy(weights),
        "norm": sum(float((each**2).sum()) for each in moved) ** 0.5,
        "replies": {r.server_round: r.num_replies for r in strategy.released_rounds},
        "charged": [r.num_clients for r in strategy.released_rounds],
        "discarded": strategy.discarded_updates,
        "rejected": strategy.rejected_replies,
        "clip_norm": strategy.clip_norm,
        "tensorflow": "tensorflow" in sys.modules,
    }
    if config["report"]:
        pathlib.Path(config["report"]).write_text(json.dumps(report))
