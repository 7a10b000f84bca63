"""What a model is validated on: examples, or clients that are held out."""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.keras import validation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """What `fit` was told of validation.

    Attributes:
      data: `(x, y)`, `(x, y, sample_weight)`, a `tf.data.Dataset` of batches,
        a `FederatedDataset`, or None.
      every: Validate every so many rounds.
      batch_size: Examples in one batch.
    """

    data: Any
    every: int
    batch_size: int

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError unless it can be evaluated on."""
        _validate.positive_integer(validation_freq=self.every)
        data = self.data
        if data is None or isinstance(data, tf.data.Dataset | FederatedDataset):
            return
        if not isinstance(data, tuple | list) or len(data) not in (2, 3):
            hint = ""
            if isinstance(data, Mapping):
                hint = (
                    " For clients that are held out: "
                    "tfdp_fl.FederatedDataset.from_client_arrays(clients)."
                )
            raise TypeError(
                "validation_data must be (x, y), (x, y, sample_weight), a "
                "tf.data.Dataset of batches or a FederatedDataset, got a "
                f"{type(data).__name__}.{hint}"
            )
        for part in data:
            is_one = isinstance(part, numbers.Number | np.ndarray | tf.Tensor)
            if is_one and not np.ndim(part):
                raise ValueError(
                    "validation_data must hold arrays of examples, got a "
                    f"single {type(part).__name__}."
                )

    def check_features(self, model: tf.keras.Model) -> None:
        """Raises ValueError if the data has other features than a model takes."""
        if isinstance(self.data, FederatedDataset):
            with validation.checked_features(model, self.data, "validation_data"):
                return
        if not isinstance(self.data, tuple | list):
            return
        try:
            spec = tf.nest.map_structure(
                lambda leaf: nests.spec_of(nests.as_array(leaf[:1], "x")),
                nests.with_array_leaves(self.data[0]),
            )
        except (TypeError, ValueError, IndexError):
            return  # Something else that Keras may take.
        validation.check_features(model, spec, "validation_data")

    def evaluate(self, model: tf.keras.Model) -> dict[str, float]:
        """Returns the model's metrics on the data, by `val_` and name."""
        data = self.data
        options: dict[str, Any] = {"verbose": 0, "return_dict": True}
        if isinstance(data, FederatedDataset):
            data = _batches(data, self.batch_size)
        if not isinstance(data, tf.data.Dataset):
            x, y, *weight = data
            data = x
            options |= {"y": y, "batch_size": self.batch_size}
            options["sample_weight"] = weight[0] if weight else None
        with warnings.catch_warnings():
            # Keras cannot know that the clients' data end where they should.
            warnings.filterwarnings("ignore", "Your input ran out of data")
            results = model.evaluate(data, **options)
        return {f"val_{name}": value for name, value in results.items()}


def split(
    clients: FederatedDataset, data: Any, fraction: float
) -> tuple[FederatedDataset, Any, str]:
    """Returns the clients that train, what is validated on, and who is held out.

    A client's id says on which side it is, whoever the others are: one client
    more or less is one more or less to train on.

    Args:
      clients: All clients of `fit`.
      data: Its `validation_data`.
      fraction: Its `validation_split`: the share of the clients that never train;
        at least one client is on either side.

    Returns:
      The last is a digest of the clients held out, "" for none.
    """
    if not _validate.finite(validation_split=fraction):
        return clients, data, ""
    fraction = _validate.inside_unit_interval(validation_split=fraction)
    if data is not None or clients.num_clients < 2:
        raise ValueError(
            "validation_split must be 0 where validation_data is given, or with a "
            f"single client, whom it would hold out, got {fraction!r}."
        )
    clients, held_out = clients.split_by_id(fraction)
    return clients, held_out, held_out.client_ids_digest


def _batches(clients: FederatedDataset, batch_size: int) -> tf.data.Dataset:
    """Returns all clients' examples, as Keras takes them."""
    spec = nests.unpaired(*clients.element_spec)

    def examples() -> Iterator[Any]:
        failed: list[ClientFailure] = []
        for client in clients.read_clients(None):
            if isinstance(client, ClientFailure):
                failed.append(client)
            elif len(tf.nest.flatten(client.y)[0]):
                yield nests.unpaired(client.x, client.y)
        if failed:
            warnings.warn(
                f"The data of {len(failed)} of {clients.num_clients} clients held out "
                "for validation could not be read, and are left out of it. The first "
                f"is client {clients.client_ids[failed[0].position]!r}: "
                f"{failed[0].reason}.",
                RuntimeWarning,
                stacklevel=2,
            )

    dataset = tf.data.Dataset.from_generator(
        examples,
        output_signature=tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape], leaf.dtype), spec
        ),
    )
    if any(None in leaf.shape.as_list() for leaf in tf.nest.flatten(spec)):
        return dataset  # Clients' sequences are of unequal lengths.
    return dataset.rebatch(batch_size)
