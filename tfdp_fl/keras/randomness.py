"""Where a run's randomness comes from: secret entropy, or the user's seed."""

from __future__ import annotations

import os

import numpy as np

# What each stream of random numbers is for; cohorts have their own (sampling).
NOISE_STREAM, SHUFFLE_STREAM = 1, 2


def round_seed(
    seed: int | None, round_index: int, interrupted: int = 0
) -> np.ndarray:
    """Returns the seed (int64, shape [2]) of a round's noise and dropout.

    Without a seed it is fresh entropy from the operating system; with one it
    depends on the seed and the round alone.

    Args:
      seed: The user's seed, or None.
      round_index: The round, counted from 0.
      interrupted: How many releases were broken off half-way: the round that
        is run again must not have the noise that may be in the model already.
    """
    if seed is None:
        return np.frombuffer(os.urandom(16), np.int64)
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


def shuffle_generator(
    seed: int | None, round_index: int
) -> np.random.Generator:
    """Returns the generator that shuffles the clients' examples in a round."""
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng(_sequence(seed, SHUFFLE_STREAM, round_index))


def _sequence(*words: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(words)
