"""Processes: `kill -9` at every point of a round, and two that go on with one run.

The noise is correlated across rounds: that of later rounds depends on what its
memory knows to be released.
"""

import itertools
import multiprocessing
import os
import pathlib
import signal

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import _files, accounting
from tfdp_fl.engine import engine as engine_lib
from tfdp_fl.keras import callbacks, checkpoint, round_loop

_ROUNDS, _EVERY, _COHORT, _CLIP, _NOISE = 8, 2, 10, 0.5, 2.0
_CORRELATED = tfdp_fl.CorrelatedNoise(
    clip_norm=_CLIP,
    noise_multiplier=_NOISE,
    strategy=tfdp_fl.BLT(theta=(0.6, 0.1), theta_hat=(0.2, 0.05)),
    rounds=_ROUNDS,
    min_separation=4,
)
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


def _federated(**options):
    return toy.federated(_CORRELATED, None, _COHORT, "cyclic", **options)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Witness(callbacks.FederatedCallback):
    """Keeps the model of each round, as soon as somebody can see it."""

    def __init__(self, prefix: str, last: int | None):
        super().__init__()
        self._prefix, self._last = prefix, last

    def on_round_released(self, round_index, logs):
        np.save(f"{self._prefix}-{round_index}.npy", toy.flat(self.federated_model))
        if round_index == self._last:
            _die()


