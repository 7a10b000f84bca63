"""The one who knows who is ready, and nothing else.

The coordinator sees names. Shares and partial sums never pass through it.
"""

from __future__ import annotations

import secrets

from tfdp_fl import _validate
from tfdp_fl.secure_aggregation import additive_sharing, messages


class Coordinator:
    """Sends each group the list of its members, once enough are ready.

    Steps 1.1 to 1.3 of DISCO's document. It performs no input or output:
    every method takes the time and returns the messages to send. It serves one
    round: a member that is listed once is in no other group of that round, where
    its update would count twice.
    """

    def __init__(
        self,
        protocol: additive_sharing.AdditiveSecretSharing,
        group_size: int | None = None,
    ):
        """Starts with nobody ready.

        Args:
          protocol: the configuration that all members share.
          group_size: how many ready members are enough; None means
            `protocol.min_participants`.

        Raises:
          TypeError: if the protocol is none.
          ValueError: if the protocol does not allow groups of that size.
        """
        _validate.instance_of(additive_sharing.AdditiveSecretSharing, protocol=protocol)
        if group_size is None:
            group_size = protocol.min_participants
        _validate.positive_integer(group_size=group_size)
        protocol.check_group_size(group_size)
        self._protocol = protocol
        self._group_size = group_size
        self._ready: dict[messages.MemberId, float] = {}
        self._listed: set[messages.MemberId] = set()

    @property
    def ready(self) -> tuple[messages.MemberId, ...]:
        """The members that wait for a list, in the order of their coming."""
        return tuple(self._ready)

    def receive(self, message: messages.Message, now: float) -> list[messages.Message]:
        """Notes that a member is ready; returns the lists now due.

        A member that has waited longer than the deadline has given up, and is
        forgotten: a list with its name on it would make the others fail.

        Args:
          message: a "ready" message.
          now: the time in seconds, on any clock that does not go back.

        Returns:
          One "peers" message to each member of a new group, or none.

        Raises:
          RejectedMessageError: if the message is of another kind, for
            somebody else, or from a member already waiting or listed.
        """
        sender, name = message.sender, messages.COORDINATOR
        messages.reject_if(
            (message.kind, message.recipient) != (messages.READY, name)
            or sender == name,
            'The coordinator takes "ready" messages from members, got '
            f"{message.kind!r} from {sender!r} to {message.recipient!r}.",
        )
        self._ready = {
            member: since
            for member, since in self._ready.items()
            if now - since < self._protocol.deadline_seconds
        }
        messages.reject_if(
            sender in self._ready, f"Member {sender!r} is waiting already."
        )
        messages.reject_if(
            sender in self._listed,
            f"Member {sender!r} is in a group of this round already.",
        )
        self._ready[sender] = now
        if len(self._ready) < self._group_size:
            return []
        members = tuple(self._ready)
        self._ready.clear()
        self._listed.update(members)
        session = secrets.token_hex(16)
        return [
            messages.Message(
                kind=messages.PEERS,
                session=session,
                sender=messages.COORDINATOR,
                recipient=member,
                members=members,
            )
            for member in members
        ]
