"""Who of a chunk's clients trains where, with whom, and by which function.

All that is decided about a cohort's training stands here; what it hangs on is
measured in `dense_models` (side by side or not) and `devices` (XLA).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl import _products
from tfdp_fl.engine import chunks, dense_models, rounds, tables
from tfdp_fl.mechanisms import ClientWeighting

# One client after the other; dense models without a model for each client
# (`side_by_side`); all of a chunk as one batched program, for a GPU.
ONE_BY_ONE, SIDE_BY_SIDE, BATCHED = "one by one", "side by side", "batched"


class Way(NamedTuple):
    """Which compiled function trains clients.

    Attributes:
      kind: `ONE_BY_ONE`, `SIDE_BY_SIDE` or `BATCHED`.
      full_batches: Every batch has exactly B rows; side by side, every client
        also takes all the steps.
      num_steps: Side by side, how many steps there are.
      xla: Whether XLA compiles it.
    """

    kind: str
    full_batches: bool
    num_steps: int | None = None
    xla: bool = False


class Part(NamedTuple):
    """Some clients of a chunk, as one compiled function trains them.

    Attributes:
      way: The function.
      tables: Its arguments that say who trains on what: a `SideBySideTable`; a
        `BatchedTable`; or a `ClientTable`, perhaps padded, and the number of its
        clients (int32).
      clients: What the tables were made of.
    """

    way: Way
    tables: tuple[Any, ...]
    clients: tables.ClientTable

    def as_tensors(self) -> Part:
        """Returns the part with TensorFlow's tensors as arguments."""
        return self._replace(
            tables=tf.nest.map_structure(tf.convert_to_tensor, self.tables)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How the cohorts of an engine are laid out.

    Attributes:
      kernels: The sizes of a model whose clients may train side by side; None
        for any other.
      collected_bytes: What a client's update takes where each is kept; None
        where they are summed at once.
      xla: Whether XLA compiles the training of clients one by one.
      weighting: What clients count; None: all the same.
      at_once: How many clients train as one batched program; None: none do.
    """

    kernels: dense_models.Kernels | None
    collected_bytes: int | None
    xla: bool
    weighting: ClientWeighting | None = None
    at_once: int | None = None

    def lay_out(
        self,
        chunk: chunks.CohortChunk,
        inputs: rounds.RoundInputs,
        num_groups: int,
        *,
        for_workers: bool = False,
        float32_products: bool = True,
    ) -> list[list[Part]]:
        """Shares a chunk's clients out and lays out their training.

        Args:
          chunk: The clients.
          inputs: The round.
          num_groups: How many groups may train at the same time. One does
            where another thread, or worker, would cost more than it saves.
          for_workers: Whether one function, without XLA, has to serve all
            groups.
          float32_products: Whether those who train compute products of float32
            numbers as such; this process is asked as well.

        Returns:
          At most so many groups, at least one. The parts of a group come one
          after the other: each is bounded in the memory that it takes.
        """
        clients = tables.client_table(
            chunk.rows,
            chunk.lengths,
            inputs.batch_size,
            inputs.local_epochs,
            inputs.shuffle,
        )._replace(members=chunk.members.astype(np.int32))
        if inputs.windows is not None:
            windows = inputs.windows[clients.members].astype(np.float32)
            clients = clients._replace(windows=windows)
        if self.weighting is not None:
            clients = clients._replace(
                measured=tables.measured(
                    self.weighting, chunk.lengths, chunk.rows, chunk.y
                )
            )
        if self.at_once is not None and not for_workers:
            return [self.batches(clients, inputs)]
        if not (
            self.kernels is not None
            and float32_products
            and _products.are_float32()
            and dense_models.is_worthwhile(
                self.kernels,
                chunk.lengths,
                inputs.batch_size,
                inputs.local_epochs,
            )
        ):
            at_most = None
            if self.collected_bytes is not None:
                at_most = max(1, chunks.CHUNK_BYTES // self.collected_bytes)
            return [
                [self.one_by_one(each, for_workers) for each in group]
                for group in tables.split(clients, num_groups, at_most)
            ]
        small = dense_models.is_small(self.kernels, chunk.lengths, inputs.local_epochs)
        if small:
            num_groups = 1
        examples = int(chunk.lengths.max()) * inputs.local_epochs
        at_once = dense_models.clients_at_once(self.kernels, examples)
        num_steps = int(clients.steps.max())
        full = bool(
            not clients.has_short_batches and (clients.steps == num_steps).all()
        )
        way = Way(SIDE_BY_SIDE, full_batches=full, num_steps=num_steps)
        return [
            [Part(way, (tables.side_by_side(each, num_steps),), each) for each in group]
            for group in tables.split(clients, num_groups, at_once)
        ]

    def batches(
        self, clients: tables.ClientTable, inputs: rounds.RoundInputs
    ) -> list[Part]:
        """Returns the parts in which clients train as batched programs."""
        at_once = self.at_once or 1
        if self.collected_bytes is not None:
            at_once = min(at_once, max(1, chunks.CHUNK_BYTES // self.collected_bytes))
        parts = []
        for group, table in tables.batched(clients, inputs.local_epochs, at_once):
            if group.num_clients == 1:
                # Of one alone TensorFlow adds a convolution's bias along the batch
                # where that has as many rows as there are filters.
                parts.append(self.one_by_one(group))
                continue
            # XLA needs shapes that are fixed; one function serves all else.
            xla = self.xla and not group.has_short_batches
            parts.append(Part(Way(BATCHED, xla, xla=xla), (table,), group))
        return parts

    def one_by_one(
        self, clients: tables.ClientTable, for_workers: bool = False
    ) -> Part:
        """Returns the part in which clients train one by one."""
        # XLA needs shapes that are fixed, and compiles anew for every one.
        xla = self.xla and not for_workers and not clients.has_short_batches
        table = tables.padded(clients) if xla else clients
        return Part(
            Way(ONE_BY_ONE, full_batches=xla, xla=xla),
            (table, np.int32(clients.num_clients)),
            clients,
        )
