"""Data that an adversary would choose: no client moves the sum by more than S.

The norm is measured in float64, of what the engine added to the sum.
"""

from __future__ import annotations

import os
from unittest import mock

import hypothesis
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st

import tfdp_fl
from tests.engine import cohorts
from tests.mechanisms import references
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models
from tfdp_fl.mechanisms import clipping

_S = 0.01
_ALLOWED = _S * (1 + 1e-5)
_PATHS = ("side by side", "a few at a time", "one by one", "xla", "streamed")


# No round is released, so one model of a kind serves all tests, and one engine a
# model, path and loss.
_networks: dict[tuple, tf.keras.Model] = {}
_engines: dict[tuple, tuple] = {}


def _network(features, widths, activation="linear", twins=True, seed=0, output=None):
    """Returns a dense binary classifier in which two features cancel out."""
    policy = tf.keras.mixed_precision.global_policy().name
    made = _made(features, widths, activation, twins, seed, output)
    model = _networks.setdefault(
        (*map(str, (features, widths, activation)), output, policy), made
    )
    model.set_weights(made.get_weights())
    return model


def _made(features, widths, activation, twins, seed, output):
    tf.keras.utils.set_random_seed(seed)
    model = tf.keras.Sequential(
        [
            tf.keras.Input([features]),
            *[tf.keras.layers.Dense(n, activation) for n in widths],
            tf.keras.layers.Dense(1, dtype=output),
        ]
    )
    if twins:
        kernel = model.layers[0].kernel
        rows = kernel.numpy()
        rows[1] = -rows[0]
        kernel.assign(rows)
    return model


def _added(
    model,
    x,
    y,
    path,
    *,
    batch_size,
    rate=50.0,
    loss=None,
    epochs=1,
    refused=False,
):
    """Returns the norm of what one client adds, and how many were discarded.

    Args:
      model: Of which it is a client.
      x: Its features.
      y: Its labels.
      path: One of `_PATHS`.
      batch_size: Of its training.
      rate: Its learning rate.
      loss: None: for a binary classifier.
      epochs: Passes over its examples.
      refused: Whether it is trained one by one, whatever the path says.
    """
    if path == "streamed":
        dataset = FederatedDataset.from_tf_datasets(
            {0: tf.data.Dataset.from_tensor_slices((x, y))}
        )
    else:
        dataset = FederatedDataset.from_client_arrays({0: (x, y)})
    beside = path in ("side by side", "a few at a time", "streamed")
    key = (id(model), path, str(loss), refused)
    if key not in _engines:
        made = cohorts.make_engine(
            model,
            dataset,
            mechanism=tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=0.0),
            loss=loss or tf.keras.losses.BinaryCrossentropy(from_logits=True),
            jit_compile=None if beside else path == "xla",
        )
        _engines[key] = (made, model)  # Whose id no other model gets meanwhile.
    engine, _ = _engines[key]
    inputs = cohorts.inputs(
        dataset,
        batch_size=batch_size,
        local_epochs=epochs,
        learning_rate=rate,
    )
    with mock.patch.multiple(
        dense_models,
        is_worthwhile=lambda *_: beside,
        is_small=lambda *_: path == "a few at a time",
    ):
        pending = engine.collect(dataset, inputs)
    assert (beside and not refused) == engine.has_trained_side_by_side
    (total,) = pending.sums
    record = total.contribution
    norm = references.l2_norm([v.numpy() for v in record.update])
    return norm, float(record.discarded)


def _cancelling(features, examples, size):
    """Returns data whose small parts add up, and vanish beside large ones.

    Two features of the given size cancel in the logits. In a float32 Gram
    matrix their squares swallow those of all others, which have the sign of
    the label, and whose gradients add up.
    """
    sign = np.where(np.arange(examples) % 2, 1.0, -1.0)
    x = np.empty([examples, features])
    x[:, 2:] = size * 2.0**-12 * 0.99 * sign[:, None]
    x[:, :2] = size
    return x.astype(np.float32), (sign > 0).astype(np.float32)


