"""Wraps any TF-Privacy query as a mechanism, and checks that its cost can be right."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import dp_accounting
import numpy as np
from dp_accounting import rdp

from tfdp_fl import _validate
from tfdp_fl._lazy_tf import tf, tfp
from tfdp_fl.accounting import charge
from tfdp_fl.mechanisms import bounded_sums, clipping, cohort_query, mechanism, noise
from tfdp_fl.mechanisms.contribution import (
    ClientContext,
    Contribution,
    NoiseStateLike,
    PrivacyContext,
    RoundState,
    Scalar,
    Tensors,
)

_ALLOWED = (
    "GaussianSumQuery",
    "NestedSumQuery",
    "NoPrivacySumQuery",
    "NormalizedQuery",
    "QuantileAdaptiveClipSumQuery",
)
_USE_INSTEAD = (
    "use tfdp_fl.FixedClipping, AdaptiveClipping or MedianClipping, or one of "
    f"TF-Privacy's {', '.join(_ALLOWED)}"
)
# With noise, however coarse, these coordinates are not all zero.
VECTOR = (1000,)
# How events are compared: in the tails and the body of their privacy loss, and in the
# cost of many rounds.
_DELTAS = (1e-3, 1e-6, 1e-9)
_COUNTS = (1, 100)
# A query computes its noise multiplier in float32.
_ROUNDING = 1e-5
# Its square keeps full precision in float32.
_MIN_MAGNITUDE = 2.0**-62


class WrappedQuery(cohort_query.CohortQuery):
    """Runs a TF-Privacy query, whose state is `RoundState.noise_state`."""

    def __init__(self, mechanism: QueryMechanism, context: PrivacyContext):
        super().__init__(mechanism, context)
        self._query = mechanism.query

    def initial_global_state(self) -> RoundState:
        """Implements `DPQuery.initial_global_state`."""
        inner = self._query.initial_global_state()
        return super().initial_global_state()._replace(noise_state=inner)

    def restart_noise(self, state: RoundState) -> RoundState:
        """Implements `CohortQuery.restart_noise`: no noise depends on the state."""
        return state

    def derive_sample_params(self, state: RoundState) -> NoiseStateLike:
        """Implements `DPQuery.derive_sample_params`."""
        params = self._query.derive_sample_params(state.noise_state)
        return tf.nest.map_structure(tf.convert_to_tensor, params)

    def expected_mu_squared(
        self, clients_per_round: float, noise_multiplier: float
    ) -> float:
        """Implements `CohortQuery.expected_mu_squared`: nothing is derived."""
        return float("inf")

    def l2_norm_bound(self, state: RoundState) -> Scalar:
        """Implements `CohortQuery.l2_norm_bound`, if the query states a bound."""
        params = self.derive_sample_params(state)
        return getattr(params, "clip_norm", float("inf"))

    def initial_sample_state(self, template: Tensors) -> Contribution:
        """Implements `DPQuery.initial_sample_state`."""
        zeros = super().initial_sample_state(template)
        # In float64, adding a client changes the sum by exactly its record.
        update = tf.nest.map_structure(
            lambda zero: tf.cast(zero, tf.float64),
            self._query.initial_sample_state(template),
        )
        return zeros._replace(update=update)

    def clip(
        self, params: RoundState, update: Tensors, client: ClientContext
    ) -> Contribution:
        """Implements `CohortQuery.clip`: the query clips; its record is checked.

        The query's own float32 sum of squares may overflow, which makes finite numbers
        NaN. Elements whose squares underflow, which no clip would count, are zeroed.
        """
        norm, usable = clipping.finite_global_norm(update)
        safe = [
            tf.where(
                usable & (tf.abs(part) >= _MIN_MAGNITUDE), part, tf.zeros_like(part)
            )
            for part in update
        ]
        record = self._query.preprocess_record(params, safe)
        contribution = Contribution(
            update=tf.nest.flatten(record),
            sums={},
            weight=tf.ones([]),
            norm=norm,
            clipped=tf.zeros([]),
            discarded=tf.cast(~usable, tf.float32),
        )
        # Only the query knows how long a record may be.
        contribution = bounded_sums.bound(contribution, float("inf"), {})
        contribution = bounded_sums.zero_if_empty(contribution, client.num_examples)
        return contribution._replace(
            update=tf.nest.pack_sequence_as(record, contribution.update)
        )

    def to_grid(self, update: Tensors, params: RoundState) -> Tensors:
        """Implements `CohortQuery.to_grid`: the query's records stay as they are."""
        return update

    def add_noise(
        self, total: Contribution, state: RoundState, stddevs: Mapping[str, Scalar]
    ) -> tuple[Tensors, dict[str, tf.Tensor], NoiseStateLike]:
        """Implements `CohortQuery.add_noise`: returns the query's result and state."""
        del stddevs  # The query has its own.
        # TF-Privacy's queries take float32, so the exact sum is rounded once, with a
        # relative error of at most 2^-24.
        update = tf.nest.map_structure(
            lambda part: tf.cast(part, tf.float32), total.update
        )
        result, noise_state = noise.with_fresh_draws(
            lambda *arguments: self._query.get_noised_result(*arguments)[:2],
            *(update, state.noise_state),
            must_add_noise=_has_guarantee(charge.normalise(self.mechanism.dp_event)),
            argument="query",
        )
        return result, {}, noise_state

    def divide(self, update: Tensors, weight: Scalar, state: RoundState) -> Tensors:
        """Implements `CohortQuery.divide`, unless the query has already divided."""
        return update if divides(self._query) else super().divide(update, weight, state)

    def check_noise(
        self,
        state: RoundState,
        charged: Scalar,
        stddevs: Mapping[str, Scalar] | None = None,
    ) -> list[tf.Operation]:
        """Implements `CohortQuery.check_noise`: nothing, as the query adds the noise.

        Its cost is what it reports (`event_at`, `check_reported_event`).
        """
        del state, charged, stddevs
        return []

    def check_reported_event(self, state: RoundState) -> list[tf.Operation]:
        """Implements `CohortQuery.check_reported_event`.

        Raises:
          ValueError: It reports an event that is not Gaussian and changes by round.
        """
        zeros = [tf.zeros(shape) for shape in self.context.shapes or ()]
        declared = charge.normalise(self.mechanism.dp_event)
        with tf.init_scope():
            *_, first = _run_round(
                self._query, zeros, self._query.initial_global_state()
            )
        *_, event = _run_round(self._query, zeros, state.noise_state)
        limit, actual = _mu_squared(declared), _mu_squared(event)
        limit = _mu_squared(first) if limit is None else limit
        if limit is not None and actual is not None:
            name = type(self._query).__name__
            return cohort_query.must_be_at_most(
                actual,
                limit * (1 + _ROUNDING),
                f"{name} reports less noise in this round than it is charged for.",
            )
        if not _same_event(event, first):
            raise ValueError(
                "query must report Gaussian events, or the same one in each round, "
                f"if rounds' costs are recorded in advance, got {event!r}."
            )
        return []

    def derive_metrics(self, state: RoundState) -> collections.OrderedDict:
        """Implements `DPQuery.derive_metrics`: the query's own metrics."""
        flat = collections.OrderedDict()
        for name, value in self._query.derive_metrics(state.noise_state).items():
            key = "clip_norm" if name.split("/")[-1] == "clip" else name
            flat[key] = tf.cast(value, tf.float32)
        return flat


