"""Clients' ids: what their caller calls them."""

from __future__ import annotations

import hashlib
import unicodedata
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

_AT_ONCE = 4096


def place_of(client_id: Any) -> float:
    """Returns a number in [0, 1) that is an id's own."""
    digest = hashlib.sha256(_text(client_id).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _text(client_id: Any) -> str:
    if isinstance(client_id, np.generic):
        client_id = client_id.item()
    return f"{type(client_id).__qualname__} {client_id!r}"


class TakenIds(Sequence):
    """Some of a sequence's items; nothing is looked up before it is used.

    Attributes:
      of: The sequence.
    """

    def __init__(self, of: Sequence[Any], positions: np.ndarray):
        self.of = of
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return TakenIds(self.of, self._positions[place])
        return self.of[int(self._positions[place])]

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # Like a list's.

    def __repr__(self) -> str:
        return repr(list(self))


def are_names(client_ids: Sequence[Any]) -> bool:
    """Returns False for ids that are places: 0 is the first client."""
    if isinstance(client_ids, TakenIds):
        client_ids = client_ids.of
    return not isinstance(client_ids, range)


class DistinctIds(list):
    """Ids of which none is repeated."""


def distinct(client_ids: Sequence[Any]) -> Sequence[Any]:
    """Returns ids as a dataset keeps them.

    A client under two ids takes part twice, and its sum is bounded once. Ids that
    a person would read as one are therefore warned of.

    Raises:
      ValueError: One is repeated, or does not equal itself.
    """
    if isinstance(client_ids, range | TakenIds | DistinctIds):
        return client_ids
    kept = DistinctIds(client_ids)
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
                "type, Unicode form or spaces. If both are one client, the guarantee "
                "does not cover that client: make their ids equal.",
                RuntimeWarning,
                stacklevel=4,
            )
            break
    return kept


def _as_read(client_id: Any) -> str:
    text = (
        client_id.decode("latin-1") if isinstance(client_id, bytes) else str(client_id)
    )
    return "".join(unicodedata.normalize("NFKC", text).split())


def digest(client_ids: Sequence[Any]) -> str:
    """Returns the SHA-256 of ids in their order, hexadecimal."""
    made = hashlib.sha256()
    for start in range(0, len(client_ids), _AT_ONCE):
        texts = map(_text, client_ids[start : start + _AT_ONCE])
        # With its length before it, no id can pass for two.
        joined = "".join(f"{len(text)}:{text}" for text in texts)
        made.update(joined.encode(errors="surrogatepass"))
    return made.hexdigest()
