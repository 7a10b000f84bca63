"""How often, and how soon again, a client may take part."""

from __future__ import annotations

import dataclasses
from typing import cast

from tfdp_fl import _validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Participation:
    """What is promised of every client over the rounds of a run.

    Choquette-Choo et al. (2023), "(Amplified) Banded Matrix Factorization",
    section 2.1 (https://arxiv.org/abs/2306.08153): (k, b) participation.

    Attributes:
      rounds: T, the number of rounds.
      min_separation: b: two rounds of one client are at least so far apart
        (1: they may follow each other).
      max_participations: k, the most rounds that one client is in. None, or
        more than there is room for: ceil(T / b).
    """

    rounds: int
    min_separation: int = 1
    max_participations: int | None = None

    def __post_init__(self):
        rounds = _validate.positive_integer(rounds=self.rounds)
        gap = _validate.positive_integer(min_separation=self.min_separation)
        most = -(-rounds // gap)
        if self.max_participations is not None:
            wanted = _validate.positive_integer(
                max_participations=self.max_participations
            )
            most = min(most, wanted)
        object.__setattr__(self, "rounds", rounds)
        object.__setattr__(self, "min_separation", gap)
        object.__setattr__(self, "max_participations", most)

    @property
    def most(self) -> int:
        """k: `max_participations`, which is never None once made."""
        return cast(int, self.max_participations)
