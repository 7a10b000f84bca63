"""Where the time of a round goes, from TensorFlow's own profiler."""

from __future__ import annotations

import collections
import re
from typing import Any

# What an operation is for, by a pattern that its type begins with. The first
# that matches counts; names like _MklFusedMatMul are those of oneDNN's kernels.
_PREFIX = "_*(Mkl)?(Native)?(Fused)?(Batch)?"
CATEGORIES = (
    ("compiled by XLA", "_*Xla"),
    (
        "matrix products and convolutions",
        f"{_PREFIX}(MatMul|Conv2D|Conv3D|Depthwise|Einsum)",
    ),
    ("optimizer steps", "ResourceApply|ResourceScatter|AssignSubVariable"),
    (
        "starting clients, clipping and summing",
        "AssignVariable|AssignAddVariable|L2Loss|AddN|Sub|Sqrt|IsFinite|Clip",
    ),
    ("reading examples", "Gather|ResourceGather"),
    ("noise", "StatelessRandom|RandomStandardNormal|StatelessNormal"),
    (
        "activations, biases, loss, metrics and their gradients",
        f"{_PREFIX}(Relu|BiasAdd|SparseSoftmax|Softmax|LogSoftmax|MaxPool|Max"
        "|ArgMax|Equal|Mean|Sum|Sigmoid|Tanh|Mul|Add|Select|Exp|DivNoNan)",
    ),
    ("control, shapes and copies", ""),
)


def category(operation: str) -> str:
    """Returns what an operation of this type is for."""
    return next(
        name for name, pattern in CATEGORIES if re.match(pattern, operation) is not None
    )


def self_times(
    events: list[tuple[str, int, int]],
) -> dict[str, list[int]]:
    """Returns how often and how long each name ran, what is inside it aside.

    Args:
      events: Of one thread, (name, start, duration); they nest.

    Returns:
      For each name its number of events, and its time in the same unit.
    """
    totals: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    open_events: list[tuple[str, int]] = []  # Name and end.
    for name, start, duration in sorted(events, key=lambda e: (e[1], -e[2])):
        while open_events and open_events[-1][1] <= start:
            open_events.pop()
        if open_events:
            outer, end = open_events[-1]
            totals[outer][1] -= min(duration, end - start)
        totals[name][0] += 1
        totals[name][1] += duration
        open_events.append((name, start + duration))
    return dict(totals)


def covered(spans: list[tuple[float, float]]) -> float:
    """Returns how much time lies in at least one (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def operations(xplane: bytes, rounds: int) -> list[dict[str, Any]]:
    """Returns TensorFlow's operations of a profile, the longest first.

    Args:
      xplane: The content of the profiler's `.xplane.pb` file.
      rounds: How many rounds were profiled.

    Returns:
      For each type of operation its `name`, `category`, `count` per round, and
      `seconds` per round, summed over threads.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(xplane)
    totals: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for plane in space.planes:
        if "CPU" not in plane.name:
            continue
        names = {key: meta.name for key, meta in plane.event_metadata.items()}
        for line in plane.lines:
            events = [
                (names[event.metadata_id], event.offset_ps, event.duration_ps)
                for event in line.events
            ]
            for name, (count, time) in self_times(events).items():
                kind = _operation_type(name)
                if kind is not None:
                    totals[kind][0] += count
                    totals[kind][1] += time
    found = [
        {
            "name": name,
            "category": category(name),
            "count": count / rounds,
            "seconds": time / 1e12 / rounds,
        }
        for name, (count, time) in totals.items()
    ]
    return sorted(found, key=lambda each: -each["seconds"])


def _operation_type(name: str) -> str | None:
    """Returns the type of "node/name:Type"; None for what is no operation."""
    node, colon, kind = name.rpartition(":")
    if not colon or not node or node.endswith(":") or not kind.isidentifier():
        return None
    return kind
