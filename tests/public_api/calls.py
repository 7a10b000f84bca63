"""A right call of everything public that takes arguments."""

from __future__ import annotations

from collections.abc import Callable

from tests.public_api import (
    calling,
    data_calls,
    guarantee_calls,
    training_calls,
)


def calls() -> dict[str, Callable[[], calling.Call]]:
    """Returns what makes each call, by "room.name", perhaps with " and ..."."""
    return dict(
        [
            *guarantee_calls.calls(),
            *data_calls.calls(),
            *training_calls.calls(),
        ]
    )


def is_slow(name: str) -> bool:
    """Returns whether a call trains, or is made of what was trained."""
    return name.startswith(
        (
            "aggregators.accountable_state",
            "keras.DPFederatedModel and ",
            "keras.make_private",
            "learning.",
        )
    )
