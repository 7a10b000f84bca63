"""What an aggregation process of a mechanism carries from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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


_BUILD_INSTEAD = (
    "Build the process with tfdp_fl.learning.build_dp_fed_avg, or hand the "
    "mechanism's factory itself to tff.learning.algorithms."
    "build_unweighted_fed_avg."
)


def _holds_mechanism(state: Any) -> bool:
    children = state.values() if isinstance(state, Mapping) else state
    return isinstance(state, AggregatorState) or (
        isinstance(state, (Mapping, list, tuple))
        and any(map(_holds_mechanism, children))
    )


def accountable_state(state: Any) -> AggregatorState:
    """Returns the mechanism's state, if all of a state can be accounted for.

    Known are the states of `tff.learning`'s federated averaging whose
    aggregator is the mechanism's, and whose sums (the mechanism's
    `inner_factory` and `scalars_factory`) keep no state.

    Args:
      state: A `LearningAlgorithmState`, or the state of such an aggregator.

    Raises:
      ValueError: The state is of another kind: something beside the mechanism,
        or around it, may release what no epsilon here counts.
    """
    if isinstance(state, tff.learning.templates.LearningAlgorithmState):
        _check_client_work(state.client_work)
        if _holds_mechanism(state.distributor) or _holds_mechanism(state.finalizer):
            raise ValueError(
                "state must hold one mechanism, at its aggregator, got another in "
                f"its distributor or finalizer. {_BUILD_INSTEAD}"
            )
        state = state.aggregator
    if not isinstance(state, AggregatorState):
        raise ValueError(
            "state must be that of a learning process (LearningAlgorithmState) whose "
            "aggregator is the mechanism's own, or of that (AggregatorState), got "
            f"{type(state).__name__}: an aggregator around it may release more than "
            "the mechanism does (a mean divides once more, by a count or by weights "
            "without noise; a norm that follows the clients' values lets one client "
            f"change what others contribute). {_BUILD_INSTEAD}"
        )
    if tf.nest.flatten(state.sum_state):
        raise ValueError(
            "state must come from a sum that is the same in every round "
            "(inner_factory and scalars_factory without a state), got one "
            "that keeps a state, as secure sums and zeroing with adaptive "
            "bounds do: one client then changes what others contribute, "
            f"after the clip. {_BUILD_INSTEAD}"
        )
    return state


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
