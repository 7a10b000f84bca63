"""The formulas that every runtime shares: noise per client, next clip norm.

They are written with operators only, so that they take Python floats, numpy
scalars and TensorFlow tensors alike; this module imports TensorFlow only where
it is given a tensor.

Notation: S is the clip norm, z the noise multiplier (stddev of the noise on
the *sum* of updates divided by S), m the clients per round, sigma_b the stddev
of the noise on the count of unclipped updates.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

# An adaptive clip stays between these. Where noise alone had brought it down by
# hundreds of decades, it could rise by a tenth a round at most. No update is so
# small that it matters, and the number depends on nobody's data.
SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 1e-10, 1e30


def choose(condition: Any, one: Any, other: Any) -> Any:
    """Returns `one` if a condition holds, else `other`; numbers or tensors."""
    if isinstance(condition, (bool, np.bool_)):
        return one if condition else other
    import tensorflow as tf

    return tf.where(condition, one, other)


# sigma_b unless it is given, as a part of m (Andrew et al. 2021).
COUNT_NOISE_FRACTION = 1 / 20


# Closer to 2 sigma_b, float32 does not tell z_delta (below) to a thousandth.
_CLOSEST = 1 - 1e-4


def largest_noise_multiplier(count_noise_stddev: Any) -> Any:
    """Returns the largest z that goes with a sigma_b: just below twice it."""
    return 2 * count_noise_stddev * _CLOSEST


def check_count_noise(
    noise_multiplier: Any,
    count_noise_stddev: Any,
    name: str = "count_noise_stddev",
    clients: str = "clients_per_round",
) -> None:
    """Raises ValueError where a count alone costs (nearly) all of z, or more.

    Args:
      noise_multiplier: z, what a round's two releases together cost; where it
        is 0 there is nothing to keep to.
      count_noise_stddev: sigma_b, in clients.
      name: What the user calls sigma_b.
      clients: And m.
    """
    largest = largest_noise_multiplier(count_noise_stddev)
    if noise_multiplier > 0 and not noise_multiplier <= largest:
        raise ValueError(
            f"noise_multiplier must be less than 2 * {name} (by a "
            "ten-thousandth of it at least), or the count alone would cost "
            "all that the round may, got "
            f"noise_multiplier={noise_multiplier!r} and "
            f"{name}={count_noise_stddev!r} (which is {clients} / 20 unless "
            "given)."
        )


def update_noise_multiplier(noise_multiplier: Any, count_noise_stddev: Any) -> Any:
    """Returns z_delta, the noise multiplier left for the updates themselves.

    With adaptive clipping a round releases two noised sums: the updates and
    the count of unclipped ones. A bit centred at +-1/2 has sensitivity 1/2, so
    its multiplier is 2 sigma_b, and the two cost together what one Gaussian of
    multiplier z costs when

        z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2).

    Computed as z (1 - (z / (2 sigma_b))^2)^(-1/2), which is the same for z > 0
    and is 0 at z = 0.

    Source: Andrew, Thakkar, McMahan & Ramaswamy, "Differentially Private
    Learning with Adaptive Clipping" (2021), Theorem 1.

    Args:
      noise_multiplier: z >= 0, what the two releases together cost.
      count_noise_stddev: sigma_b, in clients; above z / 2.

    Returns:
      z_delta >= z, of the arguments' type. Where an argument is a tensor the
      condition is not checked, and a violation gives NaN or infinity.

    Raises:
      ValueError: if plain numbers are given and z >= 2 sigma_b > 0.
    """
    z, sigma_b = noise_multiplier, count_noise_stddev
    if isinstance(z, numbers.Real) and isinstance(sigma_b, numbers.Real):
        if z == 0:
            return 0.0
        check_count_noise(z, sigma_b)
    return z * (1.0 - (z / (2.0 * sigma_b)) ** 2) ** -0.5


def next_clip_norm(
    clip_norm: Any,
    noised_fraction: Any,
    target_quantile: Any,
    learning_rate: Any,
    exp: Callable[[Any], Any] = math.exp,
) -> Any:
    """Returns the next round's clip norm: S exp(-eta (b - gamma)).

    Source: Andrew et al. (2021), Algorithm 1 and Section 2.2 (the geometric
    update).

    Args:
      clip_norm: S, the norm with which the clients of this round clipped.
      noised_fraction: b, the noised count of updates with norm <= S, divided
        by m. It may lie outside [0, 1].
      target_quantile: gamma.
      learning_rate: eta.
      exp: the exponential of the arguments' library: `math.exp`, `np.exp` or
        `tf.exp`.

    Returns:
      The next S, at least `SMALLEST_CLIP_NORM`: it falls where more than
      gamma of the updates were not clipped, and rises otherwise.
    """
    try:
        factor = exp(-learning_rate * (noised_fraction - target_quantile))
    except OverflowError:  # As `math.exp` says infinity.
        return LARGEST_CLIP_NORM
    moved = clip_norm * factor
    moved = choose(moved > SMALLEST_CLIP_NORM, moved, SMALLEST_CLIP_NORM)
    return choose(moved < LARGEST_CLIP_NORM, moved, LARGEST_CLIP_NORM)
