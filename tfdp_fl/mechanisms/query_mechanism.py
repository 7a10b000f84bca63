"""Any TF-Privacy query as a mechanism."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import dp_accounting

from tfdp_fl import _validate
from tfdp_fl._on_use import tf
from tfdp_fl.mechanisms import clipping, cohort_query, mechanism, query_check
from tfdp_fl.mechanisms import tf_privacy as tfp
from tfdp_fl.mechanisms.contribution import (
    Client,
    Contribution,
    Deployment,
    Round,
    Tensors,
)


class WrappedQuery(cohort_query.CohortQuery):
    """Runs a TF-Privacy query, whose state is `Round.memory`."""

    def __init__(self, mechanism: QueryMechanism, deployment: Deployment):
        super().__init__(mechanism, deployment)
        self._query = mechanism.query

    def initial_global_state(self) -> Round:
        """Implements `DPQuery.initial_global_state`."""
        inner = self._query.initial_global_state()
        return super().initial_global_state()._replace(memory=inner)

    def new_segment(self, state: Round) -> Round:
        """Implements `CohortQuery.new_segment`: no noise depends on the state."""
        return state

    def derive_sample_params(self, state: Round) -> Any:
        """Implements `DPQuery.derive_sample_params`."""
        return self._query.derive_sample_params(state.memory)

    def largest_norm(self, state: Round) -> Any:
        """Implements `CohortQuery.largest_norm`: what the query may say."""
        params = self.derive_sample_params(state)
        return getattr(params, "clip_norm", float("inf"))

    def initial_sample_state(self, template: Tensors) -> Any:
        """Implements `DPQuery.initial_sample_state`."""
        zeros = super().initial_sample_state(template)
        return zeros._replace(update=self._query.initial_sample_state(template))

    def preprocess_record(
        self,
        params: Any,
        record: Tensors,
        client: Client = Client(),  # noqa: B008
    ) -> Contribution:
        """Zeroes a NaN or Inf update, then lets the query preprocess it."""
        norm, usable = clipping.usable_norm(record)
        safe = clipping.scaled(record, tf.cast(usable, tf.float32))
        return Contribution(
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

    def get_noised_result(
        self, sample_state: Contribution, global_state: Round
    ) -> tuple[Tensors, Round, dp_accounting.DpEvent]:
        """Returns the query's result, as a mean over the expected m."""
        result, inner, event = self._query.get_noised_result(
            sample_state.update, global_state.memory
        )
        if not isinstance(self._query, tfp.NormalizedQuery):
            result = self.mechanism.mean(
                result, sample_state.weight, global_state, self.deployment
            )
        return result, global_state._replace(memory=inner), event

    def derive_metrics(self, state: Round) -> collections.OrderedDict:
        """Implements `DPQuery.derive_metrics`: what the query itself says."""
        flat = collections.OrderedDict()
        for name, value in self._query.derive_metrics(state.memory).items():
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

    def bind(self, deployment: Deployment) -> WrappedQuery:
        """Implements `Mechanism.bind`."""
        vectors = [query_check.VECTOR] * (deployment.num_variables or 1)
        query_check.check_query(self.query, self.dp_event, vectors)
        if deployment.shapes is not None:
            query_check.check_query(
                self.query, self.dp_event, deployment.shapes, must_run=True
            )
        return WrappedQuery(self, deployment)

    def round_event(
        self, round_index: int, deployment: Deployment
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.round_event`: the event that was given."""
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
