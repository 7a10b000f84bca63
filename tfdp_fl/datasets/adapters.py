"""Converts users' data, such as tables with one client id per row, to clients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.datasets import nests, tables
from tfdp_fl.datasets.federated_dataset import FederatedDataset, Indices
from tfdp_fl.datasets.nests import Nest

# What `fit` accepts: clients' data in one of these forms; with `client_ids`, the
# features of all rows.
Clients: TypeAlias = FederatedDataset | Nest

_ALLOWED = (
    "a FederatedDataset, a mapping or list with (x, y), (x, y, sample_weight) or a "
    "tf.data.Dataset for each client, a tff.simulation.datasets.ClientData, or for a "
    "table FederatedDataset.from_dataframe(frame, client=...) or fit(x, y, "
    "client_ids=ids)"
)


def as_federated(clients: Clients, element_spec: nests.Nest = None) -> FederatedDataset:
    """Returns clients' data as a `FederatedDataset`.

    Args:
      clients: A `FederatedDataset`; a mapping from client ids to `(x, y)` or `(x, y,
        sample_weight)` (nests of arrays) or to `tf.data.Dataset`s; a list of
        those, whose clients are then 0 to N - 1; or a TFF `ClientData`.
      element_spec: The spec of an example, as in `FederatedDataset.from_client_fn`;
        only needed if the model and the loss do not determine it.

    Raises:
      TypeError: `clients` is none of these; the message names only its type.
      ValueError: A client's own arrays are inconsistent.
    """
    if isinstance(clients, FederatedDataset):
        if element_spec is not None:
            raise ValueError("element_spec must be None for a FederatedDataset.")
        return clients
    if hasattr(clients, "create_tf_dataset_for_client"):
        return FederatedDataset.from_client_data(clients, element_spec)
    is_list = isinstance(clients, list | tuple)
    by_id = dict(enumerate(clients)) if is_list else clients
    kinds = tuple | list | tf.data.Dataset
    wrong: list[object] = [clients]
    if isinstance(by_id, Mapping):
        wrong = [data for data in by_id.values() if not isinstance(data, kinds)]
    if wrong:
        raise TypeError(f"clients must be {_ALLOWED}, got a {type(wrong[0]).__name__}.")
    make: Any = FederatedDataset.from_client_arrays
    if by_id and all(isinstance(data, tf.data.Dataset) for data in by_id.values()):
        make = FederatedDataset.from_tf_datasets
    dataset = make(
        {k: tuple(v) if isinstance(v, list) else v for k, v in by_id.items()},
        element_spec,
    )
    # A list's clients have only positions; see `FederatedDataset.clients_digest`.
    return dataset.with_ids(range(len(by_id))) if is_list else dataset


def resolve_fit_data(
    data: Clients, y: nests.Nest, client_ids: tables.Ids, sample_weight: nests.Nest
) -> FederatedDataset:
    """Returns the clients that were passed to `fit` in either form.

    Args:
      data: Clients' data; with `client_ids`, the features of all rows.
      y: The labels of all rows.
      client_ids: The client of each row; None: `data` is clients' data.
      sample_weight: Each row's weight, or None.

    Raises:
      TypeError, ValueError: The arguments are inconsistent.
    """
    if client_ids is not None:
        if y is None:
            raise TypeError(
                "x and y must be arrays or pandas frames of all rows if client_ids is "
                f"given, got a {type(data).__name__} for x and no y."
            )
        return group_by_person(data, y, client_ids, sample_weight)
    if y is None and sample_weight is None:
        return as_federated(data)
    raise TypeError(
        "client_ids must say whose row each is if y or sample_weight is given: "
        "fit(x, y, client_ids=ids, rounds=...)."
    )


def group_by_person(
    x: nests.Nest,
    y: nests.Nest,
    client_ids: tables.Ids,
    sample_weight: nests.Nest = None,
    num_people: int | None = None,
) -> FederatedDataset:
    """Returns the clients of a table: each person, with all of their rows.

    Args:
      x: Features [n, ...], a nest of arrays, or a pandas frame of numbers.
      y: Labels [n, ...], likewise.
      client_ids: The person of each row, [n] numbers or strings.
      sample_weight: Each row's weight in the loss, [n], or None.
      num_people: The declared number of people; if the table has fewer, clients without
        examples are added. None: the number of people in the table.

    Raises:
      ValueError: There are more people than declared; a row has no id, or has a missing
        value other than a label (the message names column and row); or lengths or
        pandas indexes differ.
    """
    arguments = {"x": x, "y": y, "sample_weight": sample_weight}
    check_aligned(**arguments, client_ids=client_ids)
    arguments = {
        argument: nests.as_arrays(to_keras_inputs(nest, argument), argument)
        for argument, nest in arguments.items()
        if nest is not None
    }
    num_rows = nests.common_length(arguments["x"], arguments["y"])
    rows = tables.group_rows(client_ids, num_rows)
    for argument, nest in arguments.items():
        # Labels may be NaN in every form of data, as a loss may allow it.
        for leaf in tf.nest.flatten(nest) if argument != "y" else ():
            tables.check_finite(argument, leaf)
    indices: Indices = rows
    if num_people is not None:
        indices = rows.by_client()
        if len(indices) > num_people:
            raise ValueError(
                f"client_ids must name at most {num_people} people, the declared "
                f"number, got {len(indices)}."
            )
        names = (f"(nobody {k})" for k in itertools.count())
        unused_names = (name for name in names if name not in indices)
        missing = itertools.islice(unused_names, num_people - len(indices))
        indices = {**indices, **dict.fromkeys(missing, np.zeros(0, np.int64))}
    return FederatedDataset.from_indices(**arguments, indices=indices)


def check_aligned(**arguments: nests.Nest) -> None:
    """Raises ValueError if arguments with matching rows have different pandas indexes.

    Matching rows by position would silently assign one person's row to another.
    """
    first: nests.Nest = None
    for argument, nest in arguments.items():
        is_nest = isinstance(nest, dict | tuple) or (
            isinstance(nest, list) and nest and hasattr(nest[0], "iloc")
        )
        for leaf in tf.nest.flatten(nest) if is_nest else [nest]:
            if not hasattr(leaf, "iloc"):
                continue
            first = (argument, leaf.index) if first is None else first
            if not leaf.index.equals(first[1]):
                raise ValueError(
                    f"{argument} must have the same pandas index, in the same order, "
                    f"as {first[0]}, got another: align them (y.loc[x.index]), or give "
                    "arrays (.to_numpy()) if their rows already match."
                )


def to_keras_inputs(nest: nests.Nest, argument: str) -> Nest:
    """Converts lists, frames and series to arrays; leaves everything else unchanged.

    Strings become tensors, as Keras does not accept NumPy strings.

    Args:
      nest: The data of all rows.
      argument: The argument's name, for errors. In frames, only "y" keeps integers.
    """

    def array(leaf: nests.Nest) -> nests.Nest:
        if hasattr(leaf, "to_frame"):  # A series or an index.
            return tables.to_array(leaf.to_frame(name=argument), argument, argument, {})
        if hasattr(leaf, "iloc"):
            names = tables.column_names(leaf, argument)
            return tables.to_arrays(leaf, names, argument, {})
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSU":
            return tf.constant(nests.as_array(leaf, argument), tf.string)
        return leaf

    return tf.nest.map_structure(array, nests.with_array_leaves(nest, argument))


def limit_rows_per_client(
    x: nests.Nest,
    y: nests.Nest,
    client_ids: tables.Ids,
    *,
    max_rows: int,
    keep: str = "random",
) -> tuple[nests.Nest, nests.Nest, tables.Ids]:
    """Returns a table with at most `max_rows` rows per person.

    This limits the local steps of a round, and the influence of a person's rows on
    their own update. The guarantee is per person with or without it.

    Args:
      x: Features [n, ...], a nest of arrays, or a pandas frame.
      y: Labels [n, ...], likewise; for `(y, sample_weight)`, both are limited.
      client_ids: The person of each row, [n] numbers or strings.
      max_rows: The maximum number of rows per person, at least 1.
      keep: Which rows to keep: "random" (drawn separately for each person), "first" or
        "last".

    Returns:
      `(x, y, client_ids)` of the remaining rows, in their original order.

    Raises:
      TypeError, ValueError: An argument is not allowed; the message names it.
    """
    _validate.positive_integer(max_rows=max_rows)
    _validate.one_of(("random", "first", "last"), keep=keep)
    check_aligned(x=x, y=y, client_ids=client_ids)
    generator, selected = np.random.default_rng(), []
    x, y = nests.with_array_leaves(x, "x"), nests.with_array_leaves(y, "y")
    rows = tables.group_rows(client_ids, nests.common_length(x, y))
    for client_rows in rows.by_client().values():
        if keep == "random" and len(client_rows) > max_rows:
            client_rows = generator.choice(client_rows, max_rows, replace=False)
        selected.append(
            client_rows[-max_rows:] if keep == "last" else client_rows[:max_rows]
        )
    kept_rows = np.sort(np.concatenate(selected))

    def take(leaf: nests.Nest) -> nests.Nest:
        if leaf is None:
            return None
        return (
            leaf.iloc[kept_rows]
            if hasattr(leaf, "iloc")
            else np.asanyarray(leaf)[kept_rows]
        )

    x, y = tf.nest.map_structure(take, (x, y))
    ids = client_ids
    if isinstance(ids, list | tuple) and np.asarray(ids).tolist() != [*ids]:
        # An array would change what they are.
        return x, y, [ids[row] for row in kept_rows]
    return x, y, np.asarray(ids)[kept_rows]
