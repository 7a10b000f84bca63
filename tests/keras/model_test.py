"""`DPFederatedModel` is trained and used like any Keras model."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import files, toy
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras import callbacks
from tfdp_fl.mechanisms import tf_privacy as tfp
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

_DELTA = 1e-3
_QUIET = tfdp_fl.FixedClipping(clip_norm=1e6, noise_multiplier=0.0)
_AT_CLIENTS = tfdp_fl.FixedClipping(
    clip_norm=1.0, noise_multiplier=1.0, noise_site="client"
)


def _dropout():
    return toy.dense(dropout=0.5)


def _clients_of_whom_one_fails(count):
    """Returns clients of ten examples; the fourth's cannot be read."""

    whole = toy.clients(count)

    def read(client):
        if client == 3:
            raise OSError("no answer")
        return whole.client(client)

    return FederatedDataset.from_client_fn(list(range(count)), read)


class KerasTest(absltest.TestCase):
    def test_learns_reports_saves_and_loads(self):
        fed = toy.federated(
            tfdp_fl.FixedClipping(clip_norm=2.0, noise_multiplier=0.2),
            delta=_DELTA,
            compile_options={
                "optimizer": tf.keras.optimizers.SGD(0.5),
                "metrics": ["accuracy"],
            },
        )
        x, y = toy.arrays(200, seed=9)
        before = fed.evaluate(x, y, verbose=0, return_dict=True)
        validation = {"validation_data": (x, y), "validation_freq": 3}
        history = toy.fit(fed, 8, between_client_variance=True, **validation).history
        after = fed.evaluate(x, y, verbose=0, return_dict=True)
        self.assertGreater(after["accuracy"], before["accuracy"] + 0.2)
        self.assertEqual(
            {*history},
            {
                *("loss", "accuracy", "val_loss", "val_accuracy", "cohort_size"),
                *("clip_norm", "noise_stddev", "clipped_fraction", "epsilon"),
                *("mean_update_norm", "discarded_clients", "failed_clients"),
                *("abandoned_rounds", "between_client_variance", "update_scale"),
            },
        )
        self.assertLen(history["loss"], 8)
        self.assertLen(history["val_loss"], 3)  # Rounds 3, 6 and the last.
        self.assertEqual(history["val_accuracy"][-1], after["accuracy"])
        self.assertEqual(history["cohort_size"], [20.0] * 8)
        self.assertEqual(history["clip_norm"], [2.0] * 8)
        np.testing.assert_allclose(history["noise_stddev"], 0.4, rtol=1e-6)
        self.assertEqual(history["epsilon"][-1], fed.epsilon(_DELTA))
        self.assertLess(history["loss"][-1], history["loss"][0])
        with self.subTest("saved, it is a Keras model and nothing else"):
            path = files.directory(self) / "model.keras"
            fed.save(path)
            loaded = tf.keras.models.load_model(path)
            self.assertNotIn(b"tfdp", path.read_bytes())
            np.testing.assert_allclose(
                loaded.predict(x, verbose=0), fed.predict(x, verbose=0)
            )
            np.testing.assert_allclose(fed(x[:4]), loaded(x[:4]))

    def test_standard_callbacks_work_as_they_are(self):
        path = files.directory(self)
        fed = toy.federated(compile_options={"metrics": ["accuracy"]})
        rates, seen = [], []
        keras = tf.keras.callbacks

        def note(*_):
            rates.append(fed.require_compiled("it").learning_rate)
            seen.append(fed.get_weights())

        given = [
            keras.LearningRateScheduler(lambda epoch, _: 0.1 / (epoch + 1)),
            keras.LambdaCallback(on_epoch_end=note),
            keras.ModelCheckpoint(f"{path}/{{epoch}}.keras"),
            keras.CSVLogger(f"{path}/log.csv"),
            keras.TensorBoard(f"{path}/board"),
            keras.TerminateOnNaN(),
            keras.EarlyStopping(
                "val_loss", patience=1, min_delta=99.0, restore_best_weights=True
            ),
        ]
        history = toy.fit(fed, 9, given, validation_data=toy.arrays(30))
        self.assertEqual(history.epoch, [0, 1])
        np.testing.assert_allclose(rates, [0.1, 0.05], rtol=1e-6)
        toy.assert_same(seen[0], fed)
        self.assertTrue((path / "2.keras").exists())
        rows = (path / "log.csv").read_text().splitlines()
        self.assertLen(rows, 3)
        self.assertIn("val_accuracy", rows[0])
        self.assertNotEmpty([*(path / "board").rglob("events*")])


