"""A silo's files on disk: its lock, its current message, and its answers.

A `RoundCheckpoint` in the same directory writes the ledger and the checkpoints of its
rounds. For one message, files are written in this order:

    1. if an earlier message was interrupted and is not continued, a note that it is
       given up (its checkpoint would be mistaken for step 2's); a checkpoint with the
       received weights
    2. the start of the message
    3. for each round, its line in the ledger, then its checkpoint
    4. the weights of the answer
    5. the answer
    6. the identity of the ledger's file

So the process can end at any moment. Before step 2, it is as if the message had never
been sent. After it, the same message continues from the newest checkpoint, and any
other message finds out how much was charged for an answer that was never delivered.
After step 5, only the answer matters.

An answer is a small file that is never removed, so a message with an answer is never
trained again. Its weights are in a separate file. The weights of old answers are
removed, and if their messages are sent again, they are refused.

A copied or restored ledger may lack charges that were made to the original. So the
ledger's file is identified by its inode and change time, which cannot be set by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfdp_fl import _files, accounting
from tfdp_fl.keras import checkpoint
from tfdp_fl.terms import Json

_LOCK, _STATE, _ANSWERS, _WEIGHTS = "lock", "silo.npz", "answers", "weights"
# The maximum space for the weights of answers. The last answer's are always kept.
KEPT_BYTES = 2**30
_INITIAL_STATE: Json = {"message": None, "lost": 0, "settings": None, "place": None}


class SiloError(RuntimeError):
    """A silo's directory cannot be used."""


class SiloInUseError(SiloError):
    """Another process or thread is working in the directory."""


class SiloMovedError(SiloError):
    """The directory was copied, moved or restored."""


class SiloChangedError(SiloError, ValueError):
    """The people in the table, or the result of `build`, have changed."""


class SiloMessageError(SiloError, ValueError):
    """A `message_id` was used before: for another message, or too long ago."""


@dataclasses.dataclass(frozen=True)
class Message:
    """The identity of a message.

    Attributes:
      key: The SHA-256 of its kind and id.
      payload: The SHA-256 of its contents.
      name: Its id in readable form.
    """

    key: str
    payload: str
    name: str

    @classmethod
    def of(
        cls,
        kind: str,
        message_id: str | int | None,
        weights: Sequence[np.ndarray],
        request: str = "",
    ) -> Message:
        """Returns the message with this kind, id, weights and further request."""
        if message_id is None:  # Make a new, unique id.
            name, identity = "without an id", os.urandom(16).hex()
        elif isinstance(message_id, str | int):
            name = identity = repr(message_id)
        else:
            raise TypeError(
                "message_id must be a string, an integer or None, got a "
                f"{type(message_id).__name__}."
            )
        payload = hashlib.sha256(request.encode())
        for array in weights:
            payload.update(f"{array.dtype} {array.shape} ".encode())
            payload.update(np.ascontiguousarray(array).tobytes())
        key = hashlib.sha256(f"{kind} {identity}".encode()).hexdigest()
        return cls(key, payload.hexdigest(), name)


