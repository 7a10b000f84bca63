"""Clients with a `tf.data.Dataset` each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.datasets import nests, sources
from tfdp_fl.datasets.nests import Nest

_INT64_MAX = 2**63 - 1


def source(clients: Mapping[Any, tf.data.Dataset]) -> sources.StreamedSource:
    """Returns what reads them; see `FederatedDataset.from_tf_datasets`."""
    spec = None
    for client_id, dataset in clients.items():
        try:
            _validate.instance_of(tf.data.Dataset, dataset=dataset)
            client_spec = _example_spec(dataset)
            spec = spec or client_spec
            nests.check_same_spec(client_spec, spec)
        except (TypeError, ValueError) as error:
            raise type(error)(f"Client {client_id!r}: {error}") from error
    datasets = dict(clients)
    return sources.StreamedSource(
        list(datasets), lambda client_id: _read_pair(datasets[client_id]), spec
    )


def source_of_client_data(
    client_data: Any,
    preprocess_fn: Callable[[tf.data.Dataset], tf.data.Dataset] | None,
) -> tuple[sources.StreamedSource, list[Any]]:
    """Returns what reads them, and their ids; see `from_client_data`."""
    for attribute in ("client_ids", "create_tf_dataset_for_client"):
        if not hasattr(client_data, attribute):
            raise TypeError(
                "client_data must be a tff.simulation.datasets.ClientData, "
                f"got {type(client_data).__name__}, which has no "
                f"{attribute}."
            )
    client_ids = list(client_data.client_ids)
    sources.at_least_one_client(client_data=client_ids)

    def dataset_of(client_id: Any) -> tf.data.Dataset:
        dataset = client_data.create_tf_dataset_for_client(client_id)
        return dataset if preprocess_fn is None else preprocess_fn(dataset)

    made = sources.StreamedSource(
        client_ids,
        lambda client_id: _read_pair(dataset_of(client_id)),
        _example_spec(dataset_of(client_ids[0])),
    )
    return made, client_ids


def _read_pair(dataset: tf.data.Dataset) -> tuple[Nest, Nest]:
    return _element_pair(read(dataset))


def _example_spec(dataset: tf.data.Dataset) -> tuple[Nest, Nest]:
    """Returns the spec of what `_read_pair` makes of one example."""
    _validate.instance_of(tf.data.Dataset, dataset=dataset)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError("A client's dataset must end, got one that repeats for ever.")
    spec = _element_pair(dataset.element_spec)
    leaves = tf.nest.flatten(spec)
    for leaf in leaves:
        if not isinstance(leaf, tf.TensorSpec | tf.RaggedTensorSpec):
            raise TypeError(f"A client's examples must be dense tensors, got {leaf!r}.")
    if all(leaf.shape.rank and leaf.shape[0] is None for leaf in leaves):
        raise ValueError(
            "The elements of a client's dataset must be single examples, got "
            f"what looks like batches, {nests.describe_spec(spec)}; "
            ".unbatch() makes single examples of them."
        )
    return as_held(spec)


def as_held(spec: tuple[Nest, Nest]) -> tuple[Nest, Nest]:
    """Returns the spec (x, y) that examples have in a dataset, of what is given.

    Sequences are filled up, float64 becomes float32, and so does a weight.
    """

    def held(leaf: Any, dtype: Any = None) -> tf.TensorSpec:
        dtype = dtype or (tf.float32 if leaf.dtype == tf.float64 else leaf.dtype)
        return tf.TensorSpec(leaf.shape, dtype)

    x, y = tf.nest.map_structure(held, spec)
    if isinstance(y, nests.Weighted):
        weight = tf.nest.map_structure(
            lambda leaf: held(leaf, tf.float32), y.sample_weight
        )
        y = nests.Weighted(y.y, weight)
    return x, y


def read(dataset: tf.data.Dataset) -> Nest:
    """Reads a dataset of single examples into one nest of NumPy arrays.

    Sequences are as wide as the client's longest.
    """
    spec = dataset.element_spec
    if any(map(nests.is_sequence, tf.nest.flatten(spec))):
        batches = list(dataset.ragged_batch(1024))
        if not batches:
            return nests.no_examples(spec)
        return tf.nest.map_structure(
            lambda *parts: nests.as_array(
                parts[0] if len(parts) == 1 else tf.concat(parts, 0), "x"
            ),
            *batches,
        )
    if int(dataset.cardinality()) > 0:  # Without an iterator, which is slower.
        batch = dataset.batch(_INT64_MAX).get_single_element()
        return tf.nest.map_structure(nests.view, batch)
    chunks = list(dataset.batch(1024).as_numpy_iterator())
    return nests.concatenate(chunks) if chunks else nests.no_examples(spec)


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
        "The elements of a client's dataset must be single examples (x, y) or "
        f"(x, y, sample_weight), got {sources.outline(element)}; preprocess_fn "
        "can make them so."
    )
