"""One client's update as numpy arrays: taken, clipped as a whole, noised.

Everything is computed in float64 and rounded once, after the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class ClippedUpdate(NamedTuple):
    """A clipped update and what was seen on the way.

    Attributes:
      arrays: float64 arrays with a joint L2 norm of at most the clip norm.
      within: whether the norm was at most the clip norm before clipping.
      discarded: whether the update was not finite, and zero replaced it.
    """

    arrays: list[np.ndarray]
    within: bool
    discarded: bool


def difference(
    returned: Sequence[np.ndarray], received: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns Delta = returned - received, float64.

    Raises:
      ValueError: unless both have the same number of arrays, of same shapes.
    """
    shapes = [np.shape(array) for array in returned]
    expected = [np.shape(array) for array in received]
    if shapes != expected:
        raise ValueError(
            "The parameters that a client returns must have the shapes of "
            f"those it received, {expected}, got {shapes}."
        )
    # An update that is not finite is dealt with by `clipped`.
    with np.errstate(invalid="ignore", over="ignore"):
        return [
            np.asarray(new, np.float64) - np.asarray(old, np.float64)
            for new, old in zip(returned, received, strict=True)
        ]


def clipped(update: Sequence[np.ndarray], clip_norm: float) -> ClippedUpdate:
    """Returns Delta min(1, S / ||Delta||), one L2 norm over all arrays.

    A NaN or an infinity anywhere makes the whole update zero first: clipping
    would let it through (infinity times zero is NaN).

    Source: McMahan et al., "Learning Differentially Private Recurrent Language
    Models" (2018), Algorithm 1, FlatClip.

    Args:
      update: float64 arrays.
      clip_norm: S > 0.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        norm = math.sqrt(sum(float(np.sum(array**2)) for array in update))
    if not math.isfinite(norm):
        zeros = [np.zeros_like(array) for array in update]
        return ClippedUpdate(zeros, within=True, discarded=True)
    if norm <= clip_norm:
        return ClippedUpdate(list(update), within=True, discarded=False)
    scale = clip_norm / norm
    return ClippedUpdate(
        [array * scale for array in update], within=False, discarded=False
    )


def noised(arrays: Sequence[np.ndarray], stddev: float) -> list[np.ndarray]:
    """Returns the arrays plus N(0, stddev^2) per coordinate.

    Each call takes its randomness anew from the operating system.
    """
    rng = np.random.default_rng()
    return [
        array + rng.normal(scale=stddev, size=np.shape(array))
        for array in arrays
    ]


def applied(
    received: Sequence[np.ndarray], update: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns received + update in the dtypes received.

    Arrays that do not hold floating-point numbers (such as counters) come back
    as float64: to round them would undo the clipping.
    """
    return [
        np.asarray(
            np.asarray(old, np.float64) + change, _result_dtype(np.asarray(old))
        )
        for old, change in zip(received, update, strict=True)
    ]


def _result_dtype(array: np.ndarray) -> np.dtype:
    if np.issubdtype(array.dtype, np.floating):
        return array.dtype
    return np.dtype(np.float64)
