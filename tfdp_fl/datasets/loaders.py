"""Public data sets for experiments: digits, MNIST, EMNIST and Shakespeare."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfdp_fl import _lazy_tf, _validate
from tfdp_fl.datasets import nests, sources
from tfdp_fl.datasets.federated_dataset import FederatedDataset

if TYPE_CHECKING:
    import tensorflow_federated as tff

_MNIST_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
# All characters of the corpus. They are listed here because a vocabulary computed from
# the clients' own text would reveal what they wrote.
_CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_UNKNOWN = 1
_ID_OF = {character: number for number, character in enumerate(_CHARACTERS, 2)}


def load_digits(
    num_clients: int = 100,
    examples_per_client: int = 20,
    shards_per_client: int = 2,
    iid: bool = True,
    validation_examples: int = 0,
    seed: int = 0,
) -> tuple[FederatedDataset, tuple[np.ndarray, np.ndarray]]:
    """Loads the 1797 handwritten digits of 8x8 pixels in scikit-learn.

    There is only one copy of the training examples (1437 by default) in memory. If
    clients need more examples than that, examples are repeated by index: with 500
    clients of 20 examples, each example is used about seven times. Remember that the
    guarantee is for a client: it hides a client, but not an example that several
    clients hold.

    Args:
      num_clients: The number of clients.
      examples_per_client: The exact number of examples of each client.
      shards_per_client: The number of label shards per client, if not `iid`; see
        `tfdp_fl.datasets.partition`.
      iid: Whether clients hold random examples (the default, for a quick start) or
        label shards.
      validation_examples: If not 0, this many training examples, always the same ones,
        are given to no client and returned instead of the test set, for choosing
        hyperparameters.
      seed: Determines which client gets which examples.

    Returns:
      The clients, and `(x_test, y_test)`, a fifth of the digits, always the same
      ones, each digit in proportion: x float32[n, 64] from 0 to 1, y int32[n].

    Raises:
      ImportError: If scikit-learn is not installed.
      TypeError, ValueError: If an argument is out of its range.
    """
    with _lazy_tf.explain_missing("scikit-learn", "load_digits"):
        from sklearn import datasets

    digits = datasets.load_digits()
    x = (digits.data / 16).astype(np.float32)
    y = digits.target.astype(np.int32)
    train, test = stratified_split(y, math.ceil(len(y) / 5))
    return _deal_to_clients(
        (x[train], y[train]),
        (x[test], y[test]),
        validation_examples,
        (num_clients, examples_per_client, shards_per_client, iid, seed),
    )


def load_mnist(
    num_clients: int = 100,
    shards_per_client: int = 2,
    examples_per_client: int = 600,
    path: str | os.PathLike[str] | None = None,
    iid: bool = False,
    validation_examples: int = 0,
    seed: int = 0,
) -> tuple[FederatedDataset, tuple[np.ndarray, np.ndarray]]:
    """Loads MNIST's 60000 training images, dealt to clients.

    The defaults are the setting of Geyer et al. 2017 (arXiv:1712.07557, section 4):
    images sorted by label, two shards of 300 per client, exactly 600 images each. With
    100 clients, every image is used once. With 1000 and 10000, images are repeated by
    index, so there is only one copy of MNIST (188 MB of float32) in memory, whatever
    the number of clients. Remember that the guarantee is for a client: it hides a
    client, but not an image that several clients hold. See
    `tfdp_fl.datasets.partition`.

    Args:
      num_clients: The number of clients, K.
      shards_per_client: Label shards per client; not used if `iid`.
      examples_per_client: The exact number of images of each client.
      path: Keras's `mnist.npz`; None: the file in Keras's cache, downloaded if
        necessary.
      iid: Whether clients hold random images instead of label shards.
      validation_examples: If not 0, this many training images, always the same ones,
        each digit in proportion, are given to no client and returned instead of the
        test set. Choose hyperparameters with them, and keep the test set for the final
        run. (If images are repeated, `split_by_id` is no substitute, because other
        clients also hold the images of the held-out ones.)
      seed: Determines which client gets which examples.

    Returns:
      The clients, and `(x_test, y_test)`: x float32[n, 784] from 0 to 1, y
      int32[n].

    Raises:
      TypeError, ValueError: If an argument is out of its range, or the file
        is not MNIST.
      OSError: If the file is missing or cannot be downloaded.
    """
    x_train, y_train, x_test, y_test = _read_mnist(path)
    return _deal_to_clients(
        (_normalise_pixels(x_train), y_train.astype(np.int32)),
        (_normalise_pixels(x_test), y_test.astype(np.int32)),
        validation_examples,
        (num_clients, examples_per_client, shards_per_client, iid, seed),
    )


def _normalise_pixels(images: np.ndarray) -> np.ndarray:
    if images.shape[1:] != (28, 28) or images.dtype != np.uint8:
        raise ValueError(
            "path must hold uint8 images of 28 x 28 pixels, got "
            f"{images.dtype}{list(images.shape)}."
        )
    return images.reshape(-1, 784).astype(np.float32) / 255


def _deal_to_clients(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    validation_examples: int,
    options: tuple[int, int, int, bool, int],
) -> tuple[FederatedDataset, tuple[np.ndarray, np.ndarray]]:
    """Deals examples to clients, except those held out instead of the test set.

    Args:
      train: All training examples (x, y).
      test: The test set.
      validation_examples: How many training examples to hold out.
      options: The arguments of `partition` after the labels.
    """
    x, y = train
    held_out = _validate.non_negative_integer(validation_examples=validation_examples)
    if held_out >= len(y):
        raise ValueError(
            f"validation_examples must be less than the {len(y)} training examples, "
            f"got {held_out}."
        )
    if held_out:
        training, validation = stratified_split(y, held_out)
        x, y, test = x[training], y[training], (x[validation], y[validation])
    indices = partition(y, *options)
    return FederatedDataset.from_indices(x, y, indices), test


def _read_mnist(path: str | os.PathLike[str] | None) -> list[np.ndarray]:
    if path is None:
        try:
            train, test = tf.keras.datasets.mnist.load_data()
        except Exception as error:  # Keras raises a bare Exception.
            raise OSError(
                "path must be given, because MNIST is not in Keras's cache "
                f"and could not be downloaded: {error}"
            ) from error
        return [*train, *test]
    with np.load(path) as file:
        if not set(_MNIST_ARRAYS) <= set(file):
            raise ValueError(
                f"path must be Keras's mnist.npz with {', '.join(_MNIST_ARRAYS)}, got "
                f"{os.fspath(path)!r} with {', '.join(file)}."
            )
        return [file[name] for name in _MNIST_ARRAYS]


def load_emnist(
    only_digits: bool = True,
) -> tuple[FederatedDataset, tuple[np.ndarray, np.ndarray]]:
    """Loads TFF's federated EMNIST (Caldas et al. 2018, "LEAF").

    TFF downloads it once (about 170 MB for digits) and stores it on disk, from where
    clients are read when they take part. `in_memory()` of the result is faster, and
    takes 1.1 GB for all digits.

    Args:
      only_digits: Whether to load 10 classes by 3383 writers, or 62 classes by 3400.

    Returns:
      The clients, and `(x_test, y_test)`, the test images of these writers: x
      float32[n, 28, 28, 1], TFF's pixels as they are, y int32[n].

    Raises:
      ImportError: If TFF is not installed.
    """
    with _lazy_tf.explain_missing("tensorflow-federated", "load_emnist"):
        import tensorflow_federated as tff
    train, test = tff.simulation.datasets.emnist.load_data(only_digits)
    clients = FederatedDataset.from_client_fn(
        train.client_ids,
        functools.partial(_read_writer, train),
        (tf.TensorSpec((28, 28, 1)), tf.TensorSpec((), tf.int32)),
    )
    x_test, y_test = nests.concatenate(
        [_read_writer(test, writer) for writer in test.client_ids]
    )
    return clients, (x_test, y_test)


def _read_writer(
    client_data: tff.simulation.datasets.ClientData, writer: Hashable
) -> tuple[np.ndarray, np.ndarray]:
    examples = sources.read_elements(client_data.create_tf_dataset_for_client(writer))
    return examples["pixels"][..., np.newaxis], examples["label"]


def partition(
    labels: np.ndarray,
    num_clients: int,
    examples_per_client: int,
    shards_per_client: int = 2,
    iid: bool = False,
    seed: int = 0,
) -> np.ndarray:
    """Deals examples to clients of equal size, by label shards or at random.

    Shards are as in McMahan et al. 2017 (arXiv:1602.05629, section 3) and Geyer et al.
    2017 (arXiv:1712.07557, section 4). The examples are sorted by label and cut into
    shards of equal size, and a client gets `shards_per_client` of them at random. So
    most clients have at most that many labels. If one pass over the examples is not
    enough for all clients, examples are repeated ("for K in {1000, 10000}, data
    points are repeated"). In every pass, examples of the same label are shuffled
    before the shards are cut, so that clients of different passes differ. No client
    holds an example twice. The remainder of a pass is left out at random.

    Args:
      labels: int[n], the examples' labels.
      num_clients: The number of clients, K.
      examples_per_client: The exact number of examples of each client.
      shards_per_client: The number of shards per client; it must divide
        `examples_per_client`. Not used if `iid`.
      iid: Whether clients get random examples instead.
      seed: Determines which client gets which examples.

    Returns:
      int32[num_clients, examples_per_client], rows of `labels`, in random
      order within a client.

    Raises:
      TypeError, ValueError: If an argument is invalid, or if one client needs more
        examples than there are.
    """
    num_clients = _validate.positive_integer(num_clients=num_clients)
    size = _validate.positive_integer(examples_per_client=examples_per_client)
    shards = _validate.positive_integer(shards_per_client=shards_per_client)
    rng = np.random.default_rng(_validate.non_negative_integer(seed=seed))
    if size > len(labels):
        raise ValueError(
            f"examples_per_client must be at most {len(labels)}, the number of "
            f"training examples, got {size}."
        )
    if iid:
        shards = 1
    if size % shards:
        raise ValueError(
            "examples_per_client must be a multiple of shards_per_client "
            f"({shards}), got {size}."
        )
    shard_size = size // shards
    shards_in_pass = len(labels) // shard_size
    clients_in_pass = shards_in_pass // shards
    clients = np.empty((num_clients, size), np.int32)
    for first in range(0, num_clients, clients_in_pass):
        rows = rng.permutation(len(labels))[: shards_in_pass * shard_size]
        if not iid:
            rows = rows[np.argsort(labels[rows], kind="stable")]
        count = min(clients_in_pass, num_clients - first)
        chosen_shards = rng.permutation(shards_in_pass)[: count * shards]
        clients[first : first + count] = rows.reshape(-1, shard_size)[
            chosen_shards
        ].reshape(count, size)
    # Local training takes batches in order, and one label after another would be a
    # different experiment.
    return rng.permuted(clients, axis=1, out=clients)


def stratified_split(
    labels: np.ndarray, held_out: int
) -> tuple[np.ndarray, np.ndarray]:
    """Splits examples into two parts, each label in proportion; always the same way.

    Args:
      labels: int[n].
      held_out: The size of the second part, less than n.

    Returns:
      int64[n - held_out] and int64[held_out], the rows of the two parts.
    """
    order = np.random.default_rng(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # Evenly spaced in the order of labels, so in proportion, up to one example.
    positions = (np.arange(held_out) + 0.5) * len(labels) / max(held_out, 1)
    chosen = positions.astype(np.int64)
    return np.sort(np.delete(order, chosen)), np.sort(order[chosen])


def shakespeare_vocabulary() -> tuple[str, ...]:
    """Returns the 67 tokens of `load_shakespeare`; a token's index is its id.

    Id 0 is padding, and id 1 stands for every other character. From id 2 on, there are
    the 65 characters of the small Shakespeare corpus: the newline, the space,
    `!$&',-.3:;?`, capital and small letters.
    """
    return ("<pad>", "<unknown>", *_CHARACTERS)


def load_shakespeare(
    path: str | os.PathLike[str], sequence_length: int = 80, clients_per_role: int = 1
) -> tuple[FederatedDataset, tuple[np.ndarray, np.ndarray]]:
    r"""Loads plays for next-character prediction, one client per speaking role.

    The file has the format of the small Shakespeare corpus: a role's name and a colon
    on one line, its speech on the next lines, then an empty line. A client is a role.
    Its id is the role's name as written, and its text is all its speeches in order,
    joined by newlines. A role without any speech is not a client (299 roles speak in
    the corpus).

    An example is `sequence_length` characters and, for each of them, the next
    character; examples of a role do not overlap. The rest at the end of a text, or the
    whole text of a short role, is padded with 0 in both features and labels. Padding
    must not count. `Embedding(..., mask_zero=True)` keeps it out of the loss and the
    metrics, `SparseCategoricalCrossentropy(ignore_class=0)` only out of the loss.

    Args:
      path: The text, in UTF-8.
      sequence_length: Characters per example, L.
      clients_per_role: The maximum number of clients into which a role is split, each
        with an equal share of its examples, in order. The unit of protection is then
        such a part, no longer a role. A client's id is the role's with "/1", "/2", ...
        appended. A role with fewer examples makes fewer clients.

    Returns:
      The clients, and `(x_test, y_test)`, the last tenth of each role's text: x
      and y int32[n, L], ids in `shakespeare_vocabulary()`.

    Raises:
      TypeError, ValueError: If an argument is out of its range, or the file
        is of another format.
      OSError: If the file is missing.
    """
    path = os.fspath(path)  # A number would refer to a file that is already open.
    length = _validate.positive_integer(sequence_length=sequence_length)
    _validate.positive_integer(clients_per_role=clients_per_role)
    clients, test = {}, []
    for role, text in _read_speeches(path).items():
        ids = np.array(
            [_ID_OF.get(character, _UNKNOWN) for character in text], np.int32
        )
        end = len(ids) - len(ids) // 10
        x, y = _cut_into_examples(ids[:end], length)
        parts = min(clients_per_role, max(1, len(x)))
        for part, rows in enumerate(np.array_split(np.arange(len(x)), parts)):
            name = role if clients_per_role == 1 else f"{role}/{part + 1}"
            clients[name] = x[rows], y[rows]
        test.append(_cut_into_examples(ids[end:], length))
    x_test, y_test = (np.concatenate(arrays) for arrays in zip(*test, strict=True))
    spec = tf.TensorSpec([length], tf.int32)
    dataset = FederatedDataset.from_client_arrays(clients, (spec, spec))
    return dataset, (x_test, y_test)


def _read_speeches(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns every role's text, in order of first appearance."""
    with open(path, encoding="utf-8") as file:
        blocks = re.split(r"\n{2,}", file.read().strip("\n"))
    speeches: dict[str, list[str]] = {}
    for block in blocks:
        role, _, speech = block.partition("\n")
        if not role.endswith(":"):
            raise ValueError(
                "path must be a text of blocks 'ROLE:', speech, empty line, "
                f"got {os.fspath(path)!r} with a block that starts with "
                f"{role[:40]!r}."
            )
        if speech:
            speeches.setdefault(role[:-1], []).append(speech)
    if not speeches:
        raise ValueError(
            f"path must be a text in which somebody speaks, got {os.fspath(path)!r}."
        )
    return {role: "\n".join(parts) for role, parts in speeches.items()}


def _cut_into_examples(ids: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a text into examples (x, y), both int32[n, length]."""
    predicted = max(len(ids) - 1, 0)
    num_examples = -(-predicted // length)
    pairs = np.zeros((2, num_examples * length), np.int32)
    pairs[0, :predicted] = ids[:predicted]
    pairs[1, :predicted] = ids[1 : predicted + 1]
    x, y = pairs.reshape(2, num_examples, length)
    return x, y