class SeedTest(absltest.TestCase):
    def test_same_seed_repeats_and_no_seed_does_not(self):
        def weights(seed):
            fed = toy.federated(
                tfdp_fl.AdaptiveClipping(noise_multiplier=0.8),
                _dropout,
                sampling="poisson",
            )
            toy.fit(fed, 2, seed=seed, shuffle=True)
            trained = toy.flat(fed)
            toy.give_back(fed)
            return trained

        first = weights(3)
        np.testing.assert_array_equal(first, weights(3))
        self.assertGreater(np.abs(first - weights(4)).max(), 1e-3)
        self.assertGreater(np.abs(weights(None) - weights(None)).max(), 1e-3)

    def test_a_second_fit_goes_on(self):
        def make():
            optimizer = tf.keras.optimizers.SGD(1.0, momentum=0.9)
            return toy.federated(
                tfdp_fl.AdaptiveClipping(noise_multiplier=0.8),
                compile_options={"server_optimizer": optimizer},
            )

        whole = make()
        clips = toy.fit(whole, 4, seed=1).history["clip_norm"]
        weights, spent = whole.get_weights(), whole.epsilon(_DELTA)
        toy.give_back(whole)
        parts = make()
        toy.fit(parts, 2, seed=1)
        history = toy.fit(parts, 2, seed=1)
        self.assertEqual(history.epoch, [2, 3])
        self.assertEqual(history.history["clip_norm"], clips[2:])
        toy.assert_same(weights, parts)
        self.assertEqual(parts.epsilon(_DELTA), spent)
        with self.subTest("also after compile, and on other clients"):
            parts.compile("sgd", toy.loss(), jit_compile=False)
            history = toy.fit(parts, 1, data=toy.clients(30), seed=1)
            self.assertNotEqual(history.history["clip_norm"], clips[:1])
            self.assertEqual(parts.rounds, 5)
            self.assertGreater(parts.epsilon(_DELTA), spent)

    def test_averaged_weights_are_what_fit_ends_with(self):
        averaging = tf.keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.6)
        fed = toy.federated(compile_options={"server_optimizer": averaging})
        seen, at_end = [], []
        notes = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: seen.append(fed.get_weights()[0]),
            on_train_end=lambda *_: at_end.append(fed.get_weights()[0]),
        )
        toy.fit(fed, 3, [notes], seed=1)
        average = seen[0]  # It begins with the first step's weights.
        for weights in seen:
            average = 0.6 * average + 0.4 * weights
        self.assertGreater(np.abs(average - seen[-1]).max(), 1e-2)
        np.testing.assert_allclose(fed.get_weights()[0], average, rtol=1e-5)
        # Callbacks that save the end of training see it, as in Keras.
        np.testing.assert_array_equal(fed.get_weights()[0], *at_end)


