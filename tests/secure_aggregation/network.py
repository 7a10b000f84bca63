"""A network within one process: virtual time, and faults to order.

Nothing sleeps. Messages and deadlines are events on a virtual clock, so that
a test of a ten-second deadline takes no time.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools

from tfdp_fl.secure_aggregation import (
    COORDINATOR,
    AggregationOutcome,
    Coordinator,
    Member,
    RejectedMessageError,
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
      sender: A member's name or `COORDINATOR`.
      recipient: The member that does not get the messages; None means all.
      seconds: How long a delay is.
    """

    action: str
    step: int
    sender: messages.MemberId
    recipient: messages.MemberId | None = None
    seconds: float = 0.0

    def hits(self, message) -> bool:
        return (
            self.sender == message.sender
            and self.step == messages.STEP_OF_KIND[message.kind]
            and self.recipient in (None, message.recipient)
        )


class InMemoryNetwork:
    """Delivers messages between members and a coordinator, in virtual time.

    Attributes:
      delivered: Every message that reached somebody, if they are kept.
      rejected: Each delivered message that was refused.
      crashed: The members that a fault has stopped.
    """

    def __init__(self, faults=(), latency_seconds=0.01, keep_messages=False):
        self.now = 0.0
        self.delivered, self.rejected, self.crashed = [], [], set()
        self._faults, self._latency = tuple(faults), latency_seconds
        self._keep_messages = keep_messages
        self._in_flight: list = []
        self._order = itertools.count()

    def run(self, members, coordinator) -> None:
        """Runs until every member that has not crashed has its outcome."""
        receivers = {**members, COORDINATOR: coordinator}
        for one in members.values():
            self._send(one.begin(self.now))
        while self._in_flight:
            time, _, message = heapq.heappop(self._in_flight)
            self._pass_deadlines(members, time)
            self.now = time
            if message.recipient in self.crashed:
                continue
            if self._keep_messages:
                self.delivered.append(message)
            try:
                self._send(receivers[message.recipient].receive(message, time))
            except RejectedMessageError:
                self.rejected.append(message)
        self._pass_deadlines(members, float("inf"))

    def _pass_deadlines(self, members, until: float) -> None:
        for name, one in members.items():
            if name not in self.crashed and one.deadline is not None:
                one.check_deadline(until)

    def _send(self, outgoing) -> None:
        for message in outgoing:
            hits = [fault for fault in self._faults if fault.hits(message)]
            actions = {fault.action for fault in hits}
            if "crash" in actions:
                self.crashed.add(message.sender)
            if message.sender in self.crashed or "drop" in actions:
                continue
            arrival = self.now + self._latency
            arrival += sum(f.seconds for f in hits if f.action == "delay")
            for _ in range(2 if "duplicate" in actions else 1):
                heapq.heappush(self._in_flight, (arrival, next(self._order), message))


def aggregate_in_memory(
    updates, protocol, faults=(), latency_seconds=0.01, network=None
):
    """Lets one group aggregate; returns each member's outcome.

    A member that crashed has its own update.
    """
    network = network or InMemoryNetwork(faults, latency_seconds)
    members = {name: Member(protocol, name, update) for name, update in updates.items()}
    network.run(members, Coordinator(protocol, len(members)))
    return {
        name: AggregationOutcome(
            succeeded=False,
            value=updates[name],
            members=(name,),
            reason="the member crashed",
        )
        if name in network.crashed
        else one.outcome
        for name, one in members.items()
    }
