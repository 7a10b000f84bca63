"""What each `noise_generator` costs: times of whole rounds.

    python research/noise_generator.py

Models that differ in `noise_generator=` alone train in turn, a round each,
so that whatever else the machine does slows all of them. For each size it
prints the median time of a round, its ratio to Philox's, and what drawing alone
takes.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# research/ is not installed, and a program finds only its own folder.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdp_fl
from tfdp_fl.mechanisms import exact_gaussian, noise

_WIDTHS = flags.DEFINE_list(
    "widths", ["128", "1200", "12000", "120000"], "Units of the hidden layer."
)
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Timed rounds of each.")
_CLIENTS = flags.DEFINE_integer("clients", 20, "Clients in a round.")
_EXAMPLES = flags.DEFINE_integer("examples", 20, "Examples of a client.")


def _model(width: int, generator: str, site: str) -> tfdp_fl.DPFederatedModel:
    layers = tf.keras.layers
    fed = tfdp_fl.DPFederatedModel(
        tf.keras.Sequential(
            [
                layers.Input((64,)),
                layers.Dense(width, activation="relu"),
                layers.Dense(10),
            ]
        ),
        tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0, noise_site=site),
        _CLIENTS.value,
        "fixed_size",
        noise_generator=generator,
    )
    fed.compile(
        tf.keras.optimizers.SGD(0.1),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return fed


def _clients() -> tfdp_fl.datasets.FederatedDataset:
    rng = np.random.default_rng(0)
    count, size = 2 * _CLIENTS.value, _EXAMPLES.value
    x = rng.normal(size=(count * size, 64)).astype(np.float32)
    y = rng.integers(10, size=count * size).astype(np.int32)
    rows = np.arange(count * size).reshape(count, size)
    return tfdp_fl.datasets.FederatedDataset.from_indices(x, y, rows)


def _medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the median seconds of some calls, made in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_ROUNDS.value + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if number:  # The first one traces.
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in times.items()}


def _draw(size: int, generator: str) -> Callable[[], object]:
    zeros = tf.zeros([size])

    @tf.function
    def drawn(seed):
        with noise.seeded(seed):
            return noise.add_normal([zeros], 1.0)[0]

    return lambda: drawn(tf.constant(noise.fresh_seed(generator))).numpy()


def main(_: list[str]) -> None:
    """Prints the table."""
    clients = _clients()
    print("| parameters | | philox | cryptographic | ratio | exact | ratio |")
    print("|---|---|---|---|---|---|---|")
    for width in map(int, _WIDTHS.value):
        size = 64 * width + width + 10 * width + 10
        rows = {
            "drawing alone": {
                **{name: _draw(size, name) for name in noise.GENERATORS},
                noise.EXACT: lambda size=size: exact_gaussian.rounded(2.0**20, size),
            }
        }
        for site in ("server", "client") if size < 10**6 else ("server",):
            names = list(noise.GENERATORS)
            if site == "server":
                names.append(noise.EXACT)
            models = {name: _model(width, name, site) for name in names}
            rows[f"a round, {site}"] = {
                name: lambda fed=fed: fed.fit(clients, verbose=0)
                for name, fed in models.items()
            }
        for what, calls in rows.items():
            took = _medians(calls)
            fast = took.pop(noise.PHILOX)
            others = " | ".join(
                f"{1e3 * slow:.3g} ms | {slow / fast:.2g}" for slow in took.values()
            )
            print(
                f"| {size} | {what} | {1e3 * fast:.3g} ms | {others} |",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
