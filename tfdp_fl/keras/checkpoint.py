"""Checkpoints on disk: whole or not there, verified, one writer at a time.

A checkpoint is one `.npz` file of NumPy's, without pickle, and behind it the SHA-256
of all its bytes. It is written beside its place, synced, and then renamed into it, so
that a crash at any moment leaves the checkpoints that were there as they were. One
that is found damaged is passed over in favour of the one before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdp_fl import _storage

FORMAT = "tfdp_fl checkpoint 4"
_NAME = re.compile(r"round-(\d{8})\.npz")
_PLACE = "place of an array"
_DIGEST_BYTES = hashlib.sha256().digest_size


class CheckpointError(RuntimeError):
    """Something is wrong with a directory of checkpoints."""


class CheckpointInUseError(CheckpointError):
    """Another run writes checkpoints to this directory."""


class CheckpointWriteError(CheckpointError):
    """A file could not be written; what stood before is as it was."""


def to_bytes(state: dict[str, Any]) -> bytes:
    """Returns the bytes of a file.

    Args:
      state: JSON values, and in their midst arrays of any NumPy dtype but object; of
        short floats, such as bfloat16, the values come back as float32.
    """
    arrays: list[np.ndarray] = []

    def place_of(value: Any) -> dict[str, int]:
        array = np.asarray(value)
        if array.dtype.hasobject:  # A file that nobody could read.
            raise TypeError(
                "state must hold JSON values and arrays, got one of type "
                f"{type(value).__name__}."
            )
        # NumPy's files do not name short floats.
        arrays.append(array if array.dtype.kind != "V" else array.astype("f4"))
        return {_PLACE: len(arrays)}

    text = json.dumps({"format": FORMAT, "state": state}, default=place_of)
    if text.count(f'"{_PLACE}": ') != len(arrays):
        raise ValueError(f"state must have no key {_PLACE!r}, got one.")
    stream = io.BytesIO()
    np.savez(stream, np.array(text), *arrays)
    data = stream.getvalue()
    return data + hashlib.sha256(data).digest()


def from_bytes(data: bytes) -> dict[str, Any]:
    """Returns what was written; raises ValueError unless it is to the last bit."""
    data, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError("its checksum is wrong, or an earlier version wrote it")
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        if "arr_0" not in file:
            raise ValueError("an earlier version wrote it")

        def array_of(value: dict[str, Any]) -> Any:
            return file[f"arr_{value[_PLACE]}"] if _PLACE in value else value

        body = json.loads(str(file["arr_0"]), object_hook=array_of)
    if body["format"] != FORMAT:
        raise ValueError(f"it has the format {body['format']!r}")
    return body["state"]


class CheckpointDirectory:
    """Reads and writes the checkpoints of one run.

    Attributes:
      path: The directory.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Names a directory, which the first write makes."""
        self.path = pathlib.Path(path)
        self._lock: int | None = None

    def rounds(self) -> list[int]:
        """Returns the rounds there are checkpoints of, the newest first."""
        if not self.path.is_dir():
            return []
        matches = [_NAME.fullmatch(file.name) for file in self.path.iterdir()]
        return sorted((int(m.group(1)) for m in matches if m), reverse=True)

    def file(self, round_index: int) -> pathlib.Path:
        """Returns where the checkpoint before a round is, or would be."""
        return self.path / f"round-{round_index:08d}.npz"

    def newest(self) -> dict[str, Any]:
        """Returns the newest state that is whole; warns of damaged checkpoints."""
        rounds = self.rounds()
        if not rounds:
            raise FileNotFoundError(
                f"There is no checkpoint in {self.path} to resume from."
            )
        problems = []
        for round_index in rounds:
            file = self.file(round_index)
            try:
                return from_bytes(file.read_bytes())
            except (ValueError, OSError) as error:
                problems.append(f"The checkpoint {file} is damaged: {error}.")
                warnings.warn(
                    f"{problems[-1]} The one before it is tried.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        raise CheckpointError(
            f"No checkpoint in {self.path} is whole. {' '.join(problems)}"
        )

    def acquire(self) -> None:
        """Makes the directory if need be, and takes its lock."""
        if self._lock is not None:
            return
        with _clear_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(
                self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointInUseError(
                f"Another run writes its checkpoints to {self.path}; give this "
                "one a directory of its own."
            ) from None
        self._lock = descriptor
        for leftover in self.path.glob(f"{_storage.TEMPORARY}*"):
            leftover.unlink(missing_ok=True)

    def release(self) -> None:
        """Gives the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def set_aside_after(self, round_index: int) -> None:
        """Renames the later checkpoints: damaged ones, which resuming passed over."""
        for later in self.rounds():
            if later > round_index:
                file = self.file(later)
                file.replace(file.with_suffix(".damaged"))

    def write(self, round_index: int, state: dict[str, Any], keep: int) -> None:
        """Writes the state before a round, then removes all but the newest `keep`."""
        write_atomically(self.file(round_index), to_bytes(state))
        for old in self.rounds()[keep:]:
            self.file(old).unlink(missing_ok=True)


def write_atomically(file: pathlib.Path, data: bytes, mode: int = 0o600):
    """Replaces a file as a whole: after a crash it is the old or the new one.

    Checkpoints hold what predicts cohorts (the seed, or the key of shuffled ones), so
    by default nobody else reads them. Raises CheckpointWriteError if it failed.
    """
    with (
        _clear_errors(file),
        _storage.replacing(file, mode=mode, sync=True) as stream,
    ):
        stream.write(data)


@contextlib.contextmanager
def _clear_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointWriteError(
            f"{path} cannot be written: {error.strerror or error}. What was "
            "there before is unchanged."
        ) from error
