"""The compiled programs that train clients and clip their updates.

`_one_by_one` loops over clients, for any model and any mechanism. `_train_batched`
computes the same for many clients at once, as one batched program, which suits a GPU.
Both end with `_result`, in which the mechanism clips a trained client's update. For
dense models, `side_by_side.GhostClipping` replaces them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdp_fl import algorithm
from tfdp_fl.datasets import nests
from tfdp_fl.engine import cohort, layout, lookups, side_by_side
from tfdp_fl.engine import program as program_lib
from tfdp_fl.engine import trainer as trainer_lib
from tfdp_fl.mechanisms import cohort_query, noise


@dataclasses.dataclass(frozen=True, eq=False)
class CohortPrograms:
    """Makes an engine's programs and caches them.

    Attributes:
      trainer: Trains a client.
      query: The mechanism's query.
      keeps_updates: Whether to keep each client's unclipped update instead of a sum.
      moments: Whether to compute Geyer's `Moments` too.
      threads: Returns `program.Program.threads` for a strategy and a batch size.
      traced: The programs traced so far, each once for any cohort and batch size.
    """

    trainer: trainer_lib.Trainer
    query: cohort_query.CohortQuery
    keeps_updates: bool
    moments: bool
    threads: Callable[[layout.Strategy, int], int | None]
    traced: dict[layout.Strategy, program_lib.Program] = dataclasses.field(
        default_factory=dict
    )

    def program(
        self, broadcast: cohort.Broadcast, part: layout.Part
    ) -> program_lib.Program:
        """Returns the program that trains a part's clients; traces it at first use.

        Args:
          broadcast: What the server sends. It is the program's first argument; the
            second one is a `layout.Chunk`.
          part: The clients.
        """
        if part.strategy in self.traced:
            return self.traced[part.strategy]
        kind, num_steps, fine, xla = part.strategy
        train: Callable[..., cohort.Trained] = self._train_batched
        if kind == layout.SIDE_BY_SIDE:
            train = side_by_side.GhostClipping(
                self.trainer, self.query, num_steps, fine
            )
        elif kind == layout.ONE_BY_ONE:
            train = functools.partial(self._one_by_one, xla, fine)

        def any_size(value: nests.Nest) -> tf.TensorSpec:
            value = np.asarray(value)
            return tf.TensorSpec([None] * value.ndim, value.dtype)

        x, y = trainer_lib.batch_specs(self.trainer.element_spec)
        table = tf.nest.map_structure(any_size, part.table)
        self.traced[part.strategy] = made = program_lib.Program(
            train,
            trainer_lib.specs_of(broadcast),
            layout.Chunk(x, y, table),
            model=self.trainer.model,
            xla=part.strategy.xla,
            threads=self.threads(part.strategy, len(part.table.batch)),
        )
        return made

    def _one_by_one(
        self,
        full_batches: bool,
        fine: bool,
        broadcast: cohort.Broadcast,
        chunk: layout.Chunk,
    ) -> cohort.Trained:
        """Trains the clients of a chunk one after the other.

        Args:
          full_batches: Whether every batch has exactly B rows. Shapes are then fixed,
            as XLA requires.
          fine: See `layout.Strategy`.
          broadcast: What the server sends to each of them.
          chunk: The clients.
        """
        x, y, table = chunk
        query = self.query if fine else self.query.with_int32_sums()

        def client(
            k: tf.Tensor, total: cohort.CohortSum, kept: cohort.PerClient
        ) -> tuple[tf.Tensor, cohort.CohortSum, cohort.PerClient]:
            seed = noise.fold_in(broadcast.seed, table.keys[k])
            first, num_examples = table.first_row[k], table.num_examples[k]
            end = first + num_examples * table.epochs
            own = broadcast
            taken: list[tf.Tensor] = []
            if tables:  # Under XLA, each length of a slice would be compiled anew.
                rows = table.rows[first : first + num_examples]
                own, taken = lookups.narrow(tables, broadcast, x, rows)
            state = self.trainer.start(own, seed)

            def step(start, state, counted):
                size = tf.size(table.batch)
                if not full_batches:
                    left = num_examples - (start - first) % num_examples
                    size = tf.minimum(size, left)
                batch = _gather((x, y), tf.slice(table.rows, [start], [size]))
                batch = lookups.rename(tables, taken, batch[0]), batch[1]
                with lookups.plain_gathers(self.trainer.model, looked_up):
                    after = take_step(state, counted, batch, size, own)
                return start + size, *after

            _, state, counted = tf.while_loop(
                lambda start, *_: start < end,
                step,
                (first, state, total._replace(contribution=(), moments=())),
                parallel_iterations=1,
            )
            one, rows = self._result(
                own, seed, state, num_examples, table.windows[k], query
            )
            contributions = total.contribution
            if not self.keeps_updates:
                contributions = lookups.accumulate(
                    tables, taken, contributions, one.contribution
                )
            moments = cohort.add_nests(total.moments, one.moments)
            # TensorFlow writes these in place, as nothing else uses them.
            kept = tf.nest.map_structure(
                lambda rows, row: tf.tensor_scatter_nd_update(rows, [[k]], row[None]),
                kept,
                rows,
            )
            total = counted._replace(contribution=contributions, moments=moments)
            return k + 1, total, kept

        take_step = program_lib.in_own_graph(self._train_batch)
        tables = () if full_batches else self._lookups()
        looked_up = [self.trainer.aggregated[lookup.weight] for lookup in tables]
        total, kept = self._nobody(broadcast.weights, table, query)
        _, total, kept = tf.while_loop(
            lambda k, *_: k < table.num_clients,
            client,
            (tf.constant(0), total, kept),
            parallel_iterations=1,
        )
        grid_step = () if fine else query.coarse_grid_step(broadcast.params)
        return cohort.Trained(total, kept, grid_step)

    def _lookups(self) -> tuple[lookups.Lookup, ...]:
        """Returns the tables in which clients train only some rows.

        There are some only if the mechanism merely scales updates and adds them up.
        """
        query = self.query
        if (
            query.only_scales
            and not (self.keeps_updates or self.moments or query.keeps_window)
            and not query.mechanism.releases_weights
        ):
            return self.trainer.lookups
        return ()

    def _nobody(
        self,
        weights: list[tf.Tensor],
        table: layout.ClientTable,
        query: cohort_query.CohortQuery,
    ) -> tuple[cohort.CohortSum, cohort.PerClient]:
        """Returns the sum and the rows before any client has trained.

        The zeros depend on an argument. TensorFlow would fold zeros of a known shape
        into the function's graph, which would then hold a copy of the model for as
        long as it lives. Besides, constant rows cannot be written to.
        """
        zero = tf.cast(table.num_clients < 0, tf.float32)

        def unfold(tensor: tf.Tensor) -> tf.Tensor:
            made_by = getattr(tensor, "op", None)  # None for an eager tensor.
            one = tensor
            if made_by is not None and made_by.type == "Fill":
                one = made_by.inputs[1]  # Without millions of elements.
            value = tf.get_static_value(one)
            if value is None or tensor.shape.num_elements() < 2 or value.any():
                return tensor
            return tf.fill(tensor.shape, tf.cast(zero, tensor.dtype))

        def rows(width: int) -> tf.Tensor:
            size = tf.shape(table.members)[0]
            return tf.ensure_shape(tf.fill([size, width], zero), [None, width])

        spec, kept = cohort.UpdateSpec.of(weights), cohort.PerClient()
        total = cohort.CohortSum.zeros(self.trainer.no_metrics())
        if self.keeps_updates:
            # Not tensor arrays, which need twice the memory when stacked.
            kept = kept._replace(updates=rows(spec.size), scalars=rows(2))
        else:
            nothing = query.initial_sample_state(spec.variables)
            total = total._replace(contribution=nothing)
        if self.query.keeps_window:
            kept = kept._replace(window_norms=rows(len(weights)))
        if self.moments:
            moments = cohort.Moments(tf.zeros([]), tf.zeros([spec.size]), tf.zeros([]))
            total = total._replace(moments=moments)
        return tf.nest.map_structure(unfold, total), kept

    def _train_batched(
        self, broadcast: cohort.Broadcast, chunk: layout.Chunk
    ) -> cohort.Trained:
        """Trains all clients of a chunk at once; some of them may be padding.

        The result for each client is the same: `tf.vectorized_map` extends every
        operation over all clients. In each pass, clients with fewer steps start later,
        so that all clients finish together, with last batches of the same length.
        """
        x, y, table = chunk
        num_examples, batch_size = table.num_examples, tf.size(table.batch)
        per_pass = -(-num_examples // batch_size)
        longest = tf.reduce_max(per_pass)

        def start(key: tf.Tensor) -> nests.Nest:
            seed = noise.fold_in(broadcast.seed, key)
            nothing = cohort.CohortSum.zeros(self.trainer.no_metrics())
            return seed, (self.trainer.start(broadcast, seed), nothing)

        def step(s: tf.Tensor, clients: nests.Nest) -> tuple[tf.Tensor, nests.Nest]:
            place = s % longest - (longest - per_pass)
            active = place >= 0
            left = tf.where(active, num_examples - place * batch_size, 0)
            size = tf.minimum(batch_size, tf.reduce_max(left))
            places = table.batch[:size]
            # An idle client reads some row, but its result is discarded.
            first = table.first_row + s // longest * num_examples + place * batch_size
            first = tf.where(active, first, 0)
            batches = _gather((x, y), tf.gather(table.rows, first[:, None] + places))

            def one(arguments: nests.Nest) -> nests.Nest:
                before, batch, active = arguments
                state, total = before
                after = self._train_batch(state, total, batch, size, broadcast)
                return tf.nest.map_structure(
                    lambda new, old: tf.where(active, new, old), after, before
                )

            return s + 1, _for_all(one, (clients, batches, active))

        def finish(arguments: nests.Nest) -> tuple[cohort.CohortSum, cohort.PerClient]:
            seed, (state, total), *rest = arguments
            one, rows = self._result(broadcast, seed, state, *rest)
            return one._replace(
                loss=total.loss, examples=total.examples, metrics=total.metrics
            ), rows

        seeds, clients = _for_all(start, table.keys)
        _, clients = tf.while_loop(
            lambda s, _: s < longest * table.epochs,
            step,
            (tf.constant(0), clients),
            parallel_iterations=1,
        )
        totals, rows = _for_all(finish, (seeds, clients, num_examples, table.windows))
        present = tf.range(tf.size(table.keys)) < table.num_clients

        def sum_up(part: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
            here = _beside(present, part)
            part = tf.where(here, tf.cast(part, dtype), tf.zeros([], dtype))
            return tf.reduce_sum(part, axis=0)

        total = tf.nest.map_structure(lambda part: sum_up(part, part.dtype), totals)
        nobody = self.trainer.no_metrics()
        largest = [
            tf.reduce_max(tf.where(_beside(present, part), part, none), axis=0)
            for part, none in zip(totals.metrics.largest, nobody.largest, strict=True)
        ]
        total = total._replace(metrics=total.metrics._replace(largest=largest))
        if not self.keeps_updates:
            spec = cohort.UpdateSpec.of(broadcast.weights)
            nothing = self.query.initial_sample_state(spec.variables)
            exact = tf.nest.map_structure(
                lambda part, whole: sum_up(part, whole.dtype),
                totals.contribution,
                nothing,
            )
            total = total._replace(contribution=exact)
        return cohort.Trained(total, rows)

    def _train_batch(
        self,
        state: trainer_lib.ClientState,
        total: cohort.CohortSum,
        batch: tuple[nests.Nest, nests.Nest],
        size: tf.Tensor,
        broadcast: cohort.Broadcast,
    ) -> tuple[trainer_lib.ClientState, cohort.CohortSum]:
        """Takes one step of a client on a batch of `size` examples."""
        state, loss, metrics = self.trainer.step(
            state, *batch, broadcast, total.metrics
        )
        return state, total.with_batch(metrics, loss, size)

    def _result(
        self,
        broadcast: cohort.Broadcast,
        seed: tf.Tensor,
        state: trainer_lib.ClientState,
        num_examples: tf.Tensor,
        window: tf.Tensor,
        query: cohort_query.CohortQuery | None = None,
    ) -> tuple[cohort.CohortSum, cohort.PerClient]:
        """Clips a trained client's update and returns its upload.

        Args:
          broadcast: What the server sent to it.
          seed: The client's seed.
          state: The client's state after its last step.
          num_examples: Int32 scalar.
          window: Float32 [W, L], see `layout.ClientTable`.
          query: The query, perhaps `with_int32_sums`; None: as it is.

        Returns:
          Its contribution and `Moments`; and what is kept of the client.
        """
        query = query or self.query
        released = query.mechanism.releases_weights
        update = self.trainer.update(
            state, None if released else broadcast.weights, seed
        )
        update = cohort.UpdateSpec.of(broadcast.weights).require(update)
        total, rows = cohort.CohortSum.zeros(), cohort.PerClient()
        if query.keeps_window:
            rows = rows._replace(window_norms=query.mechanism.window_norms(update))
        if self.moments:
            total = total._replace(moments=_moments(update))
        if self.keeps_updates:  # `release.DeferredClipping` clips them later.
            scalars = query.update_norm(update), tf.cast(num_examples, tf.float32)
            return total, rows._replace(
                updates=cohort.flatten(update), scalars=tf.stack(scalars)
            )
        with noise.use_seed(noise.fold_in(seed, 0)):
            client = query.client(num_examples, window)
            one = algorithm.make_contribution(query, broadcast.params, update, client)
        return total._replace(contribution=one), rows


def _gather(nest: nests.Nest, rows: tf.Tensor) -> nests.Nest:
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), nest)


def _beside(mask: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    """Reshapes a mask [K] so that it broadcasts against `part`, [K, ...]."""
    return tf.reshape(mask, [-1] + [1] * (part.shape.rank - 1))


def _for_all(
    function: Callable[[nests.Nest], nests.Nest], clients: nests.Nest
) -> nests.Nest:
    """Calls a function of one client's tensors on all clients at once."""
    return tf.vectorized_map(function, clients, warn=False)


def _moments(update: list[tf.Tensor]) -> cohort.Moments:
    """Returns one client's `Moments`: zeros if its update is not finite."""
    flat = cohort.flatten(update)
    usable = tf.cast(tf.reduce_all(tf.math.is_finite(flat)), tf.float32)
    flat = tf.math.multiply_no_nan(flat, usable)
    return cohort.Moments(usable, flat, tf.reduce_sum(flat * flat))
