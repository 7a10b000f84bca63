"""`DPFederatedModel` is trained and used like any Keras model."""

from __future__ import annotations

import math
import tempfile

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests import stacks
from tests.keras import files, toy
from tfdp_fl.mechanisms import tf_privacy as tfp
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

_DELTA = 1e-3
_QUIET = tfdp_fl.FixedClipping(clip_norm=1e6, noise_multiplier=0.0)


def _fit(fed, rounds=1, clients=None, **options):
    return fed.fit(
        clients or toy.clients(),
        **{"rounds": rounds, "batch_size": 10, "verbose": 0, **options},
    )


def _clients_of_whom_one_fails(count):
    """Returns clients of ten examples; the fourth's cannot be read."""
    x, y = toy.arrays(10 * count)

    def read(client):
        if client == 3:
            raise OSError("no answer")
        rows = slice(10 * client, 10 * client + 10)
        return x[rows], y[rows]

    return tfdp_fl.datasets.FederatedDataset.from_client_fn(list(range(count)), read)


class KerasTest(parameterized.TestCase):
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
        history = _fit(
            fed,
            8,
            validation_data=(x, y),
            validation_freq=3,
            between_client_variance=True,
        ).history
        after = fed.evaluate(x, y, verbose=0, return_dict=True)
        self.assertGreater(after["accuracy"], before["accuracy"] + 0.2)
        self.assertEqual(
            {*history},
            {
                "loss",
                "accuracy",
                "val_loss",
                "val_accuracy",
                "cohort_size",
                "clip_norm",
                "noise_stddev",
                "clipped_fraction",
                "mean_update_norm",
                "discarded_clients",
                "failed_clients",
                "abandoned_rounds",
                "between_client_variance",
                "update_scale",
                "epsilon",
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
        with self.subTest("summary"):
            lines = []
            fed.summary(print_fn=lambda text, **_: lines.append(text))
            self.assertIn("Mechanism: DP-FedAvg with fixed", "\n".join(lines))
            self.assertIn("Rounds so far: 8", lines[-1])

    def test_standard_callbacks_work_as_they_are(self):
        path = files.directory(self)
        fed = toy.federated(compile_options={"metrics": ["accuracy"]})
        rates, seen = [], []
        keras = tf.keras.callbacks
        stop = keras.EarlyStopping(
            "val_loss", patience=1, min_delta=99.0, restore_best_weights=True
        )
        history = _fit(
            fed,
            9,
            validation_data=toy.arrays(30),
            callbacks=[
                keras.LearningRateScheduler(lambda epoch, _: 0.1 / (epoch + 1)),
                keras.LambdaCallback(
                    on_epoch_end=lambda epoch, _: (
                        rates.append(fed._compiled.learning_rate),
                        seen.append(fed.get_weights()),
                    )
                ),
                keras.ModelCheckpoint(f"{path}/{{epoch}}.keras"),
                keras.CSVLogger(f"{path}/log.csv"),
                keras.TensorBoard(f"{path}/board"),
                keras.TerminateOnNaN(),
                stop,
            ],
        )
        self.assertEqual(history.epoch, [0, 1])
        np.testing.assert_allclose(rates, [0.1, 0.05], rtol=1e-6)
        for one, other in zip(seen[0], fed.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        self.assertTrue((path / "2.keras").exists())
        rows = (path / "log.csv").read_text().splitlines()
        self.assertLen(rows, 3)
        self.assertIn("val_accuracy", rows[0])
        self.assertNotEmpty([*(path / "board").rglob("events*")])

    def test_a_rate_moves_the_clients(self):
        fed = toy.federated(_QUIET)
        before = fed.get_weights()
        stay = tf.keras.callbacks.LearningRateScheduler(lambda _: 0.0)
        _fit(fed, callbacks=[stay])
        for one, other in zip(before, fed.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_subclassed_dict_inputs_and_two_outputs(self):
        class Split(tf.keras.Model):
            def __init__(self, width=4, **kwargs):
                super().__init__(**kwargs)
                self.width = width
                self.hidden = tf.keras.layers.Dense(width, activation="relu")
                self.kind = tf.keras.layers.Dense(toy.NUM_CLASSES)
                self.size = tf.keras.layers.Dense(1)

            def call(self, inputs, training=None):
                joint = tf.concat([inputs["a"], inputs["b"]], axis=-1)
                joint = self.hidden(joint)
                return {"kind": self.kind(joint), "size": self.size(joint)}

            def get_config(self):
                return {"width": self.width}

        tf.keras.utils.set_random_seed(1)
        model = Split()
        model({"a": tf.zeros([1, 5]), "b": tf.zeros([1, 3])})
        x, y = toy.arrays(200)
        clients = tfdp_fl.datasets.FederatedDataset.from_indices(
            {"a": x[:, :5], "b": x[:, 5:]},
            {"kind": y, "size": x[:, :1]},
            np.arange(200).reshape(20, 10),
        )
        fed = toy.federated(
            _QUIET,
            model,
            clients_per_round=10,
            compile_options={
                "optimizer": tf.keras.optimizers.SGD(0.5),
                "loss": {"kind": toy.loss(), "size": "mse"},
                "loss_weights": {"kind": 1.0, "size": 0.5},
            },
        )
        self._check_learns(fed, clients)

    def test_functional_with_two_inputs(self):
        tf.keras.utils.set_random_seed(1)
        left, right = (tf.keras.layers.Input((n,)) for n in (5, 3))
        merged = tf.keras.layers.Concatenate()([left, right])
        model = tf.keras.Model(
            [left, right], tf.keras.layers.Dense(toy.NUM_CLASSES)(merged)
        )
        x, y = toy.arrays(200)
        clients = tfdp_fl.datasets.FederatedDataset.from_indices(
            (x[:, :5], x[:, 5:]), y, np.arange(200).reshape(20, 10)
        )
        fed = toy.federated(
            _QUIET,
            model,
            clients_per_round=10,
            compile_options={"optimizer": tf.keras.optimizers.SGD(0.5)},
        )
        self._check_learns(fed, clients)

    def _check_learns(self, fed, clients):
        losses = _fit(fed, 20, clients, seed=1).history["loss"]
        self.assertLess(losses[-1], 0.7 * losses[0])


class SeedTest(parameterized.TestCase):
    def test_same_seed_repeats_and_no_seed_does_not(self):
        def weights(seed):
            fed = toy.federated(
                tfdp_fl.AdaptiveClipping(noise_multiplier=0.8),
                toy.dense(dropout=0.5),
                sampling="poisson",
            )
            _fit(fed, 2, seed=seed, shuffle=True)
            return np.concatenate([w.ravel() for w in fed.get_weights()])

        first = weights(3)
        np.testing.assert_array_equal(first, weights(3))
        self.assertGreater(np.abs(first - weights(4)).max(), 1e-3)
        self.assertGreater(np.abs(weights(None) - weights(None)).max(), 1e-3)

    def test_a_second_fit_goes_on(self):
        def make():
            return toy.federated(
                tfdp_fl.AdaptiveClipping(noise_multiplier=0.8),
                compile_options={
                    "server_optimizer": tf.keras.optimizers.SGD(1.0, momentum=0.9)
                },
            )

        whole, parts = make(), make()
        clips = _fit(whole, 4, seed=1).history["clip_norm"]
        _fit(parts, 2, seed=1)
        history = _fit(parts, 2, seed=1)
        self.assertEqual(history.epoch, [2, 3])
        self.assertEqual(history.history["clip_norm"], clips[2:])
        for one, other in zip(whole.get_weights(), parts.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        self.assertEqual(whole.epsilon(_DELTA), parts.epsilon(_DELTA))
        with self.subTest("also after compile, and on other clients"):
            parts.compile("sgd", toy.loss(), jit_compile=False)
            history = _fit(parts, 1, toy.clients(30), seed=1)
            self.assertNotEqual(history.history["clip_norm"], clips[:1])
            self.assertEqual(parts.rounds, 5)
            self.assertGreater(parts.epsilon(_DELTA), whole.epsilon(_DELTA))

    def test_averaged_weights_are_what_fit_ends_with(self):
        fed = toy.federated(
            compile_options={
                "server_optimizer": tf.keras.optimizers.SGD(
                    1.0, use_ema=True, ema_momentum=0.6
                )
            }
        )
        average, seen, at_end = fed.get_weights()[0], [], []

        def note(*unused):
            seen.append(fed.get_weights()[0])

        def note_end(*unused):
            at_end.append(fed.get_weights()[0])

        notes = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=note, on_train_end=note_end
        )
        _fit(fed, 3, seed=1, callbacks=[notes])
        if stacks.KERAS_3:  # It begins with the first step's weights.
            average = seen[0]
        for weights in seen:
            average = 0.6 * average + 0.4 * weights
        self.assertGreater(np.abs(average - seen[-1]).max(), 1e-2)
        np.testing.assert_allclose(fed.get_weights()[0], average, rtol=1e-5)
        # Callbacks that save the end of training see it, as in Keras.
        np.testing.assert_array_equal(fed.get_weights()[0], *at_end)


class CohortTest(parameterized.TestCase):
    def _same_clients(self, count=40):
        """Returns clients with the very same data: updates are all equal."""
        x, y = toy.arrays(10)
        return tfdp_fl.datasets.FederatedDataset.from_indices(
            x, y, np.tile(np.arange(10), (count, 1))
        )

    def _move(self, fed, clients, **options):
        before = fed.get_weights()
        history = _fit(fed, 1, clients, **options)
        after = fed.get_weights()
        moved = [b - a for a, b in zip(before, after, strict=True)]
        return moved, int(history.history["cohort_size"][0])

    def test_denominator_is_the_expected_size(self):
        clients = self._same_clients()
        one, size = self._move(toy.federated(_QUIET), clients)
        self.assertEqual(size, 20)
        moved, size = self._move(
            toy.federated(_QUIET, sampling="poisson"), clients, seed=2
        )
        self.assertNotEqual(size, 20)
        for expected, found in zip(one, moved, strict=True):
            np.testing.assert_allclose(
                found, expected * size / 20, rtol=1e-4, atol=1e-6
            )

    def test_an_empty_cohort_is_pure_noise_and_charged(self):
        fed = toy.federated(
            tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0),
            clients_per_round=0.05,
            sampling="poisson",
        )
        moved, size = self._move(fed, toy.clients(), seed=2)
        self.assertEqual(size, 0)
        # 27 draws of N(0, (1 * 0.5 / 0.05)^2): chi-squared, alarm rate < 1e-6.
        draws = np.concatenate([each.ravel() for each in moved]) / 10.0
        self.assertBetween((draws**2).sum(), 4.0, 85.0)
        self.assertEqual(fed.spending.rounds, 1)
        self.assertGreater(fed.epsilon(1e-9), 0.0)

    def test_shuffled_sees_every_client_once_a_pass(self):
        fed = toy.federated(clients_per_round=15, sampling="shuffled")
        sizes = _fit(fed, 3).history["cohort_size"]
        self.assertEqual(sizes, [15, 15, 10])
        np.testing.assert_array_equal(fed.spending.clients.participations, np.ones(40))

    @parameterized.named_parameters(
        ("fixed", _QUIET),
        ("exact_median", tfdp_fl.MedianClipping(noise_multiplier=0.0)),
        (
            "private_median",
            tfdp_fl.MedianClipping(noise_multiplier=0.0, median_noise_multiplier=0.1),
        ),
        (
            "median_with_noise_at_the_clients",
            tfdp_fl.MedianClipping(noise_multiplier=0.1, noise_site="client"),
        ),
    )
    def test_secure_aggregation_adds_up_the_same(self, mechanism):
        plain = toy.federated(mechanism, clients_per_round=7)
        secure = toy.federated(
            mechanism,
            clients_per_round=7,
            secure_aggregation=AdditiveSecretSharing(),
        )
        start = plain.get_weights()
        for fed in (plain, secure):
            _fit(fed, 2, seed=1)
        for one, other in zip(plain.get_weights(), secure.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
        self.assertFalse(np.array_equal(start[0], plain.get_weights()[0]))

    def test_a_value_too_large_to_share_does_not_end_the_training(self):
        x, y = toy.arrays(400)
        x[13] = 1e6  # The second of 40 clients.
        clients = tfdp_fl.datasets.FederatedDataset.from_indices(
            x, y, np.arange(400).reshape(40, 10)
        )
        fed = toy.federated(
            tfdp_fl.NoPrivacy(),
            clients_per_round=40,
            secure_aggregation=AdditiveSecretSharing(),
        )
        before = fed.get_weights()
        with self.assertWarnsRegex(UserWarning, "1 of 40.*max_share_value=100"):
            history = _fit(fed, 1, clients).history
        self.assertEqual(history["discarded_clients"], [1.0])
        self.assertEqual(history["failed_clients"], [0.0])
        for one, other in zip(before, fed.get_weights(), strict=True):
            self.assertLess(np.abs(one - other).max(), 1.0)

    def test_a_query_with_sums_of_its_own_is_refused(self):
        fed = toy.federated(
            tfdp_fl.QueryMechanism(
                query=tfp.QuantileAdaptiveClipSumQuery(1.0, 1.0, 0.5, 0.2, 2.0, 7.0),
                dp_event=dp_accounting.GaussianDpEvent(0.9),
            ),
            clients_per_round=7,
            secure_aggregation=AdditiveSecretSharing(),
        )
        with self.assertRaisesRegex(ValueError, "use tfdp_fl.AdaptiveClip"):
            _fit(fed, 1)

    def test_a_local_release_too_large_to_share_is_left_out_of_the_mean(self):
        fed = toy.federated(
            tfdp_fl.LocalDP(clip_norm=1e4, noise_multiplier=1.0),
            clients_per_round=7,
            secure_aggregation=AdditiveSecretSharing(),
        )
        before = fed.get_weights()
        with self.assertWarnsRegex(UserWarning, "7 of 7.*hand in zeros"):
            history = _fit(fed, 1).history
        self.assertEqual(history["discarded_clients"], [7.0])
        np.testing.assert_array_equal(before[0], fed.get_weights()[0])
        # What each sent has its noise; the mean lacks that of all.
        self.assertTrue(math.isfinite(fed.epsilon(_DELTA)))
        self.assertEqual(fed.spending.central_epsilon(_DELTA), math.inf)

    def test_what_a_client_counts_must_fit_into_a_share(self):
        with self.assertRaisesRegex(
            ValueError, "secure_aggregation must have a max_share_value.*0.5"
        ):
            toy.federated(secure_aggregation=AdditiveSecretSharing(max_share_value=0.5))

    def test_a_client_whose_noise_is_missing_has_failed(self):
        fed = toy.federated(
            tfdp_fl.FixedClipping(
                clip_norm=1e4, noise_multiplier=1.0, noise_site="client"
            ),
            clients_per_round=7,
            secure_aggregation=AdditiveSecretSharing(),
        )
        before = fed.get_weights()
        with self.assertWarnsRegex(UserWarning, "lacks their noise"):
            history = _fit(fed, 1).history
        self.assertEqual(history["abandoned_rounds"], [1.0])
        self.assertEqual(fed.epsilon(_DELTA), 0.0)
        np.testing.assert_array_equal(before[0], fed.get_weights()[0])

    def test_a_nan_client_is_dropped_and_reported(self):
        x, y = toy.arrays(400)
        x[13] = np.nan
        clients = tfdp_fl.datasets.FederatedDataset.from_indices(
            x, y, np.arange(400).reshape(40, 10)
        )
        fed = toy.federated(clients_per_round=40)
        history = _fit(fed, 1, clients).history
        self.assertEqual(history["discarded_clients"], [1.0])
        for weight in fed.get_weights():
            self.assertTrue(np.isfinite(weight).all())

    @parameterized.parameters("exclude", "abort")
    def test_a_client_that_fails(self, rule):
        clients = _clients_of_whom_one_fails(40)
        fed = toy.federated(
            _QUIET if rule == "exclude" else None,
            clients_per_round=20,
            sampling="shuffled",
            on_client_failure=rule,
        )
        before = fed.get_weights()
        history = _fit(fed, 2, clients, seed=1).history
        self.assertCountEqual(history["failed_clients"], [0.0, 1.0])
        failed = history["failed_clients"].index(1.0)
        if rule == "exclude":
            self.assertEqual(history["abandoned_rounds"], [0.0, 0.0])
            self.assertEqual(fed.spending.rounds, 2)
            return
        self.assertEqual(history["abandoned_rounds"][failed], 1.0)
        self.assertTrue(math.isnan(history["loss"][failed]))
        self.assertEqual(fed.rounds, 2)
        self.assertEqual(fed.spending.rounds, 1)
        facts = fed.privacy_statement(0.1, "dict")
        self.assertIn("rounds_abandoned", facts["caveats"])
        self.assertEqual(facts["cohort_sizes"]["count"], 1)
        self.assertGreater(np.abs(before[0] - fed.get_weights()[0]).max(), 0.0)

    @parameterized.parameters(
        (tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=2.0), 3),
        (tfdp_fl.NbAFL(epsilon=9.0, constant=3.0, weight_clip=5.0), 3),
        (tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=2.0), 0),
    )
    def test_what_clients_sent_in_abandoned_rounds_is_charged(self, mechanism, charged):
        clients = _clients_of_whom_one_fails(20)
        folder = self.enter_context(tempfile.TemporaryDirectory())
        path = f"{folder}/ledger.jsonl"
        fed = toy.federated(mechanism, clients_per_round=20, on_client_failure="abort")
        before = fed.get_weights()
        history = _fit(
            fed, 3, clients, callbacks=[tfdp_fl.callbacks.Ledger(path)]
        ).history
        self.assertEqual(history["abandoned_rounds"], [1.0] * 3)
        np.testing.assert_array_equal(before[0], fed.get_weights()[0])
        self.assertEqual(fed.spending.rounds, charged)
        self.assertEqual(fed.spending.clients.max_participations, charged)
        delta = mechanism.implied_delta or _DELTA
        self.assertEqual(fed.epsilon(delta) > 0, charged > 0)
        facts = fed.privacy_statement(delta, "dict")
        wanted = "rounds_abandoned_charged" if charged else "rounds_abandoned"
        self.assertIn(wanted, facts["caveats"])
        known = tfdp_fl.accounting.PrivacyLedger.read(path)
        self.assertLen(known.entries, charged)

    def test_streamed_clients_train_as_indexed_ones(self):
        indexed = toy.clients()
        streamed = tfdp_fl.datasets.FederatedDataset.from_client_fn(
            list(range(40)), lambda client: indexed.client(client)
        )
        one, other = toy.federated(_QUIET), toy.federated(_QUIET)
        _fit(one, 2, indexed, seed=1)
        _fit(other, 2, streamed, seed=1)
        for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


class ErrorTest(parameterized.TestCase):
    """One sentence each, that names the argument."""

    def _assert_refused(self, error, message, function):
        with self.assertRaisesRegex(error, message) as caught:
            function()
        self.assertNotIn("\n", str(caught.exception).strip())

    @parameterized.named_parameters(
        ("sampling", {"sampling": "all"}, "sampling must be one of"),
        ("size", {"clients_per_round": 0}, "clients_per_round must be a pos"),
        ("delta", {"delta": 1.0}, "delta must be a number strictly between"),
        ("rule", {"on_client_failure": "retry"}, "on_client_failure must be"),
        ("state", {"non_trainable_state": "x"}, "non_trainable_state must be"),
        ("replicas", {"num_replicas": 0}, "num_replicas must be an integer"),
        ("accountant", {"accountant": "x"}, "accountant must be one of"),
        (
            "noise at clients under poisson",
            {
                "mechanism": tfdp_fl.FixedClipping(
                    clip_norm=1.0, noise_multiplier=1.0, noise_site="client"
                ),
                "sampling": "poisson",
            },
            "noise_site='client' needs sampling='fixed_size'",
        ),
        (
            "noise at clients without all of them",
            {
                "mechanism": tfdp_fl.FixedClipping(
                    clip_norm=1.0, noise_multiplier=1.0, noise_site="client"
                ),
                "on_client_failure": "exclude",
            },
            "on_client_failure must be 'abort'",
        ),
        (
            "count noise",
            {
                "mechanism": tfdp_fl.AdaptiveClipping(noise_multiplier=2.0),
                "clients_per_round": 20,
            },
            "noise_multiplier must be less than 2 . count_noise_stddev",
        ),
    )
    def test_construction(self, options, message):
        self._assert_refused(ValueError, message, lambda: toy.federated(**options))

    def test_models_that_cannot_be_trained(self):
        unbuilt = tf.keras.Sequential([tf.keras.layers.Dense(2)])
        fixed = tf.keras.Sequential([tf.keras.layers.Flatten(input_shape=(8,))])
        for model, message in (
            (unbuilt, "model must be built"),
            (fixed, "model must have trainable variables"),
        ):
            self._assert_refused(
                ValueError, message, lambda m=model: toy.federated(model=m)
            )
        self._assert_refused(
            TypeError,
            "model must be a Model",
            lambda: tfdp_fl.DPFederatedModel("x", _QUIET, 5),
        )
        self._assert_refused(
            TypeError,
            "mechanism must be a Mechanism",
            lambda: tfdp_fl.DPFederatedModel(toy.dense(), "fixed", 5),
        )

    @parameterized.named_parameters(
        ("rounds", {"rounds": 0}, "rounds must be an integer of at least 1"),
        ("batch", {"batch_size": 0}, "batch_size must be an integer"),
        ("epochs", {"local_epochs": -1}, "local_epochs must be an integer"),
        ("freq", {"validation_freq": 0}, "validation_freq must be an integer"),
        ("seed", {"seed": -1}, "seed must be an integer of at least 0"),
    )
    def test_fit(self, options, message):
        fed = toy.federated()
        self._assert_refused(ValueError, message, lambda: _fit(fed, **options))

    def test_fit_refuses_what_does_not_belong_together(self):
        fed = toy.federated(clients_per_round=41)
        self._assert_refused(
            ValueError, "clients_per_round .*40.* got 41", lambda: _fit(fed)
        )
        self._assert_refused(
            TypeError,
            "clients must be a FederatedDataset",
            lambda: fed.fit(toy.arrays(5)),
        )
        short = toy.federated(clients_per_round=[20, 20])
        self._assert_refused(
            ValueError,
            "clients_per_round is a sequence of 2 values",
            lambda: _fit(short, 3),
        )
        x, _ = toy.arrays(40)
        wrong = tfdp_fl.datasets.FederatedDataset.from_indices(
            x, x[:, :2], np.arange(40).reshape(20, 2)
        )
        self._assert_refused(
            ValueError,
            "labels must have the shape",
            lambda: _fit(toy.federated(), 1, wrong),
        )
        for model in (fed, short):
            self.assertEqual(model.rounds, 0)
            self.assertEqual(model.epsilon(_DELTA), 0.0)

    def test_uncompiled(self):
        fed = tfdp_fl.DPFederatedModel(toy.dense(), _QUIET, 5)
        self._assert_refused(
            RuntimeError, "compile must be called before fit", lambda: _fit(fed)
        )
        self._assert_refused(
            ValueError, "loss must be given", lambda: fed.compile("sgd")
        )
        self._assert_refused(
            TypeError,
            "upload_hook must be callable",
            lambda: fed.compile("sgd", "mse", upload_hook=1),
        )
        with self.assertRaisesRegex(ValueError, "delta must be a number str"):
            fed.epsilon(0.0)


class PopulationTest(parameterized.TestCase):
    """Clients are told apart by their ids, not by their number alone."""

    def _datasets(self):
        clients = toy.clients()
        order = np.roll(np.arange(toy.NUM_CLIENTS), 1)
        return clients, clients.take(order)

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
        clients, other = self._datasets()
        fed = toy.federated(mechanism, sampling=sampling)
        fed.fit(clients, rounds=1, verbose=0)
        spent, weights = fed.epsilon(1e-3), fed.get_weights()
        for wrong, got in ((other, "other ids,"), (toy.clients(41), "41")):
            with self.assertRaisesRegex(
                ValueError, f"clients must be the same 40 .*{why}.*got {got}"
            ):
                fed.fit(wrong, rounds=1, verbose=0)
        self.assertEqual(fed.epsilon(1e-3), spent)
        for one, now in zip(weights, fed.get_weights(), strict=True):
            np.testing.assert_array_equal(one, now)
        # The same ids in another object are the same clients.
        fed.fit(toy.clients(), rounds=1, verbose=0)
        self.assertEqual(fed.rounds, 2)

    def test_between_passes_the_order_may_change(self):
        clients, other = self._datasets()
        fed = toy.federated(sampling="shuffled")
        fed.fit(clients, rounds=2, verbose=0)
        fed.fit(other, rounds=1, verbose=0)
        self.assertEqual(fed.rounds, 3)

    @parameterized.parameters("poisson", "fixed_size")
    def test_central_cohorts_may_come_from_several_populations(self, sampling):
        fed = toy.federated(sampling=sampling)
        fed.fit(toy.clients(40), rounds=1, verbose=0)
        fed.fit(toy.clients(30), rounds=1, verbose=0)
        fed.fit(toy.clients(40), rounds=1, verbose=0)
        facts = fed.privacy_statement(1e-3, "dict")
        self.assertEqual(facts["populations"], [40, 30])
        self.assertIn("N = 40, then 30", facts["how"])


class SchedulesTest(parameterized.TestCase):
    def test_a_round_is_charged_for_the_noise_and_cohort_it_had(self):
        draws = iter(range(10**6))

        def impure(t):
            return 1.0 + next(draws) % 7

        fed = toy.federated(
            tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=impure),
            clients_per_round=lambda t: 5 + next(draws) % 11,
            sampling="fixed_size",
        )
        charged = []

        class Watch(tfdp_fl.callbacks.FederatedCallback):
            def on_round_charged(self, round_index, charge, details):
                charged.append((charge, details))

        history = fed.fit(
            toy.clients(), rounds=6, verbose=0, callbacks=[Watch()]
        ).history
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

    def test_the_mechanism_of_a_model_is_the_one_it_was_made_with(self):
        fed = toy.federated()
        with self.assertRaises(AttributeError):
            fed.mechanism = tfdp_fl.NoPrivacy()
        self.assertEqual(fed.mechanism.name, "FixedClipping")


class CalibrationTest(absltest.TestCase):
    def test_a_second_fit_of_a_local_budget_keeps_its_noise_and_says_so(self):
        fed = toy.federated(
            tfdp_fl.LocalDP(clip_norm=0.5, epsilon=8.0, delta=1e-3),
            clients_per_round=40,
        )
        fed.fit(toy.clients(), rounds=2, verbose=0)
        one = fed.spending.max_mu_squared
        with self.assertWarnsRegex(
            RuntimeWarning, "goes beyond the 2 rounds .* epsilon=8"
        ):
            fed.fit(toy.clients(), rounds=2, verbose=0)
        self.assertAlmostEqual(fed.spending.max_mu_squared, 2 * one)
        self.assertGreater(fed.epsilon(1e-3), 12.0)


if __name__ == "__main__":
    absltest.main()
