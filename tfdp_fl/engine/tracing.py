"""The compiled functions that train clients: one for each way, for all threads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfdp_fl.engine import (
    chunks,
    client_programs,
    cohort,
    layout,
    rounds,
    server_update,
    side_by_side,
    tables,
)
from tfdp_fl.engine import program as program_lib
from tfdp_fl.engine import trainer as trainer_lib
from tfdp_fl.mechanisms import cohort_query

# Takes what a client receives, x, y, and the tables of a part.
Train = Callable[..., cohort.Trained]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CohortFunctions:
    """Makes the functions of an engine, and keeps them.

    Attributes:
      trainer: Trains a client.
      query: The mechanism's query.
      element_spec: `(features, labels)` specs of one example.
      output: What is wanted of a cohort (see `cohort.SUM`).
      moments: Whether Geyer's `Moments` are wanted as well.
      traced: The functions so far, by `layout.Way` and the dtype of the rounds'
        seeds; one is made when a round needs it.
    """

    trainer: trainer_lib.Trainer
    query: cohort_query.CohortQuery
    element_spec: tuple[Any, Any]
    output: str
    moments: bool
    traced: dict[tuple[layout.Way, tf.DType], program_lib.Program] = dataclasses.field(
        default_factory=dict
    )

    @property
    def example_specs(self) -> tuple[Any, Any]:
        """Specs of (x, y), for any number of stored examples."""
        return trainer_lib.batch_specs(self.element_spec)

    def _train(self, way: layout.Way) -> Train:
        """Returns the function that trains a part's clients, not traced."""
        if way.kind == layout.SIDE_BY_SIDE:
            return side_by_side.SideBySide(
                self.trainer, self.query, cast(int, way.num_steps), way.full_batches
            )
        batched = way.kind == layout.BATCHED
        kind = client_programs.Batched if batched else client_programs.OneByOne
        return kind(
            self.trainer,
            self.query,
            output=self.output,
            full_batches=way.full_batches,
            moments=self.moments,
        )

    def prepared(
        self,
        pending: rounds.PendingRound,
        chunk: chunks.CohortChunk,
        part: layout.Part,
    ) -> Callable[[], cohort.Trained]:
        """Has a part's function traced; returns the call of it.

        Everything that is Python happens here, in one thread. A function is
        traced once, for any cohort size.
        """
        return functools.partial(
            self.program(pending, part),
            *pending.fixed_arguments,
            chunk.x,
            chunk.y,
            *part.tables,
        )

    def program(
        self, pending: rounds.PendingRound, part: layout.Part
    ) -> program_lib.Program:
        """Returns the function that trains a part's clients, traced once.

        Its arguments are those of the round (`PendingRound.fixed_arguments`), the
        features, the labels, and the part's tables.
        """
        key = (part.way, pending.tensors[1].dtype)
        if key not in self.traced:
            self.traced[key] = self._trace(
                part.way, pending.fixed_arguments, part.tables
            )
        return self.traced[key]

    def trace_one_by_one(self, fixed: Any, weighted: bool) -> program_lib.Program:
        """Returns what trains clients one by one, traced before there is a round.

        Args:
          fixed: As `PendingRound.fixed_arguments`.
          weighted: Whether clients count by what they have.
        """
        nobody = np.zeros(0, np.int32)
        table = tables.client_table(nobody, nobody, batch_size=1, local_epochs=1)
        if weighted:
            table = table._replace(measured=np.zeros(0, np.float32))
        way = layout.Way(layout.ONE_BY_ONE, full_batches=False)
        program = self._trace(way, fixed, (table, np.int32(0)))
        self.traced[way, fixed[2].dtype] = program
        return program

    def _trace(
        self, way: layout.Way, fixed: Any, arguments: tuple[Any, ...]
    ) -> program_lib.Program:
        train = self._train(way)

        def function(state, numbers, seed, weights, unaggregated, x, y, *arguments):
            received = server_update.received(
                self.query, state, numbers, seed, weights, unaggregated
            )
            return train(received, x, y, *arguments)

        return program_lib.Program(
            function,
            *tf.nest.map_structure(
                lambda each: tf.TensorSpec(each.shape, each.dtype), fixed
            ),
            *self.example_specs,
            *table_specs(arguments),
            model=self.trainer.model,
            xla=way.xla,
        )


def table_specs(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the specs of a part's tables, for any number of clients.

    The batch width stays free as well: one function serves every size.
    """

    def any_size(value: Any) -> tf.TensorSpec:
        value = np.asarray(value)
        return tf.TensorSpec([None] * value.ndim, value.dtype)

    return tf.nest.map_structure(any_size, tuple(arguments))
