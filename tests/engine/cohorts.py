"""Small cohorts for the engine, and the same training in a plain Keras loop."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from tfdp_fl import engine
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models
from tfdp_fl.mechanisms import ClientWeighting, Deployment, NoPrivacy

SIZES = (7, 0, 3, 5)
FEATURES, CLASSES = 4, 3

from_arrays = FederatedDataset.from_client_arrays


def client_arrays(sizes=SIZES, seed: int = 0):
    """Returns `{client: (x, y)}`, a few Gaussian examples for each client."""
    rng = np.random.default_rng(seed)
    return {
        k: (
            rng.normal(size=(size, FEATURES)).astype(np.float32),
            rng.integers(0, CLASSES, size),
        )
        for k, size in enumerate(sizes)
    }


def dataset(sizes=SIZES) -> FederatedDataset:
    """Returns `client_arrays` as a dataset."""
    return from_arrays(client_arrays(sizes))


def sequential(shape, *layers, **options: Any) -> tf.keras.Sequential:
    """Returns a built model of layers."""
    return tf.keras.Sequential([tf.keras.Input(shape, **options), *layers])


def mlp(units: int = 6) -> tf.keras.Sequential:
    """Returns a small model whose weights are always the same."""
    tf.keras.utils.set_random_seed(1)
    dense = tf.keras.layers.Dense
    return sequential([FEATURES], dense(units, "tanh"), dense(CLASSES))


def cross_entropy(**options: Any) -> tf.keras.losses.Loss:
    """Returns the loss that goes with `mlp`."""
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def make_engine(
    model: tf.keras.Model,
    dataset: FederatedDataset,
    *,
    optimizer: Any = None,
    loss: Any = None,
    training: dict[str, Any] | None = None,
    client_weighting: ClientWeighting | None = None,
    **options: Any,
) -> engine.CohortEngine:
    """Returns an engine, for cohorts of a fixed size."""
    usual = {"mechanism": NoPrivacy(), "num_replicas": 1, "jit_compile": False}
    return engine.CohortEngine(
        model=model,
        training=engine.LocalTraining(
            optimizer=optimizer or tf.keras.optimizers.SGD(0.1),
            loss=cross_entropy() if loss is None else loss,
            **(training or {}),
        ),
        deployment=Deployment(
            clients_per_round=dataset.num_clients,
            num_clients=dataset.num_clients,
            sampling="fixed_size",
            rounds=3,
            min_examples=1,
            client_weighting=client_weighting,
        ),
        element_spec=dataset.element_spec,
        **{**usual, **options},
    )


def inputs(dataset: FederatedDataset, **changes: Any) -> engine.RoundInputs:
    """Returns a round of all clients."""
    values = {
        "round_index": 0,
        "positions": np.arange(dataset.num_clients),
        "clients_per_round": float(dataset.num_clients),
        "noise_multiplier": 0.0,
        "batch_size": 5,
        "local_epochs": 2,
        "learning_rate": 0.1,
        "seed": np.array([3, 4], np.uint64),
        **changes,
    }
    return engine.RoundInputs(**values)


def collect(cohort_engine, dataset: FederatedDataset, **changes: Any):
    """Returns a round of all clients that is not released."""
    return cohort_engine.collect(dataset, inputs(dataset, **changes))


def update_of(pending) -> list[np.ndarray]:
    """Returns what the clients of a round add up to."""
    (total,) = pending.sums
    return [part.numpy() for part in total.contribution.update]


def run_round(cohort_engine, dataset, **changes: Any) -> dict[str, float]:
    """Runs one round; returns its logs."""
    return cohort_engine.release(collect(cohort_engine, dataset, **changes))


def moved_by(model, cohort_engine, dataset, **changes: Any) -> list[np.ndarray]:
    """Returns how one round moves each variable of a model."""
    before = model.get_weights()
    run_round(cohort_engine, dataset, **changes)
    return [b - a for a, b in zip(before, model.get_weights(), strict=True)]


def side_by_side(beside: bool = True, few: bool | None = None):
    """Trains dense models side by side or not; `few`: as if they were small."""
    patches = {"is_worthwhile": lambda *_: beside}
    if few is not None:
        patches["is_small"] = lambda *_: few
    return mock.patch.multiple(dense_models, **patches)


@contextlib.contextmanager
def policy(name: str):
    """Makes models of another precision."""
    tf.keras.mixed_precision.set_global_policy(name)
    try:
        yield
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def assert_close(one: Any, other: Any, rtol: float = 1e-6, atol: float = 1e-6):
    """Compares nests of arrays."""
    for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def reference_update(
    model: tf.keras.Model,
    client: tuple[Any, Any],
    optimizer: tf.keras.optimizers.Optimizer,
    loss: Any,
    *,
    batch_size: int = 5,
    local_epochs: int = 2,
    loss_weights: Any = None,
    proximal_weight: float = 0.0,
    grad_clip: float = 0.0,
) -> list[np.ndarray]:
    """Returns what one client's training changes, by a plain Keras loop.

    The model is put back, and the optimizer's slots are fresh.
    """
    x, y = client
    size = len(tf.nest.flatten(y)[0])
    before, variables = model.get_weights(), model.trainable_variables
    received = [tf.identity(v) for v in variables]
    own = type(optimizer).from_config(optimizer.get_config())
    model.compile(optimizer=own, loss=loss, loss_weights=loss_weights)
    for start in [*range(0, size, batch_size)] * local_epochs:
        batch_x, batch_y = tf.nest.map_structure(
            lambda a, s=start: tf.constant(a[s : s + batch_size]), (x, y)
        )
        with tf.GradientTape() as tape:
            value = model.compute_loss(batch_x, batch_y, model(batch_x, training=True))
        gradients = [
            tf.convert_to_tensor(g) + tf.cast(proximal_weight, w.dtype) * (w - w0)
            for g, w, w0 in zip(
                tape.gradient(value, variables), variables, received, strict=True
            )
        ]
        if grad_clip:
            gradients, _ = tf.clip_by_global_norm(gradients, grad_clip)
        own.apply_gradients(zip(gradients, variables, strict=True))
    after = model.get_weights()
    model.set_weights(before)
    return [b - a for a, b in zip(before, after, strict=True)]
