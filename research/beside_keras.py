"""Times a round of `fit` beside Keras's epoch over the same examples, in turns.

python research/beside_keras.py
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import numpy as np

import tfdp_fl
from research.benchmarking import workloads

_TURNS = 5


def _compare(
    title: str,
    model: keras.Model,
    clients: tfdp_fl.datasets.FederatedDataset,
    batch_size: int,
) -> None:
    """Prints the seconds of an epoch, and of a round in which all clients take part."""
    examples = zip(*map(clients.client, clients.client_ids), strict=True)
    x, y = map(np.concatenate, examples)
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
    copy = keras.models.clone_model(model)
    fed = tfdp_fl.DPFederatedModel(copy, mechanism, clients.num_clients)
    sides = (model, (x, y.astype(int))), (fed, (clients,))
    seconds: list[list[float]] = [[], []]
    for each, _ in sides:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        each.compile(keras.optimizers.SGD(0.05), loss)
    for _ in range(2 + _TURNS):  # Two for warming up.
        for (each, data), taken in zip(sides, seconds, strict=True):
            start = time.perf_counter()
            each.fit(*data, batch_size=batch_size, verbose=0)
            taken.append(time.perf_counter() - start)
    epoch, of_round = (statistics.median(taken[2:]) for taken in seconds)
    shown = f"epoch {epoch:.3g} s, round {of_round:.3g} s, {of_round / epoch:.2g} times"
    print(f"{title}: {shown}", flush=True)


def main() -> None:
    """Prints a line for each model."""
    digits, _ = tfdp_fl.datasets.load_digits(num_clients=500)
    _compare(
        "MLP 64-128-10, digits, 500 clients", workloads.mlp(64, 128, 10), digits, 10
    )
    for name in ("mlp", "mlp_batch60", "cnn", "lstm"):
        work = workloads.WORKLOADS[name]
        x, y = work.data()
        rows = np.arange(len(x), dtype=np.int32).reshape(work.clients, work.examples)
        clients = tfdp_fl.datasets.FederatedDataset.from_indices(x, y, rows)
        title = f"{work.title}, {work.clients} clients"
        _compare(title, work.make_model(), clients, work.batch_size)


if __name__ == "__main__":
    main()
