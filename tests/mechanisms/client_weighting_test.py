"""What a client counts is between 0 and 1, whatever it holds."""

import math

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tfdp_fl import mechanisms
from tfdp_fl.mechanisms import tf_privacy as tfp

_NUM_EXAMPLES = tfdp_fl.ClientWeighting.num_examples


class ClientWeightingTest(tf.test.TestCase, parameterized.TestCase):
    def test_the_papers_formula(self):
        counted = _NUM_EXAMPLES(cap=100).weight(
            tf.constant([0.0, 1.0, 50.0, 100.0, 101.0])
        )
        self.assertAllClose(counted, [0, 0.01, 0.5, 1, 1])

    @parameterized.parameters(1e9, -5.0, math.nan, math.inf, -math.inf, 3e38)
    def test_whatever_a_client_makes_up(self, value):
        for cap in (1e-38, 0.3, 100.0, 3e38):
            weighting = tfdp_fl.ClientWeighting.sample_weight(cap=cap)
            counted = float(weighting.weight(tf.constant([value]))[0])
            self.assertBetween(counted, 0.0, 1.0)
            if not (value > 0 and math.isfinite(value)):
                self.assertEqual(counted, 0.0)

    def test_a_weight_makes_no_factor_larger(self):
        # Not by rounding either: of a million factors and weights.
        rng = np.random.default_rng(0)
        factor = rng.random(10**6).astype(np.float32)
        norm = tf.constant(1 / np.maximum(factor, 1e-6), tf.float32)
        round_ = mechanisms.Round(tf.constant(1.0), 0.0, 1.0)
        one = tfdp_fl.FixedClipping(
            clip_norm=1.0, noise_multiplier=0.0
        ).contribution_of_norm(norm, norm > 0, round_)
        counted = _NUM_EXAMPLES(cap=3.0).weight(4 * rng.random(10**6))
        less = one.weighted(counted)
        self.assertAllLessEqual(less.update - one.update, 0.0)
        self.assertAllEqual(less.norm, one.norm)
        self.assertAllEqual(less.clipped, one.clipped)

    @parameterized.parameters(
        *((cap, 1.0, "cap") for cap in (0, math.nan, 1e39)),
        *((9, mean_weight, "mean_weight") for mean_weight in (0.0, 1.5)),
    )
    def test_refused(self, cap, mean_weight, name):
        with self.assertRaisesRegex(ValueError, f"{name} must be"):
            _NUM_EXAMPLES(cap=cap, mean_weight=mean_weight)

    @parameterized.parameters(
        tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.0),
        tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5),
        tfdp_fl.NbAFL(epsilon=8.0, constant=2.0, weight_clip=1.0),
        tfdp_fl.QueryMechanism(
            query=tfp.GaussianSumQuery(1.0, 1.0),
            dp_event=dp_accounting.GaussianDpEvent(1.0),
        ),
    )
    def test_mechanisms_that_it_is_not_for(self, mechanism):
        deployment = mechanisms.Deployment(
            clients_per_round=4,
            num_clients=9,
            sampling="fixed_size",
            rounds=2,
            min_examples=3,
            num_variables=1,
            client_weighting=_NUM_EXAMPLES(cap=9),
        )
        with self.assertRaisesRegex(ValueError, "client_weighting must be"):
            mechanism.bind(deployment)
