"""No way of calling `fit` has rounds that epsilon leaves out."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.keras import files, toy
from tfdp_fl.accounting import PrivacyLedger
from tfdp_fl.engine import CohortEngine
from tfdp_fl.keras import costs, resuming

_DELTA = 1e-3


class _Do(tf.keras.callbacks.Callback):
    """Calls a function once, when a round begins or ends."""

    def __init__(self, function, when="on_epoch_end", round_index=0):
        super().__init__()
        self._function, self._round = function, round_index
        setattr(self, when, self._called)

    def _called(self, round_index=0, logs=None):
        del logs
        if round_index in (None, {}, self._round):  # Or `logs`, before training.
            self._function()


def _interrupt():
    raise KeyboardInterrupt


class LostRoundsTest(parameterized.TestCase):
    """Weights that come back without the rounds that made them."""

    def test_backup_and_restore_is_refused_before_anything_starts(self):
        fed = toy.federated()
        backup = tf.keras.callbacks.BackupAndRestore(files.directory(self))
        with self.assertRaisesRegex(ValueError, "BackupAndRestore.*RoundCheckpoint"):
            toy.fit(fed, 2, [backup])
        self.assertIsNone(fed.run)

    def test_weights_that_a_callback_brings_when_it_is_told_of_the_model(self):
        trained, fed = toy.federated(), toy.federated()
        toy.fit(trained, 2)
        weights = trained.get_weights()

        class BringsBack(tf.keras.callbacks.Callback):
            def set_model(self, model):
                super().set_model(model)
                model.set_weights(weights)

        with self.assertRaisesRegex(ValueError, "must not change the model's weights"):
            toy.fit(fed, 2, callbacks=[BringsBack()])
        self.assertEqual(fed.epsilon(_DELTA), 0.0)

    @parameterized.parameters(
        "on_train_begin", "on_epoch_begin", "on_train_batch_begin"
    )
    def test_weights_that_a_callback_brings_are_refused(self, when):
        trained = toy.federated()
        toy.fit(trained, 2)
        weights = trained.get_weights()
        fed = toy.federated()
        before = [np.zeros(0)]

        def bring_back():
            before[:] = fed.get_weights()
            fed.set_weights(weights)

        with self.assertRaisesRegex(ValueError, "must not change the model's weights"):
            toy.fit(fed, 2, callbacks=[_Do(bring_back, when)])
        self.assertEqual(fed.epsilon(_DELTA), 0.0)

    def test_an_interrupt_while_a_run_is_resumed(self):
        folder, fed, resumed = files.directory(self), toy.federated(), toy.federated()
        keep = tfdp_fl.callbacks.RoundCheckpoint(folder)
        with self.assertRaises(KeyboardInterrupt):
            toy.fit(fed, 3, [keep, _Do(_interrupt, round_index=1)])
        restore = resuming.InterruptedRun.restore

        def restored(*arguments):
            run = restore(*arguments)
            os.kill(os.getpid(), signal.SIGINT)
            return run

        with (
            mock.patch.object(resuming.InterruptedRun, "restore", restored),
            self.assertRaises(KeyboardInterrupt),
        ):
            toy.fit(resumed, 3, resume_from=folder)
        toy.assert_same(fed, resumed)
        self.assertEqual(resumed.epsilon(_DELTA), fed.epsilon(_DELTA))

    def test_a_later_round_may_go_back_to_weights_of_this_run(self):
        fed = toy.federated()
        kept = []
        keep = _Do(lambda: kept.extend(fed.get_weights()))
        restore = _Do(lambda: fed.set_weights(kept), "on_epoch_begin", round_index=2)
        toy.fit(fed, 3, callbacks=[keep, restore])
        self.assertEqual(fed.rounds, 3)


class OneHistoryTest(parameterized.TestCase):
    def test_fits_at_once(self):
        fed = toy.federated()
        toy.fit(fed, 1)
        errors, start = [], threading.Barrier(4)

        def train():
            start.wait()
            try:
                toy.fit(fed, 20)
            except RuntimeError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=train) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(fed.rounds, 1 + 20 * (4 - len(errors)))
        self.assertEqual(fed.spending.rounds, fed.rounds)
        for error in errors:
            self.assertIn("fit", error)

    @parameterized.parameters(False, True)
    def test_a_fit_inside_a_fit(self, other_wrapper):
        fed = toy.federated()
        inner = toy.federated(model=fed.model) if other_wrapper else fed
        with self.assertRaisesRegex(
            RuntimeError, "while a fit of the same Keras model"
        ):
            toy.fit(fed, 2, callbacks=[_Do(lambda: toy.fit(inner, 2))])
        self.assertEqual(fed.spending.rounds, 1)
        toy.fit(fed, 2)  # The failed one has let go.

    def test_compile_inside_a_fit(self):
        fed = toy.federated()
        with self.assertRaisesRegex(RuntimeError, "compile was called while"):
            toy.fit(fed, 2, callbacks=[_Do(lambda: fed.compile("sgd", toy.loss()))])

    @parameterized.parameters(
        copy.copy, copy.deepcopy, lambda fed: pickle.loads(pickle.dumps(fed))
    )
    def test_copies(self, make_copy):
        fed = toy.federated()
        toy.fit(fed, 1, seed=5)
        with self.assertRaisesRegex(TypeError, "cannot be copied or pickled"):
            make_copy(fed)

    @parameterized.parameters("run", "setup", "model")
    def test_what_epsilon_is_computed_from_cannot_be_set(self, name):
        fed = toy.federated()
        toy.fit(fed, 2)
        spent = fed.epsilon(_DELTA)
        other = toy.federated(
            tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=100.0)
        )
        for value in (None, getattr(other, name)):
            with self.assertRaisesRegex(AttributeError, f"{name} cannot be set"):
                setattr(fed, name, value)
        with self.assertRaises(AttributeError):
            fed.mechanism = other.mechanism
        self.assertEqual(fed.epsilon(_DELTA), spent)

    def test_a_second_wrapper_of_a_trained_model(self):
        fed = toy.federated()
        toy.fit(fed, 2)
        second = toy.federated(model=fed.model)
        for use in (lambda: toy.fit(second, 2), lambda: second.epsilon(_DELTA)):
            with self.assertRaisesRegex(ValueError, "already trained on clients"):
                use()
        del fed
        with self.assertRaisesRegex(ValueError, "already trained on clients"):
            toy.fit(second, 2)

    def test_another_model_with_a_trained_layer(self):
        model = toy.two_layers()
        fed = toy.federated(model=model)
        sharing = tf.keras.Sequential([tf.keras.layers.Input((8,)), *model.layers])
        second = toy.federated(model=sharing)
        toy.fit(fed, 2)
        for use in (lambda: toy.fit(second, 2), lambda: second.epsilon(_DELTA)):
            with self.assertRaisesRegex(ValueError, "a layer that it shares"):
                use()

    def test_two_models_that_share_a_layer_at_once(self):
        model = toy.two_layers()
        fed = toy.federated(model=model)
        sharing = tf.keras.Sequential([tf.keras.layers.Input((8,)), *model.layers])
        second = toy.federated(model=sharing)
        collect, waiting = CohortEngine.collect, [second]

        def collected(*arguments):
            pending = collect(*arguments)
            if waiting:  # As another thread might, while this one's cohort trains.
                toy.fit(waiting.pop(), 2)
            return pending

        with (
            mock.patch.object(CohortEngine, "collect", collected),
            self.assertRaisesRegex(ValueError, "a layer that it shares"),
        ):
            toy.fit(fed, 2)
        self.assertEqual((fed.spending.rounds, second.spending.rounds), (0, 2))

    def test_layers_that_were_not_trained_may_be_shared(self):
        frozen = tf.keras.layers.Dense(8, trainable=False)

        def model():
            return tf.keras.Sequential(
                [tf.keras.layers.Input((8,)), frozen, tf.keras.layers.Dense(3)]
            )

        for _ in range(2):
            fed = toy.federated(model=model())
            toy.fit(fed, 2)
            self.assertEqual(fed.spending.rounds, 2)

    def test_a_wrapper_that_resumes_brings_the_cost_along(self):
        folder, fed = files.directory(self), toy.federated()
        keep = tfdp_fl.callbacks.RoundCheckpoint(folder)
        with self.assertRaises(KeyboardInterrupt):
            toy.fit(fed, 3, [keep, _Do(_interrupt, round_index=1)])
        second = toy.federated(model=fed.model)
        toy.fit(second, 3, resume_from=folder)
        self.assertEqual(second.spending.rounds, 3)
        private = tfdp_fl.PrivateMetrics(
            bounds={"loss": (0.0, 5.0)}, noise_multiplier=1.0
        )
        for use in (
            lambda: toy.fit(fed, 2),
            lambda: fed.epsilon(_DELTA),
            lambda: fed.central_epsilon(_DELTA),
            lambda: fed.privacy_statement(_DELTA),
            lambda: fed.evaluate_clients(toy.clients(), verbose=0, private=private),
        ):
            with self.assertRaisesRegex(ValueError, "already trained on clients"):
                use()


class PromisedTwiceTest(parameterized.TestCase):
    """What a budget allowed is spent by a private evaluation in a callback."""

    def setUp(self):
        super().setUp()
        self.private = tfdp_fl.PrivateMetrics(
            bounds={"loss": (0.0, 5.0)}, noise_multiplier=1.0
        )

    def _evaluate_in(self, fed, when):
        def evaluate():
            fed.evaluate_clients(toy.clients(), verbose=0, private=self.private)

        return _Do(evaluate, when, round_index=1)

    @parameterized.parameters("on_epoch_begin", "on_epoch_end")
    def test_a_budget_is_asked_in_the_act_of_charging(self, when):
        plain = toy.federated()
        toy.fit(plain, 4)
        most = plain.epsilon(_DELTA)  # Four rounds, and nothing beside them.
        fed = toy.federated()
        budget = tfdp_fl.callbacks.PrivacyBudget(most * 1.001, _DELTA)
        path = files.directory(self) / "ledger"
        ledger = tfdp_fl.callbacks.Ledger(path)
        toy.fit(fed, 4, [budget, ledger, self._evaluate_in(fed, when)])
        contents = PrivacyLedger.read(path)
        self.assertEqual(fed.spending.evaluations, 1)
        self.assertLess(fed.rounds, 4)
        self.assertLessEqual(fed.epsilon(_DELTA), most * 1.001)
        self.assertAlmostEqual(
            contents.epsilon(_DELTA), fed.epsilon(_DELTA), delta=1e-6
        )

    def test_a_budget_counts_what_is_charged_while_it_plans(self):
        plain = toy.federated()
        toy.fit(plain, 4)
        most = plain.epsilon(_DELTA) * 1.001
        fed = toy.federated()
        toy.fit(fed, 1)
        affordable_rounds = costs.RoundCosts.affordable_rounds

        def planned(*arguments):
            found = affordable_rounds(*arguments)
            # As another thread might, between the answer and what follows.
            fed.evaluate_clients(toy.clients(), verbose=0, private=self.private)
            return found

        with mock.patch.object(costs.RoundCosts, "affordable_rounds", planned):
            toy.fit(fed, 3, [tfdp_fl.callbacks.PrivacyBudget(most, _DELTA)])
        self.assertLessEqual(fed.epsilon(_DELTA), most)

    def test_an_evaluation_asks_no_budget_about_another_model(self):
        fed, other = toy.federated(), toy.federated()
        toy.fit(fed, 3)
        budget = tfdp_fl.callbacks.PrivacyBudget(fed.epsilon(_DELTA) * 1.001, _DELTA)
        toy.fit(fed, 1, [budget])  # Allows none.
        toy.fit(other, 1, [budget])
        with self.assertRaisesRegex(ValueError, "went on to another model"):
            fed.evaluate_clients(toy.clients(), verbose=0, private=self.private)
        self.assertEqual(fed.spending.evaluations, 0)

    def test_a_budget_serves_one_fit_at_a_time(self):
        fed, other = toy.federated(), toy.federated()
        budget = tfdp_fl.callbacks.PrivacyBudget(100.0, _DELTA)
        inside = _Do(lambda: toy.fit(other, 1, [budget]))
        with self.assertRaisesRegex(RuntimeError, "the PrivacyBudget of a fit that"):
            toy.fit(fed, 2, [budget, inside])

    def test_a_target_is_asked_in_the_act_of_charging(self):
        fed = toy.private(60.0, 4)
        toy.fit(fed, 4, callbacks=[self._evaluate_in(fed, "on_epoch_begin")])
        self.assertLessEqual(fed.epsilon(_DELTA), 60.0 * (1 + 1e-6))
        self.assertLess(fed.rounds, 4)

    def test_an_evaluation_asks_the_budget_of_the_fit(self):
        fed = toy.federated()
        budget = tfdp_fl.callbacks.PrivacyBudget(100.0, _DELTA)
        toy.fit(fed, 2, callbacks=[budget])
        budget.epsilon = fed.epsilon(_DELTA) * 1.01
        with self.assertRaisesRegex(ValueError, "of the PrivacyBudget"):
            fed.evaluate_clients(toy.clients(), verbose=0, private=self.private)
