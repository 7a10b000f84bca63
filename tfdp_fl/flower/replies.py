"""Reads clients' replies as if the clients were hostile.

A reply comes from another party's machine and may contain anything. Memory is only
allocated for a size that matches the model, nothing is unpickled or unzipped, and
Flower's own deserialiser is not used. Any problem with a reply raises a `ReplyError`
that describes it.
"""

from __future__ import annotations

import collections
import contextlib
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from tfdp_fl.flower import client as client_lib

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.common import FitRes

# Version 1.0 of the .npy format, which `numpy.save` writes for such arrays.
_MAGIC = b"\x93NUMPY\x01\x00"

# The header as `numpy.save` writes it, only for plain real numbers of at most 8 bytes:
# no structures, objects (which are pickled), strings or complex numbers.
_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?(?:f[248]|[iu][1248]|b1))', "
    rb"'fortran_order': (True|False), "
    rb"'shape': \(([0-9, ]*)\), \} *\n?"
)
_NUMPY = "numpy.ndarray"

Shapes: TypeAlias = Sequence[tuple[int, ...]]


class ReplyError(ValueError):
    """No wrapped client sends such a reply, so the client counts as failed."""


class Reply(NamedTuple):
    """The requested parts of a reply; everything else is dropped.

    Attributes:
      arrays: The model that the client returned, in the shapes that it was sent; the
        values may be anything, including NaN and infinity.
      norm_bit: Whether the client reports that its update was within the clip norm;
        None if that was not requested.
    """

    arrays: list[np.ndarray]
    norm_bit: bool | None = None


def read_result(
    fit_res: FitRes,
    shapes: Shapes,
    instruction: client_lib.Instruction,
    is_average: bool = False,
) -> Reply:
    """Returns the reply of a client of the older API, or raises an error.

    Args:
      fit_res: The reply, which may be any object.
      shapes: The shapes of the arrays that the client was sent.
      instruction: The client's instructions.
      is_average: Whether it is an average, so that the client's own update cannot be
        clipped again.

    Raises:
      ReplyError: The reply is not one that a wrapped client sends.
    """
    with _wrap_reply_errors():
        if not isinstance(fit_res.metrics, Mapping):
            raise ReplyError("metrics must be a mapping")
        tensors = fit_res.parameters.tensors
        if not isinstance(tensors, list | tuple) or len(tensors) != len(shapes):
            raise ReplyError(f"it must hold a list of {len(shapes)} tensors")
        arrays = [parse_npy(t, shape) for t, shape in zip(tensors, shapes, strict=True)]
        if is_average and fit_res.num_examples != 1:
            raise ReplyError(f"its weight must be 1, got {fit_res.num_examples!r:.40}")
        return Reply(arrays, _norm_bit(fit_res.metrics, instruction, is_average))


def read_message(
    message: Message,
    shapes: Shapes,
    instruction: client_lib.Instruction,
    names: Sequence[str],
    message_ids: Mapping[int, str],
) -> Reply:
    """Returns the reply of a client of the message API, or raises an error.

    Args:
      message: The reply, which may be any object.
      shapes: The shapes of the arrays that the client was sent.
      instruction: The client's instructions.
      names: The names of the arrays.
      message_ids: The id of the message that was sent to each node.

    Raises:
      ReplyError: The reply is not one that `private_mod` sends.
    """
    with _wrap_reply_errors():
        metadata = message.metadata
        message_id = message_ids.get(metadata.src_node_id)
        if not message_id or metadata.reply_to_message_id != message_id:
            raise ReplyError("it answers another message, or one without an id")
        records = list(message.content.array_records.values())
        if len(records) != 1:
            raise ReplyError(f"it must hold one ArrayRecord, got {len(records)}")
        record = dict(records[0])
        if record.keys() != set(names):
            raise ReplyError(
                f"its arrays must be {list(names)!r:.80}, got {list(record)!r:.80}"
            )
        arrays = []
        for name, shape in zip(names, shapes, strict=True):
            # The record's own claims about shape and dtype are ignored.
            if record[name].stype != _NUMPY:
                raise ReplyError(
                    f"an array must be of stype {_NUMPY}, got "
                    f"{record[name].stype!r:.40}"
                )
            arrays.append(parse_npy(record[name].data, shape))
        metrics = collections.ChainMap(*message.content.metric_records.values())
        return Reply(arrays, _norm_bit(metrics, instruction))


