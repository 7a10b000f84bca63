"""Which rows of the data every local training step reads.

A cohort's local training is laid out as tables of row numbers before the round
starts, without a Python loop over clients, so that the compiled functions only
have to gather. A table's fields are NumPy arrays here, and tensors in there.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import nests
from tfdp_fl.mechanisms import ClientWeighting, client_weighting


class ClientTable(NamedTuple):
    """The steps of a group of clients, one client after the other.

    Attributes:
      rows: Int32 [S, B], the row numbers of each step's batch. A short batch
        is filled up by repeating a row of its own client.
      batch_sizes: Int32 [S], how many of the B rows count.
      first_step: Int32 [K + 1]; client k takes the steps from `first_step[k]`
        up to `first_step[k + 1]`.
      members: Int32 [K], each client's place in the cohort.
      num_examples: Int32 [K], each client's number of examples.
      windows: Float32 [K, W, L], the norms of each client's last rounds, NaN
        where there are none; [K, 0, 0] if the mechanism keeps none.
      measured: Float32 [K], what each client's weight follows from (see
        `measured`); () where all count the same.
    """

    rows: Any
    batch_sizes: Any
    first_step: Any
    members: Any
    num_examples: Any
    windows: Any
    measured: Any = ()

    @property
    def num_clients(self) -> int:
        """Returns K."""
        return len(self.members)

    @property
    def steps(self) -> np.ndarray:
        """Returns how many steps each client takes, [K]."""
        return np.diff(self.first_step)

    @property
    def has_short_batches(self) -> bool:
        """Returns True if some step has fewer than B rows."""
        return bool((self.batch_sizes != self.rows.shape[1]).any())


class SideBySideTable(NamedTuple):
    """The batches of K clients that take their steps together.

    Attributes:
      rows: Int32 [S, K, B], the row numbers of each step's batch.
      sizes: Int32 [S, K], how many of the B rows count; 0 for a client that
        has no such step.
      measured: See `ClientTable`.
    """

    rows: Any
    sizes: Any
    measured: Any = ()


class BatchedTable(NamedTuple):
    """The batches of K clients that train at once, as one batched program.

    Their last batches are equally long. Clients of fewer steps than others begin
    later in each epoch, so that all of them end it together.

    Attributes:
      rows: Int32 [S, K, B], the row numbers of each step's batch.
      sizes: Int32 [S], how many of the B rows count.
      active: Bool [S, K], whether the client takes that step.
      members: See `ClientTable`, and so for the others.
    """

    rows: Any
    sizes: Any
    active: Any
    members: Any
    num_examples: Any
    windows: Any
    measured: Any = ()


def measured(
    weighting: ClientWeighting | None, lengths: np.ndarray, rows: Any, y: Any
) -> Any:
    """Returns what clients have of that by which they count.

    Each client's from its own rows alone: a NaN of one is nobody else's.

    Args:
      weighting: What clients count; None: all the same.
      lengths: Int [K], how many examples each has.
      rows: Int [sum of lengths], the rows of these examples.
      y: Nest of labels, perhaps with weights beside them.

    Returns:
      Float32 [K]; () where all count the same.
    """
    if weighting is None:
        return ()
    if weighting.measure == client_weighting.NUM_EXAMPLES:
        return np.asarray(lengths, np.float32)
    (weights,) = map(nests.view, tf.nest.flatten(nests.weights_of(y)))
    weights = weights.reshape(-1)[rows].astype(np.float64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.bincount(owner, weights, minlength=len(lengths))
        return sums.astype(np.float32)


def steps_per_client(
    lengths: np.ndarray, batch_size: int, local_epochs: int
) -> np.ndarray:
    """Returns how many local steps clients of the given sizes take."""
    return -(-lengths // batch_size) * local_epochs


def client_table(
    rows: np.ndarray,
    lengths: np.ndarray,
    batch_size: int,
    local_epochs: int,
    generator: np.random.Generator | None = None,
) -> ClientTable:
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
      A `ClientTable` with the clients in the order given, without windows.
    """
    lengths = np.asarray(lengths, np.int64)
    num_clients = len(lengths)
    if generator is None and num_clients:
        size = int(lengths[0])
        if size and size % batch_size == 0 and (lengths == size).all():
            return _even_table(
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
    return ClientTable(
        rows=ordered[index] if len(ordered) else np.zeros((0, batch_size), np.int32),
        batch_sizes=batch_sizes.astype(np.int32),
        first_step=np.concatenate([[0], np.cumsum(steps)]).astype(np.int32),
        members=np.arange(num_clients, dtype=np.int32),
        num_examples=lengths.astype(np.int32),
        windows=np.zeros([num_clients, 0, 0], np.float32),
    )


def _even_table(
    rows: np.ndarray, lengths: np.ndarray, batch_size: int, local_epochs: int
) -> ClientTable:
    """Lays out equally large clients in their order, without short batches."""
    num_clients = len(lengths)
    batches = rows.reshape(num_clients, -1, batch_size)
    steps = batches.shape[1] * local_epochs
    if local_epochs > 1:
        batches = np.tile(batches, (1, local_epochs, 1))
    return ClientTable(
        rows=batches.reshape(-1, batch_size),
        batch_sizes=np.full(num_clients * steps, batch_size, np.int32),
        first_step=np.arange(num_clients + 1, dtype=np.int32) * steps,
        members=np.arange(num_clients, dtype=np.int32),
        num_examples=lengths.astype(np.int32),
        windows=np.zeros([num_clients, 0, 0], np.float32),
    )


def share_out(work: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """Shares clients among groups so that the groups end at the same time.

    The largest clients come first, and each goes to the group with the least
    work so far (Graham's longest-processing-time rule).

    Args:
      work: Int array [K], the steps of each client.
      num_groups: How many groups. A single one keeps the order given.

    Returns:
      For each group the clients' places, in the order of training.
    """
    if num_groups == 1:
        return [np.arange(len(work))]
    order = np.argsort(-work, kind="stable")
    if len(work) == 0 or work[order[0]] == work[order[-1]]:
        return [order[group::num_groups] for group in range(num_groups)]
    heap = [(0, group) for group in range(num_groups)]
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    for place, steps in zip(order.tolist(), work[order].tolist(), strict=True):
        load, group = heap[0]
        groups[group].append(place)
        heapq.heapreplace(heap, (load + steps, group))
    return [np.asarray(group, np.int64) for group in groups]


def split(
    table: ClientTable, num_groups: int, at_most: int | None = None
) -> list[list[ClientTable]]:
    """Shares a table's clients out, see `share_out`.

    Args:
      table: The clients.
      num_groups: How many groups; those of nobody are left out, but for one.
      at_most: How many clients a table may have; None: any number. No few of them
        are left for the last table.

    Returns:
      For each group the tables that come one after the other, at least one.
    """
    if num_groups == 1 and at_most is None:
        return [[table]]
    groups = share_out(table.steps, num_groups)
    found = []
    for group in [each for each in groups if len(each)] or groups[:1]:
        length = max(1, len(group))
        step = math.ceil(length / math.ceil(length / (at_most or length)))
        found.append(
            [
                select(table, group[start : start + step])
                for start in range(0, length, step)
            ]
        )
    return found


def select(table: ClientTable, group: np.ndarray) -> ClientTable:
    """Returns the table of some of a table's clients, in the order given."""
    if len(group) == table.num_clients and (np.diff(group) > 0).all():
        return table
    first = table.first_step[group]
    counts = table.first_step[group + 1] - first
    ends = np.cumsum(counts)
    steps = np.repeat(first - (ends - counts), counts) + np.arange(counts.sum())
    return ClientTable(
        rows=table.rows[steps],
        batch_sizes=table.batch_sizes[steps],
        first_step=np.concatenate([[0], ends]).astype(np.int32),
        members=table.members[group],
        num_examples=table.num_examples[group],
        windows=table.windows[group],
        measured=() if isinstance(table.measured, tuple) else table.measured[group],
    )


def side_by_side(table: ClientTable, num_steps: int) -> SideBySideTable:
    """Lays out a table's clients side by side.

    Args:
      table: The clients.
      num_steps: S, at least the most that a client takes.
    """
    steps = table.steps
    if table.num_clients and num_steps and (steps == num_steps).all():
        # As it lies.
        shape = [table.num_clients, num_steps, table.rows.shape[1]]
        return SideBySideTable(
            np.ascontiguousarray(table.rows.reshape(shape).swapaxes(0, 1)),
            np.ascontiguousarray(table.batch_sizes.reshape(shape[:2]).T),
            table.measured,
        )
    step = np.arange(num_steps)[:, None]
    active = step < steps[None, :]
    index = np.where(active, table.first_step[None, :-1] + step, 0)
    if not len(table.rows):
        shape = [num_steps, table.num_clients]
        return SideBySideTable(
            np.zeros([*shape, table.rows.shape[1]], np.int32),
            np.zeros(shape, np.int32),
            table.measured,
        )
    return SideBySideTable(
        table.rows[index],
        np.where(active, table.batch_sizes[index], 0),
        table.measured,
    )


def batched(
    table: ClientTable, local_epochs: int, at_most: int
) -> list[tuple[ClientTable, BatchedTable]]:
    """Lays a table's clients out for training at once.

    Args:
      table: The clients.
      local_epochs: How often each goes over its examples.
      at_most: How many clients train at once.

    Returns:
      Groups of them, at least one: each as it was, and laid out.
    """
    steps = table.steps
    ends = np.maximum(table.first_step[1:] - 1, 0)
    last = np.zeros(len(steps), np.int64)
    if len(table.rows):
        last = np.where(steps > 0, table.batch_sizes[ends], 0)
    # Alike in their steps, they wait for each other least.
    order = np.lexsort((steps, last))
    (borders,) = np.nonzero(np.diff(last[order]))
    groups = [
        group[start : start + at_most]
        for group in np.split(order, borders + 1)
        for start in range(0, max(1, len(group)), at_most)
    ]
    clients = [select(table, group) for group in groups]
    return [(each, _batched(each, local_epochs)) for each in clients]


def _batched(table: ClientTable, local_epochs: int) -> BatchedTable:
    per_epoch = table.steps // local_epochs
    longest = int(per_epoch.max(initial=0))
    place = np.arange(longest)[:, None] - (longest - per_epoch)
    epoch = np.arange(local_epochs)[:, None, None] * per_epoch
    shape = (local_epochs * longest, table.num_clients)
    step = (table.first_step[:-1] + epoch + np.maximum(place, 0)).reshape(shape)
    active = np.tile(place >= 0, (local_epochs, 1))
    # Idle, a client without any step would point beyond the last one.
    step = np.minimum(step, len(table.rows) - 1)
    sizes = np.zeros(len(step), np.int32)
    if len(step):
        # Of a step the active clients' batches are equally long.
        found = np.where(active, table.batch_sizes[step], 0)
        sizes = found.max(axis=1).astype(np.int32)
    return BatchedTable(
        rows=table.rows[step],
        sizes=sizes,
        active=active,
        members=table.members,
        num_examples=table.num_examples,
        windows=table.windows,
        measured=table.measured,
    )


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not less, and at least 1."""
    return 1 << max(0, number - 1).bit_length()


def padded(table: ClientTable) -> ClientTable:
    """Pads clients and steps to powers of two; `first_step` ends the loops."""
    clients, steps = power_of_two(table.num_clients), power_of_two(len(table.rows))

    def pad(array: np.ndarray, length: int, value: Any = 0) -> np.ndarray:
        width = [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1)
        return np.pad(array, width, constant_values=value)

    return ClientTable(
        rows=pad(table.rows, steps),
        batch_sizes=pad(table.batch_sizes, steps),
        first_step=pad(table.first_step, clients + 1, table.first_step[-1]),
        members=pad(table.members, clients),
        num_examples=pad(table.num_examples, clients),
        windows=pad(table.windows, clients, np.nan),
        measured=()
        if isinstance(table.measured, tuple)
        else pad(table.measured, clients),
    )