class CohortTest(parameterized.TestCase):
    def test_an_empty_cohort_is_pure_noise_and_charged(self):
        fed = toy.federated(clients_per_round=0.05, sampling="poisson")
        before = toy.flat(fed)
        self.assertEqual(toy.fit(fed, seed=2).history["cohort_size"], [0])
        # 27 draws of N(0, (1 * 0.5 / 0.05)^2): chi-squared, alarm rate < 1e-6.
        draws = (toy.flat(fed) - before) / 10.0
        self.assertBetween((draws**2).sum(), 4.0, 85.0)
        self.assertEqual(fed.spending.rounds, 1)
        self.assertGreater(fed.epsilon(1e-9), 0.0)

    @parameterized.parameters("exclude", "abort")
    def test_a_client_that_fails(self, rule):
        fed = toy.federated(
            _QUIET if rule == "exclude" else None,
            sampling="shuffled",
            on_client_failure=rule,
        )
        before = toy.flat(fed)
        data = _clients_of_whom_one_fails(40)
        history = toy.fit(fed, 2, data=data, seed=1).history
        self.assertCountEqual(history["failed_clients"], [0.0, 1.0])
        failed = history["failed_clients"].index(1.0)
        facts = fed.privacy_statement(0.1, "dict")
        if rule == "exclude":
            self.assertEqual(history["abandoned_rounds"], [0.0, 0.0])
            self.assertEqual(fed.spending.rounds, 2)
            self.assertIn("clients_excluded", facts["caveats"])
            return
        self.assertEqual(history["abandoned_rounds"][failed], 1.0)
        self.assertTrue(math.isnan(history["loss"][failed]))
        self.assertEqual((fed.rounds, fed.spending.rounds), (2, 1))
        self.assertIn("rounds_abandoned", facts["caveats"])
        self.assertEqual(facts["cohort_sizes"]["count"], 1)
        self.assertGreater(np.abs(before - toy.flat(fed)).max(), 0.0)

    @parameterized.parameters(
        (tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=2.0), 3),
        (tfdp_fl.NbAFL(epsilon=9.0, constant=3.0, weight_clip=5.0), 3),
        (tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=2.0), 0),
    )
    def test_what_clients_sent_in_abandoned_rounds_is_charged(self, mechanism, charged):
        path = files.directory(self) / "ledger.jsonl"
        fed = toy.federated(mechanism, on_client_failure="abort")
        before, data = fed.get_weights(), _clients_of_whom_one_fails(20)
        history = toy.fit(fed, 3, [callbacks.Ledger(path)], data).history
        self.assertEqual(history["abandoned_rounds"], [1.0] * 3)
        toy.assert_same(before, fed)
        self.assertEqual(fed.spending.rounds, charged)
        self.assertEqual(fed.spending.clients.max_participations, charged)
        delta = mechanism.implied_delta or _DELTA
        self.assertEqual(fed.epsilon(delta) > 0, charged > 0)
        facts = fed.privacy_statement(delta, "dict")
        wanted = "rounds_abandoned_charged" if charged else "rounds_abandoned"
        self.assertIn(wanted, facts["caveats"])
        known = tfdp_fl.accounting.PrivacyLedger.read(path)
        self.assertLen(known.entries, charged)
        if charged:  # What is said of the client that was seen most.
            self.assertAlmostEqual(known.epsilon(delta), fed.epsilon(delta), places=9)


