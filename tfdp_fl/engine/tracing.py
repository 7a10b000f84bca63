"""The compiled functions that train clients: each is traced once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfdp_fl.engine import (
    broadcast,
    calls,
    chunks,
    client_update,
    cohort,
    layout,
    one_by_one,
    rounds,
    side_by_side,
)
from tfdp_fl.mechanisms import cohort_query

# Takes what a client receives, x, y, and the tables of a part.
Train = Callable[..., cohort.Trained]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CohortFunctions:
    """Makes the functions of an engine's replicas, and keeps them.

    Attributes:
      trainers: One for each replica.
      query: The mechanism's query.
      broadcasts: Tells what clients receive.
      element_spec: `(features, labels)` specs of one example.
      output: What is wanted of a cohort (see `cohort.SUM`).
      moments: Whether Geyer's `Moments` are wanted as well.
      traced: The functions so far, by replica, `layout.Way` and the dtype of
        the rounds' seeds; one is made when a round needs it.
    """

    trainers: list[client_update.ClientTrainer]
    query: cohort_query.CohortQuery
    broadcasts: broadcast.Broadcast
    element_spec: tuple[Any, Any]
    output: str
    moments: bool
    traced: dict[tuple[int, layout.Way, tf.DType], calls.TracedFunction] = (
        dataclasses.field(default_factory=dict)
    )

    @property
    def example_specs(self) -> tuple[Any, Any]:
        """Specs of (x, y), for any number of stored examples."""
        return tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype),
            self.element_spec,
        )

    def train(self, way: layout.Way, replica: int = 0) -> Train:
        """Returns the function that trains a part's clients, not traced.

        It trains in one replica's variables, and assigns all of
        `assigned_variables` before it reads them.
        """
        trainer = self.trainers[replica]
        if way.side_by_side:
            return side_by_side.SideBySide(
                trainer,
                self.query,
                cast(int, way.num_steps),
                way.full_batches,
                all_usable=way.optimistic,
            )
        return one_by_one.OneByOne(
            trainer,
            self.query,
            output=self.output,
            full_batches=way.full_batches,
            moments=self.moments,
            xla=way.xla,
        )

    def keep_replicas(self, count: int) -> None:
        """Gives up all replicas but the first ones, and their functions."""
        del self.trainers[count:]
        for key in [key for key in self.traced if key[0] >= count]:
            del self.traced[key]

    def assigned_variables(self, replica: int = 0) -> list[tf.Variable]:
        """Returns what a replica's functions assign before they read it."""
        return self.trainers[replica].assigned_variables

    def prepared(
        self,
        replica: int,
        pending: rounds.PendingRound,
        chunk: chunks.CohortChunk,
        part: layout.Part,
    ) -> calls.Call:
        """Has a part's function traced, and its arguments made.

        Everything that is Python happens here, in one thread. A function is
        traced once, for any cohort size.
        """
        fixed = (pending.state, *pending.tensors, pending.broadcast)
        function = self._function(
            replica, part.way, pending.tensors[1].dtype, fixed, part.tables
        )
        arguments = (*fixed, chunk.x, chunk.y, *part.tables)
        return calls.Call(function, arguments)

    def _function(
        self,
        replica: int,
        way: layout.Way,
        seeds: tf.DType,
        fixed: Any,
        tables: tuple[Any, ...],
    ) -> calls.TracedFunction:
        """Returns a replica's function: the first one's, on its variables.

        Where that cannot be, one is traced for the replica.
        """
        key = (replica, way, seeds)
        if key not in self.traced:
            found = None
            if replica:
                first = self._function(0, way, seeds, fixed, tables)
                found = first.on_others(self._handles(replica))
            self.traced[key] = found or self._trace(replica, way, fixed, tables)
        return self.traced[key]

    def _trace(
        self,
        replica: int,
        way: layout.Way,
        fixed: Any,
        tables: tuple[Any, ...],
    ) -> calls.TracedFunction:
        train = self.train(way, replica)

        def function(state, numbers, seed, weights, x, y, *tables):
            # Keras names things in ways that are no names by themselves.
            with tf.name_scope("clients"):
                received = self.broadcasts.received(
                    state, numbers, seed, weights
                )
                return train(received, x, y, *tables)

        return calls.TracedFunction(
            tf.function(function, jit_compile=way.xla, autograph=False),
            way.optimistic,
            *tf.nest.map_structure(
                lambda each: tf.TensorSpec(each.shape, each.dtype), fixed
            ),
            *self.example_specs,
            *table_specs(tables),
        )

    def _handles(self, replica: int) -> dict[int, tf.Tensor]:
        """Returns a replica's variables by the ids of the first one's."""
        first, own = (
            [each.handle for each in self.trainers[number].own_variables]
            for number in (0, replica)
        )
        return {id(one): other for one, other in zip(first, own, strict=True)}


def table_specs(tables: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the specs of a part's tables, for any number of clients.

    The batch width stays free as well: one function serves every size.
    """

    def any_size(value: Any) -> tf.TensorSpec:
        value = np.asarray(value)
        return tf.TensorSpec([None] * value.ndim, value.dtype)

    return tf.nest.map_structure(any_size, tuple(tables))
