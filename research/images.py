r"""A convolutional network on images: frozen public features, with augmentation.

    python research/images.py mnist.npz          # `choose` as a second argument: below

Public are MNIST's digits 0 to 4: a network learns to tell them apart. Then 1000 clients
of 26 images of the digits 5 to 9 each, of two of these digits at most, train a new head
on its frozen convolutions, or everything, or everything from scratch: without privacy,
and at epsilon 8, 4 and 2 for a client (delta 0.1 / 1000). Layers of the model shift and
turn each image anew in training. Accuracy on MNIST's test images of 5 to 9; three
seeds. Rates and clips were chosen on a hundred further clients at epsilon 8, uncounted
(`choose` prints that table). Writes research/images.json; what is in it is not computed
again.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import numpy as np

import tfdp_fl
from research import fine_tuning

_RESULTS = pathlib.Path(__file__).with_suffix(".json")
_WEIGHTS = pathlib.Path(__file__).parents[1] / "build/images.weights.h5"
_CLIENTS, _HELD_OUT, _EXAMPLES = 1000, 100, 26
_BASE = fine_tuning.Settings(
    learning_rate=0.1, clip_norm=0.3, rounds=40, clients_per_round=100, batch_size=13
)
_CANDIDATES = [
    dataclasses.replace(_BASE, learning_rate=rate, clip_norm=clip)
    for rate, clip in ((0.1, 0.5), (0.1, 1.0), (0.2, 1.0), (0.4, 1.0))
]
_CHOSEN = {
    "head": _CANDIDATES[1],
    "everything": _CANDIDATES[2],
    "from scratch": _CANDIDATES[3],
}


def images(path: str, part: str, digits: range) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images [n, 28, 28, 1] of some digits, and labels from 0."""
    with np.load(path) as file:
        x, y = file[f"x_{part}"], file[f"y_{part}"].astype(np.int32)
    kept = np.isin(y, digits)
    return (x[kept, ..., np.newaxis] / 255).astype(np.float32), y[kept] - digits[0]


def build(seed: int) -> tuple[keras.Model, keras.Model]:
    """Returns a model, and the part of it that are its features."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    features = keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
        ]
    )
    augmentation = [layers.RandomTranslation(0.05, 0.05), layers.RandomRotation(0.03)]
    return keras.Sequential(
        [layers.Input((28, 28, 1)), *augmentation, features, layers.Dense(5)]
    ), features


def loss() -> Any:
    """Returns the loss."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def pretrain(path: str) -> None:
    """Trains on the public digits, and keeps the features' weights."""
    model, features = build(0)
    model.compile("adam", loss(), metrics=["accuracy"])
    model.fit(*images(path, "train", range(5)), batch_size=64, epochs=5, verbose=2)
    _WEIGHTS.parent.mkdir(exist_ok=True)
    features.save_weights(_WEIGHTS)


def run(
    row: fine_tuning.Row, clients: Any, test: Any, settings: Any = None
) -> fine_tuning.Row:
    """Returns what one row of the table comes to."""
    model, features = build(row.get("seed", 0))
    if row["what"] != "from scratch":
        features.load_weights(_WEIGHTS)
        features.trainable = row["what"] == "everything"
    settings = settings or _CHOSEN[row["what"]]
    took = fine_tuning.train(row, model, loss(), clients, settings)
    if row["epsilon"] != fine_tuning.KERAS:
        x, y = test
        foreseen = np.argmax(model.predict(x, batch_size=500, verbose=0), -1)
        took["accuracy"] = float((foreseen == y).mean())
    return took


def main() -> None:
    """Pretrains if need be; then chooses, or writes and prints the table."""
    path, *what = sys.argv[1:]
    if not _WEIGHTS.exists():
        pretrain(path)
    x, y = images(path, "train", range(5, 10))
    dealt = tfdp_fl.datasets.partition(y, _CLIENTS + _HELD_OUT, _EXAMPLES)
    clients = tfdp_fl.FederatedDataset.from_indices(x, y, dict(enumerate(dealt)))
    training = clients.take(range(_CLIENTS))
    if what == ["choose"]:
        test = fine_tuning.examples_of(clients, range(_CLIENTS, clients.num_clients))
        for name in _CHOSEN:
            for settings in _CANDIDATES:
                row = {"what": name, "epsilon": 8.0, "seed": 9}
                found = run(row, training, test, settings)
                print(name, settings, found, flush=True)
        return
    test = images(path, "test", range(5, 10))
    plan = [
        {"what": name, "epsilon": epsilon, "seed": seed}
        for seed in range(3)
        for name in _CHOSEN
        for epsilon in (fine_tuning.KERAS, 8.0, 4.0, 2.0, None)
    ]
    fine_tuning.fill(_RESULTS, plan, lambda row: run(row, training, test))


if __name__ == "__main__":
    main()
