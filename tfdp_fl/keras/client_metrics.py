"""A model's metrics on every client's own data, for the analyst."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests

# The one column that is no metric.
NUM_EXAMPLES = "num_examples"


def evaluate(
    model: tf.keras.Model,
    clients: FederatedDataset,
    batch_size: int,
    verbose: int,
) -> dict[str, np.ndarray]:
    """Returns a compiled model's metrics, client by client.

    Args:
      model: Compiled, with a loss.
      clients: Whose data.
      batch_size: Examples in one batch.
      verbose: 1 shows a bar.

    Returns:
      "num_examples", int64 [N], and "loss" and each metric by name, float64
      [N], in the order of `clients.client_ids`; NaN for a client without
      examples or whose data cannot be read.
    """
    counts = np.zeros(clients.num_clients, np.int64)
    columns: dict[str, np.ndarray] = {}
    failed: list[ClientFailure] = []

    # Keras's own functions take ten times as long for a small batch.
    @tf.function(reduce_retracing=True)
    def step(x: Any, y: Any) -> dict[str, tf.Tensor]:
        return model.test_step(nests.unpaired(x, y))

    bar = (
        tf.keras.utils.Progbar(clients.num_clients, unit_name="client")
        if verbose
        else None
    )
    for done, client in enumerate(
        clients.read_clients(np.arange(clients.num_clients)), 1
    ):
        if isinstance(client, ClientFailure):
            failed.append(client)
        else:
            counts[client.position] = size = len(tf.nest.flatten(client.y)[0])
            model.reset_metrics()
            values: dict[str, tf.Tensor] = {}
            for batch in _batches(client.x, client.y, size, batch_size):
                values = step(*batch)
            for name, value in values.items():
                if name not in columns:
                    columns[name] = np.full(clients.num_clients, np.nan)
                columns[name][client.position] = value.numpy()
        if bar is not None:
            bar.update(done)
    if failed:
        warnings.warn(
            f"The data of {len(failed)} of {clients.num_clients} client(s) "
            "could not be read; their metrics are NaN. The first is client "
            f"{clients.client_ids[failed[0].position]!r}: {failed[0].reason}.",
            RuntimeWarning,
            stacklevel=3,
        )
    loss = {"loss": columns.pop("loss")} if "loss" in columns else {}
    return {NUM_EXAMPLES: counts, **loss, **columns}


def _batches(
    x: Any, y: Any, size: int, batch_size: int
) -> Iterator[tuple[Any, Any]]:
    def rows(start: int, nest: Any) -> Any:
        return tf.nest.map_structure(
            lambda each: tf.convert_to_tensor(each[start : start + batch_size]),
            nest,
        )

    for start in range(0, size, batch_size):
        yield rows(start, x), rows(start, y)
