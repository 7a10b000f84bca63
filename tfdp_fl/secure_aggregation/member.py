"""One member's side of the protocol, and its messages, for any transport.

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

All members agree on the list of members and on the name of the session, which must
never have been used before.
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
"""A member's name: a string or an integer."""

SHARE, PARTIAL_SUM = KINDS = ("share", "partial_sum")

_MAGIC = b"tfdpfl-secagg-2\n"
_FIELDS = ("kind", "session", "sender", "recipient")
_DTYPES = ("<u4", "<u8", "<f8")


class RejectedMessageError(ValueError):
    """A message is refused; its recipient is unchanged."""


def reject_if(condition: bool, reason: str) -> None:
    """Raises RejectedMessageError if a condition holds."""
    if condition:
        raise RejectedMessageError(reason)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """A message from one member to another.

    Attributes:
      kind: "share" or "partial_sum".
      session: The aggregation that it belongs to.
      sender: The member that sends it. The transport must authenticate it.
      recipient: The member that gets it. The transport must hide it from all others:
        anyone who reads all shares of a member can compute the member's value.
      tensors: One array per tensor of the update.
    """

    kind: str
    session: str
    sender: MemberId
    recipient: MemberId
    tensors: tuple[np.ndarray, ...] = ()

    def to_bytes(self) -> bytes:
        """Returns the message as bytes: a JSON header and raw arrays."""
        tensors = [np.ascontiguousarray(tensor) for tensor in self.tensors]
        # The originals' shapes, as `ascontiguousarray` makes a vector of a scalar.
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

        Nothing in the bytes is executed or trusted: sizes are checked before anything
        is read.

        Raises:
          RejectedMessageError: The bytes are not such a message.
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
            # Exact types: in Python, JSON's true is an int.
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
                    raise TypeError("A shape must consist of whole numbers.")
                array = np.frombuffer(data, dtype, math.prod(shape), offset)
                tensors.append(array.reshape(shape))
                offset += array.nbytes
        except Exception as error:  # The bytes may be anything.
            raise RejectedMessageError("The message cannot be read.") from error
        reject_if(offset != len(data), "The message is not as long as its header says.")
        return cls(tensors=tuple(tensors), **fields)


@dataclasses.dataclass(frozen=True, eq=False)
class AggregationOutcome:
    """The result of an aggregation for a member (or a group).

    Attributes:
      succeeded: Whether `value` is the sum over all `members`.
      value: The sum, float64, in the structure of the update; or, after a failure, the
        member's own update as it was given.
      members: The members whose updates are in `value`.
      reason: What was missing; "" after a success.
    """

    succeeded: bool
    value: np.ndarray | Sequence[np.ndarray] | None
    members: tuple[MemberId, ...]
    reason: str = ""


