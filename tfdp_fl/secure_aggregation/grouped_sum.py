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
      groups: for each group the indices of its members in the cohort, and its
        outcome: `value` is the group's sum, float64 [D], or None if the group
        failed, and its members then keep their own updates.
      total: the sum over the groups that succeeded, float64 [D]; None if none
        did.
      failed_members: the indices of all members of groups that failed.
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
    """Returns of which cohort sizes, int [n], `sum_in_groups` has a sum: bool [n]."""
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
      num_members: the size of the cohort.
      protocol: its limits hold for every group.
      group_size: the size aimed at; None means `min_participants`. A remainder
        is spread over the groups, which have fewer than twice as many members;
        a cohort below `group_size` is one group.

    Returns:
      The members' indices, group by group, in order. An empty list for an
      empty cohort; a single group that is too small for a cohort below
      `min_participants`, which can not aggregate at all.

    Raises:
      ValueError: if `group_size` is outside the protocol's limits, or no
        number of groups keeps every one of them within the limits.
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
            f"A cohort of {num_members} can not be split into groups of "
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
    noise, nobody, the server included, ever holds a sum without noise.

    Each group's sum is seen by its members, and by the server: with noise of
    stddev s per update a group of g shows noise of stddev s sqrt(g), less
    than the cohort's s sqrt(m).

    Memory: a few times an update, whatever the size of a group: shares are made one
    by one, and added up as they come.

    Args:
      updates: the cohort's updates, float vectors [D]; or a callable that
        makes the one at an index, called once for each, group after group.
      protocol: the configuration that all members share.
      group_size: How many clients a group should have.
      num_members: how many there are, if `updates` is a callable.
      keep_group_sums: whether each group's sum is in the result, beside the total.

    Returns:
      The groups, their sums and the total. A cohort below `min_participants`
      fails whole.

    Raises:
      TypeError: if an argument is of another type.
      ValueError: if an update can not be shared (the member, the value and
        its index are named), or the cohort can not be split.
    """
    if callable(updates):
        update_of, count = updates, cast(int, num_members)
    else:
        _validate.instance_of((Sequence, np.ndarray), updates=updates)
        update_of, count = updates.__getitem__, len(updates)
    groups, total = [], cast("np.ndarray | None", None)
    for indices in split_into_groups(count, protocol, group_size):
        outcome = _sum_group(indices, update_of, protocol)
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
    update_of: Callable[[int], np.ndarray],
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
        update = np.asarray(update_of(index))
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
