"""Clients with a `tf.data.Dataset` each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdp_fl.datasets import nests, sources
from tfdp_fl.datasets.nests import Nest


def common_spec(clients: Mapping[Any, tf.data.Dataset]) -> tuple[Nest, Nest]:
    """Returns the spec (x, y) of one example of every client.

    Raises:
      TypeError, ValueError: A client has no such examples, or others; it is named.
    """
    spec: Any = None
    for client_id, dataset in clients.items():
        with sources.naming(client_id):
            client_spec = _example_spec(dataset)
            spec = spec or client_spec
            nests.check_same_spec(client_spec, spec)
    return spec


def _is_batched(dataset: tf.data.Dataset) -> bool:
    """Returns whether every array of an element is of any number of examples."""
    return all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.rank and leaf.shape[0] is None
        for leaf in tf.nest.flatten(dataset.element_spec)
    )


def _example_spec(dataset: tf.data.Dataset) -> tuple[Nest, Nest]:
    """Returns the spec (x, y) of one example, as it is in a `FederatedDataset`."""
    if not isinstance(dataset, tf.data.Dataset):
        raise nests.ExamplesTypeError(
            f"dataset must be a tf.data.Dataset, got {sources.outline(dataset)}."
        )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise nests.ExamplesValueError(
            "A client's dataset must end, got one that repeats for ever."
        )
    spec = _element_pair(dataset.element_spec)
    if _is_batched(dataset):
        spec = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), spec
        )
    return sources.held_spec(spec)


def read_pair(dataset: tf.data.Dataset) -> tuple[Nest, Nest]:
    """Reads a dataset of examples, or of batches of them, into arrays (x, y)."""
    return _element_pair(read(dataset))


def read(dataset: tf.data.Dataset) -> Nest:
    """Reads a dataset of examples, or of batches of them, into a nest of arrays."""
    if not _is_batched(dataset):
        if int(dataset.cardinality()) > 0:  # Without an iterator, which is slower.
            batch = dataset.batch(2**63 - 1).get_single_element()
            return nests.views(batch)
        dataset = dataset.batch(1024)
    batches = list(dataset.as_numpy_iterator())
    if batches:
        return nests.concatenate(batches)
    return tf.nest.map_structure(
        lambda leaf: tf.zeros([0, *leaf.shape[1:]], leaf.dtype), dataset.element_spec
    )


def _element_pair(element: Any) -> tuple[Any, Any]:
    """Returns (x, y) of an element that is a tuple or has the keys x and y.

    A third of the tuple, or `sample_weight` of a dict, is beside the labels.
    """
    if isinstance(element, dict) and {"x", "y"} <= set(element) <= {
        *("x", "y", "sample_weight")
    }:
        return nests.pair((element["x"], element["y"], element.get("sample_weight")))
    if isinstance(element, tuple) and len(element) in (2, 3):
        return nests.pair(element)
    raise nests.ExamplesTypeError(
        "The elements of a client's dataset must be examples (x, y) or (x, y, "
        f"sample_weight), got {sources.outline(element)}; dataset.map can make them so."
    )
