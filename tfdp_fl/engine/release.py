"""Releases a round: adds noise to the sum, divides, and updates the model.

If each client's update was kept, they are clipped first (`DeferredClipping`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfdp_fl import _signals, algorithm, keras_versions
from tfdp_fl.datasets import ClientFailure, nests
from tfdp_fl.engine import cohort, program
from tfdp_fl.mechanisms import cohort_query, contribution, noise
from tfdp_fl.terms import TrustModel


class ServerUpdate:
    """Applies the mean update to the server's weights (FedOpt, Reddi et al. 2021).

    Without an optimizer, w <- w + mean (FedAvg). With one, the negated mean is its
    gradient: SGD gives FedAvg with a server learning rate, SGD with momentum gives
    FedAvgM, and Adam gives FedAdam. Non-trainable state always moves by the mean.

    Attributes:
      variables: The server's weights, in the order of an update.
      state: The optimizer's variables, for checkpoints.
      num_trainable: How many of `variables` are trainable.
      has_non_trainable: Whether non-trainable state is aggregated too.
    """

    def __init__(
        self,
        trainable: list[keras_versions.KerasVariable],
        non_trainable: list[keras_versions.KerasVariable],
        optimizer: tf.keras.optimizers.Optimizer | None = None,
        non_negative_variables: list[keras_versions.KerasVariable] | None = None,
    ):
        """Makes the optimizer's variables.

        Args:
          trainable: The model's trainable Keras variables.
          non_trainable: Its non-trainable Keras variables that are aggregated.
          optimizer: A Keras optimizer, or None.
          non_negative_variables: The members of `non_trainable` that noise must not
            push below zero. (Other variables may have a constraint of their layer.)
        """
        self._owned = list(trainable)
        self._trainable = keras_versions.tf_variables(trainable)
        self._non_trainable = keras_versions.tf_variables(non_trainable)
        floored = set(map(id, non_negative_variables or ()))
        self._limits: list[Callable[[tf.Tensor], tf.Tensor] | None] = [
            getattr(variable, "constraint", None)
            or (_floor if id(variable) in floored else None)
            for variable in non_trainable
        ]
        self._optimizer = optimizer
        self.variables: list[tf.Variable] = self._trainable + self._non_trainable
        self.state: list[tf.Variable] = []
        if optimizer is not None:
            self.state = keras_versions.build_optimizer(optimizer, self._owned)
        self.num_trainable = len(self._trainable)
        self.has_non_trainable = bool(non_trainable)

    def apply(self, mean: list[tf.Tensor]) -> None:
        """Updates the model with the released mean update."""
        count = len(self._trainable)
        if self._optimizer is None:
            for variable, value in zip(self._trainable, mean[:count], strict=True):
                if value.dtype == variable.dtype:
                    variable.assign_add(value)
                else:  # Rounded only once, after the noise was added.
                    variable.assign(_add_wide(variable, value))
        else:
            gradients = [
                -tf.cast(value, variable.dtype)
                for variable, value in zip(self._trainable, mean[:count], strict=True)
            ]
            self._optimizer.apply_gradients(zip(gradients, self._owned, strict=True))
        for place, value in enumerate(mean[count:]):
            variable = self._non_trainable[place]
            variable.assign(self._within(place, _add_wide(variable, value)))

    def _within(self, place: int, value: tf.Tensor) -> tf.Tensor:
        """Moves a released value back into its allowed range; noise may leave it."""
        limit = self._limits[place]
        return value if limit is None else limit(value)

    def finalize(self) -> None:
        """Gives the model its final values, as Keras does at the end of `fit`.

        With `use_ema`, these are the optimizer's running average of the weights. It
        averages released weights, so it costs no privacy.
        """
        finalize = getattr(self._optimizer, "finalize_variable_values", None)
        if finalize is not None:
            finalize(self._owned)

    def replace(self, weights: list[tf.Tensor]) -> bool:
        """Sets the model to released weights (NbAFL); returns True."""
        count = len(self._trainable)
        for place, variable in enumerate(self.variables):
            value = tf.cast(weights[place], variable.dtype)
            variable.assign(
                value if place < count else self._within(place - count, value)
            )
        return True


def _floor(value: tf.Tensor) -> tf.Tensor:
    return tf.maximum(value, 0)


def _add_wide(variable: tf.Variable, change: tf.Tensor) -> tf.Tensor:
    """Returns variable + change; the change may have the wider dtype."""
    wide = tf.float64 if tf.float64 in (variable.dtype, change.dtype) else change.dtype
    moved = tf.cast(variable, wide) + tf.cast(change, wide)
    return tf.cast(moved, variable.dtype)


class MetricResults:
    """Computes a round's metrics from exact sums, for the history.

    That is no part of the release: `result()` may be the user's code, and an error in
    it must not decide whether a round is released. The results are NaN then.
    """

    def __init__(self, function: Callable[[cohort.MetricState], dict[str, tf.Tensor]]):
        """Takes the function that computes the results, by name."""
        self._function = function
        self._names: list[str] = []
        self._traced: tf.types.experimental.ConcreteFunction | None = None

    def forget(self) -> None:
        """Makes the next call of `trace` trace it anew."""
        self._traced = None

    def trace(self, state: cohort.MetricState) -> None:
        """Traces the function for a state, or its specs, once."""

        def compute(*flat: tf.Tensor) -> tf.Tensor:
            *values, examples = flat
            results = self._function(tf.nest.pack_sequence_as(state, values))
            self._names = list(results)
            return tf.stack(
                [
                    # NaN, as in abandoned rounds, if no client has a loss.
                    tf.where(examples > 0, tf.cast(value, tf.float32), np.nan)
                    for value in results.values()
                ]
            )

        leaves = [*tf.nest.flatten(state), tf.TensorSpec([], tf.float32)]
        if len(leaves) > 1 and self._traced is None:
            function = tf.function(compute, autograph=False)
            self._traced = function.get_concrete_function(*map(_spec_of, leaves))

    def __call__(
        self, state: cohort.MetricState, examples: tf.Tensor
    ) -> dict[str, float]:
        """Returns the metrics of a state, a sum over `examples` examples."""
        if self._traced is None:
            return {}
        try:
            (values,) = _call_flat(self._traced, [*tf.nest.flatten(state), examples])
            values = values.numpy().tolist()
        except Exception:  # Whatever it is, it depends on exact sums.
            values = [np.nan] * len(self._names)
        return dict(zip(self._names, values, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Release:
    """Adds a round's noise, divides, and updates the model.

    Attributes:
      query: The mechanism's query.
      server: Holds the model's weights.
      metric_results: Computes the metrics' results from the sums of their states.
    """

    query: cohort_query.CohortQuery
    server: ServerUpdate
    metric_results: MetricResults
    _log_names: list[str] = dataclasses.field(default_factory=list)
    _said: list[bool] = dataclasses.field(default_factory=list)
    # Traced once, however many threads had clients, as tracing fixes the optimizer's
    # current attributes.
    _traced: list[tf.types.experimental.ConcreteFunction] = dataclasses.field(
        default_factory=list
    )

    def __call__(
        self, pending: cohort.PendingRound, paid: float | None
    ) -> tuple[contribution.RoundState, dict[str, float]]:
        """Releases a round; returns the query's next state and the logs.

        Args:
          pending: The round.
          paid: The noise multiplier that was paid for, from `Receipt.redeem`.
        """
        answered = float(pending.cohort_size - len(pending.failures))
        seed = pending.inputs.seed.astype(np.uint64)
        inputs, charged = pending.inputs, math.inf
        if self.query.mechanism.trust_model == TrustModel.CENTRAL:
            charged = self.query.paid_mu_squared(
                paid, inputs.clients_per_round, inputs.noise_multiplier
            )
        pending.sums = [functools.reduce(cohort.CohortSum.plus, pending.sums)]
        # While anything holds the weights that were sent, the model would be copied.
        pending.broadcast = pending.broadcast._replace(weights=[])
        state = with_variables(pending.state)
        leaves = tf.nest.flatten((pending.sums[0], state, seed, answered, charged))
        flat = [
            leaf.handle if isinstance(leaf, tf.Variable) else program.as_tensor(leaf)
            for leaf in leaves
        ]
        self.trace(pending.sums[0], state)
        traced, total = self._traced[0], pending.sums[0]
        after, values = nests.pack(traced.structured_outputs, _call_flat(traced, flat))
        noise_state = tf.nest.map_structure(
            lambda old, new: old if isinstance(old, tf.Variable) else new,
            state.noise_state,
            after.noise_state,
        )
        state = after._replace(noise_state=noise_state)
        *logged, fills = values.numpy().tolist()
        logs = dict(zip(self._log_names, logged, strict=True))
        logs |= self.metric_results(total.metrics, total.examples)
        if fills and not self._said:
            self._said.append(True)
            _signals.warn(
                "The statistics that clients upload, such as the moving variance of a "
                "BatchNormalization, fill the clip, so that the weights hardly learn. "
                "Scale the features to a variance near 1, or pass "
                "non_trainable_state='keep' to the model."
            )
        return state, logs

    def forget(self) -> None:
        """Makes the next call of `trace` trace it anew."""
        self._traced.clear()
        self.metric_results.forget()

    def trace(self, total: nests.Nest, state: contribution.RoundState) -> None:
        """Traces the release once, before its first round is charged.

        Args:
          total: The sum of a cohort, or its specs.
          state: The round's state.
        """
        if self._traced:
            return
        number = tf.TensorSpec([], tf.float32)
        arguments = total, state, tf.TensorSpec([2], tf.uint64), number, number
        structure = tf.nest.map_structure(lambda _: None, arguments)
        shapes = [leaf.shape for leaf in tf.nest.flatten(state)]

        def function(*flat: tf.Tensor) -> nests.Nest:
            total, state, *rest = tf.nest.pack_sequence_as(structure, flat)
            variables = tf.nest.flatten(state)
            values = list(map(_read, variables, shapes))
            state = tf.nest.pack_sequence_as(state, values)
            state, logs = self._noise_and_move(total, state, *rest)
            after = map(_assign, variables, tf.nest.flatten(state))
            return tf.nest.pack_sequence_as(state, list(after)), logs

        specs = map(_spec_of, tf.nest.flatten(arguments))
        traced = tf.function(function, autograph=False).get_concrete_function(*specs)
        self.metric_results.trace(total.metrics)
        self._traced.append(traced)

    def _noise_and_move(self, total, state, seed, answered, charged):
        contribution = total.contribution
        with noise.use_seed(noise.fold_in(seed, -1)):
            mean, new_state = algorithm.release(
                self.query, contribution, state, charged
            )
        mechanism = self.query.mechanism
        if mechanism.releases_weights:
            # Whether any client answered has no noise; a central guarantee hides it.
            is_central = mechanism.trust_model == TrustModel.CENTRAL
            tf.cond(
                tf.constant(True) if is_central else contribution.weight > 0,
                lambda: self.server.replace(mean),
                lambda: True,
            )
        else:
            self.server.apply(mean)
        # Most of these diagnostics get no noise.
        logs = {
            # NaN, as in abandoned rounds, if no client has a loss.
            "loss": tf.math.divide_no_nan(total.loss, total.examples)
            + tf.where(total.examples > 0, 0.0, np.nan),
            **self.query.derive_metrics(state),
            "clipped_fraction": tf.math.divide_no_nan(contribution.clipped, answered),
            "mean_update_norm": tf.math.divide_no_nan(contribution.norm, answered),
            "discarded_clients": contribution.discarded,
        }
        if total.moments:
            logs.update(_variance_and_scale(total.moments))
        self._log_names[:] = logs
        fills = self._statistics_fill(mean, state.clip_norm)
        values = [tf.cast(value, tf.float32) for value in (*logs.values(), fills)]
        return new_state, tf.stack(values)

    def _statistics_fill(self, mean: nests.Nest, clip_norm: tf.Tensor) -> tf.Tensor:
        """Returns whether the non-trainable state fills the clip of a released mean.

        It is computed from what is released: otherwise, a warning would reveal more.
        """
        server = self.server
        if not server.has_non_trainable or self.query.mechanism.releases_weights:
            return tf.constant(False)
        squares = [tf.reduce_sum(tf.cast(part, tf.float64) ** 2) for part in mean]
        state = tf.add_n([tf.zeros([], tf.float64), *squares[server.num_trainable :]])
        clip = tf.cast(clip_norm, tf.float64)
        is_most = state > _FILLING * tf.add_n(squares)
        return is_most & (state > (_FILLING * clip) ** 2)


# Buffers with at least this many numbers are variables.
_LARGE = 2**16


def with_variables(state: contribution.RoundState) -> contribution.RoundState:
    """Returns a state with variables for the large buffers of its noise state.

    A release overwrites them one by one. Otherwise, the buffers before and after a
    round would take memory at the same time.
    """

    def variable(leaf: nests.Nest) -> nests.Nest:
        if isinstance(leaf, tf.Variable):
            return leaf
        is_buffer = tf.as_dtype(leaf.dtype) == tf.float32
        if not is_buffer or math.prod(leaf.shape) < _LARGE:
            return leaf
        return tf.Variable(leaf, trainable=False)

    return state._replace(
        noise_state=tf.nest.map_structure(variable, state.noise_state)
    )


def _spec_of(leaf: nests.Nest) -> tf.TensorSpec:
    """Returns the spec of an argument; for a variable, its handle's spec."""
    if isinstance(leaf, tf.TensorSpec):
        return leaf
    if isinstance(leaf, tf.Variable):
        leaf = leaf.handle
    return tf.TensorSpec.from_tensor(tf.convert_to_tensor(leaf))