def divides(query: tfp.SumAggregationDPQuery) -> bool:
    """Returns whether a query's result is already a mean.

    Raises:
      ValueError: Some of its inner queries divide, and others do not.
    """
    if isinstance(query, tfp.NestedSumQuery):
        inner = {divides(part) for part in tf.nest.flatten(query._queries)}
        if len(inner) > 1:
            raise ValueError(
                "query must divide all tensors by a denominator (a tfp.NormalizedQuery "
                "for each) or none, got a NestedSumQuery that divides some of them."
            )
        return inner == {True}
    return isinstance(query, tfp.NormalizedQuery)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryMechanism(mechanism.Mechanism):
    """Uses any TF-Privacy sum query as the mechanism of a training run.

    An update with a NaN or an Inf is replaced by zero before the query sees it. The
    result of a `tfp.NormalizedQuery`, which has its own denominator, is taken as the
    mean update. The result of any other query is taken as a sum and divided by the
    expected cohort size m.

    The query decides what noise is added. Its normal draws are made by
    `tfdp_fl.mechanisms.noise`, as for every mechanism, because TensorFlow's draws would
    repeat (`noise.with_fresh_draws`). Before each round, the query is asked for its
    event, and the costlier of that and `dp_event` is charged.

    Of TF-Privacy's queries, these are allowed: `GaussianSumQuery`,
    `QuantileAdaptiveClipSumQuery`, `NoPrivacySumQuery`, and `NormalizedQuery` and
    `NestedSumQuery` around them. A query of your own is first tried on zeros of the
    model's shapes: its state must keep its shape, it must add noise, and `dp_event`
    must not cost less than the event that it reports. Its records are added up like
    TF-Privacy's.

    Attributes:
      query: A `tfp.SumAggregationDPQuery` over a list of tensors, one for
        each variable of the model. On TensorFlow 2.16 and later, set
        `sys.skip_tf_privacy_import = True`, and import it from its module in
        `tensorflow_privacy.privacy.dp_query`.
      dp_event: The event that one round releases, without sampling; for example
        `dp_accounting.GaussianDpEvent(noise_multiplier)`.
    """

    needs_shapes: ClassVar[bool] = True
    scales_updates = False  # The query clips.
    own_caveats: ClassVar[Mapping[str, str]] = {
        "custom_query_event": (
            "The mechanism is a query given by the user together with its "
            "cost; that the cost is right was not checked here. The query gets the "
            "sum of K clients rounded to float32: one client may move it by its clip "
            "times 1 + K / 2^23, and epsilon counts only the clip."
        ),
    }

    query: tfp.SumAggregationDPQuery
    dp_event: dp_accounting.DpEvent

    def __post_init__(self):
        _validate.instance_of(tfp.SumAggregationDPQuery, query=self.query)
        _validate.instance_of(dp_accounting.DpEvent, dp_event=self.dp_event)
        if isinstance(self.dp_event, dp_accounting.UnsupportedDpEvent):
            raise ValueError(
                "dp_event must be an event that can be accounted for, got "
                f"{self.dp_event!r}."
            )
        check_query(self.query, self.dp_event, [VECTOR])

    def bind(self, context: PrivacyContext) -> WrappedQuery:
        """Implements `Mechanism.bind`."""
        vectors = [VECTOR] * (context.num_variables or 1)
        check_query(self.query, self.dp_event, vectors)
        if context.shapes is not None:
            check_query(self.query, self.dp_event, context.shapes, must_run=True)
        return WrappedQuery(self, context)

    def round_event(
        self, round_index: int, context: PrivacyContext
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.round_event`: the given event."""
        return self.dp_event

    def event_at(
        self, round_index: int, context: PrivacyContext, state: RoundState
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.event_at`: the costlier of given and reported event.

        If neither is known to be costlier, it is the composition of both.
        """
        shapes = context.shapes or [VECTOR] * (context.num_variables or 1)
        with tf.init_scope():
            *_, event = _run_round(
                self.query, [tf.zeros(s) for s in shapes], state.noise_state
            )
        declared = charge.normalise(self.dp_event)
        reported = charge.normalise(event)
        if reported == declared:
            return self.dp_event
        declared_epsilons, reported_epsilons = _epsilons(declared), _epsilons(reported)
        if (declared_epsilons >= reported_epsilons * (1 - _ROUNDING)).all():
            return self.dp_event
        if (reported_epsilons >= declared_epsilons).all():
            return reported
        return dp_accounting.ComposedDpEvent([declared, reported])

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return (
            "The updates are aggregated by the TF-Privacy query "
            f"{type(self.query).__name__}; each round was declared to release "
            f"{self.dp_event!r}."
        )

    def caveats(self) -> tuple[str, ...]:
        """Implements `Mechanism.caveats`."""
        return ("custom_query_event",)


def check_query(
    query: tfp.SumAggregationDPQuery,
    dp_event: dp_accounting.DpEvent,
    shapes: Sequence[Sequence[int]],
    must_run: bool = False,
) -> None:
    """Raises ValueError unless a query can be run and charged as declared.

    Args:
      query: The query.
      dp_event: The event charged for one round.
      shapes: The shapes of the update's tensors on which it is tried.
      must_run: Whether these are the model's shapes, so that a query that fails on
        them is refused. Otherwise, such a query is not checked any further.

    Raises:
      ValueError: The query is a class of TF-Privacy that is not known to work; it fails
        and must run; its state does not keep its shape; it reports no event that can be
        accounted for; or it costs more than is declared.
    """
    _check_classes(query)
    name, declared = type(query).__name__, charge.normalise(dp_event)
    with tf.init_scope():
        try:
            if not tf.executing_eagerly():
                raise RuntimeError("it can only be tried outside of graphs")
            rounds = list(_run_two_rounds(query, shapes))
        except Exception as error:  # The query is not ours and may raise any error.
            if not must_run:
                return
            raise ValueError(
                "query must take tensors of zeros of the model's shapes, so that the "
                "event that it reports can be compared with dp_event, got "
                f"{name}, which fails: {error}"
            ) from error
    declared_epsilons = _epsilons(declared)
    for state, result, new_state, event in rounds:
        if _structure(state) != _structure(new_state):
            raise ValueError(
                "query must have a state that keeps its structure and shapes "
                f"from round to round, got {name}; {_USE_INSTEAD}."
            )
        try:
            reported = charge.normalise(event)
        except ValueError as error:
            raise ValueError(
                f"query must report what a round costs, got {name}, whose event is "
                f"NaN, {event!r}: perhaps its clip norm is 0."
            ) from error
        is_covered = declared_epsilons >= _epsilons(reported) * (1 - _ROUNDING)
        if reported != declared and not is_covered.all():
            raise ValueError(
                f"dp_event must not cost less than what {name} reports for a "
                f"round, {reported!r}, and be comparable with it, got "
                f"{declared!r}."
            )
        if _has_guarantee(declared) and not all(
            map(_has_noise, tf.nest.flatten(result))
        ):
            raise ValueError(
                f"dp_event must not be {declared!r} for a query that adds no "
                f"noise, got {name}, whose result on zeros is "
                "zero; it costs dp_accounting.NonPrivateDpEvent()."
            )


def _check_classes(query: tfp.SumAggregationDPQuery) -> None:
    """Raises ValueError for a class of TF-Privacy that is not known to work."""
    base = next(
        kind
        for kind in type(query).__mro__
        if kind.__module__.startswith("tensorflow_privacy.")
    )
    abstract = (tfp.SumAggregationDPQuery, tfp.DPQuery)
    if base not in (*abstract, *(getattr(tfp, name) for name in _ALLOWED)):
        raise ValueError(
            "query must be one whose state and cost are known here, got "
            f"{type(query).__name__}; {_USE_INSTEAD}."
        )
    accumulate = type(query).accumulate_preprocessed_record
    if not accumulate.__module__.startswith("tensorflow_privacy."):
        raise ValueError(
            "query must not override accumulate_preprocessed_record, as runtimes also "
            "add up sums of records, got one that does: "
            f"{type(query).__name__}."
        )
    if isinstance(query, tfp.NormalizedQuery):
        _check_classes(query._numerator)
    if isinstance(query, tfp.NestedSumQuery):
        for inner in tf.nest.flatten(query._queries):
            _check_classes(inner)


def _has_noise(result: tf.Tensor) -> bool:
    """Returns whether a result has noise: False for a long vector of zeros.

    A result with fewer coordinates may be zero by chance, if the noise is coarse.
    """
    return tf.size(result) < VECTOR[0] or bool(tf.reduce_any(tf.not_equal(result, 0)))


def _run_two_rounds(
    query: tfp.SumAggregationDPQuery, shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[NoiseStateLike, Tensors, NoiseStateLike, dp_accounting.DpEvent]]:
    """Yields state, result, next state and event of two rounds without data."""
    template = [tf.zeros(shape) for shape in shapes]
    state = query.initial_global_state()
    for _ in range(2):
        result, new_state, event = _run_round(query, template, state)
        yield state, result, new_state, event
        state = new_state


def _run_round(
    query: tfp.SumAggregationDPQuery, template: Tensors, state: NoiseStateLike
) -> tuple[Tensors, NoiseStateLike, dp_accounting.DpEvent]:
    """Returns result, next state and event of a round with one client's zeros."""
    params = query.derive_sample_params(state)
    total = query.accumulate_preprocessed_record(
        query.initial_sample_state(template),
        query.preprocess_record(params, template),
    )
    return query.get_noised_result(total, state)


def _mu_squared(event: dp_accounting.DpEvent) -> Any:
    """Returns sum z^-2 of Gaussians, float64 even in a graph; None for other events."""
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return tf.cast(event.noise_multiplier, tf.float64) ** -2
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        return tf.constant(np.inf, tf.float64)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [_mu_squared(part) for part in event.events]
        return None if any(part is None for part in parts) else sum(parts)
    return None


def _same_event(event: dp_accounting.DpEvent, other: dp_accounting.DpEvent) -> bool:
    """Returns whether two events are known to be equal; False for tensors."""
    try:
        return charge.normalise(event) == charge.normalise(other)
    except TypeError:
        return False


def _structure(state: NoiseStateLike) -> list[tuple[list[int], tf.DType]]:
    leaves = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(state)]
    return [(leaf.shape.as_list(), leaf.dtype) for leaf in leaves]


def _has_guarantee(event: dp_accounting.DpEvent) -> bool:
    return not np.isinf(_epsilons(event)).all()


def _epsilons(event: dp_accounting.DpEvent) -> np.ndarray:
    """Returns several measures of an event's cost; NaN if unknown."""
    epsilons = np.full((len(_COUNTS), len(_DELTAS)), np.nan)
    for row, count in zip(epsilons, _COUNTS, strict=True):
        accountant = rdp.RdpAccountant()
        try:
            accountant.compose(event, count)
        except Exception:  # Each version of dp-accounting raises other errors.
            break
        row[:] = [accountant.get_epsilon(delta) for delta in _DELTAS]
    return epsilons
