"""Reading a cohort, and how its clients train: on which rows, by which program.

A cohort is read in chunks of bounded size; while one trains, a background thread
reads the next. A chunk has a `ClientTable`, which says which rows clients train on.
It is made without a Python loop over clients, so that the compiled programs only
have to gather.

Which program trains a client, and in which shapes, is chosen by the client's own
number of examples and by public facts (the model, the batch size, the machine), never
by who else is there: what a client adds is then the same, bit for bit, alone or among
any others. `Layout` decides it; only *when* and on which thread a client trains
depends on all of them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.engine import cohort, dense_models, labels

# How much of a streamed cohort's data, or of updates that wait for a joint
# clip, is held by one call of a compiled function.
CHUNK_BYTES = 64 * 2**20

# One client after the other; dense models without a model for each client
# (`side_by_side`); all of a chunk as one batched program, for a GPU.
ONE_BY_ONE, SIDE_BY_SIDE, BATCHED = "one by one", "side by side", "batched"


# Of NumPy outside of the compiled programs, and TensorFlow's inside.
_Array: TypeAlias = np.ndarray | tf.Tensor


class ClientTable(NamedTuple):
    """A group of clients, and the rows that they train on.

    Client k passes over its n_k examples `epochs` times. The rows of all its
    passes stand one after the other in `rows`, from `first_row[k]` on. A pass
    takes the next B rows for each step; its last step takes what is left. The
    fields are NumPy arrays here, and tensors in the compiled programs.

    Attributes:
      rows: Int32 [R], row numbers of stored examples.
      batch: Int32 [B], from 0 to B - 1: the places in a batch.
      epochs: Int32 scalar.
      num_clients: Int32 scalar, K. What is padded has more of all that follows.
      first_row: Int32 [K].
      num_examples: Int32 [K], n_k.
      members: Int32 [K], each client's place in the cohort.
      keys: Int64 [K], each client's own number, from which its random numbers
        follow together with the round's seed: its position in the dataset.
      windows: Float32 [K, W, L], the norms of each client's last rounds, NaN
        where there are none; [K, 0, 0] if the mechanism keeps none.
    """

    rows: _Array
    batch: _Array
    epochs: _Array
    num_clients: _Array
    first_row: _Array
    num_examples: _Array
    members: _Array
    keys: _Array
    windows: _Array

    @property
    def steps(self) -> np.ndarray:
        """Returns how many steps each client takes, [K]."""
        return -(-self.num_examples // len(self.batch)) * self.epochs

    def map_clients(self, change: Callable[[_Array], _Array]) -> ClientTable:
        """Returns a table with a function called on the arrays that have K rows."""
        names = self._fields[self._fields.index("first_row") :]
        arrays = tuple(getattr(self, name) for name in names)
        return self._replace(**dict(zip(names, map(change, arrays), strict=True)))


def client_table(
    rows: np.ndarray,
    lengths: np.ndarray,
    batch_size: int,
    local_epochs: int,
    keys: list[np.random.Philox] | None = None,
) -> ClientTable:
    """Lays out the local training of a group of clients, without windows.

    Args:
      rows: Int array, the row numbers of all clients, one client after the
        other.
      lengths: Int array [K], how many of them each client has.
      batch_size: Examples in a batch, B.
      local_epochs: How often each client goes over its examples.
      keys: One for each client, by which its examples are shuffled anew for every
        epoch; None keeps the order given.
    """
    lengths = np.asarray(lengths, np.int64)
    rows = np.asarray(rows, np.int32)
    first = np.cumsum(lengths) - lengths
    if local_epochs > 1 or keys is not None:
        starts, passes = np.repeat([first, lengths], local_epochs, axis=1)
        places = _ranges(starts, passes)
        if keys is not None:
            # Each client by itself: one sort of all would round the draws, and order
            # equal ones, by who else is there.
            orders = [
                np.random.Generator(key).random((local_epochs, length)).argsort(axis=1)
                for key, length in zip(keys, lengths.tolist(), strict=True)
            ]
            within = np.concatenate([np.zeros(0, int), *map(np.ravel, orders)])
            places = np.repeat(starts, passes) + within
        rows = rows[places]
    return ClientTable(
        rows=rows,
        batch=np.arange(batch_size, dtype=np.int32),
        epochs=np.int32(local_epochs),
        num_clients=np.int32(len(lengths)),
        first_row=(first * local_epochs).astype(np.int32),
        num_examples=lengths.astype(np.int32),
        members=np.arange(len(lengths), dtype=np.int32),
        keys=np.arange(len(lengths), dtype=np.int64),
        windows=np.zeros([len(lengths), 0, 0], np.float32),
    )


def _ranges(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns `lengths[0]` numbers from `first[0]` on, and so for all others."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(first - before, lengths) + np.arange(lengths.sum())


def select(table: ClientTable, places: np.ndarray) -> ClientTable:
    """Returns the table of some of a table's clients, in the order given."""
    if len(places) == len(table.members) and (np.diff(places) > 0).all():
        return table
    some = table.map_clients(lambda array: array[places])
    lengths = some.num_examples.astype(np.int64) * table.epochs
    return some._replace(
        rows=table.rows[_ranges(some.first_row, lengths)],
        first_row=(np.cumsum(lengths) - lengths).astype(np.int32),
        num_clients=np.int32(len(places)),
    )


