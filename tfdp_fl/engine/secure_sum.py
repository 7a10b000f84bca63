"""Sums a cohort's contributions through secure aggregation."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import mechanisms, secure_aggregation
from tfdp_fl.engine import cohort, engine

# Noise of two steps of the grid is, once rounded, the rounded sum's noise but
# for a part of exp(-2 pi^2 2^2) = 5e-35 (Poisson summation).
_STEPS_OF_NOISE = 2.0


def sum_securely(
    cohort_engine: engine.CohortEngine,
    pending: cohort.PendingRound,
    protocol: secure_aggregation.AdditiveSecretSharing,
) -> tuple[int, ...]:
    """Adds up collected contributions without anybody seeing a summand.

    What a client uploads (its clipped update with the noise that it adds
    itself, its bit, its weight) goes through the protocol as one vector. The
    diagnostics that `History` reports (norm, clipped, discarded) do not: they
    are known because this is a simulation, and a deployment has none.

    Where the server adds the noise, the update that is sent is within the clip
    (`AdditiveSecretSharing.within`), not only the one before rounding. Noise
    of the clients' own is rounded with the update, to the nearest value.

    A client with a value above `max_share_value` does not end the round. If it
    brings no noise that the sum needs, it counts as discarded: it uploads
    zeros. If it does, it has failed.

    Args:
      cohort_engine: The engine that collected the contributions one by one.
      pending: The round; its sum is set, and `without_noise`.
      protocol: The protocol.

    Returns:
      The places in the cohort of clients that failed, or whose group did:
      their updates are not in the sum.

    Raises:
      ValueError: The protocol's grid is too coarse for what is sent.
    """
    query, size = cohort_engine.query, cohort_engine.update_spec.size
    site, state = query.mechanism.noise_site, pending.state
    _check_grid(protocol, query, state)
    total = np.zeros(size + query.num_scalars)
    nobody = np.zeros([0], np.int64), total[None, :][:0].astype(np.float32)
    collected = [
        (members, tf.concat([own.updates, own.scalars], 1))
        for members, own in pending.collected
    ]
    members, rows = map(np.concatenate, zip(nobody, *collected, strict=True))
    order = np.argsort(members, kind="stable")
    members, rows = members[order], rows[order]
    failed = members[:0]
    # The diagnostics are not uploaded.
    uploaded = rows[:, : -mechanisms.NUM_DIAGNOSTICS]
    allowed = np.abs(uploaded) <= protocol.max_share_value
    (places,) = np.nonzero(~allowed.all(axis=1))
    if len(places):
        if site == "client":
            failed = members[places]
        _warn(members, places, protocol, fails=len(failed) > 0)
        rows[places, :size] = 0.0
        rows[places, -1] = 1.0  # Discarded.
        # A mean over the clients that answered is one without these; a fixed
        # divisor does not look at the weight, and the bit is the client's to give.
        if site == "every client":
            uploaded[places] = 0.0
            pending.without_noise += len(places)
        uploaded[~allowed] = 0.0
    bound = float(query.largest_norm(state)) if site == "server" else None

    def sent_by(index: int) -> np.ndarray:
        sent = uploaded[index].astype(np.float64)
        if bound is not None:
            sent[:size] = protocol.within(sent[:size], bound)
        return sent

    if not len(failed):  # Else the sum lacks noise, whatever the others send.
        try:
            grouped = secure_aggregation.sum_in_groups(
                sent_by, protocol, num_members=len(members)
            )
        except ValueError as error:  # A client that drops out can make it so.
            warnings.warn(f"{error} All of them have failed.", stacklevel=3)
            failed = members
        else:
            failed = members[list(grouped.failed_members)]
            if grouped.total is not None:
                heard = list(grouped.succeeded_members)
                seen = rows[heard, -mechanisms.NUM_DIAGNOSTICS :].sum(axis=0)
                total = np.concatenate([grouped.total, seen])
    flat = tf.constant(total)
    cohort_engine.set_sum(pending, flat[:size], flat[size:])
    return tuple(failed.tolist())


def _check_grid(
    protocol: secure_aggregation.AdditiveSecretSharing,
    query: mechanisms.CohortQuery,
    state: Any,
) -> None:
    """Raises ValueError if rounding would lose a bit or change the noise."""
    if protocol.mode != "ring":
        return
    needed = [("the bits and the weight of a client", 0.5)]
    if query.mechanism.noise_site == "client":
        needed += [
            (f"a client's noise on its {name}", float(share) / _STEPS_OF_NOISE)
            for name, share in query.noise_shares(state).items()
            if float(share) > 0
        ]
    for what, resolution in needed:
        if protocol.resolution > resolution:
            raise ValueError(
                "secure_aggregation must have a resolution of at most "
                f"{resolution:.3g}, because of {what}, got "
                f"{protocol.resolution:.3g}: take bits=64, or a smaller "
                f"max_share_value than {protocol.max_share_value:g}."
            )


def _warn(
    members: np.ndarray,
    places: np.ndarray,
    protocol: secure_aggregation.AdditiveSecretSharing,
    fails: bool,
) -> None:
    """Says what becomes of the clients with values that cannot be sent."""
    what = "were discarded: they upload zeros."
    if fails:
        what = "have failed, and the sum lacks their noise."
    warnings.warn(
        f"{len(places)} of {len(members)} clients have values that are not "
        f"within max_share_value={protocol.max_share_value:g} (first: place "
        f"{int(members[places[0]])} in the cohort) and {what} If they are honest, "
        "secure_aggregation needs a larger max_share_value.",
        stacklevel=4,
    )
