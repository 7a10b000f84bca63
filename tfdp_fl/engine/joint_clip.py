"""A clip that depends on the norms of the whole cohort, of updates that wait."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdp_fl.engine import cohort
from tfdp_fl.mechanisms import cohort_query, contribution, noise


class JointClip:
    """Clips a cohort's updates, once all their norms are known."""

    def __init__(self, query: cohort_query.CohortQuery, update_spec: cohort.UpdateSpec):
        """Makes the functions, which the first round traces.

        Args:
          query: The mechanism's query; it has two phases.
          update_spec: The shapes of a client's update.
        """
        self._query = query
        self._spec = update_spec
        self._set_clip = tf.function(
            self._clip_to_cohort, reduce_retracing=True, autograph=False
        )
        self._clip = tf.function(self._clipped, reduce_retracing=True, autograph=False)

    def __call__(
        self, pending: cohort.PendingRound
    ) -> Iterator[tuple[np.ndarray, cohort.PerClient]]:
        """Sets the clip; yields the clients' places, and their contributions."""
        pending.collected.sort(key=lambda part: part[0][0])
        norms = np.zeros(pending.cohort_size, np.float32)
        answered = np.zeros(len(norms), bool)
        for members, rows in pending.collected:
            norms[members] = self._query.norm_of_scalars(rows.scalars).numpy()
            answered[members] = True
        pending.state, params = self._set_clip(
            pending.state, *pending.tensors, tf.constant(norms[answered])
        )
        _, seed = pending.tensors
        for members, rows in pending.collected:
            yield members, self._clip(params, rows, tf.constant(members), seed)

    def _clip_to_cohort(self, state, numbers, seed, norms):
        state = self._query.begin_round(state, numbers[0], numbers[1])
        with noise.seeded(noise.fold_in(seed, -4)):
            state = self._query.clip_to_cohort(state, norms)
        return state, self._query.derive_sample_params(state)

    def _clipped(self, params, rows, members, seed):
        """Returns some clients' contributions, of their unclipped updates.

        Args:
          params: The query's sample params, with the clip of this round.
          rows: A `PerClient` of unclipped updates, and what the clients count.
          members: Int32 [K], the clients' places in the cohort.
          seed: The round's seed (see `mechanisms.noise`).
        """

        def client(arguments):
            update, scalars, member = arguments
            client_seed = noise.fold_in(seed, member)
            with noise.seeded(noise.fold_in(client_seed, 0)):
                one = self._query.preprocess_record(
                    params,
                    self._spec.unflatten(update),
                    contribution.Client(weight=self._query.weight_of_scalars(scalars)),
                )
            return cohort.flatten(one.update), tf.stack(one.scalars())

        updates, scalars = tf.map_fn(
            client,
            (rows.updates, rows.scalars, members),
            parallel_iterations=1,
            fn_output_signature=(
                tf.TensorSpec([self._spec.size], tf.float32),
                tf.TensorSpec([self._query.num_scalars], tf.float32),
            ),
        )
        return cohort.PerClient(updates, scalars)
