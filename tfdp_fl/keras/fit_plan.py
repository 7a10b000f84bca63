"""One call of `fit`, as data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitPlan:
    """One call of `fit`: what holds for all of its rounds.

    Attributes:
      first_round: The first round of this training, counted from 0 over the
        life of the model.
      last_round: One past its last round.
      batch_size: Examples in one local batch.
      local_epochs: Passes over a client's examples.
      shuffle: Whether clients shuffle their examples.
      seed: The user's seed, or None.
    """

    first_round: int
    last_round: int
    batch_size: int
    local_epochs: int
    shuffle: bool
    seed: int | None
