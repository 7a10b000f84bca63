"""Questions asked before a run: what it will cost, and how much can be had."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import dp_accounting

from tfdp_fl import _validate, schedules
from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import charge as charge_lib

QUANTITIES = (
    "num_clients",
    "clients_per_round",
    "noise_multiplier",
    "rounds",
    "epsilon",
    "delta",
)
# Nobody trains longer; without it a free mechanism would never stop.
_MOST_ROUNDS = 1 << 40
_MOST_SCHEDULED_ROUNDS = 1_000_000
_MOST_CLIENTS = 1 << 40
# Of the noise multiplier and of epsilon: inside the promised 0.1 %.
_TOLERANCE = 8e-4
_SMALLEST, _LARGEST = 1e-6, 1e9

Charges = Iterable["charge_lib.RoundCharge | tuple[charge_lib.RoundCharge, int]"]


def epsilon(
    noise_multiplier: schedules.Schedule,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    rounds: int,
    delta: float,
    accountant: str = "rdp",
) -> float:
    """Returns epsilon after a number of rounds of a clipped, noised sum.

    Args:
      noise_multiplier: z, noise stddev on the sum of clipped updates over the
        clip norm: a constant, one value per round, or a callable of the
        0-based round. 0: no privacy, epsilon is infinite.
      sampling: "poisson", "fixed_size" or "shuffled".
      num_clients: N.
      clients_per_round: m, at most N: a constant, sequence or callable.
      rounds: T, at least 0.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld".
    """
    history = _history(
        noise_multiplier,
        sampling,
        num_clients,
        clients_per_round,
        rounds,
    )
    return history.epsilon(delta, accountant)


def delta(
    noise_multiplier: schedules.Schedule,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    rounds: int,
    epsilon: float,
    accountant: str = "rdp",
) -> float:
    """Returns delta at an epsilon; the arguments are those of `epsilon`."""
    history = _history(
        noise_multiplier,
        sampling,
        num_clients,
        clients_per_round,
        rounds,
    )
    return history.delta(epsilon, accountant)


def calibrate_noise_multiplier(
    target_epsilon: float,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    rounds: int,
    delta: float | None = None,
    accountant: str = "rdp",
    *,
    target_delta: float | None = None,
    relative_noise_multipliers: Sequence[float] | Callable[[int], float] | None = None,
) -> float:
    """Returns the smallest noise multiplier that keeps the target.

    Never above the target, and within 0.1 % of the exact solution.

    Args:
      target_epsilon: Above 0.
      sampling: "poisson", "fixed_size" or "shuffled".
      num_clients: N.
      clients_per_round: m: a constant, sequence or callable of the round.
      rounds: T, at least 1.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld".
      target_delta: Another name for `delta`, as `make_private` has it; exactly
        one of the two is given.
      relative_noise_multipliers: For a noise schedule: its shape, all above 0.
        The result z then means z_t = z * relative_noise_multipliers[t].

    Raises:
      ValueError: If no noise keeps the target, or arguments are wrong.
    """
    given = [each for each in (delta, target_delta) if each is not None]
    if len(given) != 1:
        raise ValueError(
            "delta or its other name target_delta must be given, not both, "
            f"got delta={delta!r} and target_delta={target_delta!r}."
        )
    rounds = _validate.positive_integer(rounds=rounds)
    shape: float | list[float] = 1.0
    if relative_noise_multipliers is not None:
        shape = [
            _validate.positive(
                relative_noise_multipliers=schedules.value_at(
                    relative_noise_multipliers, t, "relative_noise_multipliers"
                )
            )
            for t in range(rounds)
        ]

    def make_charges(z: float) -> Charges:
        noise = [z * share for share in shape] if isinstance(shape, list) else z
        return charges(noise, sampling, num_clients, clients_per_round, rounds)

    return calibrate(make_charges, target_epsilon, given[0], accountant)


def calibrate(
    make_charges: Callable[[float], Charges],
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
    *,
    upper: float | None = None,
) -> float:
    """Returns the smallest noise multiplier that keeps the target.

    The result is rounded up: epsilon at it is never above the target, and
    both epsilon and the noise are within 0.1 % of the exact solution.

    Args:
      make_charges: For a noise multiplier above 0, the charges of the whole
        run, as (charge, count) pairs or single charges. More noise must not
        cost more.
      target_epsilon: Above 0.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld".
      upper: The largest noise multiplier that `make_charges` takes; default no
        limit.

    Raises:
      ValueError: If no noise multiplier (up to `upper`) keeps the target.
    """
    target = _validate.positive(target_epsilon=target_epsilon)
    delta = _validate.inside_unit_interval(delta=delta)
    _validate.one_of(charge_lib.ACCOUNTANTS, accountant=accountant)
    limit = _LARGEST if upper is None else _validate.positive(upper=upper)

    def epsilon(z: float, by: str, coarse: bool = False) -> float:
        history = accountant_lib.PrivacyAccountant()
        for item in make_charges(z):
            history.add(*(item if isinstance(item, tuple) else (item, 1)))
        return history.epsilon(delta, by, coarse)

    def solve(start: float, by: str, coarse: bool = False) -> float:
        return _solve(lambda z: epsilon(z, by, coarse), target, start, limit, delta)

    z = min(1.0, limit)
    if accountant == "pld":
        # RDP is quick and never much below PLD's noise, and coarse PLD is near it.
        with contextlib.suppress(ValueError):
            z = solve(solve(z, "rdp"), "pld", coarse=True)
            if target * (1 - _TOLERANCE) <= epsilon(z, "pld") <= target:
                return z
    return solve(z, accountant)


def _solve(
    epsilon: Callable[[float], float],
    target: float,
    start: float,
    limit: float,
    delta: float,
) -> float:
    """Brackets the target, and lets dp-accounting close in."""
    epsilon = functools.lru_cache(epsilon)
    low = high = start
    factor = 1.1
    while epsilon(high) > target:
        if high >= limit:
            raise ValueError(
                f"target_epsilon={target:g} at delta={delta:g} cannot be kept by any "
                f"noise multiplier up to {limit:.4g} (epsilon is {epsilon(high):.4g} "
                "there)."
            )
        low, high, factor = high, min(limit, high * factor), factor * factor
    while epsilon(low) <= target:
        if low < _SMALLEST:
            return low  # The noise makes no difference.
        low, high, factor = low / factor, low, factor * factor
    return float(
        dp_accounting.calibrate_dp_mechanism(
            lambda: _Epsilon(epsilon),
            lambda z: z,
            # Sums of other orders may differ in their last digits.
            target * (1 - 1e-9),
            delta,
            dp_accounting.ExplicitBracketInterval(low, high),
            tol=low * 1e-5,
        )
    )


class _Epsilon:
    """Epsilon of a noise multiplier, as `calibrate_dp_mechanism` asks for it."""

    ledger = dp_accounting.NoOpDpEvent()

    def __init__(self, epsilon: Callable[[float], float]):
        self._epsilon = epsilon

    def compose(self, noise_multiplier: float) -> _Epsilon:
        self._noise_multiplier = noise_multiplier
        return self

    def get_epsilon(self, delta: float) -> float:
        del delta
        return min(self._epsilon(self._noise_multiplier), 1e12)


def max_rounds(
    noise_multiplier: schedules.Schedule,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
) -> int:
    """Returns how many rounds stay within the target; 0 if not even one.

    A schedule given as a sequence answers at most its own length, one given as
    a callable at most a million.

    Args:
      noise_multiplier: As in `epsilon`.
      sampling: "poisson", "fixed_size" or "shuffled".
      num_clients: N.
      clients_per_round: As in `epsilon`.
      target_epsilon: Above 0.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld".
    """
    target = _validate.positive(target_epsilon=target_epsilon)
    _validate.inside_unit_interval(delta=delta)
    _validate.one_of(charge_lib.SAMPLINGS, sampling=sampling)
    constant = schedules.is_constant(noise_multiplier) and schedules.is_constant(
        clients_per_round
    )
    if constant and sampling != "shuffled":
        ((charge, _),) = charges(
            noise_multiplier, sampling, num_clients, clients_per_round, 1
        )

        def history_of(count):
            history = accountant_lib.PrivacyAccountant()
            history.add(charge, count)
            return history

        return _most(history_of, target, delta, accountant, _MOST_ROUNDS)
    if constant:
        return _max_shuffled_rounds(
            noise_multiplier,
            num_clients,
            clients_per_round,
            target,
            delta,
            accountant,
        )
    limit = min(
        [_MOST_SCHEDULED_ROUNDS]
        + [
            len(given)
            for given in (noise_multiplier, clients_per_round)
            if hasattr(given, "__len__")
        ]
    )
    # Asked for as they are needed: a callable need not go on for ever.
    known: list[charge_lib.RoundCharge] = []
    in_passes = _in_passes(sampling, num_clients, clients_per_round)

    def history_of_prefix(count):
        while len(known) < count:
            known.append(
                _one_charge(
                    noise_multiplier,
                    sampling,
                    num_clients,
                    clients_per_round,
                    len(known),
                    in_passes,
                )
            )
        history = accountant_lib.PrivacyAccountant()
        for charge in known[:count]:
            history.add(charge)
        return history

    return _most(history_of_prefix, target, delta, accountant, limit)


def _most(history_of, target, delta, accountant, limit) -> int:
    """Returns how many rounds keep the target, looking near RDP's answer."""

    def most(by, guess):
        return bracket(
            lambda count: history_of(count).epsilon(delta, by) <= target,
            limit,
            guess,
        )[0]

    by_rdp = most("rdp", 1)
    return by_rdp if accountant == "rdp" else most(accountant, by_rdp)


