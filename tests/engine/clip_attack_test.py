"""Data that an adversary would choose: no client moves the sum by more than S.

The norm is measured in float64, of what the engine added to the sum.
"""

import dataclasses
import functools
import os
from unittest import mock

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tfdp_fl
from tests.engine import cohorts
from tests.keras import toy
from tests.mechanisms import references
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models
from tfdp_fl.engine import engine as engine_lib
from tfdp_fl.mechanisms import clipping

_layers = tf.keras.layers
_S = 0.01
_ALLOWED = _S * (1 + 1e-5)
_PATHS = ("side by side", "a few at a time", "one by one", "xla", "streamed")


# No round is released: one model of a kind serves all tests, and one engine a path.
_networks, _engines = {}, {}


@functools.cache
def _begun(features, widths, activation, twins, seed, output, policy):
    """Returns a model of this kind, which is one for all, and where it begins."""
    toy.seed(seed)
    hidden = [_layers.Dense(n, activation) for n in widths]
    made = cohorts.sequential([features], *hidden, _layers.Dense(1, dtype=output))
    weights = made.get_weights()
    if twins:
        weights[0][1] = -weights[0][0]
    kind = features, widths, activation, output, policy
    return _networks.setdefault(kind, made), weights


def network(features, widths, activation="linear", twins=True, seed=0, output=None):
    """Returns a dense binary classifier in which two features cancel out."""
    policy = tf.keras.mixed_precision.global_policy().name
    of = features, widths, activation, twins, seed, output, policy
    model, weights = _begun(*of)
    model.set_weights(weights)
    return model


def _collected(model, clients, path, *, loss=None, refused=False, **inputs):
    """`refused`: whether clients train one by one, whatever the path says."""
    dataset = cohorts.from_arrays(clients)
    size = max(len(y) for _, y in clients.values())
    steps = [n for n in dense_models.PROGRAM_STEPS if n * inputs["batch_size"] >= size]
    if path == "streamed":
        slices = tf.data.Dataset.from_tensor_slices
        clients = {k: slices(data) for k, data in clients.items()}
        dataset = FederatedDataset.from_tf_datasets(clients)
    # How clients are read, and how many train at a time, is no matter of the programs.
    beside = path in ("side by side", "a few at a time", "streamed")
    how = "side by side" if beside else path
    key = (id(model), how, str(loss), refused, len(clients), steps[0])
    if key not in _engines:
        made = cohorts.make_engine(
            *(model, dataset),
            mechanism=tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=0.0),
            loss=loss or tf.keras.losses.BinaryCrossentropy(from_logits=True),
            jit_compile=None if beside else path == "xla",
        )
        _engines[key] = (made, model)  # Whose id no other model gets meanwhile.
    engine, _ = _engines[key]
    engine.used_strategies.clear()
    inputs = {"local_epochs": 1, "learning_rate": 50.0, **inputs}
    few = path == "a few at a time"
    # The norm counts here, not each bit, for which many clients are made up.
    few_tried = mock.patch.object(engine_lib, "_COMPARED", 32)
    with few_tried, cohorts.side_by_side(beside, few, steps=(steps[0],)):
        pending = cohorts.collect(engine, dataset, **inputs)
    assert (beside and not refused) == engine.has_trained_side_by_side
    return pending


def _added(model, data, path, **options):
    """Returns the norm of what one client adds, and how many were discarded."""
    pending = _collected(model, {0: data}, path, **options)
    (total,) = pending.sums
    norm = references.l2_norm(cohorts.update_of(pending))
    return norm, float(total.contribution.discarded)


def cancelling(features, examples, size):
    # Two features of the given size cancel in the logits. In a float32 Gram matrix
    # their squares swallow those of all others, which have the sign of the label, and
    # whose gradients add up.
    sign = np.where(np.arange(examples) % 2, 1.0, -1.0)
    x = np.empty([examples, features])
    x[:, 2:] = size * 2.0**-12 * 0.99 * sign[:, None]
    x[:, :2] = size
    return x.astype(np.float32), (sign > 0).astype(np.float32)


def _assert_clipped(model, path, exponent):
    data = cancelling(model.input_shape[1], 8, 10.0**exponent)
    norm, discarded = _added(model, data, path, batch_size=4)
    assert norm <= _ALLOWED
    if exponent in (1, 4):
        assert discarded == 0
        assert norm > 0.01 * _S


