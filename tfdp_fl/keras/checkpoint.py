"""Checkpoints on disk: whole or not there, verified, one writer at a time.

A checkpoint is one zip file (NumPy's `.npz`, without pickle) of arrays and a
`metadata.json`, which holds the SHA-256 of every array and of itself. It is
written beside its place, synced, and then renamed into it, so that a crash at
any moment leaves the checkpoints that were there as they were. One that is
found damaged is passed over in favour of the one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import pathlib
import re
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdp_fl import _files, _json

FORMAT = "tfdp_fl checkpoint 1"
_METADATA = "metadata.json"
_LOCK = "lock"
_NAME = re.compile(r"round-(\d{8})\.npz")


class CheckpointError(RuntimeError):
    """Something is wrong with a directory of checkpoints."""


class CheckpointInUseError(CheckpointError):
    """Another run writes checkpoints to this directory."""


class CheckpointWriteError(CheckpointError):
    """A file could not be written; what stood before is as it was."""


class _DamagedError(ValueError):
    """A checkpoint does not verify."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A training run between two rounds.

    Attributes:
      round_index: The next round, counted from 0.
      metadata: JSON values.
      arrays: Arrays of any NumPy dtype but object, by name.
    """

    round_index: int
    metadata: dict[str, Any]
    arrays: dict[str, np.ndarray]


class CheckpointDirectory:
    """Reads and writes the checkpoints of one run.

    Attributes:
      path: The directory.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Nothing is read or made yet."""
        self.path = pathlib.Path(path)
        self._lock: int | None = None

    def rounds(self) -> list[int]:
        """Returns the rounds there are checkpoints of, the newest first."""
        if not self.path.is_dir():
            return []
        matches = [_NAME.fullmatch(each.name) for each in self.path.iterdir()]
        return sorted((int(m.group(1)) for m in matches if m), reverse=True)

    def file(self, round_index: int) -> pathlib.Path:
        """Returns where the checkpoint before a round is, or would be."""
        return self.path / f"round-{round_index:08d}.npz"

    def newest(self) -> Checkpoint:
        """Returns the newest checkpoint that is whole.

        A damaged one is passed over, with a warning.

        Raises:
          FileNotFoundError: There is no checkpoint.
          CheckpointError: None of them is whole.
        """
        rounds = self.rounds()
        if not rounds:
            raise FileNotFoundError(
                f"There is no checkpoint in {self.path} to resume from."
            )
        problems = []
        for round_index in rounds:
            file = self.file(round_index)
            try:
                return _read(file)
            except (_DamagedError, OSError) as error:
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
        """Makes the directory if need be, and takes its lock.

        Raises:
          CheckpointInUseError: Another run has it.
          CheckpointWriteError: It cannot be made or written to.
        """
        if self._lock is not None:
            return
        with _clear_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(
                self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
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
        for leftover in self.path.glob(f"{_files.TEMPORARY}*"):
            leftover.unlink(missing_ok=True)

    def release(self) -> None:
        """Gives the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def set_aside_after(self, round_index: int) -> None:
        """Renames checkpoints of rounds after this one.

        They are the damaged ones which resuming passed over.
        """
        for later in self.rounds():
            if later > round_index:
                file = self.file(later)
                file.replace(file.with_suffix(".damaged"))

    def write(self, checkpoint: Checkpoint, keep: int) -> None:
        """Writes a checkpoint, then removes all but the newest `keep`.

        Raises:
          CheckpointWriteError: It could not be written; the earlier ones are
            as they were.
        """
        data = _serialized(checkpoint)
        write_atomically(self.file(checkpoint.round_index), data)
        for old in self.rounds()[keep:]:
            self.file(old).unlink(missing_ok=True)


def write_atomically(file: pathlib.Path, data: bytes, mode: int = 0o600):
    """Replaces a file as a whole: after a crash it is the old or the new one.

    Args:
      file: The file; its folder must exist.
      data: What it is to hold.
      mode: Its permissions. Checkpoints hold what predicts cohorts (the seed,
        or the key of shuffled ones), so by default nobody else reads them.

    Raises:
      CheckpointWriteError: It could not be written and synced; the old file is
        as it was.
    """
    with (
        _clear_errors(file),
        _files.replacing(file, mode=mode, sync=True) as stream,
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


def _serialized(checkpoint: Checkpoint) -> bytes:
    stream = io.BytesIO()
    arrays: dict[str, Any] = {}
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in checkpoint.arrays.items():
            array = np.asarray(array)
            described = array.dtype.name
            if array.dtype.kind == "V":  # bfloat16 and the like: as bits.
                array = array.view(np.dtype(f"u{array.dtype.itemsize}"))
            member = io.BytesIO()
            np.lib.format.write_array(member, array, allow_pickle=False)
            data = member.getvalue()
            archive.writestr(_member(name), data)
            arrays[name] = {"sha256": _digest(data), "dtype": described}
        body = {
            "format": FORMAT,
            "round_index": checkpoint.round_index,
            "metadata": checkpoint.metadata,
            "arrays": arrays,
        }
        body["sha256"] = _digest(_canonical(body))
        archive.writestr(_METADATA, _canonical(body))
    return stream.getvalue()


def _read(file: pathlib.Path) -> Checkpoint:
    """Reads and verifies; raises _DamagedError."""
    try:
        with zipfile.ZipFile(file) as archive:
            body = json.loads(archive.read(_METADATA))
            expected = body.pop("sha256")
            if _digest(_canonical(body)) != expected:
                raise _DamagedError("the checksum of its metadata is wrong")
            if body["format"] != FORMAT:
                raise _DamagedError(f"it has the format {body['format']!r}")
            arrays = {}
            for name, entry in body["arrays"].items():
                data = archive.read(_member(name))
                if _digest(data) != entry["sha256"]:
                    raise _DamagedError(f"the checksum of {name} is wrong")
                array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
                arrays[name] = _as_dtype(array, entry["dtype"])
    except (_DamagedError, OSError):
        raise
    except Exception as error:  # Whatever broken bytes can lead to.
        raise _DamagedError(str(error) or type(error).__name__) from error
    return Checkpoint(
        round_index=body["round_index"],
        metadata=body["metadata"],
        arrays=arrays,
    )


def _as_dtype(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype.name == name:
        return array
    import tensorflow as tf  # Knows the dtypes that NumPy does not.

    return array.view(tf.as_dtype(name).as_numpy_dtype)


def _member(name: str) -> str:
    return f"{name}.npy"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _canonical(value: Any) -> bytes:
    return _json.canonical(value).encode()
