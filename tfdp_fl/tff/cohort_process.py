"""Runs a mechanism's query as a TFF aggregation process.

One call of `next` is one round:

    server:   begin_round (this round's m and z)
    clients:  update_norm, if the query is two_phase
    server:   clip_to_cohort, if the query is two_phase
    server:   derive_sample_params, broadcast
    clients:  algorithm.make_contribution
    sum:      the inner factory
    server:   the check of the cohort size; algorithm.release, once
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdp_fl import algorithm
from tfdp_fl.engine import allowed_operations
from tfdp_fl.mechanisms import cohort_query, contribution
from tfdp_fl.tff import state

if TYPE_CHECKING:
    from tfdp_fl.datasets.nests import Nest

# How `noise.entropy` reads the operating system's.
_ENTROPY = frozenset(["DecodeRaw", "NonDeterministicInts", "ReadFile"])


def create_cohort_process(
    query: cohort_query.CohortQuery,
    plan: state.RoundPlan,
    value_type: tff.types.Type,
    weight_type: tff.types.Type | None = None,
    *,
    inner_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    scalars_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
) -> tff.templates.AggregationProcess:
    """Returns the aggregation process of a query.

    Args:
      query: A mechanism's query, bound to its context.
      plan: The values that change from round to round, and the allowed cohorts.
      value_type: Type of one client's value, a structure of float tensors.
      weight_type: Type of each client's second value, which is passed to
        `algorithm.make_contribution`; None if there is none.
      inner_factory: Sums the updates (see `create_sum`).
      scalars_factory: Sums the contributions' other numbers.
    """
    end_worker_at_exit()
    client_types = [value_type]
    if weight_type is not None:
        client_types.append(weight_type)

    @tff.tensorflow.computation
    def initial_query_state():
        return query.initial_global_state()

    query_state_type = initial_query_state.type_signature.result

    @tff.tensorflow.computation
    def empty_history():
        # The graph must not fix the length, as the history grows.
        empty = tf.compat.v1.placeholder_with_default
        return state.RoundHistory(
            lines=empty(tf.constant([], tf.string), [None]),
            answered=empty(tf.constant([], tf.float64), [None]),
            attempts=empty(tf.constant([], tf.string), [None]),
            attempted=empty(tf.constant([], tf.int64), [None]),
        )

    @tff.tensorflow.computation(query_state_type, np.int32)
    def begin_round(query_state, round_index):
        return query.begin_round(query_state, *plan.values(round_index))

    @tff.tensorflow.computation(query_state_type)
    def derive_sample_params(query_state):
        return query.derive_sample_params(query_state)

    if query.two_phase:
        clip_to_cohort = _create_clip_to_cohort(
            query, plan, query_state_type, value_type
        )
    make_contribution = create_contribution_fn(
        query,
        derive_sample_params.type_signature.result,
        client_types,
        exact_update=_is_plain(inner_factory),
        exact_scalars=_is_plain(scalars_factory),
    )
    contribution_type = make_contribution.type_signature.result
    sum_process = create_sum(contribution_type, inner_factory, scalars_factory)
    release_round = _create_release(
        query,
        plan,
        sum_process.next.type_signature.result.result.member,
        (query_state_type, np.int32, empty_history.type_signature.result),
        value_type,
        packed=contribution_type.update.is_equivalent_to(value_type),
    )

    @tff.tensorflow.computation(
        release_round.type_signature.result[1],
        sum_process.next.type_signature.result.measurements.member,
    )
    def add_inner(measurements, inner):
        return collections.OrderedDict(measurements, inner=inner)

    @tff.federated_computation
    def init_fn():
        return tff.federated_zip(
            state.AggregatorState(
                query_state=tff.federated_eval(initial_query_state, tff.SERVER),
                rounds=tff.federated_value(np.int32(0), tff.SERVER),
                sum_state=sum_process.initialize(),
                history=tff.federated_eval(empty_history, tff.SERVER),
            )
        )

    def run_round(server_state, value, *weight):
        query_state = tff.federated_map(
            begin_round, (server_state.query_state, server_state.rounds)
        )
        if query.two_phase:
            query_state = clip_to_cohort(query_state, value)
        params = tff.federated_broadcast(
            tff.federated_map(derive_sample_params, query_state)
        )
        contributions = tff.federated_map(make_contribution, (params, value, *weight))
        total = sum_process.next(server_state.sum_state, contributions)
        mean, measurements, new_query_state, rounds, history = tff.federated_map(
            release_round,
            (total.result, query_state, server_state.rounds, server_state.history),
        )
        if inner_factory is not None:
            measurements = tff.federated_map(
                add_inner, (measurements, total.measurements)
            )
        return tff.templates.MeasuredProcessOutput(
            state=tff.federated_zip(
                state.AggregatorState(
                    query_state=new_query_state,
                    rounds=rounds,
                    sum_state=total.state,
                    history=history,
                )
            ),
            result=mean,
            measurements=measurements,
        )

    next_fn = tff.federated_computation(
        _without_varargs(run_round, 1 + len(client_types)),
        init_fn.type_signature.result,
        *(tff.FederatedType(type_, tff.CLIENTS) for type_ in client_types),
    )
    return tff.templates.AggregationProcess(init_fn, next_fn)


def to_list(value: Nest) -> list[tf.Tensor]:
    """Returns a value's tensors in the order of its TFF type."""
    if tf.is_tensor(value) or isinstance(value, np.ndarray):
        return [value]
    return tff.structure.flatten(tff.structure.from_container(value, recursive=True))


