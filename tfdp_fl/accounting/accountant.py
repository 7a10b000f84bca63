"""Composes the rounds that happened into one guarantee."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution

from tfdp_fl import _validate
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import events, gaussian, pass_costs
from tfdp_fl.accounting import rdp as rdp_lib

# PLD keeps a probability for every multiple of this up to the largest loss.
_PLD_INTERVAL = 1e-4
_PLD_MAX_CELLS = 2_000_000
# Where a bound that is a little larger will do, ten times as fast.
_PLD_COARSE_INTERVAL = 1e-3
# PLD takes a second or two for each further kind of round.
_MOST_KINDS_FOR_PLD = 3


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

    RDP is kept incrementally: each distinct charge is computed once, and a
    round costs a vector addition. PLD is composed on demand, equal charges by
    self-composition.
    """

    def __init__(self, orders: Iterable[float] | None = None):
        """Makes an accountant with an empty history.

        Args:
          orders: Renyi orders, above 1. Default `rdp.DENSE_ORDERS`, which
            include dp_accounting's own default orders.
        """
        if orders is None:
            self._orders = rdp_lib.DENSE_ORDERS
        else:
            self._orders = tuple(sorted({float(order) for order in orders}))
            if not self._orders or self._orders[0] <= 1:
                raise ValueError(f"orders must be numbers above 1, got {orders!r}.")
        self._orders_array = np.array(self._orders)
        self._counts: dict[charge_lib.RoundCharge, int] = {}
        self._rounds = 0
        self._relation: dp_accounting.NeighboringRelation | None = None
        # What was spent, by kind.
        self._amplified: dict[charge_lib.RoundCharge, int] = {}
        self._mu_squared = 0.0  # Of all Gaussians without amplification.
        self._other: dict[dp_accounting.DpEvent, int] = {}
        self._no_privacy = False
        self._passes = pass_costs.PassCosts()
        # The Renyi curve of `_amplified`, up to the pending charges.
        self._rdp = np.zeros(len(self._orders))
        self._pending: list[tuple[charge_lib.RoundCharge, int]] = []
        self._pld = None

    @property
    def orders(self) -> tuple[float, ...]:
        """The Renyi orders."""
        return self._orders

    @property
    def rounds(self) -> int:
        """How many rounds were added."""
        return self._rounds

    @property
    def charges(self) -> tuple[tuple[charge_lib.RoundCharge, int], ...]:
        """The history as (charge, count), in order of first appearance."""
        return tuple(self._counts.items())

    @property
    def relation(self) -> dp_accounting.NeighboringRelation | None:
        """The neighbouring relation; None before the first round."""
        return self._relation

    def copy(self) -> PrivacyAccountant:
        """Returns an independent copy."""
        other = object.__new__(PrivacyAccountant)
        other.__dict__.update(self.__dict__)
        other._counts = dict(self._counts)
        other._amplified = dict(self._amplified)
        other._other = dict(self._other)
        other._passes = self._passes.copy()
        other._rdp = self._rdp.copy()
        other._pending = list(self._pending)
        return other

    def would_be(
        self, charge: charge_lib.RoundCharge, count: int = 1
    ) -> PrivacyAccountant:
        """Returns a copy with the charge added; this one stays as it is."""
        other = self.copy()
        other.add(charge, count)
        return other

    def epsilon_after(
        self,
        charge: charge_lib.RoundCharge,
        delta: float,
        accountant: str = "rdp",
    ) -> float:
        """Returns what epsilon would be with one more round."""
        return self.would_be(charge).epsilon(delta, accountant)

    def add(self, charge: charge_lib.RoundCharge, count: int = 1) -> None:
        """Adds a round, or several equal ones.

        Raises:
          ValueError: If the charge has another neighbouring relation than the
            history; nothing is added then.
        """
        _validate.instance_of(charge_lib.RoundCharge, charge=charge)
        count = _validate.positive_integer(count=count)
        if self._relation not in (None, charge.relation):
            raise ValueError(
                f"charge has the neighbouring relation {charge.relation.name} "
                f"({charge.sampling} sampling), the history has "
                f"{self._relation.name}; one guarantee cannot cover both."
            )
        self._relation = charge.relation
        self._counts[charge] = self._counts.get(charge, 0) + count
        self._rounds += count
        self._pld = None
        z = charge.noise_multiplier
        if z == 0:
            self._no_privacy = True
        elif z == math.inf:
            pass
        elif charge.is_amplified:
            self._amplified[charge] = self._amplified.get(charge, 0) + count
            self._pending.append((charge, count))
        elif z is not None:
            one = (charge.sensitivity / z) ** 2
            self._mu_squared += self._pass_increase(charge, count, one)
        else:
            event = charge.event
            more = round(self._pass_increase(charge, count, 1))
            if more:
                self._other[event] = self._other.get(event, 0) + more

    def _pass_increase(
        self, charge: charge_lib.RoundCharge, count: int, weight: float
    ) -> float:
        """Returns by how much the most exposed client's sum of weights rises.

        Outside a pass, or in a pass that is not known, that is every round.
        """
        if charge.sampling != "shuffled" or charge.pass_index is None:
            return count * weight
        kind = None if charge.noise_multiplier is not None else charge.event
        key = (charge.partition, charge.num_clients, charge.pass_index, kind)
        size = int(charge.clients_per_round)
        increase = 0.0
        place: tuple[Any, ...]
        for _ in range(count):
            if charge.pass_offset is None:
                # Disjoint as long as the pass has clients left; then anew.
                place = (*key, "unplaced")
                start = self._passes.next_start(place, charge.num_clients)
                stop = min(charge.num_clients, start + size)
            else:
                place = key
                start = charge.pass_offset
                stop = start + size
            increase += self._passes.add(place, start, stop, weight)
        return increase

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
        if not (self._amplified or self._other or self._mu_squared):
            return 0.0
        if accountant == "rdp":
            return rdp_lib.compute_epsilon(self._orders_array, self.rdp(), delta)[0]
        if self._is_one_gaussian:
            return gaussian.gaussian_epsilon(self._mu_squared**-0.5, delta)
        return float(self._compose_pld(coarse).get_epsilon_for_delta(delta))

    def delta(self, epsilon: float, accountant: str = "rdp") -> float:
        """Returns delta at epsilon; 1 where a round had no noise.

        Args:
          epsilon: At least 0.
          accountant: "rdp" or "pld".
        """
        epsilon = _validate.non_negative(epsilon=epsilon)
        _validate.one_of(charge_lib.ACCOUNTANTS, accountant=accountant)
        if self._no_privacy:
            return 1.0
        if not (self._amplified or self._other or self._mu_squared):
            return 0.0
        if accountant == "rdp":
            return rdp_lib.compute_delta(self._orders_array, self.rdp(), epsilon)[0]
        if self._is_one_gaussian:
            return gaussian.gaussian_delta(self._mu_squared**-0.5, epsilon)
        return float(self._compose_pld().get_delta_for_epsilon(epsilon))

    def computed_by(self, accountant: str) -> str:
        """Returns whose code computes `epsilon`, in words for a statement."""
        _validate.one_of(charge_lib.ACCOUNTANTS, accountant=accountant)
        package = f"dp-accounting {events.dp_accounting_version()}"
        if accountant == "pld":
            if self._is_one_gaussian:
                return "the exact conversion of one Gaussian (Balle & Wang 2018)"
            return f"the privacy loss distributions of {package}"
        foreign = any(
            charge.noise_multiplier is None for charge in self._amplified
        ) or not all(map(rdp_lib.is_sampled_gaussian, self._other))
        return (
            "tfdp_fl's own Renyi accounting, which is tested against that of "
            + package
            + (f", and {package}'s of all that is no Gaussian" * bool(foreign))
        )

    def rdp(self) -> np.ndarray:
        """Returns the history's Renyi curve, float64 [len(orders)]."""
        if self._no_privacy:
            return np.full(len(self._orders), np.inf)
        while self._pending:
            charge, count = self._pending[-1]
            self._rdp = self._rdp + count * rdp_lib.charge_rdp(charge, self._orders)
            self._pending.pop()
        curve = self._rdp + self._orders_array * (self._mu_squared / 2)
        for event, count in self._other.items():
            curve = curve + count * rdp_lib.event_rdp(
                event, self._relation, self._orders
            )
        return curve

    @property
    def _is_one_gaussian(self) -> bool:
        return not self._amplified and not self._other

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
            if self._relation is dp_accounting.NeighboringRelation.REPLACE_ONE:
                z *= 2
            counts[dp_accounting.GaussianDpEvent(z)] = 1
        interval = self._pld_interval(_PLD_COARSE_INTERVAL if coarse else _PLD_INTERVAL)
        composed = None
        for event, count in counts.items():
            one = _event_pld(event, self._relation, interval)
            if count > 1:
                one = one.self_compose(count)
            composed = one if composed is None else composed.compose(one)
        if not coarse:
            self._pld = composed
        return composed

    def _pld_interval(self, interval: float) -> float:
        """Returns a cell width that keeps a huge epsilon computable."""
        try:
            by_rdp = rdp_lib.compute_epsilon(self._orders_array, self.rdp(), 1e-9)[0]
        except ValueError:
            return interval
        return max(interval, by_rdp / _PLD_MAX_CELLS)


def tightest(charges: Iterable[charge_lib.RoundCharge]) -> str:
    """Returns "pld" where it is tight and quick for a run, "rdp" elsewhere.

    That is where every round amounts to Gaussians, amplified in at most three
    ways: no schedules of many noises or cohort sizes. For cohorts of a fixed
    size PLD bounds the truth from above, as RDP does; it is the tighter of the
    two unless cohorts are half of the clients or more.

    Args:
      charges: The kinds of rounds.
    """
    amplified = set()
    for charge in charges:
        _validate.instance_of(charge_lib.RoundCharge, charge=charge)
        if charge.noise_multiplier is None:
            return "rdp"
        if charge.is_amplified:
            amplified.add(charge)
    if len(amplified) > _MOST_KINDS_FOR_PLD:
        return "rdp"
    if any(each.sampling == "fixed_size" for each in amplified) and (
        not charge_lib.has_fixed_size_pld()
        or any(each.sampling_probability >= 0.5 for each in amplified)
    ):
        return "rdp"
    return "pld"


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
