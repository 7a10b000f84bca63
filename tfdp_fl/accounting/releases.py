"""What one release costs, by dp-accounting.

A Gaussian's exact conversions, rounded up. Throughout, `noise_multiplier` is sigma /
sensitivity, so 1 / noise_multiplier is the mu of Gaussian differential privacy (Dong,
Roth & Su 2019).

Of any event, its Renyi curve and its privacy loss distribution, kept for the next
round. dp-accounting computes one order after the other, in Python: up to a second for
all orders of one kind of round. So a curve is computed once, only near the orders
that give the least epsilon; rounds are multiples of it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import special, stats

from tfdp_fl import _validate
from tfdp_fl.accounting import known_selection, search

# Beyond, an epsilon is above 1e5 or below 1e-5 for any use, and floating point
# fails: there, noise is taken for less than it is.
LEAST_NOISE, MOST_NOISE = 1e-3, 1e6
# Above this, a tail bound of the privacy loss says how much noise is enough.
_LARGEST_EPSILON = 1e5
# More than the roundings of a few operations, and of SciPy's functions.
_ROUNDING_OF_DELTA = 2.0**-46

# Integers to 8192 for a small epsilon; every half to 32, and orders near 1 for a
# large one. Under sampling the best order is sharp, so neighbours differ by about
# 5 % in (order - 1). dp-accounting takes no order up to 1.01 for an epsilon.
_ORDERS = np.array(
    sorted(
        {
            *map(float, rdp_privacy_accountant.DEFAULT_RDP_ORDERS),
            *(1 + np.geomspace(1e-3, 10, 190)[48:]),
            *(x / 2 for x in range(22, 64)),
            *np.round(np.geomspace(64, 1024, 72)),
            *np.round(np.geomspace(1024, 8192, 12)),
        }
    )
)
_INTEGERS = _ORDERS[np.floor(_ORDERS) == _ORDERS].astype(int)
# For a cohort of a fixed size an order takes its square of steps.
_INTEGERS_OF_FIXED_SIZE = np.array([*_INTEGERS[:64], *_INTEGERS[65::3], 8192])
# Most curves are needed near one order: they are computed in these parts.
PARTS = np.split(
    _ORDERS,
    np.searchsorted(_ORDERS, [1.3, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]),
)
FIRST_PART = 4  # From order 8.
# What rounding may hide of a divergence that is next to nothing.
_ROUNDING = 1e-15
_TAIL = 13.0  # Standard deviations; exp(-13^2/2) = 2e-37.
_MAX_GRID_POINTS = 20_000

# PLD keeps a probability for every multiple of this up to the largest loss.
_PLD_INTERVAL = 1e-4
_PLD_MAX_CELLS = 2_000_000
# Where a bound that is a little larger will do, ten times as fast.
_PLD_COARSE_INTERVAL = 1e-3


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """Returns the delta of one Gaussian release at epsilon, rounded up.

    delta = Phi(mu/2 - eps/mu) - exp(eps) Phi(-mu/2 - eps/mu), mu = 1/z (Balle
    & Wang 2018, theorem 8, https://arxiv.org/abs/1805.06530).

    Args:
      noise_multiplier: z = sigma / sensitivity, at least 0; above 1e6 it is
        taken for that, and below 1e-3 for none.
      epsilon: At least 0.

    Returns:
      delta, from 0 to 1; 1.0 without noise.
    """
    z = _noise(noise_multiplier)
    epsilon = _validate.non_negative(epsilon=epsilon)
    if z == math.inf:
        return 0.0
    if z < LEAST_NOISE:
        return 1.0
    first = float(stats.norm.logcdf(0.5 / z - epsilon * z))
    if first == -math.inf:
        return 0.0
    second = epsilon + float(stats.norm.logcdf(-0.5 / z - epsilon * z))
    rounding = _ROUNDING_OF_DELTA * (1 + epsilon - first)
    return min(1.0, -math.exp(first + rounding) * math.expm1(second - first - rounding))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Returns the smallest epsilon of one Gaussian release at delta, rounded up.

    Args:
      noise_multiplier: z = sigma / sensitivity, at least 0; above 1e6 it is
        taken for that, and below 1e-3 for none.
      delta: Between 0 and 1.

    Returns:
      epsilon; infinity without noise.
    """
    z = _noise(noise_multiplier)
    delta = _validate.inside_unit_interval(delta=delta)
    if z < LEAST_NOISE:
        return math.inf
    if z == math.inf:
        return 0.0
    z = min(z, MOST_NOISE)
    with np.errstate(divide="ignore"):
        epsilon, step = float(dp_accounting.get_epsilon_gaussian(z, delta)), 1e-12
    while gaussian_delta(z, epsilon) > delta:
        epsilon, step = epsilon + step, 2 * step
    return epsilon


def epsilon_of_mu_squared(mu_squared: float, delta: float) -> float:
    """Returns the exact epsilon of Gaussian releases whose mu^2 add up.

    Args:
      mu_squared: Sum of (sensitivity / sigma)^2; 0 for nothing released,
        infinity for a release without noise.
      delta: Between 0 and 1.

    Raises:
      ValueError: mu_squared is negative or NaN.
    """
    if mu_squared != math.inf:
        _validate.non_negative(mu_squared=mu_squared)
    return gaussian_epsilon(noise_of_mu_squared(mu_squared), delta)


def noise_of_mu_squared(mu_squared: float) -> float:
    """Returns the noise multiplier of the one Gaussian that several are."""
    return mu_squared**-0.5 if mu_squared else math.inf


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
      ValueError: If an argument is not allowed, or a noise multiplier of 1e6 is
        not enough.
    """
    epsilon = _validate.positive(epsilon=epsilon)
    delta = _validate.inside_unit_interval(delta=delta)
    if epsilon > _LARGEST_EPSILON:  # A tail bound of the privacy loss.
        tail = math.sqrt(-2 * math.log(delta))
        mu = math.hypot(tail, math.sqrt(2) * math.sqrt(epsilon)) - tail
        return (1 + 1e-12) / mu
    if gaussian_delta(MOST_NOISE, epsilon) > delta:
        raise ValueError(
            f"epsilon and delta must need a noise multiplier of at most "
            f"{MOST_NOISE:g}, got {epsilon!r} and {delta!r}."
        )
    with np.errstate(divide="ignore"):
        z, step = float(dp_accounting.get_sigma_gaussian(epsilon, delta)), 1e-12
    while gaussian_delta(z, epsilon) > delta:
        z, step = z * (1 + step), 2 * step
    return z


def _noise(noise_multiplier: float) -> float:
    if noise_multiplier == math.inf:
        return math.inf
    return _validate.non_negative(noise_multiplier=noise_multiplier)


@functools.lru_cache(maxsize=8192)
def curve(
    event: dp_accounting.DpEvent,
    relation: dp_accounting.NeighboringRelation,
    part: int,
) -> np.ndarray:
    """Returns an event's Renyi divergence at each of `PARTS[part]`.

    That of `dp_accounting.rdp.RdpAccountant`. A sampled Gaussian is computed at
    integer orders. Between them log A = (order - 1) divergence is convex (Wang,
    Balle & Kasiviswanathan 2019, corollary 10), which bounds the others.

    Raises:
      ValueError: dp-accounting knows no bound for the event.
    """
    alpha = PARTS[part]
    if isinstance(event, search.BestOfTrialsDpEvent):
        return _best_of_trials(event, relation)[part]
    if isinstance(event, known_selection.KnownSelectionDpEvent):
        return known_selection.renyi_divergence(event, alpha)
    if _is_sampled_gaussian(event):
        fixed_size = isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent)
        integers = _INTEGERS_OF_FIXED_SIZE if fixed_size else _INTEGERS
        first = max(0, np.searchsorted(integers, alpha[0], "right") - 1)
        integers = integers[first : np.searchsorted(integers, alpha[-1]) + 1]
        log_a = (integers - 1) * _dp_accountings(event, relation, integers)
        log_a = np.interp(alpha, [1, *integers], [0, *log_a])
        if not fixed_size:
            log_a = _with_fractional_orders(log_a, alpha, event)
        # Sampling never costs more than taking everybody.
        everybody = alpha / (2 * event.event.noise_multiplier**2)
        rdp = np.minimum(log_a / (alpha - 1), everybody)
    else:
        rdp = _dp_accountings(event, relation, alpha)
    rdp = np.maximum(rdp, _ROUNDING)
    rdp.setflags(write=False)
    return rdp


@functools.lru_cache(maxsize=256)
def _best_of_trials(
    event: search.BestOfTrialsDpEvent, relation: dp_accounting.NeighboringRelation
) -> list[np.ndarray]:
    """Returns the curve of the best trial, at each of `PARTS`.

    Theorem 6 of Papernot & Steinke (2022) for a Poisson number of trials, theorem 2
    for a truncated negative binomial one. What is drawn independently of the data,
    and what differs by client, costs at most the largest at each order.
    """
    parts = range(len(PARTS))
    trials = [
        np.concatenate([curve_of_trial(each, relation, part) for part in parts])
        for each in event.events
    ]
    best = rdp_privacy_accountant._compute_rdp_repeat_and_select(
        _ORDERS, np.max(trials, axis=0), event.mean, event.shape
    )
    return np.split(best, np.cumsum([len(part) for part in PARTS])[:-1])


def curve_of_trial(
    event: dp_accounting.DpEvent,
    relation: dp_accounting.NeighboringRelation,
    part: int,
) -> np.ndarray:
    """Returns the curve of a trial, of which each kind of round is known by itself."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return event.count * curve_of_trial(event.event, relation, part)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [curve_of_trial(each, relation, part) for each in event.events]
        return np.sum([np.zeros(len(PARTS[part])), *parts], axis=0)
    return curve(event, relation, part)


def _is_sampled_gaussian(event: dp_accounting.DpEvent) -> bool:
    sampled = (
        dp_accounting.PoissonSampledDpEvent,
        dp_accounting.SampledWithoutReplacementDpEvent,
    )
    return isinstance(event, sampled) and (
        isinstance(event.event, dp_accounting.GaussianDpEvent)
        and event.event.noise_multiplier > 0
    )


def _dp_accountings(
    event: dp_accounting.DpEvent,
    relation: dp_accounting.NeighboringRelation,
    orders: np.ndarray,
) -> np.ndarray:
    accountant = dp_accounting.rdp.RdpAccountant(orders, relation)
    return _composed(accountant, event, other="pld")._rdp


def _composed(
    accountant: dp_accounting.PrivacyAccountant,
    event: dp_accounting.DpEvent,
    other: str,
) -> Any:
    try:
        return accountant.compose(event)
    except dp_accounting.UnsupportedEventError as error:
        raise ValueError(
            f"event {event!r} has no bound by {type(accountant).__name__}; "
            f"accountant={other!r} may have one. {error}"
        ) from error


def _with_fractional_orders(
    log_a: np.ndarray, orders: np.ndarray, event: dp_accounting.PoissonSampledDpEvent
) -> np.ndarray:
    """Returns log A with its fractional orders as they are, not as bounded.

    dp-accounting's series for them does not converge below an order of about 2.4
    (it warns, and drops the order), and the bound costs up to a tenth of epsilon.
    A = E_x~N(0, z^2) [((1 - q) + q exp((2x - 1) / (2 z^2)))^order] (Mironov,
    Talwar & Zhang 2019, https://arxiv.org/abs/1908.10530, section 3.3) by the
    trapezoidal rule, which converges exponentially for an analytic integrand.
    """
    q, z = event.sampling_probability, event.event.noise_multiplier
    fractional = np.floor(orders) != orders
    if not fractional.any():
        return log_a
    alpha = orders[fractional, None]
    step = min(z / 8, 0.4 * z * z)
    if not 0 < q < 1 or (alpha[-1, 0] + 2 * _TAIL * z) / step > _MAX_GRID_POINTS:
        return log_a  # Too little noise: the bound does.
    x = np.arange(-_TAIL * z, alpha[-1, 0] + _TAIL * z, step)
    weight = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))
    density = math.log(step / (z * math.sqrt(2 * math.pi))) - x * x / (2 * z * z)
    exact = log_a.copy()
    exact[fractional] = special.logsumexp(alpha * weight + density, axis=1)
    return exact


def pld_interval(largest_loss: float, coarse: bool) -> float:
    """Returns the width of a PLD's cells; wide ones keep a large loss computable."""
    interval = _PLD_COARSE_INTERVAL if coarse else _PLD_INTERVAL
    if math.isinf(largest_loss):
        return interval
    return max(interval, largest_loss / _PLD_MAX_CELLS)


@functools.lru_cache(maxsize=32)
def event_pld(
    event: dp_accounting.DpEvent,
    relation: dp_accounting.NeighboringRelation,
    interval: float,
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns one event's privacy loss distribution.

    Making it takes most of the time of a PLD epsilon, self-composition little;
    kept, it serves a whole curve of epsilon against rounds.
    """
    if isinstance(event, known_selection.KnownSelectionDpEvent):
        return known_selection.privacy_loss(event, interval)
    accountant = _composed(pld.PLDAccountant(relation, interval), event, other="rdp")
    if accountant.get_epsilon(0.5) == math.inf:
        # No privacy; the accountant keeps that beside the distribution.
        return privacy_loss_distribution.from_privacy_parameters(
            pld_common.DifferentialPrivacyParameters(0.0, 1.0), interval
        )
    return accountant._pld
