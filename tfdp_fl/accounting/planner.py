"""Plans a run: solves for what is missing, compares, suggests schedules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from tfdp_fl import _validate
from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import forecast

QUANTITIES = (
    "num_clients",
    "clients_per_round",
    "noise_multiplier",
    "rounds",
    "epsilon",
    "delta",
)
_MOST_CLIENTS = 1 << 40


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
        history = _history(plan, sampling)
        value = (
            history.epsilon(plan.delta, accountant)
            if missing == "epsilon"
            else history.delta(plan.epsilon, accountant)
        )
    elif missing == "noise_multiplier":
        value = forecast.calibrate_noise_multiplier(
            plan.epsilon,
            sampling,
            plan.num_clients,
            plan.clients_per_round,
            plan.rounds,
            plan.delta,
            accountant,
        )
    elif missing == "rounds":
        value = forecast.max_rounds(
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
        history = _history(candidate, sampling)
        return history.epsilon(plan.delta, by) <= plan.epsilon

    # One PLD of a big history takes a second: 0.1 % is near enough.
    def search(by, guess):
        tolerance = 0.0 if by == "rdp" else 1e-3
        if missing == "clients_per_round":
            return forecast.bracket(
                lambda m: keeps(by, m), plan.num_clients, guess, tolerance
            )[0]
        # Too small a population fails: the bracket's other end keeps.
        smallest = math.ceil(plan.clients_per_round)
        return (
            smallest
            - 1
            + forecast.bracket(
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


def _history(plan: Plan, sampling: str) -> accountant_lib.PrivacyAccountant:
    history = accountant_lib.PrivacyAccountant()
    for charge, count in forecast.charges(
        plan.noise_multiplier,
        sampling,
        plan.num_clients,
        plan.clients_per_round,
        plan.rounds,
    ):
        history.add(charge, count)
    return history


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
        yield count, _history(part, sampling).epsilon(plan.delta, accountant)


def _held(values: tuple[float, ...]) -> Callable[[int], float]:
    """Returns a schedule that keeps its last value for good."""
    return lambda t: values[min(t, len(values) - 1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleSuggestion:
    """A schedule of cohort sizes and noise at fixed sigma^2/m, and its gain.

    Attributes:
      name: What it does.
      sizes: m_t of each round.
      noise_multipliers: sigma_t = sigma sqrt(m_t/m) of each round.
      epsilon: Of the T rounds, at delta.
      rounds: How many rounds the constant schedule's epsilon buys when the
        last round's m and sigma are kept from there on; at least T.
      client_rounds: Sum of m_t: the clients' work.
    """

    name: str
    sizes: tuple[int, ...]
    noise_multipliers: tuple[float, ...]
    epsilon: float
    rounds: int
    client_rounds: int


def suggest_schedules(
    plan: Plan, sampling: str, accountant: str = "rdp"
) -> list[ScheduleSuggestion]:
    """Returns schedules that raise m_t and sigma_t at a fixed sigma_t^2/m_t.

    Geyer et al. 2017, sections 3 and 6: for a fixed ratio r = sigma^2/m
    privacy loss is smaller when both are small; in early rounds the clients'
    updates are alike and large, so a small cohort does almost as well, and
    what is saved buys more rounds later. The paper calls r the distortion; the
    noise on the *average* is sigma S/m, so per coordinate it rises by
    sqrt(m/m_t) in the small rounds.

    Args:
      plan: Complete, apart from epsilon; its m and z are those of the last
        rounds.
      sampling: "poisson", "fixed_size" or "shuffled".
      accountant: "rdp" or "pld".

    Returns:
      The constant schedule first, then the suggestions.
    """
    plan.check()
    m, z, total = plan.clients_per_round, plan.noise_multiplier, plan.rounds
    shapes: dict[str, Callable[[int], float]] = {
        "constant": lambda t: 1.0,
        "m/2 in the first half": lambda t: 0.5 if 2 * t < total else 1.0,
        "m/4, m/2, m by thirds": lambda t: (0.25, 0.5, 1.0)[3 * t // total],
        "rising evenly from m/4": lambda t: 0.25 + 0.75 * t / max(1, total - 1),
        "doubling from m/8": lambda t: 2 ** (3 * (t / max(1, total - 1) - 1)),
    }
    suggestions: list[ScheduleSuggestion] = []
    for name, shape in shapes.items():
        sizes = tuple(max(1, round(m * shape(t))) for t in range(total))
        noise = tuple(z * math.sqrt(size / m) for size in sizes)
        arguments = (sampling, plan.num_clients)
        epsilon = forecast.epsilon(
            noise, *arguments, sizes, total, plan.delta, accountant
        )
        budget = suggestions[0].epsilon if suggestions else epsilon
        bought = total
        if name != "constant" and 0 < budget < math.inf:
            bought = forecast.max_rounds(
                _held(noise),
                *arguments,
                _held(sizes),
                budget,
                plan.delta,
                accountant,
            )
        suggestions.append(
            ScheduleSuggestion(
                name=name,
                sizes=sizes,
                noise_multipliers=noise,
                epsilon=epsilon,
                rounds=bought,
                client_rounds=sum(sizes),
            )
        )
    return suggestions
