"""Signals, full disks, directories that turn read-only, and many fits at once.

`kill -9` is in `kill_stress.py`; damaged, foreign and missing files are in
`tests/accounting/ledger_test.py` and `tests/keras/resuming_test.py`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import random
import signal
import threading
import time

import numpy as np
import tensorflow as tf
from absl.testing import absltest

import tfdp_fl
from tests.keras import files, toy
from tests.stress import killed_run
from tfdp_fl import accounting
from tfdp_fl.experiments import run_directory
from tfdp_fl.keras import callbacks, checkpoint

_SIGNALS = int(os.environ.get("TFDP_FL_SIGNALS", "40"))
_DOCUMENTED = (
    accounting.LedgerError,
    checkpoint.CheckpointError,
    OSError,
)


class SignalTest(absltest.TestCase):
    def _seen(self, directory):
        name = f"{directory.name}-{killed_run.WITNESS}"
        path = directory.parent / name
        return path.read_text().split()[::2] if path.exists() else []

    def _start(self, directory):
        process = self.context.Process(
            target=killed_run.run_as_the_script, args=(str(directory),)
        )
        process.start()
        return process

    def test_leave_a_run_that_goes_on(self):
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.stress.killed_run"])
        rng = random.Random(5)
        root = files.directory(self)
        slowest, in_the_first, again = 0.0, 0, 0
        for number in range(_SIGNALS):
            directory = root / f"run-{number}"
            process = self._start(directory)
            saved = directory / run_directory.CHECKPOINT
            # Half of them in the first round, which begins with a checkpoint.
            rounds = 0 if number % 2 else rng.randrange(1, 30)
            while process.is_alive() and (
                len(self._seen(directory)) < rounds
                or not any(saved.glob("round-*.npz"))
            ):
                time.sleep(0.002)
            time.sleep(rng.random() * 0.3)
            before = after = killed_run.processor_seconds(process.pid)
            os.kill(process.pid, rng.choice([signal.SIGINT, signal.SIGTERM]))
            while process.is_alive():
                after = max(after, killed_run.processor_seconds(process.pid))
                process.join(0.02)
            slowest = max(slowest, after - before)
            self.assertEqual(process.exitcode, 0)
            result = run_directory.Run.read(directory).result
            if result["stopped"] != "interrupted":
                continue  # It was faster.
            in_the_first += result["rounds"] == 0
            process = self._start(directory)
            killed_run.join(process)
            self.assertEqual(process.exitcode, 0)
            run = run_directory.Run.read(directory)
            self.assertEqual(run.result["rounds"], killed_run.ROUNDS)
            entries = accounting.PrivacyLedger.read(
                directory / run_directory.LEDGER
            ).entries
            # In the middle of a charge and its release, one is charged again.
            self.assertBetween(len(entries) - killed_run.ROUNDS, 0, 1)
            again += len(entries) - killed_run.ROUNDS
            self.assertEqual(
                {int(each) for each in self._seen(directory)},
                set(range(killed_run.ROUNDS)),
            )
        self.assertLess(slowest, 10)
        self.assertGreater(in_the_first, 0)
        print(f"slowest {slowest:.1f} s, {in_the_first} in round 1, {again} twice")


class _Breaks(tf.keras.callbacks.Callback):
    """Enters a context in a round, and leaves it when training ends."""

    def __init__(self, round_index, context):
        super().__init__()
        self._round, self._context = round_index, context

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._round:
            self._context.__enter__()


class DiskTest(absltest.TestCase):
    """Whatever cannot be written, nothing is released that is not charged."""

    def _run(self, directory, round_index=None, context=None):
        fed = toy.federated(tfdp_fl.AdaptiveClipping(noise_multiplier=1.0))
        released: list[int] = []

        class Seen(callbacks.FederatedCallback):
            def on_round_released(self, round_index, logs):
                released.append(round_index)

        listeners = [
            Seen(),
            callbacks.RoundCheckpoint(directory / "saved", every=2),
            callbacks.Ledger(directory / "own.jsonl"),
        ]
        if context is not None:
            listeners.insert(0, _Breaks(round_index, context))
        saved = directory / "saved"
        error = None
        try:
            fed.fit(
                toy.clients(),
                rounds=6,
                batch_size=10,
                seed=3,
                verbose=0,
                callbacks=listeners,
                resume_from=saved if any(saved.glob("round-*.npz")) else None,
            )
        except _DOCUMENTED as raised:
            error = raised
        finally:
            if context is not None:
                with contextlib.suppress(Exception):
                    context.__exit__(None, None, None)
        return fed, released, error

    def _check(self, directory, released):
        for path in (
            directory / "own.jsonl",
            directory / "saved" / "ledger.jsonl",
        ):
            charged = []
            if path.exists():
                contents = accounting.PrivacyLedger.read(path)
                charged = [each.round_index for each in contents.entries]
            self.assertLessEqual(len(released), len(charged), str(path))
            self.assertContainsSubset(set(released), set(charged))

    def test_full_at_any_byte(self):
        failed = 0
        whole, _, _ = self._run(files.directory(self))
        for round_index in range(6):
            for limit in (0, 100, 900, 1500, 2500, 4000, 6000, 9000):
                directory = files.directory(self)
                _, released, error = self._run(
                    directory, round_index, files.full_disk(limit)
                )
                failed += error is not None
                self._check(directory, released)
                again, more, error = self._run(directory)
                self.assertIsNone(error)
                self._check(directory, released + more)
                for one, other in zip(
                    whole.get_weights(), again.get_weights(), strict=True
                ):
                    np.testing.assert_array_equal(one, other)
        self.assertGreater(failed, 20)


class AtOnceTest(absltest.TestCase):
    def _train(self, seed, directory: pathlib.Path):
        fed = toy.federated(
            tfdp_fl.AdaptiveClipping(noise_multiplier=1.0),
            model=self.models[seed],
        )
        fed.fit(
            toy.clients(),
            rounds=8,
            batch_size=10,
            seed=seed,
            verbose=0,
            callbacks=[callbacks.RoundCheckpoint(directory)],
        )
        return fed.get_weights(), fed.epsilon(1e-3)

    def test_fits_in_threads_are_as_alone(self):
        root = files.directory(self)
        alone, together, errors = {}, {}, []
        self.models = {seed: toy.dense() for seed in range(4)}
        for seed in range(4):
            alone[seed] = self._train(seed, root / f"alone-{seed}")

        def work(seed):
            try:
                together[seed] = self._train(seed, root / f"thread-{seed}")
            except Exception as error:
                errors.append(error)

        self.models = {seed: toy.dense() for seed in range(4)}
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self.assertEqual(errors, [])
        for seed in range(4):
            self.assertEqual(alone[seed][1], together[seed][1])
            for one, other in zip(alone[seed][0], together[seed][0], strict=True):
                np.testing.assert_array_equal(one, other)
            lines = accounting.PrivacyLedger.read(
                root / f"thread-{seed}" / "ledger.jsonl"
            )
            self.assertLen(lines.entries, 8)


if __name__ == "__main__":
    absltest.main()
