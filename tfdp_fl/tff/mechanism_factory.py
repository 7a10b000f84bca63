"""Wraps any mechanism as a TFF aggregation factory; defines one for each of ours."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias, cast

import dp_accounting
import tensorflow as tf
import tensorflow_federated as tff

from tfdp_fl import _validate, mechanisms, schedules
from tfdp_fl import sampling as sampling_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.mechanisms import contribution
from tfdp_fl.mechanisms import mechanism as mechanism_lib
from tfdp_fl.terms import Json, TrustModel
from tfdp_fl.tff import cohort_process, state

_SAMPLINGS = (*charge_lib.SAMPLINGS, charge_lib.MIN_SEPARATION)
# A secure sum rounds each number to a grid with this many steps between its bounds.
_STEPS = 2.0**24

# Sums the clients' shares.
SumFactory: TypeAlias = tff.aggregators.UnweightedAggregationFactory


class BoundFactory:
    """A mechanism and its context, ready for TFF."""

    _takes_weights = False

    def __init__(
        self,
        mechanism: mechanism_lib.Mechanism,
        clients_per_round: schedules.Schedule,
        inner_factory: SumFactory | None = None,
        *,
        scalars_factory: SumFactory | None = None,
        sampling: str | None = None,
        **numbers: int | None,
    ):
        """Checks everything that does not depend on the type of the clients' values.

        Args:
          mechanism: A mechanism that releases updates (all but NbAFL).
          clients_per_round: m, the expected cohort size: a number, a sequence
            with one value per round, or (with `rounds`) a callable of the round.
          inner_factory: Sums the updates; None for a plain sum.
          scalars_factory: Sums each client's other numbers, float32 scalars (the bit of
            adaptive clipping, and the diagnostics); None for a plain sum, in float64.
            If updates are summed securely, these should be, too.
          sampling: "poisson", "fixed_size", "random_allocation" (with `num_clients`, so
            that a mean is divided by N / floor(N/m)), "shuffled", "cyclic",
            "min_separation" (clients take part when they like), or None if unknown.
          **numbers: Fields of `PrivacyContext`: `num_clients`, `rounds` (planned;
            required for a local mechanism's budget and for callables), `min_examples`
            and `max_participations` of one client; None if unknown. The last one is not
            enforced, as TFF passes clients without names.

        Raises:
          TypeError: An argument is of a wrong type.
          ValueError: The mechanism's guarantee does not hold in this setting, or it
            needs a fact that is not given.
        """
        self.mechanism: Any = _validate.instance_of(
            mechanism_lib.Mechanism, mechanism=mechanism
        )
        if mechanism.releases_weights != self._takes_weights:
            raise ValueError(
                f"mechanism must release updates, got {mechanism.name}, which "
                "releases weights with each client's number of examples: use "
                "NbAFLFactory (a WeightedAggregationFactory) or "
                "tfdp_fl.learning.build_dp_fed_avg."
            )
        for name, value in numbers.items():
            if value is not None:
                _validate.positive_integer(**{name: value})
        if sampling is not None:
            _validate.one_of(_SAMPLINGS, sampling=sampling)
        # Schedules become tables, as a TFF computation cannot call a callable.
        rounds = numbers.pop("rounds", None)
        if sampling is not None and (population := numbers.get("num_clients")):
            clients_per_round = sampling_lib.expected_sizes(
                sampling, population, clients_per_round
            )
        self._cohort_sizes = clients = state.tabulate(
            clients_per_round, "clients_per_round", rounds, _validate.positive
        )
        self._noise_multipliers = state.tabulate(
            mechanism.noise_multiplier or 0.0,
            "noise_multiplier",
            rounds,
            _validate.non_negative,
        )
        tables = (clients, self._noise_multipliers)
        lengths = [len(table) for table in tables if isinstance(table, tuple)]
        if mechanism.event_period is not None:
            lengths.append(mechanism.event_period)
        if rounds is not None and lengths and rounds > min(lengths):
            raise ValueError(
                f"rounds={rounds} must be at most the {min(lengths)} rounds for which "
                "noise_multiplier, clients_per_round and the mechanism's noise are "
                "defined."
            )
        self._is_scheduled = bool(lengths)
        # For correlated noise, it is computed from the groups unless declared.
        central = mechanism.trust_model == TrustModel.CENTRAL
        if numbers.get("max_participations") is None and not central:
            numbers["max_participations"] = mechanism.max_participations
        self.context = contribution.PrivacyContext(
            clients_per_round=clients,
            sampling=sampling,
            rounds=min(lengths) if rounds is None and lengths else rounds,
            num_variables=1,
            **cast(Json, numbers),
        )
        mechanism.bind(self.context)
        if mechanism.overrides("event_at", "event_index"):
            raise ValueError(
                "mechanism must not define event_at or event_index, because TFF's "
                f"rounds are charged by round_event alone, got {mechanism!r}."
            )
        self._has_whole_cohorts = sampling not in (*charge_lib.OF_RANDOM_SIZE, None)
        needs_whole_size = mechanism.needs_exact_cohort or self._has_whole_cohorts
        for size in state.distinct_values(clients):
            limit = self.context.num_clients or 2**63
            charge_lib.check_size(size, limit, fractional=not needs_whole_size)
        self._factories = {
            "inner_factory": inner_factory,
            "scalars_factory": scalars_factory,
        }
        event = mechanism.round_event(0, self.context)
        # A state of another process may begin in the middle of this plan.
        self._is_charged = mechanism.trust_model == TrustModel.CENTRAL and (
            not isinstance(event, dp_accounting.NonPrivateDpEvent)
            or max(state.distinct_values(self._noise_multipliers)) > 0
        )
        for name, factory in self._factories.items():
            self._check_sum(name, factory)

    def _check_sum(self, name: str, factory: SumFactory | None) -> None:
        """Raises an error if a sum by this factory would break the guarantee.

        None is a plain sum.
        """
        if factory is None:
            return
        _validate.instance_of(
            tff.aggregators.UnweightedAggregationFactory, **{name: factory}
        )
        refused = (
            MechanismFactory,
            tff.aggregators.DifferentiallyPrivateFactory,
            tff.aggregators.UnweightedMeanFactory,
        )
        if isinstance(factory, refused):
            raise ValueError(
                f"{name} must give a sum (such as tff.aggregators.SumFactory or "
                f"SecureSumFactory), got {type(factory).__name__}: the mechanism "
                "itself adds the noise and divides by the expected cohort size."
            )
        # A larger share of the sum would cost more than is charged for.
        if self._is_charged and largest_rounding(factory, 1) == math.inf:
            raise ValueError(
                f"{name} must be None, a tff.aggregators.SumFactory or a "
                "SecureSumFactory whose bounds include 0, got "
                f"{type(factory).__name__}: others may enlarge an update beyond "
                "the clip, so that no epsilon holds."
            )
        upper = bounds_of(factory)[1]
        if name == "scalars_factory" and upper < 1:
            raise ValueError(
                "scalars_factory must have an upper bound of at least 1, got "
                f"{upper:g}: each client adds 1 to the cohort size, which is checked."
            )

    def _create(
        self, value_type: tff.types.Type, weight_type: tff.types.Type | None = None
    ) -> tff.templates.AggregationProcess:
        """Returns the aggregation process.

        Args:
          value_type: A structure of float tensors.
          weight_type: Type of the clients' weights, if any.
        """
        tensors = tensors_of(value_type)
        unknown = [t for t in tensors if t.shape is None or None in t.shape]
        shapes = None if unknown else tuple(tensor.shape for tensor in tensors)
        if shapes is None and self.mechanism.needs_shapes:
            raise TypeError(
                "value_type must have tensors of known shapes for a query, to compute "
                f"its cost, got {value_type}."
            )
        context = dataclasses.replace(
            self.context, num_variables=len(tensors), shapes=shapes
        )
        max_cohort_size = context.num_clients
        if (
            max_cohort_size is not None
            and context.sampling in charge_lib.OF_RANDOM_SIZE
        ):
            max_cohort_size = state.largest_poisson_cohort(
                max_cohort_size, max(state.distinct_values(self._cohort_sizes))
            )
        # (With a schedule, the number of rounds is known.)
        count = cast(int, context.rounds) if self._is_scheduled else 1
        is_plain = largest_rounding(self._factories["inner_factory"], 1) == 0
        enlarged = self._enlargement(max_cohort_size)
        lines = tuple(
            state.history_line(self.mechanism, context, index, not is_plain, enlarged)
            for index in range(count)
        )
        query = self.mechanism.bind(context)
        charged = tuple(
            state.charged_by(line, query, self.mechanism.noise_multiplier_at(index))
            for index, line in enumerate(lines)
        )
        plan = state.RoundPlan(
            noise_multiplier=self._noise_multipliers,
            clients_per_round=self._cohort_sizes,
            lines=lines if self._is_scheduled else lines[0],
            charged=charged if self._is_scheduled else charged[0],
            exact=self.mechanism.needs_exact_cohort,
            at_most_expected=self._has_whole_cohorts,
            max_cohort_size=max_cohort_size,
            requires_weight=self.mechanism.releases_weights,
            **self._grids(shapes),
        )
        plan.check_first_round(query)
        return cohort_process.create_cohort_process(
            query, plan, value_type, weight_type, **self._factories
        )

    def _enlargement(self, max_cohort_size: int | None) -> float:
        """Returns the largest factor by which sums may enlarge a client's share.

        Each of the two sums rounds it, by at most `LARGEST_ROUNDING` of the bounds of
        what it adds up. A decoded secure sum is float32, so the sum of m clients has a
        relative rounding error of 2^-24.
        """
        factories = self._factories.values()
        if all(largest_rounding(factory, 1) == 0 for factory in factories):
            return 1.0
        clients = max_cohort_size or max(state.distinct_values(self._cohort_sizes))
        return 1 + 2 * state.LARGEST_ROUNDING + clients * 2.0**-23

    def _grids(
        self, shapes: tuple[tuple[int, ...], ...] | None
    ) -> dict[str, state.SumGrid]:
        """Returns the grids of a `RoundPlan`; of plain sums if nothing is charged."""
        inner, scalars = self._factories.values() if self._is_charged else (None, None)
        if shapes is None and largest_rounding(inner, 1):
            raise ValueError(
                "inner_factory must be a plain sum if shapes are unknown: the rounding "
                "of a secure sum depends on the number of elements."
            )
        num_elements = sum(math.prod(shape) for shape in shapes or ())
        return {
            "update_grid": _grid_of("inner_factory", inner, num_elements),
            "scalar_grid": _grid_of("scalars_factory", scalars, 1),
        }


def _grid_of(
    argument: str, factory: SumFactory | None, num_elements: int
) -> state.SumGrid:
    """Returns what a sum does to shares of some elements."""
    lower, upper = bounds_of(factory)
    return state.SumGrid(
        argument,
        limit=min(-lower, upper),
        step=largest_rounding(factory, 1),
        rounding=largest_rounding(factory, num_elements),
    )


def bounds_of(factory: SumFactory | None) -> tuple[float, float]:
    """Returns the range in which a sum leaves numbers unchanged."""
    if factory is None or type(factory) is not tff.aggregators.SecureSumFactory:
        return -math.inf, math.inf
    upper, lower = factory._upper_bound_threshold, factory._lower_bound_threshold
    if isinstance(upper, tff.templates.EstimationProcess):
        return -math.inf, math.inf
    return float(-upper if lower is None else lower), float(upper)


def largest_rounding(factory: SumFactory | None, num_elements: int) -> float:
    """Returns the most that a sum's rounding adds to the norm of a client's share.

    It is infinite for an unknown sum.

    Args:
      factory: Sums the shares; None for a plain sum.
      num_elements: The number of elements in a share.
    """
    if factory is None or type(factory) is tff.aggregators.SumFactory:
        return 0.0
    if type(factory) is not tff.aggregators.SecureSumFactory:
        return math.inf
    lower, upper = bounds_of(factory)
    if not lower <= 0 <= upper:
        return math.inf  # A client's zero would become one of the bounds.
    # Adaptive bounds need a state, which `accounted_state` refuses.
    width = 0.0 if upper == math.inf else upper - lower
    return math.sqrt(num_elements) * width / _STEPS


def tensors_of(value_type: tff.types.Type) -> list[tff.TensorType]:
    """Returns the types of a value's tensors, if a mechanism can process them.

    Args:
      value_type: Type of one client's value.

    Raises:
      TypeError: It is not a tensor or a (nested) structure of tensors, has no
        tensor at all, or has a tensor that is not float.
    """
    is_structure = isinstance(value_type, tff.StructType)
    tensors = tff.structure.flatten(value_type) if is_structure else [value_type]
    if not tensors:
        raise TypeError(f"value_type must have at least one tensor, got {value_type}.")
    for tensor in tensors:
        requirement = None
        if not isinstance(tensor, tff.TensorType):
            requirement = "be a tensor or a structure of tensors"
        elif tf.as_dtype(tensor.dtype) in (tf.float16, tf.bfloat16):
            requirement = (
                "not have tensors of float16 or bfloat16, whose rounding can exceed "
                "the clip and remove noise (cast them to float32)"
            )
        elif not tf.as_dtype(tensor.dtype).is_floating:
            requirement = (
                "have float tensors only, because a mechanism scales them and adds "
                "noise (leave others out, or aggregate them with another factory)"
            )
        if requirement:
            raise TypeError(
                f"value_type must {requirement}, got {tensor!s} in {value_type}."
            )
    return tensors


class MechanismFactory(BoundFactory, tff.aggregators.UnweightedAggregationFactory):
    """Aggregates the updates of a cohort with a mechanism.

    The created process takes any structure of float tensors from each client and
    returns the noisy mean in the same structure. Each client's whole value counts as
    one update, with one L2 norm.

    `inner_factory` sums the updates after the clip, so it must not enlarge a client's
    share. With a central guarantee, it must be a `tff.aggregators.SumFactory` or a
    `SecureSumFactory` whose bounds include 0; so must `scalars_factory`. (A secure sum
    rounds each coordinate by at most 2^-24 of the distance between its bounds. That
    must be small beside the bound of whatever it adds up: the clip, and each of the
    mechanism's `side_bounds`. The updates of a TF-Privacy query, which states no bound,
    need a plain sum.) Others, such as `EncodedSumFactory`, which rounds up as well as
    down, are only for mechanisms without a guarantee, or with a local one.

    Measurements of a round, as an `OrderedDict`: this round's `clip_norm` and
    `noise_stddev` (on the sum), `clipped_fraction`, `mean_update_norm`,
    `discarded_clients` (those with a NaN or an Inf, whose update was replaced by zero
    before clipping), `cohort_size`, and `inner`, the measurements of `inner_factory`,
    if given. A TF-Privacy query has its own measurements instead of the first two.
    These numbers have no noise, and the guarantee does not cover them.

    If the mechanism's guarantee does not hold for the cohort's size, the whole round
    fails: `next` raises an error and returns no new state.

    The state is an `AggregatorState` of plain tensors, which any
    `tff.program.ProgramStateManager` can save. `tfdp_fl.learning.epsilon` computes its
    epsilon.
    """

    def create(self, value_type: tff.types.Type) -> tff.templates.AggregationProcess:
        """Implements `UnweightedAggregationFactory.create`.

        Args:
          value_type: A structure of float tensors.

        Raises:
          TypeError: `value_type` has a tensor that is not float.
        """
        return self._create(value_type)


def from_mechanism(
    mechanism: mechanism_lib.Mechanism,
    clients_per_round: schedules.Schedule,
    inner_factory: SumFactory | None = None,
    **options: Any,
) -> MechanismFactory:
    """Returns the aggregation factory of a mechanism.

    Args:
      mechanism: A mechanism that releases updates (all but NbAFL).
      clients_per_round: m, the expected cohort size; constant or a schedule.
      inner_factory: Sums the updates; None for a plain sum.
      **options: The keyword arguments of `MechanismFactory`.

    Raises:
      TypeError: An argument is of a wrong type.
      ValueError: The mechanism's guarantee does not hold in this setting, or it needs a
        fact that is not given.
    """
    return MechanismFactory(mechanism, clients_per_round, inner_factory, **options)


class WeightsFactory(BoundFactory, tff.aggregators.WeightedAggregationFactory):
    """Aggregates weights with per-client noise (see `NbAFL`).

    A client's value is its **weights** after training, not their change; its weight n
    is its number of examples. The result is the new weights. A client with n = 0 has no
    influence, and a round without any usable value fails.

    L = `clients_per_round`. Also required are `num_clients`, the population N;
    `rounds`, the planned number of rounds T; and `min_examples`, the smallest n of any
    client, if T > sqrt(N) L. `mu` has no effect here.

    Measurements, state and `inner_factory` are those of `MechanismFactory`;
    `noise_stddev` is that of the noise before broadcast.
    """

    _takes_weights = True

    def create(
        self, value_type: tff.types.Type, weight_type: tff.types.Type
    ) -> tff.templates.AggregationProcess:
        """Implements `WeightedAggregationFactory.create`.

        Args:
          value_type: A structure of float tensors, the weights.
          weight_type: A scalar, the number of examples.
        """
        return self._create(value_type, weight_type)


def factory_of(
    mechanism_class: type[mechanisms.Mechanism],
) -> type[MechanismFactory] | type[WeightsFactory]:
    """Returns a factory that takes a mechanism's parameters as arguments.

    Args:
      mechanism_class: A mechanism. Its parameters, with their defaults, are keyword
        arguments of the factory, besides `clients_per_round`, `inner_factory` and the
        other arguments of `MechanismFactory`.
    """
    base: Any = MechanismFactory
    if mechanism_class.releases_weights:
        base = WeightsFactory
    parameter_names = {field.name for field in dataclasses.fields(mechanism_class)}

    def make(
        self,
        *,
        clients_per_round: schedules.Schedule,
        inner_factory: SumFactory | None = None,
        **options: Any,
    ):
        parameters = {
            name: options.pop(name) for name in parameter_names & options.keys()
        }
        mechanism = mechanism_class(**parameters)
        base.__init__(self, mechanism, clients_per_round, inner_factory, **options)

    name = mechanism_class.__name__
    doc = f"`{base.__name__}` of a `{name}`, by its parameters as keyword arguments."
    members = {"__init__": make, "__module__": __name__, "__doc__": doc}
    return type(f"{name}Factory", (base,), members)


AdaptiveClippingFactory = factory_of(mechanisms.AdaptiveClipping)
AdaptiveLocalDPFactory = factory_of(mechanisms.AdaptiveLocalDP)
CorrelatedNoiseFactory = factory_of(mechanisms.CorrelatedNoise)
FixedClippingFactory = factory_of(mechanisms.FixedClipping)
LocalDPFactory = factory_of(mechanisms.LocalDP)
MedianClippingFactory = factory_of(mechanisms.MedianClipping)
NbAFLFactory = factory_of(mechanisms.NbAFL)
NoPrivacyFactory = factory_of(mechanisms.NoPrivacy)
PerLayerClippingFactory = factory_of(mechanisms.PerLayerClipping)
QueryFactory = factory_of(mechanisms.QueryMechanism)
