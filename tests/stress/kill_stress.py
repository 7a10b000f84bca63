"""50 kills at random moments in each mode: nothing released is uncharged.

A planted fault that this found: a ledger that writes each line one round late.
"""

import os
import random
import signal
import time

import numpy as np
import pytest

from tests.stress import killed_run
from tfdp_fl import accounting
from tfdp_fl.experiments import Settings, training
from tfdp_fl.keras import checkpoint

_KILLS = int(os.environ.get("TFDP_FL_KILLS", "50"))
_ROUNDS = set(range(killed_run.ROUNDS))


def _kill(directory, mode, rng):
    """Kills a run at a random moment; False if it was faster."""
    rounds = len(killed_run.seen(directory, mode)) + rng.randrange(8)
    process = killed_run.start(directory, mode)
    if rng.random() < 0.15:  # As it starts, resumes or traces.
        time.sleep(rng.random() * 3)
    else:
        while process.is_alive() and len(killed_run.seen(directory, mode)) < rounds:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.03)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    killed_run.join(process)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def _check(directory, mode, kills):
    """Checks every file; returns how many rounds are charged."""
    seen = killed_run.seen(directory, mode)
    charged = 0
    for path in killed_run.ledgers(directory, mode):
        if not path.exists():  # Killed before there was anything to see.
            assert not seen
            continue
        contents = accounting.PrivacyLedger.read(path)
        charged = len(contents.entries)
        # No released round is uncharged, and at most one a kill was charged and
        # not seen.
        witness = killed_run.witness(directory, mode)
        assert 0 <= charged - len(witness.read_text().splitlines()) <= kills
        assert set(seen) <= {e.round_index for e in contents.entries}
        told = killed_run.epsilon_of(contents, mode) * (1 + 1e-9)
        assert told >= max(seen.values(), default=0.0)
    saved = directory / killed_run.CHECKPOINTS
    if mode == "plain":
        saved = directory / training.CHECKPOINT
    if any(saved.glob("round-*.npz")):
        checkpoint.CheckpointDirectory(saved).newest()
    if mode == "plain" and (directory / training.CONFIG).exists():
        Settings.read(directory / training.CONFIG)
    return charged


@pytest.mark.parametrize("mode", killed_run.MODES)
def test_every_released_round_is_charged(tmp_path, mode):
    if mode == "workers":
        pytest.importorskip("ray")
    rng = random.Random(16)
    killed, runs, charged, seen = 0, 0, 0, 0
    resumes = mode != "ledger"  # It saves nothing to go on from.
    whole = tmp_path / "whole"
    if mode in killed_run.SAME:
        killed_run.join(killed_run.start(whole, mode))
    while killed < _KILLS:
        directory = tmp_path / f"run-{runs}"
        runs += 1
        own = 0
        while killed < _KILLS and _kill(directory, mode, rng):
            killed, own = killed + 1, own + 1
            _check(directory, mode, own)
            if not resumes:
                break
        if resumes:
            process = killed_run.start(directory, mode)
            killed_run.join(process)
            assert process.exitcode == 0
            assert set(killed_run.seen(directory, mode)) == _ROUNDS
        if mode in killed_run.SAME:
            ends = (np.load(each / killed_run.FINAL) for each in (whole, directory))
            np.testing.assert_array_equal(*ends)
        charged += _check(directory, mode, own)
        seen += len(killed_run.seen(directory, mode))
    assert seen > 0
    print(f"{mode}: {killed} kills, {runs} runs, {charged} charged, {seen} released")
