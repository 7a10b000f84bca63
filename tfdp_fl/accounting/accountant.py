"""Composes the rounds that ran into one guarantee, which a budget may bound."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias, TypeVar, cast

import dp_accounting
import numpy as np

from tfdp_fl import _validate
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import curves, gaussian, private_selection
from tfdp_fl.accounting.loss_distribution import LossDistribution
from tfdp_fl.accounting.private_selection import BestOfTrialsDpEvent
from tfdp_fl.terms import Sampling

# PLD takes a second or two per distinct cost of a round. With more than a few, it uses
# coarse cells only; with more than the maximum, it is not computed.
_FEW_KINDS, _MAX_KINDS_FOR_PLD = 3, 16
# From this share of delta on that PLD's rounding may take, RDP can be tighter.
_MOST_ERROR = 0.01

# Rounds, each as a charge or as (charge, count).
Charges: TypeAlias = (
    "Iterable[charge_lib.RoundCharge | tuple[charge_lib.RoundCharge, int]]"
)
_Events: TypeAlias = "collections.Counter[dp_accounting.DpEvent]"
_Cohorts: TypeAlias = tuple[tuple[float, float, float], ...]


# Without a lock, a thread that asks while another one adds could cache wrong sums. A
# forked child gets a new lock, which is not held.
_lock = threading.RLock()
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def one_at_a_time(method: _Method) -> _Method:
    """Lets only one thread at a time run this method or any other decorated one."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            return method(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


class BudgetExceededError(RuntimeError):
    """The release would exceed the budget; nothing was written."""


@dataclasses.dataclass(frozen=True)
class PrivacyBudget:
    """The most that releases may cost together.

    Attributes:
      epsilon: The largest epsilon allowed, above 0.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld", with which epsilon is computed.

    Raises:
      TypeError, ValueError: An argument is not allowed.
    """

    epsilon: float
    delta: float
    accountant: str = "rdp"

    def __post_init__(self):
        _validate.positive(epsilon=self.epsilon)
        _validate.inside_unit_interval(delta=self.delta)
        _validate.one_of(charge_lib.ACCOUNTANTS, accountant=self.accountant)


