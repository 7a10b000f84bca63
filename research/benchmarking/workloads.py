"""What is timed: models with their data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

CLIENTS_PER_ROUND = 50
LEARNING_RATE = 0.05
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, what each of its clients has, and what a step computes.

    Attributes:
      name: As in `--rows`.
      title: As in the table.
      make_model: Returns a new, built Keras model with logits as its output.
      feature_shape: One example's.
      num_classes: Labels are below it.
      examples: Of each client.
      batch_size: Of local training.
      sequence: Whether features and labels are sequences of symbols.
      items: Of how many a feature names one; 0: features are numbers.
      clients: In the cohort, and in the population.
    """

    name: str
    title: str
    make_model: Callable[[], tf.keras.Model]
    feature_shape: tuple[int, ...]
    num_classes: int
    examples: int
    batch_size: int
    sequence: bool = False
    items: int = 0
    clients: int = CLIENTS_PER_ROUND

    def data(self, num_examples: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the same random examples whoever asks, (x, y)."""
        if num_examples is None:
            num_examples = self.clients * self.examples
        random = np.random.default_rng(0)
        shape = (num_examples, *self.feature_shape)
        if self.sequence:
            x = random.integers(0, self.num_classes, shape).astype(np.int32)
            y = random.integers(0, self.num_classes, shape)
        elif self.items:
            x = random.integers(0, self.items, shape).astype(np.int32)
            y = random.integers(0, self.num_classes, num_examples)
        else:
            x = random.random(shape, np.float32)
            y = random.integers(0, self.num_classes, num_examples)
        return x, y.astype(np.int32)


def loss() -> tf.keras.losses.Loss:
    """Returns the loss that both sides train with."""
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def metrics() -> list[tf.keras.metrics.Metric]:
    """Returns the metrics that both sides compute."""
    return [tf.keras.metrics.SparseCategoricalAccuracy("accuracy")]


def mlp(*units: int) -> tf.keras.Model:
    """Returns a dense network with ReLUs; the first number is its input's."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.InputLayer((units[0],)),
            *[layers.Dense(width, activation="relu") for width in units[1:-1]],
            layers.Dense(units[-1]),
        ]
    )


def cnn() -> tf.keras.Model:
    """Returns two 5x5 convolutions, 32 and 64, and a dense layer of 512."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.InputLayer((28, 28, 1)),
            layers.Conv2D(32, 5, activation="relu", padding="same"),
            layers.MaxPool2D(),
            layers.Conv2D(64, 5, activation="relu", padding="same"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(512, activation="relu"),
            layers.Dense(10),
        ]
    )


def lstm() -> tf.keras.Model:
    """Returns two LSTM layers of 128 over sequences of 80 characters."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.InputLayer((80,)),
            layers.Embedding(90, 8),
            layers.LSTM(128, return_sequences=True),
            layers.LSTM(128, return_sequences=True),
            layers.Dense(90),
        ]
    )


def embedding(items: int) -> tf.keras.Model:
    """Returns a classifier of items by an embedding of width 32."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.InputLayer((1,), dtype="int32"),
            layers.Embedding(items, 32),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


_MNIST_MLP = (784, 600, 100, 10)


def _mnist_mlp(name: str, examples: int, batch_size: int) -> Workload:
    return Workload(
        name=name,
        title=f"MLP 784-600-100-10, {examples} examples, batch {batch_size}",
        make_model=lambda: mlp(*_MNIST_MLP),
        feature_shape=(784,),
        num_classes=10,
        examples=examples,
        batch_size=batch_size,
    )


WORKLOADS: dict[str, Workload] = {
    each.name: each
    for each in (
        Workload(
            name="mlp_small",
            title="MLP 64-128-10, 20 examples, batch 10",
            make_model=lambda: mlp(64, 128, 10),
            feature_shape=(64,),
            num_classes=10,
            examples=20,
            batch_size=10,
        ),
        _mnist_mlp("mlp", 60, 10),
        _mnist_mlp("mlp_batch60", 600, 60),
        Workload(
            name="cnn",
            title="CNN 32-64-512, 40 examples, batch 20",
            make_model=cnn,
            feature_shape=(28, 28, 1),
            num_classes=10,
            examples=40,
            batch_size=20,
        ),
        Workload(
            name="lstm",
            title="two-layer LSTM(128), 80 characters, 40 examples, batch 20",
            make_model=lstm,
            feature_shape=(80,),
            num_classes=90,
            examples=40,
            batch_size=20,
            sequence=True,
        ),
    )
}

# Not compared with TFF.
EMBEDDINGS: dict[str, Workload] = {
    f"embedding_{items}": Workload(
        name=f"embedding_{items}",
        title=f"embedding of {items} items, 40 examples, batch 10",
        make_model=functools.partial(embedding, items),
        feature_shape=(1,),
        num_classes=10,
        examples=40,
        batch_size=10,
        items=items,
    )
    for items in (10_000, 100_000)
}
