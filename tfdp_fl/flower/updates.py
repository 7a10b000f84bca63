"""One client's update as NumPy arrays: the difference, the clip, and the noise.

Everything is computed in float64 and rounded only once, after the noise, or not at all
if rounding would remove some of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# A client's share of the noise is at least this many gaps between adjacent numbers.
_MIN_GAPS_PER_STDDEV = 16

# x: exp(-x) is the probability that an honest client's update is scaled down.
_TAIL_EXPONENT = 40.0


class ClippedUpdate(NamedTuple):
    """A clipped update and facts about the clip.

    Attributes:
      arrays: Float64 arrays with a joint L2 norm of at most the clip norm.
      was_within: Whether the norm was at most the clip norm before clipping.
      discarded: Whether the update was not finite and was replaced by zero.
    """

    arrays: list[np.ndarray]
    was_within: bool
    discarded: bool


def difference(
    returned: Sequence[np.ndarray], received: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns Delta = returned - received, float64.

    Raises:
      ValueError: The numbers or shapes of the arrays differ.
    """
    shapes = [np.shape(array) for array in returned]
    expected = [np.shape(array) for array in received]
    if shapes != expected:
        raise ValueError(
            "The parameters that a client returns must have the shapes of "
            f"those it received, {expected}, got {shapes}."
        )
    # `clip` handles updates that are not finite.
    with np.errstate(invalid="ignore", over="ignore"):
        return [
            np.asarray(new, np.float64) - np.asarray(old, np.float64)
            for new, old in zip(returned, received, strict=True)
        ]


def clip(update: Sequence[np.ndarray], clip_norm: float) -> ClippedUpdate:
    """Returns Delta min(1, S / ||Delta||), with one L2 norm over all arrays.

    A NaN or an infinity anywhere makes the whole update zero, because clipping would
    not remove it (infinity times zero is NaN).

    Source: McMahan et al., "Learning Differentially Private Recurrent Language
    Models" (2018), Algorithm 1, FlatClip.

    Args:
      update: Float64 arrays.
      clip_norm: S > 0.
    """
    update_norm = norm(update)
    if not math.isfinite(update_norm):
        zeros = [np.zeros_like(array) for array in update]
        return ClippedUpdate(zeros, was_within=True, discarded=True)
    is_within = update_norm <= clip_norm
    scale = 1.0 if is_within else clip_norm / update_norm
    arrays = [array * scale for array in update]
    return ClippedUpdate(arrays, is_within, discarded=False)


def norm(arrays: Sequence[np.ndarray]) -> float:
    """Returns the L2 norm over all arrays, even if their squares would underflow."""
    largest = max((float(np.max(np.abs(a), initial=0)) for a in arrays), default=0.0)
    unit = min(largest, 1.0) or 1.0
    with np.errstate(all="ignore"):
        squares = sum(float(np.sum((array / unit) ** 2)) for array in arrays)
    return unit * math.sqrt(squares)


def largest_honest_norm(clip_norm: float, stddev: float, size: int) -> float:
    """Returns a bound on the norm of an honest client's clipped update with noise.

    For g ~ N(0, I_D), ||g||^2 > D + 2 sqrt(D x) + 2 x has a probability of at
    most exp(-x). With x = 40, a client that clips to S and adds noise of
    stddev sigma exceeds S + sigma (D + 2 sqrt(D x) + 2 x)^(1/2) with a
    probability below 5e-18.

    Source: Laurent & Massart, "Adaptive estimation of a quadratic functional
    by model selection" (2000), Lemma 1.

    Args:
      clip_norm: The clip norm, S.
      stddev: sigma, the stddev of the client's noise per coordinate.
      size: D, the number of coordinates.
    """
    x = _TAIL_EXPONENT
    radius = math.sqrt(size + 2 * math.sqrt(size * x) + 2 * x)
    return clip_norm + stddev * radius


def fine_grid_step(largest: float, clients_per_round: float) -> float:
    """Returns the step of the fine grid, a power of two; 0 for no grid.

    As in `mechanisms.bounded_sums`, float64 adds up 4 (m + 16) such numbers without any
    rounding.

    Args:
      largest: The largest L2 norm of a contribution; infinity for no bound.
      clients_per_round: The expected number of clients in a round, m.
    """
    if not 0 < largest < math.inf:
        return 0.0
    power = math.frexp(largest)[1] + math.frexp(clients_per_round + 16.0)[1]
    return 2.0 ** (power - 50)


