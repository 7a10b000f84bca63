"""The other side: TFF's own federated averaging with its own DP aggregator."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from research.benchmarking import machine, workloads

LOOPS = {
    each.name: each
    for each in (
        tff.learning.LoopImplementation.DATASET_ITERATOR,
        tff.learning.LoopImplementation.DATASET_REDUCE,
    )
}


def build_process(
    workload: workloads.Workload, loop: str, element_spec: Any
) -> tff.learning.templates.LearningProcess:
    """Returns the same training as our side's: FedAvg, SGD, fixed clipping."""

    def model_fn() -> tff.learning.models.VariableModel:
        return tff.learning.models.from_keras_model(
            workload.make_model(),
            loss=workloads.loss(),
            input_spec=element_spec,
            metrics=workloads.metrics(),
        )

    return tff.learning.algorithms.build_unweighted_fed_avg(
        model_fn,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(workloads.LEARNING_RATE),
        server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
        model_aggregator=tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
            noise_multiplier=workloads.NOISE_MULTIPLIER,
            clients_per_round=workload.clients,
            clip=workloads.CLIP_NORM,
        ),
        loop_implementation=LOOPS[loop],
    )


class TFFSide:
    """A learning process of TFF, at whatever settings are asked for."""

    def __init__(self, workload: str):
        """Makes the clients' datasets."""
        self._workload = work = workloads.WORKLOADS[workload]
        x, y = work.data()
        self._clients = [
            tf.data.Dataset.from_tensor_slices((features, labels)).batch(
                work.batch_size
            )
            for features, labels in zip(
                np.split(x, work.clients), np.split(y, work.clients), strict=True
            )
        ]
        self._workers: set[int] = set()
        self._process: Any = None
        self._state: Any = None
        self._estimate = 1.0

    def use(self, loop: str, concurrent_calls: int) -> dict[str, float]:
        """Sets TFF up, and runs two rounds.

        Args:
          loop: A key of `LOOPS`.
          concurrent_calls: `max_concurrent_computation_calls`.

        Returns:
          Seconds of the first and of the second round.
        """
        # A new context starts a worker of its own.
        machine.end(self._workers)
        before = machine.children()
        tff.backends.native.set_sync_local_cpp_execution_context(
            max_concurrent_computation_calls=concurrent_calls
        )
        start = time.perf_counter()
        self._process = build_process(
            self._workload, loop, self._clients[0].element_spec
        )
        self._state = self._process.initialize()
        self._round()
        first = time.perf_counter() - start
        self._workers = machine.children() - before
        self._estimate = self._round()
        return {"first_seconds": first, "seconds": self._estimate}

    def _round(self) -> float:
        start = time.perf_counter()
        self._state = self._process.next(self._state, self._clients).state
        return time.perf_counter() - start

    def measure(self, seconds: float) -> list[float]:
        """Runs rounds for about so long; returns the seconds of each."""
        rounds = int(np.clip(seconds / self._estimate, 1, 200))
        times = [self._round() for _ in range(rounds)]
        self._estimate = float(np.median(times))
        return times

    def peak_bytes(self) -> int:
        """Returns the peak memory of this process and its worker."""
        return machine.memory_bytes(field="VmHWM") + sum(
            machine.memory_bytes(pid, "VmHWM") for pid in self._workers
        )
