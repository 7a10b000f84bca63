"""What travels between members, and how it becomes bytes."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Collection
from typing import Any

import numpy as np

MemberId = int | str
"""A member is known by a string or an integer."""

SHARE, PARTIAL_SUM = KINDS = ("share", "partial_sum")

_MAGIC = b"tfdpfl-secagg-2\n"
_FIELDS = ("kind", "session", "sender", "recipient")
_DTYPES = ("<u4", "<u8", "<f8")
_MOST_DIMENSIONS = 32  # What numpy allows.
_MOST_BYTES = 2**62  # No array is larger; beyond it numpy's own sizes overflow.


class RejectedMessageError(ValueError):
    """A message that does not belong here; its recipient is unchanged."""


def reject_if(wrong: bool, why: str) -> None:
    """Raises RejectedMessageError if something is wrong with a message."""
    if wrong:
        raise RejectedMessageError(why)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """One message from one member to one other.

    Attributes:
      kind: "share" or "partial_sum".
      session: the aggregation that it belongs to.
      sender: who sends it. The transport must vouch for it.
      recipient: for whom it is. The transport must keep it from all others:
        who reads all shares of a member reads the member's value.
      tensors: one array per tensor of the update.
    """

    kind: str
    session: str
    sender: MemberId
    recipient: MemberId
    tensors: tuple[np.ndarray, ...] = ()

    def to_bytes(self) -> bytes:
        """Returns the message as bytes: a JSON header and raw arrays."""
        tensors = [np.ascontiguousarray(tensor) for tensor in self.tensors]
        # The originals' shapes: a contiguous array of a scalar is a vector.
        layout = [(tensor.dtype.str, tensor.shape) for tensor in self.tensors]
        fields = {name: getattr(self, name) for name in _FIELDS}
        header = json.dumps({**fields, "tensors": layout}).encode()
        return b"".join(
            [_MAGIC, struct.pack("<I", len(header)), header]
            + [tensor.tobytes() for tensor in tensors]
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """Returns the message that `to_bytes` wrote.

        Nothing in the bytes is executed or trusted: sizes are checked before
        anything is read.

        Raises:
          RejectedMessageError: if the bytes are not such a message.
        """
        start = len(_MAGIC) + 4
        reject_if(
            len(data) < start or not data.startswith(_MAGIC),
            "These bytes are not a message.",
        )
        (length,) = struct.unpack_from("<I", data, len(_MAGIC))
        try:
            header = json.loads(data[start : start + length].decode("utf-8"))
            layout = [
                (np.dtype(_one_of(_DTYPES, dtype)), _shape(shape))
                for dtype, shape in header["tensors"]
            ]
            _one_of(KINDS, header["kind"])
            fields: dict[str, Any] = {name: header[name] for name in _FIELDS}
            # Not of a subclass: JSON's true is an int.
            if type(header["session"]) is not str or not all(
                type(name) in (int, str)
                for name in (header["sender"], header["recipient"])
            ):
                raise TypeError("A name must be a string or an integer.")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise RejectedMessageError(
                "The header of the message cannot be read."
            ) from error
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in layout]
        offset = start + length
        reject_if(
            offset + sum(sizes) != len(data),
            "The message is not as long as its header says.",
        )
        tensors = []
        for (dtype, shape), size in zip(layout, sizes, strict=True):
            count = math.prod(shape)
            tensors.append(np.frombuffer(data, dtype, count, offset).reshape(shape))
            offset += size
        return cls(tensors=tuple(tensors), **fields)


def _one_of(allowed: Collection[str], value: Any) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"It must be one of {tuple(allowed)}, got {value!r}.")
    return value


def _shape(shape: Any) -> tuple[int, ...]:
    # JSON knows 1.9, Infinity and true as well. Sizes beside a 0 need no bytes, and
    # are still sizes of an array.
    if (
        type(shape) is not list
        or len(shape) > _MOST_DIMENSIONS
        or not all(type(size) is int and size >= 0 for size in shape)
        or math.prod(max(size, 1) for size in shape) > _MOST_BYTES // 8
    ):
        raise ValueError(f"No array has the shape {shape!r}.")
    return tuple(shape)
