"""A run with correlated noise that ends itself, `kill -9`, where it is told."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable
from unittest import mock

import numpy as np
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import _files
from tfdp_fl.engine import engine as engine_lib
from tfdp_fl.keras import callbacks, checkpoint, round_loop

ROUNDS, SEPARATION, EVERY, COHORT = 8, 4, 2, 10
CLIP, NOISE = 0.5, 2.0
DELTA = 1e-3
# Where a process may die, in the order in which a round passes them.
POINTS = (
    "collected",
    "charged",
    "released",
    "seen",
    "half a checkpoint",
    "saved",
)


def mechanism() -> tfdp_fl.CorrelatedNoise:
    """Returns the mechanism of every run."""
    return tfdp_fl.CorrelatedNoise(
        clip_norm=CLIP,
        noise_multiplier=NOISE,
        strategy="blt:2",
        rounds=ROUNDS,
        min_separation=SEPARATION,
    )


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Witness(callbacks.FederatedCallback):
    """Keeps the model of each round, as soon as somebody can see it."""

    def __init__(self, path: pathlib.Path, process: str, last: int | None):
        super().__init__()
        self._path, self._process, self._last = path, process, last

    def on_round_released(self, round_index, logs):
        del logs
        weights = np.concatenate(
            [np.ravel(w) for w in self.federated_model.get_weights()]
        )
        np.save(self._path / f"{self._process}-{round_index}.npy", weights)
        if round_index == self._last:
            _die()


def _dying(
    original: Callable, at_call: int, before: bool
) -> Callable:  # Of the arguments of `original`.
    """Returns a function that dies before or after a call of another."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if before and calls == at_call:
            _die()
        result = original(*args, **kwargs)
        if calls == at_call:
            _die()
        return result

    return wrapped


def _dying_half_way(path: pathlib.Path, rounds: int) -> Callable:
    """Returns a `write_atomically` that dies in one checkpoint's middle."""
    fatal = checkpoint.CheckpointDirectory(path).file(rounds)
    original = checkpoint.write_atomically

    def wrapped(file, data, *args, **kwargs):
        if file == fatal:
            with _files.replacing(file, mode=0o600, sync=True) as stream:
                stream.write(data[: len(data) // 2])
                stream.flush()
                _die()
        original(file, data, *args, **kwargs)

    return wrapped


def run(directory: str, process: str, point: str | None, round_index: int) -> None:
    """Trains to the end, or to a point of a round.

    Args:
      directory: Where checkpoints, the ledger and the witness's files are.
      process: A name for the witness's files.
      point: One of `POINTS`; None: to the end.
      round_index: The round in which it dies, counted from 0.
    """
    path = pathlib.Path(directory)
    targets = {
        "collected": (round_loop.RoundLoop, "_charge", True, round_index + 1),
        "charged": (engine_lib.CohortEngine, "release", True, round_index + 1),
        "released": (
            engine_lib.CohortEngine,
            "release",
            False,
            round_index + 1,
        ),
        # One more is written before the first round.
        "saved": (
            checkpoint.CheckpointDirectory,
            "write",
            False,
            (round_index + 1) // EVERY + 1,
        ),
    }
    resumes = any(path.glob("round-*.npz"))
    fed = toy.federated(
        mechanism(),
        clients_per_round=COHORT,
        sampling="cyclic",
        # Nothing is learned: what moves the model is the noise.
        compile_options={"optimizer": tf.keras.optimizers.SGD(0.0)},
    )
    if point in targets:
        owner, name, before, at_call = targets[point]
        dying = _dying(getattr(owner, name), at_call, before)
        mock.patch.object(owner, name, dying).start()
    if point == "half a checkpoint":
        dying = _dying_half_way(path, round_index + 1)
        mock.patch.object(checkpoint, "write_atomically", dying).start()
    fed.fit(
        toy.clients(),
        rounds=ROUNDS,
        seed=3,
        verbose=0,
        callbacks=[
            _Witness(path, process, round_index if point == "seen" else None),
            callbacks.RoundCheckpoint(path, every=EVERY, delta=DELTA),
        ],
        resume_from=path if resumes else None,
    )
    spent = sum(
        count * charge.noise_multiplier**-2 for charge, count in fed.spending.charges
    )
    memory = fed.run.mechanism_state.memory
    np.savez(
        path / "end.npz",
        spent=spent,
        position=memory.position.numpy(),
        buffers=np.concatenate(
            [b.numpy().reshape([b.shape[0], -1]) for b in memory.buffers], 1
        ),
    )