def pad_to(table: ClientTable, width: int) -> ClientTable:
    """Pads a table with clients that have no examples; `num_clients` stays."""

    def pad(array: np.ndarray) -> np.ndarray:
        padded = np.zeros([width, *array.shape[1:]], array.dtype)
        padded[: len(array)] = array
        return padded

    return table.map_clients(pad)


class Strategy(NamedTuple):
    """Which compiled program trains clients.

    Attributes:
      kind: `ONE_BY_ONE`, `SIDE_BY_SIDE` or `BATCHED`.
      num_steps: Side by side, how many steps there are: a rung of
        `dense_models.RUNGS`.
      fine: Side by side, whether records are rounded as finely as float64 sums
        allow, and not as int32 ones do.
      xla: Whether XLA compiles it: one client in each call, of full batches only.
    """

    kind: str
    num_steps: int = 0
    fine: bool = True
    xla: bool = False


class Part(NamedTuple):
    """Some clients of a chunk that one call of a compiled program trains."""

    strategy: Strategy
    table: ClientTable

    @property
    def members(self) -> np.ndarray:
        """Returns the clients' places in the cohort, without padding."""
        return self.table.members[: self.table.num_clients]


class Chunk(NamedTuple):
    """Some clients of a cohort, and the tensors that hold their examples.

    Attributes:
      x: Nest of feature tensors, leading dimension over stored examples.
      y: Nest of label tensors, likewise.
      table: The clients.
    """

    x: nests.Nest
    y: nests.Nest
    table: ClientTable


