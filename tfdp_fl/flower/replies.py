"""What a client sent, read as if the client were hostile.

A reply is what somebody else's machine made: it may hold anything. Nothing is
allocated before its size is known to be what the model says, nothing is
unpickled or unzipped, and whatever is wrong with a reply is a `ReplyError`
that names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdp_fl.flower import keys

_MAGIC = b"\x93NUMPY"

# The header as `numpy.save` writes it, for plain real numbers only: no
# structures, no objects (which are pickled), no strings, no complex numbers.
_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[fiub][0-9]{1,2})', "
    rb"'fortran_order': (True|False), "
    rb"'shape': \(([0-9, ]*)\), \} *\n?"
)
_LONGEST_HEADER = 4096
_REAL_KINDS = "fiub"


class ReplyError(ValueError):
    """A reply that no wrapped client sends; its client counts as failed."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """A reply in the shape that was asked for.

    Attributes:
      arrays: the model that the client returned, in the shapes it was sent;
        its values may be anything, NaN and infinity among them.
      norm_bit: whether its update was within the clip norm, by its own word;
        None if that was not asked for.
      metrics: its other metrics. The exact bit is not among them: the wrapped
        strategy may publish what it makes of metrics.
    """

    arrays: list[np.ndarray]
    norm_bit: bool | None
    metrics: dict[str, Any]


def read(
    fit_res: Any, shapes: Sequence[tuple[int, ...]], wants_norm_bit: bool
) -> Reply:
    """Returns what a client replied, or raises.

    Args:
      fit_res: the result as Flower hands it over; trusted in nothing.
      shapes: of the arrays that the client was sent.
      wants_norm_bit: whether it has to say if its norm was within S.

    Raises:
      ReplyError: if the reply is not what a wrapped client sends.
    """
    with readable():
        metrics = fit_res.metrics
        if not isinstance(metrics, Mapping):
            raise ReplyError(f"metrics must be a mapping, got {type(metrics).__name__}")
        bit = norm_bit(metrics) if wants_norm_bit else None
        others = {k: v for k, v in metrics.items() if k != keys.NORM_BIT}
        return Reply(_arrays(fit_res.parameters, shapes), bit, others)


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Makes a `ReplyError` of whatever is raised while a reply is read."""
    try:
        yield
    except ReplyError:
        raise
    except Exception as error:
        # The checks in the block are meant to be complete. If one is not, a
        # client must still be able to end no more than its own reply.
        what = " ".join(f"{type(error).__name__}: {error}".split())[:100]
        raise ReplyError(f"it cannot be read ({what})") from error


def norm_bit(metrics: Mapping[str, Any]) -> bool:
    """Returns the bit among a client's metrics, or raises `ReplyError`."""
    if keys.NORM_BIT not in metrics:
        raise ReplyError(
            f"it has no {keys.NORM_BIT} (is the client wrapped in "
            "DPFedAvgNumPyClient, or private_mod among its mods?)"
        )
    value = metrics[keys.NORM_BIT]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, numbers.Real) and not math.isnan(value):
        # One client moves the count by one at most, whatever number it sends.
        return bool(value)
    raise ReplyError(f"{keys.NORM_BIT} must be a bool, got {type(value).__name__}")


def _arrays(parameters: Any, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    tensors = getattr(parameters, "tensors", None)
    serialised = tensors is not None
    items = tensors if serialised else parameters
    if not isinstance(items, list | tuple):
        raise ReplyError(f"parameters must hold a list, got {type(items).__name__}")
    if len(items) != len(shapes):
        raise ReplyError(f"it must hold {len(shapes)} arrays, got {len(items)}")
    take = npy_array if serialised else _plain_array
    return [take(item, shape) for item, shape in zip(items, shapes, strict=True)]


def npy_array(data: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the array in numpy's file format, without a copy.

    Versions 1.0 and 2.0, real numbers of at most 8 bytes. The size that the
    header states is compared with `shape` and with the bytes that are there
    before an array is made.

    Args:
      data: the bytes of one `.npy` file.
      shape: the only shape accepted.

    Raises:
      ReplyError: if the bytes are anything else.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ReplyError(f"a tensor must be bytes, got {type(data).__name__}")
    data = bytes(data)
    version = data[6:8]
    if data[:6] != _MAGIC or version not in (b"\x01\x00", b"\x02\x00"):
        raise ReplyError(
            f"a tensor must be in the .npy format, version 1.0 or 2.0, got {data[:8]!r}"
        )
    start = 10 if version == b"\x01\x00" else 12
    length = int.from_bytes(data[8:start], "little")
    if length > _LONGEST_HEADER or len(data) < start + length:
        raise ReplyError("a tensor's header is cut short, or too long")
    header = _HEADER.fullmatch(data, start, start + length)
    if header is None:
        raise ReplyError(
            "a tensor's header must state real numbers, got "
            f"{data[start : start + min(length, 80)]!r}"
        )
    stated = tuple(
        int(size) for size in header[3].replace(b" ", b"").split(b",") if size
    )
    if stated != tuple(shape):
        raise ReplyError(f"a tensor must have the shape {tuple(shape)}, got {stated}")
    try:
        dtype = np.dtype(header[1].decode())
    except TypeError:
        dtype = None
    if dtype is None or dtype.itemsize > 8:
        raise ReplyError(f"a tensor of dtype {header[1].decode()} is refused")
    size = math.prod(stated)
    if len(data) - start - length != size * dtype.itemsize:
        raise ReplyError(
            f"a tensor of shape {stated} and dtype {dtype} must have "
            f"{size * dtype.itemsize} bytes, got {len(data) - start - length}"
        )
    flat = np.frombuffer(data, dtype, size, start + length)
    return flat.reshape(stated, order="F" if header[2] == b"True" else "C")


def _plain_array(item: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(item)
    if array.dtype.kind not in _REAL_KINDS:
        raise ReplyError(f"an array of dtype {array.dtype} is refused")
    if array.shape != tuple(shape):
        raise ReplyError(
            f"an array must have the shape {tuple(shape)}, got {array.shape}"
        )
    return array
