"""Tests of histograms of oriented gradients."""

import math
import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl


def _reference(image, cell, directions):
    """Returns the features of one image [h, w], pixel by pixel, in float64."""
    height, width = image.shape
    padded = np.pad(image.astype(np.float64), 1)
    cells = np.zeros([height // cell, width // cell, directions])
    for row in range(height):
        for column in range(width):
            across = padded[row + 1, column + 2] - padded[row + 1, column]
            down = padded[row + 2, column + 1] - padded[row, column + 1]
            length = math.hypot(across, down) / 2
            place = math.atan2(down, across) / math.tau * directions
            low = math.floor(place)
            histogram = cells[row // cell, column // cell]
            histogram[low % directions] += length * (1 - (place - low))
            histogram[(low + 1) % directions] += length * (place - low)
    cells /= cell**2
    energy = (cells**2).sum(axis=-1)
    rows, columns = energy.shape
    blocks = np.array(
        [
            [energy[r : r + 2, c : c + 2].mean() for c in range(columns)]
            for r in range(rows)
        ]
    )
    norms = np.array(
        [
            [
                blocks[max(0, r - 1) : r + 1, max(0, c - 1) : c + 1].mean()
                for c in range(columns)
            ]
            for r in range(rows)
        ]
    )
    return (cells / np.sqrt(norms + 1e-6)[..., None]).ravel()


def _images(count=5, height=12, width=8):
    return np.random.default_rng(0).random((count, height, width), np.float32)


class OrientedGradientsTest(parameterized.TestCase):
    @parameterized.parameters((4, 8), (2, 5), (4, 2))
    def test_is_the_reference(self, cell, directions):
        images = _images()
        layer = tfdp_fl.features.OrientedGradients(cell, directions)
        wanted = [_reference(image, cell, directions) for image in images]
        np.testing.assert_allclose(layer(images), wanted, atol=2e-4)
        np.testing.assert_allclose(layer(images[..., None]), wanted, atol=2e-4)

    def test_is_saved_with_a_model(self):
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((12, 8)),
                tfdp_fl.features.OrientedGradients(2, 5),
                tf.keras.layers.Dense(3),
            ]
        )
        self.assertEqual(
            model.layers[0].output_shape
            if hasattr(model.layers[0], "output_shape")
            else model.layers[0].output.shape,
            (None, 6 * 4 * 5),
        )
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.keras")
            model.save(path)
            loaded = tf.keras.models.load_model(path)
        images = _images()
        np.testing.assert_allclose(loaded(images), model(images), rtol=1e-5)

    def test_trains_inside_a_model_and_before_it(self):
        x, y = _images(40), np.arange(40) % 3
        layer = tfdp_fl.features.OrientedGradients(2, 5)
        raw = {i: (x[i::4], y[i::4]) for i in range(4)}
        clients = tfdp_fl.datasets.FederatedDataset.from_client_arrays(raw)
        trained = []
        for inside in (True, False):
            tf.keras.utils.set_random_seed(1)
            shape = (12, 8) if inside else (6 * 4 * 5,)
            model = tf.keras.Sequential(
                [
                    tf.keras.layers.Input(shape),
                    *([layer] * inside),
                    tf.keras.layers.Dense(3, kernel_initializer="zeros"),
                ]
            )
            fed = tfdp_fl.DPFederatedModel(
                model, tfdp_fl.NoPrivacy(), 4, "fixed_size", num_replicas=1
            )
            fed.compile(
                tf.keras.optimizers.SGD(0.1),
                tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
            data = clients
            if not inside:
                data = clients.map(lambda x, y: (layer(x), y))
            fed.fit(data, rounds=2, batch_size=5, verbose=0)
            trained.append(fed.get_weights()[0])
        np.testing.assert_allclose(trained[0], trained[1], atol=1e-5)
        self.assertGreater(np.abs(trained[0]).max(), 0)

    @parameterized.parameters(
        ({"cell": 0}, (1, 8, 8), "cell"),
        ({"directions": 1}, (1, 8, 8), "directions"),
        ({}, (1, 9, 8), "multiples of cell=4"),
        ({}, (1, 8, 8, 3), "inputs must be images"),
        ({}, (1, 64), "inputs must be images"),
    )
    def test_arguments(self, arguments, shape, message):
        with self.assertRaisesRegex(ValueError, message):
            tfdp_fl.features.OrientedGradients(**arguments)(np.zeros(shape, np.float32))
