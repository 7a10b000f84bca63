import itertools
import math
from unittest import mock

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.mechanisms import references, rounds
from tfdp_fl._lazy_tf import tfp
from tfdp_fl.mechanisms import ClientContext, PrivacyContext, RoundState, clipping


def _clipped(update, clip_norm=1.0):
    mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.0)
    round_ = RoundState(tf.constant(clip_norm), 0.0, 1.0)
    where = ClientContext(), PrivacyContext(clients_per_round=1)
    return mechanism.contribution(update, round_, *where)


@pytest.mark.parametrize("norm", [1e-6, 0.1, 0.999999, 1.0, 1.000001, 3.0, 1e6])
def test_is_the_papers_flat_clip(norm):
    (update,) = rounds.updates_with_norms([norm])
    result = _clipped([tf.constant(v) for v in update])
    rounds.assert_close(result.update, references.clipped(update, 1.0), rtol=1e-6)
    np.testing.assert_allclose(result.norm, references.l2_norm(update), rtol=1e-6)
    assert float(result.discarded) == 0
    assert references.l2_norm(result.update) <= 1 + 1e-6


@pytest.mark.parametrize("size", [2**20, 3 * 2**20 - 5, 70 * 2**20 + 3])
def test_norm_of_a_large_layer(size):
    # All but the last are below what a float32 sum of so many would still notice.
    layer = np.full(size, 2**-12, np.float32)
    layer[-1] = 4.0
    expected = np.sqrt((size - 1) * 2.0**-24 + 16)
    for compiled in (False, True)[: 2 if size < 2**23 else 1]:
        norm = tf.function(lambda x: clipping.global_norm([x]), jit_compile=compiled)
        np.testing.assert_allclose(norm(tf.constant(layer)), expected, rtol=8e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bad_element_in_any_part_of_a_layer(compiled):
    clip = tf.function(lambda x: _clipped([x]), jit_compile=compiled)
    with mock.patch.object(clipping, "_MAX_COPIED", 100):
        for place, bad in itertools.product((0, 299, 300, -1), (np.nan, 3e38)):
            update = np.full(1001, 0.1, np.float32)
            update[place] = bad
            result = clip(tf.constant(update))
            assert float(result.discarded) == 1
            assert not np.any(result.update[0])


def test_a_zero_update_is_legal_and_a_zero_bound_gives_zero():
    for value, bound in ((0.0, 1.0), (0.0, 0.0), (1.0, 0.0)):
        result = _clipped([tf.fill([3], value), tf.fill([2, 2], value)], bound)
        np.testing.assert_array_equal(rounds.flat(result.update), np.zeros(7))
        assert float(result.discarded) == 0


# Beyond 2e38 the norm is no float32.
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_one_bad_element_zeroes_the_whole_update(bad):
    parts = [np.ones([2, 3], np.float32), np.ones([4], np.float32)]
    parts[1][2] = parts[0][1, 1] = bad
    result = _clipped([tf.constant(v) for v in parts])
    np.testing.assert_array_equal(rounds.flat(result.update), np.zeros(10))
    assert float(result.discarded) == 1
    assert float(result.clipped) == float(result.norm) == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_keeps_dtypes(dtype):
    (kept,) = _clipped([tf.cast([3.0, 4.0], dtype)]).update
    assert kept.dtype == dtype
    np.testing.assert_allclose(tf.cast(kept, "float64"), [0.6, 0.8], rtol=1e-2)
    (kept,) = _clipped([tf.cast([3.0, np.nan], dtype)]).update
    np.testing.assert_array_equal(tf.cast(kept, "float32"), [0, 0])


_NUM_EXAMPLES = tfdp_fl.ClientWeighting.num_examples


@pytest.mark.parametrize("value", [1e9, -5.0, math.nan, math.inf, -math.inf, 3e38])
def test_whatever_a_client_makes_up(value):
    for cap in (1e-38, 0.3, 100.0, 3e38):
        weighting = _NUM_EXAMPLES(cap=cap)
        counted = float(weighting.weight(tf.constant([value]))[0])
        assert 0.0 <= counted <= 1.0
        if not (value > 0 and math.isfinite(value)):
            assert counted == 0.0
    # The paper's formula.
    counted = _NUM_EXAMPLES(cap=100).weight(tf.constant([0.0, 1, 50, 100, 101]))
    np.testing.assert_allclose(counted, [0, 0.01, 0.5, 1, 1], rtol=1e-6)


def test_a_weight_makes_no_factor_larger():
    # Not by rounding either: of a million factors and weights.
    rng = np.random.default_rng(0)
    factor = rng.random(10**6).astype(np.float32)
    norm = tf.constant(1 / np.maximum(factor, 1e-6), tf.float32)
    round_ = RoundState(tf.constant(1.0), 0.0, 1.0)
    fixed = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.0)
    one = fixed.contribution_of_norm(norm, norm > 0, round_)
    counted = _NUM_EXAMPLES(cap=3.0).weight(4 * rng.random(10**6))
    less = one.scale_by(counted)
    assert np.all(less.update <= one.update)
    np.testing.assert_array_equal(less.norm, one.norm)
    np.testing.assert_array_equal(less.clipped, one.clipped)


@pytest.mark.parametrize("name", ["cap", "mean_weight"])
@pytest.mark.parametrize("value", [0.0, math.nan, 1e39])
def test_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        _NUM_EXAMPLES(**{"cap": 9, name: value})


def test_mechanisms_that_it_is_not_for():
    known = {"num_clients": 9, "rounds": 2, "min_examples": 3, "num_variables": 1}
    known |= {"clients_per_round": 4, "sampling": "fixed_size"}
    query, event = tfp.GaussianSumQuery(1.0, 1.0), dp_accounting.GaussianDpEvent(1.0)
    for mechanism in (
        tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.0),
        tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5),
        tfdp_fl.NbAFL(epsilon=8.0, constant=2.0, weight_clip=1.0),
        tfdp_fl.QueryMechanism(query=query, dp_event=event),
    ):
        mechanism.bind(PrivacyContext(**known))
        counted = {**known, "client_weighting": _NUM_EXAMPLES(cap=9)}
        with pytest.raises(ValueError, match="client_weighting must be"):
            mechanism.bind(PrivacyContext(**counted))
