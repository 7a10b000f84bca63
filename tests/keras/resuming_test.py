"""An interrupted and resumed run goes on where it was, bit for bit.

But for the draws of seeded rounds, which a resumed run makes anew; see
`toy.same_draws_when_resumed`.
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.keras import files, toy
from tfdp_fl import accounting, engine
from tfdp_fl.keras import resuming
from tfdp_fl.keras.callbacks import Ledger, PrivacyBudget, RoundCheckpoint

_DELTA = 1e-3
_ROUNDS = 6
_SGD = tf.keras.optimizers.SGD


def _fit(fed, rounds=_ROUNDS, callbacks=(), **options):
    return toy.fit(fed, rounds, callbacks, batch_size=4, shuffle=True, **options)


def _dropout():
    return toy.dense(dropout=0.3)


def _normalized():
    layers = [tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(3)]
    model = tf.keras.Sequential([tf.keras.layers.Input((8,)), *layers])
    model.set_weights([np.full(w.shape, 0.3) for w in model.weights])
    return model


def _adaptive():
    return toy.federated(
        tfdp_fl.AdaptiveClipping(noise_multiplier=0.8),
        _dropout,
        clients_per_round=15,
        sampling="shuffled",
        num_replicas=2,
        compile_options={"server_optimizer": _SGD(1.0, momentum=0.9)},
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
    averaging = _SGD(1.0, use_ema=True, ema_momentum=0.6)
    return toy.federated(compile_options={"server_optimizer": averaging})


def _interrupts(round_index: int):
    """Returns a callback that raises once a round is released."""

    def interrupt(epoch, _):
        if epoch == round_index:
            raise KeyboardInterrupt

    return tf.keras.callbacks.LambdaCallback(on_epoch_end=interrupt)


def _decay(rate: float):
    return tf.keras.optimizers.schedules.ExponentialDecay(rate, 100, 0.9)


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
        whole = make()
        keeper = RoundCheckpoint(self.path, keep=99, delta=_DELTA)
        halving = tf.keras.callbacks.LearningRateScheduler(lambda _, rate: rate * 0.9)
        _fit(whole, callbacks=[keeper, halving], seed=5)
        copy = self._copy_as_of(self.path, 3)
        weights, spent = whole.get_weights(), whole.epsilon(_DELTA)
        toy.give_back(whole)
        resumed = make()
        history = _fit(resumed, callbacks=[halving], seed=5, resume_from=copy)
        self.assertEqual(history.epoch, [3, 4, 5])
        self.assertEqual(resumed.rounds, _ROUNDS)
        toy.assert_same(weights, resumed)
        # Rounds 3 to 5 may have been seen before the crash: charged twice.
        contents = accounting.PrivacyLedger.read(copy / "ledger.jsonl")
        self.assertEqual(
            [entry.round_index for entry in contents.entries],
            [0, 1, 2, 3, 4, 5, 3, 4, 5],
        )
        self.assertGreater(resumed.epsilon(_DELTA), spent)
        self.assertAlmostEqual(
            resumed.epsilon(_DELTA) / contents.epsilon(_DELTA), 1, places=9
        )
        caveats = resumed.privacy_statement(_DELTA, format="dict")["caveats"]
        self.assertContainsSubset({"rounds_charged_twice", "seed_given"}, caveats)

    @parameterized.named_parameters(
        ("nothing", lambda: 0.1, lambda: 0.1),
        ("another_schedule", lambda: _decay(0.1), lambda: _decay(0.5)),
    )
    def test_a_lost_round_never_has_its_noise_or_cohort_again(self, before, after):
        # Else the difference of the two releases would have no noise.
        drawn = []

        def trained(rate, path=None, callbacks=()):
            # (Poisson: the statement of fixed sizes takes seconds.)
            fed = toy.federated(
                sampling="poisson", compile_options={"optimizer": _SGD(rate)}
            )
            collect = engine.CohortEngine.collect

            def seen(own, clients, inputs):
                drawn.append((tuple(inputs.seed), tuple(inputs.positions)))
                return collect(own, clients, inputs)

            with mock.patch.object(engine.CohortEngine, "collect", seen):
                _fit(fed, callbacks=callbacks, seed=5, resume_from=path)
            toy.give_back(fed)

        trained(before(), callbacks=[RoundCheckpoint(self.path, keep=99)])
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

    @parameterized.parameters(
        lambda: toy.federated(sampling="shuffled"),
        # The noise stays what the first fit set.
        _local,
    )
    @toy.same_draws_when_resumed()
    def test_a_second_fit_is_resumed_as_such(self, make):
        whole = make()
        keeper = RoundCheckpoint(self.path, keep=99)
        for rounds in (2, 3):
            _fit(whole, rounds, [keeper], seed=2)
        copy, weights = self._copy_as_of(self.path, 3), whole.get_weights()
        toy.give_back(whole)
        resumed = make()
        history = _fit(resumed, 3, seed=2, resume_from=copy)
        self.assertEqual(history.epoch, [3, 4])
        toy.assert_same(weights, resumed)

    def test_numpys_numbers_are_as_good(self):
        given = {"seed": np.int64(5), "rounds": 3, "batch_size": np.int64(4)}
        first, resumed = (toy.federated(sampling="poisson") for _ in range(2))
        with self.assertRaises(KeyboardInterrupt):
            stop = [RoundCheckpoint(self.path), _interrupts(0)]
            toy.fit(first, callbacks=stop, **given)
        toy.fit(resumed, **given, resume_from=self.path)
        self.assertEqual(resumed.rounds, 3)

    def test_without_a_seed_it_goes_on_too(self):
        options = {"clients_per_round": 10, "sampling": "shuffled"}
        first, resumed = toy.federated(**options), toy.federated(**options)
        keeper = RoundCheckpoint(self.path, every=2)
        with self.assertRaises(KeyboardInterrupt):
            _fit(first, callbacks=[keeper, _interrupts(3)])
        self.assertEqual(first.rounds, 4)
        cohorts = [first.run.sampler.cohort(t) for t in range(_ROUNDS)]
        keeper = RoundCheckpoint(self.path, every=2)
        _fit(resumed, callbacks=[keeper], resume_from=self.path)
        self.assertEqual(resumed.rounds, _ROUNDS)
        for t, cohort in enumerate(cohorts):  # The pass goes on in its order.
            np.testing.assert_array_equal(cohort, resumed.run.sampler.cohort(t))
        with self.subTest("the same model object resumes as well"):
            _fit(first, resume_from=self.path)
            self.assertEqual(first.rounds, _ROUNDS)
            self.assertEqual(first.epsilon(_DELTA), resumed.epsilon(_DELTA))
        with self.subTest("a finished run has nothing left to do"):
            history = _fit(resumed, resume_from=self.path)
            self.assertEmpty(history.epoch)


class RefusalTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.path = pathlib.Path(temporary.name) / "run"
        cls.trained = toy.federated(model=toy.dense())  # Not lent to one test.
        keeper = RoundCheckpoint(cls.path)
        cls._resume(cls.trained, resume_from=None, callbacks=[keeper])

    @classmethod
    def _resume(cls, fed, **fit):
        usual = {"batch_size": 5, "seed": 1, "resume_from": cls.path}
        return toy.fit(fed, **{"rounds": 2, **usual, **fit})

    def _refused(self, model, message, error=ValueError, **fit):
        before = model.get_weights()
        with self.assertRaisesRegex(error, message):
            self._resume(model, **fit)
        toy.assert_same(before, model)
        self.assertEqual(model.epsilon(_DELTA), 0.0)

    def _copy(self):
        copy = files.directory(self) / "run"
        shutil.copytree(self.path, copy)
        return copy

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
        fewer, turned = toy.clients(39), toy.clients().take(np.arange(40)[::-1])
        self._refused(toy.federated(), "clients .* must be 40", data=fewer)
        self._refused(toy.federated(), "clients' ids .* must be", data=turned)
        larger = toy.federated(model=toy.two_layers())
        self._refused(larger, "model must have the weig")

    def test_missing_checkpoints_and_ledger_are_named(self):
        fed, empty = toy.federated(), files.directory(self)
        self._refused(fed, "no checkpoint in", FileNotFoundError, resume_from=empty)
        copy = self._copy()
        ledger = copy / "ledger.jsonl"
        lines = ledger.read_bytes().splitlines(keepends=True)
        ledger.write_bytes(b"".join(lines[:-1]))
        self._refused(
            *(fed, "lines at its end were removed", accounting.LedgerTamperedError),
            resume_from=copy,
        )
        ledger.unlink()
        missing = "ledger .* is missing"
        self._refused(fed, missing, accounting.LedgerError, resume_from=copy)

    def test_a_model_with_other_rounds_behind_it_is_refused(self):
        other = toy.federated()
        toy.fit(other, 1)
        with self.assertRaisesRegex(ValueError, "was not trained yet, or"):
            self._resume(other)

    def test_a_budget_counts_what_was_charged_and_lost(self):
        copy, resumed = self._copy(), toy.federated()
        (copy / "round-00000002.npz").unlink()
        spent = self.trained.epsilon(_DELTA)
        budget = PrivacyBudget(1.01 * spent, _DELTA)
        history = self._resume(resumed, resume_from=copy, callbacks=[budget])
        self.assertEmpty(history.epoch)
        self.assertEqual(budget.stopped_before_round, 1)
        self.assertAlmostEqual(resumed.epsilon(_DELTA), spent, places=9)

    @toy.same_draws_when_resumed()
    def test_newest_damaged_goes_on_from_the_one_before(self):
        copy, resumed = self._copy(), toy.federated()
        newest = copy / "round-00000002.npz"
        newest.write_bytes(newest.read_bytes()[:1000])
        keeper = RoundCheckpoint(copy)
        with self.assertWarnsRegex(RuntimeWarning, "00000002.npz is damaged"):
            history = self._resume(resumed, resume_from=copy, callbacks=[keeper])
        self.assertEqual(history.epoch, [1])
        toy.assert_same(self.trained, resumed)
        self.assertTrue((copy / "round-00000002.damaged").exists())
        self.assertTrue(newest.exists())

    def test_a_run_that_went_on_elsewhere_is_not_gone_back_to(self):
        folder = files.directory(self)
        path, fed = folder / "run", toy.federated()
        with self.assertRaises(KeyboardInterrupt):
            toy.fit(fed, 4, [RoundCheckpoint(path), _interrupts(1)])
        toy.fit(fed, 2, [Ledger(folder / "other.jsonl")])
        # Meanwhile another process resumes, and its ledger is as long.
        toy.fit(toy.federated(), 4, resume_from=path)
        with self.assertRaisesRegex(ValueError, "would be forgotten"):
            toy.fit(fed, 4, resume_from=path)
