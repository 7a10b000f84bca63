"""The events allowed in a ledger, a checkpoint or a server's history.

A file is read before it is trusted, and dp-accounting accepts any event, even a small
one that needs more memory than there is. So this module limits each event type, far
above any real use, so that its cost takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

_MAX_EVENTS, _MAX_DEPTH = 10_000, 16
MAX_TRIAL_COSTS = 64

Check = Callable[[object], bool]


def _number(low: float, high: float, *special: float, kind: Any = int | float) -> Check:
    """Returns a check for numbers in a range, or special ones."""
    return lambda value: (
        isinstance(value, kind)
        and not isinstance(value, bool)
        and (low <= value <= high or value in special)
    )


def _integer(low: int, high: int) -> Check:
    return _number(low, high, kind=int)


def _list(check: Check, max_length: float, min_length: int = 1) -> Check:
    return lambda value: (
        isinstance(value, list | tuple)
        and min_length <= len(value) <= max_length
        and all(map(check, value))
    )


def _is_event(value: object) -> bool:
    return isinstance(value, Mapping)


_PROBABILITY, _SIZE = _number(0.0, 1.0), _integer(1, 2**53)
_NOISE = _number(0.0, math.inf)
# Below 1e-2, a loss would have more cells than fit into memory.
_LAPLACE_NOISE = _number(1e-2, math.inf, 0.0)

# The fields of each event type, and their checks.
_FIELDS: dict[str, dict[str, Check]] = {
    "NoOpDpEvent": {},
    "NonPrivateDpEvent": {},
    "UnsupportedDpEvent": {},
    # The charge made from it checks the value.
    "GaussianDpEvent": {"noise_multiplier": _number(-math.inf, math.inf)},
    "LaplaceDpEvent": {"noise_multiplier": _LAPLACE_NOISE},
    "DiscreteLaplaceDpEvent": {
        "noise_parameter": _number(1e-3, 100.0),
        "sensitivity": _integer(1, 1000),
    },
    "RandomizedResponseDpEvent": {
        "noise_parameter": _PROBABILITY,
        "num_buckets": _integer(2, 10**6),
    },
    "ZCDpEvent": {"rho": _number(0.0, 1e12), "xi": _number(0.0, 1e12)},
    "SelfComposedDpEvent": {"event": _is_event, "count": _integer(0, 2**40)},
    "ComposedDpEvent": {"events": _list(_is_event, math.inf, min_length=0)},
    "PoissonSampledDpEvent": {"sampling_probability": _PROBABILITY, "event": _is_event},
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
            _integer(0, 2**40)(value) or _list(_integer(0, 2**40), 1000)(value)
        ),
    },
    "MixtureOfGaussiansDpEvent": {
        "standard_deviation": _number(1e-2, 1e6),
        "sensitivities": _list(_number(0.0, 10.0), 100),
        "sampling_probs": _list(_PROBABILITY, 100),
    },
    "TruncatedSubsampledGaussianDpEvent": {
        "dataset_size": _integer(1, 10**8),
        "sampling_probability": _PROBABILITY,
        "truncated_batch_size": _integer(1, 10**8),
        "noise_multiplier": _number(1e-2, 1e6, 0.0, math.inf),
    },
    "KnownSelectionDpEvent": {"sampling_probability": _PROBABILITY, "event": _is_event},
    "RandomAllocationDpEvent": {"rounds": _integer(1, 2**40), "event": _is_event},
    "RepeatAndSelectDpEvent": {
        "event": _is_event,
        "mean": _number(0.0, 1e6),
        "shape": _number(0.0, 1e3, math.inf),
    },
    "BestOfTrialsDpEvent": {
        "events": _list(_is_event, MAX_TRIAL_COSTS),
        "mean": _number(1.0, 1e6),
        "shape": _number(0.0, 1e3, math.inf),
    },
}


def check_event(value: Any) -> None:
    """Raises ValueError unless an event, given as JSON, is allowed.

    A type that is unknown here is left to the code that makes the event.
    """
    stack, count = [(value, 0)], 0
    while stack:
        (event, depth), count = stack.pop(), count + 1
        if depth > _MAX_DEPTH or count > _MAX_EVENTS:
            raise ValueError(
                f"event must hold at most {_MAX_EVENTS} events, at most {_MAX_DEPTH} "
                "deep, got more."
            )
        if not _is_event(event):
            raise ValueError(f"event must be an object with a type, got {event!r:.80}.")
        kind = str(event.get("type"))
        checks = _FIELDS.get(kind)
        for name, check in (checks or {}).items():
            if not check(event.get(name)):
                raise ValueError(
                    f"event must be a {kind} whose {name} an accountant can compute "
                    f"with, got {event.get(name)!r:.80}."
                )
        children = event.get("events", ())
        children = [*children] if isinstance(children, list | tuple) else []
        if "event" in event:
            children.append(event["event"])
        stack += [(child, depth + 1) for child in children]
