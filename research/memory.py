r"""Measures and draws what a long training takes of memory, round by round.

    python research/memory.py --output=memory.png
    python research/memory.py --runs=clients --rounds=50 --output=memory.png

Three trainings, each in a process of its own: a million clients of whom 5000
take part in a round; a model of ten million parameters; and clients of 1 to
10 000 examples. After the third round what is resident has to stay where it is:
the last line says by how much it rose, and the exit status is 1 if by more than
5 % and 64 MB.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# research/ is not installed, and a program finds only its own folder.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdp_fl
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.experiments import plots

RUNS = ("clients", "parameters", "examples")
_SETTLED = 3  # Rounds by which everything was traced and allocated once.
_ALLOWED, _ALLOWED_MB = 1.05, 64.0

_RUNS = flags.DEFINE_list("runs", list(RUNS), "Which of them.")
_ROUNDS = flags.DEFINE_integer("rounds", 500, "How many rounds of each.")
_OUTPUT = flags.DEFINE_string("output", "memory.png", "The .png file.")
_JSON = flags.DEFINE_string("json", None, "Where the figures go, or nowhere.")
_ONE = flags.DEFINE_string("one", None, "Run this one here, and print JSON.")


def resident_mb() -> float:
    """Returns what this process has in memory, in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _training(name: str) -> tuple[Any, Any, float, dict[str, Any]]:
    """Returns a model, clients, m, and arguments of `fit`."""
    layers = tf.keras.layers
    rng = np.random.default_rng(0)
    if name == "clients":
        x = rng.normal(size=(100_000, 20)).astype(np.float32)
        y = rng.integers(0, 5, len(x))
        rows = rng.integers(0, len(x), [1_000_000, 3])
        stack, m = [layers.Input((20,)), layers.Dense(5)], 5000.0
    elif name == "parameters":
        x = rng.normal(size=(300, 50)).astype(np.float32)
        y = rng.integers(0, 5, len(x))
        rows = rng.integers(0, len(x), [100, 3])
        # 50 * 3000 + 3000 * 3000 + 3000 * 280 and the biases.
        stack = [
            layers.Input((50,)),
            layers.Dense(3000, "relu"),
            layers.Dense(3000, "relu"),
            layers.Dense(280),
        ]
        m = 4.0
    else:
        x = rng.normal(size=(100_000, 20)).astype(np.float32)
        y = rng.integers(0, 5, len(x))
        sizes = np.geomspace(1, 10_000, 300).astype(int)
        rows = [rng.integers(0, len(x), size) for size in sizes]
        stack, m = [layers.Input((20,)), layers.Dense(5)], 30.0
    clients = FederatedDataset.from_indices(x, y, rows)
    return tf.keras.Sequential(stack), clients, m, {"batch_size": 20}


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Trains here; returns the memory after each round, in MB.

    Args:
      name: One of `RUNS`.
      rounds: How many.
    """
    model, clients, m, options = _training(name)
    seen: list[float] = []

    class Memory(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(resident_mb())

    fed = tfdp_fl.DPFederatedModel(
        model, tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0), m
    )
    fed.compile(
        tf.keras.optimizers.SGD(0.01),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    started = time.time()
    fed.fit(clients, rounds, verbose=0, callbacks=[Memory()], **options)
    return {
        "name": name,
        "clients": clients.num_clients,
        "clients_per_round": m,
        "parameters": model.count_params(),
        "rounds": rounds,
        "seconds": round(time.time() - started, 1),
        "resident_mb": [round(each, 1) for each in seen],
    }


def rise(found: dict[str, Any]) -> tuple[float, bool]:
    """Returns how much memory rose once it was settled, and if too much.

    Returns:
      MB from the third round to the most after it; whether that is more than
      5 % and 64 MB.
    """
    seen = found["resident_mb"]
    base, most = seen[_SETTLED - 1], max(seen[_SETTLED - 1 :])
    return most - base, most > max(base * _ALLOWED, base + _ALLOWED_MB)


def main(argv: Sequence[str]) -> None:
    """Measures each in a process of its own, and draws them."""
    del argv
    if _ONE.value:
        print(json.dumps(measure(_ONE.value, _ROUNDS.value)))
        return
    found = []
    for name in _RUNS.value:
        if name not in RUNS:
            sys.exit(f"memory.py: --runs must be among {RUNS}, got {name!r}.")
        done = subprocess.run(
            [
                sys.executable,
                __file__,
                f"--one={name}",
                f"--rounds={_ROUNDS.value}",
            ],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(found, file)
    _draw(found, _OUTPUT.value)
    grew = False
    for each in found:
        more, too_much = rise(each)
        grew |= too_much
        print(
            f"{each['name']}: {each['parameters']} parameters, "
            f"{each['clients_per_round']:g} of {each['clients']} clients, "
            f"{each['rounds']} rounds in {each['seconds']:.0f} s: "
            f"{each['resident_mb'][_SETTLED - 1]:.0f} MB after round "
            f"{_SETTLED}, at most {more:.0f} MB more later."
        )
    print(f"Drawn: {_OUTPUT.value}")
    if grew:
        sys.exit("memory.py: memory grows.")


def _draw(found: Sequence[dict[str, Any]], path: str) -> None:
    figure, axes = plots.pyplot().subplots(figsize=(7, 4))
    for color, each in zip(plots.COLORS, found, strict=False):
        seen = each["resident_mb"]
        axes.plot(
            range(1, len(seen) + 1),
            seen,
            color=color,
            label=f"{each['clients_per_round']:g} of {each['clients']:,} "
            f"clients, {each['parameters']:,} parameters",
        )
    axes.set_xlabel("round")
    axes.set_ylabel("resident memory, MB")
    most = max(max(each["resident_mb"]) for each in found)
    axes.set_ylim(0, 1.35 * most)  # Room for the names.
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
