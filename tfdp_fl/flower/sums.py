"""What a round releases: the noised mean of clipped updates, and the next clip.

There are two ways. Either the clients clip to an S that they are told and the
server once more: numpy only. Or the server clips, by the mechanism's own
TensorFlow functions, because the clip depends on what all clients sent or
the noise on earlier rounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from tfdp_fl import mechanisms
from tfdp_fl._on_use import tf
from tfdp_fl.flower import client as client_lib
from tfdp_fl.flower import correlated, history, replies, updates

# What clients are told to clip to, where the server does it for them.
NO_CLIP = 1e30
# A factor in float32 may be rounded up by so much of itself.
_ROUNDING = 1e-6

# What these ask of a client is a clip to an S that it is told, a bit, and noise.
# A subclass may ask for more, and is clipped by the server.
_CLIPPED_BY_CLIENTS = (
    mechanisms.FixedClipping,
    mechanisms.AdaptiveClipping,
    mechanisms.LocalDP,
)


@dataclasses.dataclass(frozen=True)
class ConfiguredRound:
    """What was fixed when the clients were asked; nothing set since counts.

    Attributes:
      server_round: its number.
      sent: w, the model's arrays.
      asked: the clients that were asked, by name.
      plan: the round as it is charged if nobody fails.
      mechanism: what is released.
      deployment: where.
      this: S, z and m, as floats.
      clients_clip: whether the clients clip, and the server only once more.
      template: the model as Flower sent it; its form is that of the result.
      names: message API: the names of the arrays.
    """

    server_round: int
    sent: list[np.ndarray]
    asked: dict[Hashable, Any]
    plan: history.ReleasedRound
    mechanism: mechanisms.Mechanism
    deployment: mechanisms.Deployment
    this: mechanisms.Round
    clients_clip: bool
    template: Any
    names: Sequence[str] = ()

    @property
    def stddevs(self) -> dict[str, float]:
        """The noise on the sum of updates ("update"), and on others by name."""
        stddevs = self.mechanism.noise_stddevs(self.this, self.deployment)
        return {name: float(value) for name, value in stddevs.items()}

    @property
    def client_noise_stddev(self) -> float:
        """What each client adds to its update, if the clients do: stddev / sqrt(m).

        m independent draws of N(0, (z S)^2 / m) sum to N(0, (z S)^2), the noise
        of McMahan et al. (2018), Section 2, Eq. (1).
        """
        if self.mechanism.noise_site == "server":
            return 0.0
        return self.stddevs["update"] / self.plan.clients_per_round**0.5

    @property
    def instruction(self) -> dict[str, Any]:
        """What the clients are told, under Flower's names."""
        if not self.clients_clip:
            return {client_lib.CLIP_NORM: NO_CLIP}
        told: dict[str, Any] = {client_lib.CLIP_NORM: self.this.clip_norm}
        if self.client_noise_stddev:
            told[client_lib.NOISE_STDDEV] = self.client_noise_stddev
        if self.mechanism.released_sums:
            told[client_lib.ADAPTIVE_CLIP_ENABLED] = True
        return told

    def wanted(self, answers_to: dict[int, str] | None = None) -> replies.Wanted:
        """Returns what a reply has to hold."""
        noise = self.client_noise_stddev
        return replies.Wanted(
            [array.shape for array in self.sent],
            self.clients_clip and bool(self.mechanism.released_sums),
            (self.this.clip_norm, noise) if noise else None,
            self.names,
            answers_to or {},
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a round releases.

    Attributes:
      model: w and the noised mean of the updates, in the dtypes of w.
      next_clip_norm: S of the next round.
      discarded: how many updates were not finite, and became zero.
      memory: of correlated noise, after the round; None if there is none.
    """

    model: list[np.ndarray]
    next_clip_norm: float
    discarded: int
    memory: Any = None


def clients_clip(
    mechanism: mechanisms.Mechanism, deployment: mechanisms.Deployment
) -> bool:
    """Returns whether the clients clip, or raises if nobody can.

    Raises:
      ValueError: if a mechanism releases what neither way can make.
    """
    mechanism.check(deployment)
    if type(mechanism) in _CLIPPED_BY_CLIENTS and mechanism.max_participations is None:
        if isinstance(mechanism, mechanisms.LocalDP) and not (
            mechanism.noise_over_sensitivity(deployment) > 0
        ):
            raise ValueError(f"mechanism must have noise, got {mechanism!r}.")
        return True
    central = mechanism.guarantee == "central" and mechanism.noise_site == "server"
    new_each_round = (
        mechanism.event_period is None and mechanism.first_memory(deployment) == ()
    )
    if (
        central
        and mechanism.scales_updates
        and (new_each_round or isinstance(mechanism, mechanisms.CorrelatedNoise))
    ):
        return False
    raise ValueError(
        "mechanism must be a central one that scales updates and is noised by the "
        "server (FixedClipping and AdaptiveClipping also by the clients), or LocalDP "
        f"without max_participations, got {mechanism!r}."
    )


def of_clipped(
    configured: ConfiguredRound, answers: Sequence[replies.Reply]
) -> Outcome:
    """Returns w + (sum_k clip(Delta_k) + N(0, (z S)^2)) / m, and the next S.

    Computed in float64 and rounded once, after the noise: what rounding adds
    to single updates (much, in float16) is not in the sum. A missing client
    only lowers it: noise and m are those of the plan. Where each client is
    private by itself ("local"), the mean is that of the clients that answered.

    The server clips once more what it is about to noise. Where clients noise,
    it scales down what no honest client sends. Their norm bits are counted
    from the middle (b - 1/2), so that a client that is missing pulls S neither
    way (Andrew et al. 2021, Algorithm 1).
    """
    mechanism, this = configured.mechanism, configured.this
    m = configured.plan.clients_per_round
    stddevs, bound = configured.stddevs, this.clip_norm
    by_server = mechanism.noise_site == "server"
    if not by_server:
        size = sum(array.size for array in configured.sent)
        bound = updates.largest_honest_norm(
            this.clip_norm, configured.client_noise_stddev, size
        )
    total = [np.zeros(array.shape) for array in configured.sent]
    discarded = 0
    for reply in answers:
        update = updates.clipped(
            updates.difference(reply.arrays, configured.sent), bound
        )
        discarded += update.discarded
        for array, change in zip(total, update.arrays, strict=True):
            array += change
    # One share of the noise for each client whose noise is not there: all m of
    # them, or those whose reply was of no use, or discarded.
    shares = m if by_server else m - len(answers) + discarded
    divisor = m
    if mechanism.guarantee == "local":
        shares, divisor = 0, len(answers)
    if shares:
        total = updates.noised(total, stddevs["update"] * (shares / m) ** 0.5)
    sums = {
        name: sum(bool(reply.norm_bit) - 0.5 for reply in answers)
        for name in mechanism.released_sums
    }
    return _outcome(configured, this, stddevs, total, divisor, sums, discarded)


def of_unclipped(
    configured: ConfiguredRound, answers: Sequence[replies.Reply], memory: Any
) -> Outcome:
    """Returns w + (sum_k c_k Delta_k + noise) / m, as the mechanism says.

    Args:
      configured: the round.
      answers: what can be used of the replies.
      memory: of correlated noise; None for noise that is new in each round.
    """
    mechanism, this = configured.mechanism, configured.this
    changes = [
        updates.clipped(updates.difference(reply.arrays, configured.sent), math.inf)
        for reply in answers
    ]
    discarded = np.array([change.discarded for change in changes], bool)
    norms = tf.constant([updates.norm(c.arrays) for c in changes], tf.float32)
    if mechanism.clip_to_cohort is not None:
        clip = mechanism.clip_to_cohort(norms, _as_tensors(this))
        this = this._replace(clip_norm=float(clip))
    contribution = mechanism.contribution_of_norm(
        norms, tf.constant(~discarded), _as_tensors(this)
    )
    total = [np.zeros(array.shape) for array in configured.sent]
    for factor, change in zip(
        contribution.update.numpy().astype(np.float64), changes, strict=True
    ):
        for array, part in zip(total, change.arrays, strict=True):
            array += factor * (1 - _ROUNDING) * part
    stddevs = mechanism.noise_stddevs(this, configured.deployment)
    if memory is None:
        total = updates.noised(total, float(stddevs["update"]))
    else:
        total, memory = correlated.noised(
            mechanism, total, float(stddevs["update"]), memory
        )
    sums = {
        name: float(np.sum(value.numpy(), dtype=np.float64))
        for name, value in contribution.sums.items()
    }
    m = this.clients_per_round
    lost = int(discarded.sum())
    return _outcome(configured, this, stddevs, total, m, sums, lost, memory)


def _outcome(
    configured: ConfiguredRound,
    this: mechanisms.Round,
    stddevs: dict[str, Any],
    total: list[np.ndarray],
    divisor: float,
    sums: dict[str, float],
    discarded: int,
    memory: Any = None,
) -> Outcome:
    """Divides a noised total, and moves S by the noised sums."""
    noised = {
        name: float(np.random.default_rng().normal(value, float(stddevs[name])))
        for name, value in sums.items()
    }
    return Outcome(
        updates.applied(configured.sent, [array / divisor for array in total]),
        float(configured.mechanism.next_clip_norm(noised, this)),
        discarded,
        memory,
    )


def _as_tensors(this: mechanisms.Round) -> mechanisms.Round:
    return mechanisms.Round(*(tf.constant(v, tf.float32) for v in this))