class SecureAggregationTest(parameterized.TestCase):
    def _federated(self, mechanism, size=7):
        return toy.federated(
            mechanism, None, size, secure_aggregation=AdditiveSecretSharing()
        )

    @parameterized.parameters(
        _QUIET, tfdp_fl.MedianClipping(noise_multiplier=0.1, noise_site="client")
    )
    def test_adds_up_the_same(self, mechanism):
        plain = toy.federated(mechanism, clients_per_round=7)
        secure = self._federated(mechanism)
        start = toy.flat(plain)
        for fed in (plain, secure):
            toy.fit(fed, 2, seed=1)
        np.testing.assert_allclose(toy.flat(plain), toy.flat(secure), atol=1e-6)
        self.assertFalse(np.array_equal(start, toy.flat(plain)))

    def test_a_value_too_large_to_share_does_not_end_the_training(self):
        x, y = toy.arrays(400)
        x[13] = 1e6  # The second of 40 clients.
        clients = FederatedDataset.from_indices(x, y, np.arange(400).reshape(40, 10))
        fed = self._federated(tfdp_fl.NoPrivacy(), 40)
        before = toy.flat(fed)
        with self.assertWarnsRegex(UserWarning, "1 of 40.*max_share_value=100"):
            history = toy.fit(fed, data=clients).history
        self.assertEqual(history["discarded_clients"], [1.0])
        self.assertEqual(history["failed_clients"], [0.0])
        self.assertLess(np.abs(before - toy.flat(fed)).max(), 1.0)

    def test_a_local_release_too_large_to_share_is_left_out_of_the_mean(self):
        fed = self._federated(tfdp_fl.LocalDP(clip_norm=1e4, noise_multiplier=1.0))
        before = fed.get_weights()
        with self.assertWarnsRegex(UserWarning, "7 of 7.*upload zeros"):
            history = toy.fit(fed).history
        self.assertEqual(history["discarded_clients"], [7.0])
        toy.assert_same(before, fed)
        # What each sent has its noise; the mean lacks that of all.
        self.assertTrue(math.isfinite(fed.epsilon(_DELTA)))
        self.assertEqual(fed.central_epsilon(_DELTA), math.inf)

    def test_a_client_whose_noise_is_missing_has_failed(self):
        fed = self._federated(
            tfdp_fl.FixedClipping(
                clip_norm=1e4, noise_multiplier=1.0, noise_site="client"
            )
        )
        before = fed.get_weights()
        with self.assertWarnsRegex(UserWarning, "lacks their noise"):
            history = toy.fit(fed).history
        self.assertEqual(history["abandoned_rounds"], [1.0])
        self.assertEqual(fed.epsilon(_DELTA), 0.0)
        toy.assert_same(before, fed)

    def test_what_is_refused(self):
        with self.assertRaisesRegex(ValueError, "max_share_value of at least.*0.5"):
            toy.federated(secure_aggregation=AdditiveSecretSharing(max_share_value=0.5))
        query = tfdp_fl.QueryMechanism(
            query=tfp.QuantileAdaptiveClipSumQuery(1.0, 1.0, 0.5, 0.2, 2.0, 7.0),
            dp_event=dp_accounting.GaussianDpEvent(0.9),
        )
        with self.assertRaisesRegex(ValueError, "use tfdp_fl.AdaptiveClip"):
            toy.fit(self._federated(query))


class ErrorTest(parameterized.TestCase):
    """One sentence each, that names the argument."""

    @parameterized.parameters(
        ({"on_client_failure": "retry"}, "on_client_failure must be"),
        ({"non_trainable_state": "x"}, "non_trainable_state must be"),
        ({"num_replicas": 0}, "num_replicas must be an integer"),
        (
            {"mechanism": _AT_CLIENTS, "sampling": "poisson"},
            "noise_site='client' needs sampling='fixed_size'",
        ),
        (
            {"mechanism": _AT_CLIENTS, "on_client_failure": "exclude"},
            "on_client_failure must be 'abort'",
        ),
        (
            {"mechanism": tfdp_fl.AdaptiveClipping(noise_multiplier=2.0)},
            "noise_multiplier must be less than 2 . count_noise_stddev",
        ),
    )
    def test_construction(self, options, message):
        with self.assertRaisesRegex(ValueError, message):
            toy.federated(**options)

    def test_a_fit_that_is_refused_changes_nothing(self):
        fed = toy.federated(clients_per_round=[20, 20])
        toy.fit(fed)
        run, spent, before = fed.run, fed.epsilon(_DELTA), fed.get_weights()
        for message, fit in (
            ("clients_per_round is a sequence of 2", {"rounds": 3}),
            ("seed must be an integer", {"seed": -1}),
            ("clients_per_round .*19.* got 20", {"data": toy.clients(19)}),
        ):
            with self.assertRaisesRegex(ValueError, message):
                toy.fit(fed, **fit)
        self.assertIs(fed.run, run)
        self.assertEqual((fed.rounds, fed.epsilon(_DELTA)), (1, spent))
        toy.assert_same(before, fed)