def to_grid(array: np.ndarray, step: float) -> np.ndarray:
    """Rounds an array to integer multiples of a step; 0 leaves it unchanged."""
    return np.rint(array / step) * step if step else array


def add_noise(arrays: Sequence[np.ndarray], stddev: float) -> list[np.ndarray]:
    """Returns the arrays plus N(0, stddev^2) per coordinate.

    Each call uses fresh randomness from the operating system.
    """
    rng = np.random.default_rng()
    return [array + rng.normal(scale=stddev, size=np.shape(array)) for array in arrays]


def apply(
    received: Sequence[np.ndarray], update: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns received + update in the received dtypes.

    Arrays that are not floating-point (such as counters) are returned as float64,
    because rounding them would undo the clipping.
    """
    return [
        np.asarray(np.asarray(old, np.float64) + change, _result_dtype(np.asarray(old)))
        for old, change in zip(received, update, strict=True)
    ]


def apply_with_noise(
    received: Sequence[np.ndarray],
    update: Sequence[np.ndarray],
    noise_stddev: float,
    clip_norm: float,
) -> list[np.ndarray]:
    """Like `apply`, but ensures that rounding preserves the noise that is charged for.

    Every client rounds its own share of the noise, but the guarantee is for their sum.
    If shares are small relative to the gap between a weight and the next number, each
    would be rounded away. On a grid on which a share is k steps, rounding changes the
    noise of the sum by a relative error of only exp(-2 pi^2 k^2) (Poisson summation).
    An array whose dtype has fewer than 16 gaps per share is returned as float64,
    whatever the update contains.

    Args:
      received: The weights that the client received, w.
      update: Float64 arrays, clipped and with noise.
      noise_stddev: The stddev of that noise, above 0.
      clip_norm: The clip norm, S.

    Raises:
      ValueError: Even float64 is too coarse.
    """
    arrays = []
    for old, change in zip(received, update, strict=True):
        exact = np.asarray(old, np.float64)
        # Noise of 16 standard deviations is never drawn.
        largest = np.max(np.abs(exact), initial=0.0) + clip_norm + 16 * noise_stddev
        for dtype in (_result_dtype(np.asarray(old)), np.dtype(np.float64)):
            if (
                largest <= np.finfo(dtype).max
                and _MIN_GAPS_PER_STDDEV * np.spacing(dtype.type(largest))
                <= noise_stddev
            ):
                arrays.append(np.asarray(exact + change, dtype))
                break
        else:
            raise ValueError(
                f"dpfedavg_noise_stddev must be at least {_MIN_GAPS_PER_STDDEV} gaps "
                "of float64 at the model's largest weight, "
                f"{largest:.3g}, got {noise_stddev:.3g}."
            )
    return arrays


def apply_within(
    received: Sequence[np.ndarray], update: Sequence[np.ndarray], clip_norm: float
) -> list[np.ndarray]:
    """Like `apply`, but the result is within the clip norm of `received`.

    Rounding to nearest may almost double a coordinate of an update that is slightly
    more than half the gap between its weight and the next number. If the norm then
    exceeds S, all coordinates are rounded towards `received`, so that none moves
    farther than by `update`.

    Args:
      received: The weights that the client received, w.
      update: Float64 arrays with a joint L2 norm of at most S.
      clip_norm: The clip norm, S.
    """
    rounded = apply(received, update)
    if norm(difference(rounded, received)) <= clip_norm:
        return rounded
    shortened = []
    for new, old, change in zip(rounded, received, update, strict=True):
        moved = np.asarray(new, np.float64) - np.asarray(old, np.float64)
        back = np.nextafter(new, np.asarray(old, new.dtype))
        too_far = np.abs(moved) > np.abs(change)
        shortened.append(np.asarray(np.where(too_far, back, new), new.dtype))
    return shortened


def _result_dtype(array: np.ndarray) -> np.dtype:
    if np.issubdtype(array.dtype, np.floating):
        return array.dtype
    return np.dtype(np.float64)
