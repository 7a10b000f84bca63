"""Whether a model's local training should be compiled by XLA, on a CPU.

Measured (docs/benchmarks.md): XLA makes small dense models more than twice as
fast, because it fuses away the cost of starting each operation. It makes
convolutions some twenty times slower, and recurrent layers and large matrix
products somewhat slower, because it does not use TensorFlow's own kernels for
them.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.engine import devices

# Layers whose compiled code does not depend on how fast XLA convolves or loops.
_DENSE_LAYERS = (
    tf.keras.layers.InputLayer,
    tf.keras.layers.Dense,
    tf.keras.layers.Flatten,
    tf.keras.layers.Reshape,
    tf.keras.layers.Activation,
    tf.keras.layers.ReLU,
    tf.keras.layers.LeakyReLU,
    tf.keras.layers.ELU,
    tf.keras.layers.Softmax,
    tf.keras.layers.Rescaling,
    tf.keras.layers.Dropout,
)

# Multiply-adds of one training step's largest matrix product, above which
# TensorFlow's kernels are the faster ones.
_LARGEST_PRODUCT = 300_000


def prefers_xla(model: tf.keras.Model, batch_size: int) -> bool:
    """Returns True if the model is small and dense all through, on a CPU.

    Args:
      model: A built Keras model.
      batch_size: The rows of one step's batch.
    """
    if not devices.is_cpu(devices.home_of(model)):
        return False
    largest = 0
    for layer in keras_versions.layers_of(model):
        if isinstance(layer, tf.keras.Model):
            continue
        if type(layer) not in _DENSE_LAYERS:
            return False
        if isinstance(layer, tf.keras.layers.Dense):
            largest = max(largest, math.prod(layer.kernel.shape))
    return 0 < largest * batch_size <= _LARGEST_PRODUCT
