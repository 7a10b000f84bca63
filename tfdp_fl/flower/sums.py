"""What a round releases: the noised mean of clipped updates, and the next clip.

There are two ways. Either the clients clip to an S that they are told and the
server once more: numpy only. Or the server clips, by the mechanism's own
TensorFlow functions, because the clip goes by what all clients sent or because
the noise goes by earlier rounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, cast

import numpy as np

from tfdp_fl import mechanisms
from tfdp_fl._on_use import tf
from tfdp_fl.flower import client as client_lib
from tfdp_fl.flower import correlated, history, replies, updates

# What clients are told to clip to, where the server does it for them.
NO_CLIP = 1e30
# A factor in float32 may be rounded up by so much of itself.
_ROUNDING = 1e-6

# In what a mechanism may differ from DP-FedAvg (or from `LocalDP`), and still
# ask no more of its clients than a clip to an S that they are told, a bit and
# noise: by how much it noises, how S moves, what it costs, what is said of it.
_MAY_DIFFER = frozenset(
    {
        "caveats",
        "check",
        "check_parameters",
        "describe",
        "epsilon",
        "first_clip_norm",
        "for_target",
        "guarantee",
        "implied_delta",
        "name",
        "next_clip_norm",
        "noise_limit",
        "noise_limit_reason",
        "noise_multiplier",
        "noise_multiplier_at",
        "noise_site",
        "noise_stddevs",
        "own_caveats",
        "registered_name",
        "round_event",
        "suggested_run",
        "with_noise_multiplier",
    }
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
        applied = None
        if self.client_noise_stddev:
            applied = (self.this.clip_norm, self.client_noise_stddev)
        return replies.Wanted(
            [array.shape for array in self.sent],
            self.clients_clip and bool(self.mechanism.released_sums),
            applied,
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
    if _clients_can_clip(mechanism):
        if mechanism.guarantee == "local" and not (
            cast(mechanisms.LocalDP, mechanism).noise_over_sensitivity(deployment) > 0
        ):
            raise ValueError(
                f"mechanism must have noise, got {mechanism!r}: without, a "
                "client hands over its update as it is."
            )
        return True
    central = mechanism.guarantee == "central" and mechanism.noise_site == "server"
    remembers = correlated.remembers(mechanism) or (
        mechanism.event_period is None and mechanism.first_memory(deployment) == ()
    )
    if central and mechanism.scales_updates and remembers:
        return False
    raise ValueError(
        "mechanism must be a central one that scales updates and whose noise "
        "is new in each round (FixedClipping, AdaptiveClipping, "
        "MedianClipping with noise_site='server', or your own), "
        "CorrelatedNoise, or LocalDP "
        f"without max_participations, got {mechanism!r}."
    )


def _clients_can_clip(mechanism: mechanisms.Mechanism) -> bool:
    """Whether all a mechanism asks of a client is a clip, a bit and noise."""
    kind, adaptive = type(mechanism), mechanisms.AdaptiveClipping
    if mechanism.guarantee == "local":
        return (
            isinstance(mechanism, mechanisms.LocalDP)
            and mechanism.max_participations is None
            and _changes(kind, mechanisms.LocalDP) <= _MAY_DIFFER
        )
    changes = _changes(kind, mechanisms.Mechanism)
    if (
        kind.sums_of is adaptive.sums_of
        and kind.released_sums == adaptive.released_sums
    ):
        changes -= {"sums_of", "released_sums"}
    return mechanism.guarantee == "central" and changes <= _MAY_DIFFER


def _changes(kind: type, base: type) -> set[str]:
    """Returns the public members of a base that a class has of its own."""
    return {
        name
        for cls in kind.__mro__
        if cls not in base.__mro__
        for name in vars(cls)
        if not name.startswith("_") and hasattr(base, name)
    }


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
        name: updates.noised_number(
            sum(bool(reply.norm_bit) - 0.5 for reply in answers), stddevs[name]
        )
        for name in mechanism.released_sums
    }
    return Outcome(
        updates.applied(configured.sent, [array / divisor for array in total]),
        float(mechanism.next_clip_norm(sums, this)),
        discarded,
    )


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
    stddev = float(stddevs["update"])
    if memory is None:
        total = updates.noised(total, stddev)
    else:
        total, memory = correlated.noised(mechanism, total, stddev, memory)
    sums = {
        name: updates.noised_number(
            float(np.sum(value.numpy(), dtype=np.float64)), float(stddevs[name])
        )
        for name, value in contribution.sums.items()
    }
    return Outcome(
        updates.applied(
            configured.sent, [array / this.clients_per_round for array in total]
        ),
        float(mechanism.next_clip_norm(sums, this)),
        int(discarded.sum()),
        memory,
    )


def _as_tensors(this: mechanisms.Round) -> mechanisms.Round:
    return mechanisms.Round(*(tf.constant(v, tf.float32) for v in this))
