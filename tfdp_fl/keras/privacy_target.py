"""What a model was planned to spend at most."""

from __future__ import annotations

import dataclasses
import warnings

from tfdp_fl import _validate

ON_OVERSPEND = ("stop", "warn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyTarget:
    """The plan that a model's noise was calibrated for.

    Attributes:
      epsilon: The most that all rounds together may cost.
      delta: At this delta.
      accountant: "rdp" or "pld", by which it was calibrated.
      num_clients: The population N that was planned for.
      rounds: The rounds T that were planned.
      on_overspend: "stop": a `fit` ends before the round that would pass
        epsilon; "warn": it says so once and goes on.
    """

    epsilon: float
    delta: float
    accountant: str
    num_clients: int
    rounds: int
    on_overspend: str = "stop"

    def __post_init__(self):
        _validate.positive(target_epsilon=self.epsilon)
        _validate.inside_unit_interval(target_delta=self.delta)
        _validate.one_of(("rdp", "pld"), accountant=self.accountant)
        _validate.positive_integer(num_clients=self.num_clients)
        _validate.positive_integer(rounds=self.rounds)
        _validate.one_of(ON_OVERSPEND, on_overspend=self.on_overspend)


def warn_of_large_delta(name: str, delta: float, num_clients: int) -> None:
    """Warns of a delta that publishing one client outright could have."""
    if delta * num_clients >= 1:
        warnings.warn(
            f"{name} should be below 1 / num_clients = {1 / num_clients:.3g}, "
            f"got {delta:g}: a mechanism that publishes one of the "
            f"{num_clients} clients outright could have that delta.",
            RuntimeWarning,
            stacklevel=3,
        )
