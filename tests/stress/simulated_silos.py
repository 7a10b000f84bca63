"""One run of Flower's simulation with four silos: a message each, then all of it ends.

python -m tests.stress.simulated_silos DIRECTORY
"""

import functools
import pathlib
import sys

import numpy as np

import tfdp_fl
from tests.silo import hospital

# What a silo has to go on with: a clip, passes, noise of earlier rounds.
OPTIONS = (
    {"mechanism": "adaptive", "sampling": "poisson"},
    {"mechanism": "median", "sampling": "fixed_size"},
    {"mechanism": "adaptive", "sampling": "shuffled"},
    {"mechanism": "correlated", "clip_norm": 0.5, "sampling": "cyclic"},
)


def silo(folder: pathlib.Path, number: int) -> tfdp_fl.Silo:
    """Returns one of the four."""
    of = functools.partial(hospital.build, **OPTIONS[number])
    return hospital.silo(folder / str(number), of)


def main() -> None:
    """Sends the model to all four, and keeps their mean."""
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp, strategy
    from flwr.simulation import run_simulation

    folder = pathlib.Path(sys.argv[1])
    kept, server = folder / "model.npz", ServerApp()

    @server.main()
    def send(grid, context):
        weights = hospital.build().get_weights()
        if kept.exists():
            weights = list(np.load(kept).values())
        four = {"min_available_nodes": 4, "min_train_nodes": 4}
        averaged = strategy.FedAvg(fraction_evaluate=0.0, **four)
        start = ArrayRecord(weights)
        result = averaged.start(grid=grid, initial_arrays=start, num_rounds=1)
        np.savez(kept, *result.arrays.to_numpy_ndarrays())

    client = tfdp_fl.flower.silo_app(
        lambda context: silo(folder, int(context.node_config["partition-id"]))
    )
    run_simulation(server, client, num_supernodes=4)


if __name__ == "__main__":
    main()
