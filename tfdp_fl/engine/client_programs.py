"""Clients of any model and any mechanism: one after the other, or a batch of them.

`OneByOne` is a loop over clients. `Batched` computes the same for a chunk of
clients at once, as one batched program: what a GPU is good at. Both are pure
functions of tensors, and share what becomes of a client that has trained:
`ClientProgram.result`, where the mechanism clips.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp_fl.engine import cohort, lookups, tables
from tfdp_fl.engine import trainer as trainer_lib
from tfdp_fl.mechanisms import cohort_query, contribution, noise


class ClientResult(NamedTuple):
    """What is made of one client's training; () for what is not wanted.

    Attributes:
      contribution: Its `Contribution`, where contributions are summed.
      row: Float32 [D], its flattened update, where each one's is kept.
      scalars: Float32 [...], what is handed in beside that row.
      window_norms: Float32 [L], the norms that it remembers of this round.
      moments: Its `Moments`.
    """

    contribution: Any = ()
    row: Any = ()
    scalars: Any = ()
    window_norms: Any = ()
    moments: Any = ()


@dataclasses.dataclass(frozen=True, eq=False)
class ClientProgram:
    """How clients train, and what is made of their updates.

    Attributes:
      trainer: Trains a client.
      query: The mechanism's query.
      output: `SUM`, `EACH_UPDATE` or `EACH_CONTRIBUTION`.
      full_batches: Every batch has exactly B rows, so shapes are fixed.
      moments: Whether to return `Moments`.
    """

    trainer: trainer_lib.Trainer
    query: cohort_query.CohortQuery
    output: str = cohort.SUM
    full_batches: bool = False
    moments: bool = False

    def result(
        self,
        received: cohort.Received,
        seed: tf.Tensor,
        state: trainer_lib.ClientState,
        num_examples: tf.Tensor,
        window: Any,
        measured: Any,
    ) -> ClientResult:
        """Returns what a client that has trained hands in.

        Args:
          received: What the server sent to it.
          seed: The client's.
          state: After its last step.
          num_examples: Int32 scalar.
          window: Float32 [W, L], see `tables.ClientTable`.
          measured: Float32 scalar, or (), likewise.
        """
        query = self.query
        released = query.mechanism.releases_weights
        update = self.trainer.update(
            state, None if released else received.weights, seed
        )
        weight = None
        if not isinstance(measured, tuple):
            weight = query.client_weight(measured)
        result = ClientResult()
        if query.keeps_window:
            result = result._replace(window_norms=query.mechanism.window_norms(update))
        if self.moments:
            result = result._replace(moments=_moments(update))
        if self.output == cohort.EACH_UPDATE:  # Clipped later.
            norm = query.record_norm(update)
            return result._replace(
                row=cohort.flatten(update, tf.math.is_finite(norm)),
                scalars=query.with_norm_of_scalars(norm, weight),
            )
        with noise.seeded(noise.fold_in(seed, 0)):
            one = query.preprocess_record(
                received.params,
                update,
                contribution.Client(
                    num_examples, window if query.keeps_window else None, weight
                ),
            )
        if self.output == cohort.SUM:
            return result._replace(contribution=one)
        _check_one_by_one(one.update, received.weights)
        return result._replace(
            row=cohort.flatten(one.update), scalars=tf.stack(one.scalars())
        )

    def step(
        self,
        state: trainer_lib.ClientState,
        metrics: list[tf.Tensor],
        loss: tf.Tensor,
        examples: tf.Tensor,
        batch: tuple[Any, Any],
        size: tf.Tensor,
        received: cohort.Received,
    ) -> tuple[trainer_lib.ClientState, list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Takes one step of a client; adds its batch of `size` examples to the sums."""
        state, batch_loss, metrics = self.trainer.step(state, *batch, received, metrics)
        # One client's NaN is no reason not to know the others' loss.
        counts = tf.math.is_finite(batch_loss)
        weight = tf.where(counts, tf.cast(size, tf.float32), 0.0)
        batch_loss = tf.where(counts, cohort.bounded_loss(batch_loss), 0.0)
        return state, metrics, loss + batch_loss * weight, examples + weight

    def no_metrics(self) -> list[tf.Tensor]:
        """Returns the metrics' state before any example."""
        return [tf.zeros(each.shape, each.dtype) for each in self.trainer.metric_specs]