class Member:
    """Shares its update with the other members and learns the sum, or fails.

    It performs no input or output and reads no clock: its methods take the time (in
    seconds, from any clock that never goes back) and return the messages to send. Of
    the others' data, it stores only the running sum of their shares, and their partial
    sums.

    A member that lacks a message at the end of a step has failed, and its outcome is
    its own update. Others may have succeeded, as a member cannot know whether its last
    message arrived. The messages of a failed round reveal no more than those of a
    successful one.

    The transport must authenticate the sender of a message, and let only the recipient
    read it. Members are trusted to follow the protocol: a dishonest member makes the
    sum wrong, but learns nothing from doing so.

    Attributes:
      outcome: The `AggregationOutcome`; None until the end.
      deadline: When the current step ends; None before `begin` and after the end.
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
          protocol: The configuration that all members share.
          member_id: This member's name.
          update: An array, or a sequence of arrays (one secret per tensor).
          members: The names of all members, including this one.
          session: The name of this aggregation.

        Raises:
          TypeError: The update has something other than real numbers.
          ValueError: A number is not finite or is too large to share (the message names
            the tensor and the number), or the group is not allowed.
        """
        _validate.instance_of(additive_sharing.AdditiveSecretSharing, protocol=protocol)
        protocol.check_group_size(len(members))
        if len(set(members)) != len(members) or member_id not in members:
            raise ValueError(
                "members must name everybody once, including this member "
                f"({member_id!r}), got {list(members)!r}."
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
        self._senders_of_shares: set[MemberId] = set()
        self._sum_of_shares: list[np.ndarray] = []
        self._partial_sums: dict[MemberId, tuple[np.ndarray, ...]] = {}

    def begin(self, now: float) -> list[Message]:
        """Splits the update; returns each other member's share of each tensor."""
        if self.deadline is not None or self.outcome is not None:
            raise ValueError(
                "A member takes part only once: make a new one for every round."
            )
        self._start_step(now)
        own_index = self._members.index(self._id)
        shares = [
            self._protocol.split(encoded, len(self._members), remainder=own_index)
            for encoded in self._encoded
        ]
        self._sum_of_shares = [split[own_index] for split in shares]
        self._senders_of_shares.add(self._id)
        return self._address_to_others(SHARE, zip(*shares, strict=True))

    def receive(self, message: Message, now: float) -> list[Message]:
        """Processes one message; returns the messages to send next.

        Raises:
          RejectedMessageError: The message is late, for somebody else, from a stranger,
            of another session, or a duplicate, or its tensors do not have the expected
            number, shapes and dtype. The member is unchanged and continues.
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
        self._check_message(message)
        sender, is_share = message.sender, message.kind == SHARE
        senders = self._senders_of_shares if is_share else self._partial_sums
        reject_if(sender in senders, f"A second {message.kind} from {sender!r}.")
        if not is_share:
            self._partial_sums[sender] = message.tensors
            self._reconstruct_if_complete()
            return []
        for total, share in zip(self._sum_of_shares, message.tensors, strict=True):
            total += share
        self._senders_of_shares.add(sender)
        return self._send_partial_sum(now) if self._has_all_shares else []

    def check_deadline(self, now: float) -> None:
        """Fails, with its own update as the outcome, if the deadline has passed."""
        if self.deadline is None or now <= self.deadline:
            return
        missing = f"shares from {self._list_absent(self._senders_of_shares)}"
        if self._has_all_shares:
            missing = f"partial sums from {self._list_absent(self._partial_sums)}"
        reason = f"the deadline passed without {missing}"
        self._finish(AggregationOutcome(False, self._update, (self._id,), reason))

    @property
    def _has_all_shares(self) -> bool:
        return len(self._senders_of_shares) == len(self._members)

    def _list_absent(self, present) -> str:
        return ", ".join(
            repr(member) for member in self._members if member not in present
        )

    def _start_step(self, now: float) -> None:
        self.deadline = now + self._protocol.deadline_seconds

    def _finish(self, outcome: AggregationOutcome) -> None:
        self.outcome, self.deadline = outcome, None
        for buffer in (self._encoded, self._sum_of_shares):
            buffer.clear()
        self._partial_sums.clear()

    def _send_partial_sum(self, now: float) -> list[Message]:
        """Returns messages with the sum of the received shares, the same for all."""
        self._start_step(now)
        partial_sum = tuple(self._sum_of_shares)
        for tensor in partial_sum:
            tensor.flags.writeable = False
        self._partial_sums[self._id] = partial_sum
        self._reconstruct_if_complete()
        all_partial_sums = [partial_sum] * len(self._members)
        return self._address_to_others(PARTIAL_SUM, all_partial_sums)

    def _reconstruct_if_complete(self) -> None:
        """Adds up the partial sums once all of them are here."""
        if not self._has_all_shares or self._list_absent(self._partial_sums):
            return
        # In the order of `members`, so that floating-point sums agree as well.
        in_order = [self._partial_sums[member] for member in self._members]
        tensors = tuple(
            self._protocol.decode(self._protocol.add(column))
            for column in zip(*in_order, strict=True)
        )
        value = tensors[0] if isinstance(self._update, np.ndarray) else tensors
        self._finish(AggregationOutcome(True, value, self._members))

    def _check_message(self, message: Message) -> None:
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
            f"Tensors from {sender!r} are {got}, but {expected} are expected.",
        )
        reject_if(
            self._protocol.mode == "float"
            and not all(np.all(np.isfinite(tensor)) for tensor in message.tensors),
            f"Tensors from {sender!r} are not finite.",
        )

    def _address_to_others(
        self, kind: str, tensors: Iterable[tuple[np.ndarray, ...]]
    ) -> list[Message]:
        """Returns a message to each other member; `tensors` has one item per member."""
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