@contextlib.contextmanager
def _wrap_reply_errors() -> Iterator[None]:
    """Turns any error that is raised while a reply is read into a `ReplyError`."""
    try:
        yield
    except ReplyError:
        raise
    except Exception as error:
        # The block should check everything. Even if it misses something, a client must
        # not be able to affect more than its own reply.
        description = " ".join(f"{type(error).__name__}: {error}".split())[:100]
        raise ReplyError(f"it cannot be read ({description})") from error


def _norm_bit(
    metrics: client_lib.Config,
    instruction: client_lib.Instruction,
    is_average: bool = False,
) -> bool | None:
    """Returns the norm bit in a client's metrics; checks the applied clip and noise.

    The check is only needed if clients add noise, or if the server sees an average.
    Otherwise, the server itself clips and adds noise, whatever a client did.
    """
    hint = "is the client wrapped in DPFedAvgNumPyClient, or private_mod a mod?"
    if instruction.noise_stddev or is_average:
        names = (client_lib.APPLIED_CLIP_NORM, client_lib.APPLIED_NOISE_STDDEV)
        applied = tuple(metrics.get(name) for name in names)
        if applied != instruction[:2]:
            raise ReplyError(
                f"it must say that it applied (clip norm, noise) {instruction[:2]}, "
                f"got {applied!r:.80} ({hint})"
            )
    if not instruction.wants_norm_bit:
        return None
    if client_lib.NORM_BIT not in metrics:
        raise ReplyError(f"it has no {client_lib.NORM_BIT} ({hint})")
    value = metrics[client_lib.NORM_BIT]
    if isinstance(value, numbers.Real | np.bool_) and not math.isnan(value):
        # So a client changes the count by at most one, whatever number it sends.
        return bool(value)
    raise ReplyError(
        f"{client_lib.NORM_BIT} must be a bool, got {type(value).__name__}"
    )


def parse_npy(data: object, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the array in the bytes of an `.npy` file, without a copy.

    The shape in the header is compared with `shape` and with the number of bytes before
    an array is made.

    Args:
      data: The bytes of one `.npy` file.
      shape: The only accepted shape.

    Raises:
      ReplyError: The bytes are anything else.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ReplyError(f"a tensor must be bytes, got {type(data).__name__}")
    data, start = bytes(data), len(_MAGIC) + 2
    if not data.startswith(_MAGIC):
        raise ReplyError(
            f"a tensor must be in the .npy format, version 1.0, got {data[:8]!r}"
        )
    end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    header = _HEADER.fullmatch(data, start, end)
    if header is None:
        raise ReplyError(
            "a tensor's header must state real numbers, got "
            f"{data[start : min(end, start + 80)]!r}"
        )
    header_shape = tuple(
        int(size) for size in header[3].replace(b" ", b"").split(b",") if size
    )
    if header_shape != tuple(shape):
        raise ReplyError(
            f"a tensor must have the shape {tuple(shape)}, got {header_shape!r:.80}"
        )
    dtype, size = np.dtype(header[1].decode()), math.prod(header_shape)
    if len(data) - end != size * dtype.itemsize:
        raise ReplyError(
            f"a tensor of shape {header_shape} and dtype {dtype} must have "
            f"{size * dtype.itemsize} bytes, got {len(data) - end}"
        )
    flat = np.frombuffer(data, dtype, size, end)
    return flat.reshape(header_shape, order="F" if header[2] == b"True" else "C")
