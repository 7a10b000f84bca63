"""Training runs in processes of their own, to be killed in every mode."""

import contextlib
import faulthandler
import multiprocessing
import os
import pathlib
import signal
import time
from typing import Any
from unittest import mock

import numpy as np

import tfdp_fl
from tests.keras import toy
from tfdp_fl.experiments import Settings, training
from tfdp_fl.keras import callbacks

ROUNDS = 40
# A run ends in a minute of a core: on a busy machine that is many minutes.
LONGEST_CORE_SECONDS, LONGEST_SECONDS = 300, 3600
DELTA = 1e-3
WITNESS, LEDGER, CHECKPOINTS = "witness.txt", "own.jsonl", "saved"
FINAL = "final.npy"
# train.py's own way, a ledger, checkpoints, both, and checkpoints of other runs.
MODES = ("plain", "ledger", "checkpoint", "both", "local", "workers", "correlated")
# And samplings whose privacy loss is not a Gaussian's, by PLD.
BY_LOSS = ("random_allocation", "fixed_size")
MODES += BY_LOSS
# Those that end in the same weights, however often they were killed.
SAME = ("checkpoint", "local")


def processor_seconds(pid: int) -> float:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def join(process: Any) -> None:
    """Waits for a process; one that does not end says where it is."""
    until = time.monotonic() + LONGEST_SECONDS
    while process.is_alive():
        used = processor_seconds(process.pid)
        if used > LONGEST_CORE_SECONDS or time.monotonic() > until:
            os.kill(process.pid, signal.SIGUSR1)
            process.join(5)
            process.kill()
            raise AssertionError("a run does not end")
        process.join(0.5)


def epsilon_of(account: Any, mode: str) -> float:
    """Returns what a model or a ledger says."""
    return account.epsilon(DELTA, *(["pld"] if mode in BY_LOSS else []))


class _Witness(callbacks.FederatedCallback):
    def __init__(self, path: pathlib.Path, mode: str):
        super().__init__()
        self._mode = mode
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def on_round_released(self, round_index, logs):
        del logs
        epsilon = epsilon_of(self.federated_model, self._mode)
        os.write(self._file, f"{round_index} {epsilon!r}\n".encode())


def start(directory: pathlib.Path, mode: str, as_the_script: bool = False) -> Any:
    """Starts a run, forked from one process that has imported everything, once."""
    directory.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.stress.killed_run"])
    process = context.Process(target=run, args=(directory, mode, as_the_script))
    process.start()
    return process


def witness(directory: pathlib.Path, mode: str) -> pathlib.Path:
    if mode == "plain":  # It empties its directory.
        return directory.parent / f"{directory.name}-{WITNESS}"
    return directory / WITNESS


def seen(directory: pathlib.Path, mode: str) -> dict[int, float]:
    """Returns what an outsider has seen: rounds, and epsilon by then."""
    path = witness(directory, mode)
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(r): float(e) for r, e in map(str.split, lines)}


def ledgers(directory: pathlib.Path, mode: str) -> list[pathlib.Path]:
    checkpoints, own = directory / CHECKPOINTS / "ledger.jsonl", directory / LEDGER
    if mode == "plain":
        ended = directory / training.LEDGER
        during = directory / training.CHECKPOINT / training.LEDGER
        return [ended if ended.exists() else during]
    return {"ledger": [own], "both": [checkpoints, own]}.get(mode, [checkpoints])


def run(path: pathlib.Path, mode: str, as_the_script: bool) -> None:
    """Trains to the end, from where an earlier process was killed."""
    faulthandler.register(signal.SIGUSR1)
    if as_the_script:  # Which takes SIGTERM for Ctrl-C.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)
    if mode == "plain":
        _train_as_the_script(path)
        return
    saved = path / CHECKPOINTS
    # The witness first: a kill between the two must not leave a round that is
    # saved, and so not run again, and that nobody has written down.
    listeners: list[Any] = [_Witness(witness(path, mode), mode)]
    if mode in ("ledger", "both"):
        listeners.append(callbacks.Ledger(path / LEDGER))
    if mode != "ledger":
        listeners.append(callbacks.RoundCheckpoint(saved, every=3))
    mechanism: Any = tfdp_fl.AdaptiveClipping(noise_multiplier=0.8)
    sampling, m, runtime, same = "shuffled", 20, None, contextlib.nullcontext()
    if mode == "local":
        mechanism = tfdp_fl.LocalDP(clip_norm=0.5, epsilon=8.0, delta=DELTA)
    if mode == "correlated":
        sampling, m = "cyclic", 10
        apart = {"strategy": "blt:2", "rounds": ROUNDS, "min_separation": 4}
        mechanism = tfdp_fl.CorrelatedNoise(
            clip_norm=0.5, noise_multiplier=2.0, **apart
        )
    if mode in BY_LOSS:
        sampling, m = mode, 10
    if mode == "workers":
        from tfdp_fl import runtimes

        runtime = runtimes.RayWorkers(num_workers=2)
    if mode in SAME:
        same = toy.same_draws_when_resumed()
    fed = toy.federated(mechanism, clients_per_round=m, sampling=sampling)
    resume = saved if any(saved.glob("round-*.npz")) else None
    options = {"batch_size": 10, "seed": 3, "resume_from": resume, "runtime": runtime}
    with same:
        toy.fit(fed, ROUNDS, listeners, **options)
    np.save(path / FINAL, toy.flat(fed))


def _train_as_the_script(path: pathlib.Path) -> None:
    if (path / training.LEDGER).exists():  # Killed after its end.
        return
    sizes = {"num_clients": 40, "clients_per_round": 10, "rounds": ROUNDS}
    chosen = {"mechanism": "fixed", "noise_multiplier": 1.0, "model": "linear"}
    prepared = training.prepare(Settings(**chosen, **sizes))
    listener, fit = (
        _Witness(witness(path, "plain"), "plain"),
        tfdp_fl.DPFederatedModel.fit,
    )

    def with_witness(*arguments, callbacks, **options):
        return fit(*arguments, callbacks=[listener, *callbacks], **options)

    saved = any((path / training.CHECKPOINT).glob("round-*.npz"))
    with mock.patch.object(tfdp_fl.DPFederatedModel, "fit", with_witness):
        training.run(prepared, path, overwrite=not saved, resume=saved, verbose=0)
