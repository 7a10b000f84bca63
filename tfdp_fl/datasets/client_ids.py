"""Clients' ids: what their caller calls them, and whose row of a table each is."""

from __future__ import annotations

import hashlib
import re
import unicodedata
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np


def place_of(client_id: Any) -> float:
    """Returns a number in [0, 1) that is an id's own."""
    digest = hashlib.sha256(_text(client_id).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _text(client_id: Any) -> str:
    if isinstance(client_id, np.generic):
        client_id = client_id.item()
    return f"{type(client_id).__qualname__} {client_id!r}"


def distinct(client_ids: Sequence[Any]) -> Sequence[Any]:
    """Returns ids as a dataset keeps them: a list, or a range of places.

    A client under two ids takes part twice, and its sum is bounded once. Ids that
    a person would read as one are therefore warned of.

    Raises:
      ValueError: One is repeated, or does not equal itself.
    """
    if isinstance(client_ids, range):
        return client_ids
    kept = list(client_ids)
    if any(client_id != client_id for client_id in kept):
        raise ValueError("client_ids must name each client, got a missing value (NaN).")
    if len(set(kept)) < len(kept):
        raise ValueError("client_ids must be distinct, got some repeatedly.")
    read: dict[str, Any] = {}
    for client_id in kept:
        other = read.setdefault(_as_read(client_id), client_id)
        if other is not client_id:
            warnings.warn(
                f"client_ids has {other!r} and {client_id!r}, which differ only in "
                "type, Unicode form, spaces or a '.0'. If both are one client, the "
                "guarantee does not cover that client: make their ids equal.",
                RuntimeWarning,
                stacklevel=4,
            )
            break
    return kept


def _as_read(client_id: Any) -> str:
    text = (
        client_id.decode("latin-1") if isinstance(client_id, bytes) else str(client_id)
    )
    text = "".join(unicodedata.normalize("NFKC", text).split())
    # A column of whole numbers with a gap is one of floats.
    return re.sub(r"^([+-]?\d+)\.0+$", r"\1", text)


def digest(client_ids: Sequence[Any]) -> str:
    """Returns the SHA-256 of ids in their order, hexadecimal."""
    made = hashlib.sha256()
    for client_id in client_ids:
        text = _text(client_id)
        # With its length before it, no id can pass for two.
        made.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return made.hexdigest()


def rows_of_persons(client_ids: Any, num_rows: int) -> dict[Any, np.ndarray]:
    """Returns each person's rows (int64), by id, in the order of the rows.

    Args:
      client_ids: Whose row each is, [n] numbers or strings.
      num_rows: n.

    Raises:
      ValueError: They are not; the message names the row.
    """
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
    return rows_by_client(values)


def rows_by_client(row_ids: list[Any]) -> dict[Any, np.ndarray]:
    """Returns each client's rows (int64), by id, in the order of the rows.

    Args:
      row_ids: The client of each row, of which there is one at least.
    """
    place: dict[Any, int] = {}
    codes = np.array([place.setdefault(each, len(place)) for each in row_ids])
    # Stable: a client's rows stay in the frame's order.
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(place)))
    return dict(zip(place, np.split(order, ends[:-1]), strict=True))
