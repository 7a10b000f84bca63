"""Which rows of the same arrays are each client's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def row_table(
    indices: Sequence[Any] | np.ndarray, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32[slots], the rows of all clients, and int64[N] lengths.

    Args:
      indices: A 2-D array of rows, one line per client; or a sequence of 1-D
        arrays.
      num_rows: How many rows there are.

    Raises:
      TypeError, ValueError: If they are neither, or out of range.
    """
    if num_rows > np.iinfo(np.int32).max:
        raise ValueError(f"x must have at most 2**31 - 1 examples, got {num_rows}.")
    if isinstance(indices, np.ndarray) and indices.dtype != object:
        if indices.ndim != 2:
            raise ValueError(
                "indices must be 2-D where it is an array, one line per "
                f"client, got {indices.ndim} dimensions."
            )
        flat = indices.reshape(-1)
        lengths = np.full(len(indices), indices.shape[1], np.int64)
    else:
        rows = [np.asarray(client) for client in indices]
        for place, client in enumerate(rows):
            if client.ndim != 1:
                raise ValueError(
                    "indices must be one 1-D array per client, got "
                    f"{client.ndim} dimensions for client number {place}."
                )
        lengths = np.array([len(client) for client in rows], np.int64)
        rows = [client for client in rows if len(client)]
        flat = np.concatenate(rows) if rows else np.zeros(0, np.int32)
    if flat.size:
        if flat.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, got dtype {flat.dtype}.")
        if flat.min() < 0 or flat.max() >= num_rows:
            raise ValueError(
                f"indices must be from 0 to {num_rows - 1}, the examples of x, "
                f"got {flat.min()} to {flat.max()}."
            )
    return flat.astype(np.int32, copy=False), lengths
