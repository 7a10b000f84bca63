"""Signals, full disks, and many fits at once.

`kill -9` is in `kill_stress.py`; damaged, foreign and missing files are in
`tests/accounting/ledger_test.py` and `tests/keras/resuming_test.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import tfdp_fl
from tests.keras import toy
from tests.stress import killed_run
from tfdp_fl import accounting
from tfdp_fl.experiments import run_directory
from tfdp_fl.keras import callbacks, checkpoint

_SIGNALS = int(os.environ.get("TFDP_FL_SIGNALS", "40"))
_DOCUMENTED = (accounting.LedgerError, checkpoint.CheckpointError, OSError)
read = accounting.PrivacyLedger.read


@pytest.mark.parametrize("first", [0, 1])
def test_a_signal_leaves_a_run_that_goes_on(tmp_path, first):
    """Half of them in the first round, which begins with a checkpoint."""
    rng = random.Random(5 + first)
    slowest, in_the_first, again = 0.0, 0, 0
    for number in range(_SIGNALS // 2):
        directory = tmp_path / f"run-{number}"
        process = killed_run.start(directory, "plain", as_the_script=True)
        saved = directory / run_directory.CHECKPOINT
        rounds = 0 if first else rng.randrange(1, 30)
        while process.is_alive() and (
            len(killed_run.seen(directory, "plain")) < rounds
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
        assert process.exitcode == 0
        result = run_directory.Run.read(directory).result
        if result["stopped"] != "interrupted":
            continue  # It was faster.
        in_the_first += result["rounds"] == 0
        process = killed_run.start(directory, "plain", as_the_script=True)
        killed_run.join(process)
        assert process.exitcode == 0
        assert run_directory.Run.read(directory).result["rounds"] == killed_run.ROUNDS
        # In the middle of a charge and its release, one is charged again.
        charged = len(read(directory / run_directory.LEDGER).entries)
        assert charged - killed_run.ROUNDS in (0, 1)
        again += charged - killed_run.ROUNDS
        seen = killed_run.seen(directory, "plain")
        assert set(seen) == set(range(killed_run.ROUNDS))
    assert slowest < 10
    assert in_the_first > 0 or not first
    print(f"slowest {slowest:.1f} s, {in_the_first} in round 1, {again} twice")


# Whatever cannot be written, nothing is released that is not charged.


class _Listener(callbacks.FederatedCallback):
    """Enters a context in a round, and notes what is released."""

    def __init__(self, round_index, context):
        super().__init__()
        self._round, self._context = round_index, context
        self.released: list[int] = []

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._round:
            self._context.__enter__()

    def on_round_released(self, round_index, logs):
        self.released.append(round_index)


def _run(directory, round_index=None, context=None):
    """Returns the weights, what was released, and the error, if there was one."""
    fed = toy.federated(tfdp_fl.AdaptiveClipping(noise_multiplier=1.0))
    saved = directory / "saved"
    listener = _Listener(round_index, context)
    error = None
    try:
        fed.fit(
            toy.clients(),
            rounds=6,
            batch_size=10,
            seed=3,
            verbose=0,
            callbacks=[
                listener,
                callbacks.RoundCheckpoint(saved, every=2),
                callbacks.Ledger(directory / "own.jsonl"),
            ],
            resume_from=saved if any(saved.glob("round-*.npz")) else None,
        )
    except _DOCUMENTED as raised:
        error = raised
    finally:
        if context is not None:
            with contextlib.suppress(Exception):
                context.__exit__(None, None, None)
    return fed.get_weights(), listener.released, error


def _check(directory, released):
    for path in (directory / "own.jsonl", directory / "saved" / "ledger.jsonl"):
        entries = read(path).entries if path.exists() else ()
        charged = [each.round_index for each in entries]
        assert len(released) <= len(charged), path
        assert set(released) <= set(charged)


@toy.same_draws_when_resumed()
def test_a_disk_that_is_full_at_any_byte(tmp_path):
    failed = 0
    (tmp_path / "whole").mkdir()
    whole, _, _ = _run(tmp_path / "whole")
    for round_index in range(6):
        for limit in (0, 100, 900, 1500, 2500, 4000, 6000, 9000):
            directory = tmp_path / f"{round_index}-{limit}"
            directory.mkdir()
            _, released, error = _run(directory, round_index, toy.full_disk(limit))
            failed += error is not None
            _check(directory, released)
            again, more, error = _run(directory)
            assert error is None
            _check(directory, released + more)
            for one, other in zip(whole, again, strict=True):
                np.testing.assert_array_equal(one, other)
    assert failed > 20


def test_fits_in_threads_are_as_alone(tmp_path):
    def train(seed, name, model, results):
        fed = toy.federated(tfdp_fl.AdaptiveClipping(noise_multiplier=1.0), model=model)
        saved = callbacks.RoundCheckpoint(tmp_path / f"{name}-{seed}")
        options = {"rounds": 8, "batch_size": 10, "verbose": 0}
        fed.fit(toy.clients(), seed=seed, callbacks=[saved], **options)
        results[name, seed] = fed.get_weights(), fed.epsilon(1e-3)

    results: dict[tuple[str, int], tuple[list[np.ndarray], float]] = {}
    threads = []
    for seed in range(4):
        train(seed, "alone", toy.dense(), results)
        arguments = (seed, "thread", toy.dense(), results)
        threads.append(threading.Thread(target=train, args=arguments))
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for seed in range(4):
        alone, together = results["alone", seed], results["thread", seed]
        assert alone[1] == together[1]
        for one, other in zip(alone[0], together[0], strict=True):
            np.testing.assert_array_equal(one, other)
        assert len(read(tmp_path / f"thread-{seed}" / "ledger.jsonl").entries) == 8
