"""The privacy statement says what ran, and every caveat that holds."""

from __future__ import annotations

import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

_DELTA = 1e-3


def _trained(mechanism=None, rounds=2, fit=None, **options):
    # Shuffled cohorts are one Gaussian, whose epsilon takes no time.
    fed = toy.federated(mechanism, **{"sampling": "shuffled", **options})
    toy.fit(fed, rounds, **fit or {})
    return fed


class StatementTest(parameterized.TestCase):
    def test_exact_median(self):
        fed = _trained(
            tfdp_fl.MedianClipping(noise_multiplier=lambda t: 1.0 + t),
        )
        facts = fed.privacy_statement(_DELTA, "dict")
        self.assertIn("exact_median", facts["caveats"])
        self.assertEqual(
            facts["mechanism_parameters"]["noise_multiplier"],
            "1 to 2 (scheduled)",
        )

    def test_central_guarantee(self):
        fed = _trained(
            sampling="poisson",
            rounds=3,
            delta=_DELTA,
            fit={"validation_data": toy.arrays(20)},
        )
        facts = fed.privacy_statement(format="dict")
        sizes = fed.model.history.history["cohort_size"]
        self.assertEqual(facts["unit"], "client")
        self.assertEqual(facts["relation"], "ADD_OR_REMOVE_ONE")
        self.assertEqual(facts["rounds"], 3)
        self.assertEqual(facts["num_clients"], toy.NUM_CLIENTS)
        self.assertEqual(facts["cohort_sizes"]["max"], max(sizes))
        self.assertEqual(facts["clients_per_round"]["min"], 20)
        self.assertEqual(facts["epsilon_rdp"], fed.epsilon(_DELTA))
        self.assertEqual(facts["epsilon_pld"], fed.epsilon(_DELTA, "pld"))
        self.assertEqual(facts["mechanism_parameters"]["clip_norm"], 0.5)
        self.assertEqual(
            {*facts["caveats"]},
            {
                "unnoised_metrics",
                "validation_data_not_covered",
                "hyperparameter_search_not_counted",
                "floating_point_noise",
                "pseudorandom_noise",
                "population_stated",
                "start_and_callbacks_trusted",
            },
        )
        self.assertGreater(facts["epsilon_if_participation_is_known"], facts["epsilon"])
        text = fed.privacy_statement()
        for needed in (r"epsilon = \d", "one client is added or removed", "N = 40 and"):
            self.assertRegex(text, needed)
        with self.subTest("a delta that nobody gave follows from N"):
            facts = _trained(rounds=1).privacy_statement(format="dict")
            self.assertAlmostEqual(facts["delta"], 40**-1.1)

    def test_seed_and_clipped_non_trainable_state(self):
        def model():
            return tf.keras.Sequential(
                [
                    tf.keras.Input((8,)),
                    tf.keras.layers.BatchNormalization(),
                    tf.keras.layers.Dense(toy.NUM_CLASSES),
                ]
            )

        fed = _trained(model=model(), sampling="shuffled", fit={"seed": 1})
        caveats = fed.privacy_statement(_DELTA, "dict")["caveats"]
        self.assertIn("seed_given", caveats)
        self.assertIn("non_trainable_released", caveats)
        self.assertIn("shuffled_zero_out", caveats)
        kept = _trained(
            model=model(),
            non_trainable_state="keep",
            rounds=1,
        )
        caveats = kept.privacy_statement(_DELTA, "dict")["caveats"]
        self.assertIn("non_trainable_kept", caveats)
        self.assertNotIn("non_trainable_released", caveats)
        self.assertNotIn("seed_given", caveats)

    def test_local_guarantee_is_not_called_central(self):
        fed = _trained(
            tfdp_fl.AdaptiveLocalDP(
                epsilon=8.0,
                delta=_DELTA,
                calibration="classic",
                layers="separate",
            ),
            sampling="fixed_size",
        )
        facts = fed.privacy_statement(_DELTA, "dict")
        self.assertEqual(facts["guarantee"], "local")
        self.assertEqual(facts["epsilon"], fed.epsilon(_DELTA))
        self.assertIsNone(facts["epsilon_rdp"])
        self.assertEqual(facts["max_participations"], 2)
        for key in (
            "local_not_central",
            "radius_from_unnoised_norms",
            "layers_charged_separately",
            "classic_above_one",
        ):
            self.assertIn(key, facts["caveats"])
        self.assertIn("Local differential privacy", fed.privacy_statement())

    def test_nbafl_is_per_record(self):
        fed = _trained(
            tfdp_fl.NbAFL(epsilon=50.0, constant=3.0, weight_clip=10.0),
            rounds=1,
        )
        facts = fed.privacy_statement(_DELTA, "dict")
        self.assertEqual(facts["unit"], "record")
        self.assertEqual(facts["implied_epsilon"], 50.0)
        self.assertAlmostEqual(facts["implied_delta"], 0.0139, places=4)
        self.assertIn("per_record", facts["caveats"])

    @parameterized.parameters(
        ("client", "secure_aggregation_group_noise"),
        ("server", "secure_aggregation_unnoised_groups"),
    )
    def test_secure_aggregation_says_what_groups_see(self, site, caveat):
        fed = _trained(
            tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0, noise_site=site),
            rounds=1,
            sampling="fixed_size",
            clients_per_round=40,  # All of them: nothing is amplified.
            secure_aggregation=AdditiveSecretSharing(),
        )
        caveats = fed.privacy_statement(0.1, "dict")["caveats"]
        self.assertIn("secure_aggregation", caveats)
        self.assertIn(caveat, caveats)
        self.assertLen([c for c in caveats if c.startswith("secure_a")], 2)
        self.assertEqual(
            "client_noise_needs_honest_clients" in caveats, site == "client"
        )

    def test_secure_aggregation_says_that_norms_are_seen(self):
        fed = _trained(
            tfdp_fl.MedianClipping(noise_multiplier=1.0, median_noise_multiplier=1.0),
            rounds=1,
            clients_per_round=6,
            secure_aggregation=AdditiveSecretSharing(),
        )
        caveats = fed.privacy_statement(0.1, "dict")["caveats"]
        self.assertIn("secure_aggregation_norms_seen", caveats)

    def test_a_budget_that_allows_no_round(self):
        fed = toy.federated()
        budget = tfdp_fl.callbacks.PrivacyBudget(0.01, _DELTA)
        toy.fit(fed, callbacks=[budget])
        facts = fed.privacy_statement(format="dict")
        self.assertEqual(facts["rounds"], 0)
        self.assertEqual(facts["epsilon"], 0.0)
        self.assertEqual(facts["delta"], _DELTA)

    def test_no_privacy_says_so(self):
        fed = _trained(tfdp_fl.NoPrivacy(), rounds=1)
        text = fed.privacy_statement(_DELTA)
        self.assertIn("no differential-privacy guarantee", text)
        facts = fed.privacy_statement(_DELTA, "dict")
        self.assertFalse(facts["has_guarantee"])
        self.assertIsNone(facts["epsilon"])
        self.assertEmpty(facts["caveats"])


