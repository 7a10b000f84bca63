"""A mechanism: one declaration, from which everything else follows.

A **mechanism** defines what is released about a cohort of client updates and what
that costs. It is a frozen dataclass that declares its parameters
(`declaration.parameter`), its name (`declaration.register`), and its mathematics, by
overriding the members of `Mechanism` in which it differs from plain DP-FedAvg. It does
not depend on any runtime. Members that say so accept both Python floats and TensorFlow
scalars, so the planner, Flower's strategies and the privacy statement use the same
formulas as the training.

Bound to a `PrivacyContext`, it gives a `CohortQuery` (`cohort_query`), which every
runtime calls in the same order; `cohort_query` lists the calls.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import math
import numbers
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, NamedTuple

import dp_accounting

from tfdp_fl import _validate, schedules
from tfdp_fl._lazy_tf import tf
from tfdp_fl.accounting import statement as caveats_lib
from tfdp_fl.mechanisms import clipping, cohort_query, grid, noise, overriding
from tfdp_fl.mechanisms.contribution import (
    ClientContext,
    ClientWeighting,
    Contribution,
    NoiseStateLike,
    PrivacyContext,
    RoundState,
    Scalar,
    Tensors,
)
from tfdp_fl.terms import Json, NoiseSite, PrivacyUnit, TrustModel

# What float32 can add at all, even to the sum of many clients.
_NOISE_IN_FLOAT32 = 1e-30, 1e36


class CalibrationTarget(NamedTuple):
    """The budget for which `make_private` builds a mechanism.

    Attributes:
      noise_multiplier: z, for a mechanism that `make_private` calibrates; a number or
        one value per round.
      epsilon: The target, for a mechanism that calibrates itself.
      delta: The delta of that target.
      clients_per_round: m, the smallest expected cohort size.
    """

    noise_multiplier: schedules.Schedule
    epsilon: float
    delta: float
    clients_per_round: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism(abc.ABC):
    """Base class of all mechanisms, which are immutable and validated when made.

    This class implements DP-FedAvg for a clip S that a mechanism declares: a client's
    update is scaled by one number, the server adds noise of stddev z S to the sum, and
    the noisy sum is divided by the expected cohort size m. A mechanism overrides
    whatever it does differently. Most override only what is released, which comes
    first; then come its cost, its planning, what reports say of it, and how it runs.

    Class attributes:
      trust_model: Against whom it protects: "central" (the server is trusted), "local"
        (no party is) or "none".
      privacy_unit: What is protected as a whole: a "client" or a "record".
      side_bounds: The bound on the absolute value of each number that a client sends
        beside its update, by name (`Contribution.sums`).
      releases_weights: Whether clients send weights instead of updates; their mean
        then replaces the model.
      max_participations: Maximum rounds per client; None: unlimited.
      min_separation: Minimum rounds between participations; None: no limit. Cyclic
        sampling has this number of groups.
      clip_norm: S of the first round, if it is a parameter.
      noise_multiplier: z, if it is a parameter.
      epsilon: A budget to which the noise is calibrated, if it is a parameter.
      noise_multiplier_limit_reason: How `make_private` explains
        `noise_multiplier_limit`.
      noise_site: Who adds the noise: "server"; "client", if each of m clients adds its
        share, so that exactly m must answer; or "every client", if each protects
        itself.
      needs_shapes: Whether it must know the shapes of an update before it runs.
      own_caveats: Caveats in the statement that apply only to this mechanism: full
        sentences by key.
    """

    trust_model: ClassVar[str] = TrustModel.CENTRAL
    privacy_unit: ClassVar[str] = PrivacyUnit.CLIENT
    side_bounds: ClassVar[Mapping[str, float]] = {}
    releases_weights: ClassVar[bool] = False
    # Possible parameters of mechanisms; unannotated, so they are not dataclass fields
    # here. (A schedule is Any, as mypy would take a callable one for a method.)
    max_participations = None  # type: int | None
    min_separation = None  # type: int | None
    clip_norm = 0.0
    noise_multiplier = 0.0  # type: Any
    noise_site = NoiseSite.SERVER  # type: str
    window = None  # type: int | None
    epsilon = None  # type: float | None
    noise_multiplier_limit_reason: ClassVar[str] = ""
    needs_shapes: ClassVar[bool] = False
    own_caveats: ClassVar[Mapping[str, str]] = {}

    # Optional members: None if a mechanism does not have them.
    #
    # clip_to_cohort(norms, round) -> S: the clip of this round, computed from the norms
    # of its whole cohort (float32 vector, possibly empty).
    clip_to_cohort: ClassVar[Callable[..., tf.Tensor] | None] = None
    # client_noise(round, client, context) -> stddev of the noise that a client adds
    # to its own update if noise_site is "every client": a float32 scalar, or a list
    # of one per variable.
    client_noise: ClassVar[Callable[..., tf.Tensor | Tensors] | None] = None
    # window_norms(update) -> float32 [L], the norms that a client remembers from this
    # round, in a window of `window` rounds.
    window_norms: ClassVar[Callable[..., tf.Tensor] | None] = None

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        caveats_lib.add_caveats(cls.own_caveats)
        overriding.require_cost(cls, Mechanism)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "check" in field.metadata:
                argument = {field.name: getattr(self, field.name)}
                object.__setattr__(
                    self, field.name, field.metadata["check"](**argument)
                )
        if callable(self.noise_multiplier):  # Release and charge use the same values.
            fixed = schedules.fix(self.noise_multiplier)
            object.__setattr__(self, "noise_multiplier", fixed)
        self.check_parameters()
        if schedules.is_constant(self.noise_multiplier):
            self.noise_multiplier_at(0)

    def check_parameters(self) -> None:  # noqa: B027
        """Raises ValueError if parameters are incompatible."""

    # What is released.

    def first_clip_norm(self) -> float:
        """Returns the clip of the first round."""
        return self.clip_norm

    def l2_norm_bound(self, round: RoundState) -> Scalar:
        """Returns the L2 bound on a contribution: S."""
        return round.clip_norm

    def scale(self, norm: tf.Tensor, round: RoundState) -> tf.Tensor:
        """Returns the factor by which an update is scaled: min(1, S / norm).

        Args:
          norm: Float32, norms of updates, at least 0: a scalar if a class outside this
            package overrides this method, else of any shape.
          round: The state of this round.
        """
        return clipping.clip_factor(norm, round.clip_norm)

    def side_statistics(
        self, norm: tf.Tensor, round: RoundState
    ) -> dict[str, tf.Tensor]:
        """Returns a client's terms of the side sums, by the names in `side_names`.

        Args:
          norm: Float32, as for `scale`; 0 for updates with a NaN.
          round: The state of this round.
        """
        return {}

    def contribution_of_norm(
        self, norm: tf.Tensor, usable: tf.Tensor, round: RoundState
    ) -> Contribution:
        """Returns contributions computed from the updates' norms alone.

        Their `update` is the factor by which the update is multiplied.

        Args:
          norm: Float32, any shape: the norms of one or more updates, 0 if an update is
            not usable.
          usable: Bool, the same shape: False for an update with a NaN or an Inf.
          round: The state of this round.
        """
        scale = self.scale(norm, round)
        return Contribution(
            update=tf.where(usable, scale, 0.0),
            sums=self.side_statistics(norm, round),
            weight=tf.ones_like(norm),
            norm=norm,
            clipped=tf.cast((norm > 0) & (scale < 1), tf.float32),
            discarded=tf.cast(~usable, tf.float32),
        )

    def contribution(
        self,
        update: Tensors,
        round: RoundState,
        client: ClientContext,
        context: PrivacyContext,
    ) -> Contribution:
        """Returns one client's clipped contribution, before any noise.

        It is called only if `scales_updates` is False. An update with a NaN or an Inf
        becomes zero.

        Args:
          update: List of float tensors; a client's weights if
            `releases_weights`.
          round: The state of this round.
          client: What the client knows about itself.
          context: What is known about the run.
        """
        scaled = self.contribution_of_norm(*clipping.finite_global_norm(update), round)
        scaled = scaled.scale_by(client.weight)
        return scaled._replace(update=clipping.multiply(update, scaled.update))

    def local_weight(self, num_examples: tf.Tensor | None) -> Scalar:
        """Returns a client's weight in the mean of a local mechanism: 1.

        The weight gets no noise. So it may depend only on the client's number of
        examples, and it replaces the weight in the contribution.
        """
        return 1.0

    def noise_stddevs(self, round: RoundState, context: PrivacyContext) -> Json:
        """Returns the stddevs of the noise on the sum of updates and on each side sum.

        Args:
          round: This round; Python floats or TensorFlow scalars.
          context: What is known about the run.

        Returns:
          Stddevs by name: "update" and `side_names`.
        """
        return {"update": round.noise_multiplier * round.clip_norm}

    def init_noise_state(self, context: PrivacyContext) -> NoiseStateLike:
        """Returns the noise state before the first round; () if there is none."""
        return ()

    def add_noise(
        self, update: Tensors, stddev: tf.Tensor, noise_state: NoiseStateLike
    ) -> tuple[Tensors, NoiseStateLike]:
        """Adds the server's noise to a sum; returns it and the next noise state.

        Args:
          update: The sum of the clients' updates.
          stddev: The stddev from `noise_stddevs`.
          noise_state: `RoundState.noise_state`; () without one.
        """
        return noise.add_normal(update, stddev), noise_state

    def mean(
        self,
        update: Tensors,
        weight: tf.Tensor,
        round: RoundState,
        context: PrivacyContext,
    ) -> Tensors:
        """Returns the released mean: the noisy sum divided by m.

        If clients have different weights, the divisor is m times their expected weight.
        Without a central guarantee, it is the weight of the clients that answered: the
        answers are private by themselves, or not at all. The mean of none is 0.

        Args:
          update: The noisy sum.
          weight: Float32 scalar, the sum of the clients' weights. With a central
            guarantee, whose noise does not cover that sum, the expected one.
          round: The state of this round.
          context: What is known about the run.
        """
        if self.trust_model != TrustModel.CENTRAL:
            return clipping.mean_of_answers(update, weight)
        expected = context.expected_weight(round.clients_per_round)
        return [tensor / tf.cast(expected, tensor.dtype) for tensor in update]

    def next_clip_norm(self, sums: Mapping[str, Scalar], round: RoundState) -> Scalar:
        """Returns the clip of the next round.

        Args:
          sums: The noisy sums by name; Python floats or TensorFlow scalars.
          round: This round, likewise.
        """
        return round.clip_norm

    # What it costs.

    def round_event(
        self, round_index: int, context: PrivacyContext
    ) -> dp_accounting.DpEvent:
        """Returns the event that one round releases, without sampling.

        It is derived, not declared. Gaussian releases of a client's update and side
        sums together are a single Gaussian with the noise multiplier

            (sum_i (bound_i / stddev_i)^2)^(-1/2)

        where `bounded_sums` enforces the bounds, and the stddevs are those of the added
        noise (Dong, Roth & Su 2019, corollary 3.3).
        """
        z = self.noise_multiplier_at(round_index)
        if z == 0 or self.trust_model != TrustModel.CENTRAL:
            return dp_accounting.NonPrivateDpEvent()
        # A mechanism whose cost depends on z and S alone needs no context.
        size = context.cohort_size(round_index) if context else 1.0
        round = RoundState(self.reference_clip_norm, z, size)
        mu_squared = self.round_mu_squared(round, context)
        if not 0 < mu_squared < math.inf:
            return dp_accounting.NonPrivateDpEvent()
        derived = mu_squared**-0.5
        # If they are equal up to rounding, use the given z.
        is_equal = math.isclose(derived, z, rel_tol=1e-12)
        return dp_accounting.GaussianDpEvent(z if is_equal else derived)

    def round_mu_squared(
        self,
        round: RoundState,
        context: PrivacyContext,
        stddevs: Mapping[str, Scalar] | None = None,
    ) -> Scalar:
        """Returns sum_i (bound_i / stddev_i)^2 of a round; infinity without noise.

        Args:
          round: This round; Python floats or TensorFlow scalars.
          context: What is known about the run.
          stddevs: The result of `noise_stddevs`, if it is known.
        """
        if stddevs is None:
            stddevs = self.noise_stddevs(round, context)
        bounds = {"update": self.l2_norm_bound(round), **self.side_bounds}
        ratios = [_ratio(bounds[name], stddev) for name, stddev in stddevs.items()]
        return sum(ratio**2 for ratio in ratios)

    @property
    def reference_clip_norm(self) -> float:
        """The clip at which costs are derived: the first one, or 1 if unknown."""
        return self.first_clip_norm() or 1.0

    def event_at(
        self, round_index: int, context: PrivacyContext, state: RoundState
    ) -> dp_accounting.DpEvent:
        """Returns the next round's event; called right before the round is charged.

        Args:
          round_index: As for `round_event`.
          context: What is known about the run.
          state: The query's state before the round.
        """
        del state
        return self.round_event(round_index, context)

    def event_index(self, round_index: int, noise_state: NoiseStateLike) -> int:
        """Returns the round index to pass to `round_event`.

        Args:
          round_index: The next round, counted from 0, including abandoned rounds.
          noise_state: `RoundState.noise_state` before it; () without one.
        """
        return round_index

    def begins_segment(self, noise_state: NoiseStateLike) -> bool:
        """Returns whether `max_participations` counts from the next round on.

        Args:
          noise_state: `RoundState.noise_state` before it; () without one.
        """
        return False

    @property
    def event_period(self) -> int | None:
        """The number of released rounds after which `round_event` repeats.

        None: it changes only with schedules.
        """
        return None

    def mu_squared(self, context: PrivacyContext) -> float:
        """Returns (sensitivity / sigma)^2 of one client's own release.

        Only for mechanisms with a local trust model, composed client by client.
        """
        raise NotImplementedError(
            f"{self.name} has a {self.trust_model} guarantee, which is not "
            "composed client by client."
        )

    # How it is planned.

    def noise_multiplier_at(self, round_index: int) -> float:
        """Returns the noise multiplier z of one round (counted from 0).

        Raises:
          ValueError: It is negative, or its product with the first clip is not
            representable in float32.
        """
        noise_multiplier = noise.require_float32_range(_validate.non_negative)(
            noise_multiplier=schedules.value_at(
                self.noise_multiplier, round_index, "noise_multiplier"
            )
        )
        stddev = noise_multiplier * self.first_clip_norm()
        least, most = noise.LEAST_STDDEV, 1 / noise.LEAST_STDDEV
        if stddev and not least <= stddev <= most:
            raise ValueError(
                "noise_multiplier times the clip must be from "
                f"{least:g} to {most:g}, the range of float32, got "
                f"{noise_multiplier:g} times {self.first_clip_norm():g}."
            )
        return noise_multiplier

    def noise_multiplier_limit(
        self, round_index: int, context: PrivacyContext
    ) -> float:
        """Returns the upper limit on a round's noise multiplier (exclusive)."""
        return float("inf")

    @classmethod
    def from_budget(cls, target: CalibrationTarget, **options: Any) -> Mechanism:
        """Returns the mechanism that `make_private` tries for a target.

        Args:
          target: The target, and the noise multiplier to try.
          **options: The other given parameters.
        """
        arguments: Json = {"noise_multiplier": target.noise_multiplier}
        return cls(**arguments, **options)

    def with_noise_multiplier(self, noise_multiplier: schedules.Schedule) -> Mechanism:
        """Returns the same mechanism with another noise multiplier."""
        changes: Json = {"noise_multiplier": noise_multiplier}
        return dataclasses.replace(self, **changes)

    @property
    def implied_delta(self) -> float | None:
        """The delta that goes with `epsilon`, if it follows from parameters."""
        return None

    @property
    def proximal_weight(self) -> float:
        """Weight mu of (mu/2) ||w - w_received||^2 in local training."""
        return 0.0

    # What reports say of it.

    @property
    def name(self) -> str:
        """The mechanism's name in reports."""
        return type(self).__name__

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns one sentence for the privacy statement."""

    def caveats(self) -> tuple[str, ...]:
        """Returns the keys of the caveats that apply to the mechanism.

        Each is a key of `own_caveats` or of `accounting.CAVEATS`.
        """
        return ()

    def all_caveats(self) -> tuple[str, ...]:
        """Returns `caveats`, plus one if the mechanism declares its own cost."""
        costs = overriding.members_with_cost(type(self), Mechanism)
        is_own = overriding.is_overridden(type(self), *costs)
        return (*self.caveats(), "own_cost") if is_own else self.caveats()

    def parameters(self) -> Json:
        """Returns the mechanism's parameters by name, for reports."""
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }

    # How it runs.

    def check(self, context: PrivacyContext) -> None:
        """Raises ValueError if the mechanism does not suit a context."""
        # Members may be set after the class, or the instance, was made.
        overriding.require_cost(type(self), Mechanism)
        overriding.require_no_own_members(self)
        if self.trust_model == TrustModel.CENTRAL and self.noise_site not in (
            NoiseSite.SERVER,
            NoiseSite.CLIENT,
        ):
            raise ValueError(
                "noise_site must be 'server' or 'client' with a central guarantee, "
                f"which is charged for their noise, got {self.noise_site!r}."
            )
        if "update" in self.side_bounds or (
            self.side_bounds and self.trust_model != TrustModel.CENTRAL
        ):
            raise ValueError(
                "side_bounds must not have a sum named 'update', and must be empty "
                "unless the guarantee is central, as side sums otherwise get no noise, "
                f"got {dict(self.side_bounds)!r}."
            )
        if self.needs_exact_cohort and self.max_participations is not None:
            raise ValueError(
                "max_participations must be None with noise_site='client': the noise "
                "is complete only if no client is left out of a cohort, got "
                f"{self.max_participations!r}."
            )
        if self.needs_exact_cohort and context.sampling not in (
            "fixed_size",
            None,
        ):
            raise ValueError(
                "noise_site='client' needs sampling='fixed_size', because the "
                "noise is complete only if exactly clients_per_round clients "
                f"answer, got sampling={context.sampling!r}."
            )

    def check_weighting(self, weighting: ClientWeighting | None) -> None:
        """Raises an error unless clients may have different weights.

        They may if the mechanism clips an update by multiplying it by one number, and
        the noise is added to the whole sum ("server") or in shares that do not depend
        on the weight ("client"). Then a weight of at most 1 keeps the bound.
        """
        if weighting is None:
            return
        _validate.exactly(ClientWeighting, client_weighting=weighting)
        if not (
            self.scales_updates
            and self.trust_model != TrustModel.LOCAL
            and self.noise_site in (NoiseSite.SERVER, NoiseSite.CLIENT)
            and not self.releases_weights
        ):
            raise ValueError(
                f"client_weighting must be None with {self.name}: it is for "
                "mechanisms that clip whole updates and protect their sum "
                "(AdaptiveClipping, CorrelatedNoise, FixedClipping, MedianClipping, "
                f"or NoPrivacy), got {weighting!r}."
            )

    def bind(self, context: PrivacyContext) -> cohort_query.CohortQuery:
        """Returns the TensorFlow side of the mechanism.

        Args:
          context: What is known about the run.

        Raises:
          ValueError: The mechanism's guarantee does not hold in this context.
        """
        Mechanism.check(self, context)  # Even if a subclass forgets to call it.
        self.check(context)
        if context.noise_generator == noise.EXACT:
            return grid.RoundedGaussianQuery(self, context)
        return cohort_query.CohortQuery(self, context)

    def static_config(self) -> Hashable:
        """Returns what must not change from round to round; () if nothing.

        The mechanism's class must not change either. Other parameters may (in TFF, a
        state can be passed on to another process), as rounds are charged one by one.
        """
        return ()

    def state_fingerprint(self) -> str:
        """Returns the digest of `static_config` that a noise state belongs to."""
        text = repr(self.static_config())
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def side_names(self) -> tuple[str, ...]:
        """The names of `Contribution.sums`."""
        return tuple(self.side_bounds)

    @property
    def scales_updates(self) -> bool:
        """Whether a contribution is the update times one number.

        That number depends only on the norm, so a runtime that knows the norm does not
        need the update.
        """
        return type(self).contribution is Mechanism.contribution

    @property
    def clips_by_element(self) -> bool:
        """Whether all functions of norms are this package's: elementwise and exact."""
        return not self.overrides("contribution_of_norm", "scale", "side_statistics")

    @property
    def derives_cost(self) -> bool:
        """Whether the cost is derived from bounds and stddevs by `round_event`."""
        return overriding.definer_of(type(self), "round_event") is Mechanism

    @property
    def needs_exact_cohort(self) -> bool:
        """Whether fewer than m answers give less noise than is charged for."""
        return self.noise_site == NoiseSite.CLIENT

    @property
    def all_releases_are_noisy(self) -> bool:
        """Whether everything that the mechanism releases has noise.

        A user's own `clip_to_cohort` sees exact norms, so what it returns need not be
        noisy, and an error that it raises could reveal as much.
        """
        return not self.overrides("clip_to_cohort")

    def overrides(self, *members: str) -> bool:
        """Returns whether a class outside this package defines any of these members."""
        return overriding.is_overridden(type(self), *members)


def _ratio(bound: Scalar, stddev: Scalar) -> Scalar:
    """Returns bound / stddev: 0 for a bound of 0, otherwise infinity without noise.

    A bound or noise that a sum in float32 cannot represent is no bound and no noise.
    """
    largest, least, most = clipping.LARGEST_CLIP_NORM, *_NOISE_IN_FLOAT32
    if isinstance(bound, numbers.Real) and not 0 < float(bound) <= largest:
        return math.inf if bound else 0.0
    if isinstance(stddev, numbers.Real) and not least <= float(stddev) <= most:
        return math.inf
    if isinstance(bound, numbers.Real) and isinstance(stddev, numbers.Real):
        return float(bound) / float(stddev)
    bound, stddev = tf.cast(bound, tf.float32), tf.cast(stddev, tf.float32)
    is_represented = (bound <= largest) & (stddev >= least) & (stddev <= most)
    ratio = tf.where(is_represented, bound / stddev, math.inf)
    return tf.where(tf.equal(bound, 0.0), 0.0, ratio)
