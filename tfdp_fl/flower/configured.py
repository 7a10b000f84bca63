"""A round whose clients are at work, and what comes of their replies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdp_fl import mechanisms
from tfdp_fl.flower import keys, replies, rounds


@dataclasses.dataclass(frozen=True)
class ConfiguredRound:
    """What was fixed when the clients were asked; nothing set since counts.

    Attributes:
      server_round: its number.
      message: the model that all of them were sent, as the strategy made it.
      sent: w, the arrays in it.
      asked: the names of those who were asked, where clients have names.
      plan: the round as it is released if nobody fails.
      mechanism: what is released.
      deployment: where.
      this: S, z and m, as floats.
      memory: what the noise goes by beside them; () if by nothing.
    """

    server_round: int
    message: Any
    sent: list[np.ndarray]
    asked: frozenset[str]
    plan: rounds.ReleasedRound
    mechanism: mechanisms.Mechanism
    deployment: mechanisms.Deployment
    this: mechanisms.Round
    memory: Any = ()

    @functools.cached_property
    def stddevs(self) -> dict[str, float]:
        """The noise on the sum of updates ("update"), and on others by name."""
        stddevs = self.mechanism.noise_stddevs(self.this, self.deployment)
        return {name: float(value) for name, value in stddevs.items()}

    @property
    def noised_by_server(self) -> bool:
        """Whether the server adds the noise of all."""
        return self.mechanism.noise_site == "server"

    @property
    def client_noise_stddev(self) -> float:
        """A client's share of the noise on the sum: its stddev / sqrt(m).

        m independent draws of N(0, (z S)^2 / m) sum to N(0, (z S)^2), the noise
        of McMahan et al. (2018), Section 2, Eq. (1).
        """
        return self.stddevs["update"] / self.plan.clients_per_round**0.5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a round releases.

    Attributes:
      model: w and the noised mean of the updates, in the dtypes of w.
      next_clip_norm: S of the next round.
      discarded: how many updates were not finite, and became zero.
      memory: after the round; () if there is none.
    """

    model: list[np.ndarray]
    next_clip_norm: float
    discarded: int
    memory: Any = ()


# What makes an outcome of a round and of the replies that could be read.
Release = Callable[[ConfiguredRound, Sequence[replies.Reply]], Outcome]


def for_clients(configured: ConfiguredRound) -> dict[str, Any]:
    """Returns what clients that clip are told, under Flower's names."""
    config: dict[str, Any] = {keys.CLIP_NORM: configured.this.clip_norm}
    if not configured.noised_by_server:
        config[keys.NOISE_STDDEV] = configured.client_noise_stddev
    if configured.mechanism.released_sums:
        config[keys.ADAPTIVE_CLIP_ENABLED] = True
    return config