def from_list(tensors: list[tf.Tensor], value_type: tff.types.Type) -> Nest:
    """Inverse of `to_list`: returns a value of the given type."""
    remaining = iter(tensors)

    def build(type_):
        if isinstance(type_, tff.TensorType):
            return next(remaining)
        elements = tff.structure.iter_elements(type_)
        struct = tff.structure.Struct(
            [(name, build(element)) for name, element in elements]
        )
        if isinstance(type_, tff.types.StructWithPythonType):
            return tff.types.type_to_py_container(struct, type_)
        return struct

    return build(value_type)


def create_sum(
    contribution_type: tff.types.StructWithPythonType,
    inner_factory: tff.aggregators.UnweightedAggregationFactory | None,
    scalars_factory: tff.aggregators.UnweightedAggregationFactory | None,
) -> tff.templates.AggregationProcess:
    """Returns the process that sums contributions.

    Args:
      contribution_type: Type of an `OrderedDict` of `update` (the mechanism's
        contribution of a client's value) and `scalars` (its other numbers).
      inner_factory: Sums the updates; None for `tff.aggregators.SumFactory`.
      scalars_factory: Sums the scalars; None for the same.

    Returns:
      A process whose result has the keys `update` and `scalars`, and whose
      measurements are those of `inner_factory`.
    """
    if inner_factory is None and scalars_factory is None:
        # One aggregation for both needs half the calls per client.
        return tff.aggregators.SumFactory().create(contribution_type)
    plain_sum = tff.aggregators.SumFactory()
    updates = (inner_factory or plain_sum).create(contribution_type.update)
    scalars = (scalars_factory or plain_sum).create(contribution_type.scalars)

    @tff.federated_computation
    def init_fn():
        return tff.federated_zip((updates.initialize(), scalars.initialize()))

    @tff.federated_computation(
        init_fn.type_signature.result, tff.FederatedType(contribution_type, tff.CLIENTS)
    )
    def next_fn(state, summand):
        update_sum = updates.next(state[0], summand.update)
        scalar_sum = scalars.next(state[1], summand.scalars)
        return tff.templates.MeasuredProcessOutput(
            state=tff.federated_zip((update_sum.state, scalar_sum.state)),
            result=tff.federated_zip(
                collections.OrderedDict(
                    update=update_sum.result, scalars=scalar_sum.result
                )
            ),
            measurements=update_sum.measurements,
        )

    return tff.templates.AggregationProcess(init_fn, next_fn)


def create_contribution_fn(
    query: cohort_query.CohortQuery,
    params_type: tff.types.Type,
    client_types: list[tff.types.Type],
    exact_update: bool,
    exact_scalars: bool,
) -> tff.Computation:
    """Returns the computation that makes a client's contribution.

    Args:
      query: The mechanism's query.
      params_type: The type of the params that clients receive.
      client_types: The types of the value and of the weight, if any.
      exact_update: Whether clients send updates as float64, whose sums are exact
        (`mechanisms.bounded_sums`); a secure sum gets them in their own dtype.
      exact_scalars: Likewise for the contribution's other numbers.
    """
    value_type = client_types[0]

    def preprocess(params, value, *weight):
        client = [contribution.ClientContext(num_examples=number) for number in weight]
        tensors = to_list(value)
        own = algorithm.make_contribution(query, params, tensors, *client)
        # A mechanism's own functions must keep nothing of a client for the next.
        allowed_operations.check(
            tf.compat.v1.get_default_graph().as_graph_def(),
            allow_list=allowed_operations.IN_TFF | _ENTROPY,
        )
        fields = collections.OrderedDict(own._asdict())
        update = fields.pop("update")
        if exact_update:
            update = _as_float64(update)
        elif isinstance(update, list) and len(update) == len(tensors):
            # The inner factory gets the structure that clients' values have.
            update = from_list(update, value_type)
        fields["sums"] = collections.OrderedDict(fields["sums"])
        fields["cohort_size"] = tf.ones([])
        scalars = _as_float64(fields) if exact_scalars else fields
        return collections.OrderedDict(update=update, scalars=scalars)

    return tff.tensorflow.computation(
        _without_varargs(preprocess, 1 + len(client_types)), params_type, *client_types
    )


def _is_plain(factory: tff.aggregators.UnweightedAggregationFactory | None) -> bool:
    return type(factory) in (type(None), tff.aggregators.SumFactory)


def _as_float64(value: Nest) -> Nest:
    return tf.nest.map_structure(lambda tensor: tf.cast(tensor, tf.float64), value)


