"""The sum of a whole cohort's updates, aggregated securely in groups."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.secure_aggregation import additive_sharing, member


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedSum:
    """What the groups of one cohort released.

    Attributes:
      groups: For each group, the indices of its members in the cohort, and its outcome,
        whose `value` is the group's sum, float64 [D]. If the group failed, the value is
        None, and its members keep their own updates.
      total: The sum over the groups that succeeded, float64 [D]; None if none did.
      failed_members: The indices of all members of groups that failed.
    """

    groups: tuple[tuple[tuple[int, ...], member.AggregationOutcome], ...]
    total: np.ndarray | None
    failed_members: tuple[int, ...]

    @property
    def succeeded_members(self) -> tuple[int, ...]:
        """The indices of all members whose updates are in `total`."""
        succeeded = [indices for indices, outcome in self.groups if outcome.succeeded]
        return tuple(itertools.chain.from_iterable(succeeded))


def can_be_split(
    num_members: np.ndarray, protocol: additive_sharing.AdditiveSecretSharing
) -> np.ndarray:
    """Returns whether cohorts of these sizes, int [n], can be summed: bool [n]."""
    min_size, max_size = protocol.min_participants, protocol.max_participants
    groups = np.maximum(num_members // min_size, -(-num_members // max_size))
    return num_members // np.maximum(groups, 1) >= min_size


def split_into_groups(
    num_members: int,
    protocol: additive_sharing.AdditiveSecretSharing,
    group_size: int | None = None,
) -> list[tuple[int, ...]]:
    """Returns groups of nearly equal size that cover a cohort once.

    Args:
      num_members: The size of the cohort.
      protocol: The protocol, whose limits hold for every group.
      group_size: The intended size; None: `min_participants`. A remainder is spread
        over the groups, which may become larger, but never twice as large. A cohort
        below `group_size` is one group.

    Returns:
      The members' indices, group by group, in order. An empty cohort gives an empty
      list. A cohort below `min_participants` gives one group, which is too small to
      aggregate.

    Raises:
      ValueError: `group_size` is outside the protocol's limits, or no number of groups
        keeps all of them within the limits.
    """
    _validate.non_negative_integer(num_members=num_members)
    _validate.instance_of(additive_sharing.AdditiveSecretSharing, protocol=protocol)
    if group_size is None:
        group_size = protocol.min_participants
    _validate.positive_integer(group_size=group_size)
    protocol.check_group_size(group_size)
    if num_members == 0:
        return []
    min_groups = -(-num_members // protocol.max_participants)
    num_groups = max(1, num_members // group_size, min_groups)
    smallest_group = num_members // num_groups
    if num_groups > 1 and smallest_group < protocol.min_participants:
        raise ValueError(
            f"A cohort of {num_members} cannot be split into groups of "
            f"{protocol.min_participants} (min_participants) to "
            f"{protocol.max_participants} (max_participants) members."
        )
    return [
        tuple(int(index) for index in indices)
        for indices in np.array_split(np.arange(num_members), num_groups)
    ]


def sum_in_groups(
    updates: Sequence[np.ndarray] | Callable[[int], np.ndarray],
    protocol: additive_sharing.AdditiveSecretSharing,
    group_size: int | None = None,
    *,
    num_members: int | None = None,
    keep_group_sums: bool = True,
) -> GroupedSum:
    """Sums a cohort's updates through the protocol, group by group.

    Every member's update is encoded and split by the protocol, in this process, and
    the shares are added up. If each update already carries its client's share of the
    noise, nobody, not even the server, ever holds a sum without noise.

    Each group's sum is seen by its members and by the server. With noise of stddev s
    per update, the sum of a group of g has noise of stddev s sqrt(g), less than the
    cohort's s sqrt(m).

    Shares are made one by one and added up at once, so the memory is that of a few
    updates, whatever the size of a group.

    Args:
      updates: The cohort's updates, float vectors [D]; or a callable that returns the
        update at an index. It is called once for each, group after group.
      protocol: The configuration that all members share.
      group_size: The intended number of clients in a group; None: `min_participants`.
      num_members: The number of updates, if `updates` is a callable.
      keep_group_sums: Whether the result also has each group's sum.

    Returns:
      The groups, their sums and the total. A cohort below `min_participants` fails as a
      whole.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: An update cannot be shared (the message names the member, the value
        and its index), or the cohort cannot be split.
    """
    if callable(updates):
        get_update, count = updates, cast(int, num_members)
    else:
        _validate.instance_of((Sequence, np.ndarray), updates=updates)
        get_update, count = updates.__getitem__, len(updates)
    groups, total = [], cast("np.ndarray | None", None)
    for indices in split_into_groups(count, protocol, group_size):
        outcome = _sum_group(indices, get_update, protocol)
        if outcome.succeeded:
            value = cast(np.ndarray, outcome.value)
            total = value if total is None else total + value
        if not keep_group_sums:
            outcome = dataclasses.replace(outcome, value=None)
        groups.append((indices, outcome))
    failed = [indices for indices, outcome in groups if not outcome.succeeded]
    return GroupedSum(
        tuple(groups),
        total=total,
        failed_members=tuple(itertools.chain.from_iterable(failed)),
    )


def _sum_group(
    indices: tuple[int, ...],
    get_update: Callable[[int], np.ndarray],
    protocol: additive_sharing.AdditiveSecretSharing,
) -> member.AggregationOutcome:
    """Adds up the shares of one group's members in this process."""
    if len(indices) < protocol.min_participants:
        min_size = protocol.min_participants
        reason = f"a cohort of {len(indices)} is below min_participants={min_size}"
        return member.AggregationOutcome(False, None, indices, reason)
    protocol.check_group_size(len(indices))
    total: np.ndarray | None = None
    for index in indices:
        update = np.asarray(get_update(index))
        encoded = protocol.encode(update, f"tensor 0 of member {index!r}")
        total = np.zeros_like(encoded) if total is None else total
        if encoded.shape != total.shape:  # NumPy would broadcast it.
            raise ValueError(
                f"updates must all have the shape {total.shape}, got {encoded.shape} "
                f"of member {index!r}."
            )
        for share in protocol.shares(encoded, len(indices)):
            total += share
    return member.AggregationOutcome(
        True, protocol.decode(cast(np.ndarray, total)), indices
    )
