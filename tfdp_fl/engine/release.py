"""Releasing a round: noise on the sum, the mean, and the model's move."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp_fl.engine import cohort, rounds, server_update
from tfdp_fl.mechanisms import cohort_query, noise


@dataclasses.dataclass(eq=False)
class Release:
    """Adds a round's noise, divides, and updates the model.

    Attributes:
      query: The mechanism's query.
      server: Holds the model's weights.
      metric_results: What metrics say of the sums of their values.
      update_size: The number of elements of an update.
      log_names: What it returns the values of.
    """

    query: cohort_query.CohortQuery
    server: server_update.ServerUpdate
    metric_results: Callable[[list[tf.Tensor]], dict[str, tf.Tensor]]
    update_size: int
    log_names: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._compiled = tf.function(self._released, autograph=False)

    def __call__(self, pending: rounds.PendingRound) -> tuple[Any, dict[str, float]]:
        """Releases a round; returns the query's next state, and the logs."""
        answered = pending.cohort_size - len(pending.failures)
        state, values = self._compiled(
            pending.sums,
            pending.metric_states,
            pending.state,
            *pending.tensors,
            tf.constant(answered, tf.float32),
        )
        return state, dict(zip(self.log_names, values.numpy().tolist(), strict=True))

    def _released(self, sums, metric_states, state, numbers, seed, answered):
        state = self.query.begin_round(state, numbers[0], numbers[1])
        total = functools.reduce(cohort.added, sums)
        with noise.seeded(noise.fold_in(seed, -1)):
            mean, new_state, _ = self.query.get_noised_result(total.contribution, state)
        if self.query.mechanism.releases_weights:  # If there are any.
            tf.cond(
                total.contribution.weight > 0,
                lambda: self.server.replace(mean),
                lambda: True,
            )
        else:
            self.server.apply(mean)
        metrics = functools.reduce(cohort.added, metric_states)
        logs = self._logs(total, metrics, state, answered)
        self.log_names = list(logs)
        values = [tf.cast(value, tf.float32) for value in logs.values()]
        return new_state, tf.stack(values)

    def _logs(
        self,
        total: cohort.CohortSum,
        metrics: list[tf.Tensor],
        state: Any,
        answered: tf.Tensor,
    ) -> dict[str, tf.Tensor]:
        """Returns what `History` has of a round, most of it not noised."""
        summed = total.contribution
        logs = {
            "loss": tf.math.divide_no_nan(total.loss, total.examples),
            **self.metric_results(metrics),
            **self.query.derive_metrics(state),
            "clipped_fraction": tf.math.divide_no_nan(summed.clipped, answered),
            "mean_update_norm": tf.math.divide_no_nan(summed.norm, answered),
            "discarded_clients": summed.discarded,
        }
        if total.moments:
            logs.update(_variance_and_scale(total.moments))
        return logs


def _variance_and_scale(moments: cohort.Moments) -> dict[str, tf.Tensor]:
    """Returns Geyer's V_c and U_s (Geyer et al. 2017, Section 3).

    V_c is the mean over parameters of the variance across clients, U_s the
    mean over parameters of the squared mean.
    """
    variance, scale, size = 0.0, 0.0, 0
    for first, second in zip(moments.first, moments.second, strict=True):
        mean = tf.math.divide_no_nan(first, moments.count)
        spread = tf.math.divide_no_nan(second, moments.count) - mean * mean
        variance += tf.reduce_sum(tf.maximum(spread, 0))
        scale += tf.reduce_sum(mean * mean)
        size += first.shape.num_elements()
    return {
        "between_client_variance": variance / size,
        "update_scale": scale / size,
    }
