"""What a client counts is between 0 and 1, whatever it holds."""

import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tfdp_fl import mechanisms
from tfdp_fl.mechanisms import tf_privacy as tfp

_NUM_EXAMPLES = tfdp_fl.ClientWeighting.num_examples


@pytest.mark.parametrize("value", [1e9, -5.0, math.nan, math.inf, -math.inf, 3e38])
def test_whatever_a_client_makes_up(value):
    for cap in (1e-38, 0.3, 100.0, 3e38):
        weighting = tfdp_fl.ClientWeighting.sample_weight(cap=cap)
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
    round_ = mechanisms.Round(tf.constant(1.0), 0.0, 1.0)
    fixed = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.0)
    one = fixed.contribution_of_norm(norm, norm > 0, round_)
    counted = _NUM_EXAMPLES(cap=3.0).weight(4 * rng.random(10**6))
    less = one.weighted(counted)
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
        mechanism.bind(mechanisms.Deployment(**known))
        counted = {**known, "client_weighting": _NUM_EXAMPLES(cap=9)}
        with pytest.raises(ValueError, match="client_weighting must be"):
            mechanism.bind(mechanisms.Deployment(**counted))
