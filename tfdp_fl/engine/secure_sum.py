"""Sums a cohort's records through secure aggregation."""

from __future__ import annotations

import numpy as np

from tfdp_fl import secure_aggregation
from tfdp_fl.engine import engine


def sum_securely(
    cohort_engine: engine.CohortEngine,
    pending: engine.PendingRound,
    protocol: secure_aggregation.AdditiveSecretSharing,
    group_size: int | None = None,
) -> tuple[int, ...]:
    """Adds up collected records without anybody seeing a summand.

    Each client's record (its clipped update with the noise that it adds
    itself, and its diagnostics) goes through the protocol as one vector.

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
    vectors = np.concatenate(
        [
            np.concatenate([each.updates.numpy(), each.scalars.numpy()], axis=1)
            for _, each in parts
        ]
    )
    order = np.argsort(members, kind="stable")
    members, vectors = members[order], vectors[order]
    grouped = secure_aggregation.sum_in_groups(
        vectors, protocol, group_size=group_size
    )
    cohort_engine.set_record_sum(pending, grouped.total)
    return tuple(int(members[index]) for index in grouped.failed_members)
