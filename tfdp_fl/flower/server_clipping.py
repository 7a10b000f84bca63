"""The sum of updates that the server clips: TensorFlow, by the mechanism."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfdp_fl import mechanisms
from tfdp_fl._on_use import tf
from tfdp_fl.flower import configured as configured_lib
from tfdp_fl.flower import remembering, replies, updates

# What clients are told to clip to, where the server does it for them.
NO_CLIP = 1e30
# A factor in float32 may be rounded up by so much of itself.
_ROUNDING = 1e-6


def server_can_clip(
    mechanism: mechanisms.Mechanism, deployment: mechanisms.Deployment
) -> bool:
    """Whether a mechanism only scales updates, and the server noises anew."""
    return (
        mechanism.guarantee == "central"
        and mechanism.noise_site == "server"
        and mechanism.scales_updates
        and mechanism.event_period is None
        and mechanism.first_memory(deployment) == ()
    )


def server_can_remember(mechanism: mechanisms.Mechanism) -> bool:
    """Whether its noise is all that goes by earlier rounds."""
    return (
        remembering.remembers(mechanism)
        and mechanism.noise_site == "server"
        and mechanism.scales_updates
    )


def release(
    configured: configured_lib.ConfiguredRound, answers: Sequence[replies.Reply]
) -> configured_lib.Outcome:
    """Returns w + (sum_k c_k Delta_k + noise) / m, as the mechanism says."""
    mechanism, this = configured.mechanism, configured.this
    changes = [
        updates.clipped(updates.difference(reply.arrays, configured.sent), math.inf)
        for reply in answers
    ]
    discarded = np.array([each.discarded for each in changes], bool)
    norms = tf.constant([updates.norm(each.arrays) for each in changes], tf.float32)
    if mechanism.clip_to_cohort is not None:
        clip = mechanism.clip_to_cohort(norms, _as_tensors(this))
        this = this._replace(clip_norm=float(clip))
    each = mechanism.contribution_of_norm(
        norms, tf.constant(~discarded), _as_tensors(this)
    )
    total = [np.zeros(array.shape) for array in configured.sent]
    for factor, change in zip(
        each.update.numpy().astype(np.float64), changes, strict=True
    ):
        for array, part in zip(total, change.arrays, strict=True):
            array += factor * (1 - _ROUNDING) * part
    stddevs = mechanism.noise_stddevs(this, configured.deployment)
    stddev, memory = float(stddevs["update"]), configured.memory
    if memory == ():
        total = updates.noised(total, stddev)
    else:
        total, memory = remembering.noised(mechanism, total, stddev, memory)
    sums = {
        name: updates.noised_number(
            float(np.sum(value.numpy(), dtype=np.float64)), float(stddevs[name])
        )
        for name, value in each.sums.items()
    }
    return configured_lib.Outcome(
        updates.applied(
            configured.sent, [array / this.clients_per_round for array in total]
        ),
        float(mechanism.next_clip_norm(sums, this)),
        int(discarded.sum()),
        memory,
    )


def _as_tensors(this: mechanisms.Round) -> mechanisms.Round:
    return mechanisms.Round(*(tf.constant(v, tf.float32) for v in this))
