"""The Keras models of the experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate, features

_EMBEDDING_SIZE = 8


def linear(
    input_shape: Sequence[int], num_classes: int, pooling: int = 1
) -> tf.keras.Model:
    """Returns multinomial logistic regression; see `mlp`."""
    return mlp(input_shape, num_classes, (), pooling)


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    hidden_units: Sequence[int] = (128,),
    pooling: int = 1,
) -> tf.keras.Model:
    """Returns a dense network with ReLU, whose outputs are logits.

    Args:
      input_shape: One example's shape; flattened if need be.
      num_classes: How many logits.
      hidden_units: The widths of the hidden layers.
      pooling: If not 1, images come in as the means of squares of so many
        pixels' side, times that side, which keeps their L2 norm about the
        same: fewer weights for noise to fall on.

    Raises:
      ValueError: The examples are to be pooled, and are no images.
    """
    layers = [tf.keras.Input(tuple(input_shape))]
    flat = len(input_shape) == 1
    if pooling != 1:
        if flat:
            layers.append(_as_image(input_shape, "pooling"))
        elif len(input_shape) != 3:
            raise _no_images(input_shape, "pooling")
        layers.append(tf.keras.layers.AveragePooling2D(pooling))
        layers.append(tf.keras.layers.Rescaling(pooling))
    if pooling != 1 or not flat:
        layers.append(tf.keras.layers.Flatten())
    for units in hidden_units:
        layers.append(tf.keras.layers.Dense(units, activation="relu"))
    layers.append(tf.keras.layers.Dense(num_classes))
    return tf.keras.Sequential(layers)


def oriented_gradients(input_shape: Sequence[int]) -> tf.keras.Model:
    """Returns a model of fixed, public features of images; nothing to learn.

    Args:
      input_shape: As of `cnn`, with one channel.

    Raises:
      ValueError: The examples are no grey images.
    """
    layers = [tf.keras.Input(tuple(input_shape))]
    if len(input_shape) == 1:
        layers.append(_as_image(input_shape, "input_features"))
    elif len(input_shape) not in (2, 3):
        raise _no_images(input_shape, "input_features")
    layers.append(features.OrientedGradients())
    return tf.keras.Sequential(layers)


def shifted(images: np.ndarray, pixels: int) -> list[np.ndarray]:
    """Returns images as they are, and moved up, down, left and right.

    Args:
      images: [n, height, width, channels], or [n, m] of square grey images of
        m pixels.
      pixels: By how many; what comes in at the other side is 0.

    Raises:
      ValueError: The examples are no images, or not that large.
    """
    shape = images.shape[1:]
    grid = images
    if len(shape) == 1:
        side = math.isqrt(shape[0])
        if side**2 != shape[0]:
            raise _no_images(shape, "input_shifts")
        grid = images.reshape(-1, side, side)
    elif len(shape) != 3:
        raise _no_images(shape, "input_shifts")
    if pixels >= min(grid.shape[1:3]):
        raise ValueError(
            "input_shifts must be less than the images' sides, got "
            f"{pixels} for {list(shape)}."
        )
    found = [images]
    for axis in (1, 2):
        before, after = [slice(None)] * 3, [slice(None)] * 3
        before[axis], after[axis] = slice(None, -pixels), slice(pixels, None)
        for source, target in ((before, after), (after, before)):
            moved = np.zeros_like(grid)
            moved[tuple(target)] = grid[tuple(source)]
            found.append(moved.reshape(images.shape))
    return found


def cnn(
    input_shape: Sequence[int],
    num_classes: int,
    hidden_units: Sequence[int] = (512,),
) -> tf.keras.Model:
    """Returns the convolutional network of McMahan et al. (2017) for images.

    Two 5x5 convolutions of 32 and 64 channels, each with 2x2 max pooling, and
    dense layers.

    Args:
      input_shape: `[height, width, channels]`, or `[n]` for a square image of
        n grey pixels.
      num_classes: How many logits.
      hidden_units: The widths of the dense layers.

    Raises:
      ValueError: The examples are no images.
    """
    layers = [tf.keras.Input(tuple(input_shape))]
    if len(input_shape) == 1:
        layers.append(_as_image(input_shape, "model='cnn'"))
    elif len(input_shape) != 3:
        raise _no_images(input_shape, "model='cnn'")
    for channels in (32, 64):
        layers.append(
            tf.keras.layers.Conv2D(channels, 5, padding="same", activation="relu")
        )
        layers.append(tf.keras.layers.MaxPooling2D())
    layers.append(tf.keras.layers.Flatten())
    layers += [
        tf.keras.layers.Dense(units, activation="relu") for units in hidden_units
    ]
    layers.append(tf.keras.layers.Dense(num_classes))
    return tf.keras.Sequential(layers)


def _as_image(input_shape: Sequence[int], what: str) -> tf.keras.layers.Layer:
    side = math.isqrt(input_shape[0])
    if side**2 != input_shape[0]:
        raise _no_images(input_shape, what)
    return tf.keras.layers.Reshape((side, side, 1))


def _no_images(input_shape: Sequence[int], what: str) -> ValueError:
    return ValueError(
        f"{what} must be given images, got examples of shape {list(input_shape)}."
    )


def lstm(
    vocabulary_size: int, hidden_units: Sequence[int] = (128, 128)
) -> tf.keras.Model:
    """Returns a next-token model over sequences of any length.

    Token 0 is padding, which counts neither in the loss nor in the metrics.

    Args:
      vocabulary_size: How many tokens, and logits.
      hidden_units: The widths of the LSTM layers.
    """
    _validate.positive_integer(vocabulary_size=vocabulary_size)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(
                vocabulary_size,
                _EMBEDDING_SIZE,
                # Keras's own, 20 times smaller, delays learning by hundreds
                # of rounds.
                embeddings_initializer=tf.keras.initializers.RandomNormal(stddev=1.0),
                mask_zero=True,
                input_shape=(None,),
            ),
            *(
                tf.keras.layers.LSTM(units, return_sequences=True)
                for units in hidden_units
            ),
            tf.keras.layers.Dense(vocabulary_size),
        ]
    )
