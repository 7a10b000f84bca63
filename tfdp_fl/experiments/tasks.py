"""Learning tasks: a data set's clients, and a new model for them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from scipy import ndimage

from tfdp_fl import datasets, features
from tfdp_fl.experiments.settings import Settings

_layers = tf.keras.layers
_EMBEDDING_SIZE = 8
# The settings that define the data.
_DATA_SETTINGS = (
    *("dataset", "data_path", "num_clients", "iid", "examples_per_client"),
    *("validation_examples", "sequence_length", "clients_per_role"),
    *("input_features", "input_shifts"),
)


@dataclasses.dataclass(frozen=True)
class Task:
    """The data, and the number of classes.

    Attributes:
      clients: The clients' examples.
      test: `(x, y)` to evaluate on.
      num_classes: The number of classes.
      features: The model that computed the examples from the original ones; None: they
        are the original ones.
    """

    clients: datasets.FederatedDataset
    test: tuple[Any, Any]
    num_classes: int
    features: tf.keras.Model | None = None


def load_task(settings: Settings) -> Task:
    """Returns the data of a run; the last call's data is cached.

    Args:
      settings: Resolved settings.

    Raises:
      ValueError: A setting does not fit the data.
      OSError: A file is missing or cannot be downloaded.
    """
    return _load(tuple((name, getattr(settings, name)) for name in _DATA_SETTINGS))


@functools.lru_cache(maxsize=1)
def _load(chosen: tuple[tuple[str, Any], ...]) -> Task:
    options = {name: value for name, value in chosen if value is not None}
    has_features = options.pop("input_features", None) is not None
    pixels, dataset = options.pop("input_shifts"), options.pop("dataset")
    path = options.pop("data_path", None)
    if dataset == "shakespeare":
        options.pop("validation_examples")
        clients, test = datasets.load_shakespeare(path, **options)
        task = Task(clients, test, len(datasets.shakespeare_vocabulary()))
    elif dataset == "mnist":
        task = Task(*datasets.load_mnist(path=path, **options), num_classes=10)
    else:
        task = Task(*datasets.load_digits(**options), num_classes=10)
    clients, (test_x, test_y) = task.clients, task.test
    if pixels:
        clients = _with_shifts(clients, pixels)
    if not has_features:
        return dataclasses.replace(task, clients=clients)
    (size,) = clients.element_spec[0].shape
    layer = tf.keras.Sequential(
        [tf.keras.Input((size,)), _as_image(size), features.OrientedGradients()]
    )

    def compute(x: np.ndarray) -> np.ndarray:
        return layer.predict(x, batch_size=1000, verbose=0)

    clients = clients.map(lambda x, y: (compute(x), y))
    return Task(clients, (compute(test_x), test_y), task.num_classes, layer)


def _with_shifts(
    clients: datasets.FederatedDataset, pixels: int
) -> datasets.FederatedDataset:
    """Returns clients with each of their images shifted once, at random."""
    x, y = map(np.asarray, clients.flat())
    rows, lengths = clients.client_rows(np.arange(clients.num_clients))
    versions = shift_images(x, pixels)
    choices = np.random.default_rng([0, pixels]).integers(len(versions), size=len(rows))
    return datasets.FederatedDataset.from_indices(
        np.concatenate(versions),
        np.tile(y, len(versions)),
        np.split(rows + len(x) * choices, np.cumsum(lengths)[:-1]),
    )


def shift_images(images: np.ndarray, pixels: int) -> list[np.ndarray]:
    """Returns images unchanged, and shifted up, down, left and right.

    Args:
      images: [n, m], square grey images of m pixels.
      pixels: The length of a shift, in pixels; what is shifted in is 0.
    """
    side = math.isqrt(images.shape[1])
    if pixels >= side:
        raise ValueError(
            f"input_shifts must be less than the images' side {side}, got {pixels}."
        )
    grid = images.reshape(-1, side, side)
    steps = [(0, 0), (pixels, 0), (-pixels, 0), (0, pixels), (0, -pixels)]
    return [
        ndimage.shift(grid, (0, *step), order=0).reshape(images.shape) for step in steps
    ]


def build_model(settings: Settings, task: Task) -> tf.keras.Model:
    """Returns a new model for a task; its outputs are logits.

    Raises:
      ValueError: The model cannot take the task's examples.
    """
    units, classes = settings.units(), task.num_classes
    if settings.model == "lstm":
        return lstm(classes, units or (128, 128))
    (size,) = task.clients.element_spec[0].shape
    hidden = () if settings.model == "linear" else units or (128,)
    return mlp(size, classes, hidden, settings.input_pooling or 1)


def with_feature_layers(task: Task, model: tf.keras.Model) -> tf.keras.Model:
    """Returns a model that takes the original examples, with the same weights.

    Args:
      task: The task that the model was trained on.
      model: The trained model.
    """
    if task.features is None:
        return model
    return tf.keras.Sequential(
        [
            tf.keras.Input(task.features.input_shape[1:]),
            *task.features.layers,
            *model.layers,
        ]
    )


def mlp(
    input_size: int,
    num_classes: int,
    hidden_units: Sequence[int] = (128,),
    pooling: int = 1,
) -> tf.keras.Model:
    """Returns a dense network with ReLU, whose outputs are logits.

    Args:
      input_size: The number of features of an example.
      num_classes: The number of logits.
      hidden_units: The widths of the hidden layers.
      pooling: If not 1, the side of the squares over which square images are averaged,
        so that noise is added to fewer weights. The means are multiplied by this side,
        which keeps the images' L2 norm about the same.
    """
    layers = [tf.keras.Input((input_size,))]
    if pooling != 1:
        layers += [_as_image(input_size), _layers.AveragePooling2D(pooling)]
        layers += [_layers.Rescaling(pooling), _layers.Flatten()]
    layers += [_layers.Dense(units, activation="relu") for units in hidden_units]
    return tf.keras.Sequential([*layers, _layers.Dense(num_classes)])


def _as_image(pixels: int) -> tf.keras.layers.Layer:
    side = math.isqrt(pixels)
    return _layers.Reshape((side, side, 1))


def lstm(
    vocabulary_size: int, hidden_units: Sequence[int] = (128, 128)
) -> tf.keras.Model:
    """Returns a next-token model for sequences of any length.

    Token 0 is padding, which counts neither in the loss nor in the metrics.

    Args:
      vocabulary_size: The number of tokens, and of logits.
      hidden_units: The widths of the LSTM layers.
    """
    # Keras's default, with 20 times smaller values, delays learning by hundreds of
    # rounds.
    embedding = _layers.Embedding(
        vocabulary_size,
        _EMBEDDING_SIZE,
        embeddings_initializer=tf.keras.initializers.RandomNormal(stddev=1.0),
        mask_zero=True,
        input_shape=(None,),
    )
    hidden = [_layers.LSTM(units, return_sequences=True) for units in hidden_units]
    return tf.keras.Sequential([embedding, *hidden, _layers.Dense(vocabulary_size)])
