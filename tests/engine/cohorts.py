"""Small cohorts for the engine, and the same training in a plain Keras loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import engine
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.mechanisms import ClientWeighting, Deployment, NoPrivacy

SIZES = (7, 0, 3, 5)
FEATURES, CLASSES = 4, 3


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


def mlp(units: int = 6) -> tf.keras.Sequential:
    """Returns a small model whose weights are always the same."""
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(units, activation="tanh", input_shape=(FEATURES,)),
            tf.keras.layers.Dense(CLASSES),
        ]
    )


def cross_entropy() -> tf.keras.losses.Loss:
    """Returns the loss that goes with `mlp`."""
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_engine(
    model: tf.keras.Model,
    dataset: FederatedDataset,
    *,
    mechanism: Any = None,
    optimizer: Any = None,
    loss: Any = None,
    num_replicas: int = 1,
    jit_compile: bool | None = False,
    training: dict[str, Any] | None = None,
    sampling: str = "fixed_size",
    client_weighting: ClientWeighting | None = None,
    **options: Any,
) -> engine.CohortEngine:
    """Returns an engine, for cohorts of a fixed size unless told."""
    return engine.CohortEngine(
        model=model,
        training=engine.LocalTraining(
            optimizer=optimizer or tf.keras.optimizers.SGD(0.1),
            loss=cross_entropy() if loss is None else loss,
            **(training or {}),
        ),
        mechanism=mechanism or NoPrivacy(),
        deployment=Deployment(
            clients_per_round=dataset.num_clients,
            num_clients=dataset.num_clients,
            sampling=sampling,
            rounds=3,
            min_examples=1,
            client_weighting=client_weighting,
        ),
        element_spec=dataset.element_spec,
        num_replicas=num_replicas,
        jit_compile=jit_compile,
        **options,
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


def run_round(
    cohort_engine: engine.CohortEngine,
    dataset: FederatedDataset,
    **changes: Any,
) -> dict[str, float]:
    """Runs one round; returns its logs."""
    pending = cohort_engine.collect(dataset, inputs(dataset, **changes))
    return cohort_engine.release(pending)


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

    Args:
      model: The model that the client receives; it is put back.
      client: The client's `(x, y)`.
      optimizer: Its configuration is used, with fresh slots.
      loss: What Keras's `compile` takes.
      batch_size: Examples of a batch.
      local_epochs: Passes over the examples.
      loss_weights: What Keras's `compile` takes.
      proximal_weight: mu.
      grad_clip: The largest L2 norm of a gradient; 0: any.

    Returns:
      The difference of `model.get_weights()`.
    """
    x, y = client
    size = len(tf.nest.flatten(y)[0])
    before = model.get_weights()
    received = [tf.identity(v) for v in model.trainable_variables]
    own = type(optimizer).from_config(optimizer.get_config())
    model.compile(optimizer=own, loss=loss, loss_weights=loss_weights)

    for start in [*range(0, size, batch_size)] * local_epochs:
        batch_x, batch_y = tf.nest.map_structure(
            lambda a, s=start: tf.constant(a[s : s + batch_size]), (x, y)
        )
        with tf.GradientTape() as tape:
            value = model.compute_loss(batch_x, batch_y, model(batch_x, training=True))
            value += sum(
                tf.cast(
                    0.5 * proximal_weight * tf.reduce_sum((w - w0) ** 2),
                    value.dtype,
                )
                for w, w0 in zip(model.trainable_variables, received, strict=True)
            )
        gradients = tape.gradient(value, model.trainable_variables)
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradients))
        if 0 < grad_clip < norm:
            gradients = [g * (grad_clip / norm) for g in gradients]
        own.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    after = model.get_weights()
    model.set_weights(before)
    return [b - a for a, b in zip(before, after, strict=True)]


def reference_mean(
    model: tf.keras.Model,
    clients: list[tuple[Any, Any]],
    optimizer: tf.keras.optimizers.Optimizer,
    loss: Any,
    **options: Any,
) -> list[np.ndarray]:
    """Returns the mean of all clients' updates."""
    updates = [
        reference_update(model, client, optimizer, loss, **options)
        for client in clients
    ]
    return [np.mean(parts, axis=0) for parts in zip(*updates, strict=True)]
