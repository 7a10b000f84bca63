"""A model's metrics on every client's own data, for the analyst."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import engine, keras_versions
from tfdp_fl.datasets import ClientFailure, FederatedDataset
from tfdp_fl.engine import cohort, program
from tfdp_fl.engine import trainer as trainer_lib


def evaluate(
    model: tf.keras.Model,
    training: engine.LocalTraining,
    clients: FederatedDataset,
    batch_size: int,
    verbose: int,
    in_any_case: Iterable[str] = (),
) -> dict[str, np.ndarray]:
    """Returns a compiled model's metrics, client by client.

    Args:
      model: The model.
      training: The loss and the metrics that it was compiled with.
      clients: Whose data.
      batch_size: Examples in one batch.
      verbose: 1 shows a bar.
      in_any_case: Metrics that have a column even if nobody has a value; with
        them nothing is raised or warned of, which would tell of a client.

    Returns:
      "num_examples", int64 [N], and "loss" and each metric by name, float64
      [N], in the order of `clients.client_ids`; NaN for a client without
      examples, or whose data cannot be read or evaluated on.

    Raises:
      ValueError: TensorFlow can evaluate the model on nobody's examples.
    """
    number = clients.num_clients
    counts = np.zeros(number, np.int64)
    columns: dict[str, np.ndarray] = {}
    failed: list[ClientFailure] = []
    raised = 0
    metrics_of = _Evaluation(model, training, clients.element_spec)
    bar = tf.keras.utils.Progbar(number, unit_name="client")
    for done, client in enumerate(clients.read_clients(np.arange(number)), 1):
        if isinstance(client, ClientFailure):
            failed.append(client)
        else:
            counts[client.position] = size = len(tf.nest.flatten(client.y)[0])
            try:
                values = metrics_of(_batches(client.x, client.y, size, batch_size))
            except engine.CLIENT_ERRORS as error:
                failed.append(ClientFailure(client.position, error))
                values, raised = {}, raised + 1
            for name, value in values.items():
                column = columns.setdefault(name, np.full(number, np.nan))
                column[client.position] = value.numpy()
        if verbose:
            bar.update(done)
    if not columns:
        columns = {name: np.full(number, np.nan) for name in in_any_case}
    if raised and not columns:
        raise ValueError(
            "clients must have examples that the model can be evaluated on, and none "
            f"of {number} has: the first error was {failed[0].reason}."
        )
    if failed and not in_any_case:
        warnings.warn(
            f"The data of {len(failed)} of {number} client(s) could not be read, or "
            "evaluated on; their metrics are NaN. The first is client "
            f"{clients.client_ids[failed[0].position]!r}: {failed[0].reason}.",
            RuntimeWarning,
            stacklevel=3,
        )
    return {"num_examples": counts, **columns}


class _Evaluation:
    """A client's metrics, by the pure function of `engine.trainer`."""

    def __init__(
        self,
        model: tf.keras.Model,
        training: engine.LocalTraining,
        element_spec: tuple[Any, Any],
    ):
        """Traces and checks the function.

        Raises:
          ValueError: A metric is not one number, or the model or a metric has an
            operation that could pass something on (see `engine.allowed_operations`).
        """
        for name in ("test_step", "compute_metrics"):
            if getattr(type(model), name) is not getattr(tf.keras.Model, name):
                raise ValueError(
                    f"model must not have a {name} of its own for evaluate_clients, "
                    f"which would not call it, got {type(model).__name__}.{name}: "
                    "compile metrics, or evaluate fed.model."
                )
        self._trainer = trainer = trainer_lib.make_trainer(
            model, training, element_spec
        )
        self._received = cohort.Received(
            weights=keras_versions.tf_variables(trainer.aggregated),
            unaggregated=keras_versions.tf_variables(trainer.unaggregated),
            params=(),
            learning_rate=tf.constant(0.0),
            seed=tf.zeros([2], tf.int64),
        )
        x, y = trainer_lib.batch_specs(element_spec)
        self._step = program.Program(
            trainer.evaluate,
            tf.nest.map_structure(
                lambda value: tf.TensorSpec(value.shape, value.dtype), self._received
            ),
            x,
            y,
            trainer.metric_specs,
            model=model,
        )

    def __call__(self, batches: Iterator[tuple[Any, Any]]) -> dict[str, tf.Tensor]:
        """Returns a client's loss and metrics, by name; none without batches."""
        metrics = [
            tf.zeros(spec.shape, spec.dtype) for spec in self._trainer.metric_specs
        ]
        total, count = 0.0, 0
        for x, y in batches:
            size = len(tf.nest.flatten(y)[0])
            loss, metrics = self._step(self._received, x, y, metrics)
            total, count = total + loss * size, count + size
        if not count:
            return {}
        return {"loss": total / count, **self._trainer.metric_results(metrics)}


def _batches(x: Any, y: Any, size: int, batch_size: int) -> Iterator[tuple[Any, Any]]:
    for start in range(0, size, batch_size):
        rows = slice(start, start + batch_size)
        yield tf.nest.map_structure(
            lambda leaf, rows=rows: tf.convert_to_tensor(leaf[rows]), (x, y)
        )
