"""Clients one after the other: of any model, and any mechanism.

A round runs as a few calls of one compiled function, however many clients it has:

    for every thread:   loop over its clients:
        start from the server's weights, train, clip, add to the sum
    release:            add up the threads' sums, add noise, divide, update the
                        model

`OneByOne` is the loop, a pure function of tensors that workers run as well.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdp_fl.engine import cohort, tables
from tfdp_fl.engine import trainer as trainer_lib
from tfdp_fl.mechanisms import cohort_query, contribution, noise


@dataclasses.dataclass(frozen=True, eq=False)
class OneByOne:
    """Trains clients one after the other, and adds them up or collects them.

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
        query, trainer = self.query, self.trainer

        def client(
            k: tf.Tensor,
            total: cohort.CohortSum,
            metrics: list[tf.Tensor],
            collected: Any,
            windows: Any,
        ) -> tuple[tf.Tensor, cohort.CohortSum, list[tf.Tensor], Any, Any]:
            seed = noise.fold_in(received.seed, table.members[k])
            state = trainer.start(received, seed)
            state, total, metrics = self._local_steps(
                k, state, total, metrics, received, x, y, table
            )
            released = query.mechanism.releases_weights
            update = trainer.update(state, None if released else received.weights, seed)
            window = None
            if query.keeps_window:
                window = table.windows[k]
                windows = windows.write(k, query.mechanism.window_norms(update))
            if self.moments:
                moments = _add_moments(total.moments, update)
                total = total._replace(moments=moments)
            if self.output == cohort.EACH_UPDATE:  # Clipped later.
                norm = query.record_norm(update)
                weight = self._weight(table, k)
                row = cohort.flatten(update, tf.math.is_finite(norm))
                scalars = query.with_norm_of_scalars(norm, weight)
                collected = self._with_row(collected, k, row, scalars)
                return k + 1, total, metrics, collected, windows
            with noise.seeded(noise.fold_in(seed, 0)):
                one = query.preprocess_record(
                    received.params,
                    update,
                    contribution.Client(
                        table.num_examples[k], window, self._weight(table, k)
                    ),
                )
            if self.output == cohort.EACH_CONTRIBUTION:
                _check_one_by_one(one.update, received.weights)
                row, scalars = cohort.flatten(one.update), one.scalars()
                collected = self._with_row(collected, k, row, tf.stack(scalars))
            else:
                added = query.accumulate_preprocessed_record(total.contribution, one)
                total = total._replace(contribution=added)
            return k + 1, total, metrics, collected, windows

        total, collected, windows = self._nobody(received, table, num_clients)
        metrics = [tf.zeros(each.shape, each.dtype) for each in trainer.metric_specs]
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

    def _weight(self, table: tables.ClientTable, k: tf.Tensor) -> tf.Tensor | None:
        """Returns what client k counts; None: 1."""
        if isinstance(table.measured, tuple):
            return None
        return self.query.client_weight(table.measured[k])

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

    def _with_row(
        self, collected: Any, k: tf.Tensor, row: tf.Tensor, scalars: tf.Tensor
    ) -> Any:
        """Keeps client k's update; the matrix is not to be used without it."""
        matrix, array = collected
        # Written in place, as nothing else uses it.
        matrix = tf.tensor_scatter_nd_update(matrix, [[k]], row[None])
        return matrix, array.write(k, scalars)

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
    ) -> tuple[trainer_lib.ClientState, cohort.CohortSum, list[tf.Tensor]]:
        """Takes client k's steps; adds its loss, examples and metrics to the sums."""

        def step(s, state, metrics, loss, examples):
            size = table.batch_sizes[s]
            rows = table.rows[s]
            if not self.full_batches:
                rows = rows[:size]
            batch_x, batch_y = tf.nest.map_structure(
                lambda tensor: tf.gather(tensor, rows), (x, y)
            )
            state, batch_loss, metrics = self.trainer.step(
                state, batch_x, batch_y, received, metrics
            )
            # One client's NaN is no reason not to know the others' loss.
            counts = tf.math.is_finite(batch_loss)
            weight = tf.where(counts, tf.cast(size, tf.float32), 0.0)
            batch_loss = tf.where(counts, cohort.bounded_loss(batch_loss), 0.0)
            loss += batch_loss * weight
            return s + 1, state, metrics, loss, examples + weight

        _, state, metrics, loss, examples = tf.while_loop(
            lambda s, *_: s < table.first_step[k + 1],
            step,
            (table.first_step[k], state, metrics, total.loss, total.examples),
            parallel_iterations=1,
        )
        return state, total._replace(loss=loss, examples=examples), metrics


def _check_one_by_one(update: Any, weights: list[tf.Tensor]) -> None:
    """Raises ValueError unless an update is handed in, and nothing else."""
    if not isinstance(update, list) or len(update) != len(weights):
        raise ValueError(
            "secure_aggregation needs a mechanism whose clients hand in one "
            "tensor for each variable, got a query that makes "
            f"{type(update).__name__} of them: use tfdp_fl.AdaptiveClipping, "
            "whose bit goes through the secure sum as well."
        )


def _add_moments(moments: cohort.Moments, update: list[tf.Tensor]) -> cohort.Moments:
    usable = tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in update])
    flag = tf.cast(usable, tf.float32)
    parts = [
        tf.math.multiply_no_nan(tf.cast(part, tf.float32), flag) for part in update
    ]
    return cohort.Moments(
        moments.count + flag,
        [a + b for a, b in zip(moments.first, parts, strict=True)],
        [a + b * b for a, b in zip(moments.second, parts, strict=True)],
    )
