"""Any mechanism as a TFF aggregation factory."""

from __future__ import annotations

from typing import Any

import dp_accounting
import tensorflow_federated as tff

from tfdp_fl import _validate, schedules
from tfdp_fl.aggregators import bound_mechanism
from tfdp_fl.mechanisms import contribution
from tfdp_fl.mechanisms import mechanism as mechanism_lib


class BoundFactory:
    """What the factories of mechanisms have in common."""

    def __init__(self, bound: bound_mechanism.BoundMechanism, **factories: Any):
        """Checks what sums the parts of a record.

        Args:
          bound: The mechanism, and where it is used.
          **factories: `inner_factory` and `scalars_factory`, see
            `MechanismFactory`.
        """
        for name, factory in factories.items():
            check_inner_factory(name, factory, bound)
        self._bound = bound
        self._factories = factories

    @property
    def mechanism(self) -> Any:
        """The mechanism."""
        return self._bound.mechanism

    @property
    def deployment(self) -> contribution.Deployment:
        """Where it is used."""
        return self._bound.deployment


class MechanismFactory(BoundFactory, tff.aggregators.UnweightedAggregationFactory):
    """Aggregates the updates of a cohort as a mechanism says.

    The created process takes any structure of float tensors from each client
    and gives the noised mean in the same structure. Each client's whole value
    counts as one update, with one L2 norm.

    `inner_factory` sums what the mechanism made of the updates, after the
    clip, so it must not enlarge a client's share: with a central guarantee it
    is a `tff.aggregators.SumFactory` or `SecureSumFactory`, whose bounds
    include 0. (What a secure sum rounds is at most 2^-24 of the distance of its
    bounds in each coordinate.) Others, such as `EncodedSumFactory`, which
    rounds up as well as down, are for mechanisms with no guarantee to lose, or
    with one that each client's own noise gives.
    The factory itself can be the inner one of `tff.aggregators.
    clipping_factory` and `zeroing_factory` with a constant norm. (A norm that
    follows the clients' values lets one client change what others contribute;
    a mean around it divides once more: those have no epsilon.)

    Measurements of a round, as an `OrderedDict`: `clip_norm` and
    `noise_stddev` (on the sum) that held in this round, `clipped_fraction`,
    `mean_update_norm`, `discarded_clients` (a NaN or an Inf; their update was
    replaced by zero before clipping), `cohort_size`, and `inner`, what
    `inner_factory` measured, if one is given. A query of TF-Privacy measures
    what it does instead of the first two. These numbers are not noised, and
    the guarantee does not cover them.

    A round whose cohort has a size for which the mechanism's guarantee does
    not hold fails as a whole: `next` raises, and no new state comes out.

    State: an `AggregatorState`, plain tensors that any
    `tff.program.ProgramStateManager` saves. Epsilon: `tfdp_fl.learning.
    epsilon`.
    """

    def __init__(
        self,
        mechanism: mechanism_lib.Mechanism,
        clients_per_round: schedules.Schedule,
        inner_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
        *,
        scalars_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
        **deployment: Any,
    ):
        """Checks the arguments.

        Args:
          mechanism: A mechanism that releases updates (all but NbAFL).
          clients_per_round: m, the expected cohort size: a number, a sequence
            with one value a round, or (with `rounds`) a callable of the round.
          inner_factory: Sums the updates; None for a plain sum.
          scalars_factory: Sums the other numbers of each client (the bit of
            adaptive clipping and the diagnostics: float32 scalars); None for
            a plain sum. Where the updates are summed securely these should
            be, too.
          **deployment: What else is known, each None by default: `sampling`
            ("poisson", "fixed_size" or "shuffled"), `num_clients`, `rounds`
            (planned; a local mechanism's budget and callables need it) and
            `max_participations` of one client.

        Raises:
          TypeError: An argument is of a wrong type.
          ValueError: The mechanism's guarantee does not hold there, or it
            needs a fact that is not given.
        """
        if getattr(mechanism, "releases_weights", False):
            raise ValueError(
                f"mechanism must release updates, got {mechanism.name}, which "
                "releases weights with each client's number of examples: use "
                "NbAFLFactory (a WeightedAggregationFactory) or "
                "tfdp_fl.learning.build_dp_fed_avg."
            )
        super().__init__(
            bound_mechanism.BoundMechanism(mechanism, clients_per_round, **deployment),
            inner_factory=inner_factory,
            scalars_factory=scalars_factory,
        )

    def create(self, value_type: tff.types.Type) -> tff.templates.AggregationProcess:
        """Implements `UnweightedAggregationFactory.create`.

        Args:
          value_type: A structure of float tensors.

        Raises:
          TypeError: `value_type` has a tensor that is not of a float type.
        """
        return self._bound.create(value_type, **self._factories)


def from_mechanism(
    mechanism: mechanism_lib.Mechanism,
    clients_per_round: schedules.Schedule,
    inner_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    **options: Any,
) -> MechanismFactory:
    """Returns the aggregation factory of a mechanism.

    Args:
      mechanism: A mechanism that releases updates (all but NbAFL).
      clients_per_round: m, the expected cohort size, constant or a schedule.
      inner_factory: Sums the updates; None for a plain sum.
      **options: The keyword arguments of `MechanismFactory`.

    Raises:
      TypeError: An argument is of a wrong type.
      ValueError: The mechanism's guarantee does not hold there, or it needs a
        fact that is not given.
    """
    return MechanismFactory(mechanism, clients_per_round, inner_factory, **options)


def check_inner_factory(
    name: str, factory: Any, bound: bound_mechanism.BoundMechanism
) -> None:
    """Raises unless a factory is None or one whose sum keeps the guarantee.

    Raises:
      TypeError: It is not an unweighted factory.
      ValueError: It is known to give something else than a sum, or it is not
        known to leave each client's share of it as it was clipped.
    """
    if factory is None:
        return
    _validate.instance_of(
        tff.aggregators.UnweightedAggregationFactory, **{name: factory}
    )
    others = (
        MechanismFactory,
        tff.aggregators.DifferentiallyPrivateFactory,
        tff.aggregators.UnweightedMeanFactory,
    )
    if isinstance(factory, others):
        raise ValueError(
            f"{name} must give a sum (such as tff.aggregators.SumFactory or "
            f"SecureSumFactory), got {type(factory).__name__}: the mechanism "
            "divides, by the expected cohort size, and adds the noise."
        )
    if _depends_on_each_share(bound) and not _keeps_each_share(factory):
        raise ValueError(
            f"{name} must be None, a tff.aggregators.SumFactory or a "
            "SecureSumFactory whose bounds include 0, got "
            f"{type(factory).__name__}: what others make of an update after "
            "the clip may be larger than the clip, and no epsilon would hold."
        )


def _depends_on_each_share(bound: bound_mechanism.BoundMechanism) -> bool:
    """Whether a larger share of the sum would cost more than is charged."""
    event = bound.mechanism.round_event(0, bound.deployment)
    return bound.mechanism.guarantee == "central" and not isinstance(
        event, dp_accounting.NonPrivateDpEvent
    )


def _keeps_each_share(factory: Any) -> bool:
    if type(factory) is not tff.aggregators.SecureSumFactory:
        return type(factory) is tff.aggregators.SumFactory
    upper = factory._upper_bound_threshold
    lower = factory._lower_bound_threshold
    if isinstance(upper, tff.templates.EstimationProcess):
        return True  # It makes a state, by which `accountable_state` knows it.
    return lower is None or lower <= 0 <= upper
