"""Composes the rounds that happened into one guarantee."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias

import attr
import dp_accounting
import numpy as np
from dp_accounting import pld
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant

from tfdp_fl import _validate
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import gaussian, rdp, search

# PLD keeps a probability for every multiple of this up to the largest loss.
_PLD_INTERVAL = 1e-4
_PLD_MAX_CELLS = 2_000_000
# Where a bound that is a little larger will do, ten times as fast.
_PLD_COARSE_INTERVAL = 1e-3
# PLD takes a second or two for each further kind of round.
_MOST_KINDS_FOR_PLD = 3

# Rounds, each as a charge or as (charge, count).
Charges: TypeAlias = (
    "Iterable[charge_lib.RoundCharge | tuple[charge_lib.RoundCharge, int]]"
)
_Cohorts: TypeAlias = tuple[tuple[int, int, float], ...]


class PrivacyAccountant:
    """What a history of rounds guarantees, by RDP and by PLD.

    Rounds are charged under the sampling that was really done
    (`RoundCharge.dp_event`). Rounds without amplification (shuffled, or
    everybody in every cohort) are Gaussians and collapse to one; a pass over
    shuffled clients costs the largest 1/z^2 that one client met in it, so k
    passes at constant z are one Gaussian of z/sqrt(k).

    A history has one neighbouring relation: fixed-size rounds
    (replace-one) next to all others (add-or-remove-one) are refused, as no
    single guarantee of either kind covers both. Those others may be mixed.

    RDP adds up one cached curve for each distinct charge. PLD is composed on
    demand, equal charges by self-composition.
    """

    def __init__(self, charges: Charges = ()):
        """Makes an accountant of a history.

        Args:
          charges: Rounds, each as a charge or as (charge, count).

        Raises:
          ValueError: They have two neighbouring relations.
        """
        self._counts: dict[charge_lib.RoundCharge, int] = {}
        # What was spent, by kind.
        self._amplified: dict[charge_lib.RoundCharge, int] = {}
        self._mu_squared = 0.0  # Of all Gaussians without amplification.
        self._other: dict[dp_accounting.DpEvent, int] = {}
        self._no_privacy = False
        # Of each pass its cost, and where cohorts lie in its order, with their weight.
        self._passes: dict[Hashable, tuple[float, _Cohorts]] = {}
        self._pld: privacy_loss_distribution.PrivacyLossDistribution | None = None
        for item in charges:
            self.add(*(item if isinstance(item, tuple) else (item,)))

    @property
    def rounds(self) -> int:
        """How many rounds were added."""
        return sum(self._counts.values())

    @property
    def charges(self) -> tuple[tuple[charge_lib.RoundCharge, int], ...]:
        """The history as (charge, count), in order of first appearance."""
        return tuple(self._counts.items())

    @property
    def relation(self) -> dp_accounting.NeighboringRelation | None:
        """The neighbouring relation; None before the first round."""
        return next((charge.relation for charge in self._counts), None)

    def copy(self) -> PrivacyAccountant:
        """Returns an independent copy."""
        other = copy.copy(self)
        for name in ("_counts", "_amplified", "_other", "_passes"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def would_be(self, charge: charge_lib.RoundCharge) -> PrivacyAccountant:
        """Returns a copy with the charge added; this one stays as it is."""
        other = self.copy()
        other.add(charge)
        return other

    def add(self, charge: charge_lib.RoundCharge, count: int = 1) -> None:
        """Adds a round, or several equal ones.

        Raises:
          ValueError: If the charge has another neighbouring relation than the
            history; nothing is added then.
        """
        _validate.instance_of(charge_lib.RoundCharge, charge=charge)
        count = _validate.positive_integer(count=count)
        relation = self.relation
        if relation not in (None, charge.relation):
            raise ValueError(
                f"charge has the neighbouring relation {charge.relation.name} "
                f"({charge.sampling} sampling), the history has "
                f"{relation.name}; one guarantee cannot cover both."
            )
        self._counts[charge] = self._counts.get(charge, 0) + count
        self._pld = None
        z = charge.noise_multiplier
        if z == 0:
            self._no_privacy = True
        elif z == math.inf:
            return
        elif charge.is_amplified:
            self._amplified[charge] = self._amplified.get(charge, 0) + count
        elif z is not None:
            one = (charge.sensitivity / z) ** 2
            self._mu_squared += self._pass_increase(charge, count, one)
        elif more := round(self._pass_increase(charge, count, 1)):
            self._other[charge.event] = self._other.get(charge.event, 0) + more

    def _pass_increase(
        self, charge: charge_lib.RoundCharge, count: int, weight: float
    ) -> float:
        """Returns by how much the most exposed client's sum of weights rises.

        Outside a pass, or in a pass that is not known, that is every round. Within
        one, every client is in one cohort, so a pass costs the most that one of its
        cohorts does, not their sum (parallel composition); passes add up. A cohort
        that is run again, after a crash for instance, meets the same clients:
        cohorts are intervals of the pass's order, and the cost of a pass is the
        largest sum of weights at any position.
        """
        if charge.pass_index is None or charge.pass_offset is None:
            return count * weight
        kind = None if charge.noise_multiplier is not None else charge.event
        key = (charge.partition, charge.num_clients, charge.pass_index, kind)
        start, weight = charge.pass_offset, count * weight
        stop = start + int(charge.clients_per_round)
        before, cohorts = self._passes.get(key, (0.0, ()))
        if cohorts and cohorts[-1][1:] == (start, weight):  # One longer cohort.
            cohorts, start = cohorts[:-1], cohorts[-1][0]
        cohorts = (*cohorts, (start, stop, weight))
        # Where sums have risen, they are largest where a cohort begins.
        begins = [low for low, _, _ in cohorts if start <= low < stop]
        sums = [
            math.fsum(more for low, high, more in cohorts if low <= begin < high)
            for begin in begins
        ]
        cost = max(before, *sums)
        self._passes[key] = (cost, cohorts)
        return cost - before

    def epsilon(
        self, delta: float, accountant: str = "rdp", coarse: bool = False
    ) -> float:
        """Returns epsilon at delta; infinity where a round had no noise.

        Args:
          delta: Between 0 and 1.
          accountant: "rdp" or "pld".
          coarse: Whether a larger bound by PLD will do, by less than a
            thousandth in the runs that we know, if it is computed quickly.
        """
        delta = _validate.inside_unit_interval(delta=delta)
        _validate.one_of(charge_lib.ACCOUNTANTS, accountant=accountant)
        if self._no_privacy:
            return math.inf
        if self.is_one_gaussian and not self._mu_squared:
            return 0.0
        if accountant == "rdp":
            return self._least(dp_accounting.rdp.compute_epsilon, delta)
        if self.is_one_gaussian:
            return gaussian.gaussian_epsilon(self._mu_squared**-0.5, delta)
        if self.is_one_search:
            by_profile = self._search_profile(coarse).epsilon(delta)
            # RDP may say less of many trials that are about as many each time.
            by_rdp = any(event.shape > 1 for event in self._other)
            return min(by_profile, self.epsilon(delta) if by_rdp else math.inf)
        return float(self._compose_pld(coarse).get_epsilon_for_delta(delta))

    def epsilon_if_participation_is_known(
        self, delta: float, accountant: str | None = None
    ) -> float:
        """Returns epsilon against an observer who knows who took part when.

        Sampling then amplifies nothing: a client counts as being in every round
        that it could have been in.

        Args:
          delta: Between 0 and 1.
          accountant: "rdp" or "pld"; None for the tighter one.
        """

        def unsampled(charge: charge_lib.RoundCharge) -> charge_lib.RoundCharge:
            changed: dict[str, Any] = {"event": _unsampled(charge.event)}
            if charge.is_amplified:
                changed["clients_per_round"] = charge.num_clients
            return dataclasses.replace(charge, **changed)

        known = PrivacyAccountant(
            (unsampled(charge), count) for charge, count in self._counts.items()
        )
        by_pld = known.is_one_gaussian or known.is_one_search
        return known.epsilon(delta, accountant or ("pld" if by_pld else "rdp"))

    def delta(self, epsilon: float, accountant: str = "rdp") -> float:
        """Returns delta at epsilon; 1 where a round had no noise.

        Args:
          epsilon: At least 0.
          accountant: "rdp" or "pld"; of a search PLD knows none.
        """
        epsilon = _validate.non_negative(epsilon=epsilon)
        _validate.one_of(charge_lib.ACCOUNTANTS, accountant=accountant)
        if self._no_privacy:
            return 1.0
        if self.is_one_gaussian and not self._mu_squared:
            return 0.0
        if accountant == "rdp":
            return min(1.0, self._least(rdp_privacy_accountant.compute_delta, epsilon))
        if self.is_one_gaussian:
            return gaussian.gaussian_delta(self._mu_squared**-0.5, epsilon)
        return float(self._compose_pld().get_delta_for_epsilon(epsilon))

    def _least(self, convert: Callable[..., tuple[float, float]], at: float) -> float:
        """Returns the least figure over the Renyi orders, rounded up.

        Any order gives a bound. The best one is looked for from order 8 on, as
        long as the figure falls.
        """
        # The lowest orders bound the total variation: they say where it is all.
        least = convert(rdp.PARTS[0], self._curve(0), at)[0]
        if least == 0:
            return 0.0
        part, seen = rdp.FIRST_PART, {0}
        while part < len(rdp.PARTS) and part not in seen:
            seen.add(part)
            orders = rdp.PARTS[part]
            value, order = convert(orders, self._curve(part), at)
            least = min(least, value)
            if order == orders[-1]:
                part += 1
            elif order == orders[0]:
                part -= 1
        # More than what the roundings of thousands of sums can hide.
        return float(least) * (1 + 1e-12)

    def _curve(self, part: int) -> np.ndarray:
        """Returns the history's Renyi divergence at one part of the orders."""
        curve = rdp.PARTS[part] * (self._mu_squared / 2)
        events = [(c.dp_event("rdp"), count) for c, count in self._amplified.items()]
        for event, count in (*events, *self._other.items()):
            curve = curve + count * rdp.curve(event, self.relation, part)
        return curve

    @property
    def is_one_gaussian(self) -> bool:
        """Whether all rounds are one Gaussian, of which PLD's epsilon is exact."""
        return not self._amplified and not self._other

    @property
    def is_one_search(self) -> bool:
        """Whether all there was is one search, of which PLD bounds the best trial."""
        return (
            not self._amplified
            and not self._mu_squared
            and list(self._other.values()) == [1]
            and isinstance(next(iter(self._other)), search.BestOfTrialsDpEvent)
        )

    def _search_profile(self, coarse: bool = False) -> search.BestOfTrialsProfile:
        (event,) = self._other
        # Of one trial a bound that is computed quickly says how wide cells must be.
        orders = rdp.PARTS[rdp.FIRST_PART]
        curves = [
            rdp.curve_of_trial(one, self.relation, rdp.FIRST_PART)
            for one in event.events
        ]
        bound = dp_accounting.rdp.compute_epsilon(orders, np.max(curves, axis=0), 1e-9)
        interval = _pld_interval(bound[0], coarse)
        return search.BestOfTrialsProfile(
            event, [_event_pld(one, self.relation, interval) for one in event.events]
        )

    def _compose_pld(
        self, coarse: bool = False
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        if self._pld is not None:
            return self._pld
        counts: dict[dp_accounting.DpEvent, int] = dict(self._other)
        for charge, count in self._amplified.items():
            event = charge.dp_event("pld")
            counts[event] = counts.get(event, 0) + count
        if self._mu_squared:
            # mu is in units of the noise, the event in units of the clip norm,
            # which the accountant doubles itself under replace-one.
            z = self._mu_squared**-0.5
            if self.relation is dp_accounting.NeighboringRelation.REPLACE_ONE:
                z *= 2
            counts[dp_accounting.GaussianDpEvent(z)] = 1
        largest_loss = math.inf
        with contextlib.suppress(ValueError):
            largest_loss = self.epsilon(1e-9)
        interval = _pld_interval(largest_loss, coarse)
        composed = None
        for event, count in counts.items():
            one = _event_pld(event, self.relation, interval)
            if count > 1:
                one = one.self_compose(count)
            composed = one if composed is None else composed.compose(one)
        if not coarse:
            self._pld = composed
        return composed


def _unsampled(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Returns an event without the samplings that it claims itself."""
    fields = {
        field.name: getattr(event, field.name) for field in attr.fields(type(event))
    }
    sampled = (
        dp_accounting.PoissonSampledDpEvent,
        dp_accounting.SampledWithoutReplacementDpEvent,
    )
    if isinstance(event, sampled):
        return _unsampled(event.event)
    if "sampling_probability" in fields or "sample_size" in fields:
        return dp_accounting.NonPrivateDpEvent()  # What it costs is not known.
    if "event" in fields:
        return attr.evolve(event, event=_unsampled(event.event))
    if "events" in fields:
        return attr.evolve(event, events=tuple(map(_unsampled, event.events)))
    return event


def tightest(charges: Iterable[charge_lib.RoundCharge]) -> str:
    """Returns "pld" where it is tight and quick for a run, "rdp" elsewhere.

    That is where every round amounts to Gaussians, amplified in at most three
    ways: no schedules of many noises or cohort sizes. For cohorts of a fixed
    size PLD bounds the truth from above, as RDP does; it is the tighter of the
    two unless cohorts are half of the clients or more.

    Args:
      charges: The kinds of rounds.
    """
    kinds = {_validate.instance_of(charge_lib.RoundCharge, charge=c) for c in charges}
    amplified = [charge for charge in kinds if charge.is_amplified]
    by_rdp = (
        any(charge.noise_multiplier is None for charge in kinds)
        or len(amplified) > _MOST_KINDS_FOR_PLD
        or any(
            charge.sampling == "fixed_size" and charge.sampling_probability >= 0.5
            for charge in amplified
        )
    )
    return "rdp" if by_rdp else "pld"


def _pld_interval(largest_loss: float, coarse: bool) -> float:
    """Returns the width of a PLD's cells; wide ones keep a large loss computable."""
    interval = _PLD_COARSE_INTERVAL if coarse else _PLD_INTERVAL
    if math.isinf(largest_loss):
        return interval
    return max(interval, largest_loss / _PLD_MAX_CELLS)


@functools.lru_cache(maxsize=32)
def _event_pld(
    event: dp_accounting.DpEvent,
    relation: dp_accounting.NeighboringRelation,
    interval: float,
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns one event's privacy loss distribution.

    Making it takes most of the time of a PLD epsilon, self-composition little;
    kept, it serves a whole curve of epsilon against rounds.
    """
    accountant = pld.PLDAccountant(relation, interval)
    try:
        accountant.compose(event)
    except dp_accounting.UnsupportedEventError as error:
        raise ValueError(
            f"event {event!r} has no PLD in dp_accounting; "
            f"accountant='rdp' may have a bound. {error}"
        ) from error
    if accountant.get_epsilon(0.5) == math.inf:
        # No privacy; the accountant keeps that beside the distribution.
        return privacy_loss_distribution.from_privacy_parameters(
            pld_common.DifferentialPrivacyParameters(0.0, 1.0), interval
        )
    return accountant._pld
