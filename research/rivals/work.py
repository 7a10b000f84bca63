"""What a rival is asked to do, and how it answers."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

import numpy as np

# Rounds that warm up: compiled, allocated, workers started.
WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Work:
    """A dense network that every client trains on examples of its own.

    Attributes:
      units: The input's width and that of each layer.
      clients: How many train, all of them in every round.
      examples: Of each client.
      batch_size: Of local training, one pass.
      learning_rate: Of the clients' SGD; the server's is 1.
      clip_norm: The L2 norm to which an update is clipped.
      noise_multiplier: Noise of the sum, in clip norms.
      rounds: How many are timed.
      setting: Which way of the framework, by its own name.
    """

    units: Sequence[int]
    clients: int
    examples: int
    batch_size: int
    learning_rate: float
    clip_norm: float
    noise_multiplier: float
    rounds: int
    setting: str

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns features [clients, examples, width] and labels."""
        random = np.random.default_rng(0)
        shape = (self.clients, self.examples, self.units[0])
        x = random.random(shape, np.float32)
        y = random.integers(0, self.units[-1], shape[:2])
        return x, y


def asked() -> Work:
    """Returns the work of the command line."""
    return Work(**json.loads(sys.argv[1]))


def answer(ends: Sequence[float]) -> None:
    """Prints the seconds of the rounds after the warm-up.

    Args:
      ends: When each round ended, `WARM_UP` rounds and those that are timed.
    """
    print(json.dumps(np.diff(ends[WARM_UP - 1 :]).tolist()), flush=True)
