"""One member's side of the protocol and its messages, over any transport.

The order of calls:

    member = Member(protocol, "ann", update, members=names, session="round 7")
    send(member.begin(now))
    while member.outcome is None:
        message = wait_for_a_message(until=member.deadline)
        if message is None:
            member.check_deadline(now)
        else:
            send(member.receive(message, now))
    use(member.outcome)

All members agree on their names and on the name of a session that has never been
used before.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterable, Sequence

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.secure_aggregation import additive_sharing

MemberId = int | str
"""A member is known by a string or an integer."""

SHARE, PARTIAL_SUM = KINDS = ("share", "partial_sum")

_MAGIC = b"tfdpfl-secagg-2\n"
_FIELDS = ("kind", "session", "sender", "recipient")
_DTYPES = ("<u4", "<u8", "<f8")


class RejectedMessageError(ValueError):
    """A message that does not belong here; its recipient is unchanged."""


def reject_if(condition: bool, reason: str) -> None:
    """Raises RejectedMessageError if something is wrong with a message."""
    if condition:
        raise RejectedMessageError(reason)


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
            fields = {name: header[name] for name in _FIELDS}
            # Not of a subclass: JSON's true is an int, and it knows 1.9 and Infinity.
            types = [type(fields[name]) for name in _FIELDS]
            if fields["kind"] not in KINDS or not (
                types[:2] == [str, str] and {*types[2:]} <= {int, str}
            ):
                raise TypeError("A name must be a string or an integer.")
            tensors, offset = [], start + length
            for dtype, shape in header["tensors"]:
                if dtype not in _DTYPES or not (
                    type(shape) is list
                    and all(type(size) is int and size >= 0 for size in shape)
                ):
                    raise TypeError("A shape must be of whole numbers.")
                array = np.frombuffer(data, dtype, math.prod(shape), offset)
                tensors.append(array.reshape(shape))
                offset += array.nbytes
        except Exception as error:  # The bytes may be anything.
            raise RejectedMessageError("The message cannot be read.") from error
        reject_if(offset != len(data), "The message is not as long as its header says.")
        return cls(tensors=tuple(tensors), **fields)


@dataclasses.dataclass(frozen=True, eq=False)
class AggregationOutcome:
    """What a member (or a group) has at the end.

    Attributes:
      succeeded: whether `value` is the sum over all `members`.
      value: the sum, float64, in the structure of the update; or, after a
        failure, the member's own update as it was given.
      members: those whose updates are in `value`.
      reason: "" after a success, else what was missing.
    """

    succeeded: bool
    value: np.ndarray | Sequence[np.ndarray] | None
    members: tuple[MemberId, ...]
    reason: str = ""


class Member:
    """Shares one update with the others and learns their sum, or fails.

    It performs no input or output and reads no clock: its methods take the
    time (seconds, on any clock that does not go back) and return the messages
    to send. What a member keeps of the others is the running sum of their
    shares and their partial sums.

    A member that misses a message at the end of a step has failed; its outcome
    is its own update. Others may have succeeded: the protocol can not tell a
    member whether its last message arrived. No message of a failed round says
    more than the messages of a successful one.

    The transport must say truthfully who sent a message, and let nobody but
    the recipient read it. Members are trusted to follow the protocol: a member
    that lies makes the sum wrong, though it learns nothing by it.

    Attributes:
      outcome: None until the end, then the `AggregationOutcome`.
      deadline: when the present step ends; None before `begin` and at the end.
    """

    def __init__(
        self,
        protocol: additive_sharing.AdditiveSecretSharing,
        member_id: MemberId,
        update: np.ndarray | Sequence[np.ndarray],
        *,
        members: Sequence[MemberId],
        session: str,
    ):
        """Encodes the update.

        Args:
          protocol: the configuration that all members share.
          member_id: this member's name.
          update: an array, or a sequence of arrays (one secret per tensor).
          members: the names of the group, this member's among them.
          session: the name of this aggregation.

        Raises:
          TypeError: if the update holds anything but real numbers.
          ValueError: if a value is not finite or too large to share (the
            tensor and the value are named), or the group is not allowed.
        """
        _validate.instance_of(additive_sharing.AdditiveSecretSharing, protocol=protocol)
        protocol.check_group_size(len(members))
        if len(set(members)) != len(members) or member_id not in members:
            raise ValueError(
                "members must name everybody once, this member "
                f"({member_id!r}) included, got {list(members)!r}."
            )
        self.outcome: AggregationOutcome | None = None
        self.deadline: float | None = None
        self._protocol = protocol
        self._id = member_id
        self._update = update
        tensors = [update] if isinstance(update, np.ndarray) else update
        self._encoded = [
            protocol.encode(tensor, f"tensor {index} of member {member_id!r}")
            for index, tensor in enumerate(tensors)
        ]
        if not self._encoded:
            raise ValueError("update must hold at least one tensor, got none.")
        self._members = tuple(members)
        self._session = _validate.instance_of(str, session=session)
        self._shares_from: set[MemberId] = set()
        self._sum_of_shares: list[np.ndarray] = []
        self._partial_sums: dict[MemberId, tuple[np.ndarray, ...]] = {}

    def begin(self, now: float) -> list[Message]:
        """Shares the update: returns a share of each tensor for each other member."""
        if self.deadline is not None or self.outcome is not None:
            raise ValueError(
                "A member takes part once: make a new one for every round."
            )
        self._start_step(now)
        own_index = self._members.index(self._id)
        shares = [
            self._protocol.split(encoded, len(self._members), remainder=own_index)
            for encoded in self._encoded
        ]
        self._sum_of_shares = [split[own_index] for split in shares]
        self._shares_from.add(self._id)
        return self._to_others(SHARE, zip(*shares, strict=True))

    def receive(self, message: Message, now: float) -> list[Message]:
        """Takes one message in; returns the messages to send next.

        Raises:
          RejectedMessageError: if the message is late, for somebody else, from
            a stranger, of another session, a duplicate, or its tensors are
            not of the expected number, shape and dtype. The member is unchanged
            and continues.
        """
        self.check_deadline(now)
        reject_if(self.outcome is not None, "This member's aggregation is over.")
        reject_if(self.deadline is None, "This member's aggregation has not begun yet.")
        reject_if(
            message.recipient != self._id,
            f"A message for {message.recipient!r} reached {self._id!r}.",
        )
        reject_if(
            message.kind not in KINDS,
            f"A member does not take {message.kind!r} messages.",
        )
        self._check_belongs(message)
        sender, is_share = message.sender, message.kind == SHARE
        senders = self._shares_from if is_share else self._partial_sums
        reject_if(sender in senders, f"A second {message.kind} from {sender!r}.")
        if not is_share:
            self._partial_sums[sender] = message.tensors
            return self._reconstruct_if_complete()
        for total, share in zip(self._sum_of_shares, message.tensors, strict=True):
            total += share
        self._shares_from.add(sender)
        return self._send_partial_sum(now) if self._all_shares_are_here else []

    def check_deadline(self, now: float) -> None:
        """Fails, with the own update as the outcome, if a step is overdue."""
        if self.deadline is None or now <= self.deadline:
            return
        missing = f"shares from {self._absent(self._shares_from)}"
        if self._all_shares_are_here:
            missing = f"partial sums from {self._absent(self._partial_sums)}"
        reason = f"the deadline passed without {missing}"
        self._end(AggregationOutcome(False, self._update, (self._id,), reason))

    @property
    def _all_shares_are_here(self) -> bool:
        return len(self._shares_from) == len(self._members)

    def _absent(self, present) -> str:
        return ", ".join(
            repr(member) for member in self._members if member not in present
        )

    def _start_step(self, now: float) -> None:
        self.deadline = now + self._protocol.deadline_seconds

    def _end(self, outcome: AggregationOutcome) -> None:
        self.outcome, self.deadline = outcome, None
        for buffer in (self._encoded, self._sum_of_shares):
            buffer.clear()
        self._partial_sums.clear()

    def _send_partial_sum(self, now: float) -> list[Message]:
        """Returns the sum of the received shares, the same to everybody."""
        self._start_step(now)
        partial_sum = tuple(self._sum_of_shares)
        for tensor in partial_sum:
            tensor.flags.writeable = False
        self._partial_sums[self._id] = partial_sum
        to_send = self._to_others(PARTIAL_SUM, [partial_sum] * len(self._members))
        return to_send + self._reconstruct_if_complete()

    def _reconstruct_if_complete(self) -> list[Message]:
        """The partial sums add up to the sum of the updates."""
        if not self._all_shares_are_here or self._absent(self._partial_sums):
            return []
        # In the order of the list, so that floating-point sums agree too.
        in_order = [self._partial_sums[member] for member in self._members]
        tensors = tuple(
            self._protocol.decode(self._protocol.add(column))
            for column in zip(*in_order, strict=True)
        )
        value = tensors[0] if isinstance(self._update, np.ndarray) else tensors
        self._end(AggregationOutcome(True, value, self._members))
        return []

    def _check_belongs(self, message: Message) -> None:
        reject_if(
            message.session != self._session,
            f"A message of session {message.session!r} reached a member of session "
            f"{self._session!r}.",
        )
        sender = message.sender
        reject_if(
            sender not in self._members or sender == self._id,
            f"{sender!r} is not another member of the group.",
        )
        expected = [(self._protocol.share_dtype, t.shape) for t in self._encoded]
        got = [(tensor.dtype, tensor.shape) for tensor in message.tensors]
        reject_if(
            got != expected,
            f"Tensors from {sender!r} are {got}, and {expected} are expected.",
        )
        reject_if(
            self._protocol.mode == "float"
            and not all(np.all(np.isfinite(tensor)) for tensor in message.tensors),
            f"Tensors from {sender!r} are not finite.",
        )

    def _to_others(
        self, kind: str, tensors: Iterable[tuple[np.ndarray, ...]]
    ) -> list[Message]:
        """Returns a message to each other member, of one value for each member."""
        return [
            Message(
                kind=kind,
                session=self._session,
                sender=self._id,
                recipient=member,
                tensors=tuple(tensors_to_send),
            )
            for member, tensors_to_send in zip(self._members, tensors, strict=True)
            if member != self._id
        ]
