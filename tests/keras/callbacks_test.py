"""Budget, ledger and checkpoints as callbacks of a training."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import files, toy
from tfdp_fl import accounting
from tfdp_fl.keras import checkpoint
from tfdp_fl.keras.callbacks import (
    FederatedCallback,
    Ledger,
    PrivacyBudget,
    RoundCheckpoint,
)

_DELTA = 1e-3


class _Lines(FederatedCallback):
    """Notes in which order things happen, and the model's weights then."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _note(self, kind):
        self.seen.append((kind, self.federated_model.get_weights()[0].copy()))

    def on_rounds_planned(self, first_round, last_round):
        self._note("planned")

    def on_round_charged(self, round_index, charge, details):
        self._note("charged")

    def on_round_released(self, round_index, logs):
        self._note("released")

    def on_fit_end(self):
        self._note("end")


class _Refuse(FederatedCallback):
    """Cannot write a round down."""

    def on_round_charged(self, round_index, charge, details):
        if round_index == 2:
            raise OSError("disk full")


class OrderTest(absltest.TestCase):
    def test_a_round_is_charged_before_the_model_changes(self):
        fed, lines = toy.federated(), _Lines()
        toy.fit(fed, 2, [lines])
        kinds = [kind for kind, _ in lines.seen]
        self.assertEqual(kinds, ["planned", *["charged", "released"] * 2, "end"])
        start, charged, released, again, *_ = (weights for _, weights in lines.seen)
        np.testing.assert_array_equal(charged, start)
        self.assertGreater(np.abs(released - start).max(), 1e-6)
        np.testing.assert_array_equal(again, released)
        with self.subTest("a round that is not written does not happen"):
            before, spent = fed.get_weights(), fed.epsilon(_DELTA)
            with self.assertRaisesRegex(OSError, "disk full"):
                toy.fit(fed, 2, [_Refuse(), lines])
            toy.assert_same(before, fed)
            self.assertEqual(fed.epsilon(_DELTA), spent)
            self.assertEqual(fed.rounds, 2)
            self.assertEqual(lines.seen[-1][0], "end")


class PrivacyBudgetTest(absltest.TestCase):
    def test_stops_before_the_round_that_would_overspend(self):
        def noise(t):
            return 1.5 - t / 10

        def size(t):
            return 10 + t

        fed = toy.federated(
            tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=noise),
            clients_per_round=size,
            sampling="poisson",
        )
        # The rounds' costs, computed by hand.
        sampler = tfdp_fl.sampling.make_sampler("poisson", 40, size)
        history, after = accounting.PrivacyAccountant(), []
        for t in range(12):
            event = tfdp_fl.FixedClipping(
                clip_norm=0.5, noise_multiplier=noise(t)
            ).round_event(0, None)
            history.add(sampler.charge(t, event))
            after.append(history.epsilon(_DELTA))
        budget = PrivacyBudget(0.5 * (after[4] + after[5]), _DELTA)
        with self.subTest("first fit"):
            say = self.enter_context(mock.patch.object(type(fed), "say"))
            toy.fit(fed, 12, [budget])
            self.assertEqual(fed.rounds, 5)
            self.assertEqual(budget.stopped_before_round, 5)
            self.assertAlmostEqual(fed.epsilon(_DELTA), after[4], places=9)
            said = [call.args[0] for call in say.call_args_list]
            self.assertRegex(said[0], "allows 5 of the 12 rounds asked for")
            self.assertRegex(said[1], "stopped before round 6, which would")
        with self.subTest("a second fit goes on with what was spent"):
            history = toy.fit(fed, 2, [budget])
            self.assertEqual(fed.rounds, 5)
            self.assertEmpty(history.epoch)
        with self.subTest("a larger budget allows more"):
            history = toy.fit(fed, 7, [PrivacyBudget(after[6], _DELTA)])
            self.assertEqual(history.epoch, [5, 6])
            self.assertLen(history.history["epsilon"], 2)
            self.assertLessEqual(fed.epsilon(_DELTA), after[6])

    def test_local_budget_counts_the_client_seen_most(self):
        fed = toy.federated(
            tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=4.0), clients_per_round=40
        )
        each = fed.mechanism.mu_squared(None)
        epsilon = accounting.epsilon_of_mu_squared(3.5 * each, _DELTA)
        toy.fit(fed, 9, [PrivacyBudget(epsilon, _DELTA)])
        self.assertEqual(fed.rounds, 3)

    def test_no_noise_no_round(self):
        fed = toy.federated(tfdp_fl.NoPrivacy())
        history = toy.fit(fed, 3, [PrivacyBudget(100.0, _DELTA)])
        self.assertEmpty(history.epoch)


class LedgerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = files.directory(self) / "ledger.jsonl"

    def _append(self):
        return Ledger(self.path, append=True)

    def _assert_let_go(self):
        with accounting.PrivacyLedger(self.path, "append") as opened:
            self.assertEqual(opened.rounds, 1)

    def test_an_interrupt_at_the_end_of_fit_leaves_none_locked(self):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)

        class Interrupted(FederatedCallback):
            def on_fit_end(self):
                os.kill(os.getpid(), signal.SIGINT)

        fed, ledger = toy.federated(), Ledger(self.path)
        with self.assertRaises(KeyboardInterrupt):
            toy.fit(fed, 1, [Interrupted(), ledger])
        self._assert_let_go()
        toy.fit(fed, 1, [ledger])

    def test_an_error_of_another_callback_leaves_none_locked(self):
        class Fails(FederatedCallback):
            def on_fit_end(self):
                raise OSError("disk full")

        with self.assertRaisesRegex(OSError, "disk full"):
            toy.fit(toy.federated(), 1, [Fails(), Ledger(self.path)])
        self._assert_let_go()

    def test_holds_every_round_of_several_fits(self):
        fed, ledger = toy.federated(), Ledger(self.path)
        toy.fit(fed, 2, [ledger])
        toy.fit(fed, 1, [ledger])
        contents = accounting.PrivacyLedger.read(self.path)
        self.assertEqual([e.round_index for e in contents.entries], [0, 1, 2])
        self.assertEqual({e.cohort_size for e in contents.entries}, {20})
        self.assertEqual(contents.entries[0].details, {"noise_multiplier": 1.0})
        self.assertEqual(contents.epsilon(_DELTA), fed.epsilon(_DELTA))
        with self.subTest("rounds that were run without it are made up for"):
            toy.fit(fed, 2)
            toy.fit(fed, 1, [ledger])
            contents = accounting.PrivacyLedger.read(self.path)
            self.assertLen(contents.entries, 6)
            self.assertEqual(contents.epsilon(_DELTA), fed.epsilon(_DELTA))
        with self.subTest("so they are by a new one"):
            other = self.path.with_name("other.jsonl")
            toy.fit(fed, 1, [Ledger(other)])
            told = accounting.epsilon_from_ledger(other, _DELTA)
            self.assertEqual(told, fed.epsilon(_DELTA))
        with self.subTest("another run is refused, unless told to append"):
            new = toy.federated()
            with self.assertRaisesRegex(ValueError, "ledger of another run"):
                toy.fit(new, 1, [ledger])
            self.assertEqual(new.rounds, 0)
            toy.fit(new, 1, [self._append()])
            contents = accounting.PrivacyLedger.read(self.path)
            self.assertLen(contents.entries, 7)
            self.assertAlmostEqual(
                contents.epsilon(_DELTA), new.epsilon(_DELTA), places=9
            )

    @parameterized.named_parameters(
        ("central", None, 4, "poisson", 4.847),
        (
            "local",
            tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=2.0),
            40,
            "shuffled",
            37.62,
        ),
    )
    def test_a_ledger_of_two_runs_tells_what_all_rounds_cost(
        self, mechanism, size, sampling, known
    ):
        delta = 1e-5
        make = functools.partial(
            toy.federated, mechanism, clients_per_round=size, sampling=sampling
        )
        first, second, whole = make(), make(), make()
        toy.fit(first, 10, [self._append()])
        # Rounds that nobody wrote down, and then as many with the ledger.
        toy.fit(second, 10)
        self.assertEqual(second.epsilon(delta), first.epsilon(delta))
        toy.fit(second, 10, [self._append()])
        toy.fit(whole, 30)
        expected = whole.epsilon(delta)
        self.assertAlmostEqual(expected, known, delta=0.005)
        self.assertAlmostEqual(second.epsilon(delta), expected, places=9)
        contents = accounting.PrivacyLedger.read(self.path)
        self.assertAlmostEqual(contents.epsilon(delta), expected, places=9)
        self.assertEqual(
            {run: len(lines) for run, lines in contents.by_run().items()},
            {first.run.run_id: 10, second.run.run_id: 20},
        )
        with self.subTest("to read it again adds nothing"):
            toy.fit(second, 1, [self._append()])
            toy.fit(whole, 1)
            self.assertAlmostEqual(
                second.epsilon(delta), whole.epsilon(delta), places=9
            )
        with self.subTest("the statement says whose rounds they are"):
            facts = second.privacy_statement(delta, "dict")
            self.assertEqual((facts["rounds"], facts["rounds_of_others"]), (21, 10))
            self.assertIn("21 rounds of training and 10 of", facts["summary"])
            self.assertIn("only_runs_in_ledgers_counted", facts["caveats"])
            self.assertNotIn("hyperparameter_search_not_counted", facts["caveats"])
        with self.subTest("what came from the ledger survives a resume"):
            path = self.path.with_name("run")
            toy.fit(second, 1, [RoundCheckpoint(path)])
            resumed = make()
            toy.fit(resumed, 1, resume_from=path)
            self.assertEqual(resumed.run.run_id, second.run.run_id)
            self.assertAlmostEqual(
                resumed.epsilon(delta), second.epsilon(delta), places=9
            )

    def test_a_budget_counts_a_ledger_wherever_it_stands(self):
        first, second = (toy.federated(sampling="poisson") for _ in range(2))
        toy.fit(first, 3, [self._append()])
        spent = accounting.epsilon(1.0, "poisson", 40, 20, 4, _DELTA)
        budget = PrivacyBudget(spent * 1.001, _DELTA)
        toy.fit(second, 3, [budget, self._append()])
        self.assertEqual(second.rounds, 1)
        self.assertLessEqual(second.epsilon(_DELTA), budget.epsilon)

    def test_runs_that_cannot_be_added_are_refused(self):
        toy.fit(toy.federated(), 1, [self._append()])
        local = toy.federated(tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=4.0))
        poisson = toy.federated(sampling="poisson")
        before = self.path.read_bytes()
        for fed, message in (
            (local, "path must be a ledger of runs with a local guarantee"),
            (poisson, "one guarantee cannot cover both"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                toy.fit(fed, 1, [self._append()])
            self.assertEqual(fed.rounds, 0)
            self.assertEqual(self.path.read_bytes(), before)

    def test_one_run_in_two_places_is_refused(self):
        path, copy = (self.path.with_name(name) for name in ("run", "copy"))
        first, second = toy.federated(), toy.federated()
        toy.fit(first, 2, [RoundCheckpoint(path)])
        shutil.copytree(path, copy)
        toy.fit(second, 2, resume_from=copy)
        ledger = Ledger(copy / "ledger.jsonl", append=True)
        toy.fit(second, 1, [ledger])
        with self.assertRaisesRegex(ValueError, "gone on with in two places"):
            toy.fit(first, 1, [ledger])

    def test_a_ledger_that_is_deleted_stops_the_training(self):
        delete = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: self.path.unlink()
        )
        fed = toy.federated()
        with self.assertRaises(accounting.LedgerMovedError):
            toy.fit(fed, 3, [self._append(), delete])
        self.assertEqual(fed.rounds, 1)
        self.assertEqual(fed.spending.rounds, 1)

    def test_disk_full_abandons_the_round(self):
        fed, ledger = toy.federated(), Ledger(self.path)
        toy.fit(fed, 1, [ledger])
        before, weights = self.path.read_bytes(), fed.get_weights()
        for room in (0, 40):
            with (
                files.full_disk(len(before) + room),
                self.assertRaisesRegex(
                    accounting.LedgerWriteError, "must not be released"
                ),
            ):
                toy.fit(fed, 1, [ledger])
            self.assertEqual(self.path.read_bytes(), before)
            self.assertEqual(fed.rounds, 1)
            toy.assert_same(weights, fed)
        toy.fit(fed, 1, [ledger])
        self.assertLen(accounting.PrivacyLedger.read(self.path).entries, 2)


class RoundCheckpointTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.path = files.directory(self) / "run"

    def _contents(self):
        return {file.name: file.read_bytes() for file in self.path.iterdir()}

    def test_an_error_at_the_end_is_raised_in_a_handler_too(self):
        write = checkpoint.CheckpointDirectory.write

        def fails(files, made, keep):
            if made.round_index == 2:
                raise checkpoint.CheckpointWriteError("disk full")
            return write(files, made, keep)

        saved = RoundCheckpoint(self.path, every=100)
        with (
            mock.patch.object(checkpoint.CheckpointDirectory, "write", fails),
            self.assertRaisesRegex(checkpoint.CheckpointWriteError, "disk full"),
        ):
            try:
                raise RuntimeError("the first try")
            except RuntimeError:
                toy.fit(toy.federated(), 2, [saved])

    def test_what_a_directory_holds(self):
        fed = toy.federated(sampling="shuffled", delta=_DELTA)
        keeper = RoundCheckpoint(self.path, every=2, keep=2)
        toy.fit(fed, 5, [keeper])
        saved = ["round-00000004.npz", "round-00000005.npz"]
        self.assertEqual(
            sorted(self._contents()), ["ledger.jsonl", "lock", "privacy.txt", *saved]
        )
        statement = (self.path / "privacy.txt").read_text()
        self.assertEqual(statement, fed.privacy_statement() + "\n")
        with self.subTest("a second fit of the same model goes on"):
            toy.fit(fed, 1, [keeper])
            toy.fit(fed, 1, [RoundCheckpoint(self.path)])
            self.assertIn("round-00000007.npz", self._contents())
            told = accounting.epsilon_from_ledger(self.path / "ledger.jsonl", _DELTA)
            self.assertEqual(told, fed.epsilon(_DELTA))
        before = self._contents()
        new = toy.federated(sampling="shuffled")
        with (
            self.subTest("a new training is refused before it starts"),
            self.assertRaisesRegex(
                ValueError, "must not hold the checkpoints of another run.*resu"
            ),
        ):
            toy.fit(new, 1, [keeper])
        with self.subTest("so is one while another has the directory"):
            holder = checkpoint.CheckpointDirectory(self.path)
            holder.acquire()
            with self.assertRaises(checkpoint.CheckpointInUseError):
                toy.fit(fed, 1, [keeper])
            holder.release()
        with self.subTest("and one whose disk is full"):
            with (
                files.full_disk(100),
                self.assertRaisesRegex(
                    checkpoint.CheckpointWriteError, "cannot be written"
                ),
            ):
                toy.fit(fed, 1, [keeper])
            self.assertEqual(fed.rounds, 7)
        self.assertEqual(new.rounds, 0)
        self.assertEqual(before, self._contents())

    def test_early_stopping_ends_with_the_best_weights_saved(self):
        fed = toy.federated(sampling="shuffled")
        stop = tf.keras.callbacks.EarlyStopping(
            "loss", mode="max", min_delta=99.0, restore_best_weights=True
        )
        toy.fit(fed, 9, [RoundCheckpoint(self.path, delta=_DELTA), stop])
        self.assertEqual(fed.rounds, 2)
        saved = checkpoint.CheckpointDirectory(self.path).newest()
        for index, weight in enumerate(fed.get_weights()):
            np.testing.assert_array_equal(saved.state["weights"][index], weight)
            np.testing.assert_array_equal(stop.best_weights[index], weight)
