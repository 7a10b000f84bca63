"""Fixed clipping on a grid: whole numbers, added up and noised exactly.

    client    n_k = round(x_k / gamma), x_k the clipped update; zero if
              ||n_k|| > S / gamma
    server    (sum of n_k + round(g)) gamma / m, g ~ N(0, (z S / gamma)^2 I)

gamma is S / 2^20. What is handed in are whole numbers, and so is the noise
(`draw_rounded`); float64 adds whole numbers below 2^53 without a rounding, in
any order. A client's n_k has an L2 norm of at most 2^20: that is looked at
after the rounding, in whole numbers. So the released sum is a function of the
ideal Gaussian mechanism's output, with S and z as they are charged. Multiplying by
gamma, dividing by m, and updating the model are post-processing.

The clip is a little less than S, so that rounding leads nobody out of it:
rounding moves an update by at most sqrt(D) / 2 steps, 0.15 % of S for ten
million parameters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
from scipy import special

from tfdp_fl._lazy_tf import tf
from tfdp_fl.mechanisms import clipping, cohort_query
from tfdp_fl.mechanisms.contribution import (
    ClientContext,
    Contribution,
    Memory,
    RoundState,
    Scalar,
    Tensors,
)

# Steps of the grid in a clip.
STEPS = 2**20
# What a float32 clip may be off by (docs/clipping.md), with room to spare.
_CLIP_ERROR = 2e-5
# More than a float32 z is below the z that is charged.
_Z_ERROR = 2.0**-22

# Float64's quantile is taken to be right to so much of 1 + itself: thousands of
# times what it is wrong by.
_QUANTILE_ERROR = 2.0**-40
# Below so many steps of 2^-64 the quantile changes too much within a step.
_FEWEST_STEPS = 2**12
_WORD = 64
_AT_ONCE = 2**18


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Raises ValueError unless the grid is fine, and wide, enough for a z."""
    if noise_multiplier and not 1 / STEPS <= noise_multiplier < STEPS / 2:
        raise ValueError(
            "noise_multiplier must be 0, or from 2^-20 to 2^19, with "
            f"noise_generator='exact', got {noise_multiplier!r}."
        )


class RoundedGaussianQuery(cohort_query.CohortQuery):
    """A mechanism with a clip and the server's noise, on a grid."""

    @property
    def only_scales(self) -> bool:
        """Implements `CohortQuery.only_scales`: updates are rounded, too."""
        return False

    @property
    def clip_share(self) -> float:
        """The part of S that updates are clipped to before they are rounded."""
        if self.deployment.shapes is None:
            raise ValueError("shapes must be known to noise on a grid, got None.")
        size = sum(math.prod(shape) for shape in self.deployment.shapes)
        return 1 - _CLIP_ERROR - (math.sqrt(size) / 2 + 1) / STEPS

    def initial_sample_state(self, template: Tensors) -> Contribution:
        """Implements `CohortQuery.initial_sample_state`: whole numbers."""
        return super().initial_sample_state(
            [tf.zeros(each.shape, tf.float64) for each in template]
        )

    def clip(
        self, params: RoundState, update: Tensors, client: ClientContext
    ) -> Contribution:
        """Implements `CohortQuery.clip`, with room for the rounding after it."""
        share = params._replace(clip_norm=params.clip_norm * self.clip_share)
        return super().clip(share, update, client)

    def to_grid(self, update: Tensors, params: RoundState) -> Tensors:
        """Implements `CohortQuery.to_grid`: in steps, float64; zeros if too long."""
        to_steps = STEPS / tf.cast(params.clip_norm, tf.float64)
        steps = [tf.round(tf.cast(each, tf.float64) * to_steps) for each in update]
        # Whole numbers, so this is exact as long as it is below 2^53; and not
        # below 2^40 if it is not. False for a NaN.
        squares = clipping.add_up([tf.reduce_sum(each * each) for each in steps])
        within = squares <= float(STEPS) ** 2
        return [tf.where(within, each, tf.zeros_like(each)) for each in steps]

    def _add_noise(
        self, update: Tensors, stddev: Scalar, state: Any
    ) -> tuple[Tensors, Memory]:
        """Implements `CohortQuery._add_noise`, from steps; not for a worker."""
        del stddev  # In steps it follows from z alone.
        sizes = [steps.shape.num_elements() for steps in update]
        z = tf.cast(state.noise_multiplier, tf.float64) * (1 + _Z_ERROR)
        drawn = tf.numpy_function(_noise, [z * STEPS, sum(sizes)], tf.float64)
        parts = tf.split(tf.ensure_shape(drawn, [sum(sizes)]), sizes)
        step = tf.cast(state.clip_norm, tf.float64) / STEPS
        noised = [
            (steps + tf.reshape(part, steps.shape)) * step
            for steps, part in zip(update, parts, strict=True)
        ]
        return noised, state.memory