class OneByOne(ClientProgram):
    """Trains clients one after the other, and adds them up or collects them."""

    def __call__(
        self,
        received: cohort.Received,
        x: Any,
        y: Any,
        table: tables.ClientTable,
        num_clients: tf.Tensor,
    ) -> cohort.Trained:
        """Trains `num_clients` clients.

        Args:
          received: What the server sends to each of them.
          x: Nest of feature tensors, leading dimension over stored examples.
          y: Nest of label tensors, likewise.
          table: A `ClientTable`, at least `num_clients` long.
          num_clients: Int32 scalar.
        """
        query = self.query

        def client(
            k: tf.Tensor,
            total: cohort.CohortSum,
            metrics: list[tf.Tensor],
            collected: Any,
            windows: Any,
        ) -> tuple[tf.Tensor, cohort.CohortSum, list[tf.Tensor], Any, Any]:
            seed = noise.fold_in(received.seed, table.members[k])
            own, taken = received, None
            if self.lookups:
                rows = table.rows[table.first_step[k] : table.first_step[k + 1]]
                narrow, taken = lookups.narrow(self.lookups, received.weights, x, rows)
                own = received._replace(weights=narrow)
            state = self.trainer.start(own, seed)
            state, total, metrics = self._local_steps(
                k, state, total, metrics, own, x, y, table, taken
            )
            measured = table.measured
            result = self.result(
                own,
                seed,
                state,
                table.num_examples[k],
                table.windows[k],
                measured if isinstance(measured, tuple) else measured[k],
            )
            if self.moments:
                moments = cohort.added(total.moments, result.moments)
                total = total._replace(moments=moments)
            if query.keeps_window:
                windows = windows.write(k, result.window_norms)
            if self.output == cohort.SUM:
                total = total._replace(
                    contribution=self._added(
                        total.contribution, result.contribution, taken
                    )
                )
            else:
                matrix, array = collected
                # Written in place, as nothing else uses it.
                matrix = tf.tensor_scatter_nd_update(matrix, [[k]], result.row[None])
                collected = matrix, array.write(k, result.scalars)
            return k + 1, total, metrics, collected, windows

        total, collected, windows = self._nobody(received, table, num_clients)
        metrics = self.no_metrics()
        _, total, metrics, collected, windows = tf.while_loop(
            lambda k, *_: k < num_clients,
            client,
            (tf.constant(0), total, metrics, collected, windows),
            parallel_iterations=1,
        )
        if collected:
            updates, scalars = collected[0], collected[1].stack()
            collected = cohort.CollectedUpdates(
                updates, query.norm_of_scalars(scalars), scalars
            )
        norms = tf.zeros([0, 0])
        if query.keeps_window:
            norms = windows.stack()
        return cohort.Trained(total, metrics, norms, collected)

    @property
    def lookups(self) -> tuple[lookups.Lookup, ...]:
        """The tables of which clients train only some rows.

        Only where an update is nothing but scaled and added up.
        """
        if (
            self.output == cohort.SUM
            and self.query.only_scales
            and not (self.moments or self.full_batches or self.query.keeps_window)
            and not self.query.mechanism.releases_weights
        ):
            return self.trainer.lookups
        return ()

    def _added(self, total: Any, one: Any, taken: Any) -> Any:
        """Returns a sum of contributions with a client's added."""
        if not taken:
            return self.query.accumulate_preprocessed_record(total, one)
        update = lookups.add(self.lookups, taken, total.update, one.update)
        rest = self.query.accumulate_preprocessed_record(
            total._replace(update=[]), one._replace(update=[])
        )
        return rest._replace(update=update)

    def _nobody(
        self,
        received: cohort.Received,
        table: tables.ClientTable,
        num_clients: tf.Tensor,
    ) -> tuple[cohort.CohortSum, Any, Any]:
        """Returns the sum, the updates and the norms before any client."""
        weights, query = received.weights, self.query
        size = tf.shape(table.members)[0]

        def rows_array(width: int) -> tf.TensorArray:
            return tf.TensorArray(tf.float32, size=size, element_shape=[width])

        contributions: Any = ()
        moments: Any = ()
        collected: Any = ()
        windows: Any = ()
        if self.output == cohort.SUM:
            template = [
                cohort.as_handed_in(tf.zeros(value.shape, value.dtype))
                for value in weights
            ]
            contributions = cohort.made_by_each_run(
                query.initial_sample_state(template), num_clients
            )
        else:
            # Not an array of tensors, which is in memory twice when it is
            # stacked. Written in place, so it must be no constant, ever.
            width = sum(value.shape.num_elements() for value in weights)
            zero = tf.cast(num_clients < 0, tf.float32)
            collected = (
                tf.ensure_shape(tf.fill([size, width], zero), [None, width]),
                rows_array(query.num_scalars),
            )
        if self.moments:
            zeros = [tf.zeros(value.shape) for value in weights]
            moments = cohort.made_by_each_run(
                cohort.Moments(tf.zeros([]), zeros, zeros), num_clients
            )
        if query.keeps_window:
            windows = rows_array(len(weights))
        total = cohort.CohortSum(contributions, tf.zeros([]), tf.zeros([]), moments)
        return total, collected, windows

    def _local_steps(
        self,
        k: tf.Tensor,
        state: trainer_lib.ClientState,
        total: cohort.CohortSum,
        metrics: list[tf.Tensor],
        received: cohort.Received,
        x: Any,
        y: Any,
        table: tables.ClientTable,
        taken: list[tf.Tensor] | None,
    ) -> tuple[trainer_lib.ClientState, cohort.CohortSum, list[tf.Tensor]]:
        """Takes client k's steps; adds its loss, examples and metrics to the sums."""

        def step(s, state, metrics, loss, examples):
            size = table.batch_sizes[s]
            rows = table.rows[s]
            if not self.full_batches:
                rows = rows[:size]
            batch = tf.nest.map_structure(
                lambda tensor: tf.gather(tensor, rows), (x, y)
            )
            if taken:
                features = lookups.rename(self.lookups, taken, batch[0])
                batch = (features, batch[1])
            after = self.step(state, metrics, loss, examples, batch, size, received)
            return s + 1, *after

        _, state, metrics, loss, examples = tf.while_loop(
            lambda s, *_: s < table.first_step[k + 1],
            step,
            (table.first_step[k], state, metrics, total.loss, total.examples),
            parallel_iterations=1,
        )
        return state, total._replace(loss=loss, examples=examples), metrics


