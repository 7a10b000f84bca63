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

    The first replica is a copy of the model, with what trains clients in it.
    Another one is no more than variables of its own for the same functions to
    run on; only where that cannot be, a copy of the model, too.

    Attributes:
      trainers: Those of the replicas that are copies of the model, by number.
      make_trainer: Makes another one.
      query: The mechanism's query.
      broadcasts: Tells what clients receive.
      element_spec: `(features, labels)` specs of one example.
      output: What is wanted of a cohort (see `cohort.SUM`).
      moments: Whether Geyer's `Moments` are wanted as well.
      variables: What training may change in the other replicas, by number.
      traced: The functions so far, by replica, `layout.Way` and the dtype of
        the rounds' seeds; one is made when a round needs it.
    """

    trainers: dict[int, client_update.ClientTrainer]
    make_trainer: Callable[[], client_update.ClientTrainer]
    query: cohort_query.CohortQuery
    broadcasts: broadcast.Broadcast
    element_spec: tuple[Any, Any]
    output: str
    moments: bool
    variables: dict[int, list[tf.Variable]] = dataclasses.field(default_factory=dict)
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
                all_usable=way.optimistic,
            )
        return one_by_one.OneByOne(
            trainer,
            self.query,
            output=self.output,
            full_batches=way.full_batches,
            moments=self.moments,
            xla=way.xla,
            one_thread=way.one_thread,
            factored=way.factored,
        )

    def keep_replicas(self, count: int) -> None:
        """Gives up all replicas but the first ones, and their functions."""
        for made in (self.trainers, self.variables):
            for replica in [each for each in made if each >= count]:
                del made[replica]
        for key in [key for key in self.traced if key[0] >= count]:
            del self.traced[key]

    def assigned_variables(self) -> list[tf.Variable]:
        """Returns what the first replica's functions assign, then read."""
        return self.trainers[0].assigned_variables

    def own_variables(self, replica: int) -> list[tf.Variable]:
        """Returns all that training may change in a replica; makes them."""
        first = self.trainers[0]
        if replica in self.trainers:
            return self.trainers[replica].own_variables
        if replica not in self.variables:
            self.variables[replica] = list(map(_copied, first.own_variables))
        return self.variables[replica]

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
            if replica:
                first = self._function(0, way, seeds, fixed, tables)
                own = {id(each.handle) for each in self.own_variables(0)}
                if first.can_run_on_others(own):
                    found = first.on_others(self._handles(replica))
                    return self.traced.setdefault(key, found)
            self.traced[key] = self._trace(replica, way, fixed, tables)
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
                received = self.broadcasts.received(state, numbers, seed, weights)
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
        first, own = map(self.own_variables, (0, replica))
        return {
            id(one.handle): other.handle for one, other in zip(first, own, strict=True)
        }


def _copied(variable: tf.Variable) -> tf.Variable:
    with tf.device(variable.device):
        return tf.Variable(variable.read_value(), trainable=False)


def table_specs(tables: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the specs of a part's tables, for any number of clients.

    The batch width stays free as well: one function serves every size.
    """

    def any_size(value: Any) -> tf.TensorSpec:
        value = np.asarray(value)
        return tf.TensorSpec([None] * value.ndim, value.dtype)

    return tf.nest.map_structure(any_size, tuple(tables))
