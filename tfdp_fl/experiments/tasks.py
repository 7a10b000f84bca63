"""What is learned: a data set's clients, and a fresh model for them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import datasets
from tfdp_fl.experiments import models
from tfdp_fl.experiments import settings as settings_lib


@dataclasses.dataclass(frozen=True)
class Task:
    """Data, and how many classes its labels have.

    Attributes:
      clients: The clients' examples.
      test: `(x, y)` to evaluate on.
      num_classes: How many classes there are.
      features: What made the examples of the original ones; None: they are
        the original ones.
    """

    clients: datasets.FederatedDataset
    test: tuple[Any, Any]
    num_classes: int
    features: tf.keras.Model | None = None


def load_task(settings: settings_lib.Settings) -> Task:
    """Returns the data of a run; that of the last call is kept for the next.

    Args:
      settings: Resolved settings.

    Raises:
      ValueError: An option does not fit the data.
      OSError: A file is not there, or cannot be downloaded.
    """
    chosen = {
        name: getattr(settings, name)
        for name in (
            "dataset",
            "data_path",
            "num_clients",
            "iid",
            "shards_per_client",
            "examples_per_client",
            "validation_examples",
            "sequence_length",
            "clients_per_role",
            "input_features",
            "input_shifts",
        )
    }
    return _load(json.dumps(chosen))


def whole_model(task: Task, model: tf.keras.Model) -> tf.keras.Model:
    """Returns a model that takes the original examples, with the same weights.

    Args:
      task: What the model was trained on.
      model: A trained model.
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


@functools.lru_cache(maxsize=1)
def _load(chosen: str) -> Task:
    options = {k: v for k, v in json.loads(chosen).items() if v is not None}
    features = options.pop("input_features", None) is not None
    pixels = options.pop("input_shifts")
    task = _load_original(dict(options))
    if not features and not pixels:
        return task
    return _prepared(task, features, pixels)


def _prepared(task: Task, features: bool, pixels: int) -> Task:
    """Returns the same task, of examples that are computed here, once."""
    spec = task.clients.element_spec[0]
    if not isinstance(spec, tf.TensorSpec):
        name = "input_features" if features else "input_shifts"
        raise ValueError(
            f"{name} must be given one array of images, got examples of {spec}."
        )
    layer = models.oriented_gradients(spec.shape) if features else None

    def computed(x: Any) -> np.ndarray:
        if layer is None:
            return np.asarray(x)
        return layer.predict(x, batch_size=1000, verbose=0)

    x, y = map(np.asarray, task.clients.flat())
    rows, lengths = task.clients.client_rows(np.arange(task.clients.num_clients))
    versions = [x]
    if pixels:
        versions = models.shifted(x, pixels)
        drawn = np.random.default_rng([0, pixels])
        rows = rows + len(x) * drawn.integers(len(versions), size=len(rows))
    by_client = np.split(rows, np.cumsum(lengths)[:-1])
    clients = datasets.FederatedDataset.from_indices(
        np.concatenate([computed(each) for each in versions]),
        np.tile(y, len(versions)),
        dict(zip(task.clients.client_ids, by_client, strict=True)),
    )
    test_x, test_y = task.test
    return Task(clients, (computed(test_x), test_y), task.num_classes, layer)


def _load_original(options: dict[str, Any]) -> Task:
    dataset = options.pop("dataset")
    path = options.pop("data_path", None)
    if dataset in ("digits", "mnist"):
        load = datasets.load_digits
        if dataset == "mnist":
            load = functools.partial(datasets.load_mnist, path=path)
        return Task(*load(**options), num_classes=10)
    options.pop("validation_examples")
    clients, test = datasets.load_shakespeare(path, **options)
    return Task(clients, test, len(datasets.shakespeare_vocabulary()))


def build_model(settings: settings_lib.Settings, task: Task) -> tf.keras.Model:
    """Returns a new model for a task; its outputs are logits.

    Raises:
      ValueError: The model does not take the task's examples.
    """
    spec = task.clients.element_spec[0]
    if not isinstance(spec, tf.TensorSpec):
        raise ValueError(
            f"model={settings.model!r} must be given one array of features, got {spec}."
        )
    units = settings.units()
    widths: dict[str, Any] = {} if units is None else {"hidden_units": units}
    if settings.model == "lstm":
        return models.lstm(task.num_classes, **widths)
    if settings.input_pooling:
        widths["pooling"] = settings.input_pooling
    build: dict[Any, Callable[..., tf.keras.Model]] = {
        "linear": models.linear,
        "mlp": models.mlp,
        "cnn": models.cnn,
    }
    return build[settings.model](spec.shape, task.num_classes, **widths)
