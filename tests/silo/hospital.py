"""A small hospital: a table of people, and what it trains."""

import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl.keras import checkpoint

NUM_PEOPLE, NUM_FEATURES, DELTA = 30, 4, 1e-3


def table(num_people: int = NUM_PEOPLE, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns two rows of each person."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2 * num_people, NUM_FEATURES)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    return {"x": x, "y": y, "client_ids": np.repeat(np.arange(num_people), 2)}


def build(model: tf.keras.Model | None = None, **options: Any):
    """Returns a new model; of `options` those of `make_private` and of `_build`."""
    key = " at 0x" if model else repr(("hospital", sorted(options.items())))
    return toy.pooled(key, lambda: _build(model, **options))


def _build(
    model: tf.keras.Model | None,
    activation: str = "tanh",
    loss: str = "binary_crossentropy",
    learning_rate: float = 0.5,
    normalized: bool = False,
    **options: Any,
) -> tfdp_fl.DPFederatedModel:
    layers = [tf.keras.layers.BatchNormalization()] if normalized else []
    model = model or tf.keras.Sequential(
        [
            tf.keras.layers.Input((NUM_FEATURES,)),
            *layers,
            tf.keras.layers.Dense(3, activation=activation),
            tf.keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    options = {
        "target_epsilon": 4.0,
        "target_delta": DELTA,
        "num_clients": NUM_PEOPLE,
        "clients_per_round": 10,
        "rounds": 6,
        "accountant": "rdp",
        **options,
    }
    fed = tfdp_fl.make_private(model, **options)
    fed.compile(
        optimizer=tf.keras.optimizers.SGD(learning_rate),
        loss=loss,
        metrics=["accuracy"],
        server_optimizer=tf.keras.optimizers.SGD(1.0, momentum=0.5),
    )
    return fed


def silo(directory: pathlib.Path, of: Any = build, **options: Any) -> tfdp_fl.Silo:
    """Returns the hospital's silo."""
    options = {**table(), "batch_size": 2, "directory": directory, **options}
    return tfdp_fl.Silo(of, options.pop("x"), options.pop("y"), **options)


def charged(directory: pathlib.Path) -> int:
    """Returns how many releases the ledger of a directory tells of."""
    path = checkpoint.ledger_path(directory)
    return len(accounting.PrivacyLedger.read(path).entries) if path.exists() else 0


def is_same(update: Any, other: Any) -> bool:
    """Returns whether two answers are the same, bit for bit."""
    ours = [(w.dtype, w.tobytes()) for w in update.weights]
    theirs = [(w.dtype, w.tobytes()) for w in other.weights]
    return ours == theirs and update[1:] == other[1:]
