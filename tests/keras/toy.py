"""A small training problem for the tests of the Keras front."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import tfdp_fl
from tfdp_fl.keras import resuming

NUM_CLIENTS = 40
NUM_CLASSES = 3


def clients(num_clients: int = NUM_CLIENTS, examples: int = 10):
    """Returns clients whose labels follow from their features."""
    x, y = arrays(num_clients * examples)
    rows = np.arange(num_clients * examples).reshape(num_clients, examples)
    return tfdp_fl.datasets.FederatedDataset.from_indices(x, y, rows)


def arrays(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns features [count, 8] and labels [count]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 8)).astype(np.float32)
    y = np.argmax(x[:, :NUM_CLASSES], axis=1).astype(np.int32)
    return x, y


def dense(dropout: float = 0.0) -> tf.keras.Model:
    """Returns a model of 8 -> 3 that always starts the same."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Input((8,))])
    if dropout:
        model.add(tf.keras.layers.Dropout(dropout))
    model.add(tf.keras.layers.Dense(NUM_CLASSES))
    return model


def two_layers() -> tf.keras.Model:
    """Returns a model of 8 -> 5 -> 3 that always starts the same."""
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((8,)),
            tf.keras.layers.Dense(5, activation="tanh"),
            tf.keras.layers.Dense(NUM_CLASSES),
        ]
    )


def loss() -> tf.keras.losses.Loss:
    """Returns cross entropy of logits."""
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def weights_of(model: Any) -> list[np.ndarray]:
    """Returns the weights of a model, or a list of them as it is."""
    return model if isinstance(model, list) else model.get_weights()


def flat(model: Any) -> np.ndarray:
    """Returns all weights as one vector, float64."""
    return np.concatenate([np.ravel(w).astype(np.float64) for w in weights_of(model)])


def assert_same(one: Any, other: Any) -> None:
    """Fails unless two models, or lists of weights, are alike to the last bit."""
    for own, others in zip(weights_of(one), weights_of(other), strict=True):
        np.testing.assert_array_equal(own, others)


@contextlib.contextmanager
def same_draws_when_resumed() -> Iterator[None]:
    """Has resumed runs draw what an uninterrupted one draws.

    Nothing but a test may. It shows that all else goes on where it was.
    """
    restore = resuming.InterruptedRun.restore

    def restored(*arguments: Any) -> Any:
        run = restore(*arguments)
        run.attempts._taken, run.attempts._entropy = run.rounds, ()
        return run

    with mock.patch.object(resuming.InterruptedRun, "restore", restored):
        yield


def federated(
    mechanism: tfdp_fl.FixedClipping | None = None,
    model: tf.keras.Model | None = None,
    clients_per_round: Any = 20,
    sampling: str = "fixed_size",
    compile_options: dict[str, Any] | None = None,
    **options: Any,
) -> tfdp_fl.DPFederatedModel:
    """Returns a compiled model in one replica, without XLA: quick to trace."""
    if mechanism is None:
        mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
    fed = tfdp_fl.DPFederatedModel(
        dense() if model is None else model,
        mechanism,
        clients_per_round,
        sampling,
        **{"num_replicas": 1, **options},
    )
    fed.compile(
        **{
            "optimizer": tf.keras.optimizers.SGD(0.1),
            "loss": loss(),
            "jit_compile": False,
            **(compile_options or {}),
        }
    )
    return fed
