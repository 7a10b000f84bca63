"""How many clients train at once, found by timing rounds, and kept in a file.

One client on each core, or fewer whose operations are split over the cores:
what is faster hangs on the model, its batches, the cohort, TensorFlow's threads
and the machine. What is timed are rounds of clients who hold zeros, as large as
the data's; nothing of them is released, and the model stays.

Another number of replicas adds updates up in another order, so that a sum's
last bits are others. The noise is the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _files, keras_versions
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import engine as engine_lib
from tfdp_fl.engine import replicas, rounds

# What a user asks for it by.
MEASURED = "measured"
# Each number's rounds, in turns, after one that is not counted: at least so
# many, and more while they take less than so many seconds.
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 15
_SECONDS = 0.5
# Larger cohorts are timed in part: each client takes as long.
_MOST_CLIENTS = 1000
# Fewer replicas than cores only if their round is so many times as long.
_CLEARLY = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What was found.

    Attributes:
      num_replicas: The number with the shortest round; one for each core, if
        no other is clearly shorter.
      seconds: The median round of each number that was tried.
      kept_in: The file that has it.
      was_kept: Whether it was there before, and nothing was timed.
    """

    num_replicas: int
    seconds: dict[int, float]
    kept_in: pathlib.Path
    was_kept: bool

    def describe(self) -> str:
        """Returns it in words."""
        times = ", ".join(
            f"{number}: {1000 * seconds:.3g} ms"
            for number, seconds in sorted(self.seconds.items())
        )
        how = "as measured before" if self.was_kept else "measured"
        return (
            f"num_replicas is {self.num_replicas}, {how} on this machine "
            f"({times} a round; {self.kept_in})."
        )


def choose(
    engine: engine_lib.CohortEngine,
    inputs: rounds.RoundInputs,
    client_sizes: np.ndarray,
    element_spec: Any,
) -> Choice | None:
    """Has an engine train as many clients at once as is fastest.

    Args:
      engine: An engine with a replica for each core, before its first round.
      inputs: A round; who is in it is not used.
      client_sizes: Int [n], the numbers of examples of some or all clients.
      element_spec: `(features, labels)` specs of one example.

    Returns:
      What was found; None if no round of zeros can be run, or there is one
      replica: then nothing is changed.
    """
    numbers = _candidates(engine.num_replicas)
    if len(numbers) < 2:
        return None
    clients = max(1, min(round(inputs.clients_per_round), _MOST_CLIENTS))
    sizes = _typical(client_sizes, clients)
    path, key = _kept_in(), _key(engine, inputs, sizes, element_spec)
    known = _kept(path).get(key)
    if known is not None and known["num_replicas"] in numbers:
        choice = Choice(
            num_replicas=known["num_replicas"],
            seconds={int(n): s for n, s in known["seconds"].items()},
            kept_in=path,
            was_kept=True,
        )
    else:
        seconds = _measured(engine, inputs, sizes, element_spec, numbers)
        if seconds is None:
            return None
        choice = Choice(
            num_replicas=_fastest(seconds),
            seconds=seconds,
            kept_in=path,
            was_kept=False,
        )
        _keep(path, key, choice)
    engine.use_replicas(choice.num_replicas)
    return choice


def _candidates(most: int) -> list[int]:
    """Returns the numbers to try: a replica for each core, half, ..., one."""
    found = []
    while most:
        found.append(most)
        most //= 2
    return found


def _fastest(seconds: dict[int, float]) -> int:
    """Returns the number of the shortest round; the most, if it is as good."""
    most = max(seconds)
    fastest = min(seconds, key=lambda number: seconds[number])
    return fastest if seconds[fastest] < _CLEARLY * seconds[most] else most


def _typical(client_sizes: np.ndarray, clients: int) -> np.ndarray:
    """Returns the sizes of a cohort: int64 [clients], evenly spread quantiles.

    Rounded to two figures: a machine's choice is to serve another split of the
    same data as well.
    """
    places = (np.arange(clients) + 0.5) / clients
    known = client_sizes if len(client_sizes) else np.ones(1)
    sizes = np.quantile(known, places, method="nearest")
    return np.array([int(float(f"{each:.2g}")) for each in sizes], np.int64)