class ClipAttackTest(tf.test.TestCase, parameterized.TestCase):
    def _is_clipped(self, model, path, exponent):
        """Fails if features that cancel move the sum too far, or not at all."""
        features = model.input_shape[1]
        norm, discarded = _added(
            model,
            *_cancelling(features, 8, 10.0**exponent),
            path,
            batch_size=4,
        )
        self.assertLessEqual(norm, _ALLOWED)
        if exponent in (1, 4):
            self.assertEqual(discarded, 0)
            self.assertGreater(norm, 0.01 * _S)

    @parameterized.product(path=_PATHS, widths=[(128,), (512,)], size=[30.0, 3000.0])
    def test_large_features_that_cancel(self, path, widths, size):
        norm, discarded = _added(
            _network(784, widths),
            *_cancelling(784, 10, size),
            path,
            batch_size=10,
        )
        self.assertEqual(discarded, 0)
        self.assertBetween(norm, 0.01 * _S, _ALLOWED)

    @parameterized.product(
        path=_PATHS[:3], exponent=[-44, -38, -30, -3, 1, 4, 9, 18, 19, 30]
    )
    def test_whatever_the_scale(self, path, exponent):
        for rate in (1e-3, 50.0):
            norm, _ = _added(
                _network(50, (16,)),
                *_cancelling(50, 8, 10.0**exponent),
                path,
                batch_size=4,
                rate=rate,
            )
            self.assertLessEqual(norm, _ALLOWED)

    @parameterized.parameters(
        {"options": {"auto_mixed_precision_onednn_bfloat16": True}},
        {"options": {"auto_mixed_precision_mkl": True}},
        {"environment": {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}},
        {"environment": {"TF_SET_ONEDNN_FPMATH_MODE": "BF16"}},
    )
    def test_products_of_fewer_bits_are_not_trusted(self, options=(), environment=()):
        # Honest clients, who exceeded S by 0.2 % with the first.
        optimizer = tf.config.optimizer
        optimizer.set_experimental_options(dict(options))
        self.addCleanup(
            optimizer.set_experimental_options, dict.fromkeys(options, False)
        )
        self.enter_context(mock.patch.dict(os.environ, environment))
        rng = np.random.default_rng(0)
        for seed in range(3):
            norm, discarded = _added(
                _network(784, (128,), "relu", twins=False, seed=seed),
                rng.random((10, 784)).astype(np.float32),
                (rng.random(10) < 0.5).astype(np.float32),
                "side by side",
                batch_size=5,
                rate=1.0,
                refused=True,
            )
            self.assertEqual(discarded, 0)
            self.assertBetween(norm, 0.999 * _S, _ALLOWED)

    @parameterized.product(path=_PATHS, policy=("mixed_bfloat16", "output in float32"))
    def test_in_bfloat16(self, path, policy):
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
        self.addCleanup(tf.keras.mixed_precision.set_global_policy, "float32")
        output = None if policy == "mixed_bfloat16" else "float32"
        for exponent, activation in (
            *[(-44, "linear"), (-3, "relu"), (1, "linear"), (4, "linear")],
            *[(18, "relu"), (38.5, "linear")],
        ):
            model = _network(50, (64,), activation, output=output)
            self._is_clipped(model, path, exponent)

    @parameterized.product(
        path=("one by one", "xla"), exponent=[-44, -30, 1, 4, 9, 18, 30]
    )
    def test_whatever_the_scale_of_layers_in_parts(self, path, exponent):
        # As if they were large: norms add up parts of 128 elements.
        with mock.patch.object(clipping, "_COPIED", 100):
            # Of a size that no other test has: it is traced here.
            self._is_clipped(_network(785, (16,)), path, exponent)

    @parameterized.parameters(-0.1, -50.0, 0.0)
    def test_any_learning_rate(self, rate):
        norm, _ = _added(
            _network(50, (16,)),
            *_cancelling(50, 8, 10.0),
            "side by side",
            batch_size=4,
            rate=rate,
        )
        self.assertLessEqual(norm, _ALLOWED)

    @parameterized.parameters((16,), (4096,), (64, 64, 64), ())
    def test_any_width_and_depth(self, *widths):
        for batch_size in (1 if widths == (16,) else 4, 12):
            norm, _ = _added(
                _network(300, widths),
                *_cancelling(300, 12, 1000.0),
                "side by side",
                batch_size=batch_size,
            )
            self.assertLessEqual(norm, _ALLOWED)

    @parameterized.parameters(*_PATHS[:3])
    def test_factors_whose_squares_vanish(self, path):
        # x x^T is 0 in float32 and d d^T is not, without a bias to tell.
        model = tf.keras.Sequential(
            [tf.keras.Input([40]), tf.keras.layers.Dense(3, use_bias=False)]
        )
        x = np.full([4, 40], 3e-23, np.float32)
        y = np.full([4, 3], 1e18, np.float32)
        norm, _ = _added(model, x, y, path, batch_size=4, rate=1e4, loss="mse")
        self.assertBetween(norm, 1e-30, _ALLOWED)

    @hypothesis.settings(
        max_examples=25, deadline=None, derandomize=True, database=None
    )
    @hypothesis.given(
        kind=st.sampled_from(
            [((), "linear"), ((40,), "linear"), ((16, 200), "relu"), ((200,), "tanh")]
        ),
        twins=st.booleans(),
        size=st.floats(-3, 18),
        small=st.floats(0, 14),
        examples=st.sampled_from([2, 6, 16]),
        batch_size=st.sampled_from([3, 16]),
        rate=st.sampled_from([1e-2, 1.0, 100.0]),
        seed=st.integers(0, 9),
    )
    def test_anything(self, kind, twins, size, small, examples, batch_size, rate, seed):
        rng = np.random.default_rng(seed)
        x, y = _cancelling(60, examples, 10.0**size)
        x[:, 2:] *= 2.0 ** (12 - small) * rng.choice([1, 1, -1, 0], [1, 58])
        norm, _ = _added(
            _network(60, *kind, twins, seed),
            x,
            y,
            "side by side",
            batch_size=batch_size,
            rate=rate,
        )
        self.assertLessEqual(norm, _ALLOWED)

    @parameterized.parameters("one by one", "xla")
    def test_ten_million_equal_weights(self, path):
        # Added up one after the other in float32, their squares stand still.
        model = tf.keras.Sequential(
            [
                tf.keras.Input([4096]),
                tf.keras.layers.Dense(2441, kernel_initializer="zeros"),
            ]
        )
        norm, _ = _added(
            model,
            np.ones([1, 4096], np.float32),
            np.ones([1, 2441], np.float32),
            path,
            batch_size=1,
            loss="mse",
        )
        self.assertBetween(norm, 0.999 * _S, _ALLOWED)

    @parameterized.parameters("float16", "bfloat16")
    def test_a_model_of_few_bits_hands_in_more(self, dtype):
        model = tf.keras.Sequential(
            [
                tf.keras.Input([30], dtype=dtype),
                tf.keras.layers.Dense(20, dtype=dtype),
            ]
        )
        rng = np.random.default_rng(0)
        norm, _ = _added(
            model,
            rng.normal(size=[6, 30]).astype(np.float32),
            rng.normal(size=[6, 20]).astype(np.float32),
            "one by one",
            batch_size=6,
            rate=1.0,
            loss="mse",
        )
        self.assertBetween(norm, 0.999 * _S, _ALLOWED)

    def test_honest_clients_are_cut_a_thousandth_too_short_at_most(self):
        clients, _ = tfdp_fl.datasets.load_digits(num_clients=100)
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential(
            [
                tf.keras.Input([64]),
                tf.keras.layers.Dense(128, "relu"),
                tf.keras.layers.Dense(10, "softmax"),
            ]
        )
        shortest = 1.0
        for client in range(20):
            norm, _ = _added(
                model,
                *clients.client(clients.client_ids[client]),
                "side by side",
                batch_size=10,
                rate=0.2,
                loss="sparse_categorical_crossentropy",
            )
            shortest = min(shortest, norm / _S)
        self.assertBetween(shortest, 1 - 1e-3, 1 + 1e-5)

    def test_nobody_else_is_swallowed(self):
        # One client's large terms must not absorb the others' in one product.
        x, y = _cancelling(300, 10, 1000.0)
        rng = np.random.default_rng(1)
        others = {
            k: (
                rng.normal(size=[10, 300]).astype(np.float32),
                rng.integers(0, 2, 10).astype(np.float32),
            )
            for k in range(1, 6)
        }
        model = _network(300, (32,))
        sums = []
        for clients in ({0: (x, y), **others}, others):
            dataset = FederatedDataset.from_client_arrays(clients)
            engine = cohorts.make_engine(
                model,
                dataset,
                mechanism=tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=0.0),
                loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
                jit_compile=None,
            )
            with mock.patch.object(dense_models, "is_worthwhile", lambda *_: True):
                pending = engine.collect(
                    dataset,
                    cohorts.inputs(
                        dataset,
                        batch_size=10,
                        local_epochs=1,
                        learning_rate=50.0,
                    ),
                )
            (total,) = pending.sums
            sums.append([v.numpy() for v in total.contribution.update])
        moved = [a.astype(np.float64) - b for a, b in zip(*sums, strict=True)]
        self.assertLessEqual(references.l2_norm(moved), _ALLOWED)
