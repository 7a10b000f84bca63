"""What `compile` was given."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdp_fl import engine, keras_versions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """How clients train, and how the server moves the model.

    Attributes:
      training: What each client does.
      server_optimizer: A Keras optimizer; None adds the mean update.
      broadcast_hook: What changes the weights that clients receive, or None.
      jit_compile: Whether XLA compiles; None: it is decided by the model.
    """

    training: engine.LocalTraining
    server_optimizer: tf.keras.optimizers.Optimizer | None
    broadcast_hook: Any
    jit_compile: bool | None

    def with_class_weight(self, class_weight: Mapping[int, float] | None) -> Compiled:
        """Returns this with what `fit` was told that classes count."""
        class_weight = engine.checked_class_weight(class_weight)
        training = dataclasses.replace(self.training, class_weight=class_weight)
        return dataclasses.replace(self, training=training)

    @property
    def learning_rate(self) -> float:
        """The clients' rate; 0 where the optimizer follows its own steps."""
        rate = keras_versions.learning_rate(self.training.optimizer)
        if rate is None:
            return 0.0
        if isinstance(rate, tf.Variable):
            # A tenth of the time that `numpy()` takes, in every round.
            rate = tf.raw_ops.ReadVariableOp(resource=rate.handle, dtype=rate.dtype)
        return float(rate)

    def set_learning_rate(self, value: float) -> None:
        """Sets the clients' rate, unless the optimizer follows its own."""
        if keras_versions.learning_rate(self.training.optimizer) is not None:
            self.training.optimizer.learning_rate = value


# Names of metrics that Keras gives a meaning to by the shape of the output.
_METRIC_NAMES = ("accuracy", "acc", "crossentropy", "ce")


def optimizer(argument: str, value: Any) -> tf.keras.optimizers.Optimizer:
    """Returns an optimizer, from what Keras's `compile` takes.

    Raises:
      ValueError, TypeError: It is none, or Keras has none of that name.
    """
    try:
        if value is None:  # Keras takes it for RMSprop, or for none at all.
            raise ValueError
        return tf.keras.optimizers.get(value)
    except (TypeError, ValueError, KeyError) as error:
        kind = ValueError if isinstance(error, KeyError) else type(error)
        raise kind(
            f"{argument} must be a tf.keras.optimizers.Optimizer or the name "
            f"of one, such as 'sgd' or 'adam', got {value!r}."
        ) from error


def check_names(*, loss: Any, metrics: Any, weighted_metrics: Any) -> None:
    """Raises ValueError for a name that Keras has no loss or metric of."""
    for argument, given, get, names in (
        ("loss", loss, tf.keras.losses.get, ()),
        ("metrics", metrics, tf.keras.metrics.get, _METRIC_NAMES),
        (
            "weighted_metrics",
            weighted_metrics,
            tf.keras.metrics.get,
            _METRIC_NAMES,
        ),
    ):
        for name in tf.nest.flatten(given):
            if not isinstance(name, str) or name in names:
                continue
            found: Any = None
            with contextlib.suppress(TypeError, ValueError):
                found = get(name)
            if found is None or isinstance(found, str):  # Keras 2 hands back.
                known = "" if not names else f", or {', '.join(names)}"
                raise ValueError(
                    f"{argument} must be Keras's own names (such as "
                    "'sparse_categorical_crossentropy' or "
                    f"'mean_squared_error'{known}) or what computes it, got "
                    f"{name!r}."
                )
