"""A network within one process: virtual time, and faults to order.

Nothing sleeps. Messages and deadlines are events on a virtual clock, so that
a test of a ten-second deadline takes no time.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tfdp_fl.secure_aggregation import (
    additive_sharing,
    coordinator,
    member,
    messages,
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong with the messages of one sender.

    Attributes:
      action: "drop" (the message is lost), "delay" (it takes `seconds` more),
        "duplicate" (it arrives twice), or "crash" (the sender stops for good
        when it is about to send the first such message).
      step: 1 ("ready" and, from `COORDINATOR`, the list), 2 (shares) or 3
        (partial sums).
      sender: a member's name or `COORDINATOR`.
      recipient: the member that does not get the messages; None means all.
      seconds: how long a delay is.
    """

    action: str
    step: int
    sender: messages.MemberId
    recipient: messages.MemberId | None = None
    seconds: float = 0.0

    def hits(self, message: messages.Message) -> bool:
        """Whether this message is one of those that the fault is about."""
        return (
            self.sender == message.sender
            and self.step == messages.STEP_OF_KIND[message.kind]
            and self.recipient in (None, message.recipient)
        )


class InMemoryNetwork:
    """Delivers messages between members and a coordinator, in virtual time.

    Attributes:
      now: the virtual time, in seconds.
      delivered: every message that reached somebody, if `keep_messages`.
      rejected: (message, reason) of each delivered message that was refused.
    """

    def __init__(
        self,
        faults: Iterable[Fault] = (),
        latency_seconds: float = 0.01,
        keep_messages: bool = False,
    ):
        """Starts at time 0 with nobody connected.

        Args:
          faults: what goes wrong.
          latency_seconds: how long every message takes.
          keep_messages: whether to keep what was delivered for inspection;
            it costs as much memory as all messages together.
        """
        self.now = 0.0
        self.delivered: list[messages.Message] = []
        self.rejected: list[tuple[messages.Message, str]] = []
        self._faults = tuple(faults)
        self._latency = latency_seconds
        self._keep_messages = keep_messages
        self._crashed: set[messages.MemberId] = set()
        self._in_flight: list[tuple[float, int, messages.Message]] = []
        self._order = itertools.count()

    def run(
        self,
        members: Mapping[messages.MemberId, member.Member],
        coordinator_: coordinator.Coordinator,
    ) -> None:
        """Runs until every member that has not crashed has its outcome."""
        for name in members:
            self._send(members[name].begin(self.now))
        while self._in_flight:
            time, _, message = heapq.heappop(self._in_flight)
            self._pass_deadlines(members, time)
            self.now = time
            self._deliver(message, members, coordinator_)
        self._pass_deadlines(members, float("inf"))

    def crashed(self, name: messages.MemberId) -> bool:
        """Whether a fault has stopped this member."""
        return name in self._crashed

    def _deliver(self, message, members, coordinator_) -> None:
        if message.recipient in self._crashed:
            return
        if self._keep_messages:
            self.delivered.append(message)
        if message.recipient == messages.COORDINATOR:
            receiver = coordinator_
        else:
            receiver = members[message.recipient]
        try:
            self._send(receiver.receive(message, self.now))
        except messages.RejectedMessageError as error:
            self.rejected.append((message, str(error)))

    def _pass_deadlines(self, members, until: float) -> None:
        """Lets every deadline before `until` pass."""
        for name, one in members.items():
            if name not in self._crashed and one.deadline is not None:
                one.check_deadline(until)

    def _send(self, outgoing: Sequence[messages.Message]) -> None:
        for message in outgoing:
            if message.sender in self._crashed:
                return
            hits = [fault for fault in self._faults if fault.hits(message)]
            actions = {fault.action for fault in hits}
            if "crash" in actions:
                self._crashed.add(message.sender)
                return
            if "drop" in actions:
                continue
            arrival = self.now + self._latency
            arrival += sum(f.seconds for f in hits if f.action == "delay")
            for _ in range(2 if "duplicate" in actions else 1):
                heapq.heappush(self._in_flight, (arrival, next(self._order), message))


def aggregate_in_memory(
    updates: Mapping[messages.MemberId, np.ndarray | Sequence[np.ndarray]],
    protocol: additive_sharing.AdditiveSecretSharing,
    faults: Iterable[Fault] = (),
    latency_seconds: float = 0.01,
    network: InMemoryNetwork | None = None,
) -> dict[messages.MemberId, member.AggregationOutcome]:
    """Lets one group aggregate, all four steps, in this process.

    Args:
      updates: each member's update; all of the same structure.
      protocol: the configuration that all members share.
      faults: what goes wrong.
      latency_seconds: how long every message takes, in virtual time.
      network: to look at the messages afterwards; made from `faults` and
        `latency_seconds` if None.

    Returns:
      Each member's outcome. A member that crashed has its own update.

    Raises:
      ValueError: if the group is not allowed, or a value can not be shared.
    """
    protocol.check_group_size(len(updates))
    if network is None:
        network = InMemoryNetwork(faults, latency_seconds)
    members = {
        name: member.Member(protocol, name, update) for name, update in updates.items()
    }
    network.run(members, coordinator.Coordinator(protocol, len(members)))
    outcomes = {}
    for name, one in members.items():
        outcome = one.outcome
        if network.crashed(name) or outcome is None:
            outcome = member.AggregationOutcome(
                succeeded=False,
                value=updates[name],
                members=(name,),
                reason="the member crashed",
            )
        outcomes[name] = outcome
    return outcomes
