"""The Gaussian mechanism exactly, and its classic bound.

Throughout, `noise_multiplier` is sigma / sensitivity, so 1 / noise_multiplier
is the mu of Gaussian differential privacy (Dong, Roth & Su 2019).
"""

from __future__ import annotations

import math

from scipy import optimize, special

from tfdp_fl import _validate

_SQRT2 = math.sqrt(2.0)
# More than the roundings of a few operations, and of SciPy's functions.
_ROUNDING = 2.0**-48


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """Returns the exact delta of one Gaussian release at epsilon.

    delta = Phi(mu/2 - eps/mu) - exp(eps) Phi(-mu/2 - eps/mu), mu = 1/z (Balle
    & Wang 2018, theorem 8, https://arxiv.org/abs/1805.06530). It is computed
    from scaled complementary error functions, so nothing overflows at a large
    epsilon and nothing cancels at a small delta.

    Args:
      noise_multiplier: z = sigma / sensitivity, at least 0.
      epsilon: At least 0.

    Returns:
      delta, from 0 to 1; 1.0 without noise.
    """
    z = _noise(noise_multiplier)
    epsilon = _validate.non_negative(epsilon=epsilon)
    return math.exp(_log_delta(z, epsilon))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Returns the smallest epsilon of one Gaussian release at delta.

    Args:
      noise_multiplier: z = sigma / sensitivity, at least 0.
      delta: Between 0 and 1.

    Returns:
      epsilon, rounded up; infinity without noise.
    """
    z = _noise(noise_multiplier)
    log_delta = math.log(_validate.inside_unit_interval(delta=delta))
    if z == 0:
        return math.inf
    if _log_delta(z, 0.0) <= log_delta:
        return 0.0
    mu = 1 / z
    # The tail bound of the privacy loss N(mu^2/2, mu^2) is always enough.
    upper = mu * mu / 2 + mu * math.sqrt(-2 * log_delta)
    if upper == math.inf:  # z below 1e-154.
        return math.inf
    return _root(lambda eps: _log_delta(z, eps) - log_delta, 0.0, upper)


def analytic_noise_multiplier(epsilon: float, delta: float) -> float:
    """Returns the smallest noise multiplier that is (epsilon, delta)-private.

    The analytic Gaussian mechanism (Balle & Wang 2018, algorithm 1). It holds
    for every epsilon and never needs more noise than the classic formula.

    Args:
      epsilon: Above 0.
      delta: Between 0 and 1.

    Returns:
      z = sigma / sensitivity, rounded up.

    Raises:
      ValueError: If an argument is not allowed, or no finite noise is enough.
    """
    epsilon = _validate.positive(epsilon=epsilon)
    delta = _validate.inside_unit_interval(delta=delta)
    log_delta = math.log(delta)
    # With s = -log delta, mu = sqrt(2s + 2eps) - sqrt(2s) makes the tail bound
    # of the privacy loss meet epsilon, so this much noise always suffices.
    tail = math.sqrt(-2 * log_delta)
    # (sqrt(a^2 + b) - a) = b / (sqrt(a^2 + b) + a), which does not cancel.
    upper = math.hypot(tail, _SQRT2 * math.sqrt(epsilon)) / 2 + tail / 2
    # At epsilon = 0, delta = 2 Phi(mu / 2) - 1 <= mu / sqrt(2 pi): enough, too.
    upper = min(upper / epsilon, 1 / delta)
    while upper < math.inf and _log_delta(upper, epsilon) > log_delta:
        upper *= 2  # By what is rounded up.
    if upper == math.inf:
        raise ValueError(
            "epsilon and delta must leave the noise multiplier below 1.8e308, "
            f"got {epsilon!r} and {delta!r}."
        )
    lower = upper / 2
    while _log_delta(lower, epsilon) <= log_delta:
        upper, lower = lower, lower / 2
    log_z = _root(
        lambda log_z: _log_delta(math.exp(log_z), epsilon) - log_delta,
        math.log(lower),
        math.log(upper),
    )
    return math.exp(log_z) * (1 + 1e-15)


def classic_noise_multiplier(
    epsilon: float, delta: float, allow_epsilon_above_one: bool = False
) -> float:
    """Returns sqrt(2 ln(1.25/delta)) / epsilon, the textbook calibration.

    Dwork & Roth 2014, theorem A.1. Its proof holds for epsilon < 1 only; from
    1 on the formula can give too little noise, so it has to be asked for.

    Args:
      epsilon: Above 0; below 1 unless `allow_epsilon_above_one`.
      delta: Between 0 and 1.
      allow_epsilon_above_one: Compute it all the same, as published systems
        do. The result may then not be (epsilon, delta)-private.

    Returns:
      z = sigma / sensitivity.

    Raises:
      ValueError: If epsilon is 1 or more and that was not allowed.
    """
    epsilon = _validate.positive(epsilon=epsilon)
    delta = _validate.inside_unit_interval(delta=delta)
    if epsilon >= 1 and not allow_epsilon_above_one:
        raise ValueError(
            "epsilon must be below 1 for the classic Gaussian formula, got "
            f"{epsilon!r}; use the analytic one, or ask for the classic one "
            "by allow_epsilon_above_one=True."
        )
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def _noise(noise_multiplier: float) -> float:
    if noise_multiplier == math.inf:
        return math.inf
    return _validate.non_negative(noise_multiplier=noise_multiplier)


def _log_delta(z: float, epsilon: float) -> float:
    """Returns log delta, rounded up; -inf where it underflows even so.

    delta = Phi(a) - exp(eps) Phi(b), a = mu / 2 - eps / mu, b = a - mu. Much
    noise leaves of it the last digits of two numbers that are nearly equal:
    what their roundings may amount to is added.
    """
    if z == math.inf:
        return -math.inf
    mu = 1 / z if z else math.inf
    if mu == math.inf:
        return 0.0
    a = mu / 2 - epsilon * z
    if a == -math.inf:
        return -math.inf
    b = -mu / 2 - epsilon * z
    # exp(eps) Phi(b) = exp(-a^2/2) erfcx(-b/sqrt 2) / 2, as b^2 = a^2 + 2 eps.
    second = 0.5 * special.erfcx(-b / _SQRT2)
    # In units of exp(-a^2/2): a is off by |b| 2^-52 at most. This moves Phi(a)
    # by 0.4 of it, and exp(-a^2/2) `second`, at most 0.4 / |b| of it, by less.
    rounding = _ROUNDING * (1 + abs(b)) / 2
    if a > 0:
        density = math.exp(-a * a / 2)
        delta = special.ndtr(a) - density * (second - rounding) + _ROUNDING
        return math.log(min(delta, 1.0))
    difference = 0.5 * special.erfcx(-a / _SQRT2) - second + rounding
    return min(0.0, -a * a / 2 * (1 - _ROUNDING) + math.log(difference))


def _root(function, low: float, high: float) -> float:
    """Returns the least point found where a falling function is <= 0."""
    if function(high) > 0:  # Rounding at the bracket's own end.
        high += abs(high) * 1e-9
    if function(low) <= 0:
        return low
    # -inf beyond the underflow would stop brentq: any negative number will do.
    x = optimize.brentq(
        lambda v: max(function(v), -1e6), low, high, xtol=1e-13, rtol=1e-14
    )
    step = 1e-14 * max(1.0, abs(x))
    while function(x) > 0:
        x, step = x + step, 2 * step
    return min(x, high)
