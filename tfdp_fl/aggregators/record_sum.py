"""Adding up what the clients of a cohort hand in."""

from __future__ import annotations

import collections
import math
from typing import Any

import tensorflow_federated as tff


def create_record_sum(
    record_type: tff.types.StructWithPythonType,
    inner_factory: tff.aggregators.UnweightedAggregationFactory | None,
    scalars_factory: tff.aggregators.UnweightedAggregationFactory | None,
) -> tff.templates.AggregationProcess:
    """Returns the process that sums records.

    Args:
      record_type: Type of an `OrderedDict` of `update` (what the mechanism
        made of a client's value) and `scalars` (its other numbers).
      inner_factory: Sums the updates; None for `tff.aggregators.SumFactory`.
      scalars_factory: Sums the scalars; None for the same.

    Returns:
      A process whose result has the keys `update` and `scalars`, and whose
      measurements are those of `inner_factory`.
    """
    if inner_factory is None and scalars_factory is None:
        # One aggregation for everything: half the calls for each client.
        return tff.aggregators.SumFactory().create(record_type)
    plain = tff.aggregators.SumFactory()
    updates = (inner_factory or plain).create(record_type.update)
    scalars = (scalars_factory or plain).create(record_type.scalars)

    @tff.federated_computation
    def init_fn():
        return tff.federated_zip((updates.initialize(), scalars.initialize()))

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(record_type, tff.CLIENTS),
    )
    def next_fn(state, record):
        update_sum = updates.next(state[0], record.update)
        scalar_sum = scalars.next(state[1], record.scalars)
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


# A secure sum rounds each number to a grid of so many steps between its bounds.
_STEPS = 2.0**24
# What rounding may add to a client's share, relative to the clip.
LARGEST_ROUNDING = 1e-3


def largest_rounding(factory: Any, num_elements: int) -> float:
    """Returns the most that a sum's rounding adds to the norm of a client's share.

    Args:
      factory: Sums the shares; None for a plain sum.
      num_elements: How many numbers a share has.
    """
    if type(factory) is not tff.aggregators.SecureSumFactory:
        return 0.0
    upper, lower = factory._upper_bound_threshold, factory._lower_bound_threshold
    if isinstance(upper, tff.templates.EstimationProcess):
        return 0.0  # No epsilon is given for bounds that follow the clients' values.
    lower = -upper if lower is None else lower
    return math.sqrt(num_elements) * (float(upper) - float(lower)) / _STEPS
