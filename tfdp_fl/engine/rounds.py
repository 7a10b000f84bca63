"""A round: what is decided before it, and what it has collected."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import ClientFailure
from tfdp_fl.engine import cohort
from tfdp_fl.mechanisms import contribution


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundInputs:
    """What is decided about a round before any client trains.

    Attributes:
      round_index: The round, counted from 0.
      positions: Int64 [K], the cohort, as client positions in the dataset.
      clients_per_round: The expected cohort size m.
      noise_multiplier: This round's z.
      batch_size: Examples in one local batch.
      local_epochs: Passes over a client's examples.
      learning_rate: The client optimizer's rate.
      seed: Of a kind of `mechanisms.noise`, new for every round: noise and
        dropout follow from it.
      shuffle: Generator that shuffles the examples of each client, or None.
      windows: Float32 [K, W, L], for mechanisms that keep norms per client.
      chunk: The cohort's data, laid out, where that was done ahead.
    """

    round_index: int
    positions: np.ndarray
    clients_per_round: float
    noise_multiplier: float
    batch_size: int
    local_epochs: int
    learning_rate: float
    seed: np.ndarray
    shuffle: np.random.Generator | None = None
    windows: np.ndarray | None = None
    chunk: Any = None

    def tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns float32 [z, m, learning rate], and the seed."""
        numbers = np.array(
            [self.noise_multiplier, self.clients_per_round, self.learning_rate],
            np.float32,
        )
        return tf.constant(numbers), tf.constant(self.seed)


@dataclasses.dataclass
class PendingRound:
    """A cohort that was trained and added up, and of which nothing is out yet.

    Attributes:
      inputs: The round.
      state: The query's state, with the clip of this round.
      tensors: What `RoundInputs.tensors` returned.
      sums: One `CohortSum` a thread, () for one that did not run.
      metric_states: One list of metric values a thread.
      collected: For each thread the contributions that were not summed, with
        their clients' places in the cohort.
      sent: The weights that clients receive, and the model's other values.
      window_norms: Float32 [K, L], each client's layer norms before noise, NaN
        for those that did not answer; None if the mechanism keeps no window.
      failures: The clients whose data could not be read, or not be trained on.
      training_error: What training on somebody's data raised, if anything.
      without_noise: How many of those who are in the sum have not added the
        noise of their own that others count on.
    """

    inputs: RoundInputs
    state: Any
    tensors: tuple[tf.Tensor, tf.Tensor]
    sums: list[Any]
    metric_states: list[Any]
    collected: list[list[tuple[np.ndarray, cohort.CollectedUpdates]]]
    sent: tuple[list[tf.Tensor], list[tf.Tensor]] = ([], [])
    window_norms: np.ndarray | None = None
    failures: list[ClientFailure] = dataclasses.field(default_factory=list)
    training_error: Exception | None = None
    without_noise: int = 0

    @property
    def fixed_arguments(self) -> tuple[Any, ...]:
        """Returns what clients' programs are given in every part of the round."""
        return (self.state, *self.tensors, *self.sent)

    @property
    def cohort_size(self) -> int:
        """Returns how many clients were drawn."""
        return len(self.inputs.positions)

    def take(
        self, members: np.ndarray, trained: cohort.Trained, thread: int = 0
    ) -> None:
        """Adds what a compiled function returned.

        Args:
          members: Int [K], the places of its clients in the cohort. Tensors
            may be longer: padded for a function of fixed shapes.
          trained: What it returned, tensors.
          thread: Which thread trained them.
        """
        count = len(members)
        collected = trained.collected
        if collected and count:
            if count < len(collected.norms):
                collected = tf.nest.map_structure(lambda each: each[:count], collected)
            self.collected[thread].append((members, collected))
        if self.window_norms is not None:
            self.window_norms[members] = trained.window_norms.numpy()[:count]
        self.add(trained.total, trained.metrics, thread)

    def add(
        self,
        total: cohort.CohortSum,
        metrics: list[tf.Tensor],
        thread: int = 0,
    ) -> None:
        """Adds the sum of some clients, and their metrics."""
        if self.sums[thread] != ():
            total = cohort.added(self.sums[thread], total)
            metrics = cohort.added(self.metric_states[thread], metrics)
        self.sums[thread] = total
        self.metric_states[thread] = metrics

    def add_contribution(self, one: contribution.Contribution) -> None:
        """Adds what somebody handed in who was not trained here."""
        first = self.sums[0]
        self.sums[0] = first._replace(
            contribution=cohort.added(first.contribution, one)
        )

    def leave_out_idle_threads(self) -> None:
        """Forgets the threads that had nothing to train."""
        ran = [r for r, total in enumerate(self.sums) if total != ()]
        for name in ("sums", "metric_states", "collected"):
            each = getattr(self, name)
            setattr(self, name, [each[thread] for thread in ran])

    def set_contributions(self, contributions: list[Any]) -> None:
        """Sets the sum of the contributions of each thread's clients."""
        self.sums = [
            each._replace(contribution=one)
            for each, one in zip(self.sums, contributions, strict=True)
        ]
        self.collected = []