class Batched(ClientProgram):
    """Trains a chunk of clients at once, as one batched program.

    It computes what `OneByOne` does, client by client, for whatever model and
    mechanism: `tf.vectorized_map` makes every operation one over all clients.
    """

    def __call__(
        self, received: cohort.Received, x: Any, y: Any, table: tables.BatchedTable
    ) -> cohort.Trained:
        """Trains K clients.

        Args:
          received: What the server sends to each of them.
          x: Nest of feature tensors, leading dimension over stored examples.
          y: Nest of label tensors, likewise.
          table: A `BatchedTable`.
        """

        def start(member: tf.Tensor) -> Any:
            seed = noise.fold_in(received.seed, member)
            state = self.trainer.start(received, seed)
            return seed, (state, self.no_metrics(), tf.zeros([]), tf.zeros([]))

        def step(s: tf.Tensor, clients: Any) -> tuple[tf.Tensor, Any]:
            size = table.sizes[s]
            rows = table.rows[s]
            if not self.full_batches:
                rows = rows[:, :size]

            def one(arguments: Any) -> Any:
                before, batch, active = arguments
                state, metrics, loss, examples = before
                after = self.step(state, metrics, loss, examples, batch, size, received)
                return tf.nest.map_structure(
                    lambda new, old: tf.where(active, new, old), after, before
                )

            batches = tf.nest.map_structure(
                lambda tensor: tf.gather(tensor, rows), (x, y)
            )
            return s + 1, _for_all(one, (clients, batches, table.active[s]))

        def finish(arguments: Any) -> ClientResult:
            seed, (state, *_), num_examples, window, measured = arguments
            return self.result(received, seed, state, num_examples, window, measured)

        seeds, clients = _for_all(start, table.members)
        _, clients = tf.while_loop(
            lambda s, _: s < tf.shape(table.rows)[0],
            step,
            (tf.constant(0), clients),
            parallel_iterations=1,
        )
        results = _for_all(
            finish,
            (seeds, clients, table.num_examples, table.windows, table.measured),
        )
        summed = tf.nest.map_structure(
            lambda tensor: tf.reduce_sum(tensor, axis=0),
            (results.contribution, *clients[1:], results.moments),
        )
        one, metrics, loss, examples, moments = summed
        collected: Any = ()
        if self.output != cohort.SUM:
            collected = cohort.CollectedUpdates(
                results.row,
                self.query.norm_of_scalars(results.scalars),
                results.scalars,
            )
        norms = results.window_norms if self.query.keeps_window else tf.zeros([0, 0])
        total = cohort.CohortSum(one, loss, examples, moments)
        return cohort.Trained(total, metrics, norms, collected)


def _for_all(function: Any, clients: Any) -> Any:
    """Calls a function of one client's tensors for all clients at once."""
    return tf.vectorized_map(function, clients, warn=False)


def _check_one_by_one(update: Any, weights: list[tf.Tensor]) -> None:
    """Raises ValueError unless an update is handed in, and nothing else."""
    if not isinstance(update, list) or len(update) != len(weights):
        raise ValueError(
            "secure_aggregation needs a mechanism whose clients hand in one "
            "tensor for each variable, got a query that makes "
            f"{type(update).__name__} of them: use tfdp_fl.AdaptiveClipping, "
            "whose bit goes through the secure sum as well."
        )


def _moments(update: list[tf.Tensor]) -> cohort.Moments:
    """Returns one client's `Moments`: zeros if its update is no numbers."""
    usable = tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in update])
    flag = tf.cast(usable, tf.float32)
    parts = [
        tf.math.multiply_no_nan(tf.cast(part, tf.float32), flag) for part in update
    ]
    return cohort.Moments(flag, parts, [part * part for part in parts])
