"""Digits, MNIST, EMNIST and Shakespeare, and how examples are dealt to clients."""

import functools
import sys
import types
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tfdp_fl import datasets


def _labels(n: int) -> np.ndarray:
    return np.random.default_rng(3).permutation(np.arange(n) % 10)


def _bytes(rows) -> set[bytes]:
    return {row.tobytes() for row in np.asarray(rows)}


@pytest.mark.parametrize("iid", [True, False])
def test_passes_repeat_examples_but_no_client_has_one_twice(iid):
    once = datasets.partition(_labels(600), 30, 20, iid=iid)
    np.testing.assert_array_equal(np.sort(once.ravel()), np.arange(600))
    clients = datasets.partition(_labels(600), 95, 20, iid=iid)
    assert (clients.shape, clients.dtype) == ((95, 20), np.int32)
    assert {len(np.unique(rows)) for rows in clients} == {20}
    uses = np.bincount(clients.ravel(), minlength=600)
    assert (uses.min(), uses.max()) == (3, 4)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_shards_bound_the_labels_of_a_client(shards):
    labels = _labels(800)  # 80 of each: shards do not straddle labels.
    clients = labels[datasets.partition(labels, 100, 20, shards)]
    assert max(len(np.unique(each)) for each in clients) == shards
    # Local training takes batches in order: labels of a client are mixed.
    changes = np.sum(np.diff(clients) != 0, axis=1)
    assert np.sum(changes <= 1) < (20 if shards > 1 else 101)


def test_no_test_example_of_digits_is_with_a_client():
    clients, (x_test, y_test) = datasets.load_digits()
    x, y = (part.numpy() for part in clients.flat())
    assert (clients.num_clients, x.shape) == (100, (1437, 64))
    for features, labels in ((x, y), (x_test, y_test)):
        assert (features.dtype, labels.dtype) == (np.float32, np.int32)
        assert (features.min(), features.max()) == (0, 1)
        assert set(labels) == set(range(10))
    assert len(_bytes(x) | _bytes(x_test)) == 1797
    # Validation examples replace the test set.
    clients, (x_val, y_val) = datasets.load_digits(validation_examples=200)
    assert (clients.flat()[0].shape[0], len(y_val)) == (1237, 200)
    seen = _bytes(clients.flat()[0])
    assert not _bytes(x_test) & (seen | _bytes(x_val))


@pytest.fixture(name="mnist", scope="module")
def _mnist(tmp_path_factory):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (600, 28, 28), dtype=np.uint8),
        "y_train": rng.permutation(np.arange(600) % 10).astype(np.uint8),
        "x_test": rng.integers(0, 256, (100, 28, 28), dtype=np.uint8),
        "y_test": (np.arange(100) % 10).astype(np.uint8),
    }
    path = tmp_path_factory.mktemp("mnist") / "mnist.npz"
    np.savez(path, **arrays)
    return {"path": path, "examples_per_client": 20, "num_clients": 30}, arrays


def test_images_of_mnist_are_scaled(mnist):
    options, arrays = mnist
    clients, (x_test, y_test) = datasets.load_mnist(**options)
    x, y = (part.numpy() for part in clients.flat())
    for name, features, labels in (("train", x, y), ("test", x_test, y_test)):
        assert (features.dtype, labels.dtype) == (np.float32, np.int32)
        pixels = arrays[f"x_{name}"].reshape(-1, 784)
        np.testing.assert_allclose(features, pixels / 255, rtol=1e-6)
        np.testing.assert_array_equal(labels, arrays[f"y_{name}"])


_SIZES = {"f0000_14": 3, "f0001_41": 1, "f0005_26": 2}


def _writers(factor: int):
    def create(client_id):
        n, place = _SIZES[client_id] * factor, list(_SIZES).index(client_id) / 4
        pixels = np.full((n, 28, 28), place, np.float32)
        examples = {"label": np.arange(n, dtype=np.int32), "pixels": pixels}
        return tf.data.Dataset.from_tensor_slices(examples)

    made = {"client_ids": list(_SIZES), "create_tf_dataset_for_client": create}
    return types.SimpleNamespace(**made)


