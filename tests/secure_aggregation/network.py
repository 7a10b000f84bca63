"""A network within one process: virtual time, and faults to order."""

import dataclasses
import heapq
import itertools

from tfdp_fl.secure_aggregation import Member, RejectedMessageError


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong with the messages of one kind and sender.

    They "drop", take `seconds` more ("delay"), arrive twice ("duplicate"), or the
    sender stops for good before the first ("crash").
    """

    action: str
    kind: str
    sender: str
    recipient: str | None = None
    seconds: float = 0.0

    def hits(self, message) -> bool:
        return (self.sender, self.kind) == (message.sender, message.kind) and (
            self.recipient in (None, message.recipient)
        )


class Network:
    """Delivers messages between members, in virtual time: nothing sleeps."""

    def __init__(self, *faults: Fault):
        self.delivered, self.rejected = [], []
        self._faults, self._crashed = faults, set()
        self._in_flight, self._order = [], itertools.count()

    def run(self, updates, protocol):
        """Returns each member's outcome; None of one that crashed."""
        members = {
            name: Member(protocol, name, update, members=tuple(updates), session="s")
            for name, update in updates.items()
        }
        for one in members.values():
            self._send(one.begin(0.0), 0.0)
        while self._in_flight:
            now, _, message = heapq.heappop(self._in_flight)
            self._pass_deadlines(members, now)
            if message.recipient in self._crashed:
                continue
            self.delivered.append(message)
            try:
                self._send(members[message.recipient].receive(message, now), now)
            except RejectedMessageError:
                self.rejected.append(message)
        self._pass_deadlines(members, float("inf"))
        return {name: one.outcome for name, one in members.items()}

    def _pass_deadlines(self, members, until: float) -> None:
        for name, one in members.items():
            if name not in self._crashed and one.deadline is not None:
                one.check_deadline(until)

    def _send(self, outgoing, now: float) -> None:
        for message in outgoing:
            hits = {each.action: each for each in self._faults if each.hits(message)}
            if "crash" in hits:
                self._crashed.add(message.sender)
            if message.sender in self._crashed or "drop" in hits:
                continue
            late = hits["delay"].seconds if "delay" in hits else 0.0
            for _ in range(2 if "duplicate" in hits else 1):
                arrival = (now + 0.01 + late, next(self._order), message)
                heapq.heappush(self._in_flight, arrival)