class PopulationTest(parameterized.TestCase):
    """Clients are told apart by their ids, not by their number alone."""

    def setUp(self):
        super().setUp()
        self.other = toy.clients().take(np.roll(np.arange(toy.NUM_CLIENTS), 1))

    @parameterized.named_parameters(
        (
            "local",
            tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=4.0),
            "fixed_size",
            "kept for each client",
        ),
        ("in a pass", None, "shuffled", "round 2 goes on with a pass"),
    )
    def test_another_order_is_refused(self, mechanism, sampling, why):
        fed = toy.federated(mechanism, sampling=sampling)
        toy.fit(fed)
        spent, weights = fed.epsilon(1e-3), fed.get_weights()
        for wrong, got in ((self.other, "other ids,"), (toy.clients(41), "41")):
            with self.assertRaisesRegex(
                ValueError, f"clients must be the same 40 .*{why}.*got {got}"
            ):
                toy.fit(fed, data=wrong)
        self.assertEqual(fed.epsilon(1e-3), spent)
        toy.assert_same(weights, fed)
        # The same ids in another object are the same clients.
        toy.fit(fed)
        self.assertEqual(fed.rounds, 2)

    def test_between_passes_the_order_may_change(self):
        fed = toy.federated(sampling="shuffled")
        toy.fit(fed, 2)
        toy.fit(fed, data=self.other)
        self.assertEqual(fed.rounds, 3)

    def test_central_cohorts_may_come_from_several_populations(self):
        fed = toy.federated(sampling="poisson")
        for size in (40, 30, 40):
            toy.fit(fed, data=toy.clients(size))
        facts = fed.privacy_statement(1e-3, "dict")
        self.assertEqual(facts["populations"], [40, 30])
        self.assertIn("N = 40, then 30", facts["how"])


class ChargedAsItRanTest(absltest.TestCase):
    def test_a_round_is_charged_for_the_noise_and_cohort_it_had(self):
        draws = iter(range(10**6))
        fed = toy.federated(
            tfdp_fl.FixedClipping(
                clip_norm=0.5, noise_multiplier=lambda t: 1.0 + next(draws) % 7
            ),
            clients_per_round=lambda t: 5 + next(draws) % 11,
        )
        charged = []

        class Watch(callbacks.FederatedCallback):
            def on_round_charged(self, round_index, charge, details):
                charged.append((charge, details))

        history = toy.fit(fed, 6, [Watch()]).history
        for t, (charge, details) in enumerate(charged):
            z = charge.noise_multiplier
            self.assertEqual(details["noise_multiplier"], z)
            self.assertAlmostEqual(history["noise_stddev"][t], 0.5 * z, 5)
            self.assertEqual(charge.clients_per_round, details["cohort_size"])
        noise = [charge.noise_multiplier for charge, _ in charged]
        parameters = fed.privacy_statement(1e-3, "dict")["mechanism_parameters"]
        self.assertEqual(
            parameters["noise_multiplier"],
            f"{min(noise):g} to {max(noise):g} (scheduled)",
        )

    def test_a_second_fit_of_a_local_budget_keeps_its_noise_and_says_so(self):
        fed = toy.federated(
            tfdp_fl.LocalDP(clip_norm=0.5, epsilon=8.0, delta=1e-3),
            clients_per_round=40,
        )
        toy.fit(fed, 2)
        one = fed.spending.max_mu_squared
        with self.assertWarnsRegex(
            RuntimeWarning, "goes beyond the 2 rounds .* epsilon=8"
        ):
            toy.fit(fed, 2)
        self.assertAlmostEqual(fed.spending.max_mu_squared, 2 * one)
        self.assertGreater(fed.epsilon(1e-3), 12.0)
