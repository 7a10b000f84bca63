"""What the server sends to the clients of a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp_fl.engine import calls, cohort, rounds, server_update
from tfdp_fl.mechanisms import cohort_query, noise

BroadcastHook = Callable[[list[tf.Tensor], tf.Tensor], list[tf.Tensor]]


class Broadcast:
    """Reads the server's model, and lets a hook change what clients get."""

    def __init__(
        self,
        query: cohort_query.CohortQuery,
        server: server_update.ServerUpdate,
        unaggregated: list[tf.Variable],
        hook: BroadcastHook | None,
    ):
        """Prepares the function; nothing is traced yet.

        Args:
          query: The mechanism's query.
          server: Holds the variables that clients train.
          unaggregated: The server's other variables.
          hook: Called on the weights and a seed of the round's; or None.
        """
        self._query = query
        self._server = server
        self._unaggregated = unaggregated
        self._hook = hook
        self._compiled = calls.Compiled(self.received)

    def __call__(self, state: Any, inputs: rounds.RoundInputs) -> cohort.Received:
        """Returns what clients receive, in the state before the round."""
        numbers, seed = inputs.tensors()
        return self._compiled(state, numbers, seed, (), kind=seed.dtype)

    def changed_weights(self, state: Any, inputs: rounds.RoundInputs) -> Any:
        """Returns one set of weights for all replicas; () without a hook."""
        return () if self._hook is None else self(state, inputs).weights

    def received(
        self, state: Any, numbers: tf.Tensor, seed: tf.Tensor, weights: Any = ()
    ) -> cohort.Received:
        """Returns what clients receive, while a function is traced.

        Args:
          state: The query's state.
          numbers: Float32 [z, m, learning rate].
          seed: The round's seed (see `mechanisms.noise`).
          weights: What `changed_weights` returned.
        """
        state = self._query.begin_round(state, numbers[0], numbers[1])
        weights = list(weights)
        if not weights:
            weights = [each.read_value() for each in self._server.variables]
            if self._hook is not None:
                own = noise.as_integers(noise.fold_in(seed, -3))
                with noise.seeded(noise.fold_in(seed, -2)):
                    weights = list(self._hook(weights, own))
        # Where the clip is not known before all updates are, nobody gets it.
        params: Any = ()
        if not self._query.two_phase:
            params = self._query.derive_sample_params(state)
        return cohort.Received(
            weights=weights,
            unaggregated=[each.read_value() for each in self._unaggregated],
            params=tf.nest.map_structure(tf.convert_to_tensor, params),
            learning_rate=numbers[2],
            seed=noise.for_clients(seed),
        )
