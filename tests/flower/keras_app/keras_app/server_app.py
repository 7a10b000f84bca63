"""The server: Flower's `FedAvg`, made private; it writes down what happened."""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import tfdp_fl

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains for two rounds of two clients."""
    strategy = tfdp_fl.flower.PrivateStrategy(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2),
        tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.001),
        num_clients=2,
        clients_per_round=2,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(
            [np.zeros((64, 10), np.float32), np.zeros(10, np.float32)]
        ),
        num_rounds=2,
        timeout=150,
    )
    weights = result.arrays.to_numpy_ndarrays()
    report = {
        "norm": sum(float((w**2).sum()) for w in weights) ** 0.5,
        "replies": {r.server_round: r.num_replies for r in strategy.released_rounds},
        "discarded": strategy.discarded_updates,
        "rejected": strategy.rejected_replies,
        "tensorflow": "tensorflow" in sys.modules,
    }
    pathlib.Path(context.run_config["report"]).write_text(json.dumps(report))
