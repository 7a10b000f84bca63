"""Whether a round fits into memory, before the first one."""

from __future__ import annotations

import math
import pathlib

_GIB = 2.0**30
# A replica's weights, the gradients, the update, and what it started from.
_COPIES_OF_A_REPLICA = 4
_CGROUP = pathlib.Path("/sys/fs/cgroup")


def available_bytes() -> float:
    """Returns the memory that is free here; infinite where nothing tells."""
    found = math.inf
    try:
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = 1024.0 * int(line.split()[1])
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            found = min(found, float(int(limit) - used))
    except (OSError, ValueError, IndexError):
        pass
    return found


def check(
    *,
    elements: int,
    clients_per_round: float,
    num_replicas: int,
    collects: bool,
    mechanism: str,
) -> None:
    """Raises where the least that a round takes is more than there is.

    Args:
      elements: D, of one client's update.
      clients_per_round: m, the largest expected cohort.
      num_replicas: How many clients train at once.
      collects: Whether each client's update is kept until all are there.
      mechanism: Its name.

    Raises:
      ValueError: It says what is needed, what there is, and what to lower.
    """
    one = 4.0 * elements
    replicas = _COPIES_OF_A_REPLICA * one * num_replicas
    collected = one * clients_per_round if collects else 0.0
    free = available_bytes()
    if replicas + collected <= free:
        return
    room = math.floor(max(0.0, free - replicas) / one)
    advice = f"num_replicas must be lower than {num_replicas}, or the model smaller"
    if collects and room >= 1:
        advice = (
            f"clients_per_round must be at most {room}, or the model smaller; "
            "a mechanism whose updates are summed at once (adaptive clipping "
            "in place of the median, no secure aggregation) needs none of it"
        )
    raise ValueError(
        f"{advice}: with {mechanism} a round takes {num_replicas} replicas of "
        f"{elements} parameters ({replicas / _GIB:.1f} GiB)"
        + (
            f" and keeps the updates of {clients_per_round:g} clients until "
            f"all are there ({collected / _GIB:.1f} GiB)"
            if collects
            else ""
        )
        + f", and {free / _GIB:.1f} GiB are free."
    )
