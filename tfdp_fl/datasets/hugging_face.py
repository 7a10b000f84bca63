"""A Hugging Face `datasets.Dataset` with a column that names the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfdp_fl.datasets import frames, nests

_FACE = ("column_names", "select_columns", "with_format", "__len__")


def is_dataset(value: Any) -> bool:
    """Returns True for what has the face of a `datasets.Dataset`."""
    return all(hasattr(value, name) for name in _FACE)


def readers(
    dataset: Any,
    client: str,
    features: frames.Columns | None,
    label: frames.Columns,
    sample_weight: str | None,
) -> tuple[list[Any], Callable[[Any], tuple[Any, ...]]]:
    """Returns the clients' ids, and what reads the examples of one.

    Args:
      dataset: See `FederatedDataset.from_hugging_face`.
      client: See there.
      features: See there.
      label: See there.
      sample_weight: See there.

    Raises:
      TypeError, ValueError: See there.
    """
    if isinstance(dataset, Mapping):
        raise TypeError(
            "dataset must be one split, a datasets.Dataset, got a "
            f"{type(dataset).__name__} of {', '.join(map(repr, dataset))}."
        )
    if not is_dataset(dataset):
        raise TypeError(
            f"dataset must be a datasets.Dataset, got {type(dataset).__name__}."
        )
    names = list(dataset.column_names)
    if client is None:
        raise TypeError("client must name a column, got None.")
    all_others = features is None
    features = frames.chosen(names, client, features, label, sample_weight)
    if all_others and len(features) == 1:
        (features,) = features
    ids = dataset.select_columns([client]).with_format(None)[:][client]
    if any(each is None for each in ids):
        raise ValueError(
            f"client must be named in every row, got column {client!r} with "
            f"{sum(each is None for each in ids)} missing."
        )
    rows = frames.rows_by_client(list(ids))
    used = dict.fromkeys([*frames.named(features), *frames.named(label)])
    if sample_weight is not None:
        used[sample_weight] = None
    columns = dataset.select_columns(list(used)).with_format("numpy")

    def read(client_id: Any) -> tuple[Any, ...]:
        held = columns[rows[client_id]]
        x = _joined(held, features, "features")
        y = _joined(held, label, "label")
        if sample_weight is None:
            return x, y
        return x, y, np.asarray(held[sample_weight])

    return list(rows), read


def _joined(held: Mapping[str, Any], columns: Any, argument: str) -> Any:
    """Returns [n, ...] of one column, [n, F] of a list, a dict of a dict."""
    if isinstance(columns, Mapping):
        return {key: _joined(held, each, argument) for key, each in columns.items()}
    if isinstance(columns, str):
        return np.asarray(held[columns])
    arrays = [np.asarray(held[name]) for name in columns]
    for name, array in zip(columns, arrays, strict=True):
        if array.ndim != 1 or array.dtype.kind not in "biuf":
            raise nests.ExamplesTypeError(
                f"{argument} must be one column, or a list of columns with a "
                f"number in each row, got column {name!r} of {array.dtype} "
                f"{list(array.shape[1:])} in a list."
            )
    if argument == "features":
        arrays = [array.astype(np.float32) for array in arrays]
    return np.stack(arrays, axis=1)
