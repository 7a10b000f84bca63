"""The events allowed in a ledger, a checkpoint or a server's history.

A file is read before it is trusted, and dp-accounting computes with any event, even a
small one that needs more memory than there is. So this module bounds each event type,
far beyond any real use, such that its cost is computed in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

_MOST_EVENTS, _DEEPEST = 10_000, 16
_MOST_TRIALS_EVENTS = 64

Check = Callable[[object], bool]


def _number(low: float, high: float, *others: float) -> Check:
    """Returns a check for numbers in a range or among some others."""
    return lambda value: (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (low <= value <= high or value in others)
    )


def _whole(low: int, high: int) -> Check:
    return lambda value: (
        isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    )


def _list(each: Check, most: int) -> Check:
    return lambda value: (
        isinstance(value, list | tuple)
        and 0 < len(value) <= most
        and all(map(each, value))
    )


def _is_event(value: object) -> bool:
    return isinstance(value, Mapping)


_SHARE, _SIZE = _number(0.0, 1.0), _whole(1, 2**53)
_NOISE = _number(0.0, math.inf)
# Below 1e-2, a loss would have more cells than fit into memory.
_OF_LAPLACE = _number(1e-2, math.inf, 0.0)

# The fields of each event type, and their checks.
_KINDS: dict[str, dict[str, Check]] = {
    "NoOpDpEvent": {},
    "NonPrivateDpEvent": {},
    "UnsupportedDpEvent": {},
    # The charge made from it checks the value.
    "GaussianDpEvent": {"noise_multiplier": _number(-math.inf, math.inf)},
    "LaplaceDpEvent": {"noise_multiplier": _OF_LAPLACE},
    "DiscreteLaplaceDpEvent": {
        "noise_parameter": _number(1e-3, 100.0),
        "sensitivity": _whole(1, 1000),
    },
    "RandomizedResponseDpEvent": {
        "noise_parameter": _SHARE,
        "num_buckets": _whole(2, 10**6),
    },
    "ZCDpEvent": {"rho": _number(0.0, 1e12), "xi": _number(0.0, 1e12)},
    "SelfComposedDpEvent": {"event": _is_event, "count": _whole(0, 2**40)},
    "ComposedDpEvent": {
        "events": lambda value: (
            isinstance(value, list | tuple) and all(map(_is_event, value))
        )
    },
    "PoissonSampledDpEvent": {"sampling_probability": _SHARE, "event": _is_event},
    "SampledWithReplacementDpEvent": {
        "source_dataset_size": _SIZE,
        "sample_size": _SIZE,
        "event": _is_event,
    },
    "SampledWithoutReplacementDpEvent": {
        "source_dataset_size": _SIZE,
        "sample_size": _SIZE,
        "event": _is_event,
    },
    "SingleEpochTreeAggregationDpEvent": {
        "noise_multiplier": _NOISE,
        "step_counts": lambda value: (
            _whole(0, 2**40)(value) or _list(_whole(0, 2**40), 1000)(value)
        ),
    },
    "MixtureOfGaussiansDpEvent": {
        "standard_deviation": _number(1e-2, 1e6),
        "sensitivities": _list(_number(0.0, 10.0), 100),
        "sampling_probs": _list(_SHARE, 100),
    },
    "TruncatedSubsampledGaussianDpEvent": {
        "dataset_size": _whole(1, 10**8),
        "sampling_probability": _SHARE,
        "truncated_batch_size": _whole(1, 10**8),
        "noise_multiplier": _number(1e-2, 1e6, 0.0, math.inf),
    },
    "KnownSelectionDpEvent": {"sampling_probability": _SHARE, "event": _is_event},
    "RandomAllocationDpEvent": {"rounds": _whole(1, 2**40), "event": _is_event},
    "RepeatAndSelectDpEvent": {
        "event": _is_event,
        "mean": _number(0.0, 1e6),
        "shape": _number(0.0, 1e3, math.inf),
    },
    "BestOfTrialsDpEvent": {
        "events": _list(_is_event, _MOST_TRIALS_EVENTS),
        "mean": _number(1.0, 1e6),
        "shape": _number(0.0, 1e3, math.inf),
    },
}


def check_event(value: Any) -> None:
    """Raises ValueError unless an event, given as JSON, is allowed.

    A type that is unknown here is left to the code that makes the event.
    """
    waiting, count = [(value, 0)], 0
    while waiting:
        (event, depth), count = waiting.pop(), count + 1
        if depth > _DEEPEST or count > _MOST_EVENTS:
            raise ValueError(
                f"event must hold at most {_MOST_EVENTS} events, at most {_DEEPEST} "
                "deep, got more."
            )
        if not _is_event(event):
            raise ValueError(f"event must be an object with a type, got {event!r:.80}.")
        kind = str(event.get("type"))
        checks = _KINDS.get(kind)
        for name, check in (checks or {}).items():
            if not check(event.get(name)):
                raise ValueError(
                    f"event must be a {kind} whose {name} an accountant can compute "
                    f"with, got {event.get(name)!r:.80}."
                )
        inside = event.get("events", ())
        inside = [*inside] if isinstance(inside, list | tuple) else []
        if "event" in event:
            inside.append(event["event"])
        waiting += [(each, depth + 1) for each in inside]
