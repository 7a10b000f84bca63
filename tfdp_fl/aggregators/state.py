"""What an aggregation process of a mechanism carries from round to round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import attrs
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdp_fl import _json
from tfdp_fl.accounting import charge
from tfdp_fl.mechanisms import contribution
from tfdp_fl.mechanisms import mechanism as mechanism_lib


class RoundHistory(NamedTuple):
    """What each round cost, written down by the process that ran it.

    A state may be handed from process to process; what a round cost is then
    still what it cost. T is the number of rounds so far.

    Attributes:
      lines: String [T], see `history_line`.
      answered: Float64 [T], how many clients were in the sum.
    """

    lines: Any
    answered: Any


def history_kind(mechanism: mechanism_lib.Mechanism) -> dict[str, Any]:
    """Returns what rounds must have in common for one epsilon, as JSON values.

    That is not the noise: each round's line says what it cost.
    """
    return {
        "mechanism": mechanism.name,
        "guarantee": mechanism.guarantee,
        "caveats": list(mechanism.caveats()),
        "noise_site": mechanism.noise_site,
        "must_not_change": mechanism.memory_key(),
    }


def history_line(
    mechanism: mechanism_lib.Mechanism,
    deployment: contribution.Deployment,
    round_index: int,
) -> str:
    """Returns what a round is and costs, as JSON.

    Beside `history_kind`: `sampling`, `num_clients` (null where the process was
    not told) and `clients_per_round`; of a local guarantee `mu_squared`,
    (sensitivity / sigma)^2 of one client's part, and of others the `event`.
    """
    line = {
        **history_kind(mechanism),
        "sampling": deployment.sampling,
        "num_clients": deployment.num_clients,
        "clients_per_round": deployment.cohort_size(round_index),
    }
    if mechanism.guarantee in ("local", "record"):
        line["mu_squared"] = float(mechanism.mu_squared(deployment))
    else:
        event = charge.normalised(mechanism.round_event(round_index, deployment))
        line["event"] = charge.event_to_json(event)
    return _json.canonical(line)


class AggregatorState(NamedTuple):
    """The server's state of an aggregation process.

    Attributes:
      query_state: The state of the mechanism's query, such as the clip.
      rounds: Int32 scalar, how many rounds were aggregated.
      sum_state: The states of the factories that sum the records.
      history: A `RoundHistory`.
    """

    query_state: Any
    rounds: Any
    sum_state: Any
    history: Any


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


# What `tff.aggregators.zeroing_factory` and `clipping_factory` keep.
_ROBUST_STATES = {
    ("clipping_norm", "inner_agg", "clipped_count_agg"): "clipping",
    ("zeroing_norm", "inner_agg", "zeroed_count_agg"): "zeroing",
}
_BUILD_INSTEAD = (
    "Build the process with tfdp_fl.learning.build_dp_fed_avg, or hand the "
    "mechanism's factory itself to tff.learning.algorithms."
    "build_unweighted_fed_avg."
)


def accountable_state(state: Any) -> AggregatorState:
    """Returns the mechanism's state, if all of a state can be accounted for.

    Known are the states of `tff.learning`'s federated averaging whose
    aggregator is the mechanism's, alone or inside zeroing and clipping with
    constant norms, which are one client's own business, and whose sums (the
    mechanism's `inner_factory` and `scalars_factory`) keep no state.

    Args:
      state: A `LearningAlgorithmState`, or the state of such an aggregator.

    Raises:
      ValueError: The state is of another kind: something beside the mechanism,
        or around it, may release what no epsilon here counts.
    """
    if isinstance(state, (AggregatorState, Mapping)):
        return _inside_robust(state)
    if not isinstance(state, tff.learning.templates.LearningAlgorithmState):
        raise ValueError(
            "state must be the state of a learning process "
            "(LearningAlgorithmState) or of a mechanism's aggregator "
            f"(AggregatorState), got {type(state).__name__}. {_BUILD_INSTEAD}"
        )
    _check_client_work(state.client_work)
    for name in ("distributor", "finalizer", "global_model_weights"):
        if list(_states_in(getattr(state, name))):
            raise ValueError(
                "state must hold one mechanism, at its aggregator, got another "
                f"in its {name}. {_BUILD_INSTEAD}"
            )
    return _inside_robust(state.aggregator)


def _check_client_work(state: Any) -> None:
    """Raises ValueError unless client work keeps but optimizer settings.

    Whatever else it keeps can come from clients' data, past the aggregator.
    """
    settings = state.values() if isinstance(state, Mapping) else [state]
    known = not tf.nest.flatten(state) or all(
        not isinstance(each, (tuple, list, Mapping)) and np.ndim(each) == 0
        for each in settings
    )
    if not known:
        raise ValueError(
            "state must come from federated averaging, got client work that "
            "keeps a state of its own, as Mime's keeps full gradients: what "
            f"that releases has no noise of the mechanism's. {_BUILD_INSTEAD}"
        )


def _inside_robust(state: Any) -> AggregatorState:
    if isinstance(state, AggregatorState):
        if tf.nest.flatten(state.sum_state):
            raise ValueError(
                "state must come from a sum that is the same in every round "
                "(inner_factory and scalars_factory without a state), got one "
                "that keeps a state, as secure sums and zeroing with adaptive "
                "bounds do: one client then changes what others contribute, "
                f"after the clip. {_BUILD_INSTEAD}"
            )
        return state
    names = tuple(state) if isinstance(state, Mapping) else None
    if names not in _ROBUST_STATES:
        raise ValueError(
            "state must have the mechanism's own aggregator, alone or inside "
            "zeroing or clipping with constant norms, got "
            + (f"one with {list(names)}" if names else type(state).__name__)
            + ": an aggregator around it (a mean, for one, divides once more, "
            "by a count or by weights without noise) may release more than "
            f"the mechanism does. {_BUILD_INSTEAD}"
        )
    norm = state[names[0]]
    if tf.nest.flatten(norm):
        raise ValueError(
            f"state must come from {_ROBUST_STATES[names]} with a constant "
            "norm, got one whose norm follows the clients' values: one client "
            "then changes what others contribute, and epsilon does not hold. "
            f"{_BUILD_INSTEAD}"
        )
    return _inside_robust(state["inner_agg"])
