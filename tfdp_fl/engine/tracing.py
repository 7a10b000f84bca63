"""The compiled functions that train clients: traced once for each replica."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfdp_fl.engine import (
    calls,
    chunks,
    client_update,
    cohort,
    layout,
    one_by_one,
    rounds,
    server_update,
    side_by_side,
)
from tfdp_fl.mechanisms import cohort_query

# Takes what a client receives, x, y, and the tables of a part.
Train = Callable[..., cohort.Trained]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CohortFunctions:
    """Makes the functions of an engine's replicas, and keeps them.

    A replica is a copy of the model, with what trains clients in it.

    Attributes:
      trainers: Those of the replicas, by number.
      make_trainer: Makes another one.
      query: The mechanism's query.
      broadcasts: Tells what clients receive.
      element_spec: `(features, labels)` specs of one example.
      output: What is wanted of a cohort (see `cohort.SUM`).
      moments: Whether Geyer's `Moments` are wanted as well.
      traced: The functions so far, by replica, `layout.Way` and the dtype of
        the rounds' seeds; one is made when a round needs it.
    """

    trainers: dict[int, client_update.ClientTrainer]
    make_trainer: Callable[[], client_update.ClientTrainer]
    query: cohort_query.CohortQuery
    broadcasts: server_update.Broadcast
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
        trainer = self._trainer(replica)
        if way.side_by_side:
            return side_by_side.SideBySide(
                trainer,
                self.query,
                cast(int, way.num_steps),
                way.full_batches,
            )
        return one_by_one.OneByOne(
            trainer,
            self.query,
            output=self.output,
            full_batches=way.full_batches,
            moments=self.moments,
            xla=way.xla,
        )

    def assigned_variables(self) -> list[tf.Variable]:
        """Returns what the first replica's functions assign, then read."""
        return self.trainers[0].assigned_variables

    def _trainer(self, replica: int) -> client_update.ClientTrainer:
        if replica not in self.trainers:
            self.trainers[replica] = self.make_trainer()
        return self.trainers[replica]

    def prepared(
        self,
        replica: int,
        pending: rounds.PendingRound,
        chunk: chunks.CohortChunk,
        part: layout.Part,
    ) -> Callable[[], cohort.Trained]:
        """Has a part's function traced; returns the call of it.

        Everything that is Python happens here, in one thread. A function is
        traced once, for any cohort size.
        """
        fixed = (pending.state, *pending.tensors, pending.broadcast)
        key = (replica, part.way, pending.tensors[1].dtype)
        if key not in self.traced:
            self.traced[key] = self._trace(replica, part.way, fixed, part.tables)
        arguments = tf.nest.map_structure(
            tf.convert_to_tensor, (*fixed, chunk.x, chunk.y, *part.tables)
        )
        return functools.partial(self.traced[key], *arguments)

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
                received = self.broadcasts.received(state, numbers, seed, weights)
                return train(received, x, y, *tables)

        return calls.TracedFunction(
            tf.function(function, jit_compile=way.xla, autograph=False),
            *tf.nest.map_structure(
                lambda each: tf.TensorSpec(each.shape, each.dtype), fixed
            ),
            *self.example_specs,
            *table_specs(tables),
        )


def table_specs(tables: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the specs of a part's tables, for any number of clients.

    The batch width stays free as well: one function serves every size.
    """

    def any_size(value: Any) -> tf.TensorSpec:
        value = np.asarray(value)
        return tf.TensorSpec([None] * value.ndim, value.dtype)

    return tf.nest.map_structure(any_size, tuple(tables))
