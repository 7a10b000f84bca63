"""What a mechanism is, and in which order a runtime calls it.

A **mechanism** is an immutable description of what is released about a cohort
of client updates and of what that costs. It knows no runtime. Bound to a
`Deployment` it gives a `CohortQuery`, a TF-Privacy `SumAggregationDPQuery`
whose methods are TensorFlow functions. Both runtimes (the compiled cohort
engine and TFF) call it in this order, once a round:

    state  = query.begin_round(state, ...)          # this round's m and z
    params = query.derive_sample_params(state)
    for each client:                                # in parallel
        record = query.preprocess_record(params, update)   # clip (and noise)
    total  = sum of the records
    mean, state, event = query.get_noised_result(total, state)

A query with `two_phase = True` sets the clip from the norms of the whole
cohort: between `begin_round` and `derive_sample_params` a runtime collects
`query.record_norm(update)` from every client and calls
`state = query.clip_to_cohort(state, norms)`.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
from typing import Any, ClassVar, NamedTuple

import dp_accounting
import tensorflow as tf
from tfdp_fl.mechanisms import tfp_throwaway as tfp

from tfdp_fl import _validate, schedules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """Where a mechanism is used: the facts that are not the mechanism's own.

    Attributes:
      clients_per_round: The expected cohort size m, constant or a schedule.
      num_clients: The population N, or None if unknown.
      sampling: "poisson", "fixed_size", "shuffled", or None if unknown.
      rounds: The number of rounds T that are planned, or None if unknown.
      max_participations: The most rounds that any one client may take part
        in, or None if unknown.
      num_variables: How many tensors an update has, or None if unknown.
      min_examples: The smallest number of examples that a client holds, or
        None if unknown.
    """

    clients_per_round: schedules.Schedule
    num_clients: int | None = None
    sampling: str | None = None
    rounds: int | None = None
    max_participations: int | None = None
    num_variables: int | None = None
    min_examples: int | None = None

    def cohort_size(self, round_index: int) -> float:
        """Returns the expected cohort size m_t of one round."""
        return float(
            schedules.value_at(
                self.clients_per_round, round_index, "clients_per_round"
            )
        )


class Record(NamedTuple):
    """What one client hands in, and (summed) what the server gets.

    Attributes:
      update: List of float tensors, clipped, with noise if it is the client's
        to add.
      below_clip: Float32 scalar, the bit of adaptive clipping, centred to
        +1/2 (norm at most the clip) or -1/2; 0 where it is not used.
      weight: Float32 scalar, the client's weight in the mean.
      norm: Float32 scalar, the L2 norm before clipping.
      clipped: Float32 scalar, 1 if the update was scaled down.
      discarded: Float32 scalar, 1 if the update was replaced by zero.

    `norm`, `clipped` and `discarded` are diagnostics: they are not noised and
    not covered by the guarantee.
    """

    update: Any
    below_clip: tf.Tensor
    weight: tf.Tensor
    norm: tf.Tensor
    clipped: tf.Tensor
    discarded: tf.Tensor


class QueryState(NamedTuple):
    """The state that a `CohortQuery` carries from round to round.

    Attributes:
      clip_norm: Float32 scalar, the clip S of the coming round.
      noise_multiplier: Float32 scalar, this round's z.
      clients_per_round: Float32 scalar, this round's expected cohort size m.
    """

    clip_norm: tf.Tensor
    noise_multiplier: tf.Tensor
    clients_per_round: tf.Tensor


class SampleParams(NamedTuple):
    """What every client of a round gets to know.

    Attributes:
      clip_norm: Float32 scalar, the clip S.
      noise_stddev: Float32 scalar, the noise that one client adds to its
        update (0 where the server adds it).
      count_noise_stddev: Float32 scalar, the noise that one client adds to its
        bit (0 where the server adds it).
    """

    clip_norm: tf.Tensor
    noise_stddev: tf.Tensor
    count_noise_stddev: tf.Tensor


class CohortQuery(tfp.SumAggregationDPQuery):
    """A TF-Privacy query over the updates of one cohort.

    Its result is the noised **mean** update (the sum divided by the expected
    cohort size), to be added to the model.

    Attributes:
      two_phase: Whether the clip depends on the norms of the whole cohort.
      releases: "update" if a record is a change of the weights, "weights" if
        it is the weights themselves (NbAFL).
      uses_window: Whether every client brings norms of its earlier rounds
        (AdaptiveLocalDP).
      client_noise: What noise a client's record carries: "none" (the server
        adds it, so what a client sends has to be within the clip), "share" (a
        part of the noise on the sum: without it the sum has too little) or
        "own" (each record is a private release by itself).
    """

    two_phase: ClassVar[bool] = False
    releases: ClassVar[str] = "update"
    uses_window: ClassVar[bool] = False
    client_noise: ClassVar[str] = "none"

    @property
    def only_scales(self) -> bool:
        """Whether a client's record is its update times one number.

        Then `scale_of` says which number, and a runtime that knows the norm
        need not have the update itself. Not so if the client adds noise.
        """
        return False

    def scale_of(self, params: Any, norm: tf.Tensor, usable: tf.Tensor) -> Any:
        """Returns the `Record` of updates of which only the norm is known.

        Its `update` is the factor that the update is to be multiplied by.

        Args:
          params: From `derive_sample_params`.
          norm: Float32, any shape: the norms of one or more updates, 0 where
            an update is not usable.
          usable: Bool, the same shape: False for a NaN or an Inf.
        """
        raise TypeError(f"{type(self).__name__} does not only scale updates.")

    def initial_global_state(self) -> QueryState:
        """Returns the state before the first round."""
        return QueryState(
            clip_norm=tf.constant(0.0),
            noise_multiplier=tf.constant(0.0),
            clients_per_round=tf.constant(1.0),
        )

    def begin_round(
        self,
        state: QueryState,
        noise_multiplier: tf.Tensor | float,
        clients_per_round: tf.Tensor | float,
    ) -> QueryState:
        """Returns the state with the values that hold for this round."""
        return state._replace(
            noise_multiplier=tf.cast(noise_multiplier, tf.float32),
            clients_per_round=tf.cast(clients_per_round, tf.float32),
        )

    def initial_sample_state(self, template: list[tf.Tensor]) -> Record:
        """Returns the zeros that the records of a cohort are added to."""
        return Record(
            update=super().initial_sample_state(template),
            below_clip=tf.zeros([]),
            weight=tf.zeros([]),
            norm=tf.zeros([]),
            clipped=tf.zeros([]),
            discarded=tf.zeros([]),
        )

    def noise_stddev(self, state: QueryState) -> tf.Tensor:
        """Returns the stddev (float32 scalar) of the noise on the sum."""
        return state.noise_multiplier * state.clip_norm

    def derive_metrics(self, state: QueryState) -> collections.OrderedDict:
        """Returns `clip_norm` and `noise_stddev` (on the sum) of a round."""
        return collections.OrderedDict(
            clip_norm=state.clip_norm, noise_stddev=self.noise_stddev(state)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism(abc.ABC):
    """Base class of all mechanisms: immutable, validated when made.

    Class attributes:
      guarantee: What is protected against whom: "central" (the server is
        trusted), "local" (nobody is), "record" (one example, not one client)
        or "none".
    """

    guarantee: ClassVar[str] = "central"

    @abc.abstractmethod
    def bind(self, deployment: Deployment) -> CohortQuery:
        """Returns the TensorFlow side of the mechanism.

        Args:
          deployment: Where it is used.

        Raises:
          ValueError: The mechanism's guarantee does not hold there.
        """

    def check(self, deployment: Deployment) -> None:  # noqa: B027
        """Raises ValueError if the mechanism is not right for a deployment."""

    def noise_multiplier_at(self, round_index: int) -> float:
        """Returns the noise multiplier z of one round (counted from 0)."""
        schedule = getattr(self, "noise_multiplier", None)
        if schedule is None:
            return 0.0
        return _validate.non_negative(
            noise_multiplier=schedules.value_at(
                schedule, round_index, "noise_multiplier"
            )
        )

    def round_event(
        self, round_index: int, deployment: Deployment
    ) -> dp_accounting.DpEvent:
        """Returns what one round releases, before sampling is considered.

        Gaussians of one round are collapsed to one, with the multiplier
        (sum of z_i^-2)^(-1/2).
        """
        del deployment
        noise_multiplier = self.noise_multiplier_at(round_index)
        if noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def with_noise_multiplier(self, noise_multiplier: float) -> Mechanism:
        """Returns the same mechanism with another noise multiplier."""
        if not hasattr(self, "noise_multiplier"):
            raise ValueError(
                f"{type(self).__name__} has no noise_multiplier to change."
            )
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    @property
    def name(self) -> str:
        """The mechanism's name in reports."""
        return type(self).__name__

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns one sentence for the privacy statement."""

    def caveats(self) -> tuple[str, ...]:
        """Returns the keys of the caveats that the statement has to make."""
        return ()

    def parameters(self) -> dict[str, Any]:
        """Returns the mechanism's parameters by name, for reports."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }
