"""TensorFlow Federated's EMNIST: handwriting, a client per writer."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.datasets import nests, sources
from tfdp_fl.datasets.federated_dataset import FederatedDataset


def load_emnist(
    only_digits: bool = True,
    num_clients: int | None = None,
    flatten: bool = False,
    cache_dir: str | None = None,
) -> tuple[FederatedDataset, tuple[np.ndarray, np.ndarray]]:
    """Loads TFF's federated EMNIST (Caldas et al. 2018, "LEAF").

    TFF downloads it once (about 170 MB for digits) and keeps it on disk, where
    clients are read when they take part; `in_memory()` of the result is
    faster, and takes 1.1 GB for all digits.

    Args:
      only_digits: Whether 10 classes by 3383 writers, or 62 by 3400.
      num_clients: The first so many writers; None: all.
      flatten: Whether an image is float32[784] or float32[28, 28, 1].
      cache_dir: Where TFF keeps its downloads; None: Keras's cache.

    Returns:
      The clients, and `(x_test, y_test)`, the test images of these writers: x
      float32, TFF's pixels as they are, y int32[n].

    Raises:
      ImportError: If TFF is not installed.
      OSError: If the data is not on disk and cannot be downloaded.
      TypeError, ValueError: If an argument is out of its range.
    """
    config = {"loader": "emnist", **locals()}
    if cache_dir is not None:
        config["cache_dir"] = os.path.abspath(cache_dir)
    _validate.instance_of(bool, only_digits=only_digits)
    _validate.instance_of(bool, flatten=flatten)
    if num_clients is not None:
        _validate.positive_integer(num_clients=num_clients)
    train, test = _tff_client_data(only_digits, cache_dir)
    writers = list(train.client_ids)
    if num_clients is not None and num_clients > len(writers):
        raise ValueError(
            f"num_clients must be at most {len(writers)}, got {num_clients}."
        )
    writers = writers[:num_clients]
    shape = (784,) if flatten else (28, 28, 1)
    clients = FederatedDataset.from_client_fn(
        writers,
        lambda writer: _read(train, writer, shape),
        element_spec=(
            tf.TensorSpec(shape, tf.float32),
            tf.TensorSpec((), tf.int32),
        ),
    )
    tested = set(test.client_ids)
    x_test, y_test = nests.concatenate(
        [_read(test, writer, shape) for writer in writers if writer in tested]
    )
    return clients.with_config(config), (x_test, y_test)


def _read(
    client_data: Any, writer: str, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    examples = sources.read_tf_dataset(client_data.create_tf_dataset_for_client(writer))
    return examples["pixels"].reshape(-1, *shape), examples["label"]


def _tff_client_data(only_digits: bool, cache_dir: str | None):
    try:
        import tensorflow_federated as tff
    except ImportError as error:
        raise ImportError(
            "load_emnist must have tensorflow_federated installed, see the "
            f"README on installing the whole stack: {error}"
        ) from error
    try:
        return tff.simulation.datasets.emnist.load_data(
            only_digits=only_digits, cache_dir=cache_dir
        )
    except Exception as error:  # Keras's download raises a bare Exception.
        raise OSError(
            "load_emnist must find TFF's EMNIST in cache_dir "
            f"({cache_dir!r}) or be able to download it: {error}"
        ) from error