def _noise(stddev: float, size: int) -> np.ndarray:
    """Returns whole numbers as float64 [size]; zeros without a stddev."""
    if not stddev > 0:
        return np.zeros(size)
    return draw_rounded(float(stddev), int(size)).astype(np.float64)


def draw_rounded(
    stddev: float,
    size: int,
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> np.ndarray:
    """Draws `size` independent values of round(N(0, stddev^2)).

    That is not what floating point makes of it, but the whole number that is
    nearest to the ideal g. So for a sum n of whole numbers n + round(g) =
    round(n + g) is a function of n + g, the ideal Gaussian mechanism, and whatever
    is proven of that holds of it (post-processing: Dwork & Roth 2014, proposition
    2.1), with any accountant and any sampling. The attack of Mironov (2012) finds
    nothing: every whole number can be reached from every n.

    (Canonne, Kamath & Steinke 2020, https://arxiv.org/abs/2004.00010, draw the
    discrete Gaussian instead, for which zCDP is proven, and no amplification.)

    By inversion: g = sigma Phi^-1(u) for u uniform in (0, 1), of which as many bits
    are drawn as it takes. Nearly always 64 are enough for float64 to find the
    nearest whole number, with ample margin for its rounding errors. Otherwise more
    bits are drawn, and compared with Phi in as many digits as that takes.

    Args:
      stddev: Sigma > 0, at most 2^40.
      size: How many.
      random_bytes: Returns so many independent uniform bytes.

    Returns:
      Int64 [size].
    """
    if not 0 < stddev <= 2.0**40:
        raise ValueError(f"stddev must be in (0, 2^40], got {stddev!r}.")
    drawn = np.empty(size, np.int64)
    for start in range(0, size, _AT_ONCE):
        part = drawn[start : start + _AT_ONCE]
        part[:] = _draw(float(stddev), len(part), random_bytes)
    return drawn


def _draw(stddev: float, size: int, random_bytes: Callable[[int], bytes]) -> np.ndarray:
    words = np.frombuffer(random_bytes(8 * size), np.uint64)
    # One bit is the sign. The others say where in (0, 1/2] the probability is
    # that the noise is larger still: from step to (step + 1) of 2^-64.
    steps = words >> np.uint64(1)
    middle = (steps.astype(np.float64) + 0.5) * 2.0**-_WORD
    quantile = -special.ndtri(middle)
    density = np.exp(-0.5 * quantile**2) / math.sqrt(2 * math.pi)
    error = 2.0 ** (1 - _WORD) / density + _QUANTILE_ERROR * (1 + quantile)
    magnitude = stddev * quantile
    nearest = np.floor(magnitude + 0.5)
    # Between the halves, and by more than it can be wrong.
    room = 0.5 - np.abs(magnitude - nearest)
    unclear = (room <= stddev * error) | (steps < _FEWEST_STEPS)
    result = nearest.astype(np.int64)
    for place in np.flatnonzero(unclear).tolist():
        result[place] = _magnitude(
            stddev, int(steps[place]), int(nearest[place]), random_bytes
        )
    return np.where(words & np.uint64(1), -result, result)


def _magnitude(
    stddev: float, step: int, guess: int, random_bytes: Callable[[int], bytes]
) -> int:
    """Returns round(|g|), given the first 64 bits of its tail probability."""
    bits, nearest = _WORD, guess

    def is_at_least(value: int) -> bool:
        """Whether |g| >= value - 1/2: its tail probability is at most that."""
        nonlocal step, bits
        while abs(step - (tail := _tail(value, stddev, bits))) <= 1:
            # It is not clear yet: more bits are drawn.
            more = int.from_bytes(random_bytes(_WORD // 8), "little")
            step, bits = (step << _WORD) + more, bits + _WORD
        return step < tail

    while is_at_least(nearest + 1):
        nearest += 1
    while nearest > 0 and not is_at_least(nearest):
        nearest -= 1
    return nearest


def _tail(nearest: int, stddev: float, bits: int) -> int:
    """Returns P(g >= nearest - 1/2), g ~ N(0, stddev^2), in steps of 2^-bits.

    Rounded down, from 64 bits more than that: it is wrong by less than a step.
    """
    context = mpmath.mp.clone()  # Threads share the other one's precision.
    context.prec = bits + _WORD
    x = (nearest - context.mpf(0.5)) / context.mpf(stddev)
    return int(context.ldexp(context.ncdf(-x), bits))
