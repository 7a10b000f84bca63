"""Rounds with a second machine at the other end of a link, measured."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# research/ is not installed, and a program finds only its own folder.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np

from research import link

COHORTS = (10, 20, 50, 100, 200)
SIDES = ("alone", "no link", "link")
_EXAMPLES, _BATCH, _FEATURES, _CLASSES = 60, 10, 784, 10
_HIDDEN = (2000, 450)
_LAYERS = (_FEATURES, *_HIDDEN, _CLASSES)
# 2.5 million: 9.9 MB.
_PARAMETERS = sum((a + 1) * b for a, b in itertools.pairwise(_LAYERS))
_ROUNDS, _BLOCKS = 4, 3
_HERE, _THERE = 0, 1  # The machines' cores, among those of this process.
_SENT_BYTES = 200 * 10**6


def _model() -> Any:
    import tensorflow as tf

    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((_FEATURES,)),
            *(layers.Dense(units, "relu") for units in _HIDDEN),
            layers.Dense(_CLASSES),
        ]
    )


class _Side:
    """Rounds on one machine, or on two; the data is read where they train."""

    def __init__(self, hosts: Sequence[str], folder: str):
        from research.benchmarking import engine_side
        from tfdp_fl import runtimes
        from tfdp_fl.datasets import FederatedDataset
        from tfdp_fl.experiments import training

        training.use_one_thread_per_operation()
        self._times = engine_side.RoundTimes
        rng = np.random.default_rng(0)
        count = max(COHORTS) * _EXAMPLES
        self._clients = FederatedDataset.from_indices(
            rng.normal(size=(count, _FEATURES)).astype(np.float32),
            rng.integers(0, _CLASSES, count),
            np.arange(count).reshape(-1, _EXAMPLES),
        )
        self._runtime = None
        if hosts:
            if not list(pathlib.Path(folder).iterdir()):
                runtimes.export_for_workers(self._clients, folder)
            self._runtime = runtimes.TFFWorkers(
                hosts=hosts, data=folder, float32_products=True
            )
        self._fits: dict[int, Any] = {}

    def _fitted(self, cohort: int) -> Any:
        import tensorflow as tf

        import tfdp_fl

        if cohort not in self._fits:
            fed = tfdp_fl.DPFederatedModel(
                _model(),
                tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0),
                cohort,
                sampling="fixed_size",
            )
            fed.compile(
                tf.keras.optimizers.SGD(0.01),
                tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
            self._fits[cohort] = fed
            self.seconds(cohort)  # Traced, sent, and warm.
        return self._fits[cohort]

    def seconds(self, cohort: int) -> list[float]:
        """Returns the seconds of some rounds of so many clients."""
        times = self._times()
        self._fitted(cohort).fit(
            self._clients,
            rounds=_ROUNDS,
            batch_size=_BATCH,
            callbacks=[times],
            verbose=0,
            runtime=self._runtime,
        )
        return times.seconds


def _serve(hosts: Sequence[str], folder: str) -> None:
    """Answers each cohort on stdin by a line of its rounds' seconds."""
    side = _Side(hosts, folder)
    for line in sys.stdin:
        print(json.dumps(side.seconds(int(line))), flush=True)


def _cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("research/network.py: two cores are needed, for two machines.")
    if not link.is_possible():
        sys.exit(
            "research/network.py: root, `ip` and /dev/net/tun are needed, for "
            "the link between two machines."
        )
    return cores


