"""Model parameters in Flower's shape, read and written without Flower.

Two forms are understood: a list of numpy arrays, and an object with a list
`tensors` of arrays in numpy's own file format (`flwr.common.Parameters`).
"""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import numpy as np


def to_arrays(parameters: Any) -> list[np.ndarray]:
    """Returns the arrays that the server's own parameters hold.

    Not for what clients send: see `replies`.

    Raises:
      TypeError: if the parameters have neither form.
    """
    tensors = getattr(parameters, "tensors", None)
    if tensors is not None:
        # Pickled objects could execute code: they are never allowed.
        return [np.load(io.BytesIO(tensor), allow_pickle=False) for tensor in tensors]
    if isinstance(parameters, list | tuple):
        return [np.asarray(array) for array in parameters]
    raise TypeError(
        "parameters must be a list of numpy arrays or have a list `tensors` "
        f"of serialised ones, got {type(parameters).__name__}."
    )


def like(parameters: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Returns parameters of the same form that hold other arrays."""
    if getattr(parameters, "tensors", None) is None:
        return list(arrays)
    tensors = []
    for array in arrays:
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        tensors.append(buffer.getvalue())
    return replaced(parameters, tensors=tensors)


def replaced(message: Any, **changes: Any) -> Any:
    """Returns a shallow copy with other attributes; the original stays."""
    other = copy.copy(message)
    for name, value in changes.items():
        setattr(other, name, value)
    return other
