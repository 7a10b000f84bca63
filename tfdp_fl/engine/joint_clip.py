"""A clip that depends on the norms of the whole cohort, of updates that wait."""

from __future__ import annotations

from concurrent import futures
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl.engine import cohort, devices, rounds
from tfdp_fl.mechanisms import cohort_query, contribution, noise


class JointClip:
    """Clips a cohort's updates, once all their norms are known."""

    def __init__(self, query: cohort_query.CohortQuery, update_spec: cohort.UpdateSpec):
        """Prepares the functions; nothing is traced yet.

        Args:
          query: The mechanism's query; it has two phases.
          update_spec: What one client hands in.
        """
        self._query = query
        self._spec = update_spec
        self._clip, self._sum, self._each = (
            tf.function(each, reduce_retracing=True, autograph=False)
            for each in (self._clip_to_cohort, self._summed, self._clipped_each)
        )

    def set_clip(self, pending: rounds.PendingRound) -> Any:
        """Sets the clip from all norms; returns the sample params."""
        norms = np.zeros(pending.cohort_size, np.float32)
        answered = np.zeros(len(norms), bool)
        for group in pending.collected:
            for members, collected in group:
                norms[members] = collected.norms.numpy()
                answered[members] = True
        pending.state, params = self._clip(
            pending.state, *pending.tensors, tf.constant(norms[answered])
        )
        return params

    def clip_and_sum(
        self,
        pending: rounds.PendingRound,
        params: Any,
        pool: futures.Executor,
        device: str,
    ) -> None:
        """Clips and adds up each update, those of each thread in a thread."""
        _, seed = pending.tensors

        @devices.at(device)
        def run(thread: int) -> Any:
            total = self._query.initial_sample_state(self._spec.zeros())
            for members, collected in pending.collected[thread]:
                one = self._sum(
                    params,
                    collected.updates,
                    collected.scalars,
                    tf.constant(members),
                    seed,
                )
                total = cohort.added(total, one)
            return total

        # Traced before the threads run.
        for members, collected in [
            part for group in pending.collected for part in group
        ][:1]:
            self._sum(
                params,
                collected.updates[:0],
                collected.scalars[:0],
                members[:0],
                seed,
            )
        pending.set_contributions(list(pool.map(run, range(len(pending.sums)))))

    def clip_each(self, pending: rounds.PendingRound, params: Any) -> None:
        """Clips each update, for a sum that is formed elsewhere."""
        _, seed = pending.tensors
        for group in pending.collected:
            for place, (members, collected) in enumerate(group):
                clipped = self._each(
                    params,
                    collected.updates,
                    collected.scalars,
                    tf.constant(members),
                    seed,
                )
                group[place] = (members, clipped)

    def _clip_to_cohort(self, state, numbers, seed, norms):
        state = self._query.begin_round(state, numbers[0], numbers[1])
        with noise.seeded(noise.fold_in(seed, -4)):
            state = self._query.clip_to_cohort(state, norms)
        return state, self._query.derive_sample_params(state)

    def _clipped(
        self,
        params: Any,
        update: tf.Tensor,
        scalars: tf.Tensor,
        member: tf.Tensor,
        seed: tf.Tensor,
    ) -> contribution.Contribution:
        """Returns a client's contribution.

        Args:
          params: The query's sample params, with the clip of this round.
          update: Float32 [D].
          scalars: What is known of the client beside it: what it counts.
          member: Int32 scalar, the client's place in the cohort.
          seed: The round's seed (see `mechanisms.noise`).
        """
        client_seed = noise.fold_in(seed, member)
        with noise.seeded(noise.fold_in(client_seed, 0)):
            return self._query.preprocess_record(
                params,
                self._spec.unflatten(update),
                contribution.Client(weight=self._query.weight_of_scalars(scalars)),
            )

    def _summed(self, params, updates, scalars, members, seed):
        """Returns the sum of some clients' contributions."""
        query, count = self._query, tf.shape(updates)[0]

        def client(k, total):
            one = self._clipped(params, updates[k], scalars[k], members[k], seed)
            return k + 1, query.accumulate_preprocessed_record(total, one)

        zeros = query.initial_sample_state(self._spec.zeros())
        _, total = tf.while_loop(
            lambda k, _: k < count,
            client,
            (tf.constant(0), cohort.made_by_each_run(zeros, count)),
            parallel_iterations=1,
        )
        return total

    def _clipped_each(self, params, updates, scalars, members, seed):
        """Returns what `_summed` adds up, one by one: `CollectedUpdates`."""

        def client(row):
            one = self._clipped(params, *row, seed)
            return cohort.flatten(one.update), tf.stack(one.scalars())

        flat, scalars = tf.map_fn(
            client,
            (updates, scalars, members),
            parallel_iterations=1,
            fn_output_signature=(
                tf.TensorSpec([self._spec.size], tf.float32),
                tf.TensorSpec([self._query.num_scalars], tf.float32),
            ),
        )
        return cohort.CollectedUpdates(
            updates=flat,
            norms=self._query.norm_of_scalars(scalars),
            scalars=scalars,
        )