# A client that was read: its place in the cohort, and its tensors, flattened.
_Client = tuple[int, list[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How the cohorts of an engine are read and laid out.

    Attributes:
      element_spec: `(features, labels)` specs of one example.
      label_ranges: What class labels may be.
      kernels: Those of a model that can train side by side; None for any other.
      collected_bytes: What a client's update takes where each is kept; None
        where they are summed at once.
      xla: Whether XLA compiles the training of clients one by one. Never by itself: it
        compiles up to four programs (see `gather`), which takes longer than the
        first hundred rounds of a small model gain. To compile beside those rounds
        would let the machine's speed choose a client's bits.
      at_once: How many clients train as one batched program; None: none do.
      fits: Whether a side-by-side program, by its strategy and the examples in a
        batch, may have so many clients (of `dense_models.widths`): whether here no
        client's result depends on which of these numbers it is.
    """

    element_spec: nests.ElementSpec
    label_ranges: list[labels.LabelRange] = dataclasses.field(default_factory=list)
    kernels: dense_models.Kernels | None = None
    collected_bytes: int | None = None
    xla: bool = False
    at_once: int | None = None
    fits: Callable[[Strategy, int, int], bool] = lambda strategy, batch, width: True

    def read(
        self, dataset: FederatedDataset, pending: cohort.PendingRound
    ) -> Iterator[Chunk]:
        """Yields the data of a round's cohort, at least one chunk.

        A client that cannot be read, or with labels that are not allowed, failed.

        Args:
          dataset: Where the examples come from.
          pending: The round; clients that failed are added to its failures.
        """
        if dataset.is_indexed:
            x, y = stored_examples(dataset)
            positions = pending.inputs.positions
            pending.failures += dataset.failures(positions)
            failed = [failure.position for failure in pending.failures]
            members = np.flatnonzero(~np.isin(positions, failed))
            rows, lengths = dataset.client_rows(positions[members])
            yield Chunk(x, y, _table(pending.inputs, members, lengths, rows))
            return
        read = self._read_chunks(dataset, pending)
        with concurrent.futures.ThreadPoolExecutor(1) as reading:
            coming = reading.submit(next, read, None)
            while (chunk := coming.result()) is not None:
                coming = reading.submit(next, read, None)
                yield chunk
        # Labels are looked at when the clients after them were read.
        pending.failures.sort(key=lambda failure: failure.position)

    def _read_chunks(
        self, dataset: FederatedDataset, pending: cohort.PendingRound
    ) -> Iterator[Chunk]:
        """Yields clients whose examples fit into one chunk; at least one chunk."""
        positions = pending.inputs.positions
        held: list[_Client] = []
        num_bytes, sent = 0, False
        for member, client in enumerate(dataset.read_clients(positions)):
            if not isinstance(client, ClientFailure):
                leaves = tf.nest.flatten(client.y)
                wrong = labels.describe_problem(leaves, self.label_ranges)
                if wrong:
                    error = nests.ExamplesValueError(f"{wrong}.")
                    client = ClientFailure(int(positions[member]), error)
            if isinstance(client, ClientFailure):
                pending.failures.append(client)
                continue
            if held and num_bytes >= CHUNK_BYTES:
                yield self._chunk(pending.inputs, held)
                held, num_bytes, sent = [], 0, True
            arrays = tf.nest.flatten((client.x, client.y))
            held.append((member, arrays))
            num_bytes += sum(array.nbytes for array in arrays)
        if held or not sent:
            yield self._chunk(pending.inputs, held)

    def _chunk(self, inputs: cohort.RoundInputs, clients: list[_Client]) -> Chunk:
        """Returns a chunk of clients, perhaps of none."""
        lengths = np.array([len(arrays[-1]) for _, arrays in clients], np.int64)
        total = int(lengths.sum())
        # At least one row: see `stored_examples`.
        num_rows = max(1, total)
        tensors = []
        for place, spec in enumerate(tf.nest.flatten(self.element_spec)):
            if not total:
                tensors.append(tf.zeros([num_rows, *spec.shape], spec.dtype))
                continue
            leaves = [arrays[place] for _, arrays in clients]
            rest = np.zeros([num_rows - total, *leaves[0].shape[1:]], leaves[0].dtype)
            tensors.append(tf.constant(np.concatenate([*leaves, rest]), spec.dtype))
        x, y = tf.nest.pack_sequence_as(self.element_spec, tensors)
        members = np.array([member for member, _ in clients], np.int64)
        table = _table(inputs, members, lengths, np.arange(total))
        return Chunk(x, y, table)

    def lay_out(
        self, clients: ClientTable, num_groups: int, fine: bool = True
    ) -> list[list[Part]]:
        """Shares a chunk's clients out.

        Args:
          clients: The clients.
          num_groups: How many groups may train at the same time. One does
            where another thread, or worker, would cost more than it saves.
          fine: See `Strategy`.

        Returns:
          At most so many groups, at least one. The parts of a group come one
          after the other: each is bounded in the memory that it takes.
        """
        if self.at_once is not None:
            return [self.batches(clients)]
        rungs = self.rungs(clients, fine)
        work = [
            (part.strategy.num_steps * len(part.table.members) / 2, part)
            for rung in np.unique(rungs[rungs > 0]).tolist()
            for part in self._side_by_side(
                select(clients, np.flatnonzero(rungs == rung)), rung, num_groups, fine
            )
        ]
        alone = select(clients, np.flatnonzero(rungs == 0))
        groups: list[list[Part]] = [[] for _ in range(num_groups)]
        loads = [0.0] * num_groups
        for cost, part in sorted(work, key=lambda item: -item[0]):
            least = int(np.argmin(loads))
            groups[least].append(part)
            loads[least] += cost
        if alone.num_clients or not work:
            shares = split(alone, num_groups, self._most_collected, loads)
            for group, tables in zip(groups, shares, strict=True):
                for table in tables:
                    group += self.one_by_one(table)
        return [group for group in groups if group] or groups[:1]

    def strategies(self, batch: int, fine: bool) -> list[Strategy]:
        """Returns the strategies of all parts that `lay_out` may make for any cohort.

        Args:
          batch: B, the examples of a step.
          fine: See `Strategy`.
        """
        if self.at_once is not None:
            return [Strategy(BATCHED)]
        found = [Strategy(ONE_BY_ONE)]
        if self.xla:
            found.append(Strategy(ONE_BY_ONE, xla=True))
        if self.kernels is not None:
            found += [
                Strategy(SIDE_BY_SIDE, rung, fine)
                for rung in dense_models.worthwhile_rungs(self.kernels, batch)
                if dense_models.widths(self.kernels, rung, batch)
            ]
        return found

    def rungs(self, clients: ClientTable, fine: bool = True) -> np.ndarray:
        """Returns how many steps a side-by-side program has for clients, int [K].

        0 for clients that train one by one. Each number depends on that client's
        own examples alone.
        """
        if self.kernels is None:
            return np.zeros(len(clients.members), np.int64)
        batch = len(clients.batch)
        rungs = dense_models.rungs_of(self.kernels, clients.steps, batch)
        for rung in np.unique(rungs[rungs > 0]).tolist():
            smallest = dense_models.widths(self.kernels, rung, batch)[:1]
            strategy = Strategy(SIDE_BY_SIDE, rung, fine)
            if not (smallest and self.fits(strategy, batch, *smallest)):
                rungs[rungs == rung] = 0
        return rungs

    def _side_by_side(
        self, clients: ClientTable, rung: int, num_groups: int, fine: bool
    ) -> list[Part]:
        """Returns the parts in which clients of one rung train side by side."""
        strategy = Strategy(SIDE_BY_SIDE, rung, fine)
        batch, count = len(clients.batch), int(clients.num_clients)
        wanted = num_groups
        if dense_models.is_small(self.kernels or (), count * rung * batch):
            wanted = 1
        possible = dense_models.widths(self.kernels or (), rung, batch)
        tables = max(1, min(wanted, count // possible[0]), -(-count // possible[-1]))
        while True:
            places = np.array_split(np.arange(count), tables)
            if all(next(self._widths(strategy, batch, len(p)), 0) for p in places):
                break
            tables += 1  # No such width fits here. Smaller ones do.
        return [self.part(strategy, select(clients, own)) for own in places]

    def _widths(self, strategy: Strategy, batch: int, count: int) -> Iterator[int]:
        """Yields the widths that fit for so many clients, in rising order."""
        kernels = self.kernels or ()
        for width in dense_models.widths(kernels, strategy.num_steps, batch):
            if width >= count and self.fits(strategy, batch, width):
                yield width

    def part(self, strategy: Strategy, clients: ClientTable) -> Part:
        """Returns a part of clients, in the public shapes of their strategy."""
        if strategy.kind == SIDE_BY_SIDE:
            count = int(clients.num_clients)
            width = next(self._widths(strategy, len(clients.batch), count))
            return Part(strategy, pad_to(clients, width))
        if strategy.kind == BATCHED:
            return Part(strategy, pad_to(clients, self.clients_in_batch))
        return Part(strategy, clients)

    @property
    def _most_collected(self) -> int | None:
        """How many clients' updates one call may keep; None: any number."""
        if self.collected_bytes is None:
            return None
        return max(1, CHUNK_BYTES // self.collected_bytes)

    @property
    def clients_in_batch(self) -> int:
        """How many clients a batched program has room for, whoever is there."""
        return int(min(self.at_once or 1, self._most_collected or math.inf))

    def batches(self, clients: ClientTable) -> list[Part]:
        """Returns the parts in which clients train as batched programs.

        Those of a part end each pass with a batch of the same length. They are
        sorted by their steps, as a part takes as long as its longest client.
        """
        size, examples = len(clients.batch), clients.num_examples
        last = np.where(examples % size, examples % size, np.minimum(examples, size))
        order = np.lexsort((clients.steps, last))
        (borders,) = np.nonzero(np.diff(last[order]))
        width = self.clients_in_batch
        return [
            self.part(Strategy(BATCHED), select(clients, group[start : start + width]))
            for group in np.split(order, borders + 1)
            for start in range(0, len(group), width)
        ]

    def one_by_one(self, clients: ClientTable) -> list[Part]:
        """Returns the parts in which clients train one by one."""
        if not self.xla:
            return [Part(Strategy(ONE_BY_ONE), clients)]
        full = clients.num_examples % len(clients.batch) == 0
        full &= clients.num_examples > 0
        rest = select(clients, np.flatnonzero(~full))
        parts = [
            Part(Strategy(ONE_BY_ONE, xla=True), select(clients, np.array([place])))
            for place in np.flatnonzero(full).tolist()
        ]
        if rest.num_clients or not parts:
            parts.append(Part(Strategy(ONE_BY_ONE), rest))
        return parts


def split(
    table: ClientTable,
    num_groups: int,
    at_most: int | None = None,
    loads: list[float] | None = None,
) -> list[list[ClientTable]]:
    """Shares a table's clients among groups that end at the same time.

    The largest clients come first, and each goes to the group with the least
    work so far (Graham's longest-processing-time rule).

    Args:
      table: The clients.
      num_groups: How many groups. A single one keeps the order given.
      at_most: How many clients a table may have; None: any number. Clients are
        spread evenly over tables.
      loads: The work that each group has already, in steps; None: none.

    Returns:
      For each group, its tables in order; at least one table in all.
    """
    steps = table.steps
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    if num_groups == 1:
        groups[0] += range(len(steps))
    else:
        heap = [(load, n) for n, load in enumerate(loads or [0.0] * num_groups)]
        heapq.heapify(heap)
        order = np.argsort(-steps, kind="stable")
        for place, own in zip(order.tolist(), steps[order].tolist(), strict=True):
            load, number = heap[0]
            groups[number].append(place)
            heapq.heapreplace(heap, (load + own, number))
    found: list[list[ClientTable]] = []
    for number, group in enumerate(groups):
        if not group and (number or any(groups)):
            found.append([])
            continue
        length = max(1, len(group))
        step = math.ceil(length / math.ceil(length / (at_most or length)))
        places = np.array(group, np.int64)
        starts = range(0, length, step)
        found.append([select(table, places[start : start + step]) for start in starts])
    return found


def stored_examples(dataset: FederatedDataset) -> tuple[nests.Nest, nests.Nest]:
    """Returns features and labels of a dataset in memory, of one row at least.

    XLA cannot gather from a tensor without rows, not even nothing.
    """
    x, y = dataset.flat()
    if len(tf.nest.flatten(y)[0]):
        return x, y
    return tf.nest.map_structure(
        lambda array: tf.zeros([1, *array.shape[1:]], array.dtype), (x, y)
    )


def _table(
    inputs: cohort.RoundInputs,
    members: np.ndarray,
    lengths: np.ndarray,
    rows: np.ndarray,
) -> ClientTable:
    """Returns the table of clients, whose stored examples are `rows`."""
    keys = None if inputs.shuffle is None else inputs.shuffle_keys(members)
    table = client_table(rows, lengths, inputs.batch_size, inputs.local_epochs, keys)
    table = table._replace(
        members=members.astype(np.int32),
        keys=inputs.positions[members].astype(np.int64),
    )
    if inputs.windows is None:
        return table
    return table._replace(windows=inputs.windows[members].astype(np.float32))


def gather(chunk: Chunk, table: ClientTable) -> Chunk:
    """Returns a chunk of one client's own rows, padded by its own number of steps.

    XLA compiles a program for each shape of its arguments, which are thereby the
    client's own, and powers of eight of a batch: four up to 512 steps. What is padded
    is gathered, and no step is taken on it.
    """
    size = len(table.batch)
    missing = size * _power_of_eight(-(-len(table.rows) // size)) - len(table.rows)
    rows = np.pad(table.rows, (0, missing))
    x, y = tf.nest.map_structure(lambda leaf: tf.gather(leaf, rows), chunk[:2])
    return Chunk(x, y, table._replace(rows=np.arange(len(rows), dtype=np.int32)))


def _power_of_eight(number: int) -> int:
    """Returns the smallest power of eight that is not less, and at least 1."""
    return 8 ** -(-(max(number, 1) - 1).bit_length() // 3)
