"""Reads a cohort, and decides which rows and which program each client trains with.

A cohort is read in chunks of bounded size, or of one client; while one trains, a
background thread reads the next. A chunk has a `ClientTable`, which lists the rows that
each client trains on, so that the compiled programs only have to gather.

`Layout` chooses a client's program and its shapes from the client's own number of
examples and from public facts (the model, the batch size, the machine), never from
who else is in the cohort. So a client adds the same bits, alone or among any others.
Only *when* and on which thread a client trains depends on the other clients.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.engine import cohort, dense_models, program
from tfdp_fl.mechanisms import bounded_sums

# The most bytes of data and row numbers in a chunk of several clients, and of updates
# awaiting a joint clip in one call of a compiled function.
CHUNK_BYTES = 64 * 2**20

# The most rows that a client may train on in a round, counted once an epoch. (Their
# numbers are int32, 512 MiB in all.)
MOST_ROWS = 2**27

# One client after another; dense models without a copy of the model per client
# (`side_by_side`); many clients as one batched program, for a GPU.
ONE_BY_ONE, SIDE_BY_SIDE, BATCHED = "one by one", "side by side", "batched"


# NumPy arrays outside the compiled programs, tensors inside.
_Array: TypeAlias = np.ndarray | tf.Tensor


class ClientTable(NamedTuple):
    """A group of clients and the rows that they train on.

    Client k goes through its n_k examples `epochs` times. The rows of all its passes
    are stored consecutively in `rows`, starting at `first_row[k]`. Each step takes
    the next B rows; the last step of a pass takes the rest. The fields are NumPy
    arrays here, and tensors in the compiled programs.

    Attributes:
      rows: Int32 [R], row numbers of stored examples.
      batch: Int32 [B], from 0 to B - 1: the positions in a batch.
      epochs: Int32 scalar.
      num_clients: Int32 scalar, K. If padded, the fields below have more than K rows.
      first_row: Int32 [K].
      num_examples: Int32 [K], n_k.
      members: Int32 [K], each client's position in the cohort.
      keys: Int64 [K], each client's position in the dataset. Together with the
        round's seed, it determines the client's random numbers.
      windows: Float32 [K, W, L], the norms of each client's last rounds, NaN where
        there are none; [K, 0, 0] if the mechanism keeps no windows.
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
        """Returns each client's number of steps, [K]."""
        return -(-self.num_examples // len(self.batch)) * self.epochs

    def map_clients(self, change: Callable[[_Array], _Array]) -> ClientTable:
        """Returns a table with `change` applied to the arrays that have K rows."""
        first = self._fields.index("first_row")
        return ClientTable(*self[:first], *map(change, self[first:]))


def client_table(
    rows: np.ndarray,
    lengths: np.ndarray,
    batch_size: int,
    local_epochs: int,
    shuffle_generators: list[np.random.Philox] | None = None,
) -> ClientTable:
    """Lays out the local training of a group of clients, without windows.

    Args:
      rows: Int array, the clients' row numbers, one client after another.
      lengths: Int array [K], how many of these rows each client has.
      batch_size: Examples in a batch, B.
      local_epochs: How often each client goes through its examples.
      shuffle_generators: One for each client, which shuffles its examples anew for
        every epoch. None: no shuffling.
    """
    lengths = np.asarray(lengths, np.int64)
    rows = np.asarray(rows, np.int32)
    first = np.cumsum(lengths) - lengths
    if local_epochs > 1 or shuffle_generators is not None:
        own = (
            rows[start : start + length]
            for start, length in zip(first.tolist(), lengths.tolist(), strict=True)
        )
        if shuffle_generators is None:
            passes = [each for each in own for _ in range(local_epochs)]
        else:
            passes = [
                part
                for each, generator in zip(own, shuffle_generators, strict=True)
                for part in _shuffled(each, local_epochs, generator)
            ]
        rows = np.concatenate([rows[:0], *passes])
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


# The most rows shuffled at a time, in whole epochs; always at least one epoch.
_MAX_SHUFFLED_ROWS = 2**20


def _shuffled(
    rows: np.ndarray, epochs: int, generator: np.random.Philox
) -> Iterator[np.ndarray]:
    """Yields one client's rows for all epochs, each in a random order, in parts."""
    random = np.random.Generator(generator).random
    epochs_per_draw = max(1, _MAX_SHUFFLED_ROWS // max(1, len(rows)))
    for done in range(0, epochs, epochs_per_draw):
        draws = random((min(epochs_per_draw, epochs - done), len(rows)))
        yield rows[draws.argsort(axis=1)].ravel()


def _ranges(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates the ranges of `lengths[i]` numbers that start at `first[i]`."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(first - before, lengths) + np.arange(lengths.sum())


def select(table: ClientTable, places: np.ndarray) -> ClientTable:
    """Returns the table of the selected clients, in the given order."""
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

    if not len(table.rows):  # Padding reads the first row.
        table = table._replace(rows=np.zeros(1, np.int32))
    return table.map_clients(pad)


class Strategy(NamedTuple):
    """Which compiled program trains clients.

    Attributes:
      kind: `ONE_BY_ONE`, `SIDE_BY_SIDE` or `BATCHED`.
      num_steps: Side by side only: one of `dense_models.PROGRAM_STEPS`.
      fine: Whether contributions are rounded to the finer grid, for float64 sums,
        instead of the coarser one, for int32 sums (`bounded_sums`).
      xla: Whether XLA compiles it; each call then trains one client with full batches.
    """

    kind: str
    num_steps: int = 0
    fine: bool = True
    xla: bool = False


class Part(NamedTuple):
    """Some of a chunk's clients, which one call of a compiled program trains."""

    strategy: Strategy
    table: ClientTable

    @property
    def members(self) -> np.ndarray:
        """Returns the clients' positions in the cohort, without padding."""
        return self.table.members[: self.table.num_clients]


class Chunk(NamedTuple):
    """Some clients of a cohort and the tensors that hold their examples.

    Attributes:
      x: Nest of feature tensors; the leading dimension is over stored examples.
      y: Nest of label tensors, likewise.
      table: The clients.
    """

    x: nests.Nest
    y: nests.Nest
    table: ClientTable


# A client that was read: its position in the cohort, and its flattened tensors (none
# if they are in memory anyway).
_Client = tuple[int, list[np.ndarray]]

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How an engine's cohorts are read and laid out.

    Attributes:
      element_spec: `(features, labels)` specs of one example.
      kernels: The kernels of a model that can train side by side, otherwise None.
      collected_bytes: The size of a client's update, if each is kept; None if updates
        are summed at once.
      xla: Whether XLA compiles the training of clients one by one. Only on request: it
        compiles up to four programs (see `gather`), which takes longer than it saves
        in the first hundred rounds of a small model. Compiling in the background would
        let the machine's speed decide a client's bits.
      batched_clients: How many clients train as one batched program; None: no batching.
      allows_int32_sums: Whether clients that train one by one may be added up in int32.
      fits: Takes a strategy, a batch size and a width (a number of clients from
        `dense_models.widths`). Returns whether that side-by-side program gives a client
        the same bits in every place as the other widths do on this machine.
    """

    element_spec: nests.ElementSpec
    kernels: dense_models.Kernels | None = None
    collected_bytes: int | None = None
    xla: bool = False
    batched_clients: int | None = None
    allows_int32_sums: bool = False
    fits: Callable[[Strategy, int, int], bool] = lambda strategy, batch, width: True

    def read(
        self, dataset: FederatedDataset, pending: cohort.PendingRound
    ) -> Iterator[Chunk]:
        """Yields the data of a round's cohort, at least one chunk.

        A client has failed if it cannot be read, has more than `MOST_ROWS` rows to
        train on, or is by itself too large for the memory.

        Args:
          dataset: The source of the examples, from `CohortEngine.check_labels`.
          pending: The round; failed clients are added to its `failures`.
        """
        if dataset.is_indexed:
            yield from self._stored_chunks(dataset, pending)
        else:
            read = self._read_chunks(dataset, pending)
            with concurrent.futures.ThreadPoolExecutor(1) as reading:
                coming = reading.submit(next, read, None)
                while (chunk := coming.result()) is not None:
                    coming = reading.submit(next, read, None)
                    yield chunk
        # A client may fail to train after a later one could not be read.
        pending.failures.sort(key=lambda failure: failure.position)

    def _stored_chunks(
        self, dataset: FederatedDataset, pending: cohort.PendingRound
    ) -> Iterator[Chunk]:
        """Yields the clients of a dataset in memory in chunks."""
        inputs, positions = pending.inputs, pending.inputs.positions
        x, y = stored_examples(dataset)
        pending.failures += dataset.failures(positions)
        failed = {failure.position for failure in pending.failures}
        sizes = dataset.client_sizes(positions).tolist()

        def clients() -> Iterator[tuple[int, int, _Client]]:
            for member, length in enumerate(sizes):
                position = int(positions[member])
                if position not in failed and _may_train(pending, position, length):
                    yield position, 4 * length * inputs.local_epochs, (member, [])

        def chunk(clients: list[_Client]) -> Chunk:
            members = np.array([member for member, _ in clients], np.int64)
            rows, lengths = dataset.client_rows(positions[members])
            return Chunk(x, y, _table(inputs, members, lengths, rows))

        return in_chunks(clients(), chunk, pending.failures)

    def _read_chunks(
        self, dataset: FederatedDataset, pending: cohort.PendingRound
    ) -> Iterator[Chunk]:
        """Reads the clients and yields them in chunks."""
        inputs = pending.inputs

        def clients() -> Iterator[tuple[int, int, _Client]]:
            for member, client in enumerate(dataset.read_clients(inputs.positions)):
                if isinstance(client, ClientFailure):
                    pending.failures.append(client)
                    continue
                arrays = tf.nest.flatten((client.x, client.y))
                length = len(arrays[-1])
                if _may_train(pending, client.position, length):
                    size = sum(array.nbytes for array in arrays)
                    size += 4 * length * inputs.local_epochs
                    yield client.position, size, (member, arrays)

        chunk = functools.partial(self._chunk, inputs)
        return in_chunks(clients(), chunk, pending.failures)

    def _chunk(self, inputs: cohort.RoundInputs, clients: list[_Client]) -> Chunk:
        """Returns a chunk of clients that were read, perhaps of none."""
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
        table = _table(inputs, members, lengths, np.arange(total, dtype=np.int32))
        return Chunk(x, y, table)

    def lay_out(
        self, clients: ClientTable, num_groups: int, fine: bool = True
    ) -> list[list[Part]]:
        """Divides a chunk's clients among groups that train at the same time.

        Args:
          clients: The clients.
          num_groups: The most groups to make. Fewer are made if another thread or
            worker would cost more than it saves.
          fine: See `Strategy`.

        Returns:
          One to `num_groups` groups. A group's parts train one after another, each
          with bounded memory.
        """
        if self.batched_clients is not None:
            return [self.batches(clients)]
        step_counts = self.step_counts(clients, fine)
        is_large = dense_models.is_large(self.kernels or ())
        work = [
            (part.strategy.num_steps * len(part.table.members) / 2, part)
            for num_steps in np.unique(step_counts[step_counts > 0]).tolist()
            for part in self._side_by_side(
                select(clients, np.flatnonzero(step_counts == num_steps)),
                num_steps,
                num_groups,
                fine,
            )
        ]
        groups: list[list[Part]] = [[] for _ in range(num_groups)]
        loads = [0.0] * num_groups
        for cost, part in sorted(work, key=lambda item: -item[0]):
            least = 0 if is_large else int(np.argmin(loads))
            groups[least].append(part)
            loads[least] += cost
        places = np.flatnonzero(step_counts == 0)
        if len(places) or not work:
            alone = select(clients, places)
            limit = self._max_collected or self._max_clients_per_int32_sum(fine)
            shares = split(alone, num_groups, limit, loads)
            for group, tables in zip(groups, shares, strict=True):
                for table in tables:
                    group += self.one_by_one(table, fine)
        return [group for group in groups if group] or groups[:1]

    def strategies(self, batch: int, fine: bool) -> list[Strategy]:
        """Returns every strategy that `lay_out` may use for any cohort.

        Args:
          batch: B, the examples in a step.
          fine: See `Strategy`.
        """
        if self.batched_clients is not None:
            return [Strategy(BATCHED)]
        found = [self._one_by_one(fine)]
        if self.xla:
            found.append(Strategy(ONE_BY_ONE, xla=True))
        if self.kernels is not None:
            found += [
                Strategy(SIDE_BY_SIDE, num_steps, fine)
                for num_steps in dense_models.worthwhile_steps(self.kernels, batch)
                if dense_models.widths(self.kernels, num_steps, batch)
            ]
        return found

    def allows(self, strategy: Strategy) -> bool:
        """Returns whether clients may train so, for some batch size and grid."""
        if strategy.kind == SIDE_BY_SIDE:
            return self.kernels is not None
        return (strategy.kind == BATCHED) == (self.batched_clients is not None)

    def step_counts(self, clients: ClientTable, fine: bool = True) -> np.ndarray:
        """Returns the number of steps of each client's side-by-side program, int [K].

        0 means that a client trains one by one. Each number depends only on that
        client's own examples.
        """
        if self.kernels is None:
            return np.zeros(len(clients.members), np.int64)
        batch = len(clients.batch)
        step_counts = dense_models.program_steps(self.kernels, clients.steps, batch)
        for num_steps in np.unique(step_counts[step_counts > 0]).tolist():
            strategy = Strategy(SIDE_BY_SIDE, num_steps, fine)
            if not any(self._widths(strategy, batch, 1)):
                step_counts[step_counts == num_steps] = 0
        return step_counts

    def _side_by_side(
        self, clients: ClientTable, num_steps: int, num_groups: int, fine: bool
    ) -> list[Part]:
        """Splits clients with equal programs into parts that train side by side."""
        strategy = Strategy(SIDE_BY_SIDE, num_steps, fine)
        batch, count = len(clients.batch), int(clients.num_clients)
        wanted = self.parallel_calls(strategy, batch, count, num_groups)
        possible = dense_models.widths(self.kernels or (), num_steps, batch)
        tables = max(1, min(wanted, count // possible[0]), -(-count // possible[-1]))
        while True:
            places = np.array_split(np.arange(count), tables)
            if all(next(self._widths(strategy, batch, len(p)), 0) for p in places):
                break
            tables += 1  # That width does not fit this machine; smaller ones do.
        return [self.part(strategy, select(clients, own)) for own in places]

    def parallel_calls(
        self, strategy: Strategy, batch: int, count: int, max_calls: int
    ) -> int:
        """Returns how many calls of a program train clients at the same time.

        Args:
          strategy: The program's.
          batch: B, the examples in a step.
          count: How many clients it trains.
          max_calls: How many calls there may be.
        """
        kernels = self.kernels or ()
        examples = count * strategy.num_steps * batch
        if strategy.kind == SIDE_BY_SIDE and (
            dense_models.is_large(kernels) or dense_models.is_small(kernels, examples)
        ):
            return 1
        return max(1, min(count, max_calls))

    def _widths(self, strategy: Strategy, batch: int, count: int) -> Iterator[int]:
        """Yields the widths that fit and hold `count` clients, in ascending order."""
        kernels = self.kernels or ()
        for width in dense_models.widths(kernels, strategy.num_steps, batch):
            if width >= count and self.fits(strategy, batch, width):
                yield width

    def part(self, strategy: Strategy, clients: ClientTable) -> Part:
        """Returns a part of these clients, padded to their strategy's public shape."""
        if strategy.kind == SIDE_BY_SIDE:
            count = int(clients.num_clients)
            width = next(self._widths(strategy, len(clients.batch), count))
            return Part(strategy, pad_to(clients, width))
        if strategy.kind == BATCHED:
            return Part(strategy, pad_to(clients, self.clients_in_batch))
        return Part(strategy, clients)

    @property
    def _max_collected(self) -> int | None:
        """The most clients whose updates one call may keep; None: no limit."""
        if self.collected_bytes is None:
            return None
        return max(1, CHUNK_BYTES // self.collected_bytes)

    def _one_by_one(self, fine: bool) -> Strategy:
        return Strategy(ONE_BY_ONE, fine=fine or not self.allows_int32_sums)

    def _max_clients_per_int32_sum(self, fine: bool) -> int | None:
        """The most clients whose sum int32 holds; None: it is in float64."""
        return None if self._one_by_one(fine).fine else bounded_sums.MAX_INT32_CLIENTS

    @property
    def clients_in_batch(self) -> int:
        """The number of clients in every batched program, padding included."""
        return int(min(self.batched_clients or 1, self._max_collected or math.inf))

    def batches(self, clients: ClientTable) -> list[Part]:
        """Splits clients into parts that train as batched programs; at least one part.

        All clients of a part end each pass with a batch of the same length. Clients
        are sorted by their steps, as a part takes as long as its longest client.
        """
        size, examples = len(clients.batch), clients.num_examples
        last = np.where(examples % size, examples % size, np.minimum(examples, size))
        order = np.lexsort((clients.steps, last))
        (borders,) = np.nonzero(np.diff(last[order]))
        width = self.clients_in_batch
        return [
            self.part(Strategy(BATCHED), select(clients, group[start : start + width]))
            for group in np.split(order, borders + 1)
            for start in range(0, max(1, len(group)), width)
        ]

    def one_by_one(self, clients: ClientTable, fine: bool) -> list[Part]:
        """Splits clients into parts that train one by one; `fine`: see `Strategy`."""
        if not self.xla:
            return [Part(self._one_by_one(fine), clients)]
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
    """Divides a table's clients among groups that finish at about the same time.

    The largest clients are assigned first, each to the group with the least work so
    far (Graham's longest-processing-time rule).

    Args:
      table: The clients.
      num_groups: The number of groups. A single group keeps the given order.
      at_most: The most clients in a table; None: no limit. Clients are spread evenly
        over tables.
      loads: The work that each group already has, in steps; None: none.

    Returns:
      Each group's tables in order; at least one table in all.
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


def _may_train(pending: cohort.PendingRound, position: int, length: int) -> bool:
    """Returns whether a client has at most `MOST_ROWS`; otherwise it has failed."""
    if length * pending.inputs.local_epochs <= MOST_ROWS:
        return True
    error = nests.ExamplesValueError(
        f"local_epochs must be lower for this client: {MOST_ROWS} examples, counted "
        "once an epoch, are the most that one client trains on in a round."
    )
    pending.failures.append(ClientFailure(position, error))
    return False


def in_chunks(
    clients: Iterable[tuple[int, int, _Item]],
    make: Callable[[list[_Item]], _Made],
    failures: list[ClientFailure],
    max_clients: float = math.inf,
) -> Iterator[_Made]:
    """Yields chunks of at most `CHUNK_BYTES` or of one client; at least one chunk.

    So no single client decides whether memory suffices for several.

    Args:
      clients: Yields each client's position, its size in bytes, and what `make` needs.
      make: Makes the chunk of some clients, perhaps of none.
      failures: Each client that is too large for the memory by itself is added here.
      max_clients: The most clients in a chunk.
    """

    def made(held: list[tuple[int, _Item]]) -> _Made:
        try:
            with program.numpy_memory_errors_as_tensorflows():
                return make([item for _, item in held])
        except tf.errors.ResourceExhaustedError as error:
            if len(held) != 1:
                raise
            # Without the traceback, which would keep what the memory is needed for.
            error = tf.errors.ResourceExhaustedError(None, None, error.message)
            failures.append(ClientFailure(held[0][0], error))
            return make([])

    held: list[tuple[int, _Item]] = []
    num_bytes = 0
    for position, own, item in clients:
        if held and (num_bytes + own > CHUNK_BYTES or len(held) >= max_clients):
            yield made(held)
            held, num_bytes = [], 0
        held.append((position, item))
        num_bytes += own
    yield made(held)


def stored_examples(dataset: FederatedDataset) -> tuple[nests.Nest, nests.Nest]:
    """Returns the features and labels of a dataset in memory, with at least one row.

    XLA cannot gather from a tensor without rows, not even zero rows.
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
    """Returns the table of the clients whose stored examples are `rows`."""
    keys = None if inputs.shuffle is None else inputs.shuffle_keys(members)
    table = client_table(rows, lengths, inputs.batch_size, inputs.local_epochs, keys)
    table = table._replace(
        members=members.astype(np.int32),
        keys=inputs.positions[members].astype(np.int64),
    )
    if inputs.windows is None:
        return table
    return table._replace(windows=inputs.windows[members].astype(np.float32))


@program.numpy_memory_errors_as_tensorflows()
def gather(chunk: Chunk, table: ClientTable) -> Chunk:
    """Returns a chunk of one client's rows, padded to a power-of-eight batch count.

    XLA compiles a program for each shape of its arguments. Here a shape depends only on
    the client's own number of examples, with four shapes for up to 512 batches. Padding
    is gathered, but never trained on. An example is gathered once, for all epochs.
    """
    size, epochs = len(table.batch), int(table.epochs)
    padded = size * _power_of_eight(-(-len(table.rows) // (size * epochs)))
    own, rows = np.unique(table.rows, return_inverse=True)
    own = np.pad(own, (0, padded - len(own)))
    x, y = tf.nest.map_structure(lambda leaf: tf.gather(leaf, own), chunk[:2])
    rows = np.pad(rows.astype(np.int32), (0, padded * epochs - len(rows)))
    return Chunk(x, y, table._replace(rows=rows))


def _power_of_eight(number: int) -> int:
    """Returns the smallest power of eight that is at least `number`, from 1 up."""
    return 8 ** -(-(max(number, 1) - 1).bit_length() // 3)
