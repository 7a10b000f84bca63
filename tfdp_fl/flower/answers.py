"""Whose replies are in a round's sum, and who has failed."""

from __future__ import annotations

import dataclasses
import logging
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from tfdp_fl.flower import replies

_logger = logging.getLogger(__name__)


class Node(int):
    """A client that Flower names by a number: the id of its node."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """What came back in a round.

    Attributes:
      valid: client, its result, and what was read in it; each client once.
      failures: as the server was told of them, and after them the results that
        could not be used.
      reasons: why these could not be used.
      num_results: how many results came.
      num_replied: of how many clients who were asked, each counted once, be
        it with a result that could not be used.
    """

    valid: list[tuple[Any, Any, replies.Reply]]
    failures: list[Any]
    reasons: list[str]
    num_results: int
    num_replied: int

    def complete(self, num_asked: int) -> bool:
        """Whether everybody replied, and nobody failed."""
        return len(self.valid) == num_asked and not self.failures

    def everybody_replied(self, num_asked: int) -> bool:
        """Whether all replied, if not with something that can be used."""
        told_of = len(self.failures) - len(self.reasons)
        return self.num_replied == num_asked and not told_of

    def summary(self, num_asked: int) -> str:
        """Returns how many came of how many."""
        text = (
            f"{self.num_results} results and "
            f"{len(self.failures) - len(self.reasons)} failures, where "
            f"{num_asked} results are needed"
        )
        if self.reasons:
            text += (
                f"; {len(self.reasons)} replies could not be used (the first: "
                f"{self.reasons[0]})"
            )
        return text


def collect(
    server_round: int,
    results: Sequence[tuple[Any, Any]],
    failures: Sequence[Any],
    asked: frozenset[str],
    read: Callable[[Any], replies.Reply],
) -> Answers:
    """Reads a round's results; each that cannot be used is logged.

    Args:
      server_round: the round's number, for the log.
      results: clients and what they replied.
      failures: of clients that did not reply.
      asked: the names of those who were asked; empty where they have none.
      read: reads one result, or raises `replies.ReplyError`.
    """
    valid, reasons, failed = [], [], list(failures)
    replied: set[Any] = set()
    used: set[Any] = set()
    for client, fit_res in results:
        name = name_of(client)
        # Who has no name goes by the object that stands for the client.
        key = id(client) if name is None else name
        try:
            if name is not None and asked and name not in asked:
                raise replies.ReplyError("it was not asked")
            if key in used:
                raise replies.ReplyError("it has replied before")
            replied.add(key)
            reply = read(fit_res)
        except replies.ReplyError as error:
            called = repr(client if name is None else name)[:100]
            reasons.append(f"client {called}: {error}")
            failed.append((client, fit_res))
            _logger.warning(
                "Round %s, a reply is not used: %s.", server_round, reasons[-1]
            )
        else:
            used.add(key)
            valid.append((client, fit_res, reply))
    return Answers(valid, failed, reasons, len(results), len(replied))


def name_of(client: Any) -> str | None:
    """Returns the name that Flower gives a client; None if it has none."""
    if isinstance(client, Node):
        return str(client)
    cid = getattr(client, "cid", None)
    return str(cid) if isinstance(cid, str | numbers.Integral) else None
