"""A model's metrics on every client's own data, for the analyst."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import engine
from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.engine import client_update, isolation

# The one column that is no metric.
NUM_EXAMPLES = "num_examples"


def evaluate(
    model: tf.keras.Model,
    clients: FederatedDataset,
    batch_size: int,
    verbose: int,
    in_any_case: Iterable[str] = (),
) -> dict[str, np.ndarray]:
    """Returns a compiled model's metrics, client by client.

    Args:
      model: Compiled, with a loss.
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
    counts = np.zeros(clients.num_clients, np.int64)
    columns: dict[str, np.ndarray] = {}
    failed: list[ClientFailure] = []
    raised = 0

    step = _IsolatedStep(model)
    bar = (
        tf.keras.utils.Progbar(clients.num_clients, unit_name="client")
        if verbose
        else None
    )
    try:
        for done, client in enumerate(
            clients.read_clients(np.arange(clients.num_clients)), 1
        ):
            if isinstance(client, ClientFailure):
                failed.append(client)
            else:
                counts[client.position] = size = len(tf.nest.flatten(client.y)[0])
                step.begin_client()
                values: dict[str, tf.Tensor] = {}
                try:
                    for batch in _batches(client.x, client.y, size, batch_size):
                        values = step(*batch)
                except engine.CLIENT_ERRORS as error:
                    failed.append(ClientFailure(client.position, error))
                    raised, values = raised + 1, {}
                for name, value in values.items():
                    if name not in columns:
                        columns[name] = np.full(clients.num_clients, np.nan)
                    columns[name][client.position] = value.numpy()
            if bar is not None:
                bar.update(done)
    finally:
        step.begin_client()  # Nobody's data stays.
    if not columns:
        columns = {name: np.full(clients.num_clients, np.nan) for name in in_any_case}
    if raised and not columns:
        raise ValueError(
            "clients must have examples that the model can be evaluated on, "
            f"and none of {clients.num_clients} has: the first error was "
            f"{failed[0].reason}."
        )
    if failed and not in_any_case:
        warnings.warn(
            f"The data of {len(failed)} of {clients.num_clients} client(s) "
            "could not be read, or evaluated on; their metrics are NaN. The "
            f"first is client {clients.client_ids[failed[0].position]!r}: "
            f"{failed[0].reason}.",
            RuntimeWarning,
            stacklevel=3,
        )
    loss = {"loss": columns.pop("loss")} if "loss" in columns else {}
    return {NUM_EXAMPLES: counts, **loss, **columns}


class _IsolatedStep:
    """Keras's `test_step`, which passes nothing from one client to the next.

    All that it assigns (metrics, states of layers) is put back before each
    client and in the end, so that nobody's data stays in the model.
    """

    def __init__(self, model: tf.keras.Model):
        self._model = model
        # Keras's own functions take ten times as long for a small batch.
        self._function = tf.function(
            lambda x, y: model.test_step(nests.unpaired(x, y)), reduce_retracing=True
        )
        self._checked: list[Any] = []
        self._held: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    def __call__(self, x: Any, y: Any) -> dict[str, tf.Tensor]:
        """Evaluates on one batch; returns the metrics so far.

        Raises:
          ValueError: A metric is not one number, or the model or a metric has an
            operation that could pass something on (see `engine.isolation`).
        """
        traced = self._function.get_concrete_function(x, y)
        if not any(traced is each for each in self._checked):
            client_update.check_metrics(traced.structured_outputs)
            isolation.check(traced, self._model)
            for key, handle in isolation.assigned(traced).items():
                if key not in self._held:
                    self._held[key] = handle, isolation.read(handle)
            self._checked.append(traced)
        return self._function(x, y)

    def begin_client(self) -> None:
        """Puts everything in the state in which every client finds it."""
        self._model.reset_metrics()
        for handle, value in self._held.values():
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _batches(x: Any, y: Any, size: int, batch_size: int) -> Iterator[tuple[Any, Any]]:
    def rows(start: int, nest: Any) -> Any:
        return tf.nest.map_structure(
            lambda each: tf.convert_to_tensor(each[start : start + batch_size]),
            nest,
        )

    for start in range(0, size, batch_size):
        yield rows(start, x), rows(start, y)
