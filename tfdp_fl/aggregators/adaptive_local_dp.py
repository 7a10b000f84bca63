"""Window-based local differential privacy as TFF aggregation factories."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdp_fl import schedules
from tfdp_fl.aggregators import bound_mechanism, mechanism_factory
from tfdp_fl.mechanisms import adaptive_local_dp
from tfdp_fl.mechanisms import mechanism as mechanism_lib


class AdaptiveLocalDPFactory(mechanism_factory.MechanismFactory):
    """DISCO's local DP, for clients without a memory (see `AdaptiveLocalDP`).

    A TFF client has neither a name nor a state, so its window of earlier norms
    is empty in every round, and every layer's radius is `clipping_radius`: a
    local mechanism with a fixed radius for each layer. Where clients can be
    told apart, `WindowedAdaptiveLocalDPFactory` keeps their windows.
    """

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        clients_per_round: schedules.Schedule,
        clipping_radius: float = 1.0,
        window: int = 3,
        calibration: str = "analytic",
        composition: str = "rdp",
        layers: str = "joint",
        inner_factory: tff.aggregators.UnweightedAggregationFactory
        | None = None,
        **options: Any,
    ):
        """For the arguments see `AdaptiveLocalDP` and `MechanismFactory`.

        `rounds` is needed, to split the budget.
        """
        super().__init__(
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
            inner_factory,
            **options,
        )


class WindowedState(NamedTuple):
    """The state of a `WindowedQuery`.

    Attributes:
      inner: The state of the query without windows.
      windows: Float32 [N, window, L], the norms of each client's last rounds,
        newest last, NaN where there are none.
    """

    inner: mechanism_lib.QueryState
    windows: tf.Tensor

    @property
    def clients_per_round(self) -> tf.Tensor:
        """Float32 scalar, this round's expected cohort size m."""
        return self.inner.clients_per_round


class WindowedRecord(NamedTuple):
    """A `Record`, and the norms that go into the client's window.

    Attributes:
      update: See `Record`.
      below_clip: See `Record`.
      weight: See `Record`.
      norm: See `Record`.
      clipped: See `Record`.
      discarded: See `Record`.
      layer_norms: Float32 [N, L], in the client's row its norms before
        clipping, elsewhere 0.
      seen: Float32 [N], 1 in the client's row if it has norms, elsewhere 0.
    """

    update: Any
    below_clip: tf.Tensor
    weight: tf.Tensor
    norm: tf.Tensor
    clipped: tf.Tensor
    discarded: tf.Tensor
    layer_norms: tf.Tensor
    seen: tf.Tensor


class WindowedQuery(mechanism_lib.CohortQuery):
    """`AdaptiveLocalDPQuery` with the windows of N clients in its state.

    The third argument of `preprocess_record` is the client's index. Norms
    travel in the sum of the records, which has a row for each client.
    """

    def __init__(
        self, query: adaptive_local_dp.AdaptiveLocalDPQuery, num_clients: int
    ):
        self._query = query
        self._num_clients = num_clients

    def initial_global_state(self) -> WindowedState:
        """Implements `DPQuery.initial_global_state`: empty windows."""
        shape = [self._num_clients, self._query.window, self._query.num_layers]
        return WindowedState(
            inner=self._query.initial_global_state(),
            windows=tf.fill(shape, np.float32("nan")),
        )

    def begin_round(
        self,
        state: WindowedState,
        noise_multiplier: tf.Tensor | float,
        clients_per_round: tf.Tensor | float,
    ) -> WindowedState:
        """Implements `CohortQuery.begin_round`."""
        inner = self._query.begin_round(
            state.inner, noise_multiplier, clients_per_round
        )
        return state._replace(inner=inner)

    def noise_stddev(self, state: WindowedState) -> tf.Tensor:
        """Returns the noise on the sum of m layers at the largest radius."""
        return self._query.noise_stddev(state.inner)

    def derive_metrics(self, state: WindowedState) -> collections.OrderedDict:
        """Implements `DPQuery.derive_metrics`."""
        return self._query.derive_metrics(state.inner)

    def derive_sample_params(self, state: WindowedState) -> tf.Tensor:
        """Returns every client's radii: float32 [N, L]."""
        return tf.map_fn(self._query.radii, state.windows)

    def preprocess_record(
        self,
        params: tf.Tensor,
        record: list[tf.Tensor],
        client_index: tf.Tensor | None = None,
    ) -> WindowedRecord:
        """Clips and noises with the radii of one client.

        Args:
          params: From `derive_sample_params`.
          record: The client's update.
          client_index: Integer scalar from 0 to N - 1.
        """
        in_range = tf.debugging.assert_less(
            client_index,
            tf.cast(self._num_clients, client_index.dtype),
            message="client index must be below num_clients.",
        )
        not_negative = tf.debugging.assert_non_negative(
            client_index, message="client index must not be negative."
        )
        with tf.control_dependencies([in_range, not_negative]):
            row = tf.one_hot(client_index, self._num_clients)
        radii = tf.linalg.matvec(params, row, transpose_a=True)
        released = self._query.preprocess_record(
            adaptive_local_dp.WindowParams(radii=radii), record
        )
        usable = 1.0 - released.discarded
        norms = tf.math.multiply_no_nan(self._query.layer_norms(record), usable)
        return WindowedRecord(
            *released,
            layer_norms=row[:, tf.newaxis] * norms,
            seen=row * usable,
        )

    def get_noised_result(
        self, sample_state: WindowedRecord, global_state: WindowedState
    ) -> tuple[list[tf.Tensor], WindowedState, dp_accounting.NonPrivateDpEvent]:
        """Returns the mean of the releases, and windows that moved on."""
        released = mechanism_lib.Record(
            *(getattr(sample_state, name) for name in _RECORD_FIELDS)
        )
        mean, inner, event = self._query.get_noised_result(
            released, global_state.inner
        )
        # A client that was in the cohort twice had the mean of its norms.
        newest = tf.math.divide_no_nan(
            sample_state.layer_norms, sample_state.seen[:, tf.newaxis]
        )
        moved = tf.concat(
            [global_state.windows[:, 1:], newest[:, tf.newaxis]], axis=1
        )
        windows = tf.where(
            sample_state.seen[:, tf.newaxis, tf.newaxis] > 0,
            moved,
            global_state.windows,
        )
        return mean, WindowedState(inner=inner, windows=windows), event


_RECORD_FIELDS = mechanism_lib.Record._fields


class WindowedAdaptiveLocalDPFactory(
    tff.aggregators.WeightedAggregationFactory
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
        inner_factory: tff.aggregators.UnweightedAggregationFactory
        | None = None,
        **deployment: Any,
    ):
        """For the arguments see `AdaptiveLocalDP` and `MechanismFactory`.

        `num_clients` and `rounds` are needed.
        """
        mechanism_factory.check_inner_factory("inner_factory", inner_factory)
        self._bound = bound_mechanism.BoundMechanism(
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
        self._inner_factory = inner_factory

    @property
    def mechanism(self) -> adaptive_local_dp.AdaptiveLocalDP:
        """The mechanism."""
        return self._bound.mechanism

    @property
    def deployment(self) -> mechanism_lib.Deployment:
        """Where it is used."""
        return self._bound.deployment

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
            wrap=lambda query: WindowedQuery(
                query, self.deployment.num_clients
            ),
            inner_factory=self._inner_factory,
            scalars_factory=None,
        )
