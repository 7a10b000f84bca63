"""How often, and how soon again, a client may take part."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar, cast

from tfdp_fl import _validate
from tfdp_fl.terms import Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParticipationPattern:
    """What is promised of every client over the rounds of a run.

    Choquette-Choo et al. (2023), "(Amplified) Banded Matrix Factorization",
    section 2.1 (https://arxiv.org/abs/2306.08153): (k, b) participation.

    Attributes:
      rounds: T, the number of rounds.
      min_separation: b, the fewest rounds from one of a client's rounds to its next
        (1: they may follow each other).
      max_participations: k, the most rounds that one client is in. None, or more
        than that: ceil(T / b).
    """

    rounds: int
    min_separation: int = 1
    max_participations: int | None = None

    def __post_init__(self):
        rounds = _validate.positive_integer(rounds=self.rounds)
        gap = _validate.positive_integer(min_separation=self.min_separation)
        max_participations = -(-rounds // gap)
        if self.max_participations is not None:
            declared = _validate.positive_integer(
                max_participations=self.max_participations
            )
            max_participations = min(max_participations, declared)
        object.__setattr__(self, "rounds", rounds)
        object.__setattr__(self, "min_separation", gap)
        object.__setattr__(self, "max_participations", max_participations)

    @property
    def k(self) -> int:
        """`max_participations`, which is never None once made."""
        return cast(int, self.max_participations)


def fold(
    pattern: ParticipationPattern,
    rounds: Sequence[tuple[Hashable, Hashable] | None],
    max_participations: int | None = None,
) -> int:
    """Returns by what factor c a client may have exceeded the pattern.

    The rounds of a client that took part too often, or too soon, divide into c sets
    that each follow the pattern: its i-th round goes into set i mod c. So it moves a
    run by at most c times the sensitivity (the triangle inequality; the noise of one
    segment is one draw, so costs do not just add up).

    Args:
      pattern: (k, b) and T.
      rounds: For each released round of a segment, the division into groups and the
        group that its cohort came from; None if any client could have been in it. A
        client is in one group of each division.
      max_participations: Of any client, if known from elsewhere.

    Returns:
      c, at least 1.
    """

    def largest(participations: Sequence[tuple[Hashable, Hashable] | None]) -> int:
        counts = collections.Counter(participations)
        by_division: dict[Hashable, int] = collections.defaultdict(int)
        for group, count in counts.items():
            division = None if group is None else group[:1]
            by_division[division] = max(by_division[division], count)
        return sum(by_division.values())

    gap = pattern.min_separation
    windows = (rounds[i : i + gap] for i in range(max(1, len(rounds) - gap + 1)))
    total = (
        largest(rounds)
        if max_participations is None
        else min(max_participations, largest(rounds))
    )
    return max(1, -(-total // pattern.k), *map(largest, windows))


_Client = TypeVar("_Client", bound=Hashable)


class ParticipationRecord:
    """Ensures that no client takes part again too soon, or too often.

    Correlated noise is charged for clients whose rounds are at least `min_separation`
    released rounds apart, with at most `max_participations` in a segment of T rounds.
    If cohorts are not drawn (devices take part when they are charged and idle), this
    record enforces it. In each round:

        cohort = record.eligible(available_clients)[:m]
        ...                             # Train, add noise, and release.
        record.add(clients_in_the_sum)  # Raises an error if one was not eligible.

    Add only rounds that were released; otherwise, the separation would shrink
    (Choquette-Choo et al. 2023, section 2.1, counts rounds of the matrix). The record
    relies on the clients' names: a client that comes back under another name counts as
    another client. Save `state` with the state of the noise, and `restore` both.

    Attributes:
      pattern: (k, b) and T.
      released: The number of rounds added, over all segments.
    """

    def __init__(self, pattern: ParticipationPattern):
        self.pattern = _validate.instance_of(ParticipationPattern, pattern=pattern)
        self.released = 0
        # The released rounds in which each client took part.
        self._rounds: dict[Hashable, list[int]] = collections.defaultdict(list)

    def _refusal(self, client: Hashable) -> str | None:
        """Returns why a client may not take part now; None if it may."""
        gap, k = self.pattern.min_separation, self.pattern.k
        rounds = self._rounds.get(client, [])
        if rounds and self.released - rounds[-1] < gap:
            return (
                f"its last round was released {self.released - rounds[-1]} rounds ago, "
                f"and min_separation={gap}"
            )
        segment_start = self.released - self.released % self.pattern.rounds
        count = sum(round_index >= segment_start for round_index in rounds)
        if count >= k:
            return (
                f"it has taken part in {count} rounds of this segment, and "
                f"max_participations={k}"
            )
        return None

    def eligible(self, clients: Iterable[_Client]) -> list[_Client]:
        """Returns the clients that may take part now, each once, in the given order."""
        return [
            client for client in dict.fromkeys(clients) if self._refusal(client) is None
        ]

    def add(self, clients: Sequence[Hashable]) -> None:
        """Adds one released round.

        Args:
          clients: The names of those in its sum: strings or integers.

        Raises:
          ValueError: One of them was not eligible, or is listed twice. Nothing is
            added then.
          TypeError: A name is neither a string nor an integer.
        """
        added: set[Hashable] = set()
        for client in clients:
            if isinstance(client, bool) or not isinstance(client, (str, int)):
                raise TypeError(
                    "clients must be strings or integers, got "
                    f"{client!r} of type {type(client).__name__}."
                )
            refusal = "it is listed twice" if client in added else self._refusal(client)
            if refusal is not None:
                raise ValueError(
                    f"clients must all be allowed to take part, got "
                    f"{client!r}: {refusal}. Correlated noise does not cover it."
                )
            added.add(client)
        for client in clients:
            self._rounds[client].append(self.released)
        self.released += 1

    def state(self) -> Json:
        """Returns what `restore` needs, as JSON values; it names the clients."""
        return {
            "pattern": dataclasses.asdict(self.pattern),
            "released": self.released,
            "rounds": [[name, rounds] for name, rounds in self._rounds.items()],
        }

    def restore(self, state: Json) -> None:
        """Continues from a `state`.

        Raises:
          ValueError: The state has another pattern.
        """
        if state["pattern"] != (own := dataclasses.asdict(self.pattern)):
            raise ValueError(
                f"state must have the pattern {own}, got {state['pattern']}."
            )
        self.released = state["released"]
        self._rounds.clear()
        self._rounds.update((name, [*rounds]) for name, rounds in state["rounds"])
