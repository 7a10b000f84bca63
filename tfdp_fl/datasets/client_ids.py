"""Clients' ids: what their caller calls them."""

from __future__ import annotations

import hashlib
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
    """Returns False for ids that are places: 0 is whoever comes first."""
    if isinstance(client_ids, TakenIds):
        client_ids = client_ids.of
    return not isinstance(client_ids, range)


def distinct(client_ids: Sequence[Any] | None) -> Sequence[Any] | None:
    """Returns ids as they are kept; raises ValueError if one is repeated."""
    if client_ids is None or isinstance(client_ids, range):
        return client_ids
    client_ids = list(client_ids)
    if len(set(client_ids)) < len(client_ids):
        raise ValueError("client_ids must be distinct, got some repeatedly.")
    return client_ids


def digest(client_ids: Sequence[Any]) -> str:
    """Returns the SHA-256 of ids in their order, hexadecimal."""
    made = hashlib.sha256()
    for start in range(0, len(client_ids), _AT_ONCE):
        texts = map(_text, client_ids[start : start + _AT_ONCE])
        # With its length before it, no id can pass for two.
        joined = "".join(f"{len(text)}:{text}" for text in texts)
        made.update(joined.encode(errors="surrogatepass"))
    return made.hexdigest()
