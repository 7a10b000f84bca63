"""`DpEvent`s as plain data, and Gaussians of one release collapsed to one."""

from __future__ import annotations

import importlib.metadata
import math
import numbers
from collections.abc import Sequence
from typing import Any

import attr
import dp_accounting

from tfdp_fl.accounting import gaussian
from tfdp_fl.accounting.search import BestOfTrialsDpEvent


def noise_multiplier_of(event: dp_accounting.DpEvent) -> float | None:
    """Returns the noise multiplier of the one Gaussian an event amounts to.

    Gaussian releases about the same data, however nested, are one Gaussian
    with noise multiplier (sum z_i^-2)^(-1/2) (McMahan et al. 2018, "A general
    approach to adding differential privacy to iterative training procedures",
    section 3, https://arxiv.org/abs/1812.06210).

    Args:
      event: The mechanism's event, without sampling.

    Returns:
      z; 0.0 where there is no noise, infinity for `NoOpDpEvent`, and None for
      an event that is no composition of Gaussians.
    """
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return float(event.noise_multiplier)
    if _is_without_noise(event):
        return 0.0
    mu_squared = _mu_squared(event)
    if mu_squared is None:
        return None
    return math.inf if mu_squared == 0 else mu_squared**-0.5


def _mu_squared(event: dp_accounting.DpEvent) -> float | None:
    """Returns sum z_i^-2 over the Gaussians of an event, None for others."""
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return 0.0
    if _is_without_noise(event):
        return math.inf
    if isinstance(event, dp_accounting.GaussianDpEvent):
        z = float(event.noise_multiplier)
        return math.inf if z == 0 else z**-2
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        one = _mu_squared(event.event)
        return None if one is None else event.count * one if event.count else 0.0
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [_mu_squared(part) for part in event.events]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return math.fsum(known) if math.inf not in known else math.inf
    return None


def _is_without_noise(event: dp_accounting.DpEvent) -> bool:
    return isinstance(event, dp_accounting.NonPrivateDpEvent) or (
        isinstance(event, dp_accounting.LaplaceDpEvent) and event.noise_multiplier == 0
    )


def normalised(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Returns an equal event of plain Python numbers and tuples.

    NumPy scalars and lists would make two equal events differ, could not be
    hashed, and would not survive a JSON round trip.

    A Gaussian's noise multiplier that no accountant can compute with is taken
    for less than it is: below 1e-3 for none, and above 1e6 for that.
    """
    if not isinstance(event, dp_accounting.DpEvent):
        raise TypeError(
            "event must be a dp_accounting.DpEvent, got "
            f"{event!r} of type {type(event).__name__}."
        )
    fields = {
        field.name: _plain(getattr(event, field.name))
        for field in attr.fields(type(event))
    }
    if isinstance(event, dp_accounting.GaussianDpEvent):
        fields["noise_multiplier"] = _within_reach(fields["noise_multiplier"])
    return type(event)(**fields)


def _within_reach(noise_multiplier: float) -> float:
    if 0 < noise_multiplier < gaussian.LEAST_NOISE:
        return 0.0
    if gaussian.MOST_NOISE < noise_multiplier < math.inf:
        return gaussian.MOST_NOISE
    return noise_multiplier


def _plain(value: Any) -> Any:
    if isinstance(value, dp_accounting.DpEvent):
        return normalised(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if math.isnan(value):
            raise ValueError("event must not hold NaN.")
        return float(value)
    if isinstance(value, Sequence) or hasattr(value, "tolist"):
        return tuple(_plain(item) for item in value)
    raise TypeError(f"event holds {value!r}, which no ledger can keep.")


def event_to_dict(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """Returns an event as a dictionary that JSON can hold exactly."""
    name = type(event).__name__
    if _event_class(name) is not type(event):
        raise TypeError(
            f"event must be one of dp_accounting's own events, got {event!r}."
        )
    fields = {
        field.name: _to_json_value(getattr(event, field.name))
        for field in attr.fields(type(event))
    }
    return {"type": name, **fields}


def _event_class(name: str) -> Any:
    if name == BestOfTrialsDpEvent.__name__:
        return BestOfTrialsDpEvent
    return getattr(dp_accounting.dp_event, name, None)


def _to_json_value(value: Any) -> Any:
    if isinstance(value, dp_accounting.DpEvent):
        return event_to_dict(value)
    if isinstance(value, tuple):
        return [_to_json_value(item) for item in value]
    return value


def event_from_dict(fields: dict[str, Any]) -> dp_accounting.DpEvent:
    """Inverse of `event_to_dict`; only dp_accounting's own events are made."""
    fields = dict(fields)
    name = fields.pop("type", None)
    cls = _event_class(str(name))
    if not (isinstance(cls, type) and issubclass(cls, dp_accounting.DpEvent)):
        raise ValueError(
            f"The event type {name!r} is not known to dp-accounting "
            f"{dp_accounting_version()}."
        )
    return cls(**{key: _from_json_value(v) for key, v in fields.items()})


def _from_json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return event_from_dict(value)
    if isinstance(value, list):
        return tuple(_from_json_value(item) for item in value)
    return value


def dp_accounting_version() -> str:
    """Returns the version of the installed dp-accounting."""
    try:
        return importlib.metadata.version("dp-accounting")
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"
