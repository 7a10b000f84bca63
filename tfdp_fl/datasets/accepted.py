"""What a user holds, as a `FederatedDataset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp_fl.datasets.federated_dataset import FederatedDataset

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
        _check_tuple(client_id, examples, clients)
    dataset = FederatedDataset.from_client_arrays(
        {client_id: tuple(each) for client_id, each in by_id.items()}
    )
    # Known by their places, then: see `FederatedDataset.clients_digest`.
    return dataset.with_ids(range(len(by_id))) if listed else dataset


def _check_tuple(client_id: Any, examples: Any, clients: Any) -> None:
    if isinstance(examples, tuple | list) and len(examples) in (2, 3):
        return
    raise TypeError(
        f"clients must be {_ALLOWED}, got {type(examples).__name__} for client "
        f"{client_id!r}." + _hint(clients)
    )


def _hint(clients: Any) -> str:
    if type(clients).__name__ == "DataFrame":
        return (
            " Which column names the client? FederatedDataset.from_dataframe("
            "frame, client=..., features=..., label=...)."
        )
    if hasattr(clients, "to_pandas"):
        return (
            " Which column names the client? FederatedDataset.from_dataframe("
            "dataset.to_pandas(), client=..., features=..., label=...)."
        )
    if hasattr(clients, "__array__") or (
        isinstance(clients, tuple | list) and len(clients) in (2, 3)
    ):
        return (
            " For one pair of arrays (x, y), say whose row each is: "
            "fit(x, y, client_ids=ids)."
        )
    return ""