class PrivacyAccountant:
    """Computes the guarantee of a history of rounds by RDP and by PLD.

    Rounds are charged under the sampling that was actually used
    (`RoundCharge.dp_event`). Rounds without amplification (shuffled, or with all
    clients in every cohort) are Gaussians, which combine into one. A pass over shuffled
    clients costs the largest 1/z^2 that one client met in it, so k passes at constant
    z are one Gaussian of z/sqrt(k). A pass of random allocation is charged in full with
    its first round, and its other rounds cost nothing more. If a round of it is
    repeated, that round's clients meet more releases, and the pass costs as if all of
    its rounds had as little noise.

    A history has one neighbouring relation. Fixed-size rounds (replace-one) cannot be
    combined with others (add-or-remove-one), as no single guarantee covers both. All
    others may be mixed.

    RDP stores the sum of all rounds' Renyi curves, so adding a round always takes the
    same time. PLD is composed on demand (equal charges by self-composition) and cached.
    With more than 16 distinct costs under amplification by sampling, PLD would take
    minutes, so RDP's epsilon, which is also an upper bound, is returned instead. So is
    the other accountant's where one has no bound for an event: PLD has none for a
    search beside other rounds, and RDP none for sampled Laplace noise.
    """

    def __init__(self, charges: Charges = ()):
        """Makes an accountant for a history.

        Args:
          charges: Rounds, each as a charge or as (charge, count).

        Raises:
          ValueError: See `check`.
        """
        self._counts: dict[charge_lib.RoundCharge, int] = {}
        self._rounds = self._additions = 0
        # The sum of 1/z^2 over unamplified Gaussians; all other charges; and their sum
        # of 1/z^2, as if they were unamplified.
        self._mu_squared = 0.0
        self._others: dict[charge_lib.RoundCharge, int] = {}
        self._others_mu_squared = 0.0
        # The sums of their Renyi curves, by part of the orders.
        self._sums: dict[int, np.ndarray] = {}
        # For a copy: the original, its number of rounds then, and the charges since.
        self._origin: tuple[PrivacyAccountant, int] | None = None
        self._added_to_copy: list[tuple[charge_lib.RoundCharge, int]] = []
        # The width of the cells, the count of each event, and their composition.
        self._composed: tuple[float, _Events, LossDistribution] | None = None
        # By pass, its cost and its cohorts' intervals in its order, with weights.
        self._passes: dict[Hashable, tuple[float, _Cohorts]] = {}
        # The accountants with a bound for every round.
        self._bounded_by = frozenset(charge_lib.ACCOUNTANTS)
        self._add_all(charges)

    def _add_all(self, charges: Charges) -> None:
        for item in charges:
            self.add(*(item if isinstance(item, tuple) else (item,)))

    @property
    def rounds(self) -> int:
        """The number of rounds added."""
        return self._rounds

    @property
    @one_at_a_time
    def charges(self) -> tuple[tuple[charge_lib.RoundCharge, int], ...]:
        """The history as (charge, count), in order of first appearance."""
        return tuple(self._counts.items())

    @property
    def relation(self) -> dp_accounting.NeighboringRelation | None:
        """The neighbouring relation; None before the first round."""
        return next((c.relation.neighboring_relation for c in self._counts), None)

    @property
    @one_at_a_time
    def samplings(self) -> tuple[str, ...]:
        """The samplings by which the history is amplified, or its relation weaker."""
        found: dict[str, None] = {}
        events = {charge.event for charge in self._counts}
        in_json = map(charge_lib.event_to_json, events)
        # As in a search:
        if any(_without_amplification(event) != event for event in in_json):
            found["poisson"] = None
        for charge in self._counts:
            if charge.sampling not in found and (
                charge.is_amplified
                or charge.relation is charge_lib.Relation.REPLACE_SPECIAL
            ):
                found[charge.sampling] = None
        return tuple(found)

    def check(self, charge: charge_lib.RoundCharge) -> None:
        """Raises ValueError if one guarantee cannot cover the history and a charge.

        They have different neighbouring relations, or no accountant has a bound for
        all of their events.
        """
        own_relation, new_relation = self.relation, charge.relation.neighboring_relation
        if own_relation not in (None, new_relation):
            raise ValueError(
                f"charge has the neighbouring relation {new_relation.name}, the "
                f"history has {own_relation.name}; one guarantee cannot cover both."
            )
        if not self._bounded_by & _accountants_of(charge):
            raise ValueError(
                f"charge has the event {charge.dp_event()!r}, for which no accountant "
                "has a bound"
                + (" together with the rounds before." if self._rounds else ".")
            )

    @one_at_a_time
    def __copy__(self) -> PrivacyAccountant:
        """Returns an independent accountant: neither sees what the other adds."""
        copied = object.__new__(type(self))
        for name, value in vars(self).items():
            is_mutable = isinstance(value, dict | list)
            vars(copied)[name] = copy.copy(value) if is_mutable else value
        return copied

    @one_at_a_time
    def with_charges(
        self, *charges: charge_lib.RoundCharge | tuple[charge_lib.RoundCharge, int]
    ) -> PrivacyAccountant:
        """Returns a copy with charges added; this accountant does not change."""
        extended = copy.copy(self)
        extended._origin, extended._added_to_copy = (self, self._rounds), []
        extended._add_all(charges)
        return extended

    @one_at_a_time
    def add(self, charge: charge_lib.RoundCharge, count: int = 1) -> None:
        """Adds a round, or several equal ones.

        Raises:
          ValueError: See `check`; nothing is added then.
        """
        _validate.instance_of(charge_lib.RoundCharge, charge=charge)
        count = _validate.positive_integer(count=count)
        self.check(charge)
        self._bounded_by &= _accountants_of(charge)
        self._counts[charge] = self._counts.get(charge, 0) + count
        self._rounds += count
        self._additions += 1
        z = charge.noise_multiplier
        # Interrupted in here, a pass must not count as paid: it is noted last.
        if z == 0:
            self._mu_squared = math.inf
        elif z is not None and z < math.inf and _is_allocated(charge):
            self._add_to_pass(charge, count)
        elif z is None or (charge.is_amplified and z < math.inf):
            increase, passes = self._pass_increase(charge, count)
            self._add_other(charge, round(increase))
            self._passes.update(passes)
        else:
            mu_squared = (charge.sensitivity / z) ** 2
            increase, passes = self._pass_increase(charge, count * mu_squared)
            self._mu_squared += increase
            self._passes.update(passes)

    def _add_other(self, charge: charge_lib.RoundCharge, count: int) -> None:
        if not count:
            return
        z = charge.noise_multiplier
        self._others_mu_squared += (
            count * (charge.sensitivity / z) ** 2 if z else math.inf
        )
        sums = self._sums if self.has_bound_by("rdp") else {}
        self._sums = {
            part: total + count * _rdp_curve(charge, part)
            for part, total in sums.items()
        }
        if self._origin is not None:
            self._added_to_copy.append((charge, count))
        self._others[charge] = self._others.get(charge, 0) + count

    def _add_to_pass(self, charge: charge_lib.RoundCharge, count: int) -> None:
        """Adds rounds of random allocation; a pass is charged with its first round.

        A client is in one round of each pass. That round may be repeated, for instance
        after a crash. Let 1/z^2 be the largest sum of 1/z_i^2 over a round's
        repetitions. We charge the pass as if every round had the noise multiplier z,
        which is an upper bound.
        """
        mu_squared = cast(float, charge.noise_multiplier) ** -2
        if charge.pass_index is None or charge.partition is None:
            # Each round may belong to a pass of its own.
            self._add_other(_as_own_pass(charge, mu_squared), count)
            return
        key = _pass_key(charge)
        old_cost = self._passes.get(key, (0.0, ()))[0]
        increase, passes = self._pass_increase(charge, count * mu_squared)
        if increase:
            self._add_other(_as_own_pass(charge, passes[key][0]), 1)
            if old_cost:
                # (Its share of `_others_mu_squared` stays, which is an upper bound.)
                old_charge = _as_own_pass(charge, old_cost)
                self._others[old_charge] -= 1
                if not self._others[old_charge]:
                    del self._others[old_charge]
                # The cached sums include the pass's old cost.
                self._sums, self._origin = {}, None
        self._passes.update(passes)

    def _pass_increase(
        self, charge: charge_lib.RoundCharge, weight: float
    ) -> tuple[float, dict[Hashable, tuple[float, _Cohorts]]]:
        """Returns the increase in the most exposed client's sum of weights.

        Also returns the pass as it is then, for `_passes`; {} outside a pass.

        Outside a pass, or in a pass of an unnamed order, which may change each time,
        every round adds its whole weight. Within a pass, every client is in one cohort,
        so a pass costs as much as its costliest cohort, not their sum (parallel
        composition); the costs of passes add up. A cohort that is repeated, for
        instance after a crash, meets the same clients. So cohorts are intervals in the
        pass's order (for random allocation, the order of its rounds), and the cost of a
        pass is the largest sum of weights at any position.
        """
        if charge.pass_offset is None or charge.partition is None:
            return weight, {}
        key, start = _pass_key(charge), charge.pass_offset
        is_allocated = charge.sampling == Sampling.RANDOM_ALLOCATION
        stop = start + (1 if is_allocated else charge.clients_per_round)
        cost, intervals = self._passes.get(key, (0.0, ()))
        new_intervals = (*intervals, (start, stop, weight))
        overlaps = any(low < stop and start < high for low, high, _ in intervals)
        if intervals and intervals[-1][1:] == (start, weight):  # One longer cohort.
            new_intervals = (*intervals[:-1], (intervals[-1][0], stop, weight))
        new_cost = max(cost, _largest_sum(new_intervals) if overlaps else weight)
        return new_cost - cost, {key: (new_cost, new_intervals)}

    @one_at_a_time
    def epsilon(
        self, delta: float, accountant: str = "rdp", coarse: bool = False
    ) -> float:
        """Returns epsilon at delta; infinite if a round had no noise.

        Args:
          delta: Between 0 and 1.
          accountant: "rdp" or "pld".
          coarse: Whether PLD may return a looser bound quickly; the difference has been
            below 0.1 % in all runs so far.
        """
        delta = _validate.inside_unit_interval(delta=delta)
        if (z := self._exact_noise(accountant)) is not None:
            return gaussian.gaussian_epsilon(z, delta)
        if self._takes_rdp(accountant):
            return (
                0.0
                if self._total_variation <= delta
                else self._minimise_over_orders(
                    lambda orders, rdp: _epsilons(orders, rdp, delta)
                )
            )
        if event := self._search:
            # (RDP can be tighter, also when the number of trials is concentrated.)
            epsilon = self._epsilon_by_profile(event, delta, coarse)
            may_be_loose = True
        else:
            loss = self._compose_pld(coarse)
            epsilon = loss.epsilon(delta)
            may_be_loose = math.isinf(epsilon) or loss.error > _MOST_ERROR * delta
        if may_be_loose and self.has_bound_by("rdp"):
            return min(epsilon, self.epsilon(delta))
        return epsilon

    @one_at_a_time
    def epsilon_if_participation_is_known(
        self, delta: float, accountant: str | None = None
    ) -> float:
        """Returns epsilon against an observer who knows who took part in which round.

        There is then no amplification by sampling: a client counts as being in every
        round in which it could have been.

        Args:
          delta: Between 0 and 1.
          accountant: "rdp" or "pld"; None for the tighter one.
        """

        def without_amplification(
            charge: charge_lib.RoundCharge,
        ) -> charge_lib.RoundCharge:
            event = _without_amplification(charge_lib.event_to_json(charge.event))
            size = charge.clients_per_round
            if charge.sampling == Sampling.RANDOM_ALLOCATION:
                # If a client's round is known, so is its position in an order.
                order = f"{charge.partition} {charge.rounds_per_pass}"
                return dataclasses.replace(
                    charge,
                    sampling="shuffled",
                    clients_per_round=1,
                    partition=charge.partition and order,
                )
            return dataclasses.replace(
                charge,
                event=charge_lib.event_from_json(event),
                clients_per_round=charge.num_clients if charge.is_amplified else size,
            )

        without_sampling = PrivacyAccountant(
            (without_amplification(charge), count)
            for charge, count in self._counts.items()
        )
        by_pld = without_sampling.is_one_gaussian or without_sampling.is_one_search
        return without_sampling.epsilon(
            delta, accountant or ("pld" if by_pld else "rdp")
        )

    @one_at_a_time
    def delta(self, epsilon: float, accountant: str = "rdp") -> float:
        """Returns delta at epsilon; 1 if a round had no noise.

        Args:
          epsilon: At least 0.
          accountant: "rdp" or "pld" (see the class); for a search, always "rdp".
        """
        epsilon = _validate.non_negative(epsilon=epsilon)
        if (z := self._exact_noise(accountant)) is not None:
            return gaussian.gaussian_delta(z, epsilon)
        if self._takes_rdp(accountant) or self.is_one_search:
            log_delta = self._minimise_over_orders(
                lambda orders, rdp: _log_deltas(orders, rdp, epsilon)
            )
            return min(1.0, self._total_variation, math.exp(min(log_delta, 0.0)))
        loss = self._compose_pld()
        delta = loss.delta(epsilon)
        if loss.error > _MOST_ERROR * delta and self.has_bound_by("rdp"):
            return min(delta, self.delta(epsilon))
        return delta

    def has_bound_by(self, accountant: str) -> bool:
        """Returns whether an accountant has a bound for all rounds."""
        return accountant in self._bounded_by or (
            accountant == "pld" and self.is_one_search
        )

    def _takes_rdp(self, accountant: str) -> bool:
        """Returns whether RDP answers for an accountant (see the class)."""
        if not self.has_bound_by("rdp"):
            return False
        is_slow = not self.has_few_kinds
        return accountant == "rdp" or is_slow or not self.has_bound_by(accountant)

    def _exact_noise(self, accountant: str) -> float | None:
        """Returns the noise multiplier of a history that can be converted exactly.

        That is one Gaussian, if PLD is requested, and any history without noise or
        rounds.
        """
        _validate.one_of(charge_lib.ACCOUNTANTS, accountant=accountant)
        mu_squared = self._mu_squared
        is_exact = self.is_one_gaussian and (accountant == "pld" or not mu_squared)
        if is_exact or mu_squared == math.inf:
            return gaussian.noise_of_mu_squared(mu_squared)
        return None

    @property
    def _total_variation(self) -> float:
        """An upper bound on delta at any epsilon: sqrt(1 - exp(-KL)), rounded up.

        The Kullback-Leibler divergence is at most that of any Renyi order (Bretagnolle
        & Huber 1979).
        """
        return math.sqrt(-math.expm1(-float(self._curve(0)[0]))) * (1 + 1e-12)

    def _minimise_over_orders(
        self, bounds: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> float:
        """Returns the least bound over all orders, given each order and its divergence.

        Any order gives a bound. Both log delta and (order - 1) times the divergence are
        convex in the order, so the best one is found downhill from order 8. The cost
        with all clients in all rounds is another bound, with its own minimum.
        """
        part, least, visited = curves.FIRST_PART, math.inf, set()
        mu_squared = self._mu_squared + self._others_mu_squared
        if mu_squared < math.inf:
            without_sampling = curves.ORDERS * (mu_squared / 2 * self._rounding)
            least = float(np.min(bounds(curves.ORDERS, without_sampling)))
        while 0 <= part < len(curves.PARTS) and part not in visited:
            visited.add(part)
            values = bounds(curves.PARTS[part], self._curve(part))
            best = int(np.argmin(values))
            least = min(least, float(values[best]))
            if best == len(values) - 1:
                part += 1
            elif best == 0:
                part -= 1
        return least

    def _curve(self, part: int) -> np.ndarray:
        """Returns the history's divergence at a part of the orders, rounded up."""
        gaussians = curves.PARTS[part] * (self._mu_squared / 2)
        return (self._sum(part) + gaussians) * self._rounding

    @property
    def _rounding(self) -> float:
        """A factor that exceeds the relative rounding error of the sums."""
        return 1 + max(1e-12, 2.0**-52 * self._additions)

    def _sum(self, part: int) -> np.ndarray:
        """Returns the divergence of all amplified rounds, a cached sum."""
        if part not in self._sums:
            total, rounds = np.zeros(len(curves.PARTS[part])), [*self._others.items()]
            if self._origin is not None and self._origin[0].rounds == self._origin[1]:
                total, rounds = self._origin[0]._sum(part), self._added_to_copy
            for charge, count in rounds:
                total = total + count * _rdp_curve(charge, part)
            self._sums[part] = total
        return self._sums[part]

    @property
    def has_few_kinds(self) -> bool:
        """Whether the rounds have few enough distinct costs to compute PLD."""
        return len(self._others) <= _MAX_KINDS_FOR_PLD

    @property
    def is_one_gaussian(self) -> bool:
        """Whether all rounds are one Gaussian, for which PLD's epsilon is exact."""
        return not self._others

    @property
    def is_one_search(self) -> bool:
        """Whether the history is a single search, whose best trial PLD can bound."""
        return self._search is not None

    @property
    def _search(self) -> BestOfTrialsDpEvent | None:
        if (
            self._mu_squared
            or len(self._others) != 1
            or [*self._others.values()] != [1]
        ):
            return None
        event = next(iter(self._others)).dp_event()
        return event if isinstance(event, BestOfTrialsDpEvent) else None

    def _epsilon_by_profile(
        self, event: BestOfTrialsDpEvent, delta: float, coarse: bool
    ) -> float:
        coarse = coarse or len(event.events) > _MAX_KINDS_FOR_PLD
        # A quick bound for one trial determines the necessary width of cells.
        orders = curves.PARTS[curves.FIRST_PART]
        by_event = [
            curves.rdp_of_trial(trial, self.relation, curves.FIRST_PART)
            for trial in event.events
        ]
        bound = dp_accounting.rdp.compute_epsilon(
            orders, np.max(by_event, axis=0), 1e-9
        )
        interval = curves.pld_interval(bound[0], coarse)
        distributions = [
            curves.loss_distribution(e, self.relation, interval) for e in event.events
        ]
        return private_selection.epsilon_of_best(event, distributions, delta)

    def _compose_pld(self, coarse: bool = False) -> LossDistribution:
        counts: _Events = collections.Counter()
        for charge, count in self._others.items():
            counts[charge.dp_event("pld")] += count
        if self._mu_squared:
            # mu is in units of the noise. The event is in units of the clip norm, which
            # the accountant itself doubles under replace-one.
            z = self._mu_squared**-0.5
            if self.relation is dp_accounting.NeighboringRelation.REPLACE_ONE:
                z *= 2
            counts[dp_accounting.GaussianDpEvent(z)] += 1
        largest_loss = math.inf
        if self.has_bound_by("rdp"):
            largest_loss = self.epsilon(1e-9)
        coarse = coarse or len(counts) > _FEW_KINDS
        interval = curves.pld_interval(largest_loss, coarse)
        parts, remaining = [], counts
        # For one distinct cost, composing anew is fast and truncates fewer tails.
        if self._composed is not None and self._composed[:2] == (interval, counts):
            return self._composed[2]
        if self._composed is not None and len(counts) > 1:
            cached_interval, cached_counts, cached = self._composed
            if cached_interval == interval and cached_counts <= counts:
                parts, remaining = [cached], counts - cached_counts
        for event, count in remaining.items():
            one = curves.loss_distribution(event, self.relation, interval)
            parts.append(one.self_compose(count))
        total = functools.reduce(LossDistribution.compose, parts)
        self._composed = interval, counts, total
        return total


def _is_allocated(charge: charge_lib.RoundCharge) -> bool:
    return charge.sampling == Sampling.RANDOM_ALLOCATION and charge.is_amplified


def _as_own_pass(
    charge: charge_lib.RoundCharge, mu_squared: float
) -> charge_lib.RoundCharge:
    """Returns the charge of a separate pass whose rounds have this mu^2."""
    return dataclasses.replace(
        charge,
        event=dp_accounting.GaussianDpEvent(gaussian.noise_of_mu_squared(mu_squared)),
        pass_index=None,
        pass_offset=None,
        partition=None,
    )


def _pass_key(charge: charge_lib.RoundCharge) -> Hashable:
    kind = None if charge.noise_multiplier is not None else charge.event
    key = (charge.partition, charge.num_clients, charge.pass_index, kind)
    # A shuffled order can be cut into other cohorts; an allocation is drawn again.
    return (*key, charge.rounds_per_pass) if _is_allocated(charge) else key


_Accountants: TypeAlias = "frozenset[str]"


@functools.lru_cache(maxsize=1024)
def _accountants_of(charge: charge_lib.RoundCharge) -> _Accountants:
    """Returns the accountants that have a bound for a round."""
    if charge.noise_multiplier is not None:
        return frozenset(charge_lib.ACCOUNTANTS)
    relation = charge.relation.neighboring_relation
    libraries = {
        "rdp": dp_accounting.rdp.RdpAccountant([2.0], relation),
        "pld": dp_accounting.pld.PLDAccountant(relation),
    }
    if isinstance(charge.event, BestOfTrialsDpEvent):  # Of PLD, see `has_bound_by`.
        has_bound = all(map(libraries["rdp"].supports, charge.event.events))
        return frozenset({"rdp"} if has_bound else ())
    return frozenset(
        name
        for name, library in libraries.items()
        if library.supports(charge.dp_event(name))
    )


def _rdp_curve(charge: charge_lib.RoundCharge, part: int) -> np.ndarray:
    return curves.rdp_curve(
        charge.dp_event("rdp"), charge.relation.neighboring_relation, part
    )


# Canonne, Kamath & Steinke 2020, proposition 12, https://arxiv.org/abs/2004.00010,
# rounded up. Epsilon is rounded up by more than delta, so that the delta at an epsilon
# is at most the delta from which it was computed.


def _epsilons(orders: np.ndarray, rdp: np.ndarray, delta: float) -> np.ndarray:
    """Returns the epsilon at delta that each order gives; at least 0."""
    logs = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    epsilons = np.maximum(rdp + logs, 0.0)
    return epsilons + 1e-12 * (epsilons + rdp + np.abs(logs))


def _log_deltas(orders: np.ndarray, rdp: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns the logarithm of the delta at epsilon that each order gives."""
    log_deltas = (orders - 1) * (rdp - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    return log_deltas + 1e-14 * ((orders - 1) * (rdp + epsilon) + np.log(orders) + 1)


def _largest_sum(cohorts: Iterable[tuple[float, float, float]]) -> float:
    """Returns the largest sum of weights of intervals that overlap at one point."""
    steps: dict[float, float] = collections.defaultdict(float)
    for start, stop, weight in cohorts:
        steps[start] += weight
        steps[stop] -= weight
    return max(itertools.accumulate(steps[point] for point in sorted(steps)), default=0)


def _without_amplification(event: Any) -> Any:
    """Returns an event, as JSON, without the sampling events inside it."""
    if isinstance(event, list):
        return [_without_amplification(part) for part in event]
    if not isinstance(event, dict):
        return event
    if event["type"] in ("PoissonSampledDpEvent", "SampledWithoutReplacementDpEvent"):
        return _without_amplification(event["event"])
    if event.keys() & {"sampling_probability", "sample_size", "sampling_probs"}:
        return {"type": "NonPrivateDpEvent"}  # Its cost is unknown.
    return {name: _without_amplification(part) for name, part in event.items()}


def select_accountant(charges: Iterable[charge_lib.RoundCharge]) -> str:
    """Returns "pld" if it is tight and fast for a run, otherwise "rdp".

    That is the case if all rounds amount to Gaussians with at most three distinct
    amplified costs, so not for schedules with many noise multipliers or cohort sizes.
    For cohorts of a fixed size, PLD is an upper bound, as RDP is. It is the tighter one
    unless cohorts are half of the clients or more.

    Args:
      charges: The distinct costs of rounds.
    """
    kinds = {_validate.instance_of(charge_lib.RoundCharge, charge=c) for c in charges}
    amplified = [charge for charge in kinds if charge.is_amplified]
    # Rounds of different passes have the same cost.
    num_kinds = len({charge.dp_event("pld") for charge in amplified})
    by_rdp = (
        any(charge.noise_multiplier is None for charge in kinds)
        or num_kinds > _FEW_KINDS
        or any(
            charge.sampling == Sampling.FIXED_SIZE
            and charge.sampling_probability >= 0.5
            for charge in amplified
        )
    )
    return "rdp" if by_rdp else "pld"
