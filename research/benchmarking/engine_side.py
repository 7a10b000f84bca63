"""Our side: rounds as a user runs them, through `DPFederatedModel.fit`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

from research.benchmarking import machine, workloads
from tfdp_fl import datasets, keras, matrix_factorization, mechanisms
from tfdp_fl.engine import lookups

# Groups of clients that take part in turn, under cyclic sampling.
GROUPS = 8

MECHANISMS = {
    "fixed": lambda: mechanisms.FixedClipping(
        clip_norm=workloads.CLIP_NORM, noise_multiplier=workloads.NOISE_MULTIPLIER
    ),
    # Three buffers, which the best ones of few rounds would be fewer than.
    "correlated": lambda: mechanisms.CorrelatedNoise(
        clip_norm=workloads.CLIP_NORM,
        noise_multiplier=workloads.NOISE_MULTIPLIER,
        strategy=matrix_factorization.BLT(
            theta=(0.99, 0.9, 0.5), theta_hat=(0.95, 0.7, 0.2)
        ),
        rounds=4096,
        min_separation=GROUPS,
    ),
}

# Clients of a large population share so many stored examples.
_SHARED_EXAMPLES = 5000


class RoundTimes(tf.keras.callbacks.Callback):
    """Notes how long each round took, all that happens between two included."""

    def __init__(self):
        super().__init__()
        self._marks: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Marks the beginning of a round."""
        self._marks.append(time.perf_counter())

    def on_train_end(self, logs: Any = None) -> None:
        """Marks the end of the last round."""
        self._marks.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """The rounds' times."""
        return np.diff(self._marks).tolist()


class _Run:
    """A compiled model and its clients."""

    def __init__(
        self,
        workload: workloads.Workload,
        clients: datasets.FederatedDataset,
        sampling: str,
        mechanism: str,
        runtime: Any,
    ):
        self._workload = workload
        self._clients = clients
        self._runtime = runtime
        self.federated_model = keras.DPFederatedModel(
            workload.make_model(),
            MECHANISMS[mechanism](),
            clients_per_round=workload.clients,
            sampling=sampling,
        )
        self.federated_model.compile(
            optimizer=tf.keras.optimizers.SGD(workloads.LEARNING_RATE),
            loss=workloads.loss(),
            metrics=workloads.metrics(),
        )
        self.estimate = 0.0
        self.rounds = 0

    def fit(self, rounds: int) -> list[float]:
        """Runs some rounds; returns their seconds."""
        times = RoundTimes()
        self.federated_model.fit(
            self._clients,
            rounds=rounds,
            batch_size=self._workload.batch_size,
            callbacks=[times],
            verbose=0,
            runtime=self._runtime,
        )
        return times.seconds


class EngineSide:
    """Any number of runs in one process, that are measured in turns."""

    def __init__(self):
        self._runs: dict[str, _Run] = {}

    def add(
        self,
        run: str,
        workload: str,
        *,
        sampling: str = "fixed_size",
        population: int | None = None,
        workers: int = 0,
        mechanism: str = "fixed",
        warm_up: int = 3,
        whole_tables: bool = False,
    ) -> dict[str, float]:
        """Makes a run, and runs its first rounds.

        Args:
          run: Its name.
          workload: A workload's name.
          sampling: As in `DPFederatedModel`.
          population: Clients in all, who share stored examples; None: as many
            as in the cohort, each with examples of its own.
          workers: Ray workers that train and read the data; 0: this process.
          mechanism: A key of `MECHANISMS`.
          warm_up: Rounds after the first.
          whole_tables: Whether clients train tables of which they need few rows.

        Returns:
          Seconds of the first round (engine made and traced), and bytes of
          memory that this process has taken at its peak.
        """
        if whole_tables:
            lookups._MIN_ELEMENTS = np.inf
        work = {**workloads.WORKLOADS, **workloads.EMBEDDINGS}[workload]
        clients = self._clients(work, population)
        runtime = None
        if workers:
            from tfdp_fl import runtimes

            runtime = runtimes.RayWorkers(num_workers=workers)
        made = _Run(work, clients, sampling, mechanism, runtime)
        start = time.perf_counter()
        made.fit(1)
        first = time.perf_counter() - start
        made.estimate = float(np.min(made.fit(warm_up))) if warm_up else first
        self._runs[run] = made
        return {
            "first_seconds": first,
            "peak_bytes": machine.memory_bytes(field="VmHWM"),
        }

    def _clients(
        self, work: workloads.Workload, population: int | None
    ) -> datasets.FederatedDataset:
        if population is None:
            x, y = work.data()
            indices = np.arange(len(x), dtype=np.int32)
            indices = indices.reshape(work.clients, work.examples)
        else:
            x, y = work.data(_SHARED_EXAMPLES)
            indices = np.random.default_rng(1).integers(
                len(x), size=(population, work.examples), dtype=np.int32
            )
        return datasets.FederatedDataset.from_indices(x, y, indices)

    def measure(
        self, run: str, seconds: float, min_rounds: int = 1, max_rounds: int = 200
    ) -> list[float]:
        """Runs rounds for about so long; returns the seconds of each.

        Every call runs as many rounds as the first one, which is a run of its
        own to warm up: a `fit` of another number of rounds is another plan.
        """
        made = self._runs[run]
        if not made.rounds:
            made.rounds = int(np.clip(seconds / made.estimate, min_rounds, max_rounds))
            made.fit(made.rounds)
        return made.fit(made.rounds)