class WhatItRestsOnTest(parameterized.TestCase):
    def test_central_number_of_shuffled_local_noise_is_for_replaced_data(self):
        fed = _trained(
            tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=4.0),
            clients_per_round=10,
            accountant="pld",
        )
        facts = fed.privacy_statement(1e-5, "dict")
        self.assertEqual(facts["relation"], "REPLACE_ONE")
        # 10 noises of 4 S each, against a sum that moves by 2 S; one pass.
        self.assertAlmostEqual(
            fed.central_epsilon(1e-5),
            accounting.gaussian_epsilon(4.0 * 10**0.5 / 2, 1e-5),
        )
        self.assertAlmostEqual(fed.central_epsilon(1e-5), 0.561, 3)
        self.assertGreaterEqual(facts["central_epsilon"], 0.561)
        self.assertIn("for the same neighbours", facts["summary"])

    def test_delta_per_record_is_compared_with_the_records(self):
        mechanism = tfdp_fl.NbAFL(epsilon=50.0, constant=3.0, weight_clip=10.0)
        fed = _trained(mechanism, rounds=1)  # 40 clients of 10 records.
        for delta, large in ((1 / 100, True), (1 / 500, False)):
            caveats = fed.privacy_statement(delta, "dict")["caveats"]
            self.assertEqual("delta_not_below_one_over_records" in caveats, large)
            self.assertNotIn("delta_not_below_one_over_n", caveats)
        self.assertIn("at most 2C/n", fed.privacy_statement())
        self.assertAlmostEqual(fed.privacy_statement(format="dict")["delta"], 400**-1.1)