def test_a_client_of_emnist_is_a_writer(monkeypatch):
    load = mock.Mock(return_value=(_writers(2), _writers(1)))
    tff = mock.Mock(**{"simulation.datasets.emnist.load_data": load})
    monkeypatch.setitem(sys.modules, "tensorflow_federated", tff)
    clients, (x_test, y_test) = datasets.load_emnist()
    assert list(clients.client_ids) == list(_SIZES)
    assert clients.client_sizes().tolist() == [6, 2, 4]
    assert clients.element_spec[0] == tf.TensorSpec([28, 28, 1])
    x, y = clients.client("f0005_26")
    assert x.shape == (4, 28, 28, 1)
    assert np.all(x == 0.5)
    assert y.tolist() == [0, 1, 2, 3]
    assert x_test.shape == (6, 28, 28, 1)
    assert y_test.tolist() == [0, 1, 2, 0, 0, 1]
    monkeypatch.setitem(sys.modules, "tensorflow_federated", None)
    with pytest.raises(ImportError, match="load_emnist needs tensorflow-federated"):
        datasets.load_emnist()


_PLAY = """\
First Witch:
When shall we three meet again
In thunder, lightning, or in rain?

Second Witch:
When the hurlyburly's done,

GHOST:

First Witch:
Where the place?


CAT:
Mew
"""
_FIRST = (
    "When shall we three meet again\nIn thunder, lightning, or in rain?\n"
    "Where the place?"
)


@pytest.fixture(name="play")
def _play(tmp_path):
    path = tmp_path / "play.txt"
    path.write_text(_PLAY, encoding="utf-8")
    return path


def _text(ids) -> str:
    """Returns what ids stand for; padding is nothing."""
    vocabulary = ("", "\ufffd", *datasets.shakespeare_vocabulary()[2:])
    return "".join(vocabulary[k] for k in np.reshape(ids, -1))


def test_a_client_is_a_role_that_speaks_and_labels_are_the_next_characters(play):
    clients, (x_test, y_test) = datasets.load_shakespeare(play, sequence_length=10)
    assert list(clients.client_ids) == ["First Witch", "Second Witch", "CAT"]
    x, y = clients.client("First Witch")
    assert (x.shape, x.dtype, y.dtype) == ((8, 10), np.int32, np.int32)
    assert clients.element_spec[0].shape == [10]
    # The end of every role is the test set.
    own, others = len(_FIRST) // 10, 27 // 10
    assert (_text(x), _text(y)) == (_FIRST[: -own - 1], _FIRST[1:-own])
    assert _text(y_test[:1]) == _FIRST[-own:][1:]
    assert np.sum(x_test > 0) == own - 1 + others - 1


def test_a_role_may_be_several_clients(play):
    whole, test = datasets.load_shakespeare(play, sequence_length=10)
    parts, other_test = datasets.load_shakespeare(
        play, sequence_length=10, clients_per_role=3
    )
    np.testing.assert_array_equal(test[0], other_test[0])
    for role in whole.client_ids:
        names = [n for n in parts.client_ids if n.rsplit("/", 1)[0] == role]
        count = min(3, max(1, len(whole.client(role)[0])))
        assert names == [f"{role}/{k + 1}" for k in range(count)]
        together = zip(*map(parts.client, names), strict=True)
        for array, own in zip(whole.client(role), together, strict=True):
            np.testing.assert_array_equal(array, np.concatenate(own))


_partition = functools.partial(datasets.partition, _labels(600), 3)
_ARRAYS = "x_train", "y_train", "x_test", "y_test"


@pytest.mark.parametrize(
    "load, options, message",
    [
        (_partition, {"examples_per_client": 601}, "client must be at most"),
        (_partition, {"examples_per_client": 21}, "of shards_per_client"),
        (datasets.load_digits, {"validation_examples": 1437}, "must be less"),
        (datasets.load_mnist, {"x": np.ones(3)}, "path must be Keras's mnist"),
        (datasets.load_mnist, dict.fromkeys(_ARRAYS, np.ones(3)), "path must hold"),
        (datasets.load_shakespeare, {"clients_per_role": 0}, "clients_per_role must"),
        (datasets.load_shakespeare, "Once upon a time", "starts with 'Once upon a t"),
        (datasets.load_shakespeare, "GHOST:\n\n", "in which somebody speaks"),
    ],
)
def test_what_is_refused(play, tmp_path, load, options, message):
    if load is datasets.load_mnist:
        np.savez(tmp_path / "other.npz", **options)
        options = {"path": tmp_path / "other.npz"}
    if isinstance(options, str):
        play.write_text(options, encoding="utf-8")
        options = {}
    if load is datasets.load_shakespeare:
        options = {"path": play, **options}
    with pytest.raises(ValueError, match=message):
        load(**options)
