"""Two processes that go on with one run, or begin in one directory."""

from __future__ import annotations

import multiprocessing
from unittest import mock

import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import correlated_kill_test, files, toy
from tfdp_fl import accounting
from tfdp_fl.keras import callbacks, resuming

_DELTA = 1e-3
_ROUNDS = 6


def _federated():
    mechanism = tfdp_fl.CorrelatedNoise(
        clip_norm=0.5,
        noise_multiplier=2.0,
        strategy="blt:2",
        rounds=8,
        min_separation=4,
    )
    return toy.federated(mechanism, clients_per_round=10, sampling="cyclic")


def _fit(fed, rounds=_ROUNDS, **options):
    return toy.fit(fed, rounds, **options)


class GoesOnTest(parameterized.TestCase):
    """The noise of later rounds depends on what its memory knows to be released."""

    def setUp(self):
        super().setUp()
        self.path = files.directory(self) / "run"

    @parameterized.parameters(False, True)
    def test_one_ends_while_another_reads_the_checkpoint(self, saves):
        def interrupt(epoch, _):
            if epoch == 1:
                raise KeyboardInterrupt

        stop = tf.keras.callbacks.LambdaCallback(on_epoch_end=interrupt)
        with self.assertRaises(KeyboardInterrupt):
            _fit(_federated(), callbacks=[callbacks.RoundCheckpoint(self.path), stop])
        restore, faster = resuming.InterruptedRun.restore, [_federated()]

        def restored(*arguments):
            if faster:  # As another process, between the reading and the lock.
                keep = callbacks.RoundCheckpoint(self.path)
                _fit(faster.pop(), resume_from=self.path, callbacks=[keep])
            return restore(*arguments)

        slower, keep = _federated(), callbacks.RoundCheckpoint(self.path)
        with (
            mock.patch.object(resuming.InterruptedRun, "restore", restored),
            self.assertRaisesRegex(ValueError, "resume from its directory"),
        ):
            _fit(slower, resume_from=self.path, callbacks=[keep] * saves)
        self.assertEqual(slower.spending.rounds, slower.rounds)
        contents = accounting.PrivacyLedger.read(self.path / "ledger.jsonl")
        self.assertLen(contents.entries, _ROUNDS)
        # The faster one's checkpoints are as they were.
        self.assertTrue((self.path / f"round-{_ROUNDS:08d}.npz").exists())

    def test_an_evaluation_does_not_make_rounds_known(self):
        keep = [callbacks.RoundCheckpoint(self.path)]
        fed, other = _federated(), _federated()
        _fit(fed, 2, callbacks=keep)
        _fit(other, 2, resume_from=self.path)
        _fit(other, 2, callbacks=[callbacks.RoundCheckpoint(self.path)])
        private = tfdp_fl.PrivateMetrics(
            bounds={"loss": (0.0, 5.0)}, noise_multiplier=9.0
        )
        fed.evaluate_clients(toy.clients(), verbose=0, private=private)
        contents = accounting.PrivacyLedger.read(self.path / "ledger.jsonl")
        self.assertLen(contents.entries, 5)
        with self.assertRaisesRegex(ValueError, "does not know of"):
            _fit(fed, 2, callbacks=keep)
        self.assertEqual(fed.rounds, 2)

    def test_nor_does_a_ledger_of_several_runs(self):
        ledger = self.path.with_name("all.jsonl")

        def both():
            shared = callbacks.Ledger(ledger, append=True)
            return [callbacks.RoundCheckpoint(self.path), shared]

        fed, other = _federated(), _federated()
        _fit(fed, 2, callbacks=both())
        _fit(other, 2, resume_from=self.path, callbacks=both())
        _fit(other, 2, callbacks=both())
        with self.assertRaisesRegex(ValueError, "gone on with in two places"):
            _fit(fed, 2, callbacks=[callbacks.Ledger(ledger, append=True)])
        self.assertEqual(fed.rounds, 2)


class BeginsTest(absltest.TestCase):
    def test_two_runs_in_one_directory(self):
        path = files.directory(self)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.keras.correlated_kill_test"])
        run = correlated_kill_test.run
        processes = [
            context.Process(target=run, args=(str(path), name, None, 0))
            for name in ("one", "other")
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        self.assertEqual(sorted(each.exitcode for each in processes), [0, 1])
        contents = accounting.PrivacyLedger.read(path / "ledger.jsonl")
        self.assertLen(contents.by_run(), 1)
        self.assertLen(contents.entries, correlated_kill_test.ROUNDS)
