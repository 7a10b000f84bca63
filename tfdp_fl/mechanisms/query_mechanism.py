"""Any TF-Privacy query as a mechanism."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import dp_accounting

from tfdp_fl import _validate
from tfdp_fl._on_use import tf
from tfdp_fl.mechanisms import (
    clipping,
    cohort_query,
    contribution,
    mechanism,
    query_check,
)
from tfdp_fl.mechanisms import tf_privacy as tfp


class WrappedState(NamedTuple):
    """The inner query's state, and this round's m.

    Attributes:
      inner: The wrapped query's own global state.
      clients_per_round: Float32 scalar, this round's expected cohort size m.
    """

    inner: Any
    clients_per_round: tf.Tensor

    @property
    def memory(self) -> Any:
        """Nothing: see `contribution.RoundWithMemory`."""
        return ()


class WrappedQuery(cohort_query.CohortQuery):
    """Runs a TF-Privacy query inside the cohort query's interface."""

    def __init__(self, mechanism: QueryMechanism, deployment: contribution.Deployment):
        super().__init__(mechanism, deployment)
        self._query = query = mechanism.query
        self._is_normalized = isinstance(query, tfp.NormalizedQuery)

    def initial_global_state(self) -> WrappedState:
        """Implements `DPQuery.initial_global_state`."""
        return WrappedState(
            inner=self._query.initial_global_state(),
            clients_per_round=tf.constant(1.0),
        )

    def begin_round(
        self,
        state: WrappedState,
        noise_multiplier: tf.Tensor | float,
        clients_per_round: tf.Tensor | float,
    ) -> WrappedState:
        """Implements `CohortQuery.begin_round`; the query knows its noise."""
        del noise_multiplier
        return state._replace(clients_per_round=tf.cast(clients_per_round, tf.float32))

    def derive_sample_params(self, state: WrappedState) -> Any:
        """Implements `DPQuery.derive_sample_params`."""
        return self._query.derive_sample_params(state.inner)

    def largest_norm(self, state: WrappedState) -> Any:
        """Implements `CohortQuery.largest_norm`: what the query may say."""
        params = self.derive_sample_params(state)
        return getattr(params, "clip_norm", float("inf"))

    def initial_sample_state(self, template: list[tf.Tensor]) -> Any:
        """Implements `DPQuery.initial_sample_state`."""
        zeros = super().initial_sample_state(template)
        return zeros._replace(update=self._query.initial_sample_state(template))

    def preprocess_record(
        self,
        params: Any,
        record: list[tf.Tensor],
        client: contribution.Client = contribution.Client(),  # noqa: B008
    ) -> contribution.Contribution:
        """Zeroes a NaN or Inf update, then lets the query preprocess it."""
        del client
        norm, usable = clipping.usable_norm(record)
        safe = clipping.scaled(record, tf.cast(usable, tf.float32))
        return contribution.Contribution(
            update=self._query.preprocess_record(params, safe),
            sums={},
            weight=tf.ones([]),
            norm=norm,
            clipped=tf.zeros([]),
            discarded=tf.cast(~usable, tf.float32),
        )

    def accumulate_preprocessed_record(
        self, sample_state: Any, preprocessed_record: Any
    ) -> Any:
        """Implements `SumAggregationDPQuery.accumulate_preprocessed_record`."""
        update = self._query.accumulate_preprocessed_record(
            sample_state.update, preprocessed_record.update
        )
        rest = super().accumulate_preprocessed_record(
            sample_state._replace(update=()),
            preprocessed_record._replace(update=()),
        )
        return rest._replace(update=update)

    def merge_sample_states(self, sample_state_1: Any, sample_state_2: Any):
        """Implements `SumAggregationDPQuery.merge_sample_states`."""
        update = self._query.merge_sample_states(
            sample_state_1.update, sample_state_2.update
        )
        rest = super().merge_sample_states(
            sample_state_1._replace(update=()),
            sample_state_2._replace(update=()),
        )
        return rest._replace(update=update)

    def get_noised_result(
        self,
        sample_state: contribution.Contribution,
        global_state: WrappedState,
    ) -> tuple[list[tf.Tensor], WrappedState, dp_accounting.DpEvent]:
        """Returns the query's result, as a mean over the expected m."""
        result, inner, event = self._query.get_noised_result(
            sample_state.update, global_state.inner
        )
        if not self._is_normalized:
            result = [
                tensor / tf.cast(global_state.clients_per_round, tensor.dtype)
                for tensor in result
            ]
        return result, global_state._replace(inner=inner), event

    def derive_metrics(self, state: WrappedState) -> collections.OrderedDict:
        """Implements `DPQuery.derive_metrics`: what the query itself says."""
        metrics = self._query.derive_metrics(state.inner)
        flat = collections.OrderedDict()
        for name, value in metrics.items():
            key = "clip_norm" if name.split("/")[-1] == "clip" else name
            flat[key] = tf.cast(value, tf.float32)
        return flat


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryMechanism(mechanism.Mechanism):
    """Lets any TF-Privacy sum query be the mechanism of a training run.

    A client's update with a NaN or an Inf is replaced by zero before the query
    sees it. The result of a `tfp.NormalizedQuery` is taken as the mean update,
    with its own denominator; that of any other query is taken as a sum and
    divided by the expected cohort size m.

    The noise comes from the query, which draws it from TensorFlow's own random
    numbers: they follow from 32 secret bits (tsl/platform/random.cc), too few
    against anybody who tries them all. A run with `seed=` repeats its cohorts
    and batches, not this noise; `tf.random.set_seed` repeats the noise, for
    anyone who knows that seed.

    Of TF-Privacy's queries these are allowed: `GaussianSumQuery`,
    `QuantileAdaptiveClipSumQuery`, `NoPrivacySumQuery`, and `NormalizedQuery`
    and `NestedSumQuery` of them. A query of your own is tried on zeros of the
    model's shapes before it is used: its state must keep its shape, its noise must
    be there, and `dp_event` must not cost less than the event that it reports.

    Attributes:
      query: A `tfp.SumAggregationDPQuery` over a list of tensors, one for
        each variable of the model.
      dp_event: What one round of it releases, before sampling: for instance
        `dp_accounting.GaussianDpEvent(noise_multiplier)`.
    """

    draws_noise_itself: ClassVar[bool] = True
    own_caveats: ClassVar[Mapping[str, str]] = {
        "custom_query_event": (
            "The mechanism is a query given by the user together with its "
            "cost; that the cost is right was not checked here."
        ),
        "query_noise_from_tf_random": (
            "The noise was drawn by the TF-Privacy query from TensorFlow's own "
            "random numbers, which follow from 32 secret bits in each process: "
            "towards those who try them all there is no guarantee, and if "
            "tf.random.set_seed was called, towards those who know that seed "
            "there is none either."
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
        query_check.check_query(self.query, self.dp_event, [query_check.VECTOR])

    @property
    def scales_updates(self) -> bool:
        """Implements `Mechanism.scales_updates`: the query clips."""
        return False

    def bind(self, deployment: contribution.Deployment) -> WrappedQuery:
        """Implements `Mechanism.bind`."""
        vectors = [query_check.VECTOR] * (deployment.num_variables or 1)
        query_check.check_query(self.query, self.dp_event, vectors)
        if deployment.shapes is not None:
            query_check.check_query(
                self.query, self.dp_event, deployment.shapes, must_run=True
            )
        return WrappedQuery(self, deployment)

    def round_event(
        self, round_index: int, deployment: contribution.Deployment
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.round_event`: the event that was given."""
        del round_index, deployment
        return self.dp_event

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return (
            "The updates are aggregated by the TF-Privacy query "
            f"{type(self.query).__name__}; each round was declared to release "
            f"{self.dp_event!r}."
        )

    def caveats(self) -> tuple[str, ...]:
        """Implements `Mechanism.caveats`."""
        return ("custom_query_event", "query_noise_from_tf_random")
