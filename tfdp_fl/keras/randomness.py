"""Where a run's randomness comes from: secret entropy, or the user's seed."""

from __future__ import annotations

import os

import numpy as np

# What each stream of random numbers is for; cohorts have their own (sampling).
NOISE_STREAM, SHUFFLE_STREAM = 1, 2


def round_seed(seed: int | None, round_index: int) -> np.ndarray:
    """Returns the seed (int64, shape [2]) of a round's noise and dropout.

    Without a seed it is fresh entropy from the operating system; with one it
    depends on the seed and the round alone.
    """
    if seed is None:
        return np.frombuffer(os.urandom(16), np.int64)
    return (
        _sequence(seed, NOISE_STREAM, round_index)
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


def _sequence(seed: int, stream: int, round_index: int):
    return np.random.SeedSequence([seed, stream, round_index])
