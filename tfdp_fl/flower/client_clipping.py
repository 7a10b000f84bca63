"""The sum of updates that the clients clipped: floats and numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdp_fl import mechanisms
from tfdp_fl.flower import configured as configured_lib
from tfdp_fl.flower import replies, updates

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


def clients_can_clip(mechanism: mechanisms.Mechanism) -> bool:
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


def release(
    configured: configured_lib.ConfiguredRound, answers: Sequence[replies.Reply]
) -> configured_lib.Outcome:
    """Returns w + (sum_k clip(Delta_k) + N(0, (z S)^2)) / m, and the next S.

    Computed in float64 and rounded once, after the noise: what rounding adds
    to single updates (much, in float16) is not in the sum. A missing client
    only lowers it: noise and m are those of the plan. Where each client is
    private by itself ("local"), the mean is that of those who answered.

    The server clips once more what it is about to noise. Where clients noise,
    it scales down what no honest client sends. Their norm bits are counted
    from the middle (b - 1/2), so that a client that is missing pulls S neither
    way (Andrew et al. 2021, Algorithm 1).
    """
    mechanism, this = configured.mechanism, configured.this
    m = configured.plan.clients_per_round
    stddev, bound = configured.client_noise_stddev, this.clip_norm
    if not configured.noised_by_server:
        size = sum(array.size for array in configured.sent)
        bound = updates.largest_honest_norm(this.clip_norm, stddev, size)
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
    shares = m
    if not configured.noised_by_server:
        shares = m - len(answers) + discarded
    divisor = m
    if mechanism.guarantee == "local":
        shares, divisor = 0, len(answers)
    if shares:
        total = updates.noised(total, stddev * shares**0.5)
    sums = {
        name: updates.noised_number(
            sum(bool(reply.norm_bit) - 0.5 for reply in answers),
            configured.stddevs[name],
        )
        for name in mechanism.released_sums
    }
    return configured_lib.Outcome(
        updates.applied(configured.sent, [array / divisor for array in total]),
        float(mechanism.next_clip_norm(sums, this)),
        discarded,
    )