def _max_shuffled_rounds(z, n, m, target, delta, accountant):
    """Whole passes: the first round of a pass costs as much as all of it."""
    per_pass = -(-n // charge_lib.checked_size(m, n))
    event = dp_accounting.GaussianDpEvent(_noise(z))

    def history_of(passes):
        history = accountant_lib.PrivacyAccountant()
        # Outside a known pass, a round is charged to every client.
        one_pass = charge_lib.RoundCharge(
            sampling="shuffled", num_clients=n, clients_per_round=m, event=event
        )
        history.add(one_pass, passes)
        return history

    return per_pass * _most(history_of, target, delta, accountant, _MOST_ROUNDS)


def charges(
    noise_multiplier: schedules.Schedule,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    rounds: int,
) -> list[tuple[charge_lib.RoundCharge, int]]:
    """Returns the planned rounds as (charge, count) pairs.

    The arguments are those of `epsilon`.
    """
    _validate.one_of(charge_lib.SAMPLINGS, sampling=sampling)
    n = _validate.positive_integer(num_clients=num_clients)
    rounds = _validate.non_negative_integer(rounds=rounds)
    in_passes = _in_passes(sampling, n, clients_per_round)
    arguments = (noise_multiplier, sampling, n, clients_per_round)
    if sampling != "shuffled" and (
        schedules.is_constant(noise_multiplier)
        and schedules.is_constant(clients_per_round)
    ):
        one = _one_charge(*arguments, 0, in_passes)
        return [(one, rounds)] if rounds else []
    counts: dict[charge_lib.RoundCharge, int] = {}
    for t in range(rounds):
        charge = _one_charge(*arguments, t, in_passes)
        counts[charge] = counts.get(charge, 0) + 1
    return list(counts.items())


def _history(z, sampling, n, m, rounds):
    history = accountant_lib.PrivacyAccountant()
    for charge, count in charges(z, sampling, n, m, rounds):
        history.add(charge, count)
    return history


def _in_passes(sampling, n, m) -> charge_lib.PassCohorts | None:
    return charge_lib.PassCohorts(n, m) if sampling == "shuffled" else None


def _noise(z) -> float:
    return _validate.non_negative(noise_multiplier=z)


def _one_charge(z, sampling, n, m, t, in_passes) -> charge_lib.RoundCharge:
    z = _noise(schedules.value_at(z, t, "noise_multiplier"))
    if in_passes is not None:
        place = in_passes.place(t)
    else:
        size = charge_lib.checked_size(
            schedules.value_at(m, t, "clients_per_round"),
            n,
            fractional=sampling == "poisson",
        )
        place = {"clients_per_round": size}
    return charge_lib.RoundCharge(
        sampling=sampling,
        num_clients=n,
        event=dp_accounting.GaussianDpEvent(z),
        **place,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """N, m, z, T, epsilon and delta of a run; None for what is not known.

    Attributes:
      num_clients: N.
      clients_per_round: m.
      noise_multiplier: z.
      rounds: T.
      epsilon: The guarantee at delta.
      delta: Between 0 and 1.
    """

    # Optional, all of them; which one is None is what `solve` is asked.
    num_clients: Any = None
    clients_per_round: Any = None
    noise_multiplier: Any = None
    rounds: Any = None
    epsilon: Any = None
    delta: Any = None

    @property
    def missing(self) -> str:
        """The one quantity that is not known.

        Raises:
          ValueError: If it is not exactly one.
        """
        names = [name for name in QUANTITIES if getattr(self, name) is None]
        if len(names) != 1:
            given = [name for name in QUANTITIES if name not in names]
            raise ValueError(
                f"exactly five of {', '.join(QUANTITIES)} must be given, got "
                f"{', '.join(given) or 'none'}."
            )
        return names[0]

    def check(self) -> None:
        """Raises a ValueError for any value out of range."""
        checks = {
            "num_clients": _validate.positive_integer,
            "clients_per_round": _validate.positive,
            "noise_multiplier": _validate.non_negative,
            "rounds": _validate.positive_integer,
            "epsilon": _validate.positive,
            "delta": _validate.inside_unit_interval,
        }
        for name, check in checks.items():
            if getattr(self, name) is not None:
                check(**{name: getattr(self, name)})
        n, m = self.num_clients, self.clients_per_round
        if n is not None and m is not None and m > n:
            raise ValueError(
                f"clients_per_round must be at most num_clients={n}, got {m!r}."
            )


def solve(plan: Plan, sampling: str, accountant: str = "rdp") -> Plan:
    """Returns the plan with its one missing quantity filled in.

    The noise is the smallest, the rounds and the cohort the largest, and the
    population the smallest that keep epsilon at delta (cohort and population
    by PLD within 0.1 %, on the safe side).

    Args:
      plan: With exactly one None.
      sampling: "poisson", "fixed_size" or "shuffled".
      accountant: "rdp" or "pld".

    Raises:
      ValueError: If no value does it, or a given value is out of range.
    """
    missing = plan.missing
    plan.check()
    if missing in ("epsilon", "delta"):
        history = _history_of(plan, sampling)
        value = (
            history.epsilon(plan.delta, accountant)
            if missing == "epsilon"
            else history.delta(plan.epsilon, accountant)
        )
    elif missing == "noise_multiplier":
        value = calibrate_noise_multiplier(
            plan.epsilon,
            sampling,
            plan.num_clients,
            plan.clients_per_round,
            plan.rounds,
            plan.delta,
            accountant,
        )
    elif missing == "rounds":
        value = max_rounds(
            plan.noise_multiplier,
            sampling,
            plan.num_clients,
            plan.clients_per_round,
            plan.epsilon,
            plan.delta,
            accountant,
        )
        if not value:
            raise ValueError(
                f"not even one round keeps epsilon={plan.epsilon!r} at "
                f"delta={plan.delta!r} with noise_multiplier="
                f"{plan.noise_multiplier!r}."
            )
    else:
        value = _solve_count(plan, missing, sampling, accountant)
    return dataclasses.replace(plan, **{missing: value})


def _solve_count(plan, missing, sampling, accountant) -> int:
    """The largest cohort, or the smallest population, within the target."""

    def keeps(by, value):
        candidate = dataclasses.replace(plan, **{missing: value})
        history = _history_of(candidate, sampling)
        return history.epsilon(plan.delta, by) <= plan.epsilon

    # One PLD of a big history takes a second: 0.1 % is near enough.
    def search(by, guess):
        tolerance = 0.0 if by == "rdp" else 1e-3
        if missing == "clients_per_round":
            return bracket(lambda m: keeps(by, m), plan.num_clients, guess, tolerance)[
                0
            ]
        # Too small a population fails: the bracket's other end keeps.
        smallest = math.ceil(plan.clients_per_round)
        return (
            smallest
            - 1
            + bracket(
                lambda extra: not keeps(by, smallest - 1 + extra),
                _MOST_CLIENTS,
                max(1, guess - smallest),
                tolerance,
            )[1]
        )

    if missing == "num_clients" and sampling == "shuffled":
        # Only the number of passes matters; even one may be too many.
        if not keeps(accountant, math.ceil(plan.clients_per_round * plan.rounds)):
            value = _MOST_CLIENTS
        else:
            value = search(accountant, 1)
    else:
        value = search("rdp", 1)
        if accountant != "rdp":
            value = search(accountant, max(1, min(value, _MOST_CLIENTS)))
    if value == 0 or value >= _MOST_CLIENTS:
        raise ValueError(
            f"no {missing} keeps epsilon={plan.epsilon!r} at "
            f"delta={plan.delta!r} under {sampling} sampling."
        )
    return value


def _history_of(plan: Plan, sampling: str) -> accountant_lib.PrivacyAccountant:
    return _history(
        plan.noise_multiplier,
        sampling,
        plan.num_clients,
        plan.clients_per_round,
        plan.rounds,
    )


def epsilon_curve(
    plan: Plan, sampling: str, accountant: str = "rdp", points: int = 200
) -> Iterator[tuple[int, float]]:
    """Yields (rounds, epsilon) at evenly spread rounds up to T.

    Args:
      plan: Complete, apart from epsilon.
      sampling: "poisson", "fixed_size" or "shuffled".
      accountant: "rdp" or "pld".
      points: At most so many.
    """
    rounds = sorted(
        {max(1, round(plan.rounds * k / points)) for k in range(1, points + 1)}
    )
    for count in rounds:
        part = dataclasses.replace(plan, rounds=count)
        yield count, _history_of(part, sampling).epsilon(plan.delta, accountant)


def bracket(
    predicate: Callable[[int], bool],
    limit: int,
    guess: int = 1,
    tolerance: float = 0.0,
) -> tuple[int, int]:
    """Returns (n, n') where a falling predicate is true at n, false at n'.

    Args:
      predicate: True up to some n >= 0, False from there on; true at 0, and
        taken as false beyond the limit.
      limit: Where to stop looking.
      guess: Where to begin.
      tolerance: Stop when n' - n <= max(1, tolerance * n).
    """
    low, high = 0, limit + 1
    n, stride = min(max(guess, 1), limit), max(1, guess // 8)
    while high - low > max(1, tolerance * low):
        if predicate(n):
            low = n
        else:
            high = n
        if low and high <= limit:
            n = (low + high) // 2
        else:  # One side is still open: ever longer strides.
            n = min(max(1, n + stride if low else n - stride), limit)
            stride *= 2 if guess > 1 else 1 + n
    return low, high
