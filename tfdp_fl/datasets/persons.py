"""Persons in a table: rows, and a vector that says whose row each is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.datasets import frames, nests
from tfdp_fl.datasets.accepted import as_federated
from tfdp_fl.datasets.federated_dataset import FederatedDataset
from tfdp_fl.datasets.nests import Nest

_CHOICES = ("random", "first", "last")


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
    num_rows = nests.common_length(*_arrays(x, y))
    rows = frames.rows_by_client(_row_ids(client_ids, num_rows))
    for argument, nest in (("x", x), ("y", y)):
        for leaf in tf.nest.flatten(_arrays(nest)):
            _check_no_missing(argument, leaf)
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
    ids = np.asarray(client_ids)
    rows = frames.rows_by_client(_row_ids(ids, nests.common_length(*_arrays(x, y))))
    generator = np.random.default_rng()
    kept = []
    for own in rows.values():
        if choose == "random" and len(own) > most:
            own = generator.choice(own, most, replace=False)
        kept.append(own[-most:] if choose == "last" else own[:most])
    stay = np.sort(np.concatenate(kept))

    def take(nest: Any) -> Any:
        if hasattr(nest, "iloc"):
            return nest.iloc[stay]
        if isinstance(nest, Mapping):
            return {name: take(each) for name, each in nest.items()}
        return tf.nest.map_structure(
            lambda leaf: np.asarray(leaf)[stay], nests.with_array_leaves(nest)
        )

    return take(x), take(y), ids[stay]


def _arrays(*parts: Any) -> Any:
    return tf.nest.map_structure(
        np.asarray, [nests.with_array_leaves(p) for p in parts]
    )


def _from_pandas(value: Any, argument: str) -> Nest:
    """Returns arrays in the place of frames and series."""
    if isinstance(value, Mapping):
        return {name: _from_pandas(each, argument) for name, each in value.items()}
    if hasattr(value, "to_frame") and hasattr(value, "iloc"):
        return frames.array(value.to_frame("value"), "value", argument)
    if hasattr(value, "iloc"):
        columns = list(value.columns)
        return frames.arrays(
            value, columns, "features" if argument == "x" else argument
        )
    return value


def _row_ids(client_ids: Any, num_rows: int) -> list[Any]:
    ids = np.asarray(client_ids)
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


def _check_no_missing(argument: str, leaf: np.ndarray) -> None:
    if leaf.dtype.kind != "f":
        return
    rows = np.isfinite(leaf.reshape(len(leaf), -1))
    if rows.all():
        return
    row, column = (int(place) for place in np.argwhere(~rows)[0])
    raise ValueError(
        f"{argument} must have a finite number everywhere, got none in column "
        f"{column} of row {row}, and {int((~rows).sum())} in all: fill them in, or "
        "leave those rows out."
    )
