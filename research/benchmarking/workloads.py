"""What is timed: five models with their data, and the arithmetic of a round."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

CLIENTS_PER_ROUND = 50
LEARNING_RATE = 0.05
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 0.1


@dataclasses.dataclass(frozen=True)
class Product:
    """The product of a [rows, inner] and an [inner, columns] matrix.

    Attributes:
      rows: Of the left matrix.
      inner: Columns of the left matrix.
      columns: Of the right matrix.
      count: How often it is done in a step, one after the other.
    """

    rows: int
    inner: int
    columns: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations, an addition and a multiplication each."""
        return 2 * self.rows * self.inner * self.columns * self.count


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution with stride 1 and padding "same", or a gradient of it.

    Attributes:
      batch: Images.
      size: Their height and width.
      inputs: Channels that go in.
      outputs: Channels that come out.
      kernel: Height and width of the filter.
      part: "forward", "filter_gradient" or "input_gradient".
    """

    batch: int
    size: int
    inputs: int
    outputs: int
    kernel: int
    part: str = "forward"
    count: int = dataclasses.field(default=1, init=False)

    @property
    def flops(self) -> int:
        """Floating-point operations, those with the padding's zeros too."""
        taps = self.kernel**2 * self.inputs * self.outputs
        return 2 * self.batch * self.size**2 * taps


Operation = Product | Convolution


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
      step: The products and convolutions of one local step, forward and back.
      sequence: Whether features and labels are sequences of symbols.
      clients: In the cohort, and in the population.
    """

    name: str
    title: str
    make_model: Callable[[], tf.keras.Model]
    feature_shape: tuple[int, ...]
    num_classes: int
    examples: int
    batch_size: int
    step: tuple[Operation, ...]
    sequence: bool = False
    clients: int = CLIENTS_PER_ROUND

    @property
    def steps_per_round(self) -> int:
        """Local steps of a round, over all clients."""
        return self.clients * -(-self.examples // self.batch_size)

    @property
    def flops_per_round(self) -> int:
        """Of matrix products and convolutions alone."""
        return self.steps_per_round * sum(each.flops for each in self.step)

    def data(self, num_examples: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the same random examples whoever asks, (x, y)."""
        if num_examples is None:
            num_examples = self.clients * self.examples
        random = np.random.default_rng(0)
        shape = (num_examples, *self.feature_shape)
        if self.sequence:
            x = random.integers(0, self.num_classes, shape).astype(np.int32)
            y = random.integers(0, self.num_classes, shape)
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


def dense_products(
    batch: int, *units: int, first_layer: bool = True, count: int = 1
) -> tuple[Product, ...]:
    """Returns the products of dense layers, forward and back.

    Args:
      batch: Rows of a batch.
      *units: The input's width and that of each layer.
      first_layer: Whether the input is data, whose gradient nobody needs.
      count: How often in a step.
    """
    products = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise(units)):
        products.append(Product(batch, inputs, outputs, count))
        products.append(Product(inputs, batch, outputs, count))
        if index or not first_layer:
            products.append(Product(batch, outputs, inputs, count))
    return tuple(products)


def _cnn_step(batch: int) -> tuple[Operation, ...]:
    return (
        Convolution(batch, 28, 1, 32, 5),
        Convolution(batch, 28, 1, 32, 5, "filter_gradient"),
        Convolution(batch, 14, 32, 64, 5),
        Convolution(batch, 14, 32, 64, 5, "filter_gradient"),
        Convolution(batch, 14, 32, 64, 5, "input_gradient"),
        *dense_products(batch, 7 * 7 * 64, 512, 10, first_layer=False),
    )


def _lstm_step(batch: int) -> tuple[Operation, ...]:
    gates, length = 4 * 128, 80
    recurrent = [
        product
        for width in (8, 128, 128, 128)  # Input and state of either layer.
        for product in dense_products(
            batch, width, gates, first_layer=False, count=length
        )
    ]
    return (
        *recurrent,
        *dense_products(batch * length, 128, 90, first_layer=False),
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
        step=dense_products(batch_size, *_MNIST_MLP),
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
            step=dense_products(10, 64, 128, 10),
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
            step=_cnn_step(20),
        ),
        Workload(
            name="lstm",
            title="two-layer LSTM(128), 80 characters, 40 examples, batch 20",
            make_model=lstm,
            feature_shape=(80,),
            num_classes=90,
            examples=40,
            batch_size=20,
            step=_lstm_step(20),
            sequence=True,
        ),
    )
}
