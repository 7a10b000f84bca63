"""Fixed, public features: Keras layers with nothing to learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.terms import Json


@tf.keras.utils.register_keras_serializable(package="tfdp_fl")
class OrientedGradients(tf.keras.layers.Layer):
    """Histograms of oriented gradients of grey images.

    Dalal and Triggs (2005), "Histograms of Oriented Gradients for Human
    Detection". Each pixel's gradient is computed by centred differences (zeros
    beyond the edge). Its length is split between the two nearest of
    `directions` directions around the circle, and the pixels of each cell are
    added up. A cell's histogram is divided by the root of the mean square over
    the blocks of 2 x 2 cells that it is in.

    It has no weights and no state, so putting it in front of a model changes
    no guarantee and leaves less for private training to learn
    (Tramer and Boneh 2021, "Differentially Private Learning Needs Better
    Features"). Where the same examples are seen often, compute them once:
    `dataset.map(lambda x, y: (layer(x), y))`; a model of dense layers alone
    also trains faster.

    Input: float [batch, height, width] or [batch, height, width, 1]; height
    and width are multiples of `cell`. Output: float32 [batch, height / cell *
    width / cell * directions], 392 numbers of 28 x 28 pixels by default.
    """

    def __init__(self, cell: int = 4, directions: int = 8, **options: Any):
        """Checks the arguments.

        Args:
          cell: Pixels on each side of a cell.
          directions: How many there are around the circle, at least 2.
          **options: Passed to Keras's `Layer`.

        Raises:
          TypeError, ValueError: An argument is not allowed.
        """
        super().__init__(**options)
        self.cell = _validate.positive_integer(cell=cell)
        self.directions = _validate.positive_integer(directions=directions)
        if self.directions < 2:
            raise ValueError(f"directions must be at least 2, got {directions!r}.")

    def build(self, input_shape: Any) -> None:
        """Checks the images' shape."""
        shape = tuple(input_shape)
        size = shape[1:3]
        if (
            len(shape) not in (3, 4)
            or shape[3:] not in ((), (1,))
            or None in size
            or any(side % self.cell for side in size)
        ):
            raise ValueError(
                "inputs must be images [batch, height, width] or [batch, "
                "height, width, 1], with sides that are multiples of cell="
                f"{self.cell}, got {shape}."
            )
        super().build(input_shape)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns the features of a batch of images."""
        shape = inputs.shape
        height, width = shape[1], shape[2]
        images = tf.reshape(tf.cast(inputs, tf.float32), [-1, height, width])
        padded = tf.pad(images, [[0, 0], [1, 1], [1, 1]])
        dx = (padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]) / 2
        dy = (padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]) / 2
        magnitude = tf.sqrt(dx**2 + dy**2)
        # The direction as a place among the bins: from 0 to `directions`.
        bin_position = tf.math.atan2(dy, dx) * (self.directions / math.tau)
        bins = np.arange(self.directions, dtype=np.float32)
        distance = tf.math.floormod(bin_position[..., None] - bins, self.directions)
        distance = tf.minimum(distance, self.directions - distance)
        votes = magnitude[..., None] * tf.nn.relu(1.0 - distance)
        cells = tf.nn.avg_pool2d(votes, self.cell, self.cell, "VALID")
        energy = tf.reduce_sum(cells**2, axis=-1, keepdims=True)
        # Once into the blocks of 2 x 2 cells, once back: means of both.
        blocks = _mean_of_two_by_two(energy, before=False)
        energy = _mean_of_two_by_two(blocks, before=True)
        features = cells / tf.sqrt(energy + 1e-6)
        count = (height // self.cell) * (width // self.cell) * self.directions
        return tf.reshape(features, [-1, count])

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """Returns the output's shape."""
        batch, height, width = tuple(input_shape)[:3]
        cells = (height // self.cell) * (width // self.cell)
        return (batch, cells * self.directions)

    def get_config(self) -> Json:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "cell": self.cell,
            "directions": self.directions,
        }


def _mean_of_two_by_two(values: tf.Tensor, before: bool) -> tf.Tensor:
    """Returns means over 2 x 2 neighbours, as far as they are there."""
    side = [1, 0] if before else [0, 1]
    pads = [[0, 0], side, side, [0, 0]]
    ones = tf.pad(tf.ones_like(values), pads)
    total = tf.nn.avg_pool2d(tf.pad(values, pads), 2, 1, "VALID")
    return total / tf.nn.avg_pool2d(ones, 2, 1, "VALID")
