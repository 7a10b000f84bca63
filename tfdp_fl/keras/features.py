"""Whether a model can take the features of clients, before anything trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import FederatedDataset, nests
from tfdp_fl.engine import trainer


def whose(clients: FederatedDataset) -> str:
    """Returns of which client the first examples are, in words."""
    place = 0
    if clients.is_indexed:
        place = int(np.argmax(clients.client_sizes() > 0))
    return f" of client {clients.client_ids[place]!r}"


def check(model: tf.keras.Model, spec: Any, argument: str, whom: str) -> None:
    """Raises ValueError if a model cannot take features.

    Args:
      model: A built Keras model.
      spec: Nest of `tf.TensorSpec`, the features of one example.
      argument: What they were given as.
      whom: Whose they are, in words; or "".
    """
    try:
        model(trainer.zeros_like_batch(spec), training=False)
    except Exception as error:  # Whatever a layer's own code can raise.
        # (Of zeros: whatever it quotes, it is nobody's example.)
        raise nests.ExamplesValueError(
            f"{argument} must have features that the model takes"
            f"{_input_of(model)}, got {nests.describe_spec(spec)} for each "
            f"example{whom}."
        ) from error


def check_validation(model: tf.keras.Model, data: Any) -> None:
    """Raises ValueError if validation data has other features.

    Args:
      model: A built Keras model.
      data: `(x, y)`, `(x, y, sample_weight)`, a `tf.data.Dataset`, a
        `FederatedDataset`, or None.
    """
    if isinstance(data, FederatedDataset):
        check(model, data.element_spec[0], "validation_data", whose(data))
    elif isinstance(data, tuple):
        x = nests.with_array_leaves(data[0])
        try:
            spec = tf.nest.map_structure(
                lambda leaf: nests.spec_of(nests.as_array(leaf[:1], "x")), x
            )
        except (TypeError, ValueError, IndexError):
            return  # Something else that Keras may take.
        check(model, spec, "validation_data", "")


@contextlib.contextmanager
def naming(whom: str) -> Iterator[None]:
    """Has errors about what the first examples are name their client.

    Args:
      whom: What `whose` returned.
    """
    try:
        yield
    except nests.SAFE_ERRORS as error:
        raise type(error)(f"clients ({whom[4:]}): {error}") from error


def _input_of(model: tf.keras.Model) -> str:
    """Returns what a model takes, in words, if it tells."""
    try:
        inputs = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype),
            list(model.inputs),
        )
    except (AttributeError, TypeError, ValueError):
        return ""
    shown = [nests.describe_spec(each) for each in inputs]
    return f", {' and '.join(shown)}" if shown else ""
