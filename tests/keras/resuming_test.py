"""An interrupted and resumed run goes on where it was, bit for bit.

But for the draws of seeded rounds, which a resumed run makes anew; see
`toy.same_draws_when_resumed`.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import files, toy
from tfdp_fl import engine
from tfdp_fl.keras import callbacks, resuming

_DELTA = 1e-3
_ROUNDS = 6
_FIT = {"rounds": _ROUNDS, "batch_size": 4, "shuffle": True, "verbose": 0}


def _dropout():
    return toy.dense(dropout=0.3)


def _normalized():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8,)),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.Dense(toy.NUM_CLASSES),
        ]
    )
    model.set_weights([np.full(w.shape, 0.3) for w in model.weights])
    return model


def _adaptive():
    return toy.federated(
        tfdp_fl.AdaptiveClipping(noise_multiplier=0.8),
        _dropout,
        clients_per_round=15,
        sampling="shuffled",
        num_replicas=2,
        compile_options={
            "server_optimizer": tf.keras.optimizers.SGD(1.0, momentum=0.9)
        },
    )


def _local():
    return toy.federated(
        tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=_DELTA, max_participations=4),
        compile_options={"optimizer": tf.keras.optimizers.Adam(0.01)},
    )


def _median():
    return toy.federated(
        tfdp_fl.MedianClipping(
            noise_multiplier=tuple(0.5 + t / 10 for t in range(_ROUNDS)),
            median_noise_multiplier=2.0,
        ),
        _normalized,
        clients_per_round=lambda t: 10 + t,
        sampling="poisson",
        compile_options={"server_optimizer": tf.keras.optimizers.Adam(0.05)},
    )


def _averaged():
    return toy.federated(
        compile_options={
            "server_optimizer": tf.keras.optimizers.SGD(
                1.0, use_ema=True, ema_momentum=0.6
            )
        },
    )


class _Crash(tf.keras.callbacks.Callback):
    """Raises in a round; or once it is charged and before it is saved."""

    def __init__(self, round_index: int):
        super().__init__()
        self._round = round_index

    def on_train_batch_end(self, batch, logs=None):
        if self.federated.rounds == self._round + 1:
            raise KeyboardInterrupt


def _decay(rate: float):
    return tf.keras.optimizers.schedules.ExponentialDecay(rate, 100, 0.9)


def _halving(epoch: int, rate: float) -> float:
    del epoch
    return rate * 0.9


class ResumeTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = files.directory(self) / "run"

    def _copy_as_of(self, directory: pathlib.Path, round_index: int):
        """Copies a finished run as if it had been killed after a round."""
        copy = directory.with_name(f"killed-{round_index}")
        shutil.copytree(directory, copy)
        for file in copy.glob("round-*.npz"):
            if int(file.stem.split("-")[1]) > round_index:
                file.unlink()
        return copy

    @parameterized.named_parameters(
        ("adaptive", _adaptive),
        ("local", _local),
        ("median", _median),
        ("averaged", _averaged),
    )
    @toy.same_draws_when_resumed()
    def test_resumed_ends_in_the_same_weights(self, make):
        clients = toy.clients()
        whole = make()
        whole.fit(
            clients,
            seed=5,
            callbacks=[
                tfdp_fl.callbacks.RoundCheckpoint(self.path, keep=99, delta=_DELTA),
                tf.keras.callbacks.LearningRateScheduler(_halving),
            ],
            **_FIT,
        )
        copy = self._copy_as_of(self.path, 3)
        weights, spent = whole.get_weights(), whole.epsilon(_DELTA)
        toy.give_back(whole)
        resumed = make()
        history = resumed.fit(
            clients,
            seed=5,
            callbacks=[tf.keras.callbacks.LearningRateScheduler(_halving)],
            resume_from=copy,
            **_FIT,
        )
        self.assertEqual(history.epoch, [3, 4, 5])
        self.assertEqual(resumed.rounds, _ROUNDS)
        self.assertTrue(resumed.run.facts.seed_given)
        toy.assert_same(weights, resumed)
        # Rounds 3 to 5 may have been seen before the crash: charged twice.
        contents = tfdp_fl.accounting.PrivacyLedger.read(copy / "ledger.jsonl")
        self.assertEqual(
            [entry.round_index for entry in contents.entries],
            [0, 1, 2, 3, 4, 5, 3, 4, 5],
        )
        self.assertGreater(resumed.epsilon(_DELTA), spent)
        self.assertAlmostEqual(
            resumed.epsilon(_DELTA) / contents.epsilon(_DELTA), 1, places=9
        )
        self.assertIn(
            "rounds_charged_twice",
            resumed.privacy_statement(_DELTA, format="dict")["caveats"],
        )

    @parameterized.named_parameters(
        ("nothing", lambda: 0.1, lambda: 0.1),
        ("another_schedule", lambda: _decay(0.1), lambda: _decay(0.5)),
    )
    def test_a_lost_round_never_has_its_noise_or_cohort_again(self, before, after):
        # Else the difference of the two releases would have no noise.
        drawn = []

        def trained(rate, path=None, callbacks=()):
            optimizer = tf.keras.optimizers.SGD(rate)
            # (Poisson: the statement of fixed sizes takes seconds.)
            fed = toy.federated(
                sampling="poisson", compile_options={"optimizer": optimizer}
            )
            collect = engine.CohortEngine.collect

            def seen(own, clients, inputs):
                drawn.append((tuple(inputs.seed), tuple(inputs.positions)))
                return collect(own, clients, inputs)

            with mock.patch.object(engine.CohortEngine, "collect", seen):
                fed.fit(
                    toy.clients(),
                    seed=5,
                    callbacks=[*callbacks],
                    resume_from=path,
                    **_FIT,
                )
            toy.give_back(fed)

        keeper = tfdp_fl.callbacks.RoundCheckpoint(self.path, keep=99)
        trained(before(), callbacks=[keeper])
        killed = self._copy_as_of(self.path, 3)
        # A copy of which the ledger was put back knows of no lost rounds.
        put_back = killed.with_name("put back")
        shutil.copytree(killed, put_back)
        ledger = put_back / resuming.LEDGER
        ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:4]))
        trained(after(), killed)
        trained(after(), put_back)
        self.assertLen(drawn, _ROUNDS + 2 * (_ROUNDS - 3))
        for each in zip(*drawn, strict=True):
            self.assertLen(set(each), len(drawn))

    @toy.same_draws_when_resumed()
    def test_a_second_fit_is_resumed_as_such(self):
        clients, fit = toy.clients(), {"verbose": 0, "seed": 2}
        whole = toy.federated(sampling="shuffled")
        keeper = tfdp_fl.callbacks.RoundCheckpoint(self.path, keep=99)
        for rounds in (2, 3):
            whole.fit(clients, rounds, callbacks=[keeper], **fit)
        copy, weights = self._copy_as_of(self.path, 3), whole.get_weights()
        toy.give_back(whole)
        resumed = toy.federated(sampling="shuffled")
        history = resumed.fit(clients, 3, resume_from=copy, **fit)
        self.assertEqual(history.epoch, [3, 4])
        toy.assert_same(weights, resumed)

    def test_a_second_fit_of_a_local_budget_keeps_its_noise(self):
        clients = toy.clients()
        whole = _local()
        keeper = tfdp_fl.callbacks.RoundCheckpoint(self.path, keep=99)
        for rounds in (2, 3):
            whole.fit(clients, rounds, callbacks=[keeper], verbose=0)
        copy = self._copy_as_of(self.path, 3)
        resumed = _local()
        resumed.fit(clients, 3, resume_from=copy, verbose=0)
        self.assertEqual(resumed.run.calibration["rounds"], 2)
        self.assertEqual(resumed.costs.mu_squared, whole.costs.mu_squared)

    def test_without_a_seed_it_goes_on_too(self):
        clients = toy.clients()
        options = {"clients_per_round": 10, "sampling": "shuffled"}
        first = toy.federated(**options)
        crash = _Crash(3)
        crash.federated = first
        keeper = tfdp_fl.callbacks.RoundCheckpoint(self.path, every=2)
        with self.assertRaises(KeyboardInterrupt):
            first.fit(clients, callbacks=[keeper, crash], **_FIT)
        self.assertEqual(first.rounds, 4)
        cohorts = [first.run.sampler.cohort(t) for t in range(_ROUNDS)]
        resumed = toy.federated(**options)
        resumed.fit(
            clients,
            callbacks=[tfdp_fl.callbacks.RoundCheckpoint(self.path, every=2)],
            resume_from=self.path,
            **_FIT,
        )
        self.assertEqual(resumed.rounds, _ROUNDS)
        for t, cohort in enumerate(cohorts):  # The pass goes on in its order.
            np.testing.assert_array_equal(cohort, resumed.run.sampler.cohort(t))
        with self.subTest("the same model object resumes as well"):
            first.fit(clients, resume_from=self.path, **_FIT)
            self.assertEqual(first.rounds, _ROUNDS)
            self.assertEqual(first.epsilon(_DELTA), resumed.epsilon(_DELTA))
        with self.subTest("a finished run has nothing left to do"):
            history = resumed.fit(clients, resume_from=self.path, **_FIT)
            self.assertEmpty(history.epoch)


class RefusalTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.path = pathlib.Path(temporary.name) / "run"
        cls.clients = toy.clients()
        cls.trained = toy.federated(model=toy.dense())  # Not lent to one test.
        cls.trained.fit(
            cls.clients,
            rounds=2,
            batch_size=5,
            seed=1,
            verbose=0,
            callbacks=[tfdp_fl.callbacks.RoundCheckpoint(cls.path)],
        )

    def _refused(self, model, message, error=ValueError, clients=None, **fit):
        before = model.get_weights()
        fit = {"rounds": 2, "batch_size": 5, "seed": 1, "verbose": 0, **fit}
        with self.assertRaisesRegex(error, message):
            model.fit(
                clients or self.clients,
                **{"resume_from": self.path, **fit},
            )
        toy.assert_same(before, model)
        self.assertEqual(model.epsilon(_DELTA), 0.0)

    @parameterized.named_parameters(
        ("rounds", {"rounds": 3}, "rounds must be 2"),
        ("batch_size", {"batch_size": 4}, "batch_size must be 5"),
        ("seed", {"seed": 2}, "seed must be 1, .* got 2"),
        ("no seed", {"seed": None}, "seed must be 1, .* got None"),
    )
    def test_other_arguments_of_fit_are_refused_by_name(self, fit, message):
        self._refused(toy.federated(), message, **fit)

    @parameterized.named_parameters(
        ("m", {"clients_per_round": 10}, "clients_per_round must be 20"),
        ("sampling", {"sampling": "poisson"}, "sampling must be 'fixed_size'"),
        (
            "mechanism",
            {"mechanism": tfdp_fl.AdaptiveClipping(noise_multiplier=1.0)},
            "mechanism must be 'FixedClipping'",
        ),
        (
            "noise",
            {"mechanism": tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=0.9)},
            "mechanism's noise_multiplier must be 1.0",
        ),
        (
            "server optimizer",
            {"compile_options": {"server_optimizer": "adam"}},
            "server_optimizer must be None",
        ),
        (
            "client weighting",
            {"client_weighting": tfdp_fl.ClientWeighting.num_examples(cap=6)},
            "client_weighting must be None",
        ),
    )
    def test_other_settings_are_refused_by_name(self, options, message):
        self._refused(toy.federated(**options), message)

    def test_other_clients_and_another_model_are_refused(self):
        self._refused(toy.federated(), "clients .* must be 40", clients=toy.clients(39))
        larger = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(4, input_shape=(8,)),
                tf.keras.layers.Dense(toy.NUM_CLASSES),
            ]
        )
        self._refused(toy.federated(model=larger), "model must have the weig")

    def test_the_same_clients_in_another_order_are_refused(self):
        other = self.clients.take(np.arange(toy.NUM_CLIENTS)[::-1])
        self._refused(toy.federated(), "clients' ids .* must be", clients=other)

    def test_missing_checkpoints_and_ledger_are_named(self):
        empty = files.directory(self)
        self._refused(
            toy.federated(),
            "no checkpoint in",
            FileNotFoundError,
            resume_from=empty,
        )
        copy = empty / "run"
        shutil.copytree(self.path, copy)
        ledger = copy / "ledger.jsonl"
        lines = ledger.read_bytes().splitlines(keepends=True)
        ledger.write_bytes(b"".join(lines[:-1]))
        self._refused(
            toy.federated(),
            "lines at its end were removed",
            tfdp_fl.accounting.LedgerTamperedError,
            resume_from=copy,
        )
        ledger.unlink()
        self._refused(
            toy.federated(),
            "ledger .* is missing",
            tfdp_fl.accounting.LedgerError,
            resume_from=copy,
        )

    def test_a_model_with_other_rounds_behind_it_is_refused(self):
        other = toy.federated()
        other.fit(self.clients, rounds=1, verbose=0)
        with self.assertRaisesRegex(ValueError, "was not trained yet, or"):
            other.fit(
                self.clients,
                rounds=2,
                batch_size=5,
                seed=1,
                verbose=0,
                resume_from=self.path,
            )

    def test_a_budget_counts_what_was_charged_and_lost(self):
        copy = files.directory(self) / "run"
        shutil.copytree(self.path, copy)
        (copy / "round-00000002.npz").unlink()
        resumed = toy.federated()
        spent = self.trained.epsilon(_DELTA)
        budget = tfdp_fl.callbacks.PrivacyBudget(1.01 * spent, _DELTA)
        history = resumed.fit(
            self.clients,
            rounds=2,
            batch_size=5,
            seed=1,
            verbose=0,
            resume_from=copy,
            callbacks=[budget],
        )
        self.assertEmpty(history.epoch)
        self.assertEqual(budget.stopped_before_round, 1)
        self.assertAlmostEqual(resumed.epsilon(_DELTA), spent, places=9)

    @toy.same_draws_when_resumed()
    def test_newest_damaged_goes_on_from_the_one_before(self):
        copy = files.directory(self) / "run"
        shutil.copytree(self.path, copy)
        newest = copy / "round-00000002.npz"
        newest.write_bytes(newest.read_bytes()[:1000])
        resumed = toy.federated()
        with self.assertWarnsRegex(RuntimeWarning, "00000002.npz is damaged"):
            history = resumed.fit(
                self.clients,
                rounds=2,
                batch_size=5,
                seed=1,
                verbose=0,
                resume_from=copy,
                callbacks=[tfdp_fl.callbacks.RoundCheckpoint(copy)],
            )
        self.assertEqual(history.epoch, [1])
        toy.assert_same(self.trained, resumed)
        self.assertTrue((copy / "round-00000002.damaged").exists())
        self.assertTrue(newest.exists())


class TwoPlacesTest(absltest.TestCase):
    def test_a_run_that_went_on_elsewhere_is_not_gone_back_to(self):
        with tempfile.TemporaryDirectory() as folder:
            directory = os.path.join(folder, "run")

            class Stop(callbacks.FederatedCallback):
                def on_round_released(self, round_index, logs):
                    if round_index == 1:
                        raise KeyboardInterrupt

            fed = toy.federated()
            with self.assertRaises(KeyboardInterrupt):
                fed.fit(
                    toy.clients(),
                    rounds=4,
                    verbose=0,
                    callbacks=[callbacks.RoundCheckpoint(directory), Stop()],
                )
            elsewhere = callbacks.Ledger(os.path.join(folder, "other.jsonl"))
            fed.fit(toy.clients(), rounds=2, verbose=0, callbacks=[elsewhere])
            # Meanwhile another process resumes, and its ledger is as long.
            toy.federated().fit(
                toy.clients(), rounds=4, verbose=0, resume_from=directory
            )
            with self.assertRaisesRegex(ValueError, "would be forgotten"):
                fed.fit(toy.clients(), rounds=4, verbose=0, resume_from=directory)


if __name__ == "__main__":
    absltest.main()
