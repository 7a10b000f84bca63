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

_ALLOWED = (
    "validation_data must be (x, y), (x, y, sample_weight), a tf.data.Dataset "
    "of batches or a FederatedDataset"
)


def checked(data: Any) -> Any:
    """Returns `fit`'s `validation_data`, or raises.

    Raises:
      TypeError: It is nothing that is evaluated on.
      ValueError: Features, labels or weights are a single number.
    """
    if data is None or isinstance(data, tf.data.Dataset | FederatedDataset):
        return data
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        for part in data:
            is_one = isinstance(part, numbers.Number | np.ndarray | tf.Tensor)
            if is_one and not np.ndim(part):
                raise ValueError(
                    "validation_data must hold arrays of examples, got a "
                    f"single {type(part).__name__}."
                )
        return tuple(data)
    hint = ""
    if isinstance(data, Mapping):
        hint = (
            " For clients that are held out: "
            "tfdp_fl.FederatedDataset.from_client_arrays(clients)."
        )
    raise TypeError(f"{_ALLOWED}, got a {type(data).__name__}.{hint}")


def split(
    clients: FederatedDataset, data: Any, fraction: float
) -> tuple[FederatedDataset, Any, str]:
    """Returns who trains, what is validated on, and who is held out (a digest).

    Args:
      clients: All clients of `fit`.
      data: Its `validation_data`.
      fraction: Its `validation_split`.

    Raises:
      TypeError, ValueError: See `checked` and `held_out`; or both are given.
    """
    data = checked(data)
    _validate.finite(validation_split=fraction)
    if not fraction:
        return clients, data, ""
    if data is not None:
        raise ValueError(
            "validation_split must be 0 where validation_data is given, got "
            f"{fraction!r}."
        )
    clients, data = held_out(clients, fraction)
    return clients, data, data.client_ids_digest


def held_out(
    clients: FederatedDataset, fraction: float
) -> tuple[FederatedDataset, FederatedDataset]:
    """Returns the clients that train, and those that never do.

    Args:
      clients: All.
      fraction: The share of those that do not; at least one client is on
        either side. A client's id says on which it is, whoever the others are:
        one client more or less is one more or less to train on.

    Raises:
      ValueError: It is not between 0 and 1, or there is one client only.
    """
    fraction = _validate.inside_unit_interval(validation_split=fraction)
    if clients.num_clients < 2:
        raise ValueError(
            "validation_split must be 0 with a single client, whom it would "
            f"hold out, got {fraction!r}."
        )
    return clients.split_by_id(fraction)


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

    def evaluate(self, model: tf.keras.Model) -> dict[str, float]:
        """Returns the model's metrics on the data, by `val_` and name."""
        options = {"verbose": 0, "return_dict": True}
        data = self.data
        with warnings.catch_warnings():
            # Keras cannot know that the clients' data end where they should.
            warnings.filterwarnings("ignore", "Your input ran out of data")
            return self._evaluated(model, data, options)

    def _evaluated(
        self, model: tf.keras.Model, data: Any, options: dict[str, Any]
    ) -> dict[str, float]:
        if isinstance(data, FederatedDataset):
            data = _batches(data, self.batch_size)
        if isinstance(data, tf.data.Dataset):
            results = model.evaluate(data, **options)
        else:
            x, y, *weight = data
            results = model.evaluate(
                x,
                y,
                sample_weight=weight[0] if weight else None,
                batch_size=self.batch_size,
                **options,
            )
        return {f"val_{name}": value for name, value in results.items()}


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
                f"The data of {len(failed)} of {clients.num_clients} clients "
                "held out for validation could not be read, and are left out "
                f"of it. The first is client "
                f"{clients.client_ids[failed[0].position]!r}: "
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
