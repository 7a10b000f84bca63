"""The compiled cohort: every client of a round, inside `tf.function`s.

A round runs as a few calls of compiled functions, however many clients it has:

    for each replica, in parallel:   loop over its clients:
        start from the server's weights, train, clip, add to the sum
    finish:                          add up the replicas' sums, add noise,
                                     divide, update the model

`CohortFunction` is the pure part, a function of tensors that TFF workers run
as well; `CohortEngine` runs it on this machine's cores.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp_fl.engine import client_update
from tfdp_fl.mechanisms import cohort_query, contribution, noise


class ClientTable(NamedTuple):
    """What a cohort function is told about its clients (see `BatchPlan`).

    Attributes:
      rows: Int32 [S, B].
      batch_sizes: Int32 [S].
      first_step: Int32 [K + 1].
      members: Int32 [K].
      num_examples: Int32 [K].
      windows: Float32 [K, W, L], the norms of each client's last rounds, NaN
        where there are none; [K, 0, 0] if the mechanism keeps none.
    """

    rows: tf.Tensor
    batch_sizes: tf.Tensor
    first_step: tf.Tensor
    members: tf.Tensor
    num_examples: tf.Tensor
    windows: tf.Tensor


class Moments(NamedTuple):
    """Sums over clients for Geyer's V_c and U_s.

    Attributes:
      count: Float32 scalar, the number of usable updates.
      first: List of float32 tensors, the sum of the unclipped updates.
      second: List of float32 tensors, the sum of their squares.
    """

    count: tf.Tensor
    first: list[tf.Tensor]
    second: list[tf.Tensor]


class CohortSum(NamedTuple):
    """What a group of clients adds up to.

    Attributes:
      record: The sum of the clients' `Contribution`s.
      loss: Float32 scalar, the sum over examples of the training loss, as far
        as it is a number.
      examples: Float32 scalar, the number of examples of which it is.
      moments: A `Moments`, or () if it was not asked for.
    """

    record: contribution.Contribution
    loss: tf.Tensor
    examples: tf.Tensor
    moments: Any


class CollectedUpdates(NamedTuple):
    """Each client's own contribution, where a sum is not enough.

    Attributes:
      updates: Float32 [K, D], flattened and concatenated over variables.
      norms: Float32 [K].
      scalars: Float32 [K, ...], `Contribution.scalars` of each.
    """

    updates: tf.Tensor
    norms: tf.Tensor
    scalars: tf.Tensor


SUM, COLLECT_UPDATES, COLLECT_RECORDS = "sum", "updates", "records"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohortOptions:
    """What a cohort function returns, and for which shapes it is compiled.

    Attributes:
      output: `SUM`: the sum of the records; `COLLECT_UPDATES`: every client's
        unclipped update (for a clip that depends on all of them);
        `COLLECT_RECORDS`: every client's record (for secure aggregation).
      full_batches: Every batch has exactly B rows, so shapes are fixed.
      moments: Whether to return `Moments`.
      jit_compile: Whether XLA compiles the function.
    """

    output: str = SUM
    full_batches: bool = False
    moments: bool = False
    jit_compile: bool = False


class CohortFunction:
    """Trains clients one after the other in one replica, and adds them up."""

    def __init__(
        self,
        trainer: client_update.ClientTrainer,
        query: cohort_query.CohortQuery,
        options: CohortOptions,
    ):
        self._trainer = trainer
        self._query = query
        self._options = options

    def __call__(
        self,
        weights: list[tf.Tensor],
        unheard: list[tf.Tensor],
        params: Any,
        x: Any,
        y: Any,
        table: ClientTable,
        num_clients: tf.Tensor,
        learning_rate: tf.Tensor,
        seed: tf.Tensor,
    ) -> tuple[Any, list[tf.Tensor], tf.Tensor]:
        """Runs `num_clients` clients.

        Args:
          weights: The server's values of the trainer's variables.
          unheard: The server's values of the state that stays at the server.
          params: The query's sample params.
          x: Nest of feature tensors, leading dimension over stored examples.
          y: Nest of label tensors, likewise.
          table: A `ClientTable`, at least `num_clients` long.
          num_clients: Int32 scalar.
          learning_rate: Float32 scalar.
          seed: Int64 [2], new for every round.

        Returns:
          `(result, metric_state, window_norms)`: a `CohortSum`, or a
          `(CollectedUpdates, CohortSum without record)`; the values of the
          trainer's metric variables; float32 [K, L], each client's layer norms
          before noise ([K, 0] if the mechanism keeps no window).
        """
        trainer, options, query = self._trainer, self._options, self._query
        trainer.start_metrics()
        collect = options.output != SUM
        template = [
            client_update.for_record(tf.zeros(value.shape, value.dtype))
            for value in weights
        ]
        record = (
            ()
            if collect
            else made_by_each_run(
                query.initial_sample_state(template), num_clients
            )
        )
        moments: Any = ()
        if options.moments:
            zeros = [tf.zeros(value.shape) for value in weights]
            moments = made_by_each_run(
                Moments(tf.zeros([]), zeros, zeros), num_clients
            )
        size = tf.shape(table.members)[0]

        def rows_array(width: int) -> tf.TensorArray:
            return tf.TensorArray(tf.float32, size=size, element_shape=[width])

        collected = ()
        if collect:
            # Not an array of tensors, which is in memory twice when it is
            # stacked. Written in place, so it must be no constant, ever.
            width = sum(value.shape.num_elements() for value in weights)
            zero = tf.cast(num_clients < 0, tf.float32)
            collected = (
                tf.ensure_shape(tf.fill([size, width], zero), [None, width]),
                rows_array(query.num_scalars),
            )
        num_layers = len(weights) if query.keeps_window else 0
        windows = rows_array(num_layers) if num_layers else ()
        state = (
            tf.constant(0),
            record,
            moments,
            tf.zeros([]),
            tf.zeros([]),
            collected,
            windows,
        )

        def client(
            k, record, moments, loss, examples, collected, windows
        ) -> tuple:
            client_seed = noise.fold_in(seed, table.members[k])
            trainer.start(weights, unheard, learning_rate, client_seed)
            loss, examples = self._local_steps(
                k, table, x, y, weights, learning_rate, loss, examples
            )
            update = (
                trainer.weights()
                if query.mechanism.releases_weights
                else trainer.update(weights)
            )
            window = None
            if num_layers:
                window = table.windows[k]
                windows = windows.write(k, query.mechanism.window_norms(update))
            if options.moments:
                moments = _add_moments(moments, update)
            if options.output == COLLECT_UPDATES:
                norm = query.record_norm(update)
                row = _flatten(update, tf.math.is_finite(norm))
                collected = (
                    self._with_row(collected[0], k, row),
                    collected[1].write(k, query.with_norm_of_scalars(norm)),
                )
            else:
                with noise.seeded(noise.fold_in(client_seed, 0)):
                    one = query.preprocess_record(
                        params,
                        update,
                        contribution.Client(table.num_examples[k], window),
                    )
                if collect:
                    _check_one_by_one(one.update, weights)
                    scalars = tf.stack(one.scalars())
                    collected = (
                        self._with_row(collected[0], k, _flatten(one.update)),
                        collected[1].write(k, scalars),
                    )
                else:
                    record = query.accumulate_preprocessed_record(record, one)
            return k + 1, record, moments, loss, examples, collected, windows

        _, record, moments, loss, examples, collected, windows = tf.while_loop(
            lambda k, *_: k < num_clients, client, state, parallel_iterations=1
        )
        result = CohortSum(record, loss, examples, moments)
        if collect:
            scalars = collected[1].stack()
            result = (
                CollectedUpdates(
                    updates=collected[0],
                    norms=query.norm_of_scalars(scalars),
                    scalars=scalars,
                ),
                result,
            )
        metrics = trainer.metric_values()
        norms = windows.stack() if num_layers else tf.zeros([size, 0])
        return result, metrics, norms

    def _with_row(
        self, matrix: tf.Tensor, k: tf.Tensor, row: tf.Tensor
    ) -> tf.Tensor:
        """Returns the matrix with another row k; not to be used without."""
        if self._options.jit_compile:  # XLA writes it in place.
            return tf.tensor_scatter_nd_update(matrix, [[k]], row[None])
        return tf.raw_ops.InplaceUpdate(x=matrix, i=k[None], v=row[None])

    def _local_steps(
        self,
        k: tf.Tensor,
        table: ClientTable,
        x: Any,
        y: Any,
        weights: list[tf.Tensor],
        learning_rate: tf.Tensor,
        loss: tf.Tensor,
        examples: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        def step(s, loss, examples):
            size = table.batch_sizes[s]
            rows = table.rows[s]
            if not self._options.full_batches:
                rows = rows[:size]
            batch_x, batch_y = tf.nest.map_structure(
                lambda tensor: tf.gather(tensor, rows), (x, y)
            )
            batch_loss = self._trainer.step(
                batch_x, batch_y, weights, learning_rate
            )
            # One client's NaN is no reason not to know the others' loss.
            counts = tf.math.is_finite(batch_loss)
            weight = tf.where(counts, tf.cast(size, tf.float32), 0.0)
            batch_loss = tf.where(counts, batch_loss, 0.0)
            return s + 1, loss + batch_loss * weight, examples + weight

        _, loss, examples = tf.while_loop(
            lambda s, *_: s < table.first_step[k + 1],
            step,
            (table.first_step[k], loss, examples),
            parallel_iterations=1,
        )
        return loss, examples


def made_by_each_run(state: Any, count: tf.Tensor) -> Any:
    """Returns the same values, with zeros that no compiled function keeps.

    TensorFlow folds zeros of a known shape into the function's graph, which
    then holds a copy of the model for as long as it lives.

    Args:
      state: Nest of tensors, while a function is traced.
      count: Integer scalar, never negative, not known until the function runs.
    """
    zero = tf.cast(count < 0, tf.float32)

    def unfolded(tensor: tf.Tensor) -> tf.Tensor:
        value = tf.get_static_value(tensor)
        if value is None or value.size < 2 or value.any():
            return tensor
        return tf.fill(tensor.shape, tf.cast(zero, tensor.dtype))

    return tf.nest.map_structure(unfolded, state)


def _check_one_by_one(update: Any, weights: list[tf.Tensor]) -> None:
    """Raises ValueError unless a record holds an update, and nothing else."""
    if not isinstance(update, list) or len(update) != len(weights):
        raise ValueError(
            "secure_aggregation needs a mechanism whose clients hand in one "
            "tensor for each variable, got a query that makes "
            f"{type(update).__name__} of them: use tfdp_fl.AdaptiveClipping, "
            "whose bit goes through the secure sum as well."
        )


def _flatten(
    update: list[tf.Tensor], usable: tf.Tensor | None = None
) -> tf.Tensor:
    flat = tf.concat(
        [tf.reshape(tf.cast(part, tf.float32), [-1]) for part in update], 0
    )
    if usable is None:
        return flat
    return tf.math.multiply_no_nan(flat, tf.cast(usable, tf.float32))


def unflatten(
    flat: tf.Tensor, shapes: list[tf.TensorShape], dtypes: list[tf.DType]
) -> list[tf.Tensor]:
    """Splits a flat vector into tensors of the given shapes and dtypes."""
    sizes = [shape.num_elements() for shape in shapes]
    return [
        tf.cast(tf.reshape(part, shape), dtype)
        for part, shape, dtype in zip(
            tf.split(flat, sizes), shapes, dtypes, strict=True
        )
    ]


def _add_moments(moments: Moments, update: list[tf.Tensor]) -> Moments:
    usable = tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(part)) for part in update]
    )
    flag = tf.cast(usable, tf.float32)
    parts = [
        tf.math.multiply_no_nan(tf.cast(part, tf.float32), flag)
        for part in update
    ]
    return Moments(
        moments.count + flag,
        [a + b for a, b in zip(moments.first, parts, strict=True)],
        [a + b * b for a, b in zip(moments.second, parts, strict=True)],
    )


def sum_collected(
    query: cohort_query.CohortQuery,
    params: Any,
    updates: tf.Tensor,
    members: tf.Tensor,
    seed: tf.Tensor,
    shapes: list[tf.TensorShape],
    dtypes: list[tf.DType],
) -> contribution.Contribution:
    """Preprocesses and adds up updates that waited for a joint clip.

    Args:
      query: The mechanism's query.
      params: Its sample params, with the clip of this round.
      updates: Float32 [K, D].
      members: Int32 [K], the clients' places in the cohort.
      seed: Int64 [2], the round's seed.
      shapes: Each variable's shape.
      dtypes: Each variable's dtype.
    """
    template = [
        tf.zeros(shape, dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]

    def client(k, record):
        client_seed = noise.fold_in(seed, members[k])
        with noise.seeded(noise.fold_in(client_seed, 0)):
            one = query.preprocess_record(
                params, unflatten(updates[k], shapes, dtypes)
            )
        return k + 1, query.accumulate_preprocessed_record(record, one)

    _, record = tf.while_loop(
        lambda k, _: k < tf.shape(updates)[0],
        client,
        (
            tf.constant(0),
            made_by_each_run(
                query.initial_sample_state(template), tf.shape(updates)[0]
            ),
        ),
        parallel_iterations=1,
    )
    return record


def preprocess_collected(
    query: cohort_query.CohortQuery,
    params: Any,
    updates: tf.Tensor,
    members: tf.Tensor,
    seed: tf.Tensor,
    shapes: list[tf.TensorShape],
    dtypes: list[tf.DType],
) -> CollectedUpdates:
    """Returns the records of updates that waited for a joint clip.

    What `sum_collected` adds up (for its arguments see there), one by one.
    """
    width = sum(shape.num_elements() for shape in shapes)

    def client(row):
        update, member = row
        client_seed = noise.fold_in(seed, member)
        with noise.seeded(noise.fold_in(client_seed, 0)):
            one = query.preprocess_record(
                params, unflatten(update, shapes, dtypes)
            )
        return _flatten(one.update), tf.stack(one.scalars())

    flat, scalars = tf.map_fn(
        client,
        (updates, members),
        parallel_iterations=1,
        fn_output_signature=(
            tf.TensorSpec([width], tf.float32),
            tf.TensorSpec([query.num_scalars], tf.float32),
        ),
    )
    return CollectedUpdates(
        updates=flat, norms=query.norm_of_scalars(scalars), scalars=scalars
    )
