"""The smallest noise that keeps a target epsilon."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable

from tfdp_fl import _validate
from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import charge as charge_lib

# Of the noise multiplier and of epsilon: inside the promised 0.1 %.
_TOLERANCE = 8e-4
_SMALLEST = 1e-6
_LARGEST = 1e9

Charges = Iterable["charge_lib.RoundCharge | tuple[charge_lib.RoundCharge, int]"]


def calibrate(
    make_charges: Callable[[float], Charges],
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
    *,
    upper: float | None = None,
    orders: Iterable[float] | None = None,
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
      orders: Renyi orders, see `PrivacyAccountant`.

    Raises:
      ValueError: If no noise multiplier (up to `upper`) keeps the target.
    """
    target = _validate.positive(target_epsilon=target_epsilon)
    delta = _validate.inside_unit_interval(delta=delta)
    _validate.one_of(charge_lib.ACCOUNTANTS, accountant=accountant)
    limit = _LARGEST if upper is None else _validate.positive(upper=upper)
    if orders is not None:
        orders = tuple(orders)

    def epsilon(noise_multiplier: float, by: str, coarse: bool = False) -> float:
        history = accountant_lib.PrivacyAccountant(orders)
        for item in make_charges(noise_multiplier):
            charge, count = item if isinstance(item, tuple) else (item, 1)
            history.add(charge, count)
        return history.epsilon(delta, by, coarse)

    start = min(1.0, limit)
    if accountant == "pld":
        # RDP is cheap and never much below PLD's noise: a good first guess.
        with contextlib.suppress(ValueError):
            start = _solve(lambda z: epsilon(z, "rdp"), target, start, limit, delta)
        with contextlib.suppress(ValueError):
            start = _solve(
                lambda z: epsilon(z, "pld", coarse=True),
                target,
                start,
                limit,
                delta,
            )
            exact = epsilon(start, "pld")
            if target * (1 - _TOLERANCE) <= exact <= target:
                return start
    return _solve(lambda z: epsilon(z, accountant), target, start, limit, delta)


def _solve(
    epsilon: Callable[[float], float],
    target: float,
    start: float,
    limit: float,
    delta: float,
) -> float:
    """Brackets the target and closes in by secants, then by halves."""
    low, high = (0.0, math.inf), (math.inf, 0.0)  # (noise, epsilon)
    z, factor = start, 1.1 if start != min(1.0, limit) else 2.0
    while low[0] == 0 or high[0] == math.inf:
        value = epsilon(z)
        if value <= target:
            high = (z, value)
            if z < _SMALLEST:
                return z  # The noise makes no difference.
            z /= factor
        else:
            low = (z, value)
            if z >= limit:
                raise ValueError(
                    f"target_epsilon={target:g} at delta={delta:g} cannot be "
                    f"kept by any noise multiplier up to {limit:.4g} (epsilon "
                    f"is {value:.4g} there)."
                )
            z = min(limit, z * factor)
        factor *= factor
    for step in range(200):
        gap = math.log(high[0] / low[0])
        if gap < _TOLERANCE and (high[1] >= target * (1 - _TOLERANCE) or gap < 1e-9):
            break
        share = 0.5
        if step % 4 != 3 and math.isfinite(low[1]) and high[1] > 0:
            slope = math.log(low[1] / high[1])
            share = math.log(low[1] / target) / slope
            # Aim at one side of the root by turns, so that both ends close in.
            nudge = 0.25 * _TOLERANCE / gap
            share += nudge if step % 2 == 0 else -nudge
            edge = min(0.05, 2 * nudge)
            share = min(max(share, edge), 1 - edge)
        z = low[0] * math.exp(gap * share)
        value = epsilon(z)
        if value <= target:
            high = (z, value)
        else:
            low = (z, value)
    return high[0]
