"""The query that runs any mechanism, in TF-Privacy's order of calls.

Where clients train one by one, these are the calls of a round:

    state  = query.begin_round(state, z, m)         # this round's m and z
    params = query.derive_sample_params(state)
    for each client:                                # in parallel
        contribution = algorithm.make_contribution(query, params, update, client)
        total  = bounded_sums.add(total, contribution)
    mean, state = algorithm.release(query, total, state, charged)

A query with `two_phase` sets the clip from the norms of the whole cohort: between
`begin_round` and `derive_sample_params`, the runtime collects
`query.update_norm(update)` from every client and calls
`state = query.clip_to_cohort(state, norms)`.

The order is that of TF-Privacy's `SumAggregationDPQuery`; contributions are lists of
tensors. The mechanism's `round_event` defines the cost of a round.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Mapping
from typing import Any

import dp_accounting

from tfdp_fl._lazy_tf import tf
from tfdp_fl.mechanisms import bounded_sums, clipping, noise
from tfdp_fl.mechanisms.contribution import (
    NUM_DIAGNOSTICS,
    ClientContext,
    Contribution,
    NoiseStateLike,
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
        self._has_int32_sums = False

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
        """Whether a client's contribution is its update times one number.

        Then a runtime that knows the norm does not need the update itself. This is
        False if clients add noise.
        """
        return (
            self.mechanism.scales_updates
            and self.mechanism.noise_site == NoiseSite.SERVER
        )

    def with_int32_sums(self) -> CohortQuery:
        """Returns this query with contributions in int32 (`bounded_sums.to_int32`).

        It is for queries that `only_scales`, with a bound.
        """
        query = copy.copy(self)
        query._has_int32_sums = True
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
            noise_state=self.mechanism.init_noise_state(self.context),
            shared_stddevs=dict.fromkeys(self._shared_names, tf.constant(0.0)) or (),
        )

    @property
    def _shared_names(self) -> tuple[str, ...]:
        if self.mechanism.noise_site == NoiseSite.CLIENT:
            return ("update", *self.mechanism.side_names)
        return ()

    def restart_noise(self, state: RoundState) -> RoundState:
        """Returns a state that keeps the clip but forgets all earlier rounds.

        It is needed if a round that the state does not include may have been released:
        later noise must then not be correlated with earlier noise.
        """
        noise_state = self.mechanism.init_noise_state(self.context)
        return state._replace(noise_state=noise_state)

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
        public = state.without_noise_state()
        return self.mechanism.noise_stddevs(public, self.context)

    def update_norm(self, update: Tensors) -> tf.Tensor:
        """Returns the norm (float32 scalar) of a client's unclipped update."""
        return clipping.finite_global_norm(update)[0]

    def clip_to_cohort(self, state: RoundState, norms: tf.Tensor) -> RoundState:
        """Returns the state with the clip computed from the cohort's norms."""
        mechanism, public = self.mechanism, state.without_noise_state()
        if not mechanism.overrides("clip_to_cohort"):
            return self.with_clip(state, mechanism.clip_to_cohort(norms, public))
        clip_norm = noise.with_fresh_draws(
            *(mechanism.clip_to_cohort, norms, public),
            must_add_noise=False,
            argument="clip_to_cohort",
        )
        return self.with_clip(state, clip_norm)

    def with_clip(self, state: RoundState, clip_norm: tf.Tensor) -> RoundState:
        """Returns a round's state with another clip and the noise for that clip."""
        return self._with_client_noise(state._replace(clip_norm=clip_norm))

    def derive_sample_params(self, state: RoundState) -> RoundState:
        """Returns the state that clients receive, without the server's noise state."""
        return state.without_noise_state()

    def initial_sample_state(self, template: Tensors) -> Contribution:
        """Returns the zeros to add contributions to: float64, or whole steps."""
        dtype = tf.int32 if self._has_int32_sums else tf.float64
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
        """Returns a client's clipped contribution, bounded under central guarantees.

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
            factor = self.contributions_of_norms(norm, usable, params, client.weight)
            factor = bounded_sums.zero_if_empty(factor, num_examples)
            contribution = factor._replace(
                update=clipping.multiply(update, factor.update)
            )
        else:
            contribution = mechanism.contribution(update, params, client, self.context)
            tensors = bounded_sums.as_tensors(contribution.update, like=update)
            contribution = contribution._replace(update=tensors)
            if central:
                bounds = self.l2_norm_bound(params), mechanism.side_bounds
                contribution = bounded_sums.bound(contribution, *bounds)
                contribution = bounded_sums.zero_if_empty(contribution, num_examples)
        if mechanism.trust_model == TrustModel.LOCAL:
            weight = mechanism.local_weight(client.num_examples)
            contribution = contribution._replace(weight=tf.cast(weight, tf.float32))
        return contribution

    def add_noise_share(
        self, params: RoundState, contribution: Contribution
    ) -> Contribution:
        """Adds the client's share of the noise to every part of its contribution."""
        shares = self.noise_shares(params)
        update = noise.add_normal(contribution.update, shares["update"])
        return contribution._replace(
            update=update, sums=_add_side_noise(contribution.sums, shares)
        )

    def contributions_of_norms(
        self,
        norm: tf.Tensor,
        usable: tf.Tensor,
        params: RoundState,
        weight: Scalar | None = None,
    ) -> Contribution:
        """Returns bounded contributions for updates of which only the norms are known.

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
            contribution = mechanism.contribution_of_norm(norm, usable, params)
            contribution = contribution.scale_by(weight[0] if weight else None)
            bounds = self.l2_norm_bound(params), mechanism.side_bounds
            if not mechanism.clips_by_element:  # Its factor may be above 1.
                norm = clipping.norm_with_unseen(norm)
            return bounded_sums.bound_factor(contribution, norm, *bounds)

        arguments = (norm, usable) if weight is None else (norm, usable, weight)
        if not norm.shape.rank or mechanism.clips_by_element:
            return bounded(arguments)
        # A user's own functions might mix the clients of a vector.
        number = tf.TensorSpec([], tf.float32)
        contribution = Contribution(
            number, dict.fromkeys(mechanism.side_names, number), *[number] * 4
        )
        return tf.map_fn(
            bounded, arguments, fn_output_signature=contribution, parallel_iterations=1
        )

    def to_grid(self, update: Tensors, params: RoundState) -> Tensors:
        """Rounds a contribution so that sums are exact (see `bounded_sums`)."""
        if self._has_int32_sums:
            return bounded_sums.to_int32(update, self.coarse_grid_step(params))
        return bounded_sums.to_grid(update, self.fine_grid_step(params))

    def fine_grid_step(self, params: RoundState) -> tf.Tensor:
        """Returns the grid step to which contributions are rounded, float32 scalar."""
        return bounded_sums.fine_grid_step(
            self.l2_norm_bound(params), params.clients_per_round
        )

    def coarse_grid_step(self, params: RoundState) -> tf.Tensor:
        """Returns the step of int32 sums, float32 scalar."""
        return bounded_sums.coarse_grid_step(self.l2_norm_bound(params))

    def noise_shares(self, params: RoundState) -> dict[str, tf.Tensor]:
        """Returns the stddevs of one client's share: the full noise over sqrt(m)."""
        return {
            name: stddev / tf.sqrt(params.clients_per_round)
            for name, stddev in self.noise_stddevs(params).items()
        }

    def l2_norm_bound(self, state: RoundState) -> tf.Tensor | float:
        """Returns the bound on the norm of a client's contribution, before noise."""
        return self.mechanism.l2_norm_bound(state.without_noise_state())

    def add_noise(
        self, total: Contribution, state: RoundState, stddevs: Mapping[str, Scalar]
    ) -> tuple[Tensors, dict[str, tf.Tensor], NoiseStateLike]:
        """Returns the noisy sum, the noisy side sums, and the next noise state.

        Args:
          total: The sum of the contributions.
          state: The round's state.
          stddevs: The result of `noise_stddevs`, as checked.
        """
        update, noise_state, sums = total.update, state.noise_state, dict(total.sums)
        if self.mechanism.noise_site == NoiseSite.SERVER:
            update, noise_state = self._add_noise(update, stddevs["update"], state)
            sums = _add_side_noise(sums, stddevs)
        sums = {name: tf.cast(value, tf.float32) for name, value in sums.items()}
        return update, sums, noise_state

    def _add_noise(
        self, update: Tensors, stddev: Scalar, state: RoundState
    ) -> tuple[Tensors, NoiseStateLike]:
        mechanism = self.mechanism
        if not mechanism.overrides("add_noise"):
            return mechanism.add_noise(update, stddev, state.noise_state)
        return noise.with_fresh_draws(
            *(mechanism.add_noise, update, stddev, state.noise_state),
            must_add_noise=_has_guarantee(mechanism.round_event(0, self.context)),
            argument="add_noise",
        )

    def divide(self, update: Tensors, weight: Scalar, state: RoundState) -> Tensors:
        """Returns the mean from a noisy sum (`Mechanism.mean`)."""
        return self.mechanism.mean(update, weight, state, self.context)

    def paid_mu_squared(
        self, paid: float | None, clients_per_round: float, noise_multiplier: float
    ) -> float:
        """Returns the largest sum_i (bound_i / stddev_i)^2 that a receipt allows.

        Args:
          paid: The noise multiplier in the receipt: the result of `Receipt.redeem`.
          clients_per_round: m of the round.
          noise_multiplier: z of the round.
        """
        if self.mechanism.derives_cost and paid is not None:
            return paid**-2 if paid else math.inf
        # A self-declared event cannot be compared; the noise at first clip can.
        return self.expected_mu_squared(clients_per_round, noise_multiplier)

    def expected_mu_squared(
        self, clients_per_round: float, noise_multiplier: float
    ) -> float:
        """Returns the sum_i (bound_i / stddev_i)^2 from which the charge is derived."""
        mechanism = self.mechanism
        round = RoundState(
            mechanism.reference_clip_norm, noise_multiplier, clients_per_round
        )
        return float(mechanism.round_mu_squared(round, self.context))

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
          charged: The result of `paid_mu_squared` or `expected_mu_squared`.
          stddevs: By name, the stddevs of the noise to be added; None: computed here.

        Returns:
          In a graph, the operations that raise the error, for `after_assertions`.
        """
        mechanism = self.mechanism
        actual = mechanism.round_mu_squared(state, self.context, stddevs)
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


def after_assertions(
    assertions: list[tf.Operation], tensors: NoiseStateLike
) -> NoiseStateLike:
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


def _has_guarantee(event: dp_accounting.DpEvent) -> bool:
    is_none = isinstance(event, dp_accounting.NonPrivateDpEvent)
    return not is_none and getattr(event, "noise_multiplier", 1.0) != 0


def _add_side_noise(sums: Mapping[str, Scalar], stddevs: Mapping[str, Scalar]) -> Json:
    """Returns the side sums with noise."""
    return {
        name: noise.add_normal([value], stddevs[name])[0]
        for name, value in sums.items()
    }
