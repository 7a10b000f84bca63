"""The model's shapes and the data, without TensorFlow."""

from __future__ import annotations

import numpy as np
from sklearn import datasets

SHAPES = ((64, 32), (32,), (32, 10), (10,))


def initial_weights() -> list[np.ndarray]:
    """Returns the weights of round 0 (Glorot & Bengio 2010, eq. 16)."""
    rng = np.random.default_rng(0)
    return [
        rng.uniform(-1, 1, shape).astype(np.float32)
        * (6 / sum(shape)) ** 0.5
        * (len(shape) > 1)
        for shape in SHAPES
    ]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns pixels from 0 to 1, float32 [1797, 64], and labels."""
    bunch = datasets.load_digits()
    return (bunch.data / 16).astype(np.float32), bunch.target


def accuracy(weights: list[np.ndarray]) -> float:
    """Returns the share of test digits that are recognised."""
    x, y = digits()
    hidden = np.maximum(x[::5] @ weights[0] + weights[1], 0)
    logits = hidden @ weights[2] + weights[3]
    return float(np.mean(logits.argmax(1) == y[::5]))
