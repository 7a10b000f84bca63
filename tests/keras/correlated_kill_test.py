"""`kill -9` at every point of a round with correlated noise."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.keras import files, toy
from tfdp_fl import _files, accounting
from tfdp_fl.engine import engine as engine_lib
from tfdp_fl.keras import callbacks, checkpoint, round_loop

ROUNDS, _EVERY, _COHORT = 8, 2, 10
_CLIP, _NOISE = 0.5, 2.0
_LONGEST_SECONDS = 600
# Where a process dies, in the order in which a round passes it: the point, the round
# (counted from 0), and how many rounds were charged and saved by then.
_DEATHS = (
    ("collected", 4, 4, 4),
    ("charged", 4, 5, 4),
    ("released", 4, 5, 4),
    ("seen", 4, 5, 4),
    ("half a checkpoint", 5, 6, 4),
    ("saved", 5, 6, 6),
)


def _mechanism() -> tfdp_fl.CorrelatedNoise:
    return tfdp_fl.CorrelatedNoise(
        clip_norm=_CLIP,
        noise_multiplier=_NOISE,
        strategy="blt:2",
        rounds=ROUNDS,
        min_separation=4,
    )


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Witness(callbacks.FederatedCallback):
    """Keeps the model of each round, as soon as somebody can see it."""

    def __init__(self, path: pathlib.Path, process: str, last: int | None):
        super().__init__()
        self._path, self._process, self._last = path, process, last

    def on_round_released(self, round_index, logs):
        weights = toy.flat(self.federated_model)
        np.save(self._path / f"{self._process}-{round_index}.npy", weights)
        if round_index == self._last:
            _die()


def _dies(owner, name: str, at_call: int, before: bool) -> None:
    """Has a method die before or after one of its calls."""
    original, calls = getattr(owner, name), 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if before and calls == at_call:
            _die()
        result = original(*args, **kwargs)
        if calls == at_call:
            _die()
        return result

    mock.patch.object(owner, name, wrapped).start()


def _dies_half_way(fatal: pathlib.Path) -> None:
    """Has the process die in the middle of writing a file."""
    original = checkpoint.write_atomically

    def wrapped(file, data, *args, **kwargs):
        if file == fatal:
            with _files.replacing(file, mode=0o600, sync=True) as stream:
                stream.write(data[: len(data) // 2])
                stream.flush()
                _die()
        original(file, data, *args, **kwargs)

    mock.patch.object(checkpoint, "write_atomically", wrapped).start()


def run(directory: str, process: str, point: str | None, round_index: int) -> None:
    """Trains to the end, or to a point of a round (None: to the end)."""
    path, engine = pathlib.Path(directory), engine_lib.CohortEngine
    saved = checkpoint.CheckpointDirectory
    match point:
        case "collected":
            _dies(round_loop.RoundLoop, "_charge", round_index + 1, before=True)
        case "charged" | "released":
            _dies(engine, "release", round_index + 1, before=point == "charged")
        case "half a checkpoint":
            _dies_half_way(saved(path).file(round_index + 1))
        case "saved":  # One more is written before the first round.
            _dies(saved, "write", (round_index + 1) // _EVERY + 1, before=False)
    resumes = any(path.glob("round-*.npz"))
    fed = toy.federated(
        _mechanism(),
        clients_per_round=_COHORT,
        sampling="cyclic",
        # Nothing is learned: what moves the model is the noise.
        compile_options={"optimizer": tf.keras.optimizers.SGD(0.0)},
    )
    fed.fit(
        toy.clients(),
        rounds=ROUNDS,
        seed=3,
        verbose=0,
        callbacks=[
            _Witness(path, process, round_index if point == "seen" else None),
            callbacks.RoundCheckpoint(path, every=_EVERY, delta=1e-3),
        ],
        resume_from=path if resumes else None,
    )
    spent = sum(
        count * charge.noise_multiplier**-2 for charge, count in fed.spending.charges
    )
    memory = fed.run.mechanism_state.memory
    buffers = [b.numpy().reshape([b.shape[0], -1]) for b in memory.buffers]
    np.savez(
        path / "end.npz",
        spent=spent,
        position=memory.position.numpy(),
        buffers=np.concatenate(buffers, 1),
    )


class CorrelatedKillTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # Forked from one process that has imported everything, once.
        cls.context = multiprocessing.get_context("forkserver")
        cls.context.set_forkserver_preload(["tests.keras.correlated_kill_test"])

    def _run(self, directory, name, point=None, round_index=0):
        process = self.context.Process(
            target=run, args=(str(directory), name, point, round_index)
        )
        process.start()
        process.join(_LONGEST_SECONDS)
        return process.exitcode

    def _noise(self, directory: pathlib.Path, name: str) -> dict:
        """Returns the noise of each round that could be seen, by round."""
        models = {-1: toy.flat(toy.dense())}
        own = {}
        # The second process goes on from a model of the first.
        for process in ("first", name):
            own = {
                int(file.stem.split("-")[1]): np.load(file)
                for file in directory.glob(f"{process}-*.npy")
            }
            models = {**own, **models}
        scale = _COHORT / _CLIP / _NOISE
        return {
            number: scale * (model - own.get(number - 1, models[number - 1]))
            for number, model in own.items()
        }

    @parameterized.parameters(*_DEATHS)
    def test_what_was_seen_is_charged_and_the_noise_goes_on_right(
        self, point, round_index, charged, saved
    ):
        path = files.directory(self) / "run"
        path.mkdir()
        code = self._run(path, "first", point, round_index)
        self.assertEqual(code, -signal.SIGKILL)
        contents = accounting.PrivacyLedger.read(path / "ledger.jsonl")
        self.assertLen(contents.entries, charged)
        first = self._noise(path, "first")
        self.assertLessEqual(len(first), charged)
        if point in ("seen", "half a checkpoint", "saved"):
            self.assertLen(first, round_index + 1)

        self.assertEqual(self._run(path, "second"), 0)
        second = self._noise(path, "second")
        self.assertEqual(sorted(second), list(range(saved, ROUNDS)))
        generator = _mechanism().generator
        squares = (generator.charges / _NOISE) ** 2
        end = np.load(path / "end.npz")
        if charged == saved:  # Nothing is lost: one segment.
            segment = [first[t] for t in range(saved)]
            spent = squares.sum()
        else:
            segment = []
            spent = squares[:charged].sum() + squares[: ROUNDS - saved].sum()
        segment += [second[t] for t in range(saved, ROUNDS)]
        self.assertAlmostEqual(float(end["spent"]), spent)
        ledger = accounting.PrivacyLedger.read(path / "ledger.jsonl")
        self.assertAlmostEqual(
            sum(each.charge.noise_multiplier**-2 for each in ledger.entries),
            spent,
        )
        self.assertEqual(int(end["position"]), len(segment))
        # The buffers hold the noise of the segment, all of it and no other.
        buffers = np.zeros_like(end["buffers"])
        for noise in segment:
            buffers = generator.theta[:, None] * buffers + noise
        np.testing.assert_allclose(end["buffers"], buffers, atol=1e-3)
        self.assertGreater(np.abs(end["buffers"]).max(), 0.1)
        # A round that is run again has a draw of its own.
        for t in set(first) & set(second):
            alike = np.corrcoef(first[t], second[t])[0, 1]
            self.assertLess(abs(alike), 0.99)