def _measured(
    engine: engine_lib.CohortEngine,
    inputs: rounds.RoundInputs,
    sizes: np.ndarray,
    element_spec: Any,
    numbers: list[int],
) -> dict[int, float] | None:
    """Returns the median seconds of a round, by number; None if it fails."""
    run = _rounds_of_zeros(engine, inputs, sizes, element_spec)
    before, has_trained = engine.num_replicas, engine.has_trained
    try:
        for number in numbers:  # Traces functions, and perhaps compiles them.
            engine.num_replicas = number
            if run().failures:
                return None
        taken = _alternate(engine, run, numbers)
    except engine_lib.CLIENT_ERRORS:
        return None
    finally:
        engine.num_replicas = before
        engine.has_trained = has_trained
        engine.layout.sizes.forget()  # Those of the clients with zeros.
    return {number: statistics.median(seconds) for number, seconds in taken.items()}


def _alternate(
    engine: engine_lib.CohortEngine,
    run: Callable[[], Any],
    numbers: list[int],
) -> dict[int, list[float]]:
    """Times rounds of each number, in turns: a drift then meets all."""
    taken: dict[int, list[float]] = {number: [] for number in numbers}
    end = time.perf_counter() + _SECONDS * len(numbers)
    for turn in range(_MOST_ROUNDS):
        if turn >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
        for number in numbers:
            engine.num_replicas = number
            start = time.perf_counter()
            run()
            taken[number].append(time.perf_counter() - start)
    return taken


def _rounds_of_zeros(
    engine: engine_lib.CohortEngine,
    inputs: rounds.RoundInputs,
    sizes: np.ndarray,
    element_spec: Any,
) -> Callable[[], rounds.PendingRound]:
    """Returns what trains a cohort of clients who hold zeros."""
    rows = max(1, int(sizes.max()))  # The same ones serve all clients.
    x, y = (replicas.zeros_like_batch(spec, rows) for spec in element_spec)
    dataset = FederatedDataset.from_indices(x, y, [np.arange(size) for size in sizes])
    windows = None
    if engine.query.keeps_window:
        shape = (len(sizes), engine.query.mechanism.window)
        windows = np.zeros((*shape, engine.num_variables), np.float32)
    cohort = dataclasses.replace(
        inputs, positions=np.arange(len(sizes)), windows=windows
    )
    return lambda: engine.collect(dataset, cohort)


def _key(
    engine: engine_lib.CohortEngine,
    inputs: rounds.RoundInputs,
    sizes: np.ndarray,
    element_spec: Any,
) -> str:
    """Returns what a choice hangs on, in words, hashed; hexadecimal."""
    first = engine.functions.trainers[0]
    threading = tf.config.threading
    facts = (
        _processor(),
        engine.num_replicas,
        engine.device,
        threading.get_intra_op_parallelism_threads(),
        threading.get_inter_op_parallelism_threads(),
        tf.__version__,
        keras_versions.name(),
        [
            (type(layer).__name__, [tuple(w.shape) for w in layer.weights])
            for layer in first.model.layers
        ],
        repr(element_spec),
        repr(engine.query.mechanism.name),
        engine.output,
        engine.layout.xla,
        engine.layout.kernels is None,
        inputs.batch_size,
        inputs.local_epochs,
        sizes.tolist(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _processor() -> str:
    """Returns the processor's name, as far as the system tells."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return "; ".join(
        sorted(set(re.findall(r"^(?:model name|flags)\s*:.*$", text, re.M)))
    )


def _kept_in() -> pathlib.Path:
    """Returns the file of choices, in the user's folder for caches."""
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(folder).expanduser() / "tfdp_fl" / "num_replicas.json"


def _kept(path: pathlib.Path) -> dict[str, Any]:
    """Returns the file's choices by key; none where they cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: each for key, each in found.items() if _is_choice(each)}


def _is_choice(found: Any) -> bool:
    """Returns True if `_keep` wrote it, as far as one sees."""
    try:
        seconds = {int(n): float(s) for n, s in found["seconds"].items()}
        return found["num_replicas"] in seconds
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _keep(path: pathlib.Path, key: str, choice: Choice) -> None:
    """Adds a choice to the file; where that cannot be, it is measured anew."""
    found = {
        "num_replicas": choice.num_replicas,
        "seconds": {str(n): s for n, s in choice.seconds.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**_kept(path), key: found}, indent=1) + "\n"
        _files.write_text(path, text)
    except OSError:
        pass
