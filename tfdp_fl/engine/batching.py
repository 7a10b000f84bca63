"""Which rows of the data every local training step reads.

A cohort's local training is laid out as tables of row numbers before the round
starts, without a Python loop over clients, so that the compiled engine only
has to gather.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The steps of a group of clients, one client after the other.

    Attributes:
      rows: Int32 [S, B], the row numbers of each step's batch. A short batch
        is filled up by repeating a row of its own client.
      batch_sizes: Int32 [S], how many of the B rows count.
      first_step: Int32 [K + 1]; client k takes the steps from `first_step[k]`
        up to `first_step[k + 1]`.
      members: Int32 [K], each client's place in the cohort.
      num_examples: Int32 [K], each client's number of examples.
    """

    rows: np.ndarray
    batch_sizes: np.ndarray
    first_step: np.ndarray
    members: np.ndarray
    num_examples: np.ndarray

    @property
    def num_clients(self) -> int:
        """Returns K."""
        return len(self.members)

    @property
    def has_short_batches(self) -> bool:
        """Returns True if some step has fewer than B rows."""
        return bool((self.batch_sizes != self.rows.shape[1]).any())


def steps_per_client(
    lengths: np.ndarray, batch_size: int, local_epochs: int
) -> np.ndarray:
    """Returns how many local steps clients of the given sizes take."""
    return -(-lengths // batch_size) * local_epochs


def share_out(work: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """Shares clients among groups so that the groups end at the same time.

    The largest clients come first, and each goes to the group with the least
    work so far (Graham's longest-processing-time rule).

    Args:
      work: Int array [K], the steps of each client.
      num_groups: How many groups.

    Returns:
      For each group the clients' places, in the order of training.
    """
    order = np.argsort(-work, kind="stable")
    if len(work) == 0 or num_groups == 1 or work[order[0]] == work[order[-1]]:
        return [order[group::num_groups] for group in range(num_groups)]
    heap = [(0, group) for group in range(num_groups)]
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    for place, steps in zip(order.tolist(), work[order].tolist(), strict=True):
        load, group = heap[0]
        groups[group].append(place)
        heapq.heapreplace(heap, (load + steps, group))
    return [np.asarray(group, np.int64) for group in groups]


def make_plan(
    rows: np.ndarray,
    lengths: np.ndarray,
    batch_size: int,
    local_epochs: int,
    generator: np.random.Generator | None = None,
) -> BatchPlan:
    """Lays out the local training of a group of clients.

    Every epoch runs over a client's examples once; its last batch may be
    short. A client without examples takes no step.

    Args:
      rows: Int array, the row numbers of all clients, one client after the
        other.
      lengths: Int array [K], how many of them each client has.
      batch_size: B.
      local_epochs: How often each client goes over its examples.
      generator: Shuffles each client's examples anew for every epoch; None
        keeps the order given.

    Returns:
      A `BatchPlan` with the clients in the order given.
    """
    lengths = np.asarray(lengths, np.int64)
    num_clients = len(lengths)
    if generator is None and num_clients:
        size = int(lengths[0])
        if size and size % batch_size == 0 and (lengths == size).all():
            return _even_plan(
                np.asarray(rows, np.int32), lengths, batch_size, local_epochs
            )
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # One pass is one client's epoch; passes are ordered by client, then epoch.
    pass_client = np.repeat(np.arange(num_clients), local_epochs)
    pass_length = lengths[pass_client]
    if generator is None:
        pass_start = offsets[pass_client]
        ordered = np.asarray(rows, np.int32)
    else:
        pass_start = np.concatenate([[0], np.cumsum(pass_length)])[:-1]
        pass_of = np.repeat(np.arange(len(pass_client)), pass_length)
        within = np.arange(len(pass_of)) - pass_start[pass_of]
        source = offsets[pass_client[pass_of]] + within
        shuffled = np.argsort(pass_of + generator.random(len(pass_of)))
        ordered = np.asarray(rows, np.int32)[source[shuffled]]
    pass_steps = -(-pass_length // batch_size)
    step_pass = np.repeat(np.arange(len(pass_client)), pass_steps)
    first_of_pass = np.concatenate([[0], np.cumsum(pass_steps)])
    batch_in_pass = np.arange(len(step_pass)) - first_of_pass[step_pass]
    start = pass_start[step_pass] + batch_in_pass * batch_size
    end = pass_start[step_pass] + pass_length[step_pass]
    batch_sizes = np.minimum(batch_size, end - start)
    index = np.minimum(
        start[:, None] + np.arange(batch_size)[None, :], end[:, None] - 1
    )
    steps = steps_per_client(lengths, batch_size, local_epochs)
    return BatchPlan(
        rows=ordered[index]
        if len(ordered)
        else np.zeros((0, batch_size), np.int32),
        batch_sizes=batch_sizes.astype(np.int32),
        first_step=np.concatenate([[0], np.cumsum(steps)]).astype(np.int32),
        members=np.arange(num_clients, dtype=np.int32),
        num_examples=lengths.astype(np.int32),
    )


def _even_plan(
    rows: np.ndarray, lengths: np.ndarray, batch_size: int, local_epochs: int
) -> BatchPlan:
    """Lays out equally large clients in their order, without short batches."""
    num_clients = len(lengths)
    batches = rows.reshape(num_clients, -1, batch_size)
    steps = batches.shape[1] * local_epochs
    if local_epochs > 1:
        batches = np.tile(batches, (1, local_epochs, 1))
    return BatchPlan(
        rows=batches.reshape(-1, batch_size),
        batch_sizes=np.full(num_clients * steps, batch_size, np.int32),
        first_step=np.arange(num_clients + 1, dtype=np.int32) * steps,
        members=np.arange(num_clients, dtype=np.int32),
        num_examples=lengths.astype(np.int32),
    )


def select(plan: BatchPlan, group: np.ndarray) -> BatchPlan:
    """Returns the plan of some of a plan's clients, in the order given."""
    if len(group) == plan.num_clients and (np.diff(group) > 0).all():
        return plan
    first = plan.first_step[group]
    counts = plan.first_step[group + 1] - first
    ends = np.cumsum(counts)
    steps = np.repeat(first - (ends - counts), counts) + np.arange(counts.sum())
    return BatchPlan(
        rows=plan.rows[steps],
        batch_sizes=plan.batch_sizes[steps],
        first_step=np.concatenate([[0], ends]).astype(np.int32),
        members=plan.members[group],
        num_examples=plan.num_examples[group],
    )


def padded_length(length: int) -> int:
    """Returns the next length of a short ladder: 2^k or 3 * 2^(k-1).

    Code that is compiled for fixed shapes sees only the rungs, so that cohorts
    of changing size do not compile again and again.
    """
    rung = 4
    while rung < length:
        if rung + rung // 2 >= length:
            return rung + rung // 2
        rung *= 2
    return rung


def pad_plan(plan: BatchPlan) -> BatchPlan:
    """Pads a plan's arrays to ladder lengths; `first_step` ends the loops."""

    def pad(array: np.ndarray, length: int) -> np.ndarray:
        width = [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1)
        return np.pad(array, width)

    steps = padded_length(len(plan.rows))
    clients = padded_length(plan.num_clients)
    last = plan.first_step[-1]
    return BatchPlan(
        rows=pad(plan.rows, steps),
        batch_sizes=pad(plan.batch_sizes, steps),
        first_step=np.pad(
            plan.first_step,
            (0, clients - plan.num_clients),
            constant_values=last,
        ),
        members=pad(plan.members, clients),
        num_examples=pad(plan.num_examples, clients),
    )
