"""Local DP with the window of every client, as a TFF aggregation factory."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdp_fl import schedules
from tfdp_fl.aggregators import bound_mechanism, mechanism_factory
from tfdp_fl.mechanisms import adaptive_local_dp, cohort_query, contribution


class WindowedRound(NamedTuple):
    """A `Round` with everybody's window.

    Attributes:
      clip_norm: See `Round`.
      noise_multiplier: See `Round`.
      clients_per_round: See `Round`.
      windows: Float32 [N, window, L], the norms of each client's last rounds,
        newest last, NaN where there are none.
    """

    clip_norm: Any
    noise_multiplier: Any
    clients_per_round: Any
    windows: tf.Tensor

    @property
    def memory(self) -> Any:
        """Nothing that noise would need."""
        return ()


class WindowedQuery(cohort_query.CohortQuery):
    """The query of `AdaptiveLocalDP`, with the windows of N clients.

    Every client gets all of them. The norms of a round travel as sums of the
    records:
    `layer_norms`, [N, L], in the client's row its norms before clipping, and
    `seen`, [N], 1 in the client's row if it has norms; 0 elsewhere.
    """

    @property
    def _num_clients(self) -> int:
        return cast(int, self.deployment.num_clients)  # Required there.

    def initial_global_state(self) -> WindowedRound:
        """Implements `CohortQuery.initial_global_state`: empty windows."""
        shape = [
            self._num_clients,
            self.mechanism.window,
            self.deployment.num_variables,
        ]
        first = super().initial_global_state()
        return WindowedRound(
            first.clip_norm,
            first.noise_multiplier,
            first.clients_per_round,
            tf.fill(shape, np.float32("nan")),
        )

    def derive_sample_params(self, state: WindowedRound) -> WindowedRound:
        """Returns what every client gets: the windows of all as well."""
        return state

    def client_with(self, number: tf.Tensor) -> contribution.Client:
        """Returns the client of an index, which is all that it knows."""
        return contribution.Client(num_examples=number)

    def preprocess_record(
        self,
        params: WindowedRound,
        record: list[tf.Tensor],
        client: contribution.Client = contribution.Client(),  # noqa: B008
    ) -> contribution.Contribution:
        """Clips and noises with the window of the client that has an index."""
        index = client.num_examples
        in_range = tf.debugging.assert_less(
            index,
            tf.cast(self._num_clients, index.dtype),
            message="client index must be below num_clients.",
        )
        not_negative = tf.debugging.assert_non_negative(
            index, message="client index must not be negative."
        )
        with tf.control_dependencies([in_range, not_negative]):
            row = tf.one_hot(index, self._num_clients)
            window = tf.gather(params.windows, index)
        released = super().preprocess_record(
            params, record, contribution.Client(window=window)
        )
        usable = 1.0 - released.discarded
        norms = tf.math.multiply_no_nan(self.mechanism.window_norms(record), usable)
        return released._replace(
            sums={
                "layer_norms": row[:, tf.newaxis] * norms,
                "seen": row * usable,
            }
        )

    def get_noised_result(
        self,
        sample_state: contribution.Contribution,
        global_state: WindowedRound,
    ) -> tuple[list[tf.Tensor], WindowedRound, dp_accounting.DpEvent]:
        """Returns the mean of the releases, and windows that moved on."""
        mean, state, event = super().get_noised_result(sample_state, global_state)
        norms, seen = (sample_state.sums[n] for n in ("layer_norms", "seen"))
        windows = global_state.windows
        # A client that was in the cohort twice had the mean of its norms.
        newest = tf.math.divide_no_nan(norms, seen[:, tf.newaxis])
        moved = tf.concat([windows[:, 1:], newest[:, tf.newaxis]], axis=1)
        windows = tf.where(seen[:, tf.newaxis, tf.newaxis] > 0, moved, windows)
        return mean, state._replace(windows=windows), event


class WindowedAdaptiveLocalDPFactory(
    mechanism_factory.BoundFactory, tff.aggregators.WeightedAggregationFactory
):
    """DISCO's local DP with every client's window, by the client's index.

    A client's second value (its "weight") is its index, an integer scalar
    from 0 to `num_clients` - 1, always the same for the same client. The mean
    is not weighted by it.

    For simulation. The windows are kept in the server's state, so the server
    sees the norms of the updates before noise, and the clients get everybody's
    radii: what DISCO keeps on each client's own device, TFF has no place for
    there. The guarantee therefore holds against those who see the releases,
    not against this server. Each client sends N (L + 1) numbers more.

    Measurements and state are those of `MechanismFactory`.
    """

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        clients_per_round: schedules.Schedule,
        num_clients: int,
        clipping_radius: float = 1.0,
        window: int = 3,
        calibration: str = "analytic",
        composition: str = "rdp",
        layers: str = "joint",
        inner_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
        **deployment: Any,
    ):
        """For the arguments see `AdaptiveLocalDP` and `MechanismFactory`.

        `num_clients` and `rounds` are needed.
        """
        bound = bound_mechanism.BoundMechanism(
            adaptive_local_dp.AdaptiveLocalDP(
                epsilon=epsilon,
                delta=delta,
                clipping_radius=clipping_radius,
                window=window,
                calibration=calibration,
                composition=composition,
                layers=layers,
            ),
            clients_per_round,
            num_clients=num_clients,
            **deployment,
        )
        super().__init__(bound, inner_factory=inner_factory, scalars_factory=None)

    def create(
        self, value_type: tff.types.Type, weight_type: tff.types.Type
    ) -> tff.templates.AggregationProcess:
        """Implements `WeightedAggregationFactory.create`.

        Args:
          value_type: A structure of float tensors.
          weight_type: An integer scalar, the client's index.

        Raises:
          TypeError: `value_type` or `weight_type` is of another kind.
        """
        if not (
            isinstance(weight_type, tff.TensorType)
            and np.issubdtype(weight_type.dtype, np.integer)
        ):
            raise TypeError(
                "weight_type must be an integer scalar, the client's index, "
                f"got {weight_type}."
            )
        return self._bound.create(
            value_type,
            weight_type,
            wrap=lambda query: WindowedQuery(query.mechanism, query.deployment),
            **self._factories,
        )
