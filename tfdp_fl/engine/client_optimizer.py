"""A client's optimizer: Keras's own, or plain SGD in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions


def has_rate_schedule(optimizer: Any) -> bool:
    """Returns True if the rate is a function of the optimizer's own steps."""
    return keras_versions.learning_rate(optimizer) is None


def is_plain_sgd(optimizer: Any) -> bool:
    """Returns True for w <- w - lr g with a fixed rate, and nothing else."""
    if type(optimizer) is not tf.keras.optimizers.SGD or has_rate_schedule(optimizer):
        return False
    config = optimizer.get_config()
    extras = ("momentum", "nesterov", "weight_decay", "use_ema")
    limits = ("clipnorm", "global_clipnorm", "clipvalue")
    others = ("loss_scale_factor", "gradient_accumulation_steps")
    return not any(config.get(key) for key in extras) and all(
        config.get(key) is None for key in (*limits, *others)
    )


class ClientOptimizer:
    """A Keras optimizer that starts afresh for every client.

    Only the slots that exist are reset; plain SGD has none, and updates the
    variables in place.
    """

    def __init__(self, optimizer: tf.keras.optimizers.Optimizer, variables: list[Any]):
        """Makes the slots.

        Args:
          optimizer: Its configuration is used.
          variables: The model's own, as Keras has them.
        """
        keras_versions.check_optimizer(optimizer)
        self._owned = list(variables)
        self._variables = keras_versions.tf_variables(variables)
        self._plain_sgd = is_plain_sgd(optimizer) and not any(
            # Keras's optimizers see to it that it holds.
            getattr(variable, "constraint", None) is not None
            for variable in variables
        )
        self._optimizer = type(optimizer).from_config(optimizer.get_config())
        self._has_fixed_rate = not has_rate_schedule(optimizer)
        self._slots: list[tuple[tf.Variable, np.ndarray | None]] = []
        if not self._plain_sgd:
            with tf.init_scope():
                self._build()

    def _build(self) -> None:
        state = keras_versions.build_optimizer(self._optimizer, self._owned)
        rate = self.learning_rate_variable
        for variable in state:
            if variable is rate:
                continue
            value = variable.numpy()
            self._slots.append((variable, value if value.any() else None))

    @property
    def is_plain_sgd(self) -> bool:
        """Returns True for w <- w - lr g, of all variables."""
        return self._plain_sgd

    @property
    def learning_rate_variable(self) -> tf.Variable | None:
        """Returns the variable that holds the rate, None if it has none."""
        rate = keras_versions.learning_rate(self._optimizer)
        return rate if isinstance(rate, tf.Variable) else None

    @property
    def assigned_variables(self) -> list[tf.Variable]:
        """Returns what `start` assigns."""
        slots = [variable for variable, _ in self._slots]
        if self._plain_sgd or not self._has_fixed_rate:
            return slots
        rate = self.learning_rate_variable
        return slots if rate is None else [*slots, rate]

    def start(self, learning_rate: tf.Tensor) -> None:
        """Resets the slots for a new client."""
        for variable, initial in self._slots:
            variable.assign(
                tf.zeros_like(variable) if initial is None else tf.constant(initial)
            )
        if self._plain_sgd or not self._has_fixed_rate:
            return
        if self.learning_rate_variable is not None:
            self.learning_rate_variable.assign(learning_rate)

    def apply(self, gradients: list[Any], learning_rate: tf.Tensor) -> None:
        """Takes one step on the variables whose gradient is not None."""
        if not self._plain_sgd:
            given = [
                (gradient, variable)
                for gradient, variable in zip(gradients, self._owned, strict=True)
                if gradient is not None
            ]
            if given:
                keras_versions.apply_gradients(
                    self._optimizer, *map(list, zip(*given, strict=True))
                )
            return
        for gradient, variable in zip(gradients, self._variables, strict=True):
            if gradient is None:
                continue
            rate = tf.cast(learning_rate, variable.dtype)
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(
                    tf.IndexedSlices(rate * gradient.values, gradient.indices)
                )
            else:
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=variable.handle, alpha=rate, delta=gradient
                )