@pytest.mark.parametrize("path", _PATHS)
@pytest.mark.parametrize("width", [128, 512])
@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_large_features_that_cancel(path, width, size):
    data = cancelling(784, 10, size)
    norm, discarded = _added(network(784, (width,)), data, path, batch_size=10)
    assert discarded == 0
    assert 0.01 * _S <= norm <= _ALLOWED


@pytest.mark.parametrize("path", _PATHS[:3])
@pytest.mark.parametrize("exponent", [-44, -38, -30, -3, 1, 4, 9, 18, 19, 30])
def test_whatever_the_scale_and_the_learning_rate(path, exponent):
    data = cancelling(50, 8, 10.0**exponent)
    model = network(50, (16,))
    for rate in (1e-3, 50.0, -0.1, -50.0, 0.0):
        norm, _ = _added(model, data, path, batch_size=4, learning_rate=rate)
        assert norm <= _ALLOWED


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({"auto_mixed_precision_onednn_bfloat16": True}, {}),
        ({"auto_mixed_precision_mkl": True}, {}),
        ({}, {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}),
        ({}, {"TF_SET_ONEDNN_FPMATH_MODE": "BF16"}),
    ],
)
def test_products_of_fewer_bits_are_not_trusted(options, environment):
    # Honest clients, who exceeded S by 0.2 % with the first.
    set_options = tf.config.optimizer.set_experimental_options
    rng = np.random.default_rng(0)
    added = {"batch_size": 5, "learning_rate": 1.0, "refused": True}
    with mock.patch.dict(os.environ, environment):
        set_options(options)
        try:
            for seed in range(3):
                model = network(784, (128,), "relu", twins=False, seed=seed)
                x = rng.random((10, 784)).astype(np.float32)
                data = x, (rng.random(10) < 0.5).astype(np.float32)
                norm, discarded = _added(model, data, "side by side", **added)
                assert discarded == 0
                assert 0.999 * _S <= norm <= _ALLOWED
        finally:
            set_options(dict.fromkeys(options, False))


@pytest.mark.parametrize("path", _PATHS)
@pytest.mark.parametrize("output", [None, "float32"])
def test_in_bfloat16(path, output):
    with cohorts.policy("mixed_bfloat16"):
        for exponent, activation in (
            *[(-44, "linear"), (-3, "relu"), (1, "linear"), (4, "linear")],
            *[(18, "relu"), (38.5, "linear")],
        ):
            model = network(50, (64,), activation, output=output)
            _assert_clipped(model, path, exponent)


@pytest.mark.parametrize("path", ["one by one", "xla"])
@pytest.mark.parametrize("exponent", [-44, -30, 1, 4, 9, 18, 30])
def test_whatever_the_scale_of_layers_in_parts(path, exponent):
    # As if they were large: norms add up parts of 128 elements.
    with mock.patch.object(clipping, "_MAX_COPIED", 100):
        # Of a size that no other test has: it is traced here.
        _assert_clipped(network(785, (16,)), path, exponent)


@pytest.mark.parametrize("widths", [(16,), (4096,), (64, 64, 64), ()])
def test_any_width_and_depth(widths):
    data = cancelling(300, 12, 1000.0)
    for size in (1 if widths == (16,) else 6, 12):
        norm, _ = _added(network(300, widths), data, "side by side", batch_size=size)
        assert norm <= _ALLOWED


@pytest.mark.parametrize("path", _PATHS[:3])
def test_factors_whose_squares_vanish(path):
    # x x^T is 0 in float32 and d d^T is not, without a bias to tell.
    model = cohorts.sequential([40], _layers.Dense(3, use_bias=False))
    data = np.full([4, 40], 3e-23, np.float32), np.full([4, 3], 1e18, np.float32)
    norm, _ = _added(model, data, path, batch_size=4, learning_rate=1e4, loss="mse")
    assert 1e-30 <= norm <= _ALLOWED


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    kind=st.sampled_from(
        [((), "linear"), ((40,), "linear"), ((16, 200), "relu"), ((200,), "tanh")]
    ),
    twins=st.booleans(),
    size=st.floats(-3, 18),
    small=st.floats(0, 14),
    examples=st.sampled_from([2, 16]),  # In one step or six.
    batch_size=st.sampled_from([3, 16]),
    rate=st.sampled_from([1e-2, 1.0, 100.0]),
    seed=st.integers(0, 9),
)
def test_anything(kind, twins, size, small, examples, batch_size, rate, seed):
    rng = np.random.default_rng(seed)
    x, y = cancelling(60, examples, 10.0**size)
    x[:, 2:] *= 2.0 ** (12 - small) * rng.choice([1, 1, -1, 0], [1, 58])
    model, options = network(60, *kind, twins, seed), {"batch_size": batch_size}
    norm, _ = _added(model, (x, y), "side by side", learning_rate=rate, **options)
    assert norm <= _ALLOWED


