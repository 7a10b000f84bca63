"""Formats an epsilon, a delta, and the factor exp(epsilon), always rounded up.

Readers must be able to rely on a printed figure, so the whole package formats these
numbers here.
"""

from __future__ import annotations

import decimal
import math


def format_up(value: float, digits: int = 4) -> str:
    """Returns a number in decimals, never less than its value.

    Args:
      value: An epsilon, a delta or a factor, at least 0.
      digits: The number of significant digits to round up to. More are used if a number
        below 1 would otherwise be printed as 1.
    """
    if not value or not math.isfinite(value):
        return f"{value:g}"
    # Python's repr is read back as the same float, so 1e-05 does not become 1.001e-05.
    exact = decimal.Decimal(repr(float(value)))
    place = exact.adjusted() - digits + 1
    rounded = exact.quantize(decimal.Decimal((0, (1,), place)), decimal.ROUND_CEILING)
    if value < 1 <= rounded:
        return format_up(value, digits + 4)
    rounded = rounded.normalize()
    if -5 < rounded.adjusted() < 16:
        return f"{rounded:f}"
    mantissa, exponent = f"{rounded:e}".split("e")
    return f"{mantissa}e{int(exponent):+03d}"


def format_factor_up(epsilon: float) -> str:
    """Returns exp(epsilon) in decimals, never less than its value."""
    if epsilon >= 700:
        return f"exp({format_up(epsilon)})"
    return format_up(math.exp(epsilon) * (1 + 1e-14), 3)


def round_up_for_bar(value: float) -> float:
    """Returns a number that a Keras progress bar will not round below `value`.

    The bar shows four decimals, or five digits of a number up to 0.001.
    """
    if not 1e-3 < value < 1e12:
        return float(format_up(value, 5))
    exact = decimal.Decimal(repr(float(value)))
    return float(exact.quantize(decimal.Decimal("1e-4"), decimal.ROUND_CEILING))
