"""Signals, full disks, many fits at once, and what a program leaves behind.

`kill -9` is in `kill_stress.py`; damaged, foreign and missing files are in
`tests/accounting/ledger_test.py` and `tests/keras/resuming_test.py`.
"""

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

import tfdp_fl
from tests.keras import toy
from tests.scripts.programs import ROOT
from tests.stress import killed_run
from tfdp_fl import accounting
from tfdp_fl.experiments import training
from tfdp_fl.keras import callbacks, checkpoint

_SIGNALS = int(os.environ.get("TFDP_FL_SIGNALS", "40"))
_DOCUMENTED = (accounting.LedgerError, checkpoint.CheckpointError, OSError)
read = accounting.PrivacyLedger.read


def _result(directory):
    return json.loads((directory / training.RESULT).read_text())


@pytest.mark.parametrize("first", [0, 1])
def test_a_signal_leaves_a_run_that_goes_on(tmp_path, first):
    """Half of them in the first round, which begins with a checkpoint."""
    rng = random.Random(5 + first)
    slowest, in_the_first, again = 0.0, 0, 0
    for number in range(_SIGNALS // 2):
        directory = tmp_path / f"run-{number}"
        process = killed_run.start(directory, "plain", as_the_script=True)
        saved = directory / training.CHECKPOINT
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
        result = _result(directory)
        if result["stopped"] != "interrupted":
            continue  # It was faster.
        in_the_first += result["rounds"] == 0
        process = killed_run.start(directory, "plain", as_the_script=True)
        killed_run.join(process)
        assert process.exitcode == 0
        assert _result(directory)["rounds"] == killed_run.ROUNDS
        # In the middle of a charge and its release, one is charged again.
        charged = len(read(directory / training.LEDGER).entries)
        assert charged - killed_run.ROUNDS in (0, 1)
        again += charged - killed_run.ROUNDS
        seen = killed_run.seen(directory, "plain")
        assert set(seen) == set(range(killed_run.ROUNDS))
    assert slowest < 10
    assert in_the_first > 0 or not first
    print(f"slowest {slowest:.1f} s, {in_the_first} in round 1, {again} twice")


# Whatever cannot be written, nothing is released that is not charged.


class _Listener(callbacks.FederatedCallback):
    """Fills the disk in a round, and notes what is released."""

    def __init__(self, round_index, limit):
        super().__init__()
        self._round, self._limit = round_index, limit
        self.full_disk = contextlib.ExitStack()
        self.released: list[int] = []

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._round:
            self.full_disk.enter_context(toy.full_disk(self._limit))

    def on_round_released(self, round_index, logs):
        self.released.append(round_index)


def _run(directory, round_index=None, limit=None):
    fed = toy.federated(tfdp_fl.AdaptiveClipping(noise_multiplier=1.0))
    saved, error = directory / "saved", None
    listener = _Listener(round_index, limit)
    ledger = callbacks.Ledger(directory / "own.jsonl")
    listeners = [listener, callbacks.RoundCheckpoint(saved, every=2), ledger]
    resume = saved if any(saved.glob("round-*.npz")) else None
    options = {"batch_size": 10, "seed": 3, "resume_from": resume}
    with listener.full_disk:
        try:
            toy.fit(fed, 6, listeners, **options)
        except _DOCUMENTED as raised:
            error = raised
    return fed.get_weights(), listener.released, error


@toy.same_draws_when_resumed()
def test_a_disk_that_is_full_at_any_byte(tmp_path):
    failed = 0
    (tmp_path / "whole").mkdir()
    whole, _, _ = _run(tmp_path / "whole")
    for round_index in range(6):
        for limit in (0, 100, 900, 1500, 2500, 4000, 6000, 9000):
            directory, released = tmp_path / f"{round_index}-{limit}", []
            directory.mkdir()
            for full in ((round_index, limit), ()):
                weights, more, error = _run(directory, *full)
                released += more
                for name in ("own.jsonl", "saved/ledger.jsonl"):
                    path = directory / name
                    entries = read(path).entries if path.exists() else ()
                    charged = [each.round_index for each in entries]
                    assert len(released) <= len(charged), path
                    assert set(released) <= set(charged)
                failed += bool(full) and error is not None
            assert error is None
            toy.assert_same(whole, weights)
    assert failed > 20


def test_fits_in_threads_are_as_alone(tmp_path):
    def trained(name, seed, model):
        fed = toy.federated(tfdp_fl.AdaptiveClipping(noise_multiplier=1.0), model=model)
        saved = callbacks.RoundCheckpoint(tmp_path / f"{name}-{seed}")
        toy.fit(fed, 8, [saved], batch_size=10, seed=seed)
        return fed.get_weights(), fed.epsilon(1e-3)

    models, seeds = [toy.dense() for _ in range(8)], range(4)
    alone = [trained("alone", seed, models[seed]) for seed in seeds]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = [*pool.map(trained, ["thread"] * 4, seeds, models[4:])]
    for seed, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert one[1] == other[1]
        toy.assert_same(one[0], other[0])
        assert len(read(tmp_path / f"thread-{seed}" / "ledger.jsonl").entries) == 8


# TFF's worker listens on all interfaces and runs whatever graph it is sent.
_PROGRAM = """
import os, pathlib
import numpy as np, tensorflow_federated as tff
from tfdp_fl import aggregators

process = aggregators.FixedClippingFactory(
    clip_norm=1.0, noise_multiplier=1.0, clients_per_round=1
).create(tff.TensorType(np.float32, [3]))
process.next(process.initialize(), [np.ones(3, np.float32)])
for each in pathlib.Path("/proc").glob("[0-9]*/stat"):
    stat = each.read_text() if each.exists() else ""
    if "(worker_binary)" in stat and stat.split()[3] == str(os.getpid()):
        print(each.parent)
"""


def test_a_worker_of_tff_ends_with_the_program(tmp_path):
    pytest.importorskip("tensorflow_federated")
    options = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    with (tmp_path / "out").open("w") as out:  # The worker would hold a pipe open.
        options |= {"stdout": out, "stderr": subprocess.DEVNULL, "check": True}
        subprocess.run([sys.executable, "-c", _PROGRAM], **options)
    (worker,) = (tmp_path / "out").read_text().split()  # Else this says nothing.
    until = time.monotonic() + 10
    while os.path.exists(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(worker)
