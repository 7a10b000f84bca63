"""A Parquet file with a column that names the client."""

from __future__ import annotations

import collections
import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdp_fl import _optional
from tfdp_fl.datasets import frames


def readers(
    path: str | os.PathLike[str],
    client: str,
    features: frames.Columns | None,
    label: frames.Columns,
    sample_weight: str | None,
    vocabulary: frames.Vocabulary,
) -> tuple[list[Any], Callable[[Any], tuple[Any, ...]], bool]:
    """Returns the clients of a Parquet file, what reads one, and if it is sorted.

    Every row group is read once to find the clients and to check all values; one is
    held at a time.

    Args:
      path: See `FederatedDataset.from_parquet`.
      client: See there.
      features: See there.
      label: See there.
      sample_weight: See there.
      vocabulary: See there.

    Raises:
      ImportError: pandas or pyarrow is not installed.
      ValueError: See there.
    """
    with _optional.needed("pyarrow", "Reading .parquet files"):
        parquet = importlib.import_module("pyarrow.parquet")
    with _optional.needed("pandas", "Reading tables"):
        pandas = importlib.import_module("pandas")
    location = os.fspath(path)
    file = parquet.ParquetFile(location)
    # pandas writes an index that is no range as a column: it is no feature.
    names = [
        name
        for name in file.schema_arrow.names
        if not name.startswith("__index_level_")
    ]
    features = frames.chosen(names, client, features, label, sample_weight)
    frames.check_vocabulary(names, vocabulary)
    used = list(dict.fromkeys([*frames.named(features), *frames.named(label)]))
    used += [] if sample_weight is None else [sample_weight]
    places: dict[Any, list[tuple[int, np.ndarray]]] = collections.defaultdict(list)
    first_row = 0
    for group in range(file.num_row_groups):
        frame = file.read_row_group(group, columns=[client, *used]).to_pandas(
            ignore_metadata=True
        )
        frame.attrs["first_row"] = first_row
        first_row += len(frame)
        if len(frame):
            ids = frames.ids(frame, client)
            frames.of_one_client(frame, features, label, sample_weight, vocabulary)
            for client_id, rows in frames.rows_by_client(ids).items():
                places[client_id].append((group, rows))
    if not places:
        raise ValueError("path must be a file with rows, got none.")
    held: dict[int, Any] = {}

    def read(client_id: Any) -> tuple[Any, ...]:
        parts = []
        for group, rows in places[client_id]:
            if group not in held:
                if is_sorted:
                    held.clear()
                held[group] = (
                    parquet.ParquetFile(location)
                    .read_row_group(group, columns=used)
                    .to_pandas(ignore_metadata=True)
                )
            parts.append(held[group].iloc[rows])
        whole = pandas.concat(parts) if len(parts) > 1 else parts[0]
        return frames.of_one_client(whole, features, label, sample_weight, vocabulary)

    # A client's rows end where a group ends, and go on in the next.
    is_sorted = sum(len(each) - 1 for each in places.values()) < file.num_row_groups
    return list(places), read, is_sorted
