"""Fixed clipping on a grid: sums and noise are exact integers.

    client    n_k = round(x_k / gamma), x_k the clipped update; zero if
              ||n_k|| > S / gamma
    server    (sum of n_k + round(g)) gamma / m, g ~ N(0, (z S / gamma)^2 I)

gamma is S / 2^20. Clients' uploads are integers, and so is the noise (`draw_rounded`);
float64 adds integers below 2^53 without rounding, in any order. A client's n_k has an
L2 norm of at most 2^20, which is checked after the rounding, in integers. So the
released sum is a function of the ideal Gaussian mechanism's output, with the S and z
that are charged. Multiplying by gamma, dividing by m, and updating the model are
post-processing.

Clients clip to slightly less than S, so that rounding takes no update out of the bound:
rounding moves an update by at most sqrt(D) / 2 steps, 0.15 % of S for ten million
parameters.
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
    NoiseStateLike,
    RoundState,
    Scalar,
    Tensors,
)

# The number of grid steps in a clip.
STEPS = 2**20
# The relative error of a clip in float32 (docs/clipping.md), with room to spare.
_CLIP_ERROR = 2e-5
# An upper bound on how far a float32 z is below the z that is charged.
_Z_ERROR = 2.0**-22

# The assumed error of the float64 quantile relative to 1 + quantile, thousands of times
# its actual error.
_QUANTILE_ERROR = 2.0**-40
# Below this many steps of 2^-64, the quantile changes too much within a step.
_MIN_STEPS = 2**12
_WORD = 64
_CHUNK_SIZE = 2**18


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Raises ValueError unless the grid is fine and wide enough for a z."""
    if noise_multiplier and not 1 / STEPS <= noise_multiplier < STEPS / 2:
        raise ValueError(
            "noise_multiplier must be 0, or from 2^-20 to 2^19, with "
            f"noise_generator='exact', got {noise_multiplier!r}."
        )


class RoundedGaussianQuery(cohort_query.CohortQuery):
    """Runs a mechanism with a clip and noise from the server on a grid."""

    @property
    def only_scales(self) -> bool:
        """Implements `CohortQuery.only_scales`: False, as updates are also rounded."""
        return False

    @property
    def clip_share(self) -> float:
        """The fraction of S to which updates are clipped before rounding."""
        if self.context.shapes is None:
            raise ValueError("shapes must be known to noise on a grid, got None.")
        size = sum(math.prod(shape) for shape in self.context.shapes)
        return 1 - _CLIP_ERROR - (math.sqrt(size) / 2 + 1) / STEPS

    def initial_sample_state(self, template: Tensors) -> Contribution:
        """Implements `CohortQuery.initial_sample_state`: integers, as float64."""
        return super().initial_sample_state(
            [tf.zeros(tensor.shape, tf.float64) for tensor in template]
        )

    def clip(
        self, params: RoundState, update: Tensors, client: ClientContext
    ) -> Contribution:
        """Implements `CohortQuery.clip`, with room for the rounding after it."""
        inner_params = params._replace(clip_norm=params.clip_norm * self.clip_share)
        return super().clip(inner_params, update, client)

    def to_grid(self, update: Tensors, params: RoundState) -> Tensors:
        """Implements `CohortQuery.to_grid`: float64 steps; zeros if above the bound."""
        to_steps = STEPS / tf.cast(params.clip_norm, tf.float64)
        steps = [tf.round(tf.cast(tensor, tf.float64) * to_steps) for tensor in update]
        # The squares are integers, so sums below 2^53 are exact, and larger ones stay
        # above 2^40 despite rounding. The comparison is False for a NaN.
        squares = clipping.add_up([tf.reduce_sum(tensor * tensor) for tensor in steps])
        is_within = squares <= float(STEPS) ** 2
        return [tf.where(is_within, tensor, tf.zeros_like(tensor)) for tensor in steps]

    def _add_noise(
        self, update: Tensors, stddev: Scalar, state: Any
    ) -> tuple[Tensors, NoiseStateLike]:
        """Implements `CohortQuery._add_noise` for steps; only on the server."""
        del stddev  # In steps, it depends on z alone.
        sizes = [steps.shape.num_elements() for steps in update]
        z = tf.cast(state.noise_multiplier, tf.float64) * (1 + _Z_ERROR)
        samples = tf.numpy_function(_noise, [z * STEPS, sum(sizes)], tf.float64)
        parts = tf.split(tf.ensure_shape(samples, [sum(sizes)]), sizes)
        step = tf.cast(state.clip_norm, tf.float64) / STEPS
        noised = [
            (steps + tf.reshape(part, steps.shape)) * step
            for steps, part in zip(update, parts, strict=True)
        ]
        return noised, state.noise_state


