"""Mechanisms as a wrapper takes them, and as its state keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdp_fl import _validate, mechanisms, schedules
from tfdp_fl.mechanisms import registry


def mechanism_of(
    mechanism: mechanisms.Mechanism | Mapping[str, Any],
) -> mechanisms.Mechanism:
    """Returns a mechanism whose noise cannot change under the run.

    Args:
      mechanism: a mechanism, or what `as_json` made of one.

    Raises:
      TypeError, ValueError: if it is neither.
    """
    if isinstance(mechanism, Mapping):
        parameters = mechanism.get("parameters")
        if set(mechanism) != {"name", "parameters"} or not isinstance(
            parameters, Mapping
        ):
            raise ValueError(
                "mechanism must be a mechanism, or the mapping of its name and "
                f"parameters that a state holds, got {mechanism!r}."
            )
        kind = registry.by_name(mechanism["name"])
        mechanism = kind(**parameters)
    _validate.instance_of(mechanisms.Mechanism, mechanism=mechanism)
    if callable(mechanism.noise_multiplier):
        return mechanism.with_noise_multiplier(
            schedules.fixed(mechanism.noise_multiplier)
        )
    return mechanism


def as_json(mechanism: mechanisms.Mechanism) -> dict[str, Any]:
    """Returns a mechanism's registered name and its parameters."""
    return {
        "name": mechanism.registered_name,
        "parameters": mechanism.parameters(),
    }
