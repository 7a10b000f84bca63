"""The query that runs any mechanism, in TF-Privacy's order of calls.

Where clients train one by one, these are the calls of a round:

    state  = query.begin_round(state, z, m)         # this round's m and z
    params = query.derive_sample_params(state)
    for each client:                                # in parallel
        record = algorithm.make_record(query, params, update, client)
        total  = records.add(total, record)
    mean, state = algorithm.release(query, total, state, charged)

A query with `two_phase` sets the clip from the norms of the whole cohort: between
`begin_round` and `derive_sample_params`, the runtime collects
`query.update_norm(update)` from every client and calls
`state = query.clip_to_cohort(state, norms)`.

The order is that of TF-Privacy's `SumAggregationDPQuery`; records are lists of tensors.
The mechanism's `round_event` defines the cost of a round.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Mapping
from typing import Any

from tfdp_fl._lazy_tf import tf
from tfdp_fl.mechanisms import clipping, noise, records
from tfdp_fl.mechanisms.contribution import (
    NUM_DIAGNOSTICS,
    ClientContext,
    Contribution,
    Memory,
    PrivacyContext,
    RoundState,
    Scalar,
    Tensors,
)
from tfdp_fl.terms import Json, NoiseSite, TrustModel

# The relative rounding error allowed in a sum_i (bound_i / stddev_i)^2 in float32.
NOISE_ROUNDING = 1e-5


class CohortQuery:
    """Applies a mechanism to the updates of one cohort.

    Its result is the noisy **mean** update (the noisy sum divided by the expected
    cohort size), to be added to the model.

    Attributes:
      mechanism: The `Mechanism`.
      context: What the mechanism may know about the run.
    """

    def __init__(self, mechanism: Any, context: PrivacyContext):
        mechanism.check_weighting(context.client_weighting)
        self.mechanism = mechanism
        self.context = context
        self._in_steps = False

    @property
    def two_phase(self) -> bool:
        """Whether the clip depends on the norms of the whole cohort."""
        return self.mechanism.clip_to_cohort is not None

    @property
    def keeps_window(self) -> bool:
        """Whether clients remember norms of their earlier rounds."""
        return self.mechanism.window_norms is not None

    @property
    def only_scales(self) -> bool:
        """Whether a client's record is its update times one number.

        Then a runtime that knows the norm does not need the update itself. This is
        False if clients add noise.
        """
        return (
            self.mechanism.scales_updates
            and self.mechanism.noise_site == NoiseSite.SERVER
        )

    def in_steps(self) -> CohortQuery:
        """Returns this query with records in whole steps, int32 (`records.to_steps`).

        It is for queries that `only_scales`, with a bound.
        """
        query = copy.copy(self)
        query._in_steps = True
        return query

    @property
    def num_scalars(self) -> int:
        """The number of `Contribution.scalars`."""
        return len(self.mechanism.side_names) + 1 + NUM_DIAGNOSTICS

    def client_weight(self, num_examples: Scalar) -> tf.Tensor | None:
        """Returns the clients' weights in the mean; None: 1 each.

        Args:
          num_examples: Scalar; see `ClientWeighting.weight`.
        """
        weighting = self.context.client_weighting
        return None if weighting is None else weighting.weight(num_examples)

    def client(self, num_examples: tf.Tensor, window: tf.Tensor) -> ClientContext:
        """Returns the facts about a client, with its window if it has one."""
        weight = self.client_weight(num_examples)
        return ClientContext(
            num_examples, window if self.keeps_window else None, weight
        )

    def initial_global_state(self) -> RoundState:
        """Returns the state before the first round."""
        return RoundState(
            clip_norm=tf.constant(self.mechanism.first_clip_norm(), tf.float32),
            noise_multiplier=tf.constant(0.0),
            clients_per_round=tf.constant(1.0),
            memory=self.mechanism.init_noise_state(self.context),
            shared_stddevs=dict.fromkeys(self._shared_names, tf.constant(0.0)) or (),
        )

    @property
    def _shared_names(self) -> tuple[str, ...]:
        if self.mechanism.noise_site == NoiseSite.CLIENT:
            return ("update", *self.mechanism.side_names)
        return ()

    def new_segment(self, state: RoundState) -> RoundState:
        """Returns a state that keeps the clip but forgets all earlier rounds.

        It is needed if a round that the state does not include may have been released:
        later noise must then not be correlated with earlier noise.
        """
        memory = self.mechanism.init_noise_state(self.context)
        return state._replace(memory=memory)

    def begin_round(
        self,
        state: RoundState,
        noise_multiplier: tf.Tensor | float,
        clients_per_round: tf.Tensor | float,
    ) -> RoundState:
        """Returns the state with this round's values."""
        return self._with_client_noise(
            state._replace(
                noise_multiplier=tf.cast(noise_multiplier, tf.float32),
                clients_per_round=tf.cast(clients_per_round, tf.float32),
            )
        )

    def _with_client_noise(self, state: RoundState) -> RoundState:
        """Returns the state with the stddevs of the clients' noise, set only here."""
        if not (names := self._shared_names):
            return state
        stddevs = self._new_noise_stddevs(state)
        shared = {name: tf.cast(stddevs[name], tf.float32) for name in names}
        return state._replace(shared_stddevs=shared)

    def noise_stddevs(self, state: RoundState) -> Json:
        """Returns the stddevs of a round's noise, by name."""
        if self._shared_names:
            return dict(state.shared_stddevs)
        return self._new_noise_stddevs(state)

    def _new_noise_stddevs(self, state: RoundState) -> Json:
        public = state.without_memory()
        return self.mechanism.noise_stddevs(public, self.context)

    def update_norm(self, update: Tensors) -> tf.Tensor:
        """Returns the norm (float32 scalar) of a client's unclipped update."""
        return clipping.finite_global_norm(update)[0]

    def clip_to_cohort(self, state: RoundState, norms: tf.Tensor) -> RoundState:
        """Returns the state with the clip computed from the cohort's norms."""
        clip_norm = self.mechanism.clip_to_cohort(norms, state.without_memory())
        return self.with_clip(state, clip_norm)

    def with_clip(self, state: RoundState, clip_norm: tf.Tensor) -> RoundState:
        """Returns a round's state with another clip and the noise for that clip."""
        return self._with_client_noise(state._replace(clip_norm=clip_norm))

    def derive_sample_params(self, state: RoundState) -> RoundState:
        """Returns the state that clients receive, without the server's memory."""
        return state.without_memory()

    def initial_sample_state(self, template: Tensors) -> Contribution:
        """Returns the zeros to which records are added: float64, or whole steps."""
        dtype = tf.int32 if self._in_steps else tf.float64
        return Contribution(
            update=[tf.zeros(tensor.shape, dtype) for tensor in template],
            sums={name: tf.zeros([], tf.float64) for name in self.mechanism.side_names},
            weight=tf.zeros([]),
            norm=tf.zeros([]),
            clipped=tf.zeros([]),
            discarded=tf.zeros([]),
        )

    def clip(
        self, params: RoundState, update: Tensors, client: ClientContext
    ) -> Contribution:
        """Returns a client's clipped record, bounded under central guarantees.

        Args:
          params: The result of `derive_sample_params`.
          update: Float tensors, the client's update (or weights).
          client: What the client knows about itself.
        """
        mechanism = self.mechanism
        central = mechanism.trust_model == TrustModel.CENTRAL
        num_examples = client.num_examples if central else None
        if mechanism.scales_updates:
            norm, usable = clipping.finite_global_norm(update)
            factor = self.record_of_norm(norm, usable, params, client.weight)
            factor = records.zero_if_empty(factor, num_examples)
            record = factor._replace(update=clipping.multiply(update, factor.update))
        else:
            record = mechanism.contribution(update, params, client, self.context)
            tensors = records.as_tensors(record.update, like=update)
            record = record._replace(update=tensors)
            if central:
                bounds = self.l2_norm_bound(params), mechanism.side_bounds
                record = records.bound(record, *bounds)
                record = records.zero_if_empty(record, num_examples)
        if mechanism.trust_model == TrustModel.LOCAL:
            weight = mechanism.local_weight(client.num_examples)
            record = record._replace(weight=tf.cast(weight, tf.float32))
        return record

    def add_noise_share(self, params: RoundState, record: Contribution) -> Contribution:
        """Adds the client's share of the noise to every part of its record."""
        shares = self.noise_shares(params)
        update = noise.add_normal(record.update, shares["update"])
        return record._replace(update=update, sums=_add_side_noise(record.sums, shares))

    def record_of_norm(
        self,
        norm: tf.Tensor,
        usable: tf.Tensor,
        params: RoundState,
        weight: Scalar | None = None,
    ) -> Contribution:
        """Returns bounded records for updates of which only the norms are known.

        Their `update` is the factor of each client's update.

        Args:
          norm: Float32, any shape: norms, or upper bounds; 0 if not usable.
          usable: Bool, the same shape.
          params: The result of `derive_sample_params`.
          weight: The clients' weights, in [0, 1]; None: 1.
        """
        mechanism = self.mechanism

        def bounded(arguments: tuple[tf.Tensor, ...]) -> Contribution:
            norm, usable, *weight = arguments
            record = mechanism.contribution_of_norm(norm, usable, params)
            record = record.scale_by(weight[0] if weight else None)
            bounds = self.l2_norm_bound(params), mechanism.side_bounds
            if not mechanism.clips_by_element:  # Its factor may be above 1.
                norm = clipping.norm_with_unseen(norm)
            return records.bound_factor(record, norm, *bounds)

        arguments = (norm, usable) if weight is None else (norm, usable, weight)
        if not norm.shape.rank or mechanism.clips_by_element:
            return bounded(arguments)
        # A user's own functions might mix the clients of a vector.
        number = tf.TensorSpec([], tf.float32)
        record = Contribution(
            number, dict.fromkeys(mechanism.side_names, number), *[number] * 4
        )
        return tf.map_fn(
            bounded, arguments, fn_output_signature=record, parallel_iterations=1
        )

    def to_grid(self, update: Tensors, params: RoundState) -> Tensors:
        """Rounds a record so that sums of records are exact (see `records`)."""
        if self._in_steps:
            return records.to_steps(update, self.coarse_step(params))
        return records.to_grid(update, self.grid_step(params))

    def grid_step(self, params: RoundState) -> tf.Tensor:
        """Returns the grid step to which records are rounded, float32 scalar."""
        return records.step(self.l2_norm_bound(params), params.clients_per_round)

    def coarse_step(self, params: RoundState) -> tf.Tensor:
        """Returns the step of records `in_steps`, float32 scalar."""
        return records.coarse_step(self.l2_norm_bound(params))

    def noise_shares(self, params: RoundState) -> dict[str, tf.Tensor]:
        """Returns the stddevs of one client's share: the full noise over sqrt(m)."""
        return {
            name: stddev / tf.sqrt(params.clients_per_round)
            for name, stddev in self.noise_stddevs(params).items()
        }

    def l2_norm_bound(self, state: RoundState) -> tf.Tensor | float:
        """Returns the bound on the norm of a client's record, before noise."""
        return self.mechanism.l2_norm_bound(state.without_memory())

    def add_noise(
        self, total: Contribution, state: RoundState, stddevs: Mapping[str, Scalar]
    ) -> tuple[Tensors, dict[str, tf.Tensor], Memory]:
        """Returns the noisy sum, the noisy side sums, and the next memory.

        Args:
          total: The sum of the records.
          state: The round's state.
          stddevs: The result of `noise_stddevs`, as checked.
        """
        update, memory, sums = total.update, state.memory, dict(total.sums)
        if self.mechanism.noise_site == NoiseSite.SERVER:
            update, memory = self._add_noise(update, stddevs["update"], state)
            sums = _add_side_noise(sums, stddevs)
        sums = {name: tf.cast(value, tf.float32) for name, value in sums.items()}
        return update, sums, memory

    def _add_noise(
        self, update: Tensors, stddev: Scalar, state: RoundState
    ) -> tuple[Tensors, Memory]:
        return self.mechanism.add_noise(update, stddev, state.memory)

    def divide(self, update: Tensors, weight: Scalar, state: RoundState) -> Tensors:
        """Returns the mean from a noisy sum (`Mechanism.mean`)."""
        return self.mechanism.mean(update, weight, state, self.context)

    def paid_for(
        self, paid: float | None, clients_per_round: float, noise_multiplier: float
    ) -> float:
        """Returns the largest sum_i (bound_i / stddev_i)^2 that a receipt allows.

        Args:
          paid: The noise multiplier in the receipt: the result of `Charge.use`.
          clients_per_round: m of the round.
          noise_multiplier: z of the round.
        """
        if self.mechanism.derives_cost and paid is not None:
            return paid**-2 if paid else math.inf
        # A self-declared event cannot be compared; the noise at first clip can.
        return self.charged_for(clients_per_round, noise_multiplier)

    def charged_for(self, clients_per_round: float, noise_multiplier: float) -> float:
        """Returns the sum_i (bound_i / stddev_i)^2 from which the charge is derived."""
        mechanism = self.mechanism
        round = RoundState(
            mechanism.reference_clip_norm, noise_multiplier, clients_per_round
        )
        return float(mechanism.sensitivity_squared(round, self.context))

    def check_noise(
        self,
        state: RoundState,
        charged: Scalar,
        stddevs: Mapping[str, Scalar] | None = None,
    ) -> list[tf.Operation]:
        """Raises InvalidArgumentError if a round has less noise than was charged for.

        A mechanism's cost is derived from its bounds and noise at the first clip. In a
        user-defined mechanism, the noise might not grow with the clip, or might differ
        between tensors and the Python numbers from which the charge is computed.

        Args:
          state: The round's state.
          charged: The result of `paid_for` or `charged_for`.
          stddevs: By name, the stddevs of the noise to be added; None: computed here.

        Returns:
          In a graph, the operations that raise the error, for `after_assertions`.
        """
        mechanism = self.mechanism
        actual = mechanism.sensitivity_squared(state, self.context, stddevs)
        return must_be_at_most(
            tf.cast(actual, tf.float32),
            tf.cast(charged, tf.float32) * (1 + NOISE_ROUNDING),
            f"{mechanism.name} adds less noise for its bounds in this round than it is "
            "charged for (computed in Python numbers, and at the first clip).",
        )

    def check_reported_event(self, state: RoundState) -> list[tf.Operation]:
        """Raises an error if a TF-Privacy query reports a cost above `round_event`.

        It is for runtimes that record a round's event in advance, instead of asking
        `event_at` before each charge. It returns what `check_noise` returns.
        """
        del state  # Mechanisms report nothing.
        return []

    def derive_metrics(self, state: RoundState) -> collections.OrderedDict:
        """Returns `clip_norm` and `noise_stddev` (on the sum) of a round."""
        stddev = self.noise_stddevs(state)["update"]
        return collections.OrderedDict(
            clip_norm=state.clip_norm, noise_stddev=tf.cast(stddev, tf.float32)
        )


def after_assertions(assertions: list[tf.Operation], tensors: Memory) -> Memory:
    """Makes every use of a nest of tensors wait until the assertions have passed.

    Otherwise, a graph could run them at the same time as the update of the model, or
    (in TFF) not at all.
    """
    with tf.control_dependencies(assertions):
        return tf.nest.map_structure(tf.identity, tensors)


def must_be_at_most(
    value: tf.Tensor, limit: tf.Tensor, message: str
) -> list[tf.Operation]:
    """Raises InvalidArgumentError; in a graph, returns the operation that raises it."""
    check = tf.debugging.assert_less_equal(value, limit, message)
    return [] if check is None else [check]


def _add_side_noise(sums: Mapping[str, Scalar], stddevs: Mapping[str, Scalar]) -> Json:
    """Returns the side sums with noise."""
    return {
        name: noise.add_normal([value], stddevs[name])[0]
        for name, value in sums.items()
    }