def _read(argument: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Returns an argument's value, which may be a variable's handle."""
    if argument.dtype != tf.resource:
        return argument
    value = tf.raw_ops.ReadVariableOp(resource=argument, dtype=tf.float32)
    return tf.ensure_shape(value, shape)


def _assign(argument: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns a value; if it belongs to a variable, assigns it and returns nothing."""
    if argument.dtype != tf.resource:
        return value
    tf.raw_ops.AssignVariableOp(resource=argument, value=value)
    return tf.zeros([0])


def _call_flat(
    function: tf.types.experimental.ConcreteFunction, tensors: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Calls a function with its flattened arguments; returns its flattened results."""
    if tf.config.list_logical_devices("GPU"):
        return tf.nest.flatten(function(*tensors))
    # This skips matching arguments to names, a tenth of a small model's round.
    return tf.raw_ops.StatefulPartitionedCall(
        args=[*tensors, *function.captured_inputs],
        Tout=[tensor.dtype for tensor in function.outputs],
        f=function,
    )


# If statistics make up this much of the clip, and of the squared norm of an update, the
# clip leaves no room for weights.
_FILLING = 0.9


def _variance_and_scale(moments: cohort.Moments) -> dict[str, tf.Tensor]:
    """Returns Geyer's V_c and U_s (Geyer et al. 2017, Section 3).

    V_c is the mean over parameters of the variance across clients, U_s the
    mean over parameters of the squared mean.
    """
    size = moments.total.shape.num_elements()
    mean = tf.math.divide_no_nan(moments.total, moments.count)
    scale = tf.reduce_sum(mean * mean) / size
    squares = tf.math.divide_no_nan(moments.squares, moments.count) / size
    return {
        "between_client_variance": tf.maximum(squares - scale, 0.0),
        "update_scale": scale,
    }


class DeferredClipping:
    """Clips a cohort's updates, which were kept until all their norms are known."""

    def __init__(self, query: cohort_query.CohortQuery, update_spec: cohort.UpdateSpec):
        """Makes the functions, which the first round traces.

        Args:
          query: The mechanism's query.
          update_spec: The shapes of a client's update.

        Raises:
          ValueError: The query's clients upload something else.
        """
        update: nests.Nest = query.initial_sample_state(update_spec.variables).update
        if not isinstance(update, list) or len(update) != len(update_spec.variables):
            raise ValueError(
                "secure_aggregation needs a mechanism whose clients send one "
                "tensor for each variable, got a query that makes "
                f"{type(update).__name__} of them: use tfdp_fl.AdaptiveClipping, "
                "whose bit goes through the secure sum as well."
            )
        self._query = query
        self._spec = update_spec
        self._traced: tuple[program.Program, ...] = ()

    def trace(self, pending: cohort.PendingRound) -> None:
        """Traces both programs once, for any number of clients.

        Programs keep nothing of one client for the next, whatever the mechanism does.
        As in `CohortEngine._trace`, tracing fixes the mechanism's current attributes,
        so it must not depend on which clients are present.
        """
        if self._traced:
            return
        state = tf.nest.map_structure(
            tf.TensorSpec.from_tensor, self._tensors(pending.state)
        )
        seed = tf.TensorSpec([2], tf.uint64)
        norms = tf.TensorSpec([None], tf.float32)
        set_clip = program.Program(self._clip_to_cohort, state, seed, norms)
        params = set_clip.results[1]
        windows = self._windows(pending).shape[1:]
        rows = cohort.PerClient(
            updates=tf.TensorSpec([None, self._spec.size], tf.float32),
            scalars=tf.TensorSpec([None, 2], tf.float32),
        )
        own = [
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None, *windows], tf.float32),
        ]
        clip = program.Program(self._clip_rows, params, rows, *own, seed)
        self._traced = set_clip, clip

    def forget(self) -> None:
        """Makes the next call of `trace` trace it anew."""
        self._traced = ()

    @staticmethod
    def _tensors(state: contribution.RoundState) -> contribution.RoundState:
        """Returns a state without variables (see `with_variables`)."""
        return tf.nest.map_structure(tf.convert_to_tensor, state)

    @staticmethod
    def _windows(pending: cohort.PendingRound) -> np.ndarray:
        """Returns the clients' windows, float32 [K, W, L]."""
        if pending.inputs.windows is None:
            return np.zeros([pending.cohort_size, 0, 0], np.float32)
        return pending.inputs.windows.astype(np.float32)

    def __call__(
        self, pending: cohort.PendingRound
    ) -> Iterator[tuple[np.ndarray, cohort.PerClient]]:
        """Sets the clip; yields the clients' positions and their contributions."""
        pending.collected.sort(key=lambda part: part[0][0])
        norms = np.zeros(pending.cohort_size, np.float32)
        answered = np.zeros(len(norms), bool)
        for members, rows in pending.collected:
            norm, num_examples = rows.scalars.numpy().T
            norms[members], answered[members] = norm, num_examples > 0
        seed = tf.constant(pending.inputs.seed.astype(np.uint64))
        set_clip, clip = self._traced
        state, params = set_clip(
            self._tensors(pending.state), seed, tf.constant(norms[answered])
        )
        pending.state = state._replace(noise_state=pending.state.noise_state)
        windows = self._windows(pending)
        for members, rows in pending.collected:
            keys = pending.inputs.positions[members].astype(np.int64)
            own = map(tf.constant, (keys, windows[members]))
            clients = rows.updates, rows.scalars, *own

            def clip_at(places: slice, clients=clients) -> cohort.PerClient:
                updates, scalars, *own = (each[places] for each in clients)
                some = cohort.PerClient(updates=updates, scalars=scalars)
                return clip(params, some, *own, seed)

            for places, clipped in self._clip_or_fail_alone(pending, members, clip_at):
                yield members[places], clipped

    def _clip_or_fail_alone(
        self,
        pending: cohort.PendingRound,
        members: np.ndarray,
        clip_at: Callable[[slice], cohort.PerClient],
    ) -> list[tuple[slice, cohort.PerClient]]:
        """Returns contributions; a client for which clipping raises fails alone."""
        try:
            return [(slice(None), clip_at(slice(None)))]
        except program.CLIENT_ERRORS:
            clip_at(slice(0, 0))  # If this raises, no client's data is to blame.
        clipped = []
        for place, member in enumerate(members):
            places = slice(place, place + 1)
            try:
                clipped.append((places, clip_at(places)))
            except program.CLIENT_ERRORS as error:
                position = int(pending.inputs.positions[member])
                operation = self._traced[1].find_operation(error)
                pending.failures.append(ClientFailure(position, error, operation))
        return clipped

    def _clip_to_cohort(self, state, seed, norms):
        if self._query.two_phase:
            with noise.use_seed(noise.fold_in(seed, -4)):
                state = self._query.clip_to_cohort(state, norms)
        return state, self._query.derive_sample_params(state)

    def _clip_rows(self, params, rows, keys, windows, seed):
        """Returns some clients' contributions, made from their unclipped updates.

        Args:
          params: The query's sample params, with this round's clip.
          rows: A `PerClient` of unclipped updates and the clients' example counts.
          keys: Int64 [K], the clients' own numbers (`layout.ClientTable`).
          windows: Float32 [K, W, L], see `layout.ClientTable`.
          seed: The round's seed (see `mechanisms.noise`).
        """

        def client(arguments):
            update, scalars, key, window = arguments
            client_seed = noise.fold_in(seed, key)
            with noise.use_seed(noise.fold_in(client_seed, 0)):
                one = algorithm.make_contribution(
                    self._query,
                    params,
                    self._spec.unflatten(update),
                    self._query.client(scalars[1], window),
                )
            flat = tf.ensure_shape(cohort.flatten(one.update), [self._spec.size])
            return flat, tf.stack(one.scalars())

        # One client at a time: batched, a row's result may depend on the batch's size.
        specs = [
            tf.TensorSpec([self._spec.size], tf.float32),
            tf.TensorSpec([self._query.num_scalars], tf.float32),
        ]
        clipped = tf.map_fn(
            lambda arguments: list(client(arguments)),
            (rows.updates, rows.scalars, keys, windows),
            fn_output_signature=specs,
            parallel_iterations=1,
        )
        return cohort.PerClient(*clipped)
