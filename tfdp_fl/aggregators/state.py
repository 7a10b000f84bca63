"""What an aggregation process of a mechanism carries from round to round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import attrs
import dp_accounting


class AggregatorState(NamedTuple):
    """The server's state of an aggregation process.

    `dp_event` and `is_init_state` mean what they mean in the state of
    `tff.aggregators.DifferentiallyPrivateFactory`.

    Attributes:
      query_state: The state of the mechanism's query, such as the clip.
      rounds: Int32 scalar, how many rounds were aggregated.
      sum_state: The states of the factories that sum the records.
      dp_event: What the last round released about its cohort, before sampling,
        as `dp_accounting.DpEvent.to_named_tuple` gives it.
      is_init_state: Bool scalar, True until the first round.
    """

    query_state: Any
    rounds: Any
    sum_state: Any
    dp_event: Any
    is_init_state: Any


def find_aggregator_state(state: Any) -> AggregatorState:
    """Returns the mechanism's state from inside another state.

    Args:
      state: An `AggregatorState`, or anything that holds exactly one: the
        state of a learning process, of a clipping or zeroing factory around
        the mechanism's, ...

    Raises:
      ValueError: It holds none, or several.
    """
    found = list(_states_in(state))
    if len(found) != 1:
        raise ValueError(
            "state must hold the state of exactly one mechanism (an "
            f"AggregatorState), found {len(found)}."
        )
    return found[0]


def _states_in(state: Any) -> Iterator[AggregatorState]:
    if isinstance(state, AggregatorState):
        yield state
        return
    if isinstance(state, dict):
        children = list(state.values())
    elif isinstance(state, (list, tuple)):
        children = list(state)
    elif attrs.has(type(state)):
        names = [field.name for field in attrs.fields(type(state))]
        children = [getattr(state, name) for name in names]
    else:
        return
    for child in children:
        yield from _states_in(child)


def extract_dp_event(state: Any) -> dp_accounting.DpEvent:
    """Returns what the last round released, before sampling is considered.

    For a ledger of one's own, next to the sampling that was done. A mechanism
    that protects each client's own release gives `NonPrivateDpEvent`: it says
    nothing of a trusted server (see `tfdp_fl.learning.epsilon`).

    Args:
      state: A state after a round (see `find_aggregator_state`).

    Raises:
      ValueError: No round was aggregated yet.
    """
    found = find_aggregator_state(state)
    if found.is_init_state:
        raise ValueError(
            "state must come from `next`, got that of `initialize`, whose "
            "dp_event stands for nothing."
        )
    return dp_accounting.DpEvent.from_named_tuple(found.dp_event)
