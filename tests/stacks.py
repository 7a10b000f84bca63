"""What tests ask of the stack they run on: which Keras, what is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

KERAS_3 = hasattr(tf.keras, "ops")


def legacy_optimizers(
    *make: Callable[[Any], Any],
) -> list[tf.keras.optimizers.Optimizer]:
    """Returns optimizers of `tf.keras.optimizers.legacy`; none on Keras 3.

    Args:
      *make: Each makes one, given that module.
    """
    if KERAS_3:
        return []
    return [each(tf.keras.optimizers.legacy) for each in make]