@pytest.mark.parametrize("path", ["one by one", "xla"])
def test_ten_million_equal_weights(path):
    # Added up one after the other in float32, their squares stand still.
    model = cohorts.sequential([4096], _layers.Dense(2441, kernel_initializer="zeros"))
    data = np.ones([1, 4096], np.float32), np.ones([1, 2441], np.float32)
    norm, _ = _added(model, data, path, batch_size=1, loss="mse")
    assert 0.999 * _S <= norm <= _ALLOWED


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_of_few_bits_hands_in_more(dtype):
    model = cohorts.sequential([30], _layers.Dense(20, dtype=dtype), dtype=dtype)
    rng = np.random.default_rng(0)
    data = tuple(rng.normal(size=[6, n]).astype(np.float32) for n in (30, 20))
    options = {"batch_size": 6, "learning_rate": 1.0, "loss": "mse"}
    norm, _ = _added(model, data, "one by one", **options)
    assert 0.999 * _S <= norm <= _ALLOWED


def test_complex_weights_are_refused_whose_imaginary_part_would_have_no_noise():
    for size in (3, 300):
        with pytest.raises(ValueError, match="real numbers, got complex64"):
            clipping.finite_global_norm(
                [tf.zeros([size]), tf.zeros([size], tf.complex64)]
            )


def test_honest_clients_are_cut_a_thousandth_too_short_at_most():
    clients, _ = tfdp_fl.datasets.load_digits(num_clients=100)
    stack = _layers.Dense(128, "relu"), _layers.Dense(10, "softmax")
    options = {"batch_size": 10, "learning_rate": 0.2}
    options["loss"] = "sparse_categorical_crossentropy"
    model = cohorts.sequential([64], *stack)
    norms = [
        _added(model, clients.client(client), "side by side", **options)[0]
        for client in list(clients.client_ids)[:20]
    ]
    assert (1 - 1e-3) * _S <= min(norms) <= max(norms) <= _ALLOWED


def test_nobody_else_is_swallowed():
    # One client's large terms must not absorb the others' in one product.
    rng = np.random.default_rng(1)

    def client():
        x = rng.normal(size=[10, 300]).astype(np.float32)
        return x, rng.integers(0, 2, 10).astype(np.float32)

    others = {k: client() for k in range(1, 6)}
    sums = []
    for clients in ({0: cancelling(300, 10, 1000.0), **others}, others):
        pending = _collected(network(300, (32,)), clients, _PATHS[0], batch_size=10)
        sums.append(cohorts.update_of(pending))
    moved = [a.astype(np.float64) - b for a, b in zip(*sums, strict=True)]
    assert references.l2_norm(moved) <= _ALLOWED


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wide(tfdp_fl.FixedClipping):
    """Clips to 100 S, with as much more noise."""

    def l2_norm_bound(self, round):
        return 100.0 * round.clip_norm

    def scale(self, norm, round):
        return clipping.clip_factor(norm, self.l2_norm_bound(round))

    def noise_stddevs(self, round, context):
        return {"update": round.noise_multiplier * self.l2_norm_bound(round)}


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_side_by_side_the_bound_is_that_of_the_mechanism_not_the_clip(noise):
    # Whole numbers of steps of S, in place of 100 S, wrapped: 4996 S were added.
    model = network(8, (), twins=False)
    x = np.random.default_rng(0).normal(size=[4, 8]).astype(np.float32)
    data = cohorts.from_arrays({0: (x, np.zeros(4, np.int32))})
    norms = []
    for beside in (False, True):
        made = cohorts.make_engine(
            *(model, data),
            mechanism=_Wide(clip_norm=_S, noise_multiplier=noise),
            loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
            jit_compile=None,
        )
        with cohorts.side_by_side(beside, steps=(2,)):
            pending = cohorts.collect(
                made, data, learning_rate=1e4, noise_multiplier=noise
            )
        assert made.has_trained_side_by_side == beside
        norms.append(references.l2_norm(cohorts.update_of(pending)))
    assert norms[0] == pytest.approx(100 * _S, rel=1e-5)
    assert 99.9 * _S < norms[1] <= 100 * _ALLOWED
