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

_DELTA = 1e-3


class _Lines(tfdp_fl.callbacks.FederatedCallback):
    """Notes in which order things happen."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_rounds_planned(self, first_round, last_round):
        self.seen.append(("planned", first_round, last_round))

    def on_round_charged(self, round_index, charge, details):
        weights = self.federated_model.get_weights()
        self.seen.append(("charged", round_index, weights[0].copy()))

    def on_round_released(self, round_index, logs):
        weights = self.federated_model.get_weights()
        self.seen.append(("released", round_index, weights[0].copy()))

    def on_fit_end(self):
        self.seen.append(("end",))


class _Refuse(tfdp_fl.callbacks.FederatedCallback):
    """Cannot write a round down."""

    def __init__(self, round_index):
        super().__init__()
        self._round = round_index

    def on_round_charged(self, round_index, charge, details):
        if round_index == self._round:
            raise OSError("disk full")


class OrderTest(absltest.TestCase):
    def test_a_round_is_charged_before_the_model_changes(self):
        fed, lines = toy.federated(), _Lines()
        start = fed.get_weights()[0].copy()
        fed.fit(toy.clients(), rounds=2, verbose=0, callbacks=[lines])
        kinds = [each[0] for each in lines.seen]
        self.assertEqual(
            kinds,
            ["planned", *["charged", "released"] * 2, "end"],
        )
        np.testing.assert_array_equal(lines.seen[1][2], start)
        self.assertGreater(np.abs(lines.seen[2][2] - start).max(), 1e-6)
        np.testing.assert_array_equal(lines.seen[3][2], lines.seen[2][2])
        with self.subTest("a round that is not written does not happen"):
            before, spent = fed.get_weights(), fed.epsilon(_DELTA)
            with self.assertRaisesRegex(OSError, "disk full"):
                fed.fit(
                    toy.clients(),
                    rounds=2,
                    verbose=0,
                    callbacks=[_Refuse(2), lines],
                )
            toy.assert_same(before, fed)
            self.assertEqual(fed.epsilon(_DELTA), spent)
            self.assertEqual(fed.rounds, 2)
            self.assertEqual(lines.seen[-1], ("end",))


class PrivacyBudgetTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("constant", 1.0, 20),
        ("scheduled", lambda t: 1.5 - t / 10, lambda t: 10 + t),
    )
    def test_stops_before_the_round_that_would_overspend(self, noise, size):
        fed = toy.federated(
            tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=noise),
            clients_per_round=size,
            sampling="poisson",
        )
        # The rounds' costs, computed by hand.
        sampler = tfdp_fl.sampling.make_sampler("poisson", 40, size)
        history, after = accounting.PrivacyAccountant(), []
        for t in range(12):
            z = noise(t) if callable(noise) else noise
            event = tfdp_fl.mechanisms.FixedClipping(
                clip_norm=0.5, noise_multiplier=z
            ).round_event(0, None)
            history.add(sampler.charge(t, event))
            after.append(history.epsilon(_DELTA))
        epsilon = 0.5 * (after[4] + after[5])
        budget = tfdp_fl.callbacks.PrivacyBudget(epsilon, _DELTA)
        with self.subTest("first fit"):
            say = self.enter_context(mock.patch.object(type(fed), "say"))
            fed.fit(toy.clients(), rounds=12, verbose=0, callbacks=[budget])
            self.assertEqual(fed.rounds, 5)
            self.assertEqual(budget.stopped_before_round, 5)
            self.assertAlmostEqual(fed.epsilon(_DELTA), after[4], places=9)
            self.assertRegex(
                say.call_args_list[0].args[0], "allows 5 of the 12 rounds asked for"
            )
            self.assertRegex(
                say.call_args_list[1].args[0], "stopped before round 6, which would"
            )
        with self.subTest("a second fit goes on with what was spent"):
            history = fed.fit(toy.clients(), rounds=2, verbose=0, callbacks=[budget])
            self.assertEqual(fed.rounds, 5)
            self.assertEmpty(history.epoch)
        with self.subTest("a larger budget allows more"):
            larger = tfdp_fl.callbacks.PrivacyBudget(after[6], _DELTA)
            history = fed.fit(toy.clients(), rounds=7, verbose=0, callbacks=[larger])
            self.assertEqual(history.epoch, [5, 6])
            self.assertLen(history.history["epsilon"], 2)
            self.assertLessEqual(fed.epsilon(_DELTA), after[6])

    def test_local_budget_counts_the_client_seen_most(self):
        fed = toy.federated(
            tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=4.0),
            clients_per_round=40,
        )
        each = fed.mechanism.mu_squared(None)
        epsilon = accounting.epsilon_of_mu_squared(3.5 * each, _DELTA)
        budget = tfdp_fl.callbacks.PrivacyBudget(epsilon, _DELTA)
        fed.fit(toy.clients(), rounds=9, verbose=0, callbacks=[budget])
        self.assertEqual(fed.rounds, 3)

    def test_no_noise_no_round(self):
        fed = toy.federated(tfdp_fl.NoPrivacy())
        budget = tfdp_fl.callbacks.PrivacyBudget(100.0, _DELTA)
        history = fed.fit(toy.clients(), rounds=3, verbose=0, callbacks=[budget])
        self.assertEmpty(history.epoch)


class LedgerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = files.directory(self) / "ledger.jsonl"

    def test_an_interrupt_at_the_end_of_fit_leaves_none_locked(self):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)

        class Interrupted(tfdp_fl.callbacks.FederatedCallback):
            def on_fit_end(self):
                os.kill(os.getpid(), signal.SIGINT)

        fed = toy.federated()
        ledger = tfdp_fl.callbacks.Ledger(self.path)
        with self.assertRaises(KeyboardInterrupt):
            fed.fit(toy.clients(), 1, callbacks=[Interrupted(), ledger])
        with accounting.PrivacyLedger(self.path, "append") as opened:
            self.assertEqual(opened.rounds, 1)
        fed.fit(toy.clients(), 1, callbacks=[ledger], verbose=0)

    def test_an_error_of_another_callback_leaves_none_locked(self):
        class Fails(tfdp_fl.callbacks.FederatedCallback):
            def on_fit_end(self):
                raise OSError("disk full")

        fed, ledger = toy.federated(), tfdp_fl.callbacks.Ledger(self.path)
        with self.assertRaisesRegex(OSError, "disk full"):
            fed.fit(toy.clients(), 1, verbose=0, callbacks=[Fails(), ledger])
        with accounting.PrivacyLedger(self.path, "append") as opened:
            self.assertEqual(opened.rounds, 1)

    def test_holds_every_round_of_several_fits(self):
        fed = toy.federated()
        ledger = tfdp_fl.callbacks.Ledger(self.path)
        fit = {"verbose": 0, "batch_size": 10}
        fed.fit(toy.clients(), rounds=2, callbacks=[ledger], **fit)
        fed.fit(toy.clients(), rounds=1, callbacks=[ledger], **fit)
        contents = accounting.PrivacyLedger.read(self.path)
        self.assertEqual([e.round_index for e in contents.entries], [0, 1, 2])
        self.assertEqual({e.cohort_size for e in contents.entries}, {20})
        self.assertEqual(contents.entries[0].details, {"noise_multiplier": 1.0})
        self.assertEqual(contents.epsilon(_DELTA), fed.epsilon(_DELTA))
        with self.subTest("rounds that were run without it are made up for"):
            fed.fit(toy.clients(), rounds=2, **fit)
            fed.fit(toy.clients(), rounds=1, callbacks=[ledger], **fit)
            contents = accounting.PrivacyLedger.read(self.path)
            self.assertLen(contents.entries, 6)
            self.assertEqual(contents.epsilon(_DELTA), fed.epsilon(_DELTA))
        with self.subTest("so they are by a new one"):
            other = self.path.with_name("other.jsonl")
            fed.fit(
                toy.clients(),
                rounds=1,
                callbacks=[tfdp_fl.callbacks.Ledger(other)],
                **fit,
            )
            self.assertEqual(
                accounting.epsilon_from_ledger(other, _DELTA),
                fed.epsilon(_DELTA),
            )
        with self.subTest("another run is refused, unless told to append"):
            new = toy.federated()
            with self.assertRaisesRegex(ValueError, "ledger of another run"):
                new.fit(toy.clients(), callbacks=[ledger], **fit)
            self.assertEqual(new.rounds, 0)
            both = tfdp_fl.callbacks.Ledger(self.path, append=True)
            new.fit(toy.clients(), callbacks=[both], **fit)
            contents = accounting.PrivacyLedger.read(self.path)
            self.assertLen(contents.entries, 7)
            self.assertAlmostEqual(
                contents.epsilon(_DELTA), new.epsilon(_DELTA), places=9
            )

    def _append(self):
        return tfdp_fl.callbacks.Ledger(self.path, append=True)

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
        clients = toy.clients()
        first, second, whole = make(), make(), make()
        first.fit(clients, rounds=10, verbose=0, callbacks=[self._append()])
        # Rounds that nobody wrote down, and then as many with the ledger.
        second.fit(clients, rounds=10, verbose=0)
        self.assertEqual(second.epsilon(delta), first.epsilon(delta))
        second.fit(clients, rounds=10, verbose=0, callbacks=[self._append()])
        whole.fit(clients, rounds=30, verbose=0)
        expected = whole.epsilon(delta)
        self.assertAlmostEqual(expected, known, delta=0.005)
        self.assertAlmostEqual(second.epsilon(delta), expected, places=9)
        contents = accounting.PrivacyLedger.read(self.path)
        self.assertAlmostEqual(contents.epsilon(delta), expected, places=9)
        self.assertLen(contents.entries, 30)
        self.assertEqual(
            {run: len(lines) for run, lines in contents.by_run().items()},
            {first.run.run_id: 10, second.run.run_id: 20},
        )
        with self.subTest("to read it again adds nothing"):
            second.fit(clients, rounds=1, verbose=0, callbacks=[self._append()])
            whole.fit(clients, rounds=1, verbose=0)
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
            keeper = tfdp_fl.callbacks.RoundCheckpoint(path)
            second.fit(clients, rounds=1, verbose=0, callbacks=[keeper])
            resumed = make()
            resumed.fit(clients, rounds=1, verbose=0, resume_from=path)
            self.assertEqual(resumed.run.run_id, second.run.run_id)
            self.assertAlmostEqual(
                resumed.epsilon(delta), second.epsilon(delta), places=9
            )

    def test_a_budget_counts_a_ledger_wherever_it_stands(self):
        make = functools.partial(toy.federated, sampling="poisson")
        first, second = make(), make()
        first.fit(toy.clients(), 3, verbose=0, callbacks=[self._append()])
        spent = accounting.epsilon(1.0, "poisson", 40, 20, 4, _DELTA)
        budget = tfdp_fl.callbacks.PrivacyBudget(spent * 1.001, _DELTA)
        second.fit(toy.clients(), 3, verbose=0, callbacks=[budget, self._append()])
        self.assertEqual(second.rounds, 1)
        self.assertLessEqual(second.epsilon(_DELTA), budget.epsilon)

    def test_runs_that_cannot_be_added_are_refused(self):
        clients = toy.clients()
        toy.federated().fit(clients, verbose=0, callbacks=[self._append()])
        local = toy.federated(tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=4.0))
        poisson = toy.federated(sampling="poisson")
        before = self.path.read_bytes()
        for fed, message in (
            (local, "path must be a ledger of runs with a local guarantee"),
            (poisson, "one guarantee cannot cover both"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                fed.fit(clients, verbose=0, callbacks=[self._append()])
            self.assertEqual(fed.rounds, 0)
            self.assertEqual(self.path.read_bytes(), before)

    def test_one_run_in_two_places_is_refused(self):
        clients = toy.clients()
        path = self.path.with_name("run")
        first = toy.federated()
        first.fit(
            clients,
            2,
            verbose=0,
            callbacks=[tfdp_fl.callbacks.RoundCheckpoint(path)],
        )
        copy = path.with_name("copy")
        shutil.copytree(path, copy)
        second = toy.federated()
        second.fit(clients, 2, verbose=0, resume_from=copy)
        ledger = tfdp_fl.callbacks.Ledger(copy / "ledger.jsonl", append=True)
        second.fit(clients, 1, verbose=0, callbacks=[ledger])
        with self.assertRaisesRegex(ValueError, "gone on with in two places"):
            first.fit(clients, 1, verbose=0, callbacks=[ledger])

    def test_a_ledger_that_is_deleted_stops_the_training(self):
        fed = toy.federated()

        class Delete(tf.keras.callbacks.Callback):
            def on_epoch_end(this, epoch, logs=None):  # noqa: N805
                self.path.unlink()

        with self.assertRaises(accounting.LedgerMovedError):
            fed.fit(
                toy.clients(),
                3,
                verbose=0,
                callbacks=[self._append(), Delete()],
            )
        self.assertEqual(fed.rounds, 1)
        self.assertEqual(fed.spending.rounds, 1)

    def test_disk_full_abandons_the_round(self):
        fed = toy.federated()
        ledger = tfdp_fl.callbacks.Ledger(self.path)
        fed.fit(toy.clients(), rounds=1, verbose=0, callbacks=[ledger])
        before, weights = self.path.read_bytes(), fed.get_weights()
        for room in (0, 40):
            with (
                files.full_disk(len(before) + room),
                self.assertRaisesRegex(
                    accounting.LedgerWriteError, "must not be released"
                ),
            ):
                fed.fit(toy.clients(), rounds=1, verbose=0, callbacks=[ledger])
            self.assertEqual(self.path.read_bytes(), before)
            self.assertEqual(fed.rounds, 1)
            toy.assert_same(weights, fed)
        fed.fit(toy.clients(), rounds=1, verbose=0, callbacks=[ledger])
        self.assertLen(accounting.PrivacyLedger.read(self.path).entries, 2)


class RoundCheckpointTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = files.directory(self) / "run"

    def _fit(self, fed, rounds=1, callbacks=(), **options):
        return fed.fit(
            toy.clients(),
            rounds=rounds,
            verbose=0,
            callbacks=list(callbacks),
            **options,
        )

    def _files(self):
        return sorted(each.name for each in self.path.iterdir())

    def test_an_error_at_the_end_is_raised_in_a_handler_too(self):
        fed, write = toy.federated(), checkpoint.CheckpointDirectory.write

        def fails(files, made, keep):
            if made.round_index == 2:
                raise checkpoint.CheckpointWriteError("disk full")
            return write(files, made, keep)

        saved = tfdp_fl.callbacks.RoundCheckpoint(self.path, every=100)
        with (
            mock.patch.object(checkpoint.CheckpointDirectory, "write", fails),
            self.assertRaisesRegex(checkpoint.CheckpointWriteError, "disk full"),
        ):
            try:
                raise RuntimeError("the first try")
            except RuntimeError:
                fed.fit(toy.clients(), 2, verbose=0, callbacks=[saved])

    def test_what_a_directory_holds(self):
        fed = toy.federated(sampling="shuffled", delta=_DELTA)
        keeper = tfdp_fl.callbacks.RoundCheckpoint(self.path, every=2, keep=2)
        self._fit(fed, 5, [keeper])
        self.assertEqual(
            self._files(),
            [
                "ledger.jsonl",
                "lock",
                "privacy.txt",
                "round-00000004.npz",
                "round-00000005.npz",
            ],
        )
        statement = (self.path / "privacy.txt").read_text()
        self.assertEqual(statement, fed.privacy_statement() + "\n")
        with self.subTest("a second fit of the same model goes on"):
            self._fit(fed, 1, [keeper])
            again = tfdp_fl.callbacks.RoundCheckpoint(self.path)
            self._fit(fed, 1, [again])
            self.assertIn("round-00000007.npz", self._files())
            self.assertEqual(
                accounting.epsilon_from_ledger(self.path / "ledger.jsonl", _DELTA),
                fed.epsilon(_DELTA),
            )
        before = {file.name: file.read_bytes() for file in self.path.iterdir()}
        new = toy.federated(sampling="shuffled")
        with (
            self.subTest("a new training is refused before it starts"),
            self.assertRaisesRegex(
                ValueError, "must not hold the checkpoints of another run.*resu"
            ),
        ):
            self._fit(new, 1, [keeper])
        with self.subTest("so is one while another has the directory"):
            holder = checkpoint.CheckpointDirectory(self.path)
            holder.acquire()
            with self.assertRaises(checkpoint.CheckpointInUseError):
                self._fit(fed, 1, [keeper])
            holder.release()
        with self.subTest("and one whose disk is full"):
            with (
                files.full_disk(100),
                self.assertRaisesRegex(
                    checkpoint.CheckpointWriteError, "cannot be written"
                ),
            ):
                self._fit(fed, 1, [keeper])
            self.assertEqual(fed.rounds, 7)
        self.assertEqual(new.rounds, 0)
        self.assertEqual(
            before,
            {file.name: file.read_bytes() for file in self.path.iterdir()},
        )

    def test_early_stopping_ends_with_the_best_weights_saved(self):
        fed = toy.federated(sampling="shuffled")
        stop = tf.keras.callbacks.EarlyStopping(
            "loss", mode="max", min_delta=99.0, restore_best_weights=True
        )
        keeper = tfdp_fl.callbacks.RoundCheckpoint(self.path, delta=_DELTA)
        self._fit(fed, 9, [keeper, stop])
        self.assertEqual(fed.rounds, 2)
        saved = checkpoint.CheckpointDirectory(self.path).newest()
        for index, weight in enumerate(fed.get_weights()):
            np.testing.assert_array_equal(saved.arrays[f"weights/{index}"], weight)
            np.testing.assert_array_equal(stop.best_weights[index], weight)


if __name__ == "__main__":
    absltest.main()