def _create_release(
    query: cohort_query.CohortQuery,
    plan: state.RoundPlan,
    total_type: tff.types.Type,
    state_types: tuple[tff.types.Type, tff.types.Type, tff.types.Type],
    value_type: tff.types.Type,
    packed: bool,
) -> tff.Computation:
    """Returns the server's computation on the sum and the state's three parts.

    Its results are the mean, the measurements, and the new parts of the state. `packed`
    says whether the sum of the updates has the structure of a value, not of a list.
    """

    @tff.tensorflow.computation(total_type, *state_types)
    def release_round(total, query_state, round_index, history):
        scalars = collections.OrderedDict(total["scalars"])
        # (Side sums keep their dtype until their noise is added.)
        sums = scalars.pop("sums")
        scalars = tf.nest.map_structure(lambda t: tf.cast(t, tf.float32), scalars)
        size = plan.check_size(
            # Rounded, as a secure sum has a quantization error.
            tf.round(scalars.pop("cohort_size")),
            query_state.clients_per_round,
            scalars["weight"],
        )
        update = to_list(total["update"]) if packed else total["update"]
        # (The state may come from another process.)
        reported = query.check_reported_event(query_state)
        summed = cohort_query.after_assertions(
            [size, *reported, *plan.check_sums(query, query_state)],
            contribution.Contribution(update=update, sums=sums, **scalars),
        )
        # The noise must be at least what the recorded line was charged for.
        mean, new_state = algorithm.release(
            query, summed, query_state, plan.charged_at(round_index)
        )
        measurements = collections.OrderedDict(
            query.derive_metrics(query_state),
            clipped_fraction=tf.math.divide_no_nan(summed.clipped, size),
            mean_update_norm=tf.math.divide_no_nan(summed.norm, size),
            discarded_clients=tf.cast(tf.round(summed.discarded), tf.int32),
            cohort_size=tf.cast(size, tf.int32),
        )
        return (
            from_list(list(map(tf.cast, mean, _dtypes(value_type))), value_type),
            measurements,
            new_state,
            round_index + 1,
            plan.append_round(history, round_index, size),
        )

    return release_round


def _dtypes(value_type: tff.types.Type) -> list[tf.DType]:
    """Returns the dtypes of a value's tensors, in the order of `to_list`."""
    if isinstance(value_type, tff.TensorType):
        return [tf.as_dtype(value_type.dtype)]
    leaves = tff.structure.flatten(value_type)
    return [tf.as_dtype(leaf.dtype) for leaf in leaves]


def _without_varargs(function: Callable[..., Nest], arity: int) -> Callable[..., Nest]:
    """Returns a function of 2 or 3 arguments, as TFF does not accept varargs."""
    if arity == 2:
        return lambda state, value: function(state, value)
    return lambda state, value, weight: function(state, value, weight)


def _create_clip_to_cohort(
    query: cohort_query.CohortQuery,
    plan: state.RoundPlan,
    query_state_type: tff.types.Type,
    value_type: tff.types.Type,
) -> tff.Computation:
    """Returns the phase that sets the clip from the norms of the cohort.

    The norms are collected, not summed, so the server sees each of them. Clients get
    only the clip computed from them. It is kept within the plan's limits: a failed
    check would reveal something about the cohort that is not charged.
    """
    norms_type = tff.TensorType(np.float32, [None])

    @tff.tensorflow.computation(value_type)
    def update_norm(value):
        return query.update_norm(to_list(value))

    @tff.tensorflow.computation
    def empty_norms():
        return tf.zeros([0])

    @tff.tensorflow.computation(norms_type, np.float32)
    def append(norms, norm):
        return tf.concat([norms, [norm]], axis=0)

    @tff.tensorflow.computation(norms_type, norms_type)
    def merge(norms, others):
        return tf.concat([norms, others], axis=0)

    @tff.tensorflow.computation(norms_type)
    def report(norms):
        return norms

    @tff.tensorflow.computation(query_state_type, norms_type)
    def clip_to_cohort(query_state, norms):
        least, most = plan.clip_limits(query, query_state)
        clip_norm = query.clip_to_cohort(query_state, norms).clip_norm
        clip_norm = tf.minimum(tf.maximum(clip_norm, least), most)
        return query.with_clip(query_state, clip_norm)

    @tff.federated_computation(
        tff.FederatedType(query_state_type, tff.SERVER),
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def phase(query_state, value):
        norms = tff.federated_map(update_norm, value)
        collected = tff.federated_aggregate(norms, empty_norms(), append, merge, report)
        return tff.federated_map(clip_to_cohort, (query_state, collected))

    return phase


@functools.cache
def end_worker_at_exit() -> None:
    """Ensures that TFF's worker does not outlive this program.

    TFF 0.87's default context starts a `worker_binary` for its first computation. The
    worker listens on all interfaces, runs any graph that it is sent
    (docs/threat_model.md), and ends when the context is deleted. During the
    interpreter's shutdown, deleting the context fails, and the worker keeps running. So
    an exit handler replaces the context by one without a worker.

    Further calls have no effect.
    """
    atexit.register(_replace_context)


def _replace_context() -> None:
    # The program is ending, so ignore any error in TFF.
    with contextlib.suppress(Exception):
        tff.backends.test.set_sync_test_cpp_execution_context()
        gc.collect()
