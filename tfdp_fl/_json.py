"""Values as JSON has them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def plain(value: Any, unknown: Callable[[Any], Any] = repr) -> Any:
    """Returns what a value is after a round trip through JSON.

    Args:
      value: Python and NumPy values and tensors, in mappings and sequences of
        any depth. Keys become text, and tuples lists.
      unknown: Called on anything else; returns what stands for it.
    """
    if value is None or isinstance(value, bool | int | float | str):
        # NumPy's float64 and str are Python's as well.
        item = getattr(value, "item", None)
        return value if item is None else item()
    if isinstance(value, Mapping):
        return {str(k): plain(each, unknown) for k, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, unknown) for each in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), unknown)
    if hasattr(value, "numpy"):
        return plain(value.numpy(), unknown)
    return unknown(value)


def finite(value: Any) -> Any:
    """Returns a plain value with None for infinity and NaN, as JSON wants."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def canonical(value: Any) -> str:
    """Returns the one JSON text of a value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