def _dies(owner, name: str, at_call: int, before: bool) -> None:
    """Has a method die before or after one of its calls."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*args, **kwargs):
        dies = next(calls) == at_call
        if dies and before:
            _die()
        result = original(*args, **kwargs)
        if dies:
            _die()
        return result

    setattr(owner, name, wrapped)


def _dies_half_way(fatal: pathlib.Path) -> None:
    """Has the process die in the middle of writing a file."""
    original = checkpoint.CheckpointDirectory.write

    def wrapped(directory, round_index, state, keep):
        if directory.file(round_index) == fatal:
            with _files.replace_file(fatal, mode=0o600, sync=True) as stream:
                data = checkpoint.to_bytes(state)
                stream.write(data[: len(data) // 2])
                stream.flush()
                _die()
        original(directory, round_index, state, keep)

    checkpoint.CheckpointDirectory.write = wrapped


def _run(path: pathlib.Path, process: str, point: str | None, round_index: int) -> None:
    """Trains to the end, or to a point of a round (None: to the end)."""
    engine, saved = engine_lib.CohortEngine, checkpoint.CheckpointDirectory
    match point:
        case "collected":
            _dies(round_loop.RoundLoop, "charge", round_index + 1, before=True)
        case "charged" | "released":
            _dies(engine, "release", round_index + 1, before=point == "charged")
        case "half a checkpoint":
            _dies_half_way(saved(path).file(round_index + 1))
        case "saved":  # One more is written before the first round.
            _dies(saved, "write", (round_index + 1) // _EVERY + 1, before=False)
    resumes = process == "second"
    # Nothing is learned: what moves the model is the noise.
    fed = _federated(compile_options={"optimizer": tf.keras.optimizers.SGD(0.0)})
    keep = [
        _Witness(f"{path}/{process}", round_index if point == "seen" else None),
        callbacks.RoundCheckpoint(path, every=_EVERY),
    ]
    toy.fit(fed, _ROUNDS, keep, seed=3, resume_from=path if resumes else None)
    noise_state = fed.run.mechanism_state.noise_state
    buffers = [b.numpy().reshape([b.shape[0], -1]) for b in noise_state.buffers]
    np.savez(
        path / "end.npz",
        spent=sum(n * c.noise_multiplier**-2 for c, n in fed.account.own.items()),
        position=noise_state.round_index.numpy(),
        buffers=np.concatenate(buffers, 1),
    )


def _entries(path):
    return accounting.PrivacyLedger.read(path / "ledger.jsonl").entries


@pytest.fixture(scope="module")
def processes():
    """Runs `_run` in processes at once; returns how they ended."""
    # Forked from one process that has imported everything, once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.keras.processes_test"])

    def run(path, *names, point=None, round_index=0):
        arguments = [(path, name, point, round_index) for name in names]
        started = [context.Process(target=_run, args=each) for each in arguments]
        for process in started:
            process.start()
        for process in started:
            process.join(600)
        return sorted(process.exitcode for process in started)

    return run


def _noise(path: pathlib.Path, name: str) -> dict[int, np.ndarray]:
    """Returns the noise of each round that could be seen, by round."""
    models, own = {-1: toy.flat(toy.dense())}, {}
    # The second process goes on from a model of the first.
    for process in ("first", name):
        files = path.glob(f"{process}-*.npy")
        own = {int(file.stem.split("-")[1]): np.load(file) for file in files}
        models = {**own, **models}
    scale = _COHORT / _CLIP / _NOISE
    return {
        number: scale * (model - own.get(number - 1, models[number - 1]))
        for number, model in own.items()
    }


@pytest.mark.parametrize("point, round_index, charged, saved", _DEATHS)
def test_what_was_seen_is_charged_and_the_noise_goes_on_right(
    processes, tmp_path, point, round_index, charged, saved
):
    path = tmp_path
    code = processes(path, "first", point=point, round_index=round_index)
    assert code == [-signal.SIGKILL]
    assert len(_entries(path)) == charged
    first = _noise(path, "first")
    assert len(first) <= charged
    if point in ("seen", "half a checkpoint", "saved"):
        assert len(first) == round_index + 1

    _run(path, "second", None, 0)
    second = _noise(path, "second")
    assert sorted(second) == list(range(saved, _ROUNDS))
    generator = _CORRELATED.generator
    squares = (generator.round_sensitivities / _NOISE) ** 2
    end = np.load(path / "end.npz")
    if charged == saved:  # Nothing is lost: one segment.
        segment = [first[t] for t in range(saved)]
        spent = squares.sum()
    else:
        segment = []
        spent = squares[:charged].sum() + squares[: _ROUNDS - saved].sum()
    segment += [second[t] for t in range(saved, _ROUNDS)]
    assert float(end["spent"]) == pytest.approx(spent)
    written = [entry.charge.noise_multiplier for entry in _entries(path)]
    assert sum(z**-2 for z in written) == pytest.approx(spent)
    assert int(end["position"]) == len(segment)
    # The buffers hold the noise of the segment, all of it and no other.
    buffers = np.zeros_like(end["buffers"])
    for noise in segment:
        buffers = generator.theta[:, None] * buffers + noise
    np.testing.assert_allclose(end["buffers"], buffers, atol=1e-3)
    assert np.abs(end["buffers"]).max() > 0.1
    # A round that is run again has a draw of its own.
    for t in set(first) & set(second):
        assert abs(np.corrcoef(first[t], second[t])[0, 1]) < 0.99


def test_two_runs_that_begin_in_one_directory(processes, tmp_path):
    assert processes(tmp_path, "one", "other") == [0, 1]
    contents = accounting.PrivacyLedger.read(tmp_path / "ledger.jsonl")
    assert len(contents.by_run()) == 1
    assert len(contents.entries) == _ROUNDS


@pytest.mark.parametrize("saves", [False, True])
def test_one_ends_while_another_reads_the_checkpoint(tmp_path, saves):
    keep = [callbacks.RoundCheckpoint(tmp_path)]
    toy.interrupted(_federated(), 1, 6, keep)
    faster = [_federated()]

    def overtakes(*_):
        if faster:  # As another process, between the reading and the lock.
            own = [callbacks.RoundCheckpoint(tmp_path)]
            toy.fit(faster.pop(), 6, own, resume_from=tmp_path)

    slower = _federated()
    with (
        toy.around(checkpoint.InterruptedRun, "restore", overtakes),
        pytest.raises(ValueError, match="resume from its directory"),
    ):
        toy.fit(slower, 6, keep * saves, resume_from=tmp_path)
    assert slower.account.rounds == slower.rounds
    assert len(_entries(tmp_path)) == 6
    # The faster one's checkpoints are as they were.
    assert (tmp_path / "round-00000006.npz").exists()


def test_neither_an_evaluation_nor_another_ledger_makes_rounds_known(tmp_path):
    keep, fed, other = [callbacks.RoundCheckpoint(tmp_path)], _federated(), _federated()
    toy.fit(fed, 2, keep)
    toy.fit(other, 2, resume_from=tmp_path)
    toy.fit(other, 2, [callbacks.RoundCheckpoint(tmp_path)])
    bounds = {"loss": (0.0, 5.0)}
    private = tfdp_fl.PrivateMetrics(bounds=bounds, noise_multiplier=9.0)
    with pytest.raises(ValueError, match="does not know of"):
        fed.evaluate_clients(toy.clients(), verbose=0, private=private)
    assert len(_entries(tmp_path)) == 4
    with pytest.raises(ValueError, match="does not know of"):
        toy.fit(fed, 2, keep)
    assert fed.rounds == 2
    # Nor does a ledger of several runs.
    run, fed, other = tmp_path / "run", _federated(), _federated()

    def both():
        ledger = callbacks.Ledger(tmp_path / "all.jsonl", append=True)
        return [callbacks.RoundCheckpoint(run), ledger]

    toy.fit(fed, 2, both())
    toy.fit(other, 2, both(), resume_from=run)
    toy.fit(other, 2, both())
    with pytest.raises(ValueError, match="does not know of"):
        toy.fit(fed, 2, both())
    assert fed.rounds == 2
    # Without the directory, it goes on from what it has, and counts everything.
    run.rename(tmp_path / "away")
    with pytest.warns(RuntimeWarning, match="is missing"):
        toy.fit(fed, 2, both()[1:])
    assert (fed.rounds, fed.account.rounds) == (4, 2 + 2 + 2)
