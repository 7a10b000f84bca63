"""Where a run's randomness comes from: secret entropy, or the user's seed."""

from __future__ import annotations

import numpy as np

from tfdp_fl.mechanisms import noise

# What each stream of random numbers is for; cohorts have their own (sampling).
NOISE_STREAM, SHUFFLE_STREAM = 1, 2


def round_seed(
    seed: int | None,
    round_index: int,
    interrupted: int = 0,
    generator: str = noise.PHILOX,
) -> np.ndarray:
    """Returns the seed of a round's noise and dropout.

    Without a seed it is fresh entropy from the operating system; with one it
    depends on the seed and the round alone. Its dtype tells what draws from it
    (see `mechanisms.noise`): int64 [2] is a user's.

    Args:
      seed: The user's seed, or None.
      round_index: The round, counted from 0.
      interrupted: How many releases were broken off half-way: the round that
        is run again must not have the noise that may be in the model already.
      generator: What noise is drawn from, where there is no seed: one of
        `noise.GENERATORS`, or `noise.EXACT`, whose noise is no seed's.
    """
    if seed is None:
        return noise.fresh_seed(noise.PHILOX if generator == noise.EXACT else generator)
    return (
        _sequence(
            seed,
            NOISE_STREAM,
            round_index,
            *([interrupted] * bool(interrupted)),
        )
        .generate_state(2, np.uint64)
        .view(np.int64)
    )


def shuffle_generator(seed: int | None, round_index: int) -> np.random.Generator:
    """Returns the generator that shuffles the clients' examples in a round."""
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng(_sequence(seed, SHUFFLE_STREAM, round_index))


def _sequence(*words: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(words)
