"""Losses and layers of features, against their definitions in float64."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl

_Balanced = tfdp_fl.losses.BalancedSoftmaxCrossentropy


@pytest.mark.parametrize("smoothing", [1e-4, 0.01, 0.5])
def test_is_its_definition(smoothing):
    labels = np.array([3, 3, 1, 3, 1, 1, 1])
    logits = np.random.default_rng(0).normal(size=(7, 5), scale=2).astype(np.float32)
    counts = np.bincount(labels, minlength=5)
    prior = (counts / len(labels) + smoothing) / (1 + 5 * smoothing)
    weighted = prior * np.exp(logits.astype(np.float64))
    expected = -np.log(weighted[np.arange(7), labels] / weighted.sum(-1))
    loss = _Balanced(smoothing)
    close = {"rtol": 1e-5}
    np.testing.assert_allclose(loss.call(labels, logits), expected, **close)
    mean = loss(labels[:, None], logits)
    np.testing.assert_allclose(mean, expected.mean(), **close)
    sequences = loss.call(labels[None], logits[None])
    np.testing.assert_allclose(sequences, expected[None], **close)


def test_comes_back_from_its_configuration():
    loss = _Balanced(0.2, name="b")
    again = tf.keras.losses.deserialize(tf.keras.losses.serialize(loss))
    assert isinstance(again, _Balanced)
    assert again.get_config() == loss.get_config()
    for smoothing in (0, -1.0, float("nan"), "much"):
        with pytest.raises((ValueError, TypeError), match="smoothing"):
            _Balanced(smoothing)


_Layer = tfdp_fl.features.OrientedGradients


def _reference(image, cell, directions):
    """Returns the features of one image [h, w], pixel by pixel, in float64."""
    height, width = image.shape
    padded = np.pad(image.astype(np.float64), 1)
    cells = np.zeros([height // cell, width // cell, directions])
    for row, column in np.ndindex(height, width):
        across = padded[row + 1, column + 2] - padded[row + 1, column]
        down = padded[row + 2, column + 1] - padded[row, column + 1]
        place = math.atan2(down, across) / math.tau * directions
        low, length = math.floor(place), math.hypot(across, down) / 2
        histogram = cells[row // cell, column // cell]
        histogram[low % directions] += length * (1 - (place - low))
        histogram[(low + 1) % directions] += length * (place - low)
    cells /= cell**2
    norms = (cells**2).sum(axis=-1)
    for before in (0, 1):  # Blocks that begin at the cell, and that end there.
        blocks = norms.copy()
        for r, c in np.ndindex(*norms.shape):
            rows = slice(max(0, r - before), r + 2 - before)
            columns = slice(max(0, c - before), c + 2 - before)
            norms[r, c] = blocks[rows, columns].mean()
    return (cells / np.sqrt(norms + 1e-6)[..., None]).ravel()


def _images(count=5):
    return np.random.default_rng(0).random((count, 12, 8), np.float32)


@pytest.mark.parametrize("cell, directions", [(4, 8), (2, 5), (4, 2)])
def test_is_the_reference(cell, directions):
    images = _images()
    layer = _Layer(cell, directions)
    wanted = [_reference(image, cell, directions) for image in images]
    np.testing.assert_allclose(layer(images), wanted, atol=2e-4)
    np.testing.assert_allclose(layer(images[..., None]), wanted, atol=2e-4)
    for shape in ([1, 8, 8, 3], [1, 9, 8], [1, 64]):
        with pytest.raises(ValueError, match=f"be images .* multiples of {cell=}"):
            _Layer(cell)(np.zeros(shape, np.float32))
    for wrong in ({"cell": 0}, {"directions": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            _Layer(**wrong)


def test_is_saved_with_a_model(tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Input((12, 8)), _Layer(2, 5)])
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_allclose(loaded(_images()), model(_images()), rtol=1e-5)
