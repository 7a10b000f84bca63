"""Where a run's randomness comes from: secret entropy, or the user's seed."""

from __future__ import annotations

import os
import secrets
import threading

import numpy as np

from tfdp_fl import sampling
from tfdp_fl.mechanisms import noise

# What each stream of random numbers is for; cohorts have their own (sampling).
NOISE_STREAM, SHUFFLE_STREAM = 1, 2

# The number of a draw, and the entropy of the last resume (none: no words).
Attempt = tuple[int, ...]


class Attempts:
    """Numbers the draws of a model's rounds; none has the number of another.

    With a seed, two sums with one noise differ by a sum without any. So the key
    of a round's noise is not the round, but the attempt at it. A round that is
    run again, by whatever way, is another attempt. A resumed run does not know which
    numbers were used after its checkpoint, nor a fork which ones its parent uses:
    they go on with fresh entropy in their keys.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._taken = 0
        self._entropy: tuple[int, ...] = ()

    @property
    def coming(self) -> Attempt:
        """The next attempt, unless another draw takes it first."""
        self._renew_in_a_fork()
        return (self._taken, *self._entropy)

    def take(self) -> Attempt:
        """Returns an attempt that nothing had before, nor has afterwards."""
        self._renew_in_a_fork()
        with self._lock:
            attempt = (self._taken, *self._entropy)
            self._taken += 1
        return attempt

    def _renew_in_a_fork(self) -> None:
        if os.getpid() != self._process:
            # Another thread of the parent may have held the lock.
            self._process, self._lock = os.getpid(), threading.Lock()
            self.renew()

    def renew(self) -> None:
        """Sets all later attempts apart from those of any other process."""
        words = np.frombuffer(secrets.token_bytes(16), np.uint32)
        with self._lock:
            self._entropy = tuple(words.tolist())


def round_seed(seed: int | None, attempt: Attempt) -> np.ndarray:
    """Returns the seed of a round's noise and dropout.

    Without a user's seed it is fresh entropy from the operating system. With one it
    depends on that seed and the attempt alone.
    """
    if seed is None:
        return noise.fresh_seed()
    sequence = sampling.seed_sequence(seed, NOISE_STREAM, attempt)
    return sequence.generate_state(2, np.uint64)


def shuffle_generator(seed: int | None, attempt: Attempt) -> np.random.Generator:
    """Returns the generator that shuffles the clients' examples in a round."""
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng(sampling.seed_sequence(seed, SHUFFLE_STREAM, attempt))
