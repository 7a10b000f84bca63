"""Reading `.npz` files whose arrays are not compressed, as `np.savez` writes.

`np.load` reads an archive for everybody: it takes longer to open two arrays of
a client with 60 images than to copy them. Here is the one kind of archive that
needs nothing but its directory (APPNOTE 6.3.10, 4.3 and 4.4); all others, and
whatever is not as it should be, are `np.load`'s, with its errors. So what comes
back is what `np.load` returns, checksums compared.
"""

from __future__ import annotations

import functools
import io
import math
import os
import struct
import zlib
from typing import NamedTuple

import numpy as np

# The record at the end of the directory, of an archive without a comment.
_END = struct.Struct("<4s4H2LH")
_END_SIGNATURE = b"PK\5\6"
# What stands in the directory of an array, and before it.
_ENTRY = struct.Struct("<4s6H3L5H2L")
_ENTRY_SIGNATURE = b"PK\1\2"
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_SIGNATURE = b"PK\3\4"
# Enough for the directory of some arrays, read at once.
_TAIL_BYTES = 1024
# What a local header and a name may take before an array; and its own header.
_HEAD_BYTES = 512
_NEWEST_VERSION = 45  # Of what an archive needs: zip64 at most.
_SUFFIX = ".npy"


class _Entry(NamedTuple):
    name: bytes
    checksum: int
    size: int
    offset: int


class _ForNumPy(Exception):  # noqa: N818 (nobody sees it)
    """The archive is not of the kind that is read here."""


def load(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns what `dict(np.load(path, allow_pickle=False))` returns.

    Raises:
      Exception: What `np.load` raises.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            return {
                entry.name.decode("ascii").removesuffix(_SUFFIX): _array(file, entry)
                for entry in _directory(file)
            }
    except (_ForNumPy, OSError):
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)


def _require(condition: bool) -> None:
    if not condition:
        raise _ForNumPy


def _read(file: io.FileIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _directory(file: io.FileIO) -> list[_Entry]:
    """Returns what the archive holds, in its order; nothing overlaps."""
    end = os.fstat(file.fileno()).st_size
    tail = _read(file, max(0, end - _TAIL_BYTES), _TAIL_BYTES)
    _require(len(tail) >= _END.size)
    signature, disk, first_disk, here, count, size, start, comment = _END.unpack(
        tail[-_END.size :]
    )
    _require(signature == _END_SIGNATURE and here == count)
    _require(disk == first_disk == comment == 0)
    _require(start + size == end - _END.size)
    _require(size + _END.size <= len(tail))
    directory = tail[-size - _END.size : -_END.size]
    entries: list[_Entry] = []
    place, free = 0, 0
    while place < size:
        _require(place + _ENTRY.size <= size)
        fields = _ENTRY.unpack_from(directory, place)
        signature, _, needed, flags, method = fields[:5]
        checksum, packed, stored, name_size, extra, comment = fields[7:13]
        offset = fields[16]
        _require(signature == _ENTRY_SIGNATURE and needed <= _NEWEST_VERSION)
        _require(flags == method == extra == comment == 0)
        _require(packed == stored and free <= offset)
        place += _ENTRY.size
        name = directory[place : place + name_size]
        _require(len(name) == name_size and name.endswith(b".npy"))
        _require(name.isascii() and b"\0" not in name)
        place += name_size
        free = offset + _LOCAL.size + name_size + stored
        _require(free <= start)
        entries.append(_Entry(name, checksum, stored, offset))
    _require(len(entries) == count)
    return entries


def _array(file: io.FileIO, entry: _Entry) -> np.ndarray:
    """Reads one array into memory of its own."""
    head = _read(file, entry.offset, _HEAD_BYTES)
    _require(len(head) >= _LOCAL.size)
    signature, *_, name_size, extra = _LOCAL.unpack_from(head)
    named = _LOCAL.size + name_size
    _require(signature == _LOCAL_SIGNATURE)
    _require(head[_LOCAL.size : named] == entry.name)
    start = named + extra
    preamble = head[start : start + min(10, entry.size)]
    _require(preamble[:8] == b"\x93NUMPY\1\0" and len(preamble) == 10)
    header_size = 10 + int.from_bytes(preamble[8:], "little")
    header = head[start : start + header_size]
    _require(len(header) == header_size)
    shape, fortran, dtype = _described(header[8:])
    _require(math.prod(shape) * dtype.itemsize == entry.size - header_size)
    array = np.empty(shape, dtype, "F" if fortran else "C")
    flat = array.reshape(-1, order="A").view(np.uint8)
    file.seek(entry.offset + start + header_size)
    _require(file.readinto(flat.data) == len(flat))
    _require(zlib.crc32(flat.data, zlib.crc32(header)) == entry.checksum)
    return array


@functools.lru_cache(1024)
def _described(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Returns the shape, the order and the dtype that a header tells.

    Clients' arrays of one shape have the same header, byte by byte.
    """
    try:
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(header))
    except Exception as error:  # Its parser is Python's, which has many.
        raise _ForNumPy from error
    _require(dtype.isbuiltin == 1 and not dtype.hasobject and dtype.itemsize > 0)
    return shape, fortran, dtype
