"""Questions asked before a run: what will it cost, how much can be had."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import dp_accounting

from tfdp_fl import _validate, schedules
from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import calibration, pass_cohorts
from tfdp_fl.accounting import charge as charge_lib

# Nobody trains longer; without it a free mechanism would never stop.
_MOST_ROUNDS = 1 << 40
_MOST_SCHEDULED_ROUNDS = 1_000_000


def epsilon(
    noise_multiplier: schedules.Schedule,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    rounds: int,
    delta: float,
    accountant: str = "rdp",
    *,
    orders: Iterable[float] | None = None,
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
      orders: Renyi orders; default a dense grid that contains
        dp_accounting's default orders.
    """
    history = _history(
        noise_multiplier,
        sampling,
        num_clients,
        clients_per_round,
        rounds,
        orders,
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
    *,
    orders: Iterable[float] | None = None,
) -> float:
    """Returns delta at an epsilon; the arguments are those of `epsilon`."""
    history = _history(
        noise_multiplier,
        sampling,
        num_clients,
        clients_per_round,
        rounds,
        orders,
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
    orders: Iterable[float] | None = None,
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
      orders: Renyi orders, see `epsilon`.

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

    def make_charges(z: float) -> Any:
        noise = [z * share for share in shape] if isinstance(shape, list) else z
        return charges(noise, sampling, num_clients, clients_per_round, rounds)

    return calibration.calibrate(
        make_charges, target_epsilon, given[0], accountant, orders=orders
    )


def max_rounds(
    noise_multiplier: schedules.Schedule,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
    *,
    orders: Iterable[float] | None = None,
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
      orders: Renyi orders, see `epsilon`.
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
            history = accountant_lib.PrivacyAccountant(orders)
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
            orders,
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
        history = accountant_lib.PrivacyAccountant(orders)
        for charge in known[:count]:
            history.add(charge)
        return history

    return _most(history_of_prefix, target, delta, accountant, limit)


def _most(history_of, target, delta, accountant, limit) -> int:
    """Returns how many rounds keep the target, looking near RDP's answer."""

    def most(by, guess):
        return last_true(
            lambda count: history_of(count).epsilon(delta, by) <= target,
            limit,
            guess,
        )

    by_rdp = most("rdp", 1)
    return by_rdp if accountant == "rdp" else most(accountant, by_rdp)


def _max_shuffled_rounds(z, n, m, target, delta, accountant, orders):
    """Whole passes: the first round of a pass costs as much as all of it."""
    per_pass = -(-n // pass_cohorts.checked_size(m, n))
    event = dp_accounting.GaussianDpEvent(_noise(z))

    def history_of(passes):
        history = accountant_lib.PrivacyAccountant(orders)
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


def _history(z, sampling, n, m, rounds, orders):
    history = accountant_lib.PrivacyAccountant(orders)
    for charge, count in charges(z, sampling, n, m, rounds):
        history.add(charge, count)
    return history


def _in_passes(sampling, n, m) -> pass_cohorts.PassCohorts | None:
    return pass_cohorts.PassCohorts(n, m) if sampling == "shuffled" else None


def _noise(z) -> float:
    return _validate.non_negative(noise_multiplier=z)


def _one_charge(z, sampling, n, m, t, in_passes) -> charge_lib.RoundCharge:
    z = _noise(schedules.value_at(z, t, "noise_multiplier"))
    if in_passes is not None:
        place = in_passes.place(t)
    else:
        size = pass_cohorts.checked_size(
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


def last_true(predicate: Callable[[int], bool], limit: int, guess: int = 1) -> int:
    """Returns the largest n <= limit with a falling predicate still true.

    Args:
      predicate: True up to some n >= 0, False from there on; true at 0.
      limit: Where to stop looking.
      guess: Where to begin; near the answer, few calls are made.
    """
    return bracket(predicate, limit, guess)[0]


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
