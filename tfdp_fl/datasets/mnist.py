"""MNIST, dealt to clients as in the papers on federated averaging."""

from __future__ import annotations

import os

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.datasets.federated_dataset import FederatedDataset
from tfdp_fl.datasets.partitioning import (
    check_held_out,
    partition,
    stratified_split,
)

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


def load_mnist(
    num_clients: int = 100,
    shards_per_client: int = 2,
    examples_per_client: int = 600,
    path: str | os.PathLike[str] | None = None,
    iid: bool = False,
    flatten: bool = True,
    validation_examples: int = 0,
    seed: int = 0,
) -> tuple[FederatedDataset, tuple[np.ndarray, np.ndarray]]:
    """Loads MNIST's 60000 training images, dealt to clients.

    The defaults are the setting of Geyer et al. 2017 (arXiv:1712.07557,
    section 4): images sorted by label, two shards of 300 per client, exactly
    600 images each. 100 clients hold every image once. With 1000 and 10000,
    images are repeated, by index: one copy of MNIST (188 MB of float32) is
    held whatever the number of clients. Remember that the guarantee is for a
    client: who repeats images hides a client, not them. See
    `tfdp_fl.datasets.partition`.

    Args:
      num_clients: How many clients there are, K.
      shards_per_client: Label shards per client; not used if `iid`.
      examples_per_client: How many images each client holds, exactly.
      path: Keras's `mnist.npz`; None: that in Keras's cache, downloaded to it
        if it is not there.
      iid: Whether clients hold random images instead of label shards.
      flatten: Whether an image is float32[784] or float32[28, 28, 1].
      validation_examples: If not 0, that many training images, always the same
        ones, each digit in proportion, are given to no client and returned in
        place of the test set: choose hyperparameters by them, and leave the
        test set to the final run. (`split_clients` would not do where images
        are repeated: those of held-out clients are other clients' too.)
      seed: Which client gets what.

    Returns:
      The clients, and `(x_test, y_test)`: x float32 from 0 to 1, y int32[n].

    Raises:
      TypeError, ValueError: If an argument is out of its range, or the file
        is not MNIST.
      OSError: If the file is not there, or cannot be downloaded.
    """
    config = {"loader": "mnist", **locals()}
    if path is not None:
        config["path"] = os.path.abspath(path)
    _validate.instance_of(bool, flatten=flatten)
    x_train, y_train, x_test, y_test = _read(path)
    held_out = check_held_out(len(y_train), validation_examples=validation_examples)
    if held_out:
        train, validation = stratified_split(y_train, held_out)
        x_test, y_test = x_train[validation], y_train[validation]
        x_train, y_train = x_train[train], y_train[train]
    indices = partition(
        y_train, num_clients, examples_per_client, shards_per_client, iid, seed
    )
    clients = FederatedDataset.from_indices(
        _images(x_train, flatten), y_train.astype(np.int32), indices
    )
    test = _images(x_test, flatten), y_test.astype(np.int32)
    return clients.with_config(config), test


def _images(pixels: np.ndarray, flatten: bool) -> np.ndarray:
    shape = (784,) if flatten else (28, 28, 1)
    images = pixels.reshape(-1, *shape).astype(np.float32)
    images /= 255
    return images


def _read(path: str | os.PathLike[str] | None) -> list[np.ndarray]:
    if path is None:
        import tensorflow as tf

        try:
            train, test = tf.keras.datasets.mnist.load_data()
        except Exception as error:  # Keras raises a bare Exception.
            raise OSError(
                "path must be given, because MNIST is not in Keras's cache "
                f"and could not be downloaded: {error}"
            ) from error
        arrays = [*train, *test]
    else:
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = [file[name] for name in _ARRAYS]
        except OSError:
            raise
        except Exception as error:
            raise ValueError(
                "path must be Keras's mnist.npz with the arrays "
                f"{', '.join(_ARRAYS)}, got {os.fspath(path)!r} ({error!r})."
            ) from error
    for images, labels in (arrays[:2], arrays[2:]):
        if images.shape != (len(labels), 28, 28) or images.dtype != np.uint8:
            raise ValueError(
                "path must hold uint8 images of 28x28 pixels with one label "
                f"each, got {images.dtype}{list(images.shape)} and "
                f"{len(labels)} labels."
            )
    return arrays
