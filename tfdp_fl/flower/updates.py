"""One client's update as numpy arrays: taken, clipped as a whole, noised.

Everything is computed in float64 and rounded once, after the noise; not at all
where rounding would take some of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Between neighbouring numbers; of what a client's share of noise is, at least.
_GAPS_OF_NOISE = 16

# x: exp(-x) is the probability with which an honest client is cut short.
_TAIL_EXPONENT = 40.0


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
    # An update that is not finite is dealt with by `clip`.
    with np.errstate(invalid="ignore", over="ignore"):
        return [
            np.asarray(new, np.float64) - np.asarray(old, np.float64)
            for new, old in zip(returned, received, strict=True)
        ]


def clip(update: Sequence[np.ndarray], clip_norm: float) -> ClippedUpdate:
    """Returns Delta min(1, S / ||Delta||), one L2 norm over all arrays.

    A NaN or an infinity anywhere makes the whole update zero first: clipping
    would let it through (infinity times zero is NaN).

    Source: McMahan et al., "Learning Differentially Private Recurrent Language
    Models" (2018), Algorithm 1, FlatClip.

    Args:
      update: float64 arrays.
      clip_norm: S > 0.
    """
    length = norm(update)
    if not math.isfinite(length):
        zeros = [np.zeros_like(array) for array in update]
        return ClippedUpdate(zeros, within=True, discarded=True)
    within = length <= clip_norm
    scale = 1.0 if within else clip_norm / length
    return ClippedUpdate([array * scale for array in update], within, discarded=False)


def norm(arrays: Sequence[np.ndarray]) -> float:
    """Returns the L2 norm over all arrays, however small their squares."""
    largest = max((float(np.max(np.abs(a), initial=0)) for a in arrays), default=0.0)
    unit = min(largest, 1.0) or 1.0
    with np.errstate(all="ignore"):
        squares = sum(float(np.sum((array / unit) ** 2)) for array in arrays)
    return unit * math.sqrt(squares)


def largest_honest_norm(clip_norm: float, stddev: float, size: int) -> float:
    """Returns a bound on an honest client's clipped and noised update.

    For g ~ N(0, I_D), ||g||^2 > D + 2 sqrt(D x) + 2 x has a probability of at
    most exp(-x). With x = 40, a client that clips to S and adds noise of
    stddev sigma exceeds S + sigma (D + 2 sqrt(D x) + 2 x)^(1/2) with a
    probability below 5e-18.

    Source: Laurent & Massart, "Adaptive estimation of a quadratic functional
    by model selection" (2000), Lemma 1.

    Args:
      clip_norm: The clip norm, S.
      stddev: sigma, of the client's noise per coordinate.
      size: D, the number of coordinates.
    """
    x = _TAIL_EXPONENT
    radius = math.sqrt(size + 2 * math.sqrt(size * x) + 2 * x)
    return clip_norm + stddev * radius


def grid_step(largest: float, clients_per_round: float) -> float:
    """Returns the step that records are rounded to, a power of two; 0 for none.

    Float64 adds up 4 (m + 16) records of it without any rounding, as those of
    `mechanisms.records`.

    Args:
      largest: the largest L2 norm of a record; infinity for no bound.
      clients_per_round: The expected number of clients in a round, m.
    """
    if not 0 < largest < math.inf:
        return 0.0
    power = math.frexp(largest)[1] + math.frexp(clients_per_round + 16.0)[1]
    return 2.0 ** (power - 50)


def to_grid(array: np.ndarray, step: float) -> np.ndarray:
    """Rounds an array to whole multiples of a step; 0 leaves it as it is."""
    return np.rint(array / step) * step if step else array


def add_noise(arrays: Sequence[np.ndarray], stddev: float) -> list[np.ndarray]:
    """Returns the arrays plus N(0, stddev^2) per coordinate.

    Each call takes its randomness anew from the operating system.
    """
    rng = np.random.default_rng()
    return [array + rng.normal(scale=stddev, size=np.shape(array)) for array in arrays]


def apply(
    received: Sequence[np.ndarray], update: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns received + update in the dtypes received.

    Arrays that do not hold floating-point numbers (such as counters) come back
    as float64: to round them would undo the clipping.
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
    """As `apply`, and rounding leaves of the noise what is charged.

    Every client rounds its own share of the noise, and the guarantee is that
    of their sum: shares that are small beside the gap between a weight and the
    next number would be rounded away, one by one. Rounded to a grid of which a
    share is k steps, the sum's noise is unchanged up to a part of
    exp(-2 pi^2 k^2) (Poisson summation). An array whose dtype has fewer than 16
    gaps for a share is float64 here, whatever is in the update.

    Args:
      received: The weights that the client received, w.
      update: float64 arrays, clipped and with noise.
      noise_stddev: of that noise, above 0.
      clip_norm: The clip norm, S.

    Raises:
      ValueError: if float64 has too few gaps as well.
    """
    arrays = []
    for old, change in zip(received, update, strict=True):
        exact = np.asarray(old, np.float64)
        # Noise of 16 standard deviations is never drawn.
        largest = np.max(np.abs(exact), initial=0.0) + clip_norm + 16 * noise_stddev
        for dtype in (_result_dtype(np.asarray(old)), np.dtype(np.float64)):
            if (
                largest <= np.finfo(dtype).max
                and _GAPS_OF_NOISE * np.spacing(dtype.type(largest)) <= noise_stddev
            ):
                arrays.append(np.asarray(exact + change, dtype))
                break
        else:
            raise ValueError(
                f"dpfedavg_noise_stddev must be at least {_GAPS_OF_NOISE} gaps "
                "of float64 at the model's largest weight, "
                f"{largest:.3g}, got {noise_stddev:.3g}."
            )
    return arrays


def apply_within(
    received: Sequence[np.ndarray],
    update: Sequence[np.ndarray],
    clip_norm: float,
) -> list[np.ndarray]:
    """As `apply`, and what comes out is within the clip norm of `received`.

    Rounding to nearest may double an update: each coordinate by itself, if it
    is a little more than half of what lies between its weight and the next
    number. If that leads out of S, all are rounded towards `received`: no
    coordinate moves farther than `update` says then.

    Args:
      received: The weights that the client received, w.
      update: float64 arrays with a joint L2 norm of at most S.
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
