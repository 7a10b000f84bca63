"""Tables that grow row by row, and how the two examples of fine-tuning train."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pathlib
import resource
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfdp_fl

Row = dict[str, Any]
KERAS = "Keras's epoch"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How clients train.

    Attributes:
      learning_rate: The clients' rate, of plain SGD.
      clip_norm: S.
      rounds: T.
      clients_per_round: m.
      batch_size: Of the clients.
    """

    learning_rate: float
    clip_norm: float
    rounds: int
    clients_per_round: int
    batch_size: int


def examples_of(clients: Any, positions: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples of some clients together."""
    found = [clients.client(clients.client_ids[k]) for k in positions]
    x, y = zip(*found, strict=True)
    return np.concatenate(x), np.concatenate(y)


def train(row: Row, model: Any, loss: Any, clients: Any, settings: Settings) -> Row:
    """Trains a model's trainable weights on clients; returns what it took.

    Args:
      row: Its epsilon, at delta = 0.1 / N, is a number, None (without privacy), or
        `KERAS`: three epochs over the rows of as many clients as a round has.
      model: The model.
      loss: Its loss.
      clients: The clients.
      settings: How they train.
    """
    epsilon, size = row["epsilon"], settings.clients_per_round
    optimizer = keras.optimizers.SGD(settings.learning_rate)
    options = {"batch_size": settings.batch_size, "verbose": 0}
    trained = sum(int(np.prod(each.shape)) for each in model.trainable_weights)
    if epsilon == KERAS:
        x, y = examples_of(clients, range(size))
        model.compile(optimizer, loss)
        options["epochs"] = 3
        fit = functools.partial(model.fit, x, y, **options)
    else:
        if epsilon is None:
            fed: Any = tfdp_fl.DPFederatedModel(model, tfdp_fl.NoPrivacy(), size)
        else:
            fed = tfdp_fl.make_private(
                model,
                target_epsilon=epsilon,
                target_delta=0.1 / clients.num_clients,
                num_clients=clients.num_clients,
                clients_per_round=size,
                rounds=settings.rounds,
                mechanism="fixed",
                clip_norm=settings.clip_norm,
            )
        fed.compile(optimizer, loss)
        options["rounds"] = settings.rounds
        fit = functools.partial(fed.fit, clients, **options)
    ends: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: ends.append(time.perf_counter())
    )
    fit(callbacks=[note])
    return {
        "seconds": float(np.median(np.diff(ends))),  # The first one compiles.
        "trained_weights": trained,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def fill(
    path: pathlib.Path,
    plan: list[Row],
    run: Callable[[Row], Row],
    by: tuple[str, ...] = ("what", "epsilon"),
) -> list[Row]:
    """Runs what the file does not have yet, keeps it there, and prints the table.

    A line is for rows that agree in `by`: means of accuracies and medians of the rest,
    ± standard deviations over seeds.
    """
    found = json.loads(path.read_text("utf-8")) if path.exists() else []
    for row in plan:
        if not any(row.items() <= each.items() for each in found):
            found.append({**row, **run(row)})
            path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
            print(found[-1], flush=True)
    groups = collections.defaultdict(list)
    for row in found:
        groups[tuple(row[name] for name in by if name in row)].append(row)
    for key, rows in groups.items():
        print(*key, f"({len(rows)})", end="")
        for name in [name for name in rows[0] if name not in (*by, "seed", "epsilons")]:
            values = [row[name] for row in rows]
            middle = np.mean(values) if name == "accuracy" else np.median(values)
            spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
            print(f", {name} {middle:.4g} ± {spread:.2g}", end="")
        print()
    return found
