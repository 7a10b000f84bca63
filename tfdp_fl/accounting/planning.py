"""Planning before a run: its cost, the possible rounds, and the necessary noise."""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import dp_accounting
from scipy import optimize

from tfdp_fl import _validate, schedules
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting.accountant import Charges, PrivacyAccountant
from tfdp_fl.accounting.rounding import format_up
from tfdp_fl.terms import Sampling

# A limit beyond any real training; without it, a free mechanism would never stop.
_MAX_ROUNDS = 1 << 40
_MAX_SCHEDULED_ROUNDS = 1_000_000
# PLD takes seconds for this many, and is looser than RDP, by rounding, long before.
_MAX_PLD_ROUNDS = 10_000_000
# For the noise multiplier and epsilon; within the promised 0.1 %.
_TOLERANCE = 8e-4
_MIN_NOISE, _MAX_NOISE = 1e-6, 1e9
# Seconds after which a calibration reports its progress.
_SILENT_SECONDS = 2.0


def plan_charges(
    noise_multiplier: schedules.Schedule,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    rounds: int,
) -> Iterator[tuple[charge_lib.RoundCharge, int]]:
    """Yields the charges of planned rounds with counts; see `epsilon`."""
    _validate.one_of(charge_lib.SAMPLINGS, sampling=sampling)
    rounds = _validate.non_negative_integer(rounds=rounds)
    cohorts = charge_lib.PassCohorts(num_clients, clients_per_round)
    passes = charge_lib.AllocationPasses(num_clients, clients_per_round)
    constant = all(map(schedules.is_constant, (noise_multiplier, clients_per_round)))
    for t in range(min(rounds, 1) if constant else rounds):
        z = schedules.value_at(noise_multiplier, t, "noise_multiplier")
        event = dp_accounting.GaussianDpEvent(
            _validate.non_negative(noise_multiplier=z)
        )
        count = rounds if constant else 1
        if sampling == Sampling.SHUFFLED:
            fields: dict[str, Any] = {**cohorts.pass_fields(t), "partition": "planned"}
            # The first round of a pass costs as much as the whole pass.
            count = -(-count // -(-num_clients // fields["clients_per_round"]))
        elif sampling == Sampling.RANDOM_ALLOCATION:
            fields = passes.pass_fields(t)
            size, pass_start = fields["clients_per_round"], fields["pass_index"]
            z_of_pass = schedules.value_at(
                noise_multiplier, pass_start, "noise_multiplier"
            )
            charge_lib.require_constant_noise(t, z, pass_start, z_of_pass)
            if t > pass_start:  # Its pass was charged in full with the first round.
                continue
            fields = {"clients_per_round": size}
            count = -(-count // charge_lib.rounds_per_pass(num_clients, size))
        else:
            size = schedules.value_at(clients_per_round, t, "clients_per_round")
            size = charge_lib.check_size(size, num_clients, fractional=True)
            fields = {"clients_per_round": size}
        charge = charge_lib.RoundCharge(
            sampling=sampling, num_clients=num_clients, event=event, **fields
        )
        yield charge, count


def epsilon(
    noise_multiplier: schedules.Schedule,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    rounds: int,
    delta: float,
    accountant: str = "rdp",
) -> float:
    """Returns epsilon after a number of rounds, each a clipped sum with noise.

    Args:
      noise_multiplier: z, noise stddev on the sum of clipped updates over the
        clip norm: a constant, one value per round, or a callable of the
        0-based round. 0: no privacy, epsilon is infinite.
      sampling: "poisson", "fixed_size", "random_allocation", "shuffled" or
        "cyclic".
      num_clients: The number of clients, N.
      clients_per_round: m, at most N: a constant, sequence or callable.
      rounds: T, at least 0.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld".
    """
    plan = noise_multiplier, sampling, num_clients, clients_per_round, rounds
    return PrivacyAccountant(plan_charges(*plan)).epsilon(delta, accountant)


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
    plan = noise_multiplier, sampling, num_clients, clients_per_round, rounds
    return PrivacyAccountant(plan_charges(*plan)).delta(epsilon, accountant)


def max_rounds(
    noise_multiplier: schedules.Schedule,
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
) -> int:
    """Returns how many rounds stay within the target; 0 if not even one does.

    If a schedule is a sequence, the result is at most its length; if it is a callable,
    at most a million; by "pld", at most ten million.

    Args:
      noise_multiplier: The noise multiplier, z: a constant or a schedule.
      sampling: How clients are drawn, such as "poisson".
      num_clients: The number of clients, N.
      clients_per_round: The expected number of clients in a round, m: a constant
        or a schedule.
      target_epsilon: The largest epsilon that the rounds may cost, above 0.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld".
    """
    target = _validate.positive(target_epsilon=target_epsilon)
    # Evaluate random schedules only once; sequences end.
    z, m = schedules.fix(noise_multiplier), schedules.fix(clients_per_round)
    lengths = [len(schedule) for schedule in (z, m) if hasattr(schedule, "__len__")]
    limit = min([_MAX_SCHEDULED_ROUNDS, *lengths])
    if schedules.is_constant(z) and schedules.is_constant(m):
        limit = _MAX_ROUNDS

    def affordable_rounds(by: str, guess: int, limit: int) -> int:
        def cost(rounds: int) -> float:
            return epsilon(z, sampling, num_clients, m, rounds, delta, by)

        return largest_affordable(cost, target, limit, guess)

    by_rdp = affordable_rounds("rdp", 1, limit)
    if accountant == "rdp":
        return by_rdp
    return affordable_rounds(accountant, max(by_rdp, 1), min(limit, _MAX_PLD_ROUNDS))


def largest_affordable(
    cost: Callable[[int], float], target: float, limit: int, guess: int
) -> int:
    """Returns the largest number of rounds, up to `limit`, that stays within a target.

    Args:
      cost: Returns the epsilon of a number of rounds; more rounds must not cost less.
      target: The largest epsilon.
      limit: The most rounds, at least 0.
      guess: The number to try first; it is doubled as long as it is affordable.
    """
    high = min(guess, limit)
    while cost(high) <= target:
        if high == limit:
            return limit
        high = min(2 * high, limit)
    return bisect.bisect_right(range(1, high), target, key=cost)


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
) -> float:
    """Returns the smallest noise multiplier that meets the target.

    Its epsilon is never above the target, and it is within 0.1 % of the exact solution.

    Args:
      target_epsilon: The largest epsilon that the rounds may cost, above 0.
      sampling: How clients are drawn, such as "poisson".
      num_clients: The number of clients, N.
      clients_per_round: The expected number of clients in a round, m: a constant,
        a sequence, or a callable of the round.
      rounds: The number of rounds, T; at least 1.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld".
      target_delta: Another name for `delta`, as in `make_private`; give exactly one of
        the two.

    Raises:
      ValueError: If no noise meets the target, or arguments are wrong.
    """
    given = [value for value in (delta, target_delta) if value is not None]
    if len(given) != 1:
        raise ValueError(
            "delta or its other name target_delta must be given, not both, "
            f"got delta={delta!r} and target_delta={target_delta!r}."
        )
    rounds = _validate.positive_integer(rounds=rounds)
    return calibrate(
        lambda z: plan_charges(z, sampling, num_clients, clients_per_round, rounds),
        target_epsilon,
        given[0],
        accountant,
    )


def calibrate(
    make_charges: Callable[[float], Charges],
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
    *,
    upper: float | None = None,
) -> float:
    """Returns the smallest noise multiplier that meets the target.

    The result is rounded up: its epsilon is never above the target, and both epsilon
    and the noise are within 0.1 % of the exact solution.

    Args:
      make_charges: Returns, for a noise multiplier above 0, the charges of the whole
        run, as (charge, count) pairs or single charges. More noise must not
        cost more.
      target_epsilon: The largest epsilon that the rounds may cost, above 0.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld".
      upper: The largest noise multiplier that `make_charges` accepts; None: no limit.

    Raises:
      ValueError: If no noise multiplier (up to `upper`) meets the target.
    """
    target = _validate.positive(target_epsilon=target_epsilon)
    limit = _MAX_NOISE if upper is None else _validate.positive(upper=upper)

    start_time = time.monotonic()

    def epsilon(z: float, by: str, coarse: bool = False) -> float:
        result = PrivacyAccountant(make_charges(z)).epsilon(delta, by, coarse)
        if time.monotonic() - start_time > _SILENT_SECONDS:
            line = f"Calibrating: noise multiplier {z:.6g}, epsilon {format_up(result)}"
            print(line, file=sys.stderr, flush=True)
        return result

    def solve(
        start: float,
        by: str,
        factor: float = 1.1,
        aim: float = target,
        slack: float = 0,
    ) -> float:
        cost = functools.partial(epsilon, by=by, coarse=slack > 0)
        return _solve(cost, aim, start, factor, limit, delta, slack)

    z = min(1.0, limit)
    if accountant == "pld":
        # RDP is fast, except for searches. Its noise is never much below PLD's, and
        # coarse PLD is close to PLD.
        is_search = PrivacyAccountant(make_charges(z)).is_one_search
        with contextlib.suppress(ValueError):
            z = z if is_search else solve(z, "rdp")
            # PLD's noise is about a tenth below RDP's. Over many rounds, the coarse
            # bound is a few per cent larger, which the aim corrects for.
            aim = target
            for factor in (1.15, 1.01, 1.01, 1.01):
                z = solve(z, "pld", factor, aim, _TOLERANCE / 3)
                reached = epsilon(z, "pld")
                if target * (1 - _TOLERANCE) <= reached <= target:
                    return z
                if not reached:  # The target is 0 up to rounding.
                    break
                aim *= target * (1 - _TOLERANCE / 4) / reached
    return solve(z, accountant)


def _solve(
    epsilon: Callable[[float], float],
    target: float,
    start: float,
    factor: float,
    limit: float,
    delta: float,
    slack: float,
) -> float:
    """Brackets the target, finds the root with SciPy, and rounds up.

    An epsilon below the target by a fraction of at most `slack` is sufficient.
    """
    epsilon = functools.cache(epsilon)
    # Sums in a different order may differ in their last digits.
    threshold = target * (1 - 1e-9)

    def excess(z: float) -> float:
        difference = min(epsilon(z), 1e12) - threshold
        return 0.0 if -slack * threshold <= difference <= 0 else difference

    low = high = start
    while epsilon(high) > threshold:
        if high >= limit:
            raise ValueError(
                f"target_epsilon={format_up(target)} at delta={format_up(delta)} "
                f"cannot be met by any noise multiplier up to {limit:.4g} (epsilon is "
                f"{format_up(epsilon(high))} there)."
            )
        low, high, factor = high, min(limit, high * factor), factor * factor
    while epsilon(low) <= threshold:
        if low < _MIN_NOISE:
            return low  # Epsilon does not depend on the noise.
        low, high, factor = low / factor, low, factor * factor
    step = low * 1e-5
    z = optimize.brentq(excess, low, high, xtol=step)
    while epsilon(z) > threshold:
        z = min(z + step, high)
    return float(z)
