"""Clients' data as a user holds it, and a table that says whose row each is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.datasets import frames, nests
from tfdp_fl.datasets.federated_dataset import FederatedDataset
from tfdp_fl.datasets.nests import Nest

_CHOICES = ("random", "first", "last")
_ALLOWED = (
    "a FederatedDataset, a mapping or list with one (x, y), one (x, y, "
    "sample_weight) or one tf.data.Dataset of single examples for each client, "
    "or a tff.simulation.datasets.ClientData"
)


def as_federated(clients: Any) -> FederatedDataset:
    """Returns clients' data as a `FederatedDataset`.

    Args:
      clients: One already; a mapping from client ids to `(x, y)` or `(x, y,
        sample_weight)` (nests of arrays) or to `tf.data.Dataset`s of single
        examples; a list of those, whose clients are then 0 to N - 1; or a TFF
        `ClientData`.

    Raises:
      TypeError: It is something else; the message names its type only.
      ValueError: Clients do not fit together.
    """
    if isinstance(clients, FederatedDataset):
        return clients
    if hasattr(clients, "client_ids") and hasattr(
        clients, "create_tf_dataset_for_client"
    ):
        return FederatedDataset.from_client_data(clients)
    by_id, listed = clients, False
    if isinstance(clients, Sequence) and not isinstance(clients, str | bytes):
        by_id, listed = dict(enumerate(clients)), True
    if not isinstance(by_id, Mapping):
        raise TypeError(
            f"clients must be {_ALLOWED}, got {type(clients).__name__}."
            + _hint(clients)
        )
    if by_id and all(isinstance(d, tf.data.Dataset) for d in by_id.values()):
        return FederatedDataset.from_tf_datasets(by_id)
    for client_id, examples in by_id.items():
        if not isinstance(examples, tuple | list) or len(examples) not in (2, 3):
            raise TypeError(
                f"clients must be {_ALLOWED}, got {type(examples).__name__} for "
                f"client {client_id!r}." + _hint(clients)
            )
    dataset = FederatedDataset.from_client_arrays(
        {client_id: tuple(examples) for client_id, examples in by_id.items()}
    )
    # Known by their places, then: see `FederatedDataset.clients_digest`.
    return dataset.with_ids(range(len(by_id))) if listed else dataset


def _hint(clients: Any) -> str:
    if type(clients).__name__ == "DataFrame" or hasattr(clients, "to_pandas"):
        frame = "dataset.to_pandas()" if hasattr(clients, "to_pandas") else "frame"
        return (
            " Which column names the client? FederatedDataset.from_dataframe("
            f"{frame}, client=..., features=..., label=...)."
        )
    if hasattr(clients, "__array__") or (
        isinstance(clients, tuple | list) and len(clients) in (2, 3)
    ):
        return (
            " For one pair of arrays (x, y), say whose row each is: "
            "fit(x, y, client_ids=ids)."
        )
    return ""


def of_fit(data: Any, y: Any, client_ids: Any, sample_weight: Any) -> FederatedDataset:
    """Returns the clients that `fit` was given, in either way.

    Args:
      data: Clients' data, or with `client_ids` the features of all rows.
      y: The labels of all rows.
      client_ids: Whose row each is; None: `data` is clients' data.
      sample_weight: What each row counts, or None.

    Raises:
      TypeError, ValueError: They do not go together.
    """
    if client_ids is not None:
        if y is None:
            raise TypeError("y must be the labels of all rows with client_ids.")
        return by_person(data, y, client_ids, sample_weight)
    if y is None and sample_weight is None:
        return as_federated(data)
    raise TypeError(
        "client_ids must say whose row each is where y or sample_weight is given: "
        "fit(x, y, client_ids=ids, rounds=...)."
    )


def by_person(
    x: Any, y: Any, client_ids: Any, sample_weight: Any = None
) -> FederatedDataset:
    """Returns the clients of a table: each person, with all its rows.

    Args:
      x: Features [n, ...], a nest of arrays, or a pandas frame of numbers.
      y: Labels [n, ...], likewise.
      client_ids: Whose row each is, [n] numbers or strings.
      sample_weight: What each row counts in the loss, [n], or None.

    Raises:
      ValueError: A row has no id or a missing value (naming column and row), or
        lengths differ.
    """
    x, y = _from_pandas(x, "x"), _from_pandas(y, "y")
    rows = frames.rows_by_client(_row_ids(client_ids, x, y))
    for argument, nest in (("x", x), ("y", y)):
        for leaf in tf.nest.flatten(_arrays(nest)):
            frames.check_finite(argument, leaf)
    return FederatedDataset.from_indices(x, y, rows, sample_weight=sample_weight)


def bound_rows(
    x: Any, y: Any, client_ids: Any, *, most: int, choose: str = "random"
) -> tuple[Any, Any, Any]:
    """Returns a table in which no person has more than so many rows.

    That bounds the local steps of a round, and how much one person's rows count in
    its own update. The guarantee is per person with or without it.

    Args:
      x: Features [n, ...], a nest of arrays, or a pandas frame.
      y: Labels [n, ...], likewise.
      client_ids: Whose row each is, [n] numbers or strings.
      most: How many rows of a person stay, at least 1.
      choose: Which: "random" (each person's own draw), "first" or "last".

    Returns:
      `(x, y, client_ids)` of the rows that stay, in their order.

    Raises:
      TypeError, ValueError: An argument is not allowed; the message names it.
    """
    _validate.positive_integer(most=most)
    _validate.one_of(_CHOICES, choose=choose)
    generator = np.random.default_rng()
    kept = []
    for own in frames.rows_by_client(_row_ids(client_ids, x, y)).values():
        if choose == "random" and len(own) > most:
            own = generator.choice(own, most, replace=False)
        kept.append(own[-most:] if choose == "last" else own[:most])
    stay = np.sort(np.concatenate(kept))

    def take(nest: Any) -> Any:
        if hasattr(nest, "iloc"):
            return nest.iloc[stay]
        if isinstance(nest, Mapping):
            return {name: take(part) for name, part in nest.items()}
        return tf.nest.map_structure(
            lambda leaf: np.asarray(leaf)[stay], nests.with_array_leaves(nest)
        )

    return take(x), take(y), np.asarray(client_ids)[stay]


def _arrays(nest: Any) -> Any:
    return tf.nest.map_structure(np.asarray, nests.with_array_leaves(nest))


def _from_pandas(value: Any, argument: str) -> Nest:
    """Returns arrays in the place of frames and series."""
    if isinstance(value, Mapping):
        return {name: _from_pandas(part, argument) for name, part in value.items()}
    if hasattr(value, "to_frame") and hasattr(value, "iloc"):
        return frames.array(value.to_frame("value"), "value", argument)
    if hasattr(value, "iloc"):
        columns = list(value.columns)
        return frames.arrays(
            value, columns, "features" if argument == "x" else argument
        )
    return value


def _row_ids(client_ids: Any, x: Any, y: Any) -> list[Any]:
    """Returns whose each row of x and y is."""
    num_rows = nests.common_length(_arrays(x), _arrays(y))
    if not num_rows:
        raise ValueError("x must have rows, got none.")
    ids = np.asarray(client_ids)
    if (
        isinstance(client_ids, list | tuple)
        and ids.dtype.kind in "US"
        and not all(isinstance(value, str | bytes) for value in client_ids)
    ):
        # NumPy has written numbers out: 1 and 1.0 would be two persons.
        raise ValueError(
            "client_ids must be numbers alone or strings alone, got a list of both."
        )
    if ids.ndim != 1 or len(ids) != num_rows:
        raise ValueError(
            f"client_ids must be a vector with one id for each of the {num_rows} "
            f"rows, got {list(ids.shape)}."
        )
    values = ids.tolist()
    for row, value in enumerate(values):
        if not isinstance(value, int | float | str | bytes) or value != value:
            raise ValueError(
                "client_ids must be a number or a string in every row, got a "
                f"{type(value).__name__} that is none in row {row}."
            )
    return values
