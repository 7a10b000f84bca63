"""Clients' ids: what their caller calls them."""

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
