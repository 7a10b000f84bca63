"""Sums a cohort's records through secure aggregation."""

from __future__ import annotations

import numpy as np

from tfdp_fl import secure_aggregation
from tfdp_fl.engine import engine

# Of a record's scalars, the bit and the weight are handed in.
_HANDED_IN = 2


def sum_securely(
    cohort_engine: engine.CohortEngine,
    pending: engine.PendingRound,
    protocol: secure_aggregation.AdditiveSecretSharing,
    group_size: int | None = None,
) -> tuple[int, ...]:
    """Adds up collected records without anybody seeing a summand.

    What a client hands in (its clipped update with the noise that it adds
    itself, its bit, its weight) goes through the protocol as one vector. The
    diagnostics that `History` reports (norm, clipped, discarded) do not: they
    are known because this is a simulation, and a deployment has none.

    Args:
      cohort_engine: The engine that collected the records one by one.
      pending: The round; its sum is set.
      protocol: The protocol.
      group_size: How many members a group aims at; None: its minimum.

    Returns:
      The places in the cohort of clients whose group failed: their updates
      are not in the sum.
    """
    parts = [part for group in pending.collected for part in group]
    if not parts:
        cohort_engine.set_record_sum(pending, None)
        return ()
    members = np.concatenate([members for members, _ in parts])
    scalars = np.concatenate([each.scalars.numpy() for _, each in parts])
    vectors = np.concatenate([each.updates.numpy() for _, each in parts])
    order = np.argsort(members, kind="stable")
    members, scalars = members[order], scalars[order]
    vectors = np.concatenate([vectors[order], scalars[:, :_HANDED_IN]], axis=1)
    grouped = secure_aggregation.sum_in_groups(
        vectors, protocol, group_size=group_size
    )
    if grouped.total is None:
        cohort_engine.set_record_sum(pending, None)
    else:
        heard = list(grouped.succeeded_members)
        seen = scalars[heard, _HANDED_IN:].sum(axis=0)
        cohort_engine.set_record_sum(
            pending, np.concatenate([grouped.total, seen])
        )
    return tuple(int(members[index]) for index in grouped.failed_members)