def _noise(stddev: float, size: int) -> np.ndarray:
    """Returns integer noise as float64 [size]; zeros if the stddev is 0."""
    if not stddev > 0:
        return np.zeros(size)
    return draw_rounded(float(stddev), int(size)).astype(np.float64)


def draw_rounded(
    stddev: float,
    size: int,
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> np.ndarray:
    """Draws `size` independent values of round(N(0, stddev^2)).

    Each value is the integer nearest to the ideal g, free of floating-point errors. So
    for an integer sum n, n + round(g) = round(n + g) is a function of n + g, the ideal
    Gaussian mechanism. Everything proven for that mechanism holds for this one
    (post-processing: Dwork & Roth 2014, proposition 2.1), with any accountant and any
    sampling. The attack of Mironov (2012) fails, as every integer can be reached from
    every n.

    (Canonne, Kamath & Steinke 2020, https://arxiv.org/abs/2004.00010, draw the
    discrete Gaussian instead, for which zCDP is proven, but no amplification.)

    We draw by inversion: g = sigma Phi^-1(u) for u uniform in (0, 1), with as many bits
    of u as necessary. Nearly always, 64 bits are enough for float64 to find the
    nearest integer, with an ample margin for its rounding errors. Otherwise, we draw
    more bits, and compare u with Phi in as many digits as necessary.

    Args:
      stddev: Sigma > 0, at most 2^40.
      size: The number of values.
      random_bytes: Returns the given number of independent uniform bytes.

    Returns:
      Int64 [size].
    """
    if not 0 < stddev <= 2.0**40:
        raise ValueError(f"stddev must be in (0, 2^40], got {stddev!r}.")
    samples = np.empty(size, np.int64)
    for start in range(0, size, _CHUNK_SIZE):
        part = samples[start : start + _CHUNK_SIZE]
        part[:] = _draw(float(stddev), len(part), random_bytes)
    return samples


def _draw(stddev: float, size: int, random_bytes: Callable[[int], bytes]) -> np.ndarray:
    words = np.frombuffer(random_bytes(8 * size), np.uint64)
    # One bit is the sign. The others place the tail probability of |g|, in (0, 1/2],
    # between step and (step + 1) times 2^-64.
    steps = words >> np.uint64(1)
    middle = (steps.astype(np.float64) + 0.5) * 2.0**-_WORD
    quantile = -special.ndtri(middle)
    density = np.exp(-0.5 * quantile**2) / math.sqrt(2 * math.pi)
    error = 2.0 ** (1 - _WORD) / density + _QUANTILE_ERROR * (1 + quantile)
    magnitude = stddev * quantile
    nearest = np.floor(magnitude + 0.5)
    # The distance to the nearest half-integer must exceed the possible error.
    margin = 0.5 - np.abs(magnitude - nearest)
    undecided = (margin <= stddev * error) | (steps < _MIN_STEPS)
    result = nearest.astype(np.int64)
    for index in np.flatnonzero(undecided).tolist():
        result[index] = _magnitude(
            stddev, int(steps[index]), int(nearest[index]), random_bytes
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
            # The bits so far do not decide it, so draw more.
            new_bits = int.from_bytes(random_bytes(_WORD // 8), "little")
            step, bits = (step << _WORD) + new_bits, bits + _WORD
        return step < tail

    while is_at_least(nearest + 1):
        nearest += 1
    while nearest > 0 and not is_at_least(nearest):
        nearest -= 1
    return nearest


def _tail(nearest: int, stddev: float, bits: int) -> int:
    """Returns P(g >= nearest - 1/2), g ~ N(0, stddev^2), in steps of 2^-bits.

    It is rounded down from 64 more bits, so the error is less than a step.
    """
    context = mpmath.mp.clone()  # Threads share the precision of the global context.
    context.prec = bits + _WORD
    x = (nearest - context.mpf(0.5)) / context.mpf(stddev)
    return int(context.ldexp(context.ncdf(-x), bits))