@contextlib.contextmanager
def _started(
    core: int,
    command: Sequence[str],
    before: Sequence[str] = (),
    **options: Any,
) -> Iterator[Any]:
    """Starts a program on a core; ends it afterwards."""
    process = subprocess.Popen(
        [*before, "taskset", "-c", str(core), *command], **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _worker(core: int, before: Sequence[str] = ()) -> Iterator[int]:
    """Starts a TFF worker on a core; gives its port."""
    from tfdp_fl.runtimes import local_worker, memory

    with local_worker.reserve_port() as reserved:
        port = reserved.getsockname()[1]
    environment = {
        **os.environ,
        **memory.ENVIRONMENT,
        "TF_NUM_INTRAOP_THREADS": "1",
    }
    command = [local_worker.worker_binary(), f"--port={port}"]
    with _started(core, command, before, env=environment, stderr=subprocess.DEVNULL):
        yield port


class _Asked:
    """A process that measures one side."""

    def __init__(self, process: Any):
        self._process = process

    def seconds(self, cohort: int) -> list[float]:
        """Returns the seconds of some rounds."""
        self._process.stdin.write(f"{cohort}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit("research/network.py: a side ended; its errors are above.")
        return json.loads(line)


def _asked(stack: contextlib.ExitStack, core: int, **what: Any) -> _Asked:
    command = [sys.executable, __file__, json.dumps(what)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return _Asked(stack.enter_context(_started(core, command, text=True, **pipes)))


def _link_rate(far: link.Link, core: int) -> float:
    """Returns how many Mbit/s a TCP connection over the link reaches."""
    receive = (
        "import socket\n"
        "with socket.create_server(('', 0)) as s:\n"
        "    print(s.getsockname()[1], flush=True)\n"
        "    c, _ = s.accept()\n"
        "    while c.recv(1 << 20): pass\n"
        "    c.sendall(b'.')\n"
    )
    with _started(
        core,
        [sys.executable, "-c", receive],
        far.inside,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        port = int(process.stdout.readline())
        with socket.create_connection((far.address, port)) as sender:
            start = time.perf_counter()
            sender.sendall(bytes(_SENT_BYTES))
            sender.shutdown(socket.SHUT_WR)
            sender.recv(1)
            seconds = time.perf_counter() - start
    return 8e-6 * _SENT_BYTES / seconds


def _round_trip(far: link.Link) -> float:
    """Returns the milliseconds that a ping takes, the median of twenty."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        with contextlib.suppress(OSError):  # Refused there: it has been there.
            socket.create_connection((far.address, 1))
        times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times))


def measure(megabits: float, latency_ms: float) -> dict[str, Any]:
    """Measures all sides, in turns; returns the rounds' seconds.

    Args:
      megabits: The link's rate, in Mbit/s.
      latency_ms: Its latency, in milliseconds each way.
    """
    cores = _cores()
    here, there = cores[_HERE], cores[_THERE]
    seconds: dict[str, dict[int, list[float]]] = {
        side: {cohort: [] for cohort in COHORTS} for side in SIDES
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        far = stack.enter_context(link.Link(1e6 * megabits, 1e-3 * latency_ms))
        found = {
            "round_trip_ms": _round_trip(far),
            "megabits": _link_rate(far, there),
        }
        local = stack.enter_context(_worker(here))
        neighbour = stack.enter_context(_worker(there))
        remote = stack.enter_context(_worker(there, far.inside))
        hosts = {
            "alone": [],
            "no link": [f"127.0.0.1:{local}", f"127.0.0.1:{neighbour}"],
            "link": [f"127.0.0.1:{local}", f"{far.address}:{remote}"],
        }
        sides = {
            side: _asked(stack, here, hosts=hosts[side], folder=folder)
            for side in SIDES
        }
        for block in range(_BLOCKS):
            for cohort in COHORTS:
                for side in SIDES:
                    seconds[side][cohort] += sides[side].seconds(cohort)
            print(f"{block + 1} of {_BLOCKS} times measured.", file=sys.stderr)
    return {
        "asked": {"megabits": megabits, "latency_ms": latency_ms},
        "link": found,
        "model_bytes": 4 * _PARAMETERS,
        "quartiles": {
            side: {
                cohort: np.percentile(times, [25, 50, 75]).tolist()
                for cohort, times in by_cohort.items()
            }
            for side, by_cohort in seconds.items()
        },
    }


def line(by_cohort: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Returns the seconds of a round without clients, and of a client.

    By least squares of relative errors, through the medians.

    Args:
      by_cohort: For each cohort size the quartiles of a round's seconds.
    """
    cohorts = np.asarray(list(by_cohort), float)
    medians = np.asarray([each[1] for each in by_cohort.values()])
    slope, start = np.polyfit(cohorts, medians, 1, w=1 / medians)
    return float(start), float(slope)


def break_even(found: Mapping[str, Any], side: str = "link") -> float:
    """Returns from how many clients a round two machines are faster.

    Args:
      found: What `measure` returned.
      side: How they are linked.

    Returns:
      A number; infinity if they never are.
    """
    start, slope = line(found["quartiles"][side])
    alone_start, alone_slope = line(found["quartiles"]["alone"])
    if slope >= alone_slope:
        return math.inf
    return max(0.0, (start - alone_start) / (alone_slope - slope))


if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))