class SiloDirectory:
    """The files of one silo.

    Attributes:
      path: The directory, created if necessary, for its owner only.
      state: The contents of `silo.npz`, read when the lock is taken.
      is_ours: Whether nobody else has written since this object's model was read.
    """

    def __init__(self, path: str | os.PathLike[str], moved: bool):
        self.path = pathlib.Path(path).absolute()
        self._moved = moved
        self.state, self._data, self.is_ours = dict(_INITIAL_STATE), b"", True

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Locks the directory while the block runs.

        Raises:
          SiloInUseError: Another process or thread holds the lock.
          SiloMovedError: See `_check_ledger_identity`.
          SiloError: The directory cannot be written, or its state is damaged or
            missing.
        """
        self.require_known()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in _ANSWERS, _WEIGHTS:
                (self.path / folder).mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self.path / _LOCK, flags, 0o600)
        except OSError as error:
            raise SiloError(
                f"directory must be writable, got {self.path}: {error.strerror}."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
            yield
            self.settle()
        except BlockingIOError:
            raise SiloInUseError(
                f"The silo in {self.path} is working on another message. Nothing was "
                "done or charged: send this message again later."
            ) from None
        finally:
            os.close(descriptor)  # This also releases the lock.

    def require_known(self) -> None:
        """Raises SiloError if what this object has read is no longer there.

        An empty directory in its place would have the whole target to spend again.
        """
        if self._data and not (self.path / _STATE).exists():
            raise SiloError(
                f"{self.path / _STATE}, which records what this silo has spent, was "
                "there before and is missing: its directory was removed, moved or "
                "unmounted. Put it back. Nothing was done or charged."
            )

    def ledger_path(self) -> pathlib.Path | None:
        """Returns the ledger's path; None if the silo has not begun.

        Raises:
          SiloError, LedgerError: What records this silo's spending is missing.
        """
        self.require_known()
        path, file = checkpoint.ledger_path(self.path), self.path / _STATE
        if path.exists():
            return path
        state = _parse(file, file.read_bytes()) if file.exists() else _INITIAL_STATE
        if state["place"] is not None:
            self._ledger_identity()  # Raises an error.
        return None

    def settle(self) -> None:
        """Records the ledger's identity, once no more is charged."""
        if self._ledger_identity() != self.state["place"]:
            self._write(place=self._ledger_identity())

    def begin(self, message: Message, first_round: int, charged: int) -> None:
        """Records the message for which the next charges are made."""
        self._write(
            lost=self.lost(charged),
            place=[*self._ledger_identity()[:2], None],
            message={**vars(message), "first_round": first_round, "charged": charged},
        )

    def give_up(self, charged: int) -> None:
        """Records that an interrupted message will not be continued."""
        if self.state["message"] is not None:
            self._write(lost=self.lost(charged), message=None)

    def expect_charges(self) -> None:
        """Records that the ledger grows; an interrupted message is continued."""
        self._write(place=[*self._ledger_identity()[:2], None])

    def interrupted_round(self, message: Message | None) -> int | None:
        """Returns a message's first round if it was interrupted, or else None."""
        stored = self.state["message"]
        if message is None or stored is None:
            return None
        if any(stored[name] != value for name, value in vars(message).items()):
            return None
        # If its own checkpoints are damaged, the newest one is from before the message.
        plan = checkpoint.CheckpointDirectory(self.path).newest()["plan"]
        is_same_message = plan["first_round"] == stored["first_round"]
        return stored["first_round"] if is_same_message else None

    def lost(self, charged: int) -> int:
        """Returns how many releases were charged for answers that were never sent.

        Args:
          charged: The number of charged releases in total.
        """
        stored, lost = self.state["message"], self.state["lost"]
        if stored is None or self._answer_file(stored["key"]).exists():
            return lost
        return lost + max(0, charged - stored["charged"])

    def answer(self, message: Message) -> Any:
        """Returns the answer to a message; None if there is none yet.

        Raises:
          SiloMessageError: Its id was used before for another message, or its answer's
            weights are no longer kept.
        """
        file = self._answer_file(message.key)
        if not file.exists():
            return None
        stored = _parse(file, file.read_bytes())
        if stored["payload"] != message.payload:
            raise SiloMessageError(
                f"message_id {message.name} was answered before, for other weights "
                "or another request: give each message its own id. Nothing was done or "
                "charged."
            )
        answer = stored["answer"]
        if isinstance(answer.get("weights"), str):
            weights_file = self.path / _WEIGHTS / answer["weights"]
            if not weights_file.exists():
                raise SiloMessageError(
                    f"message_id {message.name} was answered before, so long ago that "
                    f"its weights are no longer kept (only the newest "
                    f"{KEPT_BYTES / 2**30:g} GiB are, in {weights_file.parent}). Give "
                    "a new message its own id. Nothing was done or charged."
                )
            answer |= _parse(weights_file, weights_file.read_bytes())
        return answer

    def keep(self, message: Message, answer: Json) -> None:
        """Writes an answer before it is sent; removes the weights of old answers.

        Args:
          message: Its message, whose start must be recorded if there are weights.
          answer: JSON values; if rounds were run, also "weights", a list of arrays.
        """
        folder = self.path / _WEIGHTS
        if isinstance(answer.get("weights"), list):
            # So that names sort by age: the number of earlier charges only grows.
            name = f"{self.state['message']['charged']:010d}-{message.key}.npz"
            data = checkpoint.to_bytes({"weights": answer["weights"]})
            checkpoint.write_atomically(folder / name, data)
            answer = {**answer, "weights": name}
        data = checkpoint.to_bytes({"payload": message.payload, "answer": answer})
        checkpoint.write_atomically(self._answer_file(message.key), data)
        total_bytes = 0
        for index, file in enumerate(sorted(folder.iterdir(), reverse=True)):
            total_bytes += file.stat().st_size
            # (A killed process may have left half a file.)
            is_old = total_bytes > KEPT_BYTES and index
            if is_old or file.name.startswith(_files.TEMPORARY):
                file.unlink()

    def check_settings(self, settings: Json) -> None:
        """Raises SiloChangedError if the result of `build` has changed."""
        stored = self.state["settings"]
        if stored is None:
            self._write(settings=settings)
            return
        for name in stored | settings:
            if stored.get(name) != settings.get(name):
                raise change_error(
                    self.path,
                    f"{name} was {stored.get(name)!r}, now {settings.get(name)!r}",
                )

    def _answer_file(self, key: str) -> pathlib.Path:
        return self.path / _ANSWERS / f"{key}.npz"

    def _read(self) -> None:
        self.require_known()  # Again, now that it is locked.
        file, ledger = self.path / _STATE, checkpoint.ledger_path(self.path)
        data = file.read_bytes() if file.exists() else b""
        # Also if that was found by a call that needed no model.
        self.is_ours, self._data = self.is_ours and data == self._data, data
        self.state = _parse(file, data) if data else dict(_INITIAL_STATE)
        if data:
            self._check_ledger_identity()
        elif ledger.exists() and accounting.PrivacyLedger.read(ledger).entries:
            raise SiloError(
                f"{file} is missing, which records what the ledger beside it was "
                "charged for. Restore it. (A directory of RoundCheckpoint is not a "
                "silo's.)"
            )

    def _write(self, **changes: object) -> None:
        state = {**self.state, **changes}
        data = checkpoint.to_bytes(state)
        checkpoint.write_atomically(self.path / _STATE, data)
        self.state, self._data = state, data

    def _ledger_identity(self) -> list[int | str]:
        """Returns the ledger's inode, its last line's hash, and its change time."""
        path = checkpoint.ledger_path(self.path)
        if not path.exists():
            raise accounting.LedgerError(
                f"The ledger {path} is missing, which records this silo's spending."
            )
        status = path.stat()
        head = accounting.PrivacyLedger.read(path).head
        return [status.st_ino, head, status.st_ctime_ns]

    def _check_ledger_identity(self) -> None:
        """Raises SiloMovedError if the ledger is not the same file as before.

        While a message is being processed, or after a crash, the ledger's last line and
        change time are unknown.
        """
        if self.state["place"] is None:
            return
        inode, head, time = self.state["place"]
        current = self._ledger_identity()
        path = checkpoint.ledger_path(self.path)
        accounting.PrivacyLedger.read(path, expected_head=head)
        if current[0] == inode and time in (None, current[2]):
            return
        if not self._moved:
            raise SiloMovedError(
                f"directory {self.path} was copied, moved or restored from a backup "
                "(or its files' owner or mode was changed), so its ledger may lack "
                "charges made elsewhere. If it is complete, the newest, and the only "
                "one in use, confirm this once with Silo(..., moved=True); otherwise, "
                "continue where the newest one is. Nothing was done or charged."
            )
        self._write(place=current)


def change_error(path: pathlib.Path, what: str) -> SiloChangedError:
    """Returns the error for a silo that has changed."""
    return SiloChangedError(
        f"The silo in {path} must keep the people and the settings that it began "
        f"with: {what.rstrip('.')}. Restore them; or use a new directory, and tell the "
        "people in both that their costs add up. Nothing was charged."
    )


def _parse(file: pathlib.Path, data: bytes) -> Any:
    try:
        return checkpoint.from_bytes(data)
    except ValueError as error:
        raise SiloError(f"{file} is damaged: {error}. Restore it.") from error
