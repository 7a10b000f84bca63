"""A mechanism with the facts of its deployment, ready for TFF."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import dp_accounting
import tensorflow as tf
import tensorflow_federated as tff

from tfdp_fl import _validate, schedules
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.aggregators import (
    cohort_process,
    round_plan,
    state,
    values,
)
from tfdp_fl.mechanisms import cohort_query, contribution
from tfdp_fl.mechanisms import mechanism as mechanism_lib

_WHOLE_COHORTS = ("fixed_size", "shuffled", "cyclic", charge_lib.SEPARATED)


class BoundMechanism:
    """A mechanism and where it is used.

    Attributes:
      mechanism: The mechanism.
      deployment: Where it is used. Schedules are tabulated, because a TFF
        computation cannot call a callable.
    """

    def __init__(
        self,
        mechanism: mechanism_lib.Mechanism,
        clients_per_round: schedules.Schedule,
        *,
        sampling: str | None = None,
        num_clients: int | None = None,
        rounds: int | None = None,
        max_participations: int | None = None,
        min_examples: int | None = None,
    ):
        """Checks everything that can be checked before a value type is known.

        Args:
          mechanism: The mechanism.
          clients_per_round: m, the expected cohort size: a number, a sequence
            with one value a round, or (with `rounds`) a callable of the round.
          sampling: "poisson", "fixed_size", "shuffled", "cyclic", "separated"
            (clients come as they like), or None if unknown.
          num_clients: The population N, or None if unknown.
          rounds: The number of rounds T that are planned, or None.
          max_participations: The most rounds that any one client takes part
            in, or None if unknown. It is not enforced here: TFF hands over
            clients without names.
          min_examples: The smallest number of examples that a client holds, or
            None if unknown.

        Raises:
          TypeError: An argument is of a wrong type.
          ValueError: The mechanism's guarantee does not hold there, or it
            needs a fact that is not given.
        """
        self.mechanism = _validate.instance_of(
            mechanism_lib.Mechanism, mechanism=mechanism
        )
        for name, value in (
            ("num_clients", num_clients),
            ("rounds", rounds),
            ("max_participations", max_participations),
            ("min_examples", min_examples),
        ):
            if value is not None:
                _validate.positive_integer(**{name: value})
        if sampling is not None:
            allowed = (*charge_lib.SAMPLINGS, charge_lib.SEPARATED)
            _validate.one_of(allowed, sampling=sampling)
        period = mechanism.event_period
        clients = round_plan.tabulated(
            clients_per_round, "clients_per_round", rounds, _validate.positive
        )
        noise = mechanism.noise_multiplier
        noise = round_plan.tabulated(
            0.0 if noise is None else noise,
            "noise_multiplier",
            rounds,
            _validate.non_negative,
        )
        lengths = [len(each) for each in (clients, noise) if isinstance(each, tuple)]
        if period is not None:
            lengths.append(period)
        if rounds is not None and lengths and rounds > min(lengths):
            raise ValueError(
                f"rounds={rounds} must be at most the {min(lengths)} rounds "
                "for which noise_multiplier and clients_per_round have values "
                "and the mechanism's noise is made."
            )
        if rounds is None and lengths:
            rounds = min(lengths)
        if max_participations is None:
            max_participations = mechanism.max_participations
        self.deployment = contribution.Deployment(
            clients_per_round=clients,
            num_clients=num_clients,
            sampling=sampling,
            rounds=rounds,
            max_participations=max_participations,
            min_examples=min_examples,
        )
        self.bind(num_variables=1)
        self._clients = round_plan.RoundValues(clients, "clients_per_round")
        self._cohort_sizes = round_plan.RoundValues(
            clients, "clients_per_round", tf.float64
        )
        self._noise = round_plan.RoundValues(noise, "noise_multiplier")
        self._is_scheduled = bool(lengths)
        self._check_cohort_sizes()

    def _check_cohort_sizes(self) -> None:
        limit = self.deployment.num_clients
        for value in self._clients.distinct:
            if limit is not None and value > limit:
                raise ValueError(
                    f"clients_per_round must be at most num_clients={limit}, "
                    f"got {value:g}."
                )
            whole = (
                self.mechanism.needs_exact_cohort
                or self.deployment.sampling in _WHOLE_COHORTS
            )
            if whole and not value.is_integer():
                raise ValueError(
                    "clients_per_round must be a whole number where the "
                    f"cohort size is fixed, got {value!r}."
                )

    def bind(
        self,
        num_variables: int,
        shapes: tuple[tuple[int, ...], ...] | None = None,
    ) -> cohort_query.CohortQuery:
        """Returns the mechanism's query for values of so many tensors.

        Args:
          num_variables: How many.
          shapes: Theirs, if they are known.
        """
        deployment = self._deployment_for(num_variables)
        return self.mechanism.bind(dataclasses.replace(deployment, shapes=shapes))

    def _deployment_for(self, num_variables: int) -> contribution.Deployment:
        return dataclasses.replace(self.deployment, num_variables=num_variables)

    def create(
        self,
        value_type: tff.types.Type,
        weight_type: tff.types.Type | None = None,
        *,
        wrap: Callable[
            [cohort_query.CohortQuery], cohort_query.CohortQuery
        ] = lambda query: query,
        inner_factory: tff.aggregators.UnweightedAggregationFactory | None,
        scalars_factory: tff.aggregators.UnweightedAggregationFactory | None,
    ) -> tff.templates.AggregationProcess:
        """Returns the mechanism's aggregation process.

        Args:
          value_type: A structure of float tensors.
          weight_type: Type of the second value of each client, if any.
          wrap: Gives the query to use, made of the mechanism's own.
          inner_factory: Sums the updates.
          scalars_factory: Sums the other numbers of the records.
        """
        num_variables = values.check_value_type(value_type)
        shapes = values.shapes(value_type)
        if shapes is None and self.mechanism.draws_noise_itself:
            raise TypeError(
                "value_type must have tensors of known shapes for a query, on which "
                f"what it costs can be tried, got {value_type}."
            )
        query = wrap(self.bind(num_variables, shapes))
        rounding = self._rounding_of_sums(shapes, inner_factory, scalars_factory)
        return cohort_process.create_cohort_process(
            query,
            self._plan(num_variables),
            round_plan.CohortSizeCheck(
                exact=self.mechanism.needs_exact_cohort,
                at_most_expected=self.deployment.sampling in _WHOLE_COHORTS,
                at_most=self._largest_cohort(),
                some_weight=self.mechanism.releases_weights,
                smallest_clip=rounding / values.LARGEST_ROUNDING,
            ),
            value_type,
            weight_type,
            inner_factory=inner_factory,
            scalars_factory=scalars_factory,
        )

    def _largest_cohort(self) -> int | None:
        """Returns how many clients may answer; None if there is no limit."""
        population = self.deployment.num_clients
        if population is None or self.deployment.sampling != "poisson":
            return population
        return round_plan.largest_poisson_cohort(
            population, max(self._clients.distinct)
        )

    def _rounding_of_sums(
        self, shapes: tuple[tuple[int, ...], ...] | None, inner: Any, scalars: Any
    ) -> float:
        """Returns what secure sums may add to a client's share of the update."""
        if self.mechanism.guarantee != "central":
            return 0.0
        if shapes is None and values.largest_rounding(inner, 1):
            raise ValueError(
                "inner_factory must be a plain sum where shapes are not known: what "
                "a secure sum rounds depends on how many numbers there are."
            )
        numbers = sum(math.prod(shape) for shape in shapes or ())
        rounding = values.largest_rounding(inner, numbers)
        clip = self.mechanism.first_clip_norm()
        for name, one, limit in (
            ("inner_factory", rounding, clip or math.inf),
            ("scalars_factory", values.largest_rounding(scalars, 1), 1.0),
        ):
            if one > values.LARGEST_ROUNDING * limit:
                raise ValueError(
                    f"{name} must have closer bounds: its sum rounds a client's share "
                    f"by up to {one:.3g}, where {values.LARGEST_ROUNDING:g} of "
                    f"the {limit:g} that a client may add is allowed."
                )
        return rounding

    def _plan(self, num_variables: int) -> round_plan.RoundPlan:
        event, event_noise = self._events(num_variables)
        deployment = self._deployment_for(num_variables)
        cost: float | tuple[float, ...]
        if self.mechanism.guarantee in ("local", "record"):
            cost = float(self.mechanism.mu_squared(deployment))
        else:
            cost = event_noise
        return round_plan.RoundPlan(
            noise_multiplier=self._noise,
            clients_per_round=self._clients,
            kind=state.history_kind(self.mechanism, event, deployment.sampling),
            cost=round_plan.RoundValues(cost, "noise_multiplier", tf.float64),
            cohort_size=self._cohort_sizes,
            population=deployment.num_clients or 0,
        )

    def _events(
        self, num_variables: int
    ) -> tuple[dp_accounting.DpEvent | None, float | tuple[float, ...]]:
        """Returns an event for all rounds, or None and Gaussians' z."""
        if self.mechanism.guarantee != "central":
            return dp_accounting.NonPrivateDpEvent(), 0.0
        deployment = self._deployment_for(num_variables)
        if not self._is_scheduled:
            event = self.mechanism.round_event(0, deployment)
            if isinstance(event, dp_accounting.GaussianDpEvent):
                return None, float(event.noise_multiplier)
            return event, 0.0
        multipliers = []
        # Where there is a schedule, its length is known.
        for index in range(cast(int, deployment.rounds)):
            event = self.mechanism.round_event(index, deployment)
            # Only a Gaussian changes from round to round; a mechanism says
            # "no privacy" of one without noise.
            if isinstance(event, dp_accounting.GaussianDpEvent):
                multipliers.append(float(event.noise_multiplier))
            elif isinstance(event, dp_accounting.NonPrivateDpEvent):
                multipliers.append(0.0)
            elif isinstance(event, dp_accounting.NoOpDpEvent):
                multipliers.append(math.inf)
            else:
                return event, 0.0
        return None, tuple(multipliers)
